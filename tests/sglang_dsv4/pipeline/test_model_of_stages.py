"""The model in stages, in one process: each stage is a model of its own, with its pools; the bits are the whole's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model.harness import Harness
from model.oracle import QUANTISABLE
from model.served import Served
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from torch import Tensor, nn

from sglang_dsv4.model_config.stages import stages
from sglang_dsv4.models import deepseek_v4

COUNT = 3
TOKENS = 280


class Stages:
    """A harness for each stage of a checkpoint; the streams go from one to the next."""

    def __init__(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.harnesses = []
        for index in range(COUNT):
            of = lambda config, index=index: stages(config.num_hidden_layers, COUNT)[index]  # noqa: E731
            monkeypatch.setattr(deepseek_v4, "stage_of_this_process", of)
            self.harnesses.append(Harness(checkpoint, **options))

    def run(self, tokens: Tensor, parts: list[int]) -> Tensor:
        """Return logits [T, vocabulary] of one request, its tokens in `parts`; parts of one token are decoded."""
        opened, logits, begin = [harness.open() for harness in self.harnesses], [], 0
        for count in parts:
            mode = "decode" if count == 1 else "extend"
            sent: PPProxyTensors | None = None
            for harness, request in zip(self.harnesses, opened, strict=True):
                output = harness.forward([(request, tokens[begin : begin + count])], mode, sent)
                sent = output if isinstance(output, PPProxyTensors) else None
            logits.append(output.next_token_logits.clone())
            begin += count
        for harness, request in zip(self.harnesses, opened, strict=True):
            harness.close(request)
        return torch.cat(logits)


@pytest.mark.parametrize(
    ("dtype", "qat"), [("bfloat16", "full"), pytest.param("float32", "off", marks=pytest.mark.slow)]
)
def test_stages_have_the_bits_of_the_whole(
    dtype: str, qat: str, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill in chunks and decode; hash-routed layers are on the first stage and on a later one."""
    served = serve("flash-like", dtype=dtype, qat=qat, **{**QUANTISABLE, "num_hash_layers": 3})
    whole, tokens = served.harness, served.corpus[0][:TOKENS]
    parts = [256, 20, 1, 1, 1, 1]
    divided = Stages(Path(whole.server_args.model_path), monkeypatch, dtype=dtype, qat=qat)
    expected = torch.cat([logits for request in [whole.open()] for logits in in_parts(whole, request, tokens, parts)])
    assert torch.equal(divided.run(tokens, parts), expected)
    models = [harness.model for harness in divided.harnesses]
    assert sum(map(bytes_of, models)) == bytes_of(whole.model), "each parameter is on one stage"
    names = [name for model in models for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.model.named_parameters())
    pools = [harness.pool for harness in divided.harnesses]
    assert [pool.geometry.first_layer for pool in pools] == [model.start_layer for model in models]
    assert sum(pool.plan.bytes_per_token for pool in pools) == whole.pool.plan.bytes_per_token
    assert sum(pool.plan.bytes_per_tail for pool in pools) == whole.pool.plan.bytes_per_tail


def in_parts(harness: Harness, request: Any, tokens: Tensor, parts: list[int]) -> list[Tensor]:
    """Return the logits of each part."""
    found, begin = [], 0
    for count in parts:
        mode = "decode" if count == 1 else "extend"
        found += harness.step([(request, tokens[begin : begin + count])], mode)
        begin += count
    harness.close(request)
    return found


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("has_output", [False, True])
def test_marks_travel_with_the_tokens(has_output: bool) -> None:
    """Through SGLang's own functions, from the last stage's result to any stage's."""
    import sglang.srt.managers.scheduler  # noqa: F401 - as in a scheduler's process, before the plugins
    from sglang.srt.plugins import load_plugins

    load_plugins()
    marks, unusable = torch.tensor([0.0, 2e20]), torch.tensor([True, False])
    last = SimpleNamespace(
        next_token_ids=torch.tensor([5, 6]),
        next_draft_input=None,
        accept_lens=None,
        logits_output=SimpleNamespace(
            sampling_mask_output=None, auxiliary_device_output=None, marks=marks, unusable=unusable
        ),
    )
    scheduler = SimpleNamespace(
        _pp_spec_relay=False,
        pp_group=SimpleNamespace(is_first_rank=False),
        future_map=SimpleNamespace(stash=lambda *_: None),
    )
    batch = SimpleNamespace(return_logprob=False, spec_algorithm=SimpleNamespace(is_dspark=lambda: False))
    tensors = SchedulerPPMixin._pp_prepare_tensor_dict(scheduler, last, batch)
    if not has_output:  # a chunk whose logits were not computed
        tensors = {"next_token_ids": tensors["next_token_ids"]}
    batch.req_pool_indices, metadata = None, SimpleNamespace(can_run_cuda_graph=False, fpm_timing=None)
    result = SchedulerPPMixin._pp_prep_batch_result(scheduler, batch, metadata, PPProxyTensors(tensors))
    if not has_output:
        assert result.logits_output is None
        return
    assert torch.equal(result.logits_output.marks, marks) and torch.equal(result.logits_output.unusable, unusable)
