"""NIXL on a CPU, through SGLang's own manager."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from sglang.srt.disaggregation.nixl.conn import NixlKVManager

from sglang_dsv4.cpu import nixl_memory


class Agent:
    """Notes how memory is called; NIXL refuses `VRAM` for host memory."""

    name = "agent"

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def register_memory(self, regions: list[Any], mem_type: str) -> str:
        self.asked.append((len(regions), mem_type))
        return "registered"

    def get_xfer_descs(self, descs: Any, mem_type: str) -> str:
        return mem_type

    def prep_xfer_dlist(self, agent_name: str, descs: Any, mem_type: str) -> str:
        return f"{agent_name} {mem_type}"


def test_pools_and_rings_are_registered_as_host_memory() -> None:
    """SGLang calls the pages and request rows of every pool a GPU's, and the rows of metadata the host's."""
    manager = object.__new__(NixlKVManager)
    manager.agent = agent = Agent()
    manager.kv_args = SimpleNamespace(
        kv_data_ptrs=[1, 2],
        kv_data_lens=[8, 8],
        kv_data_mem_kinds=["VRAM", "VRAM"],
        gpu_id=0,
        aux_data_ptrs=[3],
        aux_data_lens=[8],
        state_data_ptrs=[[4], [5]],
        state_data_lens=[[8], [8]],
    )
    inspect.unwrap(NixlKVManager.register_buffer_to_engine)(manager)
    assert agent.asked == [(2, "VRAM"), (1, "DRAM"), (2, "VRAM")]
    agent.asked.clear()
    nixl_memory.prepare(None, manager)
    manager.register_buffer_to_engine()
    assert agent.asked == [(2, "DRAM"), (1, "DRAM"), (2, "DRAM")]
    assert manager.agent.get_xfer_descs([], "VRAM") == "DRAM" and manager.agent.name == "agent"
    assert manager.agent.prep_xfer_dlist("peer", [], "VRAM") == "peer DRAM"


def test_other_managers_stay_as_they_are() -> None:
    manager = SimpleNamespace()
    nixl_memory.prepare(None, manager)
    assert not vars(manager)
