"""Programmatic dependent launch: a kernel's CTAs become resident while the kernel before it in the stream still runs,
and wait for its end. The launch and set-up of a kernel then overlap the end of the kernel before.

    DSV4_DEPENDENT_LAUNCH    on (default): launches have the attribute, except as rule 4 says; off: no launch has it.

The switch is read here only. A launch passes `use_pdl=is_on()`; its kernel calls `begin`, or `wait` where it must wait
before `begin`. Switched off, neither leaves an instruction, so the machine code is that of a kernel without the
attribute. The switch is part of the key of `compile_cache`. `tests/emulator` checks rules 1, 2 and 5 in every launch
with the attribute:

1. A thread waits before its first access to global memory, load or store: the previous kernel may still write data that
   this kernel reads, or read data that this kernel overwrites (memory is reused along the stream). Before the wait a
   kernel may compute indices, use shared memory and barriers, and read weights that no kernel writes while a model
   runs. Five weights are read ahead: `fn` of the hyper-connections (`hyper_connection/products.py`), the weights of FP8
   products (`linear/fp8_kernel.py` for few tokens on Hopper, `linear/fp8_tcgen05.py`), the weights of products in
   fp32 of few tokens (`linear/kernel.py`, `linear/cluster.py`), `wo_a` of few output groups
   (`linear/fp8_weight_resident.py`), and `w2` of the experts of few tokens (`moe/sm90/few_kernel.py`). The codes of
   `linear/fp8_weight.py`, the rest of `fn` and of the weights of `linear/kernel.py`, and the norm's weight are
   fetched into L2, which is not an access. A kernel may also read results of a launch before the previous one if the
   previous kernel calls `begin`: then that launch has ended. In this way the second product and the sum of few tokens
   (`moe/sums.py`, `hyper_connection/experts.py`) read the work list. They read it from L2, because L1 may hold older
   contents until a thread waits.
2. Every CTA waits, also a CTA without work. It waits for the end of the whole kernel before, which has waited for the
   one before it. So accesses after a wait follow everything that was launched earlier in the stream. Kernels of PyTorch
   or DeepGEMM that are launched without the attribute start after everything before them has ended; a foreign kernel
   with the attribute must wait by the same rule.
3. `begin` releases the next kernel: its CTAs may become resident once all CTAs of this kernel have called `begin` or
   ended (PTX ISA, "griddepcontrol"). This changes when they start, never what they may access. All CTAs of a kernel
   are therefore resident or done before the first CTA of the next kernel starts: a waiting CTA never occupies an SM
   slot that the CTA it waits for still needs, in any order of kernels and streams. A kernel that does not call `begin`
   releases the next one when its CTAs end. `begin` waits first, so at most two kernels of a stream overlap: SM slots do
   not fill up with a chain of waiting kernels, and a foreign kernel that reads the results of a kernel two launches
   earlier before its own wait finds them complete.
4. Kernels whose CTAs wait for each other need SM slots for all CTAs at once. A cluster is guaranteed them. Hopper's
   attention with KV splits is launched cooperatively to get them, and we know of no documentation of launches with both
   attributes; so it is launched without this one (`may_begin_early`), after everything before it in its stream has
   ended. CTAs of other streams may occupy its slots and wait, but only for resident kernels (rule 3), so the slots
   become free. When it releases the next kernel, all of its own CTAs are resident.
5. Tensor memory (Blackwell) is allocated while a kernel runs, and an allocation waits until there is enough. So a
   kernel allocates after its wait, when the previous kernel has freed its tensor memory, and before `begin`: a foreign
   next kernel, which may allocate before it waits, then gets only the rest.

6. The CTAs of `all_reduce` and of `hc_boundary_of_parts` wait for CTAs of other GPUs, which each GPU starts in the
   order of its stream. Of their own GPU they wait for their own cluster at most, and all CTAs of a launch are resident
   at once (128 at most; `hyper_connection.choice.with_parts` bounds the clusters), so the launches have the attribute.
   The kernels that come before one on another GPU wait for nothing that this launch holds. Sums of a group are in one
   stream on every GPU, in one order; a second stream that waits for the first through an event only is safe.

CUDA graphs: a captured launch with the attribute gets a programmatic edge from the kernel before it in its stream, and
ordinary edges from nodes that are not kernels. Where two streams fork or join (`sglang_dsv4/layers/concurrent.py`) a
kernel may have several edges of either kind; it starts when all allow it, and its wait covers the kernels at the other
ends of all its edges. Events and the end of a graph wait for a kernel's end, which follows its wait: rule 2 holds
across streams.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from dsv4_kernels.host.environment import DEPENDENT_LAUNCH

logger = logging.getLogger(__name__)

VARIABLE = DEPENDENT_LAUNCH.name

T = TypeVar("T")

_chosen: bool | None = None


@functools.cache
def _in_environment() -> bool:
    value = DEPENDENT_LAUNCH.choice() or "on"
    if value == "off":
        logger.info("%s=off: a kernel is launched when the one before has ended", VARIABLE)
    return value == "on"


def is_on() -> bool:
    """Whether kernels are compiled and launched with the attribute.

    Raises:
        ValueError: the environment variable is neither "on" nor "off".
    """
    return _in_environment() if _chosen is None else _chosen


@contextlib.contextmanager
def switched(on: bool) -> Iterator[None]:
    """Overrides the environment inside the context: for tests and benchmarks, which compare both in one process."""
    global _chosen
    before, _chosen = _chosen, on
    try:
        yield
    finally:
        _chosen = before


def compiled(compile: Callable[[], T], on: bool) -> T:
    """The result of a kernel's `compile` with the switch on or off; a function that can be pickled for worker
    processes."""
    with switched(on):
        return compile()


def may_begin_early(cooperative: bool = False) -> bool:
    """The value of `use_pdl` for a launch.

    Args:
        cooperative: whether the launch is cooperative; see rule 4.
    """
    return is_on() and not cooperative


# Device side: plain Python that a kernel calls while it is traced


def wait() -> None:
    """Waits until the kernel before has ended and all its writes are visible; returns at once in a launch without the
    attribute."""
    if is_on():
        from cutlass import cute

        cute.arch.griddepcontrol_wait()


def begin() -> None:
    """Waits as `wait`, then releases the next kernel: its CTAs may become resident once all CTAs of this one have
    called this."""
    if is_on():
        from cutlass import cute

        wait()
        cute.arch.griddepcontrol_launch_dependents()
