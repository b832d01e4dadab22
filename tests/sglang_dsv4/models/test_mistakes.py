"""Every mistake of the specification's section 11 (and of section 9's list of bugs seen elsewhere), planted in our code
one at a time: the comparison with transformers must fail, by far more than its tolerance.

The code under test is patched at run time (functions, buffers, parameters); the oracle is not. Test ids are the
specification's words.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from model.compare import TOLERANCE, assert_equal_logits, worst_difference
from model.served import Served
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor, nn

from dsv4_kernels.compressor import ref as compressor_ref
from dsv4_kernels.hyper_connection import ref as hc_ref
from dsv4_kernels.indexer import ref as indexer_ref
from dsv4_kernels.norm_rope_store import ref as norm_rope_store_ref
from dsv4_kernels.rope import apply_rope
from sglang_dsv4.attention.backend import Window
from sglang_dsv4.attention.metadata import ForwardMetadata
from sglang_dsv4.layers import moe
from sglang_dsv4.layers import rope as layer_rope

PROMPT = 420  # three HCA entries, 105 CSA entries of which 24 are selected
CHUNK = 96
NEGLIGIBLE = 100 * TOLERANCE


@dataclass(frozen=True)
class Plant:
    """The model and backend that a mistake patches, with pytest's monkeypatch."""

    served: Served
    patch: pytest.MonkeyPatch

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.served.harness.model.model.layers)

    def ratio(self, layer: nn.Module) -> int:
        return self.served.config["compress_ratios"][self.layers.index(layer)]

    def parameter(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        """Replace the values of a parameter or buffer."""
        self.patch.setattr(getattr(module, name), "data", value)

    def backend(self, name: str, wrap: Callable) -> None:
        """Replace backend.<name> by wrap(original)."""
        self.patch.setattr(self.served.harness.backend, name, wrap(getattr(self.served.harness.backend, name)))

    def metadata(self, change: Callable) -> None:
        """Call change(metadata) after the backend has derived it."""
        backend = self.served.harness.backend

        def wrap(original: Callable) -> Callable:
            def init(forward_batch: ForwardBatch) -> None:
                original(forward_batch)
                change(backend.forward_metadata)

            return init

        self.backend("init_forward_metadata", wrap)

    def rope(self, replacement: Callable) -> None:
        """Use `replacement(apply_rope)` for every rotation and its inverse."""
        for module in (norm_rope_store_ref, compressor_ref, indexer_ref):
            self.patch.setattr(module, "apply_rope", replacement(apply_rope))
        self.patch.setattr(layer_rope, "apply_rope_in_place", replacement(apply_rope))

    def frequencies(self, ratios: tuple[int, ...], value: torch.Tensor) -> None:
        for layer in self.layers:
            if self.ratio(layer) in ratios:
                for module in layer.attn.modules():
                    if hasattr(module, "frequencies"):
                        self.parameter(module, "frequencies", value.to(module.frequencies.dtype))


def neox_rope(plant: Plant) -> None:
    def replacement(original: Callable) -> Callable:
        def rope(x: Tensor, positions: Tensor, frequencies: Tensor, inverse: bool = False) -> Tensor:
            count = len(frequencies)
            interleave = torch.arange(2 * count).view(2, count).T.flatten()
            tail = x[..., -2 * count :][..., interleave]
            out = original(torch.cat([x[..., : -2 * count], tail], -1), positions, frequencies, inverse=inverse)
            return torch.cat([x[..., : -2 * count], out[..., -2 * count :][..., interleave.argsort()]], -1)

        return rope

    plant.rope(replacement)


def no_inverse_rope(plant: Plant) -> None:
    def replacement(original: Callable) -> Callable:
        return lambda x, p, f, inverse=False: x if inverse else original(x, p, f)

    plant.rope(replacement)


def no_sink(plant: Plant) -> None:
    for layer in plant.layers:
        plant.parameter(layer.attn, "attn_sink", torch.full_like(layer.attn.attn_sink, -torch.inf))


def comb_transposed(plant: Plant) -> None:
    original = hc_ref.hc_post
    plant.patch.setattr(
        hc_ref, "hc_post", lambda y, x, post, comb: original(y, x, post, comb.transpose(1, 2).contiguous())
    )


def five_sinkhorn_iterations(plant: Plant) -> None:
    for layer in plant.layers:
        plant.patch.setattr(layer.hc_attn, "iterations", 5)
        plant.patch.setattr(layer.hc_ffn, "iterations", 5)


def post_without_factor_two(plant: Plant) -> None:
    original = hc_ref.hc_post
    plant.patch.setattr(hc_ref, "hc_post", lambda y, x, post, comb: original(y, x, post / 2, comb))


def window_minus_one(plant: Plant) -> None:
    def wrap(original: Callable) -> Callable:
        def window(layer_id: int) -> Window:
            rows = original(layer_id)
            index = rows[1].clone()
            index[:, 0] = -1
            return rows._replace(index=index)

        return window

    plant.backend("window", wrap)


def window_plus_one(plant: Plant) -> None:
    def wrap(original: Callable) -> Callable:
        def window(layer_id: int) -> Window:
            rows = original(layer_id)
            before = (rows.index[:, :1] - 1).where(rows.index[:, :1] > 0, -1)
            return rows._replace(index=torch.cat([before, rows.index], 1))

        return window

    plant.backend("window", wrap)


def plain_theta(theta: float) -> Callable:
    def mistake(plant: Plant) -> None:
        dim = plant.served.config["qk_rope_head_dim"]
        plant.frequencies((4, 128), theta ** -(torch.arange(0, dim, 2) / dim))

    return mistake


def yarn_on_window_layers(plant: Plant) -> None:
    plant.frequencies((0,), plant.served.reference.frequencies(4))


def mscale(plant: Plant) -> None:
    def wrap(original: Callable) -> Callable:
        factor = 0.1 * torch.tensor(16.0).log().item() + 1
        return lambda layer, q, window, selected, sink, scale, *others: original(
            layer, q, window, selected, sink, scale * factor**2, *others
        )

    plant.backend("attend", wrap)


def each_compressor(plant: Plant, ratio: int, main: bool = True, indexer: bool = True) -> list:
    chosen = []
    for layer in plant.layers:
        if plant.ratio(layer) == ratio:
            chosen += [layer.attn.compressor] if main else []
            chosen += [layer.attn.indexer.compressor] if ratio == 4 and indexer else []
    return chosen


def ape_zero(plant: Plant) -> None:
    for module in each_compressor(plant, 4) + each_compressor(plant, 128):
        plant.parameter(module, "ape", torch.zeros_like(module.ape))


def csa_halves_swapped(plant: Plant) -> None:
    for layer in plant.layers:
        if plant.ratio(layer) == 4:
            projection = layer.attn.projection
            matrices = projection.weight.split(projection.widths)  # the third matrix computes the index heads' weights
            rolled = [m if i == 2 else m.roll(len(m) // 2, 0) for i, m in enumerate(matrices)]
            plant.parameter(projection, "weight", torch.cat(rolled))
    for module in each_compressor(plant, 4):
        plant.parameter(module, "ape", module.ape.data.roll(module.ape.shape[1] // 2, 1))


def entry_rope_at_last_token(plant: Plant) -> None:
    def change(metadata: ForwardMetadata) -> None:
        for ratio, groups in metadata.compress.items():
            metadata.compress[ratio] = replace(groups, entry_positions=groups.entry_positions + ratio - 1)

    plant.metadata(change)


def hca_visible_one_late(plant: Plant) -> None:
    def change(metadata: ForwardMetadata) -> None:
        metadata.visible[128] = (metadata.positions // 128).int()

    plant.metadata(change)


def csa_visible_one_late(plant: Plant) -> None:
    def change(metadata: ForwardMetadata) -> None:
        metadata.visible[4] = (metadata.positions // 4).int()

    plant.metadata(change)


def indexer_without_causal_mask(plant: Plant) -> None:
    """A query of a chunk also reads entries that the chunk closes after it."""

    def change(metadata: ForwardMetadata) -> None:
        last = metadata.visible[4].amax()
        metadata.visible[4] = torch.full_like(metadata.visible[4], int(last))

    plant.metadata(change)


def no_overlap_between_chunks(plant: Plant) -> None:
    """The previous group's half is forgotten at the start of each forward."""

    def change(metadata: ForwardMetadata) -> None:
        plan = metadata.compress[4]
        first = plan.entry_positions == plan.entry_positions.amin()
        plan.sources[first, :4] = -1

    plant.metadata(change)


def no_routed_scaling(plant: Plant) -> None:
    for layer in plant.layers:
        plant.patch.setattr(layer.ffn.gate, "scale", 1.0)


def weights_from_biased_scores(plant: Plant) -> None:
    original = moe.route_topk_logits

    def route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
        _, experts = original(logits, bias, top_k, scale)
        score = torch.nn.functional.softplus(logits).sqrt() + bias
        weights = score.gather(1, experts.long())
        return weights / weights.sum(-1, keepdim=True) * scale, experts

    plant.patch.setattr(moe, "route_topk_logits", route)


def weights_not_normalised(plant: Plant) -> None:
    for name in ("route_topk_logits", "route_hash_logits"):
        original = getattr(moe, name)

        def route(logits: Tensor, *rest: Any, original: Callable = original) -> tuple[Tensor, Tensor]:
            _, experts = original(logits, *rest)
            score = torch.nn.functional.softplus(logits).sqrt()
            return score.gather(1, experts.long()) * rest[-1], experts

        plant.patch.setattr(moe, name, route)


def no_clamp(plant: Plant) -> None:
    for layer in plant.layers:
        plant.patch.setattr(layer.ffn.experts, "swiglu_limit", 1e9)
        plant.patch.setattr(layer.ffn.shared_experts, "swiglu_limit", 1e9)


def no_shared_clamp(plant: Plant) -> None:
    for layer in plant.layers:
        plant.patch.setattr(layer.ffn.shared_experts, "swiglu_limit", 1e9)


def two_sided_gate_clamp(plant: Plant) -> None:
    # With -limit the mistake stays below the tolerance for any input: silu(-10) is -4.5e-4. With -1 it is visible.
    def mistake(gate_up: Tensor, limit: float) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate.clamp(-1.0, limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)

    plant.patch.setattr(moe, "fused_swiglu", mistake)


def top_k_all(plant: Plant) -> None:
    plant.backend(
        "select",
        lambda original: lambda layer, q, weights, top_k, *others: original(layer, q, weights, PROMPT, *others),
    )


def top_k_minus_one(plant: Plant) -> None:
    plant.backend(
        "select",
        lambda original: lambda layer, q, weights, top_k, *others: original(layer, q, weights, top_k - 1, *others),
    )


def hash_by_top_k(plant: Plant) -> None:
    def route(logits: Tensor, expert_table: Tensor, token_ids: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return moe.route_topk_logits(logits, torch.zeros(logits.shape[1]), expert_table.shape[1], scale)

    plant.patch.setattr(moe, "route_hash_logits", route)


def no_query_norm(plant: Plant) -> None:
    original = norm_rope_store_ref.rms_norm
    plant.patch.setattr(
        norm_rope_store_ref, "rms_norm", lambda x, weight, eps: x if weight is None else original(x, weight, eps)
    )


MISTAKES = {
    "NeoX rope": neox_rope,
    "no inverse rope": no_inverse_rope,
    "no sink": no_sink,
    "comb transposed": comb_transposed,
    "5 Sinkhorn iterations": five_sinkhorn_iterations,
    "post without its factor 2": post_without_factor_two,
    "window -1": window_minus_one,
    "window +1": window_plus_one,
    "theta 1e4 on compressed layers": plain_theta(1e4),
    "no YaRN on compressed layers": plain_theta(160000.0),
    "YaRN on SWA layers": yarn_on_window_layers,
    "mscale": mscale,
    "ape = 0": ape_zero,
    "CSA halves swapped": csa_halves_swapped,
    "entry rope at last token": entry_rope_at_last_token,
    "HCA visible one late": hca_visible_one_late,
    "CSA visible one late": csa_visible_one_late,
    "indexer without causal mask": indexer_without_causal_mask,
    "CSA overlap lost between chunks": no_overlap_between_chunks,
    "no routed scaling": no_routed_scaling,
    "weights from biased scores": weights_from_biased_scores,
    "weights not normalised": weights_not_normalised,
    "no clamp": no_clamp,
    "no shared clamp": no_shared_clamp,
    "two-sided gate clamp": two_sided_gate_clamp,
    "top-k = all": top_k_all,
    "top-k - 1": top_k_minus_one,
    "hash by top-k": hash_by_top_k,
    "no per-head query norm": no_query_norm,
}


@pytest.fixture(scope="module", params=["flash-like", pytest.param("pro-like", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    return serve(request.param)


def prompt_logits(served: Served) -> Tensor:
    return served.harness.run(served.corpus[1][:PROMPT], CHUNK, decode_from=PROMPT - 4)


def test_no_mistake(served: Served) -> None:
    assert_equal_logits(prompt_logits(served), served.expected[1])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted(served: Served, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "YaRN on SWA layers" and 0 not in served.config["compress_ratios"][:-1]:
        pytest.skip("a pro-like schedule has no window-only layer but the MTP module's")
    MISTAKES[mistake](Plant(served, monkeypatch))
    actual = prompt_logits(served)
    print(f"{mistake}: {worst_difference(actual, served.expected[1]):.2f}")
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_equal_logits(actual, served.expected[1])
    assert worst_difference(actual, served.expected[1]) > NEGLIGIBLE


def test_every_mistake_was_undone(served: Served) -> None:
    assert_equal_logits(prompt_logits(served), served.expected[1])


def test_stale_overlap_in_a_reused_slot(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of the release: entry 0 reads the group before it from the request slot, where older rows are."""

    def change(metadata: ForwardMetadata) -> None:
        plan, backend = metadata.compress[4], served.harness.backend
        rows = backend.token_to_kv_pool.geometry.state_rows(4)
        first = (plan.entry_positions == 0).nonzero().flatten()
        slot = metadata.req_slots[0].item()
        plan.sources[first, :4] = torch.arange(rows - 4, rows, dtype=plan.sources.dtype) + slot * rows

    served.harness.run(served.corpus[2][:300])
    prompt = served.corpus[3][:12]
    assert_equal_logits(served.harness.run(prompt, decode_from=2), served.expected[3])
    Plant(served, monkeypatch).metadata(change)
    with pytest.raises(AssertionError, match="differ by more than"):
        assert_equal_logits(served.harness.run(prompt, decode_from=2), served.expected[3])
