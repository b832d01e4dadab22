"""The kernels in the order in which they are checked: the simplest first, and before the kernels that build on them."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS_OF = {9: "sm90", 10: "sm100"}
"""Major compute capability -> the implementations for it in `dsv4_kernels.ops`."""


@dataclass(frozen=True)
class Kernel:
    """One row of the page."""

    name: str
    tests: tuple[str, ...] = ()
    """Arguments of pytest: test files below `tests/kernels`, which run with `-m gpu`."""
    cases: tuple[str, ...] = ()
    """Names of `tests/lib/ops/emulated_results.py`."""
    least_gpus: int = 1
    minutes: float = 10.0
    """Time limit of the tests; a case has CASE_SECONDS."""


CASE_SECONDS = 180.0
"""Time limit of a case: importing, compiling a few kernels, and running them."""

KERNELS = (
    Kernel("quantiser", cases=("fp8_quantise",)),
    Kernel(
        "norm and RoPE",
        ("rope/test_rope_norm_kernels.py",),
        ("inverse_rope", "rms_norm", "rms_norm_fp8"),
    ),
    Kernel(
        "router and SwiGLU",
        ("moe/test_router_moe_kernels.py",),
        ("route_topk", "route_hash", "swiglu", "swiglu_fp8"),
    ),
    Kernel("row numbers of a step", ("step_mapping/test_step_mapping.py",), ("step_mapping",)),
    Kernel("unpacking of pages", ("unpack/test_unpack.py",), ("unpack_pages",)),
    Kernel("window rows", ("norm_rope_store/test_norm_rope_store.py",), ("norm_rope_store",)),
    Kernel("compressor", ("compressor/test_compressor_store_on_gpu.py",), ("compress_store",)),
    Kernel(
        "hyper-connections",
        (
            "hyper_connection/test_hyper_connection_gpu.py",
            "hyper_connection/test_boundary_of_experts.py",
        ),
        ("hc_boundary",),
    ),
    Kernel("indexer", ("indexer/test_indexer_gpu.py",), ("index_topk", "index_topk_prefill")),
    Kernel(
        "products in bf16",
        ("linear/test_linear.py", "linear/test_linear_gpu.py"),
        ("linear_fp32", "grouped_linear"),
    ),
    Kernel(
        "products in FP8",
        ("linear/test_linear_fp8.py", "linear/test_linear_fp8_sm100.py", "linear/test_fp8_weight_gpu.py"),
        ("linear_fp8", "wo_a_fp8"),
    ),
    Kernel(
        "experts, MXFP4",
        (
            "moe/test_experts_sm90.py",
            "moe/test_experts_sm90_gather.py",
            "moe/test_experts_sm90_few.py",
            "moe/test_experts_sm100.py",
        ),
        ("mxfp4_experts",),
    ),
    Kernel("experts, NVFP4", ("moe/test_nvfp4_experts_sm100.py",), ("nvfp4_experts",)),
    Kernel("attention", ("sparse_attention/test_sparse_attention_gpu.py",), ("attention",), minutes=25),
    Kernel("launches that begin early", ("test_dependent_launch.py",)),
    Kernel("joint launches", ("test_joint_launch.py",)),
    Kernel("attention beside other kernels", ("sparse_attention/test_side_by_side.py",), minutes=15),
    Kernel("sums over ranks", ("all_reduce/test_all_reduce_gpu.py",), least_gpus=2, minutes=15),
)
