"""The MoE runner "dsv4": experts are loaded a matrix at a time, on one of several ranks, and computed in the emulator.

They are compared with the definition over all experts, which is the sum of the ranks' parts; loading again gives the
same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ops.experts_cases import CHANNELS, CHOSEN, EXPERTS, LAYER, LIMIT, D
from ops.experts_cases import packed_experts as random_experts
from ops.number_formats import same_bits
from torch import Tensor, nn

from dsv4_kernels.host import compile_cache, expert_rows
from dsv4_kernels.host.expert_rows import ExpertRows
from dsv4_kernels.moe import ref
from sglang_dsv4.determinism import sglang_operators
from sglang_dsv4.layers import local_experts, moe, packed_experts
from sglang_dsv4.layers.linear import SublayerInput
from sglang_dsv4.layers.nvfp4_experts import packed_experts_of
from sglang_dsv4.layers.packed_experts import PackedExperts
from sglang_dsv4.layers.sequence_parallel import RowShards
from sglang_dsv4.model_config.config import ConfigError
from sglang_dsv4.seam import moe_runner as experts_runner
from sglang_dsv4.weights.updates.host_part import Part

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compile_cache.FOLDER_VARIABLE, "off")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PackedExperts]:
    """Experts of one rank, filled from the checkpoint's tensors."""

    def build(tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0) -> PackedExperts:
        parallel = SimpleNamespace(moe_tp_size=tp_size, moe_tp_rank=tp_rank, moe_ep_size=ep_size, moe_ep_rank=ep_rank)
        monkeypatch.setattr(local_experts, "get_parallel", lambda: parallel)
        layer = PackedExperts(LAYER, "model.layers.0.ffn.experts")
        load(layer)
        return layer

    return build


def load(layer: PackedExperts) -> None:
    """Load as the loader does: one tensor after the other, w3 before w1, then the call after loading."""
    load_without_end(layer)
    layer.quant_method.process_weights_after_loading(layer)


def load_without_end(layer: PackedExperts) -> None:
    packed = random_experts(EXPERTS, D, CHANNELS)
    for expert in reversed(range(EXPERTS)):
        for shard, matrix, rows in (("w3", "w13", slice(CHANNELS, None)), ("w2", "w2", slice(None)),
                                    ("w1", "w13", slice(0, CHANNELS))):  # fmt: skip
            for suffix, tensors in (("", getattr(packed, matrix)), ("_scale_inv", getattr(packed, f"{matrix}_scale"))):
                parameter = getattr(layer, f"{matrix}_weight{suffix}")
                parameter.weight_loader(parameter, tensors[expert, rows], "a name", shard_id=shard, expert_id=expert)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, D, generator=generator).bfloat16()
    ids = torch.rand(11, EXPERTS, generator=generator).topk(CHOSEN).indices.int()
    return x, torch.rand(11, CHOSEN, generator=generator), ids


