"""The distribution of the tests over pytest-xdist's processes: a unit of tests runs in one process, and the end of a
process costs one test.

    Units(config, log, unit_of, first=...)        a scheduler, for `pytest_xdist_make_scheduler`

A process can be lost: the kernel ends it when memory is short, or `faulthandler_exit_on_timeout` ends a test that
hangs. xdist's scheduler would then run the same test again, without end if it is at fault, and would wait for ever for
a process that was given one test: such a process begins its last test only after it was told that no other follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadScopeScheduling


class Units(LoadScopeScheduling):
    """xdist's `--dist loadscope` with other scopes, in another order.

    Args:
        config, log: xdist's.
        unit_of: the unit of a test, by its node id.
        first: key of units; the smallest is handed out next. None: in the tests' order.
    """

    def __init__(
        self, config: Any, log: Any, unit_of: Callable[[str], str], first: Callable[[str], int] | None = None
    ) -> None:
        super().__init__(config, log)
        self._unit_of, self._first = unit_of, first

    def _split_scope(self, nodeid: str) -> str:
        return self._unit_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if self._first is not None:
            self.workqueue.move_to_end(min(self.workqueue, key=self._first), last=False)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        # A process with one test waits for another one, or for the word that there is none.
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that ran when a process ended, and hand out those after it; None if it had no test left."""
        units = self.assigned_work.pop(node)
        crashed = next((nodeid for unit in units.values() for nodeid, done in unit.items() if not done), None)
        if crashed is None:
            return None
        for name, unit in units.items():
            if crashed in unit:
                unit[crashed] = True
            if not all(unit.values()):
                self.workqueue[name] = unit
        for other in self.nodes:
            self._reschedule(other)
        return crashed
