"""Mailboxes in the memory of all GPUs of a host, which every rank's process maps.

CUDA's inter-process handles are used, and not PyTorch's symmetric memory: they need neither multicast nor a particular
version of PyTorch, and `cudaMalloc` gives memory whose address stays valid in captured graphs for as long as the
process lives. Handles travel through the group's CPU process group.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import torch
from cuda.bindings import runtime
from torch.distributed import ProcessGroup

from dsv4_kernels.host.arch import clusters_at_once
from dsv4_kernels.host.mailboxes import CLUSTER, Mailboxes, Plan
from dsv4_kernels.registry import select

TRY_SECONDS = 20.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class CannotConnectError(RuntimeError):
    """Some rank cannot map another rank's memory; raised on all ranks."""


def connect(
    group: ProcessGroup, cpu_group: ProcessGroup, device: torch.device, most_bytes: int, seconds: float, **plan: int
) -> Mailboxes:
    """This rank's view of new mailboxes; every rank of the group calls it at the same time.

    The memory is never freed: graphs may hold its addresses until the process ends.

    Args:
        group: process group of the ranks on the GPUs.
        cpu_group: process group of the same ranks, in the same order, for objects.
        device: this rank's GPU.
        most_bytes: of the largest part.
        seconds: that a sum waits for a part.
        plan: more arguments of `Plan.of`.

    Raises:
        CannotConnectError: says which rank could not map which rank's memory, and why.
        ValueError: see `Plan.of`.
    """
    ranks, rank = cpu_group.size(), cpu_group.rank()
    made = Plan.of(ranks, most_bytes, **plan)
    with torch.cuda.device(device):
        own, handle, reason = _allocate(made.mailbox_bytes, torch.cuda.current_device())
        offers = _gathered((_host(), handle, reason), cpu_group)
        addresses, reason = _mapped(offers, rank, own)
        reasons = [text for text in _gathered(reason, cpu_group) if text]
        if reasons:
            raise CannotConnectError("; ".join(reasons))
        buffer_of = torch.zeros(made.channels, dtype=torch.int32, device=device)
        failed = torch.zeros(1, dtype=torch.int32, device=device)
        late = torch.zeros(ranks, dtype=torch.int32, device="cpu", pin_memory=True)
        torch.cuda.synchronize(device)
        # No rank sends before all mailboxes are empty.
        clusters = min(_gathered(clusters_at_once(device, CLUSTER), cpu_group))
    return Mailboxes(group, rank, made, addresses, buffer_of, failed, late, int(seconds * 1e9), clusters)


def try_out(mailboxes: Mailboxes, cpu_group: ProcessGroup, device: torch.device, seconds: float = TRY_SECONDS) -> None:
    """Sums once over all ranks, which call it at the same time, and compares the result.

    Raises:
        CannotConnectError: on all ranks, if on any rank parts did not arrive or the sum is wrong.
    """
    short = replace(mailboxes, time_limit=int(seconds * 1e9))
    part = torch.full((mailboxes.plan.channels, 8), float(mailboxes.rank + 1), dtype=torch.bfloat16, device=device)
    implementation = select("all_reduce", part.device, part.dtype, None)
    implementation(part[:0], short)  # compiles
    _gathered(None, cpu_group)
    made = implementation(part, short)
    torch.cuda.synchronize(device)
    reason, late = "", mailboxes.late_ranks()
    if late:
        reason = f"rank {mailboxes.rank} waited {seconds:g} s for the stores of ranks {late}"
    elif not bool((made == sum(range(1, mailboxes.ranks + 1))).all()):
        reason = f"rank {mailboxes.rank} got a wrong sum"
    reasons = [text for text in _gathered(reason, cpu_group) if text]
    if reasons:
        raise CannotConnectError("; ".join(reasons))


def _allocate(num_bytes: int, device: int) -> tuple[int, bytes, str]:
    """(address of an empty mailbox, its handle, reason of a failure or "")."""
    try:
        _checked(runtime.cudaSetDevice(device))  # these bindings have a runtime of their own beside PyTorch's
        address = int(_checked(runtime.cudaMalloc(num_bytes)))
        _checked(runtime.cudaMemset(address, 0xFF, num_bytes))
        return address, bytes(_checked(runtime.cudaIpcGetMemHandle(address)).reserved), ""
    except CannotConnectError as error:
        return 0, b"", str(error)


def _mapped(offers: list[tuple[str, bytes, str]], rank: int, own: int) -> tuple[tuple[int, ...], str]:
    """(addresses of all mailboxes, reason of a failure or "")."""
    addresses = []
    for peer, (host, handle, reason) in enumerate(offers):
        if peer == rank:
            addresses.append(own)
            continue
        if reason:
            return (), f"rank {peer} has no memory to share: {reason}"
        if host != offers[rank][0]:
            return (), f"rank {rank} is on another host than rank {peer}"
        try:
            opened = runtime.cudaIpcMemHandle_t()
            opened.reserved = handle
            flags = runtime.cudaIpcMemLazyEnablePeerAccess
            addresses.append(int(_checked(runtime.cudaIpcOpenMemHandle(opened, flags))))
        except CannotConnectError as error:
            return (), f"rank {rank} cannot map the memory of rank {peer}: {error}"
    return tuple(addresses), ""


def _host() -> str:
    """Identifies the running kernel of this host."""
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()


def _gathered(value: object, cpu_group: ProcessGroup) -> list:
    values: list = [None] * cpu_group.size()
    torch.distributed.all_gather_object(values, value, group=cpu_group)
    return values


def _checked(result: tuple) -> object:
    """The value of a call of the runtime.

    Raises:
        CannotConnectError: the call failed.
    """
    error, *values = result
    if error != runtime.cudaError_t.cudaSuccess:
        raise CannotConnectError(f"{error.name} ({int(error)})")
    return values[0] if values else None
