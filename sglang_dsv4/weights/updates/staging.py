"""One model's side of a weight update: tensors are checked and kept in host memory until the update ends.

    model.weight_update = WeightUpdate(model)      begin
    model.load_weights(bucket)                     any subset of the checkpoint's tensors, any number of times
    model.weight_update.check(whole=False)         end: pairs are complete
    model.weight_update.exchange()                 the served weights are swapped with those in host memory
    model.weight_update.exchange()                 only if another rank or the draft failed: swapped back

Forwards between begin and end compute with the old weights. Host memory holds this rank's shards of the tensors that
came, in the parameters' dtypes; after the exchange it holds the old values of these parameters. So a failed exchange
can be undone bit for bit, and neither device nor host holds a third copy. On the device an exchange needs memory for
one part at a time: one expert's matrix, or one parameter outside of the experts.

Rows of a parameter that are not in the update (w1 of an expert whose w3 comes, the embedding's padding) keep their
values. Parameters stay at their addresses, which CUDA graphs read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.weights.loader import CheckpointError, Loader, copy_into, load_checkpoint, read
from sglang_dsv4.weights.updates.host_part import HostPart, Part

if TYPE_CHECKING:
    from sglang_dsv4.model_config.config import Config
    from sglang_dsv4.weights.tensor_table import TensorSpec, TensorTable

logger = logging.getLogger(__name__)


class UpdatableModel(Protocol):
    """A model whose weights can be exchanged: the target or a draft."""

    dsv4_config: Config
    weight_update: WeightUpdate | None
    weights_are_lost: bool

    def tensor_table(self) -> TensorTable:
        """The tensors of a checkpoint that the model loads."""


def load_weights(model: UpdatableModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load a whole checkpoint into the model; or, while a weight update is open, add the tensors to the update.

    Raises:
        CheckpointError: see `load_checkpoint` and `WeightUpdate.add`.
    """
    if model.weight_update is None:
        load_checkpoint(model, model.dsv4_config, model.tensor_table(), weights)
    else:
        model.weight_update.add(weights)


class WeightUpdate:
    """The tensors of one update of one model.

    Attributes:
        failure: why the update can't be used any more; None while it can.
        tensors: number of tensors that came for this model.
    """

    def __init__(self, model: UpdatableModel) -> None:
        self._model, self._table = model, model.tensor_table()
        self._loader = Loader(model, model.dsv4_config, self._table, self._store, "weight update")
        self._parts: dict[str, dict[str, Part]] = {}  # by module: its parts, by name
        self._own: set[str] = set()  # held tensors that are copies of ours
        self.failure: str | None = None
        self.tensors = 0

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the update takes."""
        held = sum(tensor.nbytes for tensor in self._loader.held.values())
        return held + sum(part.nbytes for parts in self._parts.values() for part in parts.values())

    @property
    def rounded(self) -> int:
        """Codes of experts that the served layout can't hold; known after the exchange."""
        return sum(part.rounded for parts in self._parts.values() for part in parts.values())

    def add(self, weights: Iterable[tuple[str, Tensor]], folder: str = "") -> None:
        """Check tensors and keep them; the caller may free them afterwards.

        Args:
            weights: (official name, tensor), on any device; tensors of other models are skipped.
            folder: the checkpoint that they are read from, for errors; empty for none.

        Raises:
            CheckpointError: a tensor is unknown, came before, has another shape or dtype, or holds NaN or infinity;
                or an earlier call failed. From then on every call raises.
        """
        if self.failure is not None:
            raise CheckpointError(self.failure)
        try:
            # Parameters will refer to these tensors, so they may not be made in the scheduler's inference mode.
            with torch.inference_mode(False), torch.no_grad():
                for name, tensor in read(weights, folder):
                    if self._table.is_ours(name):
                        self._loader.add(name, tensor)
                        self.tensors += 1
                self._loader.check_so_far()
                held = self._loader.held
                for name in held.keys() - self._own:  # the sender may reuse the memory of its tensors
                    held[name] = held[name].to("cpu", copy=True)
                self._own = set(held)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise

    def check(self, whole: bool) -> None:
        """Check that the tensors can be served: each weight has its scales, and with `whole` no tensor is missing.

        Raises:
            CheckpointError: they can't be served, or `add` failed; `failure` says why.
        """
        if self.failure is None:
            try:
                return self._loader.finish(whole)
            except CheckpointError as error:
                self.failure = str(error)
        raise CheckpointError(self.failure)

    def exchange(self) -> None:
        """Swap the served weights with those of this update; a second call swaps them back.

        Raises:
            Exception: an error of the device; it is raised after all weights were swapped back.
        """
        done: list[Part] = []
        with torch.no_grad():
            try:
                for part in (part for parts in self._parts.values() for part in parts.values()):
                    part.exchange()
                    done.append(part)
                self._derive()
            except Exception:
                for part in done:
                    part.exchange()
                self._derive()
                raise

    def _store(self, spec: TensorSpec, parameter: nn.Parameter, tensor: Tensor, name: str) -> None:
        """Copy a checked tensor into the host's copy of its part of the parameter."""
        if spec.expert is not None:
            owner = spec.parameter.rpartition(".")[0]
            module = self._model.get_submodule(owner)
            module.stage(self._parts.setdefault(owner, {}), parameter, tensor, name, spec.shard, spec.expert)
            return
        parts = self._parts.setdefault("", {})
        key = f"{id(parameter)}"
        if key not in parts:
            parts[key] = HostPart(parameter.data)
        # SGLang's loaders of sharded parameters write to `parameter.data`.
        served, parameter.data = parameter.data, parts[key].value
        try:
            copy_into(spec, parameter, tensor, name)
        finally:
            parameter.data = served

    def _derive(self) -> None:
        """Compute the tensors again that layers derive from their parameters."""
        for module, method in AfterLoading.of_modules(self._model):
            if method.derives:
                method.process_weights_after_loading(module)
