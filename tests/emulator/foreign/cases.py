"""The third-party programs of the suite: all known to be right on B200, those for sm_90a on H200.

DSV4_FOREIGN_KERNELS names a folder with checkouts `cutlass`, `flash-attention` and `FlashMLA`. The
sources are never copied; a case whose file is absent is skipped with that reason.
"""

import os
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "DSV4_FOREIGN_KERNELS"
CUTE = "cutlass/examples/python/CuTeDSL/cute/blackwell"
PRIMITIVES = "cutlass/examples/python/CuTeDSL/experimental/primitives"


@dataclass(frozen=True)
class Case:
    name: str
    program: str  # relative to the folder; the checkout for a runner of ours
    arguments: str = ""
    runner: str = "run_program.py"
    quick: bool = False  # part of `make test`
    skip: str = ""  # why the program cannot run here, whatever the emulator does
    arch: str = "sm_100a"

    def unavailable(self) -> str:
        """The reason for which this case cannot run, or an empty string."""
        if self.skip:
            return self.skip
        if ENVIRONMENT_VARIABLE not in os.environ:
            return f"{ENVIRONMENT_VARIABLE} is not set"
        if not self.path.exists():
            return f"{self.path} does not exist"
        return ""

    @property
    def path(self) -> Path:
        return Path(os.environ[ENVIRONMENT_VARIABLE]) / self.program

    def command(self, report: Path, schedule: str, seed: int) -> list[str]:
        options = ["--schedule", schedule, "--seed", str(seed), "--report", str(report)]
        if self.arch != "sm_100a":
            options += ["--arch", self.arch]
        if self.runner == "run_program.py":
            return [self.runner, *options, str(self.path), *self.arguments.split()]
        return [self.runner, "--checkout", str(self.path), *options, *self.arguments.split()]


def _gemm_tutorials() -> list[Case]:
    names = ["fp16_gemm_0", "fp16_gemm_1", "fp16_gemm_2", "fp16_gemm_3", "fp16_gemm_3_1"]
    names += ["fp16_gemm_4", "fp16_gemm_5", "fp16_gemm_6"]
    return [
        Case(
            f"tutorial {name}",
            f"{CUTE}/tutorial/tutorial_gemm/{name}.py",
            "--mnk 512,512,256",
            quick=name in ("fp16_gemm_0", "fp16_gemm_6"),
        )
        for name in names
    ]


def _dense_gemms() -> list[Case]:
    folder = f"{CUTE}/kernel/dense_gemm"
    persistent, plain = f"{folder}/dense_gemm_persistent.py", f"{folder}/dense_gemm.py"
    two_cta = "--use_2cta_instrs --cluster_shape_mn 2,1"
    return [
        Case("dense_gemm_persistent", persistent, "--mnkl 512,512,256,1"),
        Case(
            "dense_gemm_persistent 2-CTA 256x128",
            persistent,
            f"--mnkl 512,256,256,1 --mma_tiler_mn 256,128 {two_cta}",
        ),
        Case(
            "dense_gemm_persistent fp8",
            persistent,
            "--mnkl 256,256,256,1 --ab_dtype Float8E4M3FN --c_dtype Float16",
        ),
        Case(
            "dense_gemm_persistent tf32",
            persistent,
            "--mnkl 256,256,128,1 --ab_dtype TFloat32 --c_dtype Float32",
        ),
        Case(
            "dense_gemm M=64 MN-major bf16",
            plain,
            "--mnkl 128,128,128,1 --mma_tiler_mn 64,64 --ab_dtype BFloat16 --a_major m --b_major n",
        ),
        Case(
            "dense_gemm 2-CTA M=128",
            plain,
            f"--mnkl 128,128,128,1 --mma_tiler_mn 128,128 {two_cta}",
            quick=True,
        ),
        Case(
            "dense_gemm ragged, TMA store",
            plain,
            "--mnkl 200,136,72,2 --mma_tiler_mn 128,128 --use_tma_store",
        ),
        Case(
            "tutorial nvfp4_gemm_0",
            f"{CUTE}/tutorial/tutorial_gemm/nvfp4_gemm_0.py",
            "--mnkl 256,256,512,1",
        ),
        Case(
            "tutorial nvfp4_gemm_1",
            f"{CUTE}/tutorial/tutorial_gemm/nvfp4_gemm_1.py",
            "--mnkl 512,512,512,1",
        ),
        Case(
            "blockscaled nvfp4",
            f"{CUTE}/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
            "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN "
            "--sf_dtype Float8E4M3FN --sf_vec_size 16 --c_dtype Float16 "
            "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 256,256,256,1",
        ),
        Case(
            "blockscaled mxfp4 2-CTA",
            f"{CUTE}/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
            "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN "
            "--sf_dtype Float8E8M0FNU --sf_vec_size 32 --c_dtype Float16 "
            "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --mnkl 256,256,256,1",
        ),
        Case(
            "blockscaled mxfp8",
            f"{CUTE}/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py",
            "--a_dtype Float8E4M3FN --b_dtype Float8E4M3FN "
            "--sf_dtype Float8E8M0FNU --sf_vec_size 32 --c_dtype BFloat16 "
            "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 256,256,256,1",
        ),
    ]


