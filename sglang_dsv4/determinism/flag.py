"""Whether this process serves under `--enable-deterministic-inference`; any module may import this one."""

from __future__ import annotations

from dsv4_kernels import registry

FLAG = "--enable-deterministic-inference"


def is_on() -> bool:
    """Whether the flag is on: from then on the registry gives batch-invariant implementations only."""
    return registry.requires_batch_invariance()
