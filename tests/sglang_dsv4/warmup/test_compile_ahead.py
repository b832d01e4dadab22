"""Which kernels are compiled before a server is ready: all that forwards of any number of tokens then run."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention import sparse_attention
from sglang_dsv4.attention import implementation
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import CSA_RATIO, HCA_RATIO, SWA_RATIO
from sglang_dsv4.warmup import compile_ahead, cuda_graphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RELEASED = {"hidden_size": 4096, "head_dim": 512, "q_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128}
GEOMETRY = PoolGeometry(
    ratios=(SWA_RATIO, CSA_RATIO, HCA_RATIO),
    row_dim=512,
    row_format=RowFormat.FP8,
    index_format=RowFormat.INDEX_FP4,
    dtype=torch.bfloat16,
)
BESIDE_THE_TABLE = {"hc_enter", "hc_finish", "sparse_attention"}
"""Ops of a step that are the same kernels as another's, or compiled by `attention.implementation`."""


def config() -> Config:
    return Config.from_hf(SimpleNamespace(**hf_config(PRESETS["flash"]) | RELEASED))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[tuple, bool]:
    """A GPU that there is not, whose kernels are remembered in place of being compiled."""
    compiled: dict[tuple, bool] = {}

    def remembered(name: str, config: object, arch: str, compile: Callable[[], object]) -> object:
        compiled[name, repr(config), arch] = True
        return lambda *arguments: None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in modules():
        monkeypatch.setattr(module, "load_or_compile", remembered)
    return compiled


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead.sequence_parallel, "may_be", lambda: False)


def modules() -> list[object]:
    from dsv4_kernels.compressor import gpu as compressor
    from dsv4_kernels.hyper_connection import gpu as hyper_connection
    from dsv4_kernels.indexer import prefill_scores, query, scores, topk
    from dsv4_kernels.linear import fp8 as linear_fp8
    from dsv4_kernels.linear import fp8_weight_gpu
    from dsv4_kernels.linear import gpu as linear
    from dsv4_kernels.moe import gpu as moe
    from dsv4_kernels.norm import gpu as norm
    from dsv4_kernels.norm_rope_store import gpu as norm_rope_store
    from dsv4_kernels.quant import gpu as quant
    from dsv4_kernels.rope import gpu as rope
    from dsv4_kernels.router import gpu as router
    from dsv4_kernels.step_mapping import gpu as step_mapping

    first = [compressor, hyper_connection, prefill_scores, query, scores, topk]
    return [*first, fp8_weight_gpu, linear, linear_fp8, moe, norm, norm_rope_store, quant, rope, router, step_mapping]


def test_every_op_of_a_step_is_in_the_table() -> None:
    assert set(cuda_graphs.STEP_OPS) - BESIDE_THE_TABLE == set(compile_ahead._KERNELS)
    ours = {op for op in registry.ops() if "sm90" in registry.available(op)}
    unused = {"apply_rope", "hc_head", "hc_post", "hc_pre"}  # no forward calls these
    unused.add("mxfp4_experts_forward")  # by its layer: layers/test_packed_experts.py
    unused.add("grouped_linear_fp8_weight")  # where a GPU is there: tests/sglang_dsv4/layers/test_grouped_projection.py
    unused.add("linear_fp8")  # in SGLang's layers: tests/sglang_dsv4/layers/test_fp8_linear.py
    assert ours - unused - BESIDE_THE_TABLE - {"unpack_pages"} == set(compile_ahead._KERNELS)