def _attention() -> list[Case]:
    folder = f"{CUTE}/kernel/attention"
    fmha, mla = f"{folder}/fmha/fmha.py", f"{folder}/mla"
    mixed = f"{folder}/mixed_input_fmha"
    cases = []
    for head_dim in (64, 128):
        for causal in (False, True):
            cases.append(
                Case(
                    f"fmha d{head_dim}{' causal' if causal else ''} ragged",
                    fmha,
                    f"--q_shape 1,300,2,{head_dim} --k_shape 1,520,1,{head_dim}" + (" --is_causal" if causal else ""),
                )
            )
    return [
        *cases,
        Case(
            "fmha d128 persistent causal",
            fmha,
            "--q_shape 1,512,2,128 --k_shape 1,512,2,128 --is_causal --is_persistent",
        ),
        Case(
            "fmha d128 fp8",
            fmha,
            "--q_shape 1,256,1,128 --k_shape 1,256,1,128 --in_dtype Float8E4M3FN --out_dtype Float16",
        ),
        Case("fmha_bwd", f"{folder}/fmha/fmha_bwd.py", ""),
        Case("mla_decode_fp16", f"{mla}/mla_decode_fp16.py", ""),
        Case("mla_decode_fp8", f"{mla}/mla_decode_fp8.py", ""),
        Case("mixed_input_fmha_prefill_d256", f"{mixed}/mixed_input_fmha_prefill_d256.py"),
        Case("mixed_input_fmha_prefill_d512", f"{mixed}/mixed_input_fmha_prefill_d512.py"),
        Case("mixed_input_fmha_decode", f"{mixed}/mixed_input_fmha_decode.py"),
        Case("rmsnorm", f"{CUTE}/kernel/rmsnorm/rmsnorm.py"),
    ]


def _flash_attention_4() -> list[Case]:
    def case(name: str, arguments: str, quick: bool = False) -> Case:
        return Case(f"FA4 {name}", "flash-attention", arguments, "flash_attention_4.py", quick=quick)

    return [
        case(
            "forward d128 causal GQA ragged",
            "forward --head-dim 128 --queries 200 --keys 333 --heads 4 --kv-heads 1 --causal",
        ),
        case(
            "forward d64 ragged",
            "forward --head-dim 64 --queries 200 --keys 333 --heads 2 --kv-heads 2",
        ),
        case(
            "forward d256 2-CTA",
            "forward --head-dim 256 --queries 256 --keys 256 --heads 2 --kv-heads 1 --causal",
        ),
        case("MLA dense causal", "mla --queries 4 --keys 256"),
        case("MLA top-k 512", "mla --queries 2 --keys 1024 --topk 512", quick=True),
        case("MLA top-k 512, padded", "mla --queries 2 --keys 1024 --topk 512 --padding 100"),
        case("MLA top-k 2048", "mla --queries 1 --keys 4096 --topk 2048"),
    ]


def _flash_mla() -> list[Case]:
    def case(name: str, arguments: str) -> Case:
        return Case(f"FlashMLA {name}", "FlashMLA", arguments, "flash_mla.py")

    return [
        case("sparse prefill, 64 heads", "prefill --heads 64 --queries 2 --keys 1024 --topk 512"),
        case("sparse prefill, 128 heads", "prefill --heads 128 --queries 2 --keys 1024 --topk 512"),
        case(
            "sparse decode, 64 heads, fp8 pages",
            "decode --heads 64 --batch 2 --keys 1024 --topk 512",
        ),
        case(
            "sparse decode, 64 heads, fp8 pages, split",
            "decode --heads 64 --batch 1 --keys 1024 --topk 512 --parts-per-request 2",
        ),
        case(
            "sparse decode, 128 heads, fp8 pages",
            "decode --heads 128 --batch 2 --keys 1024 --topk 512",
        ),
    ]


