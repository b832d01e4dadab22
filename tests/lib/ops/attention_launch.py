"""One emulated call of a GPU attention kernel, or of the unpacking kernel; for the tests of both."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from ops.attention_cases import Q_GAPS, Case
from ops.memory_layout import LARGE_BYTES, strided, use_in_place
from torch import Tensor

from dsv4_kernels.sparse_attention import scratch
from dsv4_kernels.sparse_attention.problem import Problem
from dsv4_kernels.unpack import Pages

if TYPE_CHECKING:
    from ptx_emulator import Device

SCHEDULES = ("late", "random", "random_warps")
LONG = ("hca_1m", "csa_1024", "more_tokens_than_sms")
"""Prefixes of the names of cases that take the emulator long."""


def launch(
    kernel: Callable[[Problem], None],
    case: Case,
    multiprocessors: int,
    out: Tensor | None = None,
    *,
    persistent: bool = True,
    **options: object,
) -> tuple[Tensor, Device]:
    """Return (out, the emulated device) of one call, with the options of `emulated`.

    Before the call, `out` and the scratch memory of earlier calls are filled with NaN. Without `out` the result has
    gaps, which must stay unchanged. After it the counters must be zero, as the next launch needs them; no launch of a
    `persistent` kernel may have more CTAs than multiprocessors, and the emulator must give no warning.
    """
    from ptx_emulator import emulated

    gaps_of_out = None
    if out is None:
        out = strided(torch.empty(case.q.shape, dtype=torch.bfloat16), *Q_GAPS)
        gaps_of_out = out.as_strided((*out.shape[:2], Q_GAPS[2]), out.stride(), out.shape[2])
    problem = case.problem(out)
    problem.out.fill_(float("nan"))
    slots = [held.slots for held in scratch._by_stream.values()]
    for held in slots:
        if held.nbytes < LARGE_BYTES:
            held.fill_(0xFF)  # NaN
    with emulated(multiprocessors=multiprocessors, **options) as device:
        use_in_place(device, problem.q, problem.window_storage, problem.entry_storage, problem.out, *slots)
        try:
            kernel(problem)
        except BaseException:
            scratch._by_stream.clear()  # counters of a failed launch would make the next ones wrong
            raise
    assert device.reports
    assert not persistent or all(report.grid[0] <= multiprocessors for report in device.reports)
    assert not {warning.split(" at ")[0] for report in device.reports for warning in report.warnings}
    assert not any(held.counters.any() for held in scratch._by_stream.values())
    assert gaps_of_out is None or gaps_of_out.isnan().all()
    return problem.out, device


def unpack_emulated(name: str, parts: list[Pages], out: Tensor) -> None:
    """Write `out` with the unpacking kernel "sm90" or "sm100", with all checks of the emulator on."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.unpack import gpu

    with emulated(checks=Checks.strict(), arch={"sm90": "sm_90a", "sm100": "sm_100a"}[name]) as device:
        use_in_place(device, *(part.table.storage for part in parts), out)
        getattr(gpu, name)(parts, out)
    assert len(device.reports) == 1 and not device.reports[0].warnings


def delete_synchronisation(name: str, device: Device, launched: int = 0) -> dict[str, float]:
    """Return class -> share of the deletions that are noticed, for a mutation test of one launch that `device`
    recorded.

    Every deletion must be noticed or explained in emulator/results/mutation_reasons.json. DSV4_WRITE_RESULTS=1 writes
    the campaign's entry in emulator/results/mutation.json.
    """
    from ptx_emulator import Checks
    from ptx_emulator.campaigns import mutation, summaries

    result = mutation.run(name, device.recordings[launched], checks=Checks.strict())
    reasons = mutation.reasons_for(name)
    assert not mutation.unexplained(result, reasons)
    if os.environ.get("DSV4_WRITE_RESULTS"):
        summaries.update("mutation", {name: mutation.summary(result, reasons)})
    return {kind: mutation.rate(*counts) for kind, counts in result.by_class(reasons).items()}