def test_what_forwards_of_any_size_run_is_compiled(hopper: dict[tuple, bool]) -> None:
    """By the choices that depend on the number of tokens: of the hyper-connections' plan and of heads a warp."""
    from dsv4_kernels.hyper_connection import gpu as hyper_connection
    from dsv4_kernels.norm_rope_store import gpu as norm_rope_store

    for _, compile in compile_ahead.kernels(config(), GEOMETRY, CUDA):
        compile()
    found = {(name, text) for name, text, arch in hopper if arch == "sm_90a"}
    assert len(found) == len(hopper)
    for tokens in [*range(1, 300), 1000, 8192, 100_000]:
        for rows, post in ((24, True), (24, False), (4, True)):
            plan = hyper_connection.chosen(tokens, 4096, rows, post, True, False, fp8=rows == 24)
            assert ("hyper_connection", repr(plan)) in found, tokens
    for heads_a_warp in {1, norm_rope_store.HEADS_A_WARP}:
        assert ("norm_rope_store", repr(f"{heads_a_warp} heads a warp")) in found
    kinds = {"compress_store_entries": 2, "compress_store_keep": 2, "index_scores": 1, "index_prefill_scores": 1}
    for name, count in kinds.items():
        assert sum(one == name for one, _ in found) == count, name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_forwards_with_sharded_rows_run_is_compiled(
    hopper: dict[tuple, bool], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank's own rows no codes are made; fewer rows than in the smallest such forward need no kernel."""
    from dsv4_kernels.hyper_connection import gpu as hyper_connection

    def compiled() -> set[str]:
        hopper.clear()
        for _, compile in compile_ahead.kernels(config(), GEOMETRY, CUDA):
            compile()
        return {text for name, text, _ in hopper if name == "hyper_connection"}

    whole = compiled()
    monkeypatch.setattr(compile_ahead.sequence_parallel, "may_be", lambda: True)
    monkeypatch.setattr(compile_ahead, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))
    sizes = range(compile_ahead.sequence_parallel.FEWEST_TOKENS // ranks, 1000)
    forms = ((24, True), (24, False))
    own = {repr(hyper_connection.chosen(n, 4096, *form, True, False, fp8=False)) for n in sizes for form in forms}
    assert compiled() == whole | own and not own & whole


@pytest.mark.parametrize(("preset", "blocks"), [("flash", False), ("flash-0731", True)], ids=["mtp", "dspark"])
def test_what_speculation_runs_is_compiled(hopper: dict[tuple, bool], preset: str, blocks: bool) -> None:
    """Of the target steps of one token and of all that are verified; of a draft also its blocks, and wide norms."""
    from dsv4_kernels.norm import gpu as norm
    from sglang_dsv4.attention.metadata import step_layout

    shape = Config.from_hf(SimpleNamespace(**hf_config(PRESETS[preset]) | RELEASED))
    tokens = shape.dspark.block_size + 1 if blocks else 4
    target = replace(GEOMETRY, draft_tokens=tokens)
    draft = replace(target, ratios=(SWA_RATIO,) * (3 if blocks else 1))
    for geometry in (target, draft):
        for _, compile in compile_ahead.kernels(shape, geometry, CUDA):
            compile()
    expected = {(step_layout(geometry), width) for geometry in (target, draft) for width in (1, tokens)}
    if blocks:
        expected.add((step_layout(draft, blocks=True), tokens - 1))
    assert {text for name, text, _ in hopper if name == "step_mapping"} == {repr(key) for key in expected}
    norms = {repr(norm.Configuration(dim, "fp32", is_fp8=True)) for dim in (1024, 4096)}
    assert {text for name, text, _ in hopper if name == "rms_norm"} == norms


def test_products_are_compiled(hopper: dict[tuple, bool]) -> None:
    """In every tile that a call may get, into either dtype."""
    from dsv4_kernels.linear import gpu

    for _, compile in compile_ahead.kernels(config(), GEOMETRY, CUDA):
        compile()
    found = {text for name, text, _ in hopper if name in ("linear", "linear_wgmma")}
    expected = {repr(gpu.configuration(tile, fp32)) for tile in gpu.tiles("sm_90a") for fp32 in (True, False)}
    assert found == expected


def test_progress_is_said(
    hopper: dict[tuple, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_ahead, "SECONDS_A_LINE", 0.0)
    monkeypatch.setattr(compile_ahead.implementation, "compile_ahead", lambda *arguments: None)
    monkeypatch.setattr(compile_ahead.implementation, "missing_kernels", lambda *arguments: [])
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    with caplog.at_level(logging.INFO, logger=compile_ahead.__name__):
        compile_ahead.compile_ahead(config(), GEOMETRY, 64, CUDA)
    count = len(compile_ahead.kernels(config(), GEOMETRY, CUDA))
    assert f"kernels: 1 of {count} ready (apply_rope_in_place)" in caplog.messages[0]
    assert caplog.messages[-1].startswith(f"all {count} kernels are ready after ")


def test_references_need_no_compiling(caplog: pytest.LogCaptureFixture) -> None:
    known = len(compile_cache.origins())
    compile_ahead.compile_ahead(config(), GEOMETRY, 64, CPU)
    assert not caplog.records and len(compile_cache.origins()) == known


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a")])
def test_they_compile(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptx_emulator import emulated

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    with emulated(arch=arch):
        for _, compile in compile_ahead.kernels(config(), GEOMETRY, CUDA):
            compile()
    assert {made_for for _, _, made_for in compile_cache._in_memory} == {arch}


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_all_kernels_of_the_attention_can_be_compiled_by_others(
    heads: int, hopper: dict[tuple, bool], own_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are found missing are all that the calls of `compile_ahead` get, unpacked rows' included."""
    from dsv4_kernels.sparse_attention.problem import FEW_HEADS
    from dsv4_kernels.sparse_attention.sm90 import launch
    from dsv4_kernels.unpack import gpu as unpack

    for op in ("sparse_attention", "unpack_pages"):
        registry.register(op, "here", registry._table[op]["sm90"].loader, lambda device, dtype: True, 100)
    chosen = replace(registry._table["sparse_attention"]["sm90"])
    monkeypatch.setattr(implementation, "chosen_implementation", lambda *arguments: chosen)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "num_clusters", lambda device: (0, 132, 66, 39, 30, 22, 17, 15, 15, 9))
    monkeypatch.setattr(launch, "_stream", lambda problem: None)
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    missing = implementation.missing_kernels(GEOMETRY, heads, CPU)
    assert pickle.loads(pickle.dumps(missing))[0].func is missing[0].func
    for module in (launch, unpack):
        monkeypatch.setattr(module, "load_or_compile", modules()[0].load_or_compile)
    for compile in missing:
        compile()
    found = set(hopper)
    needed = {"sparse_attention_sm90"} | ({"unpack_pages"} if heads > FEW_HEADS else set())
    assert {name for name, _, _ in found} == needed and len(found) == len(missing)
    hopper.clear()

    def zeros(*arguments: object, **options: object) -> torch.Tensor:
        return torch.zeros_like(sparse_attention(*arguments, **options))

    monkeypatch.setattr(implementation, "sparse_attention", zeros)
    implementation.compile_ahead(GEOMETRY, heads, CPU)
    assert set(hopper) == found