def _primitives() -> list[Case]:
    names = {
        "tcgen05": (
            "1cta_mma_a_from_tmem 1cta_mma_basic 1cta_mma_mn_major 1cta_mma_pipeline "
            "2cta_mma_basic 2cta_mma_blockscale_m128 2cta_mma_tma_store clusterMxN_2cta_mma "
            "cp_narrow_a_to_tmem_mma mcast_clusterMxN_1cta_mma mcast_clusterMxN_2cta_mma "
            "slicek_m32n8k128 tmem_ld_st tmem_ld_to_stmatrix_transpose"
        ),
        "tma": (
            "tma_1cta_mbarrier tma_load_store tma_load_to_ldmatrix tma_multicast "
            "tma_pipeline_count2 tma_pipeline_pingpong tma_pipeline_single_warp "
            "tma_pipeline_warpspec tma_store tma_swizzle_modes tma_tensormap_replace"
        ),
        "reduction": (
            "block_smem_reduce cluster_smem_reduce cluster_tmem_reduce thread_vector_reduce warp_vector_reduce"
        ),
        "tutorial": (
            "01_hello_world 02_naive_gemm 03_gemm_tiled_smem 04_tma_load 05_minimal_tensor_mma "
            "06_softmax 07_vectorized_array 09_tma_4d_to_2d 10_minimal_tensor_mma_fp8 "
            "gemm_M128_N128_Kany_TN_warpspec_multistage"
        ),
        ".": (
            "async_pipeline bar_warp_sync barrier_cta_red barrier_cta_sync basic_types "
            "cp_async_bulk cp_async_bulk_prefetch cp_async_mbarrier_arrive_cluster "
            "cp_async_mbarrier_arrive_cta cp_async_shared_global cp_async_shared_global_swizzled "
            "elect_sync ldmatrix_stmatrix mapa mbarrier mbarrier_lifecycle "
            "pipeline_software_fill red redux_sync shfl_sync vote_sync warp_named_barrier"
        ),
    }
    quick = {"tma_swizzle_modes", "1cta_mma_a_from_tmem"}
    return [
        Case(f"primitives {name}", f"{PRIMITIVES}/{folder}/{name}.py", quick=name in quick)
        for folder, folder_names in names.items()
        for name in folder_names.split()
    ]


def _hopper() -> list[Case]:
    folder = "cutlass/examples/python/CuTeDSL/cute/hopper/kernel"
    gemms, fmha = f"{folder}/dense_gemm", f"{folder}/attention/fmha.py"

    def program(name: str, path: str, arguments: str, quick: bool = False) -> Case:
        return Case(f"sm_90a {name}", path, arguments, arch="sm_90a", quick=quick)

    def fa4(name: str, arguments: str) -> Case:
        return Case(f"sm_90a FA4 {name}", "flash-attention", arguments, "flash_attention_4.py", arch="sm_90a")

    return [
        program("dense_gemm", f"{gemms}/dense_gemm.py", "--mnkl 512,512,256,1", quick=True),
        program(
            "dense_gemm MN-major 128x256 cluster 2x1",
            f"{gemms}/dense_gemm.py",
            "--mnkl 512,512,128,2 --a_major m --b_major n --tile_shape_mn 128,256 --cluster_shape_mn 2,1",
        ),
        program("dense_gemm 64x64", f"{gemms}/dense_gemm.py", "--mnkl 256,192,128,1 --tile_shape_mn 64,64"),
        program(
            "dense_gemm fp8",
            f"{gemms}/dense_gemm.py",
            "--mnkl 256,256,256,1 --a_dtype Float8E4M3FN --b_dtype Float8E5M2 --c_dtype Float16",
        ),
        program("dense_gemm f16 accumulator", f"{gemms}/dense_gemm.py", "--mnkl 256,256,128,1 --acc_dtype Float16"),
        program("dense_gemm_persistent", f"{gemms}/dense_gemm_persistent.py", "--mnkl 512,512,256,1"),
        program(
            "dense_gemm_persistent cluster 1x2",
            f"{gemms}/dense_gemm_persistent.py",
            "--mnkl 512,512,256,1 --cluster_shape_mn 1,2 --tile_shape_mn 128,128",
        ),
        program("dense_gemm_fp8_2xacc", f"{gemms}/dense_gemm_fp8_2xacc.py", ""),
        program("grouped_gemm", f"{folder}/grouped_gemm/grouped_gemm.py", ""),
        program("fmha d128", fmha, "--q_shape 1,256,2,128 --k_shape 1,512,2,128"),
        program(
            "fmha d64 causal persistent", fmha, "--q_shape 1,256,2,64 --k_shape 1,256,1,64 --is_causal --is_persistent"
        ),
        fa4(
            "forward d128 causal GQA ragged",
            "forward --head-dim 128 --queries 200 --keys 333 --heads 4 --kv-heads 1 --causal",
        ),
        fa4("forward d64 ragged", "forward --head-dim 64 --queries 200 --keys 333 --heads 2 --kv-heads 2"),
        fa4("forward d256", "forward --head-dim 256 --queries 130 --keys 256 --heads 1 --kv-heads 1"),
    ]


CASES: list[Case] = [
    *_gemm_tutorials(),
    *_dense_gemms(),
    *_attention(),
    *_flash_attention_4(),
    *_flash_mla(),
    *_primitives(),
    *_hopper(),
]
