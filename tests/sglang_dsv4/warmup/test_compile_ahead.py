"""Kernels that are compiled before a server is ready: all that forwards of any number of tokens run."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from model.small_geometry import GEOMETRY

from dsv4_kernels import attention_calls, registry
from dsv4_kernels.host import arch, compile_cache
from dsv4_kernels.host import launch as host_launch
from dsv4_kernels.model_shapes import Option
from dsv4_kernels.ops import forward_ops
from dsv4_kernels.sparse_attention import sparse_attention
from sglang_dsv4.attention import implementation
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cpu.random_checkpoint import PRESETS, hf_config
from sglang_dsv4.layers import data_parallel
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import SWA_RATIO
from sglang_dsv4.warmup import compile_ahead, model_shapes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RELEASED = {"hidden_size": 4096, "head_dim": 512, "q_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128}
HEADS = 64
ATTENTION_JOBS = attention_calls.compile_jobs


def config() -> Config:
    return Config.from_hf(SimpleNamespace(**hf_config(PRESETS["flash"]) | RELEASED))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[tuple, bool]:
    """An imagined GPU whose kernels are recorded instead of compiled; the attention's are left out."""
    compiled: dict[tuple, bool] = {}

    def remembered(name: str, config: object, arch: str, compile: Callable[[], object]) -> object:
        compiled[name, repr(config), arch] = True
        return lambda *arguments: None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(arch, "_multiprocessors", lambda index: arch.H200_MULTIPROCESSORS)
    monkeypatch.setattr(attention_calls, "compile_jobs", lambda model, arch: [])
    monkeypatch.setattr(host_launch, "load_or_compile", remembered)
    return compiled


def jobs(config: Config, geometry: PoolGeometry = GEOMETRY) -> list[tuple[str, Callable[[], object]]]:
    return registry.compile_jobs(model_shapes.model_shapes(config, geometry, HEADS, CUDA))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(model_shapes.sequence_parallel, "may_be", lambda: False)
    monkeypatch.setattr(data_parallel, "is_on", lambda: False)


def test_every_kernel_of_a_forward_has_jobs(hopper: dict[tuple, bool]) -> None:
    """Every function of compile jobs in the table is called once, also if several ops share its kernels."""
    found = [op for op, _ in jobs(config())]
    asked: dict[str, str] = {}
    for op in forward_ops("cuda", {Option.FP8_WO_A, Option.FP8_LINEAR}):
        asked.setdefault(registry.chosen(op, CUDA, torch.bfloat16).jobs, op)
    without = {"rms_norm", "sparse_attention"}  # norms quantise on Hopper; the fixture leaves out the attention's jobs
    assert set(found) == set(asked.values()) - without | {"joint_launch"}


