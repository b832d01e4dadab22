"""Choice of the implementation that runs an op: by device and dtype, or by name.

Every public function of this package (`dsv4_kernels.<folder>.<op>`) asks `select` for the function to call. The choice
is made among the implementations in `dsv4_kernels.ops`; importing this module imports none of them.

There is no silent fallback: naming an implementation that does not support the device and dtype is an error, and the
first use of each choice is logged.

A process may require batch-invariant implementations (`require_batch_invariance`): then no other implementation is
chosen, by priority or by name, and an op without a batch-invariant implementation raises an error that names the op.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsv4_kernels.host.arch import ARCHITECTURES, architecture
from dsv4_kernels.model_shapes import ModelShapes
from dsv4_kernels.ops import JOINT_LAUNCHES, OPS, Implementation, Supports, forward_ops

logger = logging.getLogger(__name__)

_table: dict[str, dict[str, Implementation]] = {
    op.name: {implementation.name: implementation for implementation in op.implementations} for op in OPS.values()
}
_resolved: dict[tuple[str, str, torch.dtype, str | None], Callable[..., Any]] = {}
_requires_batch_invariance = False


def require_batch_invariance(required: bool = True) -> None:
    """Makes this process choose only batch-invariant implementations from now on; False lifts the requirement."""
    global _requires_batch_invariance
    _requires_batch_invariance = required
    _resolved.clear()


def requires_batch_invariance() -> bool:
    """Whether only batch-invariant implementations are chosen."""
    return _requires_batch_invariance


def register(
    op: str,
    name: str,
    loader: str,
    supports: Supports,
    priority: int,
    graph_safe: bool = False,
    batch_invariant: bool = False,
    batch_invariant_on_cpu: bool = False,
) -> None:
    """Adds an implementation to an op of the table; the arguments are the fields of `Implementation`.

    Raises:
        KeyError: `op` is not in the table.
        ValueError: `loader` is not "module:attribute", or `op` already has an implementation called `name`.
    """
    module, _, attribute = loader.partition(":")
    if not module or not attribute:
        raise ValueError(f"loader of {op}/{name} is {loader!r}; expected 'package.module:attribute'")
    if name in available(op):
        raise ValueError(f"op {op!r} already has an implementation called {name!r} ({_table[op][name].loader})")
    _table[op][name] = Implementation(
        name, loader, supports, priority, graph_safe, batch_invariant, batch_invariant_on_cpu
    )
    _resolved.clear()


def ops() -> tuple[str, ...]:
    """Names of all ops, sorted."""
    return tuple(sorted(_table))


def available(op: str) -> tuple[str, ...]:
    """Names of the implementations of `op`, the highest priority first.

    Raises:
        KeyError: `op` is not in the table; the message lists the ops.
    """
    if op not in _table:
        raise KeyError(f"no op {op!r}; the ops are: {', '.join(ops())}")
    return tuple(i.name for i in sorted(_table[op].values(), key=lambda i: -i.priority))


def select(op: str, device: torch.device, dtype: torch.dtype, impl: str | None = None) -> Callable[..., Any]:
    """The function that computes `op` for tensors of `device` and `dtype`.

    `impl` names the implementation; None chooses the highest priority among the supported ones. The first use of each
    choice is logged at INFO.

    Raises:
        KeyError: the op or the implementation does not exist; the message lists those that do.
        NotImplementedError: the named implementation, or every one if none is named, does not support this device and
            dtype, or is not batch-invariant where that is required.
    """
    key = (op, device.type, dtype, impl)
    function = _resolved.get(key)
    if function is None:
        implementation = chosen(op, device, dtype, impl)
        function = _resolved[key] = _loaded(implementation.loader)
        how = " (named)" if impl else ""
        logger.info("op %s on %s, %s: %s%s", op, device.type, dtype, implementation.name, how)
    return function


def chosen(op: str, device: torch.device, dtype: torch.dtype, impl: str | None = None) -> Implementation:
    """The implementation that `select` loads for these arguments, without importing it.

    Raises: as `select`.
    """
    candidates = available(op) if impl is None else (_implementation(op, impl).name,)
    supported = [_table[op][name] for name in candidates if _table[op][name].supports(device, dtype)]
    for implementation in supported:
        if not _requires_batch_invariance or implementation.is_batch_invariant(device):
            return implementation
    if supported:
        names = ", ".join(repr(implementation.name) for implementation in supported)
        raise NotImplementedError(
            f"op {op!r} has no batch-invariant implementation for device {device.type!r} with dtype {dtype}, and this "
            f"process asks for no other: a row's bits depend on the batch in {names}"
        )
    subject = f"implementation {impl!r} of op {op!r} does not support" if impl else f"no op {op!r} for"
    raise NotImplementedError(
        f"{subject} device {device.type!r} with dtype {dtype}; implementations of {op!r}: {', '.join(available(op))}"
    )


def compile_jobs(model: ModelShapes) -> list[tuple[str, Callable[[], object]]]:
    """(op, job) for each kernel that forwards of this model run on this device; empty where references serve.

    Ops whose implementations name the same function of jobs share its kernels: these are listed once, under the first
    of the ops.

    Raises: as `chosen`, and as the functions of jobs.
    """
    attention, found, listed = model.attention, [], set()
    for op in forward_ops(attention.device.type, model.options):
        named = attention.impl if op == "sparse_attention" else OPS[op].named(attention.device, attention.dtype)
        implementation = chosen(op, attention.device, attention.dtype, named)
        if implementation.jobs is None or implementation.jobs in listed:
            continue
        listed.add(implementation.jobs)
        arch = architecture(implementation.name, attention.device)
        found += [(op, job) for job in _loaded(implementation.jobs)(model, arch)]
    name = chosen("norm_rope_store", attention.device, attention.dtype).name
    if model.joins_launches and name in ARCHITECTURES:
        joint = _loaded(JOINT_LAUNCHES)(model, architecture(name, attention.device))
        found += [("joint_launch", job) for job in joint]
    return found


def _loaded(loader: str) -> Callable[..., Any]:
    module, _, attribute = loader.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _implementation(op: str, name: str) -> Implementation:
    names = available(op)
    if name not in names:
        raise KeyError(f"op {op!r} has no implementation {name!r}; it has: {', '.join(names)}")
    return _table[op][name]
