"""Launches of Hopper's attention in the emulator, and the cases that need few kernels."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from unittest import mock

from ops import attention_launch
from ops.attention_cases import CASES, Case, Spec
from ops.attention_launch import LONG
from selection.marks import with_slow_marks

if TYPE_CHECKING:
    from ptx_emulator import Device
    from torch import Tensor


QUICK = ((True, "LIST", False), (True, "LIST", True), (False, "PAGES", False))
"""(FP8 rows, entries, divided) of the quick kernels: compiling one takes longer than all its cases."""


def is_quick(spec: Spec) -> bool:
    entries = "NONE" if not spec.entry_lengths else "PAGES" if spec.dense else "LIST"
    configuration = (spec.fp8, entries, spec.split_keys is not None)
    return configuration in QUICK


LONG_HERE = (*LONG, "split_128_heads", "large_scores_split")
"""Prefixes of the names of cases that take Hopper's kernels long; `split_128` and `large_scores` are like them."""


def with_marks(names: Collection[str]) -> list:
    """Parameters of cases; long cases and those that need further kernels are slow."""
    return with_slow_marks(names, [n for n in names if is_quick(CASES[n]) and not n.startswith(LONG_HERE)])


def launch(case: Case, multiprocessors: int = 132, **options: object) -> Tensor:
    """The result of one call, see `attention_launch.launch`."""
    return launch_on(case, multiprocessors, **options)[0]


def launch_on(case: Case, multiprocessors: int, clusters: bool = False, **options: object) -> tuple[Tensor, Device]:
    """(result of one call, emulated device).

    Few tokens use the cluster kernel only if `clusters`; few heads use the kernels for many (their own kernel is in
    test_sparse_attention_few_heads.py).
    """
    from ptx_emulator import Checks

    from dsv4_kernels.sparse_attention.sm90 import cluster
    from dsv4_kernels.sparse_attention.sm90 import launch as sm90

    sm90.num_clusters.cache_clear()
    sm90.hardware_multiprocessors.cache_clear()  # this device has another number
    options = {"checks": Checks.strict(), "arch": sm90.ARCH, **options}
    clusters_up_to = mock.patch.object(sm90, "MAX_CLUSTER", cluster.MAX_CLUSTER if clusters else 0)
    with clusters_up_to, mock.patch.object(sm90, "FEW_HEADS", 0):
        return attention_launch.launch(sm90.sparse_attention, case, multiprocessors, **options)
