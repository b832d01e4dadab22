"""The MoE runner "dsv4" on Blackwell: MXFP4 and NVFP4 experts are loaded a tensor at a time, arranged in place and
computed in the emulator, against the definition over all experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ops.experts_cases import CHANNELS, CHOSEN, EXPERTS, LAYER, LIMIT, D, emulated_on, packed_nvfp4_experts
from ops.experts_cases import packed_experts as random_experts
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.model_shapes import Option
from dsv4_kernels.moe import ref
from dsv4_kernels.ops import OPS
from sglang_dsv4.layers import local_experts
from sglang_dsv4.layers.nvfp4_experts import Nvfp4PackedExperts, packed_experts_of
from sglang_dsv4.layers.packed_experts import PackedExperts
from sglang_dsv4.model_config.config import ConfigError
from sglang_dsv4.seam import moe_runner as experts_runner
from sglang_dsv4.weights.updates.host_part import Part
from sglang_dsv4.weights.updates.session import reason_against

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

SHARDS = {"w3": ("w13", slice(CHANNELS, None)), "w2": ("w2", slice(None)), "w1": ("w13", slice(0, CHANNELS))}


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PackedExperts]:
    """Experts of one rank, filled from the checkpoint's tensors, w3 before w1, and arranged."""

    def build(nvfp4: bool, prefix: str = "model.layers.0.ffn.experts", **ranks: int) -> PackedExperts:
        parallel = SimpleNamespace(**{"moe_tp_size": 1, "moe_tp_rank": 0, "moe_ep_size": 1, "moe_ep_rank": 0} | ranks)
        monkeypatch.setattr(local_experts, "get_parallel", lambda: parallel)
        layer = packed_experts_of(SimpleNamespace(**vars(LAYER) | {"nvfp4_experts": nvfp4}), prefix)
        load(layer)
        return layer

    return build


def load(layer: PackedExperts) -> None:
    for name, expert, shard, tensor in tensors(isinstance(layer, Nvfp4PackedExperts)):
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, "a name", shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)


def tensors(nvfp4: bool) -> list[tuple[str, int, str, Tensor]]:
    """(parameter, expert, shard, tensor) for each tensor of the checkpoint."""
    packed = packed_nvfp4_experts(EXPERTS, D, CHANNELS) if nvfp4 else random_experts(EXPERTS, D, CHANNELS)
    found = []
    for expert in reversed(range(EXPERTS)):
        for shard, (matrix, rows) in SHARDS.items():
            scale = getattr(packed, f"{matrix}_scale")[expert, rows]
            found.append((f"{matrix}_weight", expert, shard, getattr(packed, matrix)[expert, rows]))
            found.append((f"{matrix}_weight_{'scale' if nvfp4 else 'scale_inv'}", expert, shard, scale))
            if nvfp4:
                of_all = getattr(packed, f"{matrix}_global")[expert]
                of_matrix = of_all[int(shard == "w3")] if matrix == "w13" else of_all
                found.append((f"{matrix}_weight_scale_2", expert, shard, of_matrix))
                largest = getattr(packed, f"{matrix}_input")
                found.append((f"{matrix}_input_scale", expert, shard, largest / (1 if expert == 2 else 3 + expert)))
    return found


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, D, generator=generator).bfloat16()
    ids = torch.rand(11, EXPERTS, generator=generator).topk(CHOSEN).indices.int()
    return x, torch.rand(11, CHOSEN, generator=generator), ids


