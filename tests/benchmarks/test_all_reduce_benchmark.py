"""The benchmark of sums over ranks on a CPU: its sizes and CTAs are possible, and it says what it needs."""

from __future__ import annotations

import pytest
from bench_all_reduce import MOST_BYTES, ROWS, SWEEP, main

from dsv4_kernels.host.mailboxes import VECTOR_BYTES, Plan


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("few", "many", "channels"), SWEEP)
def test_every_contender_sums_every_size(ranks: int, few: int, many: int, channels: int) -> None:
    plan = Plan.of(ranks, MOST_BYTES, many, few, channels)
    for rows in ROWS:
        num_bytes = rows * 4096 * 2
        assert num_bytes <= plan.most_bytes
        ctas, threads = plan.launch(num_bytes // VECTOR_BYTES)
        assert ctas <= channels and few <= threads <= many


def test_one_gpu_is_too_few() -> None:
    with pytest.raises(SystemExit, match="needs at least 2 GPUs; got 1"):
        main(["--ranks", "1"])
