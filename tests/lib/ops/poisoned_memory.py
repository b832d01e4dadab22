"""pytest plugin (`-p ops.poisoned_memory`): before the first test most of a GPU's free memory is NaN."""

from __future__ import annotations

import torch


def pytest_runtestloop() -> None:
    """Poison the memory of every GPU of this process."""
    from ops.emulated_results import poison

    if torch.cuda.is_available():
        poison(torch.device("cuda", torch.cuda.current_device()))
