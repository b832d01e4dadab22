"""Time to restore prefixes from host memory and from files, ours and SGLang's own hierarchical cache.

    python benchmarks/bench_tiers.py --model MODEL --out benchmarks/results/tiers_h200.json \\
        [--works copies ttft] [--contenders ours builtin] [--prefix 50000] [--pool 131072] [-- further server flags]

Works:

    copies   page records of `--prefix` tokens of all of V4-Flash (no weights, no MODEL), by `HostRecords` alone: pages
             to host memory and back, against plain copies of pinned memory of the same size in the same run
             (`builtin` is that rate, `ratio` our share of it; the goal is at least 0.7), and to files and back, against
             plain files
    ttft     a prompt of `--prefix` tokens through a server, milliseconds until its one token: cold, from the device,
             from host memory (after prompts that fill the pool one and a half times), from files (after a flush); ours
             and the built-in with the same flags (`SGLANG_DSV4=off`). The server reports hits, their tokens and their
             tiers, which the result has next to the time

Files are read from the disk: the system's page cache is dropped before. Rows of the result: `{work,
metric, ours, builtin, ratio}`, ratio above 1 where ours is better. Weights may be dummies; a missing MODEL is
written as the config of six layers of V4-Flash. On a CPU the same script runs with `--contenders ours` and a small
model, where its numbers mean nothing.

The result is written after every round: a command that is interrupted keeps its figures, and a later command with the
same --out, --prefix and --pool, on the same machine, adds to them. If a server fails, the result has its error, and the
other server still runs. On one H100 or H200, two servers that start and four rounds of some seven seconds each:

    SGLANG_JIT_DEEPGEMM_PRECOMPILE=0 python benchmarks/bench_tiers.py --model FOLDER --out FILE --limit-s 60 -- \\
        --load-format dummy --trust-remote-code --context-length 65536 --mem-fraction-static 0.7 --random-seed 1 \\
        --max-running-requests 8 --chunked-prefill-size 8192 --cuda-graph-bs-decode 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from lib import servers
from lib.model_shapes import FLASH, write_config
from lib.versions import versions

WORKS = ("copies", "ttft")
TIERS = ("cold", "device", "host", "disk")
REPEATS = 5
PAGE = 256
FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)  # V4-Flash's 43 layers
REQUEST_TIMEOUT_S = 120
STORE_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


@dataclass(frozen=True)
class Row:
    """One figure; `builtin` is None where only ours ran."""

    work: str
    metric: str
    ours: float
    builtin: float | None
    ratio: float | None


# ------------------------------------------------------------------------------------------------ copies


def median_s(run: Callable[[], None], device: torch.device, before: Callable[[], None] = lambda: None) -> float:
    """Return the median time of a run, the device's work included; `before` runs unmeasured each time."""
    times = []
    for _ in range(REPEATS + 1):
        before()
        _synchronise(device)
        begin = time.perf_counter()
        run()
        _synchronise(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copies(prefix: int, device: torch.device) -> list[Row]:
    """Return rates in GB/s of all that a prefix of `prefix` tokens consists of, except its tail."""
    from dsv4_kernels.kv_layout import RowFormat
    from sglang_dsv4.cache.geometry import PoolGeometry
    from sglang_dsv4.cache.host_records import HostRecords
    from sglang_dsv4.cache.kv_pool import Dsv4KVPool
    from sglang_dsv4.cache.record_files import RecordFiles
    from sglang_dsv4.prefix.storage_tier import READERS

    pages = -(-prefix // PAGE)
    fp8 = device.type == "cuda"
    geometry = PoolGeometry(
        ratios=FLASH_RATIOS,
        row_dim=512,
        rope_dim=64,
        index_dim=128,
        window_tokens=128,
        row_format=RowFormat.FP8 if fp8 else RowFormat.PLAIN,
        index_format=RowFormat.INDEX_FP4 if fp8 else RowFormat.PLAIN,
    )
    pool = Dsv4KVPool(geometry, full_tokens=2 * pages * PAGE, request_slots=2, device=str(device))
    for name, _, storage in pool.tensors():
        if "entries" in name or "keys" in name:
            storage.view(torch.uint8).random_(0, 256)
    host = HostRecords(pool.page_records(), pages)
    order = random.Random(1).sample(range(1, 2 * pages + 1), pages)  # a prefix's pages are anywhere in the pool
    back = random.Random(2).sample(range(1, 2 * pages + 1), pages)
    slots = list(range(pages))
    there, anew = (torch.tensor(numbers, device=device) for numbers in (order, back))
    size = pages * host.records.record_bytes

    host.save(there, slots)
    host.load(slots, anew)
    _check_round_trip(host, order, back)
    save_s = median_s(lambda: host.save(there, slots), device)
    load_s = median_s(lambda: host.load(slots, anew), device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    plain = torch.empty(size, dtype=torch.uint8, device=device)
    to_host_s = median_s(lambda: pinned.copy_(plain, non_blocking=True), device)
    to_device_s = median_s(lambda: plain.copy_(pinned, non_blocking=True), device)
    rows = [
        _share("copies", "save_gb_s", size / save_s / 1e9, size / to_host_s / 1e9),
        _share("copies", "load_gb_s", size / load_s / 1e9, size / to_device_s / 1e9),
    ]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        files = RecordFiles(Path(folder) / "ours", {"of": "the benchmark"})
        names = [f"{i:04x}.page" for i in slots]
        target, plainly = torch.empty_like(host.memory), Path(folder)
        begin = time.perf_counter()
        written = [files.set(name, host.memory[i]) for i, name in enumerate(names)]
        write_s = time.perf_counter() - begin
        forget, cpu = partial(_forget, Path(folder)), torch.device("cpu")
        readers = stack.enter_context(ThreadPoolExecutor(READERS))  # as the server reads
        read_s = median_s(lambda: list(readers.map(files.get, names, target)), cpu, forget)
        assert all(written) and torch.equal(target, host.memory) and not files.faults
        begin = time.perf_counter()
        for i, name in enumerate(names):
            with (plainly / name).open("wb") as file:
                file.write(memoryview(host.memory[i].numpy()))
                os.fsync(file.fileno())
        plain_write_s = time.perf_counter() - begin
        plain_read_s = median_s(lambda: list(readers.map(lambda n: (plainly / n).read_bytes(), names)), cpu, forget)
        rows += [
            _share("copies", "file_write_gb_s", size / write_s / 1e9, size / plain_write_s / 1e9),
            _share("copies", "file_read_gb_s", size / read_s / 1e9, size / plain_read_s / 1e9),
        ]
    if device.type == "cuda":  # freeing registered memory would leave it locked
        torch.cuda.cudart().cudaHostUnregister(host.memory.data_ptr())
        del host, pool, pinned, plain
        torch.cuda.empty_cache()
    return rows


def _forget(folder: Path) -> None:
    """Make the system write a folder's files and drop them from memory, so that the next read is the disk's."""
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError), (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check_round_trip(host: object, order: Sequence[int], back: Sequence[int]) -> None:
    """Check that the loaded records, gathered from the pool again, equal the saved ones."""
    device = host.records.device
    _synchronise(device)
    found = torch.zeros((1, host.records.record_bytes), dtype=torch.uint8, device=device)
    for i in range(0, len(order), 7):
        if order[i] not in back:  # the original is still in the pool
            original = torch.zeros_like(found)
            host.records.gather(torch.tensor([order[i]], device=device), original)
            host.records.gather(torch.tensor([back[i]], device=device), found)
            assert torch.equal(found, original), f"page {order[i]} came back as another one"


def _share(work: str, metric: str, ours: float, limit: float) -> Row:
    return Row(work, metric, ours, limit, ours / limit)


# ------------------------------------------------------------------------------------------------ time to first token


Figures = dict[str, list[dict]]
"""By tier, for each round: `ms` until the first token, `hit_tokens` from the server's cache, and the tiers that they
came from."""


def ttft(contender: str, args: argparse.Namespace, flags: Sequence[str], keep: Callable[[Figures], None]) -> None:
    """Run the rounds of one server; `keep` is called with all rounds after each. The first warms up and does not
    count."""
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = random.Random(3)

    def prompt() -> list[int]:
        return prompts.choices(range(10, vocab), k=args.prefix)

    found: Figures = {tier: [] for tier in TIERS}
    fillers = -(-3 * args.pool // (2 * args.prefix))
    with tempfile.TemporaryDirectory() as folder, _environment(STORE_VARIABLE, folder):
        log = args.logs / f"{contender}_tiers.log"
        with servers.running(contender, args.model, flags, args.port, log, alone=True) as server:
            begin = time.monotonic()
            for measured in range(-1, args.repeats):
                asked = prompt()
                times = {"cold": _first_token(server, asked), "device": _first_token(server, asked)}
                for _ in range(fillers):
                    _first_token(server, prompt())
                times["host"] = _first_token(server, asked)
                _until_quiet(Path(folder))
                _flush(server)
                _forget(Path(folder))
                times["disk"] = _first_token(server, asked)
                _flush(server)
                took = time.monotonic() - begin
                print(f"{contender}, {took:.0f} s after {server.ready_s:.0f}: {json.dumps(times)}", flush=True)
                if measured >= 0:
                    for tier, figures in times.items():
                        found[tier].append(figures)
                    keep(found)
                    if took * (measured + 3) / (measured + 2) > args.limit_s:
                        break


def _first_token(server: servers.Server, prompt: list[int]) -> dict:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        f"{server.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
        meta = json.load(answer)["meta_info"]
    ms = 1e3 * (time.perf_counter() - begin)
    return {"ms": ms, "hit_tokens": meta["cached_tokens"], "of": meta.get("cached_tokens_details")}


def _flush(server: servers.Server) -> None:
    """Flush device and host memory; files stay. SGLang answers 400 while it is busy."""
    for _ in range(300):
        with contextlib.suppress(urllib.error.HTTPError):
            request = urllib.request.Request(f"{server.url}/flush_cache", b"")
            urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S).close()
            return
        time.sleep(0.1)
    raise RuntimeError("the server does not become idle")


def _until_quiet(folder: Path, quiet_s: float = 1.0) -> None:
    """Wait until no file has been added for a second."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        count = sum(len(files) for _, _, files in os.walk(folder))
        if count != before:
            before, since = count, time.monotonic()
        time.sleep(0.05)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def rows_of(found: Mapping[str, Figures]) -> list[Row]:
    """Return medians of both servers' times by tier, and of the tokens that came from it; no rows without ours."""

    def median(contender: str, tier: str, metric: str) -> float | None:
        figures = found.get(contender, {}).get(tier)
        return statistics.median(of[metric] for of in figures) if figures else None

    rows = []
    for tier in TIERS:
        for metric, less_is_better in (("ms", True), ("hit_tokens", False)):
            ours, builtin = (median(contender, tier, metric) for contender in ("ours", "builtin"))
            if ours is not None:
                a, b = (builtin, ours) if less_is_better else (ours, builtin)
                rows.append(Row(f"ttft_{tier}", metric, ours, builtin, a / b if a is not None and b else None))
    return rows


class Result:
    """The figures measured so far, kept in a file."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        """Begin with the figures in `args.out` if they have the same setting."""
        self._out = args.out
        setting = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "versions": versions(),
            "model": args.model.name,
            "prefix_tokens": args.prefix,
            "pool_tokens": args.pool,
            "flags": args.flags,
        }
        before = json.loads(args.out.read_text()) if args.out.exists() else {}
        if before and {name: before.get(name) for name in setting} != json.loads(json.dumps(setting)):
            raise SystemExit(f"{args.out} has results of another machine, model or setting: name another file")
        self._setting = setting
        self.copies: list[Row] = [Row(**row) for row in before.get("rows", ()) if row["work"] == "copies"]
        self.figures: dict[str, Figures] = before.get("figures", {})
        self.errors: dict[str, str] = {}

    def write(self) -> list[Row]:
        """Write all figures; return the rows."""
        rows = [*self.copies, *rows_of(self.figures)]
        result = {**self._setting, "rows": [asdict(row) for row in rows], "figures": self.figures}
        if self.errors:
            result["errors"] = self.errors
        unfinished = self._out.with_suffix(".tmp")
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
        unfinished.replace(self._out)
        return rows


def main() -> None:
    """Run the works and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--contenders", nargs="+", choices=("ours", "builtin"), default=("ours", "builtin"))
    parser.add_argument("--prefix", type=int, default=50_000, help="tokens of the prompt")
    parser.add_argument("--pool", type=int, default=131_072, help="tokens of the device's pool")
    parser.add_argument("--ratio", type=float, default=4.0, help="--hicache-ratio: all that is pushed out must fit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no round begins that would end later")
    parser.add_argument("--ready-s", type=float, default=300, help="seconds that a server may take to start")
    parser.add_argument("--port", type=int, default=30_117)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("flags", nargs="*", help="further server flags, after --")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "ttft" in args.works and not (args.model / "config.json").exists():
        write_config(args.model, FLASH)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = Result(args, device)
    servers.READY_TIMEOUT_S = args.ready_s
    if "copies" in args.works:
        with _noted(result, "copies"):
            result.copies = copies(args.prefix, device)
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", str(args.ratio), "--hicache-storage-backend", "file")
    wait = ("--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", str(args.pool))
    for name in args.contenders if "ttft" in args.works else ():

        def keep(figures: Figures, name: str = name) -> None:
            result.figures[name] = figures
            result.write()

        with _noted(result, name):
            ttft(name, args, (*tiers, *wait, *args.flags), keep)
    rows = result.write()
    for row in rows:
        other = "" if row.builtin is None else f"{row.builtin:12,.4g}{row.ratio or float('nan'):8.2f}"
        print(f"{row.work:14}{row.metric:18}{row.ours:12,.4g}{other}")
    print(json.dumps({"out": str(args.out), "rows": len(rows), "errors": result.errors}))
    if result.errors:
        raise SystemExit(1)


@contextlib.contextmanager
def _noted(result: Result, what: str) -> Iterator[None]:
    """Keep an error of one part in the result and go on; write the figures so far."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        result.errors[what] = f"{type(error).__name__}: {error}"[-2000:]
    result.write()


if __name__ == "__main__":
    main()
