"""NIXL on a CPU: pools are registered and transferred as host memory.

SGLang's NIXL backend calls the memory of every pool a GPU's (`VRAM`), which NIXL refuses for host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nixl._api import nixl_agent
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

HOST = "DRAM"
NAME_MEMORY = ("register_memory", "get_xfer_descs", "prep_xfer_dlist")
"""Methods of NIXL's agent whose last argument is a kind of memory."""


def prepare(result: None, manager: CommonKVManager, *args: object, **kwargs: object) -> None:
    """Let a NIXL manager register its buffers as host memory; after `CommonKVManager.__init__`."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    from sglang_dsv4.seam.install import set_attribute
    from sglang_dsv4.seam.rows.disaggregation import REGISTERS_BUFFERS

    if isinstance(manager, NixlKVManager):
        set_attribute(manager, REGISTERS_BUFFERS)


def register_host_memory(register: Callable[[], None], manager: NixlKVManager) -> Callable[[], None]:
    """The manager's `register_buffer_to_engine`, which is called once its agent is made: with a `HostAgent`."""

    def register_as_host() -> None:
        manager.agent = HostAgent(manager.agent)
        register()

    return register_as_host


class HostAgent:
    """A NIXL agent to which all memory is host memory of device 0, which is what SGLang calls a CPU's device."""

    def __init__(self, agent: nixl_agent) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> object:
        method = getattr(self._agent, name)
        return (lambda *args: method(*args[:-1], HOST)) if name in NAME_MEMORY else method
