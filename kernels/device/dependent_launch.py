"""Programmatic dependent launch: the CTAs of a kernel take their places while the kernel before it in the stream still
runs, and wait there for its end. So what lies between two kernels, the launch and the set-up, takes no time of its own.

    DSV4_DEPENDENT_LAUNCH    on (default): as said, for every kernel of this package that may; off: for none.

Here alone it is decided. A launch passes `use_pdl=is_on()`, its kernel calls `begin`, and `wait` where one is needed
before that; where it is off these leave no instruction, so the machine code is that of a kernel which knows nothing of
it. It is part of the key of `compile_cache`. The rules, of which `tests/emulator` checks 1, 2 and 5 in every launch
with the attribute:

1. A thread waits before its first access to global memory, be it a load or a store: the kernel before may still write
   what is read here, and read what is written here (memory is used again along the stream). Before it only what
   touches no memory of others may stand: indices, shared memory, barriers, and weights that no kernel writes while a
   model runs. Of these the boundary's `fn` is read ahead (`hyper_connection/kernel.py`), and the weights of FP8
   products of few tokens (`linear/fp8_kernel.py`). The codes of `linear/fp8_weight.py` are fetched into L2, which is
   no access.
2. Every CTA waits, also one that has nothing to do. The wait is for the end of the whole kernel before, which has
   waited for the one before it: so what is behind a wait is behind all that was launched before, in whatever kernel.
   Kernels of others (PyTorch's, DeepGEMM's) that are launched without the attribute begin behind the end of everything
   before; one that has it must wait by the same rule.
3. `begin` lets the next kernel in: its CTAs may take places once all CTAs of this one have called it or have ended
   (PTX ISA, "griddepcontrol"). That changes when they begin, never what they may access. So all CTAs of a kernel are
   resident, or done, before one of the next is: whoever is resident waits for CTAs that are resident too, and these
   end. Nobody who waits keeps a place from somebody that it waits for, in any order of kernels and streams. A kernel
   that does not call it lets the next one in when its CTAs have ended. `begin` waits first, so two kernels of a stream
   meet and never three: places are not filled by a row of kernels that wait, and a kernel of others that looks, before
   it waits, at what was made two kernels ago finds it still.
4. Kernels whose CTAs wait for each other must have places for all at once. A cluster has. Hopper's attention with
   divided keys is launched cooperatively for that, and what CUDA does with both attributes is documented nowhere that
   we know of: it is launched without this one (`may_begin_early`), behind the end of what comes before in its stream.
   Of other streams CTAs may sit in its places and wait, but for kernels that are resident (3), so the places get free.
   It lets the next one in with all of its CTAs resident.
5. Tensor memory (Blackwell) is given out while a kernel runs, and an allocation waits for it. So a kernel allocates
   behind a wait, when the kernel before has freed its own, and in front of `begin`: a next kernel of others, which may
   allocate before it waits, can take only what is left.

CUDA graphs: a captured launch with the attribute gets a programmatic edge from the kernel before it in its stream, and
ordinary edges from what is no kernel. Where two streams fork or join (`sglang_dsv4/layers/side_stream.py`) a kernel may
have several edges of either kind; it begins when all allow it, and its wait is for all kernels behind them. What an
event or the end of a graph waits for is a kernel's end, which is behind its wait: rule 2 holds across streams.
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
    """Whether kernels are compiled and launched so.

    Raises:
        ValueError: the environment says neither on nor off.
    """
    return _in_environment() if _chosen is None else _chosen


@contextlib.contextmanager
def switched(on: bool) -> Iterator[None]:
    """Inside, whatever the environment says: for tests and benchmarks, which compare both in one process."""
    global _chosen
    before, _chosen = _chosen, on
    try:
        yield
    finally:
        _chosen = before


def compiled(compile: Callable[[], T], on: bool) -> T:
    """What a kernel's `compile` gives under one of the two; a function that other processes can be handed."""
    with switched(on):
        return compile()


def may_begin_early(cooperative: bool = False) -> bool:
    """`use_pdl` of a launch.

    Args:
        cooperative: whether the launch is; see rule 4.
    """
    return is_on() and not cooperative


# ---- device side: plain Python, which a kernel calls while it is traced


def wait() -> None:
    """Until the kernel before has ended and all that it wrote is visible; at once in a launch without the attribute."""
    if is_on():
        from cutlass import cute

        cute.arch.griddepcontrol_wait()


def begin() -> None:
    """The same, and then the next kernel's CTAs may take what places are left, once all CTAs of this one are here."""
    if is_on():
        from cutlass import cute

        wait()
        cute.arch.griddepcontrol_launch_dependents()
