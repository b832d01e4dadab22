"""Likely mistakes in an implementation of DSpark, planted one at a time: the comparison with equations must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from model.drafted import Drafted, check_block, check_steps
from selection.marks import with_slow_marks
from torch import Tensor

from sglang_dsv4.attention import backend as backend_module
from sglang_dsv4.model_config.layer_kinds import LayerKind
from sglang_dsv4.models import deepseek_v4


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dspark"), "float32", "off")


@dataclass
class Plant:
    """The draft under test, and pytest's monkeypatch."""

    drafted: Drafted
    patch: pytest.MonkeyPatch

    @property
    def model(self) -> Any:
        return self.drafted.draft.model

    @property
    def stages(self) -> list[Any]:
        return list(self.model.model.stages)

    def wrap(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        self.patch.setattr(owner, name, partial(around, getattr(owner, name)))

    def metadata(self, change: Callable[[Any], dict[str, Tensor]]) -> None:
        """Replace fields of a block's metadata."""

        def around(original: Callable[..., Any], *arguments: Any) -> Any:
            found = original(*arguments)
            return replace(found, **change(found))

        self.wrap(backend_module, "block_metadata", around)

    def columns(self, hidden: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Hide the keys for which `hidden(row of the block [T, 1], column [1, W + k])` is true."""

        def change(found: Any) -> dict[str, Tensor]:
            rows, columns = (torch.arange(n) for n in found.window_rows.shape)
            return {"window_rows": found.window_rows.masked_fill(hidden(rows[:, None] % 5, columns[None]), -1)}

        self.metadata(change)

    def taps(self, change: Callable[[Tensor], Tensor]) -> None:
        self.wrap(self.model.model, "store_context", lambda original, taps, *rest: original(change(taps), *rest))


def tap_of_the_layers_input(plant: Plant) -> None:
    plant.patch.setattr(plant.drafted.harness.model.model, "tapped_layers", (1, 2, 3))


def first_stream_for_their_mean(plant: Plant) -> None:
    plant.patch.setattr(deepseek_v4, "mean_of_streams", lambda streams: streams[:, 0])


def taps_in_reverse(plant: Plant) -> None:
    plant.taps(lambda taps: taps.unflatten(-1, (3, -1)).flip(1).flatten(1))


def no_main_norm(plant: Plant) -> None:
    plant.patch.setattr(plant.model.model.main_norm, "forward", lambda x: x)


def last_norm_for_main_norm(plant: Plant) -> None:
    plant.patch.setattr(plant.model.model.main_norm, "forward", plant.model.model.norm.forward)


def attention_norm_on_the_context(plant: Plant) -> None:
    for stage in plant.stages:

        def around(original: Callable[..., None], x: Tensor, *rest: Any, norm: Any = stage.attn_norm) -> None:
            original(norm(x), *rest)

        plant.wrap(stage.attn, "store_context", around)


def one_stages_rows_for_all(plant: Plant) -> None:
    for stage in plant.stages[1:]:
        plant.patch.setitem(stage.attn._modules, "kv_norm", plant.stages[0].attn.kv_norm)


def context_a_position_late(plant: Plant) -> None:
    def around(original: Callable[..., None], taps: Tensor, rows: Tensor, positions: Tensor, pool: Any) -> None:
        original(taps, rows, positions + 1, pool)

    plant.wrap(plant.model.model, "store_context", around)


def causal_block(plant: Plant) -> None:
    plant.columns(lambda row, column: column - 128 > row)


def window_that_moves_with_the_row(plant: Plant) -> None:
    plant.columns(lambda row, column: column < row)


def window_of_127(plant: Plant) -> None:
    plant.columns(lambda row, column: column < 1)


def block_without_itself(plant: Plant) -> None:
    plant.columns(lambda row, column: column >= 128)


def block_a_position_late(plant: Plant) -> None:
    plant.wrap(plant.model.model, "forward", lambda original, x, positions, *rest: original(x, positions + 1, *rest))


def wrong_noise(plant: Plant) -> None:
    plant.patch.setitem(plant.drafted.harness.hf_config, "dspark_noise_token_id", 998)


def yarn_in_the_draft(plant: Plant) -> None:
    frequencies = plant.model.dsv4_config.rope(LayerKind.HCA).frequencies()
    for stage in plant.stages:
        plant.patch.setitem(stage.attn.rope._buffers, "frequencies", frequencies)


def no_inverse_rope(plant: Plant) -> None:
    for stage in plant.stages:
        plant.patch.setattr(stage.attn.rope, "undo", lambda x, positions: x)


def no_sink(plant: Plant) -> None:
    for stage in plant.stages:
        plant.patch.setattr(stage.attn.attn_sink, "data", torch.full_like(stage.attn.attn_sink, -torch.inf))


def no_shared_expert(plant: Plant) -> None:
    for stage in plant.stages:
        weight = stage.ffn.shared_experts.w2.weight
        plant.patch.setattr(weight, "data", torch.zeros_like(weight))


def a_stage_left_out(plant: Plant) -> None:
    plant.patch.setitem(plant.model.model._modules, "stages", plant.model.model.stages[:2])


def markov_row_of_the_next_token(plant: Plant) -> None:
    plant.wrap(plant.model.markov_head, "get_prev_embeddings", lambda original, ids: original((ids + 1) % 1024))


def markov_row_of_the_anchor(plant: Plant) -> None:
    def around(original: Callable[..., Any], previous: Tensor, **state: Any) -> Any:
        return original(torch.full_like(previous, 77), **state)

    plant.wrap(plant.model.markov_head, "step_bias", around)


def no_markov_head(plant: Plant) -> None:
    plant.patch.setattr(plant.model.markov_head.markov_w2, "data", torch.zeros_like(plant.model.markov_head.markov_w2))


IN_A_BLOCK = (
    tap_of_the_layers_input,
    first_stream_for_their_mean,
    taps_in_reverse,
    no_main_norm,
    last_norm_for_main_norm,
    attention_norm_on_the_context,
    one_stages_rows_for_all,
    context_a_position_late,
    causal_block,
    window_that_moves_with_the_row,
    window_of_127,
    block_without_itself,
    block_a_position_late,
    wrong_noise,
    yarn_in_the_draft,
    no_inverse_rope,
    no_sink,
    no_shared_expert,
    a_stage_left_out,
    markov_row_of_the_next_token,
    markov_row_of_the_anchor,
    no_markov_head,
)


@pytest.mark.parametrize("mistake", IN_A_BLOCK, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_a_block(drafted: Drafted, mistake: Callable[[Plant], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(Plant(drafted, patch))
        with pytest.raises(AssertionError, match="differ"):
            check_block(drafted, 200)
    check_block(drafted, 200)


def nothing_kept(plant: Plant) -> None:
    """Rows of the block stay in the ring rows of context rows."""
    plant.patch.setattr(plant.drafted.draft, "commit", lambda *arguments: None)


def without_the_anchors_row(plant: Plant) -> None:
    def around(original: Callable[..., None], request: Any, taps: Tensor, first: int, kept: int) -> None:
        if kept > 1:
            original(request, taps[1:], first + 1, kept - 1)

    plant.wrap(plant.drafted.draft, "commit", around)


def a_ring_of_128(plant: Plant) -> None:
    """A block's rows overwrite the oldest rows that it must read."""
    slots, pool = plant.drafted.draft.pool.plan.request_slots, plant.drafted.draft.pool

    def small(rows: Tensor) -> Tensor:
        return torch.where(rows < 0, rows, rows // 256 * 256 + rows % 128).clamp(max=slots * 256 - 1)

    plant.metadata(lambda found: {"window_rows": small(found.window_rows), "ring_rows": small(found.ring_rows)})
    plant.patch.setattr(type(pool), "swa_req_ring_size", 256, raising=False)
    plant.wrap(
        plant.model.model,
        "store_context",
        lambda original, taps, rows, positions, pool: original(taps, small(rows), positions, pool),
    )


def rows_of_the_batchs_order(plant: Plant) -> None:
    """Rings chosen by a request's index in the batch: here another request's ring."""
    plant.metadata(lambda found: {"window_rows": torch.where(found.window_rows < 0, -1, found.window_rows % 256)})


@pytest.mark.parametrize(
    "mistake",
    with_slow_marks([nothing_kept, without_the_anchors_row, a_ring_of_128, rows_of_the_batchs_order], [nothing_kept]),
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_from_step_to_step(drafted: Drafted, mistake: Callable[[Plant], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(Plant(drafted, patch))
        with pytest.raises(AssertionError, match="at 2"):
            check_steps(drafted, 3)
    check_steps(drafted, 3)
