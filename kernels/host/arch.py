"""The architectures that kernels are compiled for, and the size of the GPU that they run on."""

from __future__ import annotations

import functools

import torch

ARCHITECTURES = {"sm90": "sm_90a", "sm100": "sm_100a"}
"""Name of an implementation -> the architecture to compile for if no GPU gives the minor version."""
H200_MULTIPROCESSORS = 132


def architecture(name: str, device: torch.device) -> str:
    """The architecture to compile for: "sm_90a" (H100, H200, H20), "sm_100a" (B200, GB200) or "sm_103a" (B300).

    Args:
        name: of the implementation, "sm90" or "sm100".
        device: of the tensors; on a CPU (the emulator) the generation's first architecture is returned.
    """
    if name == "sm90" or device.type != "cuda":
        return ARCHITECTURES[name]
    return f"sm_10{torch.cuda.get_device_capability(device)[1]}a"


def implementation_of(device: torch.device) -> str:
    """The name of the implementations that a GPU runs, "sm90" or "sm100"; "sm90" for a CPU."""
    on_blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
    return "sm100" if on_blackwell else "sm90"


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; on a CPU (the emulator) those of an H200."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else H200_MULTIPROCESSORS


@functools.cache
def hardware_multiprocessors(device: torch.device) -> int:
    """Multiprocessors that a persistent launch fills: the number that the driver reports, or that the emulator is set
    to."""
    from cutlass.utils import HardwareInfo

    return HardwareInfo(device.index or 0).get_device_multiprocessor_count()


def clusters_at_once(device: torch.device, size: int) -> int:
    """Clusters of `size` CTAs that run at once, with one CTA on each multiprocessor of the GPU; on a CPU those of the
    GPU that the emulator is set to."""
    if device.type == "cuda":
        return _clusters_at_once(device.index or 0, size)
    return _clusters_at_once.__wrapped__(0, size)


@functools.cache
def _clusters_at_once(index: int, size: int) -> int:
    from cutlass.utils import HardwareInfo

    return HardwareInfo(index).get_max_active_clusters(size)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
