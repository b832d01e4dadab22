"""SGLang's manager of weight updates, with its own methods, on models that a `Harness` loaded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from model.checkpoint_tensors import Checkpoint, snapshot
from model.harness import Harness
from torch import Tensor, nn

Named = list[tuple[str, Tensor]]


class Trainer:
    """Sends weight updates to a target and, if given, a draft, as a scheduler of one rank would.

    Attributes:
        flushes: number of flushes of the prefix cache.
        idle: whether the scheduler is idle.
    """

    def __init__(self, harness: Harness, draft: nn.Module | None = None) -> None:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.managers.tp_worker import TpModelWorker

        self.harness, self.flushes, self.idle, self.versions = harness, 0, True, []
        self.models = {"target": harness.model} | ({} if draft is None else {"draft": draft})
        worker = SimpleNamespace(
            model_runner=harness.runner,
            weight_update_runners=lambda: [("target", harness.runner)],
            deserialize_own_rank=lambda payload: TpModelWorker.deserialize_own_rank(None, payload),
        )
        drafts = None
        if draft is not None:
            updater = type(harness.runner.weight_updater)
            shared = {name: getattr(harness.runner.weight_updater, name) for name in updater.__dataclass_fields__}
            runner = SimpleNamespace(model=draft)
            own = {"get_model": lambda: draft, "get_model_runner": lambda: runner}
            runner.weight_updater = updater(**shared | own | {"update_model_fields": lambda *_, **__: None})
            drafts = SimpleNamespace(weight_update_runners=lambda: [("draft", runner)])
        with harness._active():
            self.manager = SchedulerWeightUpdaterManager(
                tp_worker=worker,
                draft_worker=drafts,
                memory_saver_adapter=SimpleNamespace(enabled=True, pause=lambda _: None, resume=lambda _: None),
                flush_cache=self._flush,
                is_fully_idle=lambda **_: self.idle,
                scheduler=SimpleNamespace(
                    _engine_paused=False,
                    record_weight_version_change=lambda new_version: self.versions.append(new_version),
                ),
            )

    def _flush(self, empty_cache: bool = True) -> bool:
        self.flushes += 1
        return True

    def call(self, method: str, **fields: Any) -> tuple[bool, str]:
        """(success, message) of the manager's answer to a request with these fields."""
        from sglang.srt.managers import io_struct

        requests = {
            "begin_weight_update": io_struct.BeginWeightUpdateReqInput,
            "update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
            "update_weights_from_distributed": io_struct.UpdateWeightsFromDistributedReqInput,
            "update_weights_from_disk": io_struct.UpdateWeightFromDiskReqInput,
            "update_weights_from_ipc": io_struct.UpdateWeightsFromIPCReqInput,
            "end_weight_update": io_struct.EndWeightUpdateReqInput,
        }
        with self.harness._active(), torch.inference_mode():  # as in the scheduler's loop
            answer = getattr(self.manager, method)(requests[method](**fields))
        return answer.success, answer.message

    def begin(self, selector: str = "all") -> tuple[bool, str]:
        return self.call("begin_weight_update", selector=selector)

    def send(self, bucket: Named | Checkpoint, load_format: str | None = None, **fields: Any) -> tuple[bool, str]:
        named = list(bucket.items()) if isinstance(bucket, dict) else bucket
        sent = payload(flattened(named) if load_format == "flattened_bucket" else named)
        fields |= {"serialized_named_tensors": [sent], "load_format": load_format}
        return self.call("update_weights_from_tensor", **fields)

    def end(self) -> tuple[bool, str]:
        return self.call("end_weight_update")

    def update(self, buckets: Iterable[Named | Checkpoint], selector: str = "all") -> tuple[bool, str]:
        """(success, message) of an update whose buckets must be accepted."""
        assert self.begin(selector)[0]
        for bucket in buckets:
            accepted, message = self.send(bucket, selector=selector)
            assert accepted, message
        return self.end()

    def bits(self) -> dict[str, Tensor]:
        """A copy of the bytes of every parameter and buffer of all models."""
        return {
            f"{role} {name}": tensor.detach().clone().contiguous().view(-1).view(torch.uint8)
            for role, model in self.models.items()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }

    def addresses(self) -> dict[str, int]:
        """The address of every parameter and buffer of all models."""
        return {
            f"{role} {name}": tensor.data_ptr()
            for role, model in self.models.items()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }


def payload(bucket: Any) -> bytes:
    """A bucket as a trainer of the same host sends it: handles of shared memory."""
    from multiprocessing.reduction import ForkingPickler

    from sglang.srt.utils import MultiprocessingSerializer
    from torch.multiprocessing import get_sharing_strategy, reductions, set_sharing_strategy

    # A process that has received weights can't send them from a CPU: SGLang's reduction looks for their GPU.
    ForkingPickler.register(Tensor, getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor))
    strategy = get_sharing_strategy()
    set_sharing_strategy("file_system")  # file descriptors pass between related processes only
    try:
        return MultiprocessingSerializer.serialize(bucket)
    finally:
        set_sharing_strategy(strategy)


def flattened(bucket: Named) -> dict[str, Any]:
    """A bucket in SGLang's format "flattened_bucket": one tensor and a table."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    made = FlattenedTensorBucket(named_tensors=bucket)
    return {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}


def buckets_of(checkpoint: Checkpoint, size: int, seed: int) -> list[Named]:
    """All tensors in random order, `size` at a time; most weights and their scales are in different buckets."""
    named = list(checkpoint.items())
    random.Random(seed).shuffle(named)
    return [named[first : first + size] for first in range(0, len(named), size)]


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether two results of `Trainer.bits` are equal."""
    return different(found, expected) == []


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Sequence[str]:
    """Names of the tensors that differ in two results of `Trainer.bits`."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]


def loaded(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The bits of both models after a load of this checkpoint; the old weights are in the models afterwards."""
    before = {role: snapshot(model) for role, model in trainer.models.items()}
    for model in trainer.models.values():
        model.load_weights(checkpoint.items())
    bits = trainer.bits()
    for role, model in trainer.models.items():
        for name, parameter in model.named_parameters():
            parameter.data.copy_(before[role][name])
    return bits
