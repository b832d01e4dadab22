"""Engines that copy blocks of memory to another process: Mooncake's over TCP, and NIXL's over UCX."""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Callable
from typing import Protocol

import numpy
import torch

HOST = "127.0.0.1"


class Engine(Protocol):
    """Copies blocks of memory to a process with another engine of the kind; 0 is success."""

    def session(self) -> str:
        """Return what another engine needs to write here, once all memory is registered."""

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Let other engines write into memory."""

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], destinations: list[int], lengths: list[int]
    ) -> int:
        """Copy blocks to another engine."""


class Mooncake:
    """Mooncake's engine over TCP where it is installed, else this package's engine for CPUs."""

    def __init__(self, device: str) -> None:
        from importlib.util import find_spec

        if find_spec("mooncake") is not None:
            from mooncake.engine import TransferEngine
        elif device == "cpu":
            from sglang_dsv4.cpu.transfer_engine import TransferEngine
        else:
            raise RuntimeError("no transfer engine for a GPU: install mooncake-transfer-engine")
        engine = TransferEngine()
        if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("the engine does not start")
        self.batch_register_memory = engine.batch_register_memory
        self.batch_transfer_sync_write = engine.batch_transfer_sync_write
        self._port = engine.get_rpc_port

    def session(self) -> str:
        """Return address and port."""
        return f"{HOST}:{self._port()}"


SENDER_THREADS = 8
"""Threads of NIXL's agent on SGLang's prefill server; they share a transfer's blocks."""


class Nixl:
    """NIXL's agent over UCX, which copies between GPUs of a host by CUDA IPC."""

    def __init__(self, device: str) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)  # UCX opens the current device
        self._kind, self._device = ("VRAM", place.index or 0) if place.type == "cuda" else ("DRAM", 0)
        self._agent = nixl_agent(uuid.uuid4().hex, nixl_agent_config(backends=["UCX"], num_threads=SENDER_THREADS))
        self._peers: dict[str, tuple[str, int]] = {}

    def session(self) -> str:
        """Return the device's number and the agent's metadata."""
        return f"{self._device} {base64.b64encode(self._agent.get_agent_metadata()).decode()}"

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Register memory of this engine's device."""
        regions = [(*region, self._device, "") for region in zip(addresses, lengths, strict=True)]
        self._agent.register_memory(regions, self._kind)
        return 0

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], destinations: list[int], lengths: list[int]
    ) -> int:
        """Copy blocks to another engine."""
        if session not in self._peers:
            device, metadata = session.split()
            self._peers[session] = self._agent.add_remote_agent(base64.b64decode(metadata)), int(device)
        peer, device = self._peers[session]
        count = len(lengths)
        ours, theirs = (
            self._agent.get_xfer_descs(numpy.column_stack((blocks, lengths, [number] * count)), self._kind)
            for blocks, number in ((sources, self._device), (destinations, device))
        )
        handle = self._agent.initialize_xfer("WRITE", ours, theirs, peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        return 0 if state == "DONE" else 1


def visible_gpus(number: int) -> str:
    """Return what CUDA_VISIBLE_DEVICES must be for one of the first two GPUs that this process sees.

    The other one follows: CUDA IPC, by which NIXL copies, opens the memory of GPUs that the process sees.
    """
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    return f"{visible[number]},{visible[1 - number]}"


ENGINES: dict[str, Callable[[str], Engine]] = {"mooncake_tcp": Mooncake, "nixl": Nixl}
"""By the name of SGLang's --disaggregation-transfer-backend."""
