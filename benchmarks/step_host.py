"""Host time of a decode step without a GPU: SGLang's scheduler loop with the host's part of a replay.

    python benchmarks/step_host.py --model CHECKPOINT [--requests 1 16 64] [--steps 400] [--out FILE.json] [--profile]

A real scheduler (overlapped, with prefix reuse) in this process, a random checkpoint's pools, and requests that decode.
The model is replaced by the host's part of a replay in SGLang's decode runner (inputs into the graph's buffers, the
view of the batch, the attention backend's part outside of the graph) and by prepared logits. On a GPU this time bounds
decoding at few requests: the scheduler must finish it before the GPU is done.

Two kinds of numbers:

    step     microseconds of a pass of the scheduler's loop; median, and 10th percentile
    ours     its part in this package's functions, by function; time in a nested function counts once

Time is the thread's CPU time, so other load of the machine does not count, and the thread never waits here. A tensor
operation here runs on a CPU: 1 to 3 us, where a GPU's launch takes 4 to 8.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import functools
import json
import os
import pstats
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

WARM_STEPS = 60
PROMPT_TOKENS = 300
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Clock:
    """Time in functions, step by step; time in a nested function counts for that function only."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._spent: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, counted under `name`."""

        @functools.wraps(function)
        def wrapper(*args: object, **kwargs: object) -> object:
            begin = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.thread_time() - begin
                self._spent[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return wrapper

    def end_step(self) -> None:
        """End a step: the time since the last call is this step's."""
        self.steps.append(dict(self._spent))
        self._spent.clear()


def functions_of_ours() -> list[tuple[Any, str]]:
    """Return (module or class, name) of this package's functions that the scheduler's process runs in a decode step."""
    from sglang_dsv4.attention.backend import Dsv4AttentionBackend
    from sglang_dsv4.prefix import restore_and_save
    from sglang_dsv4.requests.sampling import penalties, sampler

    return [
        (restore_and_save, "carry_request_slots"),
        (restore_and_save, "carry_request_slots_to_replay"),
        (restore_and_save.TailLifecycle, "before_forward"),
        (Dsv4AttentionBackend, "init_forward_metadata_out_graph"),
        (sampler, "note_greedy_tokens"),
        (sampler, "take_greedy_tokens"),
        (sampler, "sample_with_seeds"),
        (penalties, "remember_source"),
        (penalties, "count_sampled"),
        (penalties, "leave_out_processed"),
    ]


def start_scheduler(model: str, most_requests: int, steps: int, clock: Clock | None) -> Scheduler:
    """Return a scheduler in this process with the plugin's hooks, timed if there is a clock."""
    import sglang.srt.managers.scheduler as scheduler_module
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    if clock is not None:  # before the plugin hands the functions to SGLang
        for owner, name in functions_of_ours():
            setattr(owner, name, clock.timed(name, getattr(owner, name)))
    load_plugins()
    pages = -(-(PROMPT_TOKENS + new_tokens(steps)) // 256) + 1
    slots = ["--max-running-requests", str(most_requests + 1)]
    slots += ["--max-total-tokens", str(256 * pages * (2 * most_requests + 8))]  # large enough that no request waits
    arguments = prepare_server_args(["--model-path", model, "--device", "cpu", "--skip-tokenizer-init", *slots])
    ranks = scheduler_module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    publish(arguments, role="scheduler", ranks=ranks)
    return scheduler_module.Scheduler(arguments, PortArgs.init_new(arguments))


def new_tokens(steps: int) -> int:
    """Return the new tokens of each request: enough to outlast the counted steps, also while the first requests wait
    for the prefill of the last."""
    return 2 * (WARM_STEPS + steps)


class Replay:
    """Replaces `ModelRunner.forward`: a prefill computes nothing, and a decode step does the host's part of a
    replay."""

    def __init__(self, runner: ModelRunner, most_requests: int) -> None:
        from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry

        self.backend, self._vocab = runner.attn_backend, runner.model_config.vocab_size
        self._sizes = [size for size in GRAPH_SIZES if size < most_requests] + [most_requests]
        self._registry = build_decode_registry(
            device=torch.device("cpu"),
            max_bs=most_requests,
            max_num_token=most_requests,
            seq_len_fill_value=self.backend.get_cuda_graph_seq_len_fill_value(),
            cache_loc_dtype=torch.int64,
        )
        names = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc")
        self._buffers = SimpleNamespace(
            **{name: self._registry.get_slot(name).buffer for name in names}, mamba_track_indices=None
        )
        self._logits = torch.randn(most_requests, self._vocab)
        self.backend.init_cuda_graph_state(most_requests, most_requests)
        for size in self._sizes:
            self.backend.init_forward_metadata_out_graph(self._captured(size), in_capture=True)

    def _captured(self, size: int) -> SimpleNamespace:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        b = self._buffers
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            req_pool_indices=b.req_pool_indices[:size],
            seq_lens=b.seq_lens[:size],
            positions=b.positions[:size],
        )

    def forward(self, batch: ForwardBatch, **_: object) -> ModelRunnerOutput:
        """Return prepared logits."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunnerOutput
        from sglang.srt.model_executor.runner import decode_cuda_graph_runner

        bs = batch.batch_size
        if batch.forward_mode.is_decode():
            size = next(size for size in self._sizes if size >= bs)
            self._registry.fill_from(batch, raw_bs=bs, padded_bs=size, raw_num_tokens=bs, padded_num_tokens=size)
            view = decode_cuda_graph_runner.build_replay_fb_view(
                forward_batch=batch,
                buffers=self._buffers,
                bs=size,
                raw_bs=bs,
                num_tokens=size,
                global_num_tokens_cpu=None,
                seq_len_fill_value=1,
                capture_forward_mode=batch.forward_mode,
                is_encoder_decoder=False,
            )
            self.backend.init_forward_metadata_out_graph(view)
        else:
            self.backend.init_forward_metadata(batch)
        output = LogitsProcessorOutput(next_token_logits=self._logits[:bs])
        return ModelRunnerOutput(logits_output=output, can_run_graph=batch.forward_mode.is_decode())


def request(number: int, tokens: int) -> TokenizedGenerateReqInput:
    """Return a request with its own prompt, decoded greedily."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=f"request {number}",
        input_text=None,
        input_ids=array("q", [3 + (number * 7 + i) % 200 for i in range(PROMPT_TOKENS)]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
    )


class Ended(Exception):
    """Raised when all steps have been counted."""


def decode(scheduler: Scheduler, requests: int, steps: int, clock: Clock | None) -> list[float]:
    """Return the seconds of each pass of the scheduler's loop in which `requests` requests decode; the clock keeps
    these steps."""
    from sglang.srt.managers.io_struct import AbortReq

    ingest, passes = scheduler.ingest_requests, []

    def next_pass() -> None:
        ingest()
        if clock is not None:
            clock.end_step()
        running = scheduler.running_batch
        if running is not None and len(running.reqs) == requests and not scheduler.waiting_queue:
            passes.append(time.thread_time())
        if len(passes) > WARM_STEPS + steps:
            raise Ended

    scheduler.ingest_requests = next_pass
    scheduler.process_input_requests([request(i, new_tokens(steps)) for i in range(requests)])
    try:
        scheduler.run_event_loop()
    except Ended:
        scheduler.ingest_requests = ingest
    if clock is not None:
        del clock.steps[:-steps]
    scheduler.process_input_requests([AbortReq(abort_all=True)])
    return [b - a for a, b in zip(passes[WARM_STEPS:], passes[WARM_STEPS + 1 :], strict=False)]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Microseconds, medians over the steps."""

    requests: int
    step_us: float
    step_p10_us: float
    ours_us: float
    parts_us: dict[str, float]


def measure(model: str, requests: int, steps: int) -> Measured:
    """Measure with a scheduler for `requests` requests."""
    clock = Clock()
    scheduler = start_scheduler(model, requests, steps, clock)
    runner = scheduler.tp_worker.model_runner
    runner.forward = Replay(runner, requests).forward
    seconds = decode(scheduler, requests, steps, clock)
    names = sorted({name for step in clock.steps for name in step})
    parts = {name: 1e6 * statistics.median(step.get(name, 0.0) for step in clock.steps) for name in names}
    ours = 1e6 * statistics.median(sum(step.values()) for step in clock.steps)
    return Measured(
        requests,
        1e6 * statistics.median(seconds),
        1e6 * statistics.quantiles(seconds, n=10)[0],
        ours,
        dict(sorted(parts.items(), key=lambda part: -part[1])),
    )


def profile(model: str, requests: int, steps: int) -> None:
    """Print the host's time by function: SGLang's, ours and PyTorch's."""
    scheduler = start_scheduler(model, requests, steps, None)
    runner = scheduler.tp_worker.model_runner
    runner.forward = Replay(runner, requests).forward
    found = cProfile.Profile()
    found.runcall(decode, scheduler, requests, steps, None)
    print(f"{requests} requests, {steps + WARM_STEPS} steps and one prefill")
    pstats.Stats(found).sort_stats("tottime").print_stats(60).print_stats("sglang_dsv4|kernels|radix_cache")


def main() -> None:
    """Measure each number of requests in a process of its own, since a process has one scheduler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for requests in arguments.requests:
        child = os.fork()
        if child == 0:
            sys.stdout.flush()
            try:
                if arguments.profile:
                    profile(arguments.model, requests, arguments.steps)
                else:
                    found = measure(arguments.model, requests, arguments.steps)
                    with open(f"/dev/shm/step_host.{os.getppid()}", "w") as file:
                        json.dump(dataclasses.asdict(found), file)
                os._exit(0)
            except BaseException as error:
                print(f"{requests} requests: {error!r}", file=sys.stderr)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"no numbers for {requests} requests, see above")
        if not arguments.profile:
            with open(f"/dev/shm/step_host.{os.getpid()}") as file:
                rows.append(json.load(file))
            os.unlink(file.name)
    for row in rows:
        print(f"{row['requests']:4} requests: step {row['step_us']:.0f} us (p10 {row['step_p10_us']:.0f})", end=", ")
        print(f"ours {row['ours_us']:.1f} us: " + ", ".join(f"{k} {v:.1f}" for k, v in row["parts_us"].items()))
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