def forward(layer: PackedExperts, shared: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    from ptx_emulator import emulated

    with emulated(arch="sm_90a", multiprocessors=3):
        x, *chosen = batch()
        work = layer.plan(*chosen)
        return layer.rows_to_sum(layer.multiply(x, work, None), work, shared, dtype).total()


def expected() -> Tensor:
    return ref.mxfp4_experts_forward(*batch(), random_experts(EXPERTS, D, CHANNELS), LIMIT, 0)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 2.0**-8 * wanted.norm()


def test_one_rank_has_the_definition_s_sum(rank: Callable[..., PackedExperts]) -> None:
    layer = rank()
    assert layer.arranged.w13.rounded == layer.arranged.w2.rounded == 0
    assert_close(forward(layer), expected())


def test_parts_of_ranks_sum_up(rank: Callable[..., PackedExperts]) -> None:
    by_channels = sum(forward(rank(tp_size=2, tp_rank=r)) for r in range(2))
    # No rank cuts a block of 128 channels in which h is quantised: only the order of the sum differs.
    assert_close(by_channels, expected())
    by_experts = sum(forward(rank(ep_size=2, ep_rank=r)) for r in range(2))
    assert_close(by_experts, expected())


def test_rows_of_pairs_of_two_ranks_have_the_bits_of_one(rank: Callable[..., PackedExperts]) -> None:
    """Rows as they are exchanged: tokens with gaps between them, one row back for each pair, added on one rank."""
    from ptx_emulator import emulated

    shared = torch.randn(11, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = forward(rank(), shared, torch.bfloat16)
    x, weights, experts = batch()
    with_gaps = torch.cat([x, x[:, :8]], 1)[:, :D]
    rows, places = [], torch.full_like(experts, -1)
    with emulated(arch="sm_90a", multiprocessors=3):
        for ep_rank in range(2):
            layer = rank(ep_size=2, ep_rank=ep_rank)
            of_rank, row_of_pair = layer.rows_of_pairs(with_gaps, weights, experts)
            local = row_of_pair >= 0
            assert torch.equal(local, experts // 2 == ep_rank)
            places[local] = torch.arange(int(local.sum()), dtype=torch.int32) + sum(map(len, rows))
            rows.append(of_rank[row_of_pair[local]])
        assert layer.rows_of_pairs(x[:0], weights[:0], experts[:0])[0].shape == (0, D)
        found = layer.sum_of_pairs(torch.cat(rows), places, experts, shared)
    assert same_bits(found, wanted)


def test_loading_again_gives_the_same(rank: Callable[..., PackedExperts]) -> None:
    """`/update_weights_from_disk`, and the reload of the old weights if it fails."""
    layer = rank()
    before = forward(layer)
    pointers = [parameter.data_ptr() for parameter in layer.parameters()]
    load(layer)
    assert same_bits(forward(layer), before)
    assert pointers == [parameter.data_ptr() for parameter in layer.parameters()]  # CUDA graphs read these addresses


MATRICES = {"w1": ("w13", slice(0, CHANNELS)), "w2": ("w2", slice(None)), "w3": ("w13", slice(CHANNELS, None))}


@pytest.mark.parametrize("chosen", [("w1",), ("w3",), ("w2",), ("w3", "w1"), ("w1", "w2", "w3")], ids="+".join)
@pytest.mark.parametrize("parallel", [{}, {"tp_size": 2, "tp_rank": 1}, {"ep_size": 2, "ep_rank": 1}], ids=str)
def test_a_weight_update_of_some_matrices(
    rank: Callable[..., PackedExperts], parallel: dict[str, int], chosen: tuple[str, ...]
) -> None:
    """Exchanged, the bytes equal those of a load of the new matrices, at the same addresses; undone, the old ones."""
    layer, packed = rank(**parallel), random_experts(EXPERTS, D, CHANNELS)

    def new(expert: int, shard: str) -> tuple[Tensor, Tensor]:
        matrix, rows = MATRICES[shard]
        return getattr(packed, matrix)[expert - 1, rows], getattr(packed, f"{matrix}_scale")[expert - 1, rows]

    def each(do: Callable[[Tensor, Tensor, str, str, int], None]) -> None:
        for expert in (3, 1, 0):
            for shard in chosen:
                for suffix, tensor in zip(("", "_scale_inv"), new(expert, shard), strict=True):
                    do(getattr(layer, f"{MATRICES[shard][0]}_weight{suffix}"), tensor, "a name", shard, expert)

    parts: dict[str, Part] = {}
    each(partial(layer.stage, parts))
    before = [bytes_of(parameter) for parameter in layer.parameters()]
    pointers = [parameter.data_ptr() for parameter in layer.parameters()]
    for part in parts.values():
        part.exchange()
    found = [bytes_of(parameter) for parameter in layer.parameters()]
    assert pointers == [parameter.data_ptr() for parameter in layer.parameters()]
    for part in parts.values():
        part.exchange()
    assert all(map(torch.equal, (bytes_of(parameter) for parameter in layer.parameters()), before))
    load_without_end(layer)
    each(layer.weight_loader)
    layer.arrange()
    assert all(map(torch.equal, (bytes_of(parameter) for parameter in layer.parameters()), found))
    assert not all(map(torch.equal, found, before))


def bytes_of(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.uint8).clone()


def test_weights_are_rearranged_in_place(rank: Callable[..., PackedExperts]) -> None:
    layer = rank()
    for matrix in ("w13", "w2"):
        found = getattr(layer.arranged, matrix)
        assert found.codes.data_ptr() == getattr(layer, f"{matrix}_weight").data_ptr()
        scale = getattr(layer, f"{matrix}_weight_scale_inv")
        inside = range(scale.data_ptr(), scale.data_ptr() + scale.nbytes)
        assert found.shifts.data_ptr() in inside and found.factors.data_ptr() in inside


def test_time_and_memory_of_arranging_are_logged_once(
    rank: Callable[..., PackedExperts], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleList([rank(), rank(), nn.Linear(2, 2)])
    assert all(layer.seconds > 0 for layer in model[:2])
    with caplog.at_level(logging.INFO):
        packed_experts.log_arrangement(model)
        packed_experts.log_arrangement(nn.Linear(2, 2))
    (line,) = caplog.messages
    size = 2 * sum(parameter.nbytes for parameter in model[0].parameters()) / 2**30
    assert f"the weights of 2 layers, {size:.2f} GiB, rearranged in place for runner dsv4 in" in line


def test_dummy_weights_say_something_and_are_the_same_at_every_start(
    rank: Callable[..., PackedExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's `--load-format dummy` fills floating-point numbers and leaves packed codes as they are."""
    from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

    rank()  # sets the sizes of the ranks; the loaded module itself is not used
    layers = [PackedExperts(LAYER, "experts") for _ in range(2)]
    for layer in layers:
        initialize_dummy_weights(layer)
    for name, parameter in layers[0].named_parameters():
        assert torch.equal(parameter.view(torch.uint8), dict(layers[1].named_parameters())[name].view(torch.uint8))
    for codes in (layers[0].w13_weight, layers[0].w2_weight):
        counts = torch.bincount(codes.view(torch.uint8).flatten().int(), minlength=256)
        assert (counts > codes.numel() / 512).all()


def test_rounded_codes_are_logged(rank: Callable[..., PackedExperts], caplog: pytest.LogCaptureFixture) -> None:
    layer = rank()
    load_without_end(layer)
    layer.w2_weight_scale_inv.data.view(torch.uint8)[0, 0, 0] = 1
    with caplog.at_level(logging.WARNING):
        layer.arrange()
    assert "codes were rounded" in caplog.text and "marlin keeps them" in caplog.text


class Given:
    """Stands for the gate and for the shared expert."""

    def __init__(self, result: object) -> None:
        self.result = result

    def logits(self, x: Tensor) -> None:
        """The product of the gate, which `__call__` does not need; also the shared expert's first two operations."""

    gate_up = hidden = logits

    def __call__(self, *inputs: object) -> object:
        return self.result

    down = __call__


@pytest.mark.parametrize("most", [10, 11], ids=["sums", "leaves-rows"])
@pytest.mark.parametrize(("tp_size", "parts"), [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
def test_the_layer_adds_the_shared_expert(
    rank: Callable[..., PackedExperts], tp_size: int, parts: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is in bf16 on one rank; on several ranks a rank's part has the dtype in which parts are added. Of few
    tokens the rows are left to the boundary."""
    from ptx_emulator import emulated

    x, weights, ids = batch()
    shared = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    layer = nn.Module.__new__(moe.MoE)
    nn.Module.__init__(layer)
    layer.gate, layer.shared_experts, layer.tp_size = Given((weights, ids)), Given(shared), tp_size
    layer.experts = rank()
    summed: list[Tensor] = []

    def output(part: Tensor | ExpertRows, rows: RowShards, dtype: torch.dtype) -> Tensor:
        assert isinstance(part, ExpertRows) == (most == 11)
        summed.append(expert_rows.summed(part))
        return (2 * summed[0]).to(dtype)

    monkeypatch.setattr(moe, "output_of_experts", output)
    monkeypatch.setattr(moe, "joins", lambda tokens: tokens <= most)
    monkeypatch.setattr(moe, "dtype_of_parts", lambda device, dtype: parts)
    routed = forward(layer.experts)
    with emulated(arch="sm_90a", multiprocessors=3):
        found = layer(SublayerInput(x, None), torch.zeros(len(x), dtype=torch.int64))
        if tp_size == 1:
            assert isinstance(found, ExpertRows) == (most == 11)
            found = expert_rows.summed(found)
    if tp_size == 1:
        assert not summed and same_bits(found, routed.bfloat16() + shared)
    else:
        assert same_bits(summed[0], routed.to(parts) + shared.to(parts))
        assert same_bits(found, (2 * summed[0]).bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nvfp4_experts": True}, "it is for MXFP4 experts"),
        ({"moe_intermediate_size": 192}, "192 intermediate channels of a rank must be multiples of 128"),
        ({"hidden_size": 128}, "hidden size 128 and 512 intermediate channels of a rank must be .* at least 256"),
    ],
)
def test_what_it_does_not_serve_is_named(
    change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = SimpleNamespace(moe_tp_size=1, moe_tp_rank=0, moe_ep_size=1, moe_ep_rank=0)
    monkeypatch.setattr(local_experts, "get_parallel", lambda: parallel)
    with pytest.raises(ConfigError, match=message):
        packed_experts_of(SimpleNamespace(**(vars(LAYER) | change)), "experts")


def test_another_gpu_gets_sglang_s_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(device="cuda", tp_size=4, ep_size=2)
    hf_config = SimpleNamespace(hidden_size=4096, moe_intermediate_size=2048)
    model = SimpleNamespace(hf_config=hf_config, is_fp4_experts=True, nvfp4_moe_meta=None)
    assert experts_runner.serves(arguments, model)
    assert not experts_runner.serves(SimpleNamespace(device="cpu", tp_size=1, ep_size=1), model)
    assert not experts_runner.serves(arguments, SimpleNamespace(**(vars(model) | {"nvfp4_moe_meta": object()})))
    assert not experts_runner.serves(arguments, SimpleNamespace(**(vars(model) | {"is_fp4_experts": False})))
    # With sixteen ranks each has 128 channels, too few for factors in addition to shifts.
    assert not experts_runner.serves(SimpleNamespace(device="cuda", tp_size=16, ep_size=1), model)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    assert not experts_runner.serves(arguments, model)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed_experts, "is_chosen", lambda: True)
    yield


@pytest.mark.slow
def test_its_kernels_are_compiled_ahead(chosen: None, rank: Callable[..., PackedExperts]) -> None:
    """Every kernel that a forward of few, of more or of many tokens runs."""
    from ptx_emulator import emulated

    from dsv4_kernels.moe.sm90 import launch

    model = SimpleNamespace(hidden_size=D, experts_per_token=CHOSEN, experts_sum_fp32=False, joins_launches=False)
    with emulated(arch="sm_90a", multiprocessors=3):
        for job in launch.compile_jobs(model, launch.ARCH):
            job()
        known = len(compile_cache.origins())
        layer = rank()
        x, *choice = batch()
        work = layer.plan(*choice)
        layer.rows_to_sum(layer.multiply(x, work, None), work, x, torch.bfloat16).total()
        for tokens in (10 * EXPERTS, 64 * EXPERTS):
            x = torch.zeros(tokens, D, dtype=torch.bfloat16)
            ids = torch.arange(CHOSEN, dtype=torch.int32).expand(tokens, CHOSEN).contiguous()
            work = layer.plan(torch.ones(ids.shape), ids)
            layer.rows_to_sum(layer.multiply(x, work, None), work, x, torch.bfloat16).total()
            layer.sum_of_pairs(*layer.rows_of_pairs(x, torch.ones(ids.shape), ids), ids, x)
    assert len(compile_cache.origins()) == known


def test_the_deterministic_flag_takes_it(rank: Callable[..., PackedExperts]) -> None:
    model = nn.Module()
    model.experts = rank()
    assert sglang_operators.problems_of_modules(model) == []
