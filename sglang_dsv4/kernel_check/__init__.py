"""Every kernel of this package on the GPU of this machine: one command, a JSON file and a page to paste into an issue.

    python -m sglang_dsv4.kernel_check [--checkout FOLDER] [--out FOLDER] [--only REGEX] [--timeout MINUTES] [--list]

For each kernel, the simplest first (`catalogue`):

1. its small cases (`tests/lib/ops/emulated_results.py`): the results beside the reference and the emulator's digests,
   the same bits from a second call and from a CUDA graph, and the time of a call beside the modelled one;
2. its GPU tests, by pytest.

Each runs in a child process with a time limit, so that a fault or a hang of one kernel ends that process only
(`children`). Before a child's first launch most of the free memory is NaN. After a failure the GPU must still answer,
or the rest is left out. Results are written after each kernel, so an interrupted run has them, too.

It needs a checkout: the tests are not in the wheel. It runs on Hopper (sm_90a) and Blackwell (sm_100a, sm_103a).
"""