def forward(layer: PackedExperts, shared: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    with emulated_on(3):
        x, *chosen = batch()
        work = layer.plan(*chosen)
        return layer.rows_to_sum(layer.multiply(x, work, None), work, shared, dtype).total()


def expected(nvfp4: bool) -> Tensor:
    if nvfp4:
        return ref.nvfp4_experts_forward(*batch(), packed_nvfp4_experts(EXPERTS, D, CHANNELS), LIMIT, 0)
    return ref.mxfp4_experts_forward(*batch(), random_experts(EXPERTS, D, CHANNELS), LIMIT, 0)


@pytest.mark.parametrize("nvfp4", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["mxfp4", "nvfp4"])
def test_ranks_have_the_definition_s_sum(rank: Callable[..., PackedExperts], nvfp4: bool) -> None:
    """One rank; ranks that share channels, and that share experts. Loading again gives the same bits at the same
    addresses; the shared expert is added. One expert has the largest input scale."""
    layer, wanted = rank(nvfp4), expected(nvfp4)
    whole = forward(layer)
    assert (whole - wanted).norm() <= 2.0**-8 * wanted.norm()
    pointers = [parameter.data_ptr() for parameter in layer.parameters()]
    assert layer.arranged.w13_scale.data_ptr() in pointers and layer.arranged.w2_scale.data_ptr() in pointers
    load(layer)
    assert pointers == [parameter.data_ptr() for parameter in layer.parameters()]
    shared = batch()[0].flip(0)
    assert same_bits(forward(layer, shared, torch.bfloat16), whole.bfloat16() + shared)
    by_channels = sum(forward(rank(nvfp4, moe_tp_size=2, moe_tp_rank=r)) for r in range(2))
    assert (by_channels - wanted).norm() <= 2.0**-8 * wanted.norm()
    if nvfp4:  # with shared experts a rank rounds inputs by its own experts' largest scale
        assert layer.arranged.w13_input == packed_nvfp4_experts(EXPERTS, D, CHANNELS).w13_input
        return
    by_experts = sum(forward(rank(nvfp4, moe_ep_size=2, moe_ep_rank=r)) for r in range(2))
    assert (by_experts - wanted).norm() <= 2.0**-8 * wanted.norm()


@pytest.mark.parametrize("chosen", [("w1",), ("w2",), ("w3", "w1")], ids="+".join)
def test_a_weight_update_of_some_matrices(rank: Callable[..., PackedExperts], chosen: tuple[str, ...]) -> None:
    """Exchanged, the bytes equal those of a load of the new matrices; undone, the old ones."""
    layer, packed = rank(False), random_experts(EXPERTS, D, CHANNELS)
    parts: dict[str, Part] = {}
    new = [row for row in tensors(False) if row[2] in chosen and row[1] in (0, 3)]
    for name, expert, shard, _ in new:
        matrix, rows = SHARDS[shard]
        source = getattr(packed, matrix if name.endswith("weight") else f"{matrix}_scale")[expert - 1, rows]
        layer.stage(parts, getattr(layer, name), source, "a name", shard, expert)
    before = [bytes_of(parameter) for parameter in layer.parameters()]
    for part in parts.values():
        part.exchange()
    found = [bytes_of(parameter) for parameter in layer.parameters()]
    for part in parts.values():
        part.exchange()
    assert all(map(torch.equal, map(bytes_of, layer.parameters()), before))
    moved = {(name, expert, shard) for name, expert, shard, _ in new}
    of_other = {(name, expert, shard): tensor for name, expert, shard, tensor in tensors(False)}
    for name, expert, shard, tensor in tensors(False):
        if (name, expert, shard) in moved:
            tensor = of_other[name, (expert - 1) % EXPERTS, shard]
        layer.weight_loader(getattr(layer, name), tensor, "a name", shard, expert)
    layer.arrange()
    assert all(map(torch.equal, map(bytes_of, layer.parameters()), found))
    assert not all(map(torch.equal, found, before))


def bytes_of(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.uint8).clone()


def test_formats_and_what_they_refuse(rank: Callable[..., PackedExperts], monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft keeps the release's format; NVFP4 needs multiples of 256 and takes weights from files only."""
    main, draft = rank(True), rank(False, "model.decoder.ffn.experts")
    assert type(main) is Nvfp4PackedExperts and type(draft) is PackedExperts
    of_nvfp4 = SimpleNamespace(**vars(LAYER) | {"nvfp4_experts": True})
    assert type(packed_experts_of(of_nvfp4, "stages.0.decoder.ffn.experts")) is PackedExperts
    model = torch.nn.ModuleDict({"experts": main})
    assert "experts has NVFP4 experts" in reason_against(model)
    assert reason_against(torch.nn.ModuleDict({"experts": draft})) is None
    odd = SimpleNamespace(**vars(LAYER) | {"nvfp4_experts": True, "moe_intermediate_size": 384})
    with pytest.raises(ConfigError, match="384 intermediate channels of a rank must be multiples of 256"):
        packed_experts_of(odd, "experts")
    damaged = draft.w2_weight_scale_inv.data.view(torch.uint8)
    damaged[0, 5, 1] = 255
    with pytest.raises(ValueError, match="scale is NaN"):
        draft.arrange()
    with pytest.raises(ValueError, match="128 rows"):
        replace(random_experts(EXPERTS, D, CHANNELS), w2_scale=torch.zeros(1, 100, 4, dtype=torch.uint8)).tiled()
    for capability, numbers, said in (
        ((12, 0), "mxfp4", "capability 9 .* and 10"),
        ((9, 0), "nvfp4", "it is for MXFP4 experts on this GPU"),
        ((10, 0), None, "it is for MXFP4 AND NVFP4 experts"),
    ):
        assert re.search(said, experts_runner.reason_against(capability, numbers, 4096, 2048, 1))
    assert experts_runner.reason_against((10, 3), "nvfp4", 4096, 2048, 8) is None
    # One of 16 ranks has 128 channels: Blackwell's kernels take them, Hopper's don't.
    assert experts_runner.reason_against((10, 0), "mxfp4", 4096, 2048, 16) is None
    assert experts_runner.reason_against((9, 0), "mxfp4", 4096, 2048, 16) is not None


@pytest.mark.parametrize(("flag", "serves"), [(False, False), (True, True)])
def test_it_is_chosen_by_name_or_under_the_deterministic_flag(flag: bool, serves: bool) -> None:
    arguments = SimpleNamespace(device="cuda", tp_size=4, ep_size=2, enable_deterministic_inference=flag)
    hf_config = SimpleNamespace(hidden_size=4096, moe_intermediate_size=2048)
    for meta in (None, object()):
        model = SimpleNamespace(hf_config=hf_config, is_fp4_experts=True, nvfp4_moe_meta=meta)
        assert experts_runner.serves(arguments, model) is serves
    assert experts_runner.may_be_named("dsv4")


def test_dummy_weights_have_scales_without_a_sign(rank: Callable[..., PackedExperts]) -> None:
    """SGLang's `--load-format dummy` fills e4m3 scales with numbers of both signs."""
    layer = rank(True)
    layer.w2_weight_scale.data.view(torch.uint8)[0, 0, :] = 0xB8
    layer.arrange()
    assert not (layer.w2_weight_scale.data.view(torch.uint8) & 0x80).any()


@pytest.mark.slow
@pytest.mark.parametrize("option", [Option.PACKED_EXPERTS, Option.NVFP4_EXPERTS])
def test_its_kernels_are_compiled_ahead(rank: Callable[..., PackedExperts], option: Option) -> None:
    """Every kernel that a forward of few or many tokens runs."""
    (op,) = [op for op in OPS.values() if op.option is option]
    assert op.named(torch.device("cuda"), torch.bfloat16) == "sm100"
    implementation = registry.chosen(op.name, torch.device("cuda"), torch.bfloat16, "sm100")
    model = SimpleNamespace(experts_per_token=CHOSEN, experts_sum_fp32=False, joins_launches=False)
    with emulated_on(3):
        for job in registry._loaded(implementation.jobs)(model, "sm_100a"):
            job()
        known = len(compile_cache.origins())
        layer = rank(option is Option.NVFP4_EXPERTS)
        for tokens in (3, 11 * EXPERTS, 20 * EXPERTS, 60 * EXPERTS):
            x = torch.zeros(tokens, D, dtype=torch.bfloat16)
            ids = torch.arange(CHOSEN, dtype=torch.int32).expand(tokens, CHOSEN).contiguous()
            work = layer.plan(torch.ones(ids.shape), ids)
            layer.rows_to_sum(layer.multiply(x, work, None), work, x, torch.bfloat16).total()
    assert len(compile_cache.origins()) == known
