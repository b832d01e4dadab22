"""A model on a B200 from token ids to logits, in the emulator: SGLang's runner, our modules, our kernels for sm_100a.

The small model has a layer of each kind. It has the release's formats: FP8 layers, MXFP4 experts, FP8 rows, FP4 keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model.blackwell import harness_of_a_b200, kernels_of_a_b200
from model.harness import Harness
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.ops import Option, forward_ops
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytestmark = pytest.mark.slow

SHAPE = replace(
    PRESETS["flash"], hidden_size=1024, compress_ratios=(0, 4, 128), num_hash_layers=1, n_routed_experts=8,
    num_experts_per_tok=2, num_nextn_predict_layers=0,
)  # fmt: skip
SIZES = {"max_total_tokens": 1024, "max_requests": 4}
LONG = 133
"""Tokens of a prompt with an entry of 128 tokens."""


def prompt(length: int) -> Tensor:
    return torch.randint(2, 1000, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, SHAPE, seed=0)
    return folder


@pytest.fixture(scope="module")
def b200(checkpoint: Path) -> Iterator[Harness]:
    """The model under the deterministic flag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.FOLDER_VARIABLE, "off")
        yield harness_of_a_b200(checkpoint, enable_deterministic_inference=True, **SIZES)


@pytest.fixture(autouse=True)
def flag_is_on(b200: Harness) -> Iterator[None]:
    """The flag of the process, which a later harness changes."""
    registry.require_batch_invariance()
    yield
    registry.require_batch_invariance(False)


def test_logits_are_as_near_to_fp32_as_a_cpu_s_in_bf16(b200: Harness, checkpoint: Path) -> None:
    """Prefill of a prompt, then decode steps that read entries of both kinds. Both run the release's quantisers; the
    same definitions in fp32 are the reference."""
    tokens = prompt(LONG)
    with kernels_of_a_b200() as (device, used):
        found = b200.run(tokens, decode_from=LONG - 2)
    step = set(forward_ops("cuda", {Option.FP8_LINEAR, Option.FP8_WO_A}))
    not_run = {"unpack_pages", "rms_norm", "fused_swiglu"}  # long prefills only; forms that FP8 layers do not need
    assert {op for op, name in used.items() if name == "sm100"} >= step - not_run - {"linear_fp32"}
    assert not [warning for report in device.reports for warning in report.warnings]
    exact = Harness(checkpoint, dtype="float32", kv_cache_dtype="fp8_e4m3", **SIZES).run(tokens, decode_from=LONG - 2)
    of_cpu = Harness(checkpoint, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", **SIZES).run(tokens, decode_from=LONG - 2)
    error, others = ((x - exact).norm(dim=1) / exact.norm(dim=1) for x in (found, of_cpu))
    print(f"error {error.mean():.3f}, at most {error.max():.3f}; on a CPU {others.mean():.3f}, {others.max():.3f}")
    assert found.isfinite().all() and error.mean() <= 1.5 * others.mean() and error.max() <= 2 * others.max()


def test_a_request_has_its_bits_in_any_batch(b200: Harness) -> None:
    """Alone in one prefill, in chunks beside another request, and decoded beside it."""
    first, second = prompt(5), prompt(6)
    with kernels_of_a_b200():
        alone = b200.run(first, decode_from=4)
        together = b200.run_many([first, second], chunk_tokens=3, decode_from=[4, 5])
    assert same_bits(together[0], alone)
