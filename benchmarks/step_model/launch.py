"""Time of one launch from counts of its work: the one formula of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from step_model.hardware import FLIGHT_US, L2_CLOCKS, Gpu


@dataclass(frozen=True)
class Launch:
    """Counts of one launch. "Busiest" is the multiprocessor with the most work."""

    name: str
    ctas: int = 1
    """CTAs that run at once."""
    memory: float = 0.0
    """Bytes between memory and L2."""
    waves: float = 1.0
    """Waves of CTAs, if the GPU starts a CTA when another one ends."""
    l2: float = 0.0
    """Bytes between L2 and all multiprocessors."""
    busiest: float = 0.0
    """Bytes from L2 into the busiest multiprocessor."""
    in_flight: float = float("inf")
    """Bytes that the busiest multiprocessor has asked for at a time."""
    clocks: dict[str, float] = field(default_factory=dict)
    """Unit -> clocks of the busiest multiprocessor."""
    chain: float = 0.0
    """Clocks of dependent work that no other work of the launch covers: before its first bytes, after its last."""
    instructions: float = 0.0
    """Instructions of a warp one after the other, of the warp with the longest such sequence."""
    from_memory: float = 1
    """Loads from memory one after the other before the stream of bytes."""
    from_l2: float = 0
    """Loads from L2 one after the other, before or after the stream."""
    ahead: float = 0.0
    """Share of the stream that the launch asks for before the launch before has ended, if it begins early."""
    crossings: float = 0
    """Stores to another GPU and their arrival, one after the other."""
    link: float = 0.0
    """Bytes that leave this GPU."""
    waits_for_link: bool = False
    """Whether the stream needs all bytes from the other GPUs, except for its share `ahead`, which is asked for before
    and arrives while these bytes travel."""


def parts_us(launch: Launch, gpu: Gpu, early: bool) -> dict[str, float]:
    """Return the terms of a launch's time in microseconds; the terms of `STREAM` overlap each other."""
    f, clocks_us = gpu.fitted, gpu.clock(launch.ctas)
    memory_loads = 0 if early and launch.ahead else launch.from_memory
    terms = {
        "gap": f.gap_us,
        "latency": memory_loads * f.dram_us + launch.from_l2 * L2_CLOCKS / clocks_us + launch.crossings * f.peer_us,
        "chain": (launch.chain + launch.instructions * f.issue_clocks) / clocks_us,
        "memory": launch.memory / gpu.memory_us(launch.waves),
        "l2": launch.l2 / gpu.l2_us(launch.ctas),
        "busiest": launch.busiest / (f.l2_clock_bytes * clocks_us),
        "in flight": launch.busiest / launch.in_flight * FLIGHT_US,
        "link": launch.link / (gpu.link_bytes_us * f.link_share),
    }
    return terms | {unit: clocks / clocks_us for unit, clocks in launch.clocks.items()}


def together(launches: Sequence[Launch], gpu: Gpu) -> Launch:
    """Return the counts of launches that run beside each other, as one launch or on two streams.

    Bytes add up. So does the work of the busiest multiprocessor if all CTAs need more multiprocessors than there are.
    """
    ctas = sum(launch.ctas for launch in launches)
    of_busiest = sum if ctas > gpu.multiprocessors else max
    busiest = of_busiest(launch.busiest for launch in launches)
    in_flight = of_busiest(launch.busiest / launch.in_flight for launch in launches)
    units = dict.fromkeys(unit for launch in launches for unit in launch.clocks)
    return Launch(
        " + ".join(launch.name for launch in launches),
        ctas=min(ctas, gpu.multiprocessors),
        memory=sum(launch.memory for launch in launches),
        waves=max(launches, key=lambda launch: launch.memory).waves,
        l2=sum(launch.l2 for launch in launches),
        busiest=busiest,
        in_flight=busiest / in_flight if in_flight else float("inf"),
        clocks={unit: of_busiest(launch.clocks.get(unit, 0.0) for launch in launches) for unit in units},
        chain=max(launch.chain for launch in launches),
        instructions=max(launch.instructions for launch in launches),
        from_memory=max(launch.from_memory for launch in launches),
        from_l2=max(launch.from_l2 for launch in launches),
        ahead=min(launch.ahead for launch in launches),
    )


def one_after_the_other(*launches: Launch) -> Launch:
    """Return the counts of kernels that one CTA runs one after the other."""
    return replace(
        launches[0],
        name=", ".join(dict.fromkeys(launch.name for launch in reversed(launches))),
        l2=sum(launch.l2 for launch in launches),
        instructions=sum(launch.instructions for launch in launches),
        from_l2=sum(launch.from_l2 for launch in launches),
        from_memory=0,
        ctas=1,
    )


ONE_AFTER_THE_OTHER = ("gap", "latency", "chain")


def time_us(launch: Launch, gpu: Gpu, early: bool = True, idle_us: float = 0.0) -> float:
    """Return the microseconds from the end of the launch before to the end of this one.

    Args:
        launch, gpu: counts, and rates.
        early: whether dependent launch is on.
        idle_us: time for which the launch before leaves the units of this launch's stream idle.
    """
    terms = parts_us(launch, gpu, early)
    first = terms.pop("link") if launch.waits_for_link else 0.0
    stream = max(us for name, us in terms.items() if name not in ONE_AFTER_THE_OTHER)
    covers = idle_us if early else 0.0
    if launch.waits_for_link:
        covers += first + launch.crossings * gpu.fitted.peer_us
    if covers:  # copies begin early, and not the units' work, which needs what the launch before has written
        units = max((terms[unit] for unit in launch.clocks), default=0.0)
        stream = max(stream - min(covers, launch.ahead * stream), units)
    return sum(terms[name] for name in ONE_AFTER_THE_OTHER) + first + stream


def bound_by(launch: Launch, gpu: Gpu, early: bool = True) -> str:
    """Return the largest term's name."""
    terms = parts_us(launch, gpu, early)
    return max(terms, key=terms.__getitem__)