def test_kernels_of_forwards_of_any_size_are_compiled(hopper: dict[tuple, bool]) -> None:
    """The number of tokens chooses the hyper-connections' plan and the heads a warp: all choices are compiled."""
    from dsv4_kernels.hyper_connection import choice
    from dsv4_kernels.norm_rope_store import gpu as norm_rope_store

    for _, job in jobs(config()):
        job()
    found = {(name, text) for name, text, arch in hopper if arch == "sm_90a"}
    assert len(found) == len(hopper)
    for tokens in [*range(1, 300), 1000, 8192, 100_000]:
        for rows, post in ((24, True), (24, False), (4, True)):
            plan = choice.chosen(tokens, 4096, rows, post, False, fp8=rows == 24)
            assert ("hyper_connection", repr(plan)) in found, tokens
    for heads_a_warp in {1, norm_rope_store.HEADS_A_WARP}:
        assert ("norm_rope_store", repr(f"{heads_a_warp} heads a warp")) in found
    kinds = {"compress_store_entries": 2, "compress_store_keep": 2, "index_scores": 2, "index_prefill_scores": 1}
    for name, count in kinds.items():
        assert sum(one == name for one, _ in found) == count, name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_kernels_of_forwards_with_sharded_rows_are_compiled(
    hopper: dict[tuple, bool], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's own rows are not quantised, and forwards of fewer rows than the smallest sharded one do not occur."""
    from dsv4_kernels.hyper_connection import choice

    def compiled() -> set[str]:
        hopper.clear()
        for _, job in jobs(config()):
            job()
        return {text for name, text, _ in hopper if name == "hyper_connection"}

    whole = compiled()
    monkeypatch.setattr(model_shapes.sequence_parallel, "may_be", lambda: True)
    monkeypatch.setattr(model_shapes, "get_parallel", lambda: SimpleNamespace(tp_size=ranks))
    sizes = range(model_shapes.sequence_parallel.FEWEST_TOKENS // ranks, 1000)
    forms = ((24, True), (24, False))
    own = {repr(choice.chosen(n, 4096, *form, False, fp8=False)) for n in sizes for form in forms}
    assert compiled() == whole | own and not own & whole


def test_attention_of_own_rows_is_called_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills of few tokens have the heads of a rank, sharded ones of all ranks; a draft's are not sharded."""
    own = 16
    monkeypatch.setattr(model_shapes.sequence_parallel, "shards_attention", lambda: True)
    shapes = model_shapes.model_shapes(config(), GEOMETRY, own, CPU).attention
    draft = replace(GEOMETRY, ratios=(0,))
    assert model_shapes.model_shapes(config(), draft, own, CPU).attention.prefill_heads == (own,)
    for split_keys in attention_calls.splits():
        found = {call.heads for call in attention_calls.calls(shapes, "sm90", shapes.layers[0], split_keys)}
        is_prefill = split_keys == attention_calls.splits()[-1]
        assert found == ({own, config().num_attention_heads} if is_prefill else {own})


def test_kernels_of_groups_of_ranks_are_compiled(hopper: dict[tuple, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any number are gathered before the experts, and quantised after that."""
    from dsv4_kernels.hyper_connection import choice

    monkeypatch.setattr(data_parallel, "is_on", lambda: True)
    monkeypatch.setattr(model_shapes, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    monkeypatch.setattr(model_shapes.grouped_projection, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1))
    for _, job in jobs(config()):
        job()
    found = {text for name, text, _ in hopper if name == "hyper_connection"}
    forms = [(rows, post, fp8) for rows, post in ((24, True), (24, False)) for fp8 in (True, False)]
    for tokens in (1, 2, 33, 700):
        plans = [choice.chosen(tokens, 4096, *form[:2], False, fp8=form[2]) for form in forms]
        assert {repr(plan) for plan in plans} <= found


def test_kernels_of_exchanged_rows(hopper: dict[tuple, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own rows are quantised where they are made; sums are bf16 under the flag, and no expert is sharded."""
    monkeypatch.setattr(data_parallel, "is_on", lambda: True)
    monkeypatch.setattr(model_shapes.packed_experts, "is_chosen", lambda: True)
    monkeypatch.setattr(model_shapes.flag, "is_on", lambda: True)
    for module in (model_shapes, model_shapes.row_exchange, model_shapes.grouped_projection):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_size=4, attn_dp_size=4, attn_tp_size=1))
    channels, found = config().moe_intermediate_size, []
    for chosen in (False, True):
        monkeypatch.setattr(model_shapes.row_exchange, "is_chosen", lambda chosen=chosen: chosen)
        shapes = model_shapes.model_shapes(config(), GEOMETRY, HEADS, CUDA)
        found.append((shapes.fewest_own_rows, shapes.experts_sum_fp32, shapes.shared_channels, shapes.exchanges_rows))
    assert found == [(1, True, channels // 4, False), (0, False, channels, True)]


@pytest.mark.parametrize(
    ("ranks", "boundary_tokens", "packed", "leaves"),
    [(1, 0, True, True), (4, 64, True, True), (4, 0, True, False), (1, 0, False, False)],
    ids=["one", "boundaries-sum", "another-library-sums", "other-experts"],
)
def test_who_leaves_the_rows_of_experts(
    hopper: dict[tuple, bool],
    ranks: int,
    boundary_tokens: int,
    packed: bool,
    leaves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A boundary sums over experts if they are ours, and if it sums over ranks where there are several."""
    monkeypatch.setattr(model_shapes.packed_experts, "is_chosen", lambda: packed)
    monkeypatch.setattr(model_shapes.peer_sums, "boundary_tokens", lambda *sizes: boundary_tokens)
    for module in (model_shapes, model_shapes.grouped_projection):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_size=ranks, attn_tp_size=ranks))
    assert model_shapes.model_shapes(config(), GEOMETRY, HEADS, CUDA).leaves_expert_rows == leaves


@pytest.mark.parametrize(("preset", "blocks"), [("flash", False), ("flash-0731", True)], ids=["mtp", "dspark"])
def test_kernels_of_speculation_are_compiled(hopper: dict[tuple, bool], preset: str, blocks: bool) -> None:
    """Target steps of one token and of all verified tokens; for a draft also its blocks, and norms of hidden_size."""
    from dsv4_kernels.norm import gpu as norm
    from sglang_dsv4.attention.metadata import step_layout

    shape = Config.from_hf(SimpleNamespace(**hf_config(PRESETS[preset]) | RELEASED))
    tokens = shape.dspark.block_size + 1 if blocks else 4
    target = replace(GEOMETRY, draft_tokens=tokens)
    draft = replace(target, ratios=(SWA_RATIO,) * (3 if blocks else 1))
    for geometry in (target, draft):
        for _, job in jobs(shape, geometry):
            job()
    expected = {(step_layout(geometry), width) for geometry in (target, draft) for width in (1, tokens)}
    if blocks:
        expected.add((step_layout(draft, blocks=True), tokens - 1))
    assert {text for name, text, _ in hopper if name == "step_mapping"} == {repr(key) for key in expected}
    norms = {repr(norm.Configuration(dim, "fp32", is_fp8=True)) for dim in (1024, 4096)}
    assert {text for name, text, _ in hopper if name == "rms_norm"} == norms


def test_products_are_compiled(hopper: dict[tuple, bool]) -> None:
    """Every tile that a call may get, with results in either dtype."""
    from dsv4_kernels.linear import gpu

    for _, job in jobs(config()):
        job()
    found = {text for name, text, _ in hopper if name in ("linear", "linear_wgmma")}
    expected = {repr(gpu.configuration(tile, fp32)) for tile in gpu.tiles("sm_90a") for fp32 in (True, False)}
    assert found == expected


def test_progress_is_logged(
    hopper: dict[tuple, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_ahead, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(compile_ahead.implementation, "make_first_calls", lambda shapes: None)
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    with caplog.at_level(logging.INFO, logger=compile_ahead.__name__):
        compile_ahead.compile_ahead(config(), GEOMETRY, HEADS, CUDA)
    count = len(jobs(config()))
    assert f"kernels: 1 of {count} ready (apply_rope_in_place)" in caplog.messages[0]
    assert caplog.messages[-1].startswith(f"all {count} kernels are ready after ")


def test_references_need_no_compiling(caplog: pytest.LogCaptureFixture) -> None:
    known = len(compile_cache.origins())
    compile_ahead.compile_ahead(config(), GEOMETRY, HEADS, CPU)
    assert not caplog.records and len(compile_cache.origins()) == known


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "target"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a")])
def test_all_jobs_compile(capability: tuple[int, int], target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptx_emulator import emulated

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(arch, "_multiprocessors", lambda index: arch.H200_MULTIPROCESSORS)
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setattr(attention_calls, "compile_jobs", lambda model, arch: [])  # they are found by calls on a GPU
    with emulated(arch=target):
        for _, job in jobs(config()):
            job()
    assert {made_for for _, _, made_for in compile_cache._in_memory} == {target}


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_jobs_of_the_attention_are_all_its_kernels(
    heads: int, hopper: dict[tuple, bool], own_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs are all kernels that the first calls get, unpacked rows' included."""
    from dsv4_kernels.sparse_attention.problem import FEW_HEADS
    from dsv4_kernels.sparse_attention.sm90 import launch

    for op in ("sparse_attention", "unpack_pages"):
        registry.register(op, "here", registry._table[op]["sm90"].loader, lambda device, dtype: True, 100)
    monkeypatch.setattr(launch, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "num_clusters", lambda device: (0, 132, 66, 39, 30, 22, 17, 15, 15, 9))
    monkeypatch.setattr(compile_cache, "_in_memory", {})
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    shapes = implementation.attention_shapes(GEOMETRY, heads, CPU)
    model = SimpleNamespace(attention=shapes)
    with monkeypatch.context() as patch:
        patch.setattr(host_launch, "load_or_compile", compile_cache.load_or_compile)  # which finds no kernel
        found = [*ATTENTION_JOBS(model, "sm_90a"), *attention_calls.unpack_compile_jobs(model, "sm_90a")]
    assert pickle.loads(pickle.dumps(found))[0].func is found[0].func
    for job in found:
        job()
    ahead = set(hopper)
    needed = {"sparse_attention_sm90"} | ({"unpack_pages"} if heads > FEW_HEADS else set())
    assert {name for name, _, _ in ahead} == needed and len(ahead) == len(found)
    hopper.clear()

    def zeros(*arguments: object, **options: object) -> torch.Tensor:
        return torch.zeros_like(sparse_attention(*arguments, **options))

    monkeypatch.setattr(attention_calls, "sparse_attention", zeros)
    implementation.make_first_calls(shapes)
    assert set(hopper) == ahead
