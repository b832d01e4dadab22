"""Several contenders on the same GPUs at once, loaded in turns: figures of one machine at one time.

The servers run in sessions of their own and outlive a call, so a comparison that takes longer than a command may is
split over calls: each goes on where the one before stopped, and begins no cell that does not fit into its seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from lib import servers
from lib.contenders import Contender
from lib.serve_rows import Figures
from lib.serve_works import Cell
from lib.servers import Server

PORT = 31_000
WARM_UP_S = 60.0
"""Expected seconds of a contender's unmeasured loads."""


WarmUp = Callable[[Server, list[str]], None]
"""Runs unmeasured loads of works on a server."""


@dataclass
class Turns:
    """One call of a comparison in turns.

    Attributes:
        folder: of the servers' list and logs.
        model: of all contenders.
        gpus: of the machine; with more than a server needs, contenders get GPUs of their own as far as they go.
        ranks: of a server.
        seconds: of the call.
    """

    folder: Path
    model: Path
    gpus: int
    ranks: int
    seconds: float
    begin: float = field(default_factory=time.monotonic)
    pace: float = 1.0
    """Seconds that the last cell took, over the seconds expected; at least 1."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons of loads that failed, by contender and cell."""

    def left_s(self) -> float:
        """Return the seconds until the call should end."""
        return self.seconds - (time.monotonic() - self.begin)

    def start(
        self, contenders: Sequence[Contender], wanted: Collection[str]
    ) -> tuple[dict[str, Server], dict[str, str]]:
        """Start the wanted contenders that do not run, and end servers of the folder that are no contenders.

        Return the wanted contenders that are ready, and the reasons of those that failed. One that is in neither is
        still starting.
        """
        servers.stop_all(self.folder, but={contender.name for contender in contenders})
        about = {"model": str(self.model), "servers": {}}
        for i, contender in enumerate(contenders):
            if contender.name in wanted:
                env = {**contender.env, **self._devices(i)}
                place = {"contender": contender.server, "flags": [*contender.flags], "env": env}
                about["servers"][contender.name] = place
        failed = servers.start_all(about, self.folder, PORT, max(1.0, self.left_s()))
        ready, listed = {}, servers.listed_servers(self.folder)
        for contender in contenders:
            found = listed.get(contender.name, {})
            if contender.name in wanted and "ready_s" in found:
                log = Path(found["log"])
                ready[contender.name] = Server(contender.server, self.model, found["url"], log, found["ready_s"])
        return ready, failed

    def _devices(self, i: int) -> dict[str, str]:
        groups = self.gpus // self.ranks
        if groups < 2:
            return {}
        first = (i % groups) * self.ranks
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + self.ranks)))}

    @contextlib.contextmanager
    def _noting_failures(self, load: str) -> Iterator[None]:
        """Note an error of a load, or of a server that has ended, and go on."""
        try:
            yield
        except (RuntimeError, ValueError, OSError, aiohttp.ClientError) as error:
            self.failures[load] = f"{type(error).__name__}: {error}"
            print(f"{load}: {error}", flush=True)

    def warm_up(self, ready: Mapping[str, Server], works: Collection[str], load: WarmUp) -> list[str]:
        """Run `load` on every server for the works that it has not had since its start; return the names that the time
        is too short for."""
        too_late = []
        for name, server in ready.items():
            had = set(servers.listed_servers(self.folder)[name].get("warm", ()))
            if had >= set(works):
                continue
            if self.left_s() < WARM_UP_S:
                too_late.append(name)
                continue
            begin = time.monotonic()
            with self._noting_failures(f"{name}, unmeasured loads"):
                with servers.others_suspended(self.folder, server.url):
                    load(server, sorted(set(works) - had))
                servers.note(self.folder, name, warm=sorted({*works, *had}))
            print(f"{name}: unmeasured loads took {time.monotonic() - begin:.0f} s", flush=True)
        return too_late

    def measure(
        self,
        ready: Mapping[str, Server],
        cells: Sequence[Cell],
        has: Callable[[str, Cell], bool],
        keep: Callable[[str, Cell, Figures], None],
    ) -> list[str]:
        """Measure each cell on each ready contender that does not have it; return the cells that the time is too short
        for.

        A repetition runs on one contender after the other, in an order that every repetition reverses. A load that
        fails is noted in `failures`, and the others go on.
        """
        left = []
        for cell in cells:
            names = [name for name in ready if not has(name, cell)]
            expected = cell.seconds * len(names) * self.pace
            if not names:
                continue
            if expected > self.left_s():
                left.append(cell.stage)
                print(f"{cell.stage}: {expected:.0f} s expected, {self.left_s():.0f} s left: not now", flush=True)
                continue
            begin, runs = time.monotonic(), {name: [] for name in names}
            for repeat in range(cell.repeats):
                for name in names if repeat % 2 == 0 else reversed(names):
                    with self._noting_failures(f"{name}, {cell.stage}"):
                        with servers.others_suspended(self.folder, ready[name].url):
                            runs[name].append(cell.measure(ready[name], repeat))
            took = time.monotonic() - begin
            self.pace = max(1.0, took / (cell.seconds * len(names)))
            print(f"{cell.stage}: {took:.0f} s, {expected:.0f} s expected", flush=True)
            for name in names:
                if len(runs[name]) == cell.repeats:
                    keep(name, cell, cell.figures(runs[name]))
        return left
