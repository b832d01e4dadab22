"""Prefixes in host memory and files: how fast they come back, and beside SGLang's own hierarchical cache.

    python benchmarks/bench_tiers.py --model MODEL --out benchmarks/results/tiers_h200.json \\
        [--works copies ttft] [--contenders ours builtin] [--prefix 50000] [--pool 131072] [-- further server flags]

Works:

    copies   records of `--prefix` tokens, by `HostRecords` alone: pages to host memory and back, beside plain copies of
             pinned memory of the same size in the same run (`builtin` is that rate, `ratio` the share of it; at least
             0.7 is the goal), and to files and back, beside plain files
    ttft     a prompt of `--prefix` tokens through a server, milliseconds until its one token: cold, from the device,
             from host memory (after prompts that fill the pool more than twice), from files (after a flush); ours
             beside the built-in with the same flags (`SGLANG_DSV4=off`). What was a hit, and of how many tokens, is
             asked of the server and written beside the time

Rows of the result: `{work, metric, ours, builtin, ratio}`, ratio above 1 where ours is better. Weights may be dummies.
On a CPU the same script runs with `--contenders ours` and a small model, where its numbers mean nothing.
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
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import serve_ab
import torch

WORKS = ("copies", "ttft")
TIERS = ("cold", "device", "host", "disk")
REPEATS = 5
PAGE = 256
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


def median_s(run: Callable[[], None], device: torch.device) -> float:
    """Median time of a run, the device's work included."""
    times = []
    for _ in range(REPEATS + 1):
        _synchronise(device)
        begin = time.perf_counter()
        run()
        _synchronise(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copies(model: Path, prefix: int, device: torch.device) -> list[Row]:
    """Rates in GB/s of everything that a prefix of so many tokens consists of, but its tail."""
    from sglang_dsv4.cache.host_records import HostRecords
    from sglang_dsv4.cache.kv_pool import Dsv4KVPool
    from sglang_dsv4.cache.page_records import PageRecords
    from sglang_dsv4.cache.record_files import RecordFiles
    from sglang_dsv4.doctor import geometry_of_checkpoint

    pages = -(-prefix // PAGE)
    geometry = geometry_of_checkpoint(model, fp8=device.type == "cuda")
    pool = Dsv4KVPool(geometry, full_tokens=2 * pages * PAGE, request_slots=2, device=str(device))
    for name, _, storage in pool.tensors():
        if "entries" in name or "keys" in name:
            storage.view(torch.uint8).random_(0, 256)
    host = HostRecords(PageRecords(pool), pages)
    order = random.Random(1).sample(range(1, 2 * pages + 1), pages)  # pages of the pool lie anywhere
    back = random.Random(2).sample(range(1, 2 * pages + 1), pages)
    slots = list(range(pages))
    size = pages * host.records.record_bytes

    host.save(order, slots)
    host.load(slots, back)
    _check_round_trip(host, order, back)
    save_s = median_s(lambda: host.save(order, slots), device)
    load_s = median_s(lambda: host.load(slots, back), device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    plain = torch.empty(size, dtype=torch.uint8, device=device)
    to_host_s = median_s(lambda: pinned.copy_(plain, non_blocking=True), device)
    to_device_s = median_s(lambda: plain.copy_(pinned, non_blocking=True), device)
    rows = [
        _share("copies", "save_gb_s", size / save_s / 1e9, size / to_host_s / 1e9),
        _share("copies", "load_gb_s", size / load_s / 1e9, size / to_device_s / 1e9),
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = RecordFiles(Path(folder) / "ours", {"of": "the benchmark"})
        names = [f"{i:04x}.page" for i in slots]
        target, plainly = torch.empty_like(host.memory), Path(folder)
        begin = time.perf_counter()
        written = [files.set(name, host.memory[i]) for i, name in enumerate(names)]
        write_s = time.perf_counter() - begin
        read_s = median_s(lambda: [files.get(name, target[i]) for i, name in enumerate(names)], torch.device("cpu"))
        assert all(written) and torch.equal(target, host.memory) and not files.faults
        begin = time.perf_counter()
        for i, name in enumerate(names):
            with (plainly / name).open("wb") as file:
                file.write(memoryview(host.memory[i].numpy()))
                os.fsync(file.fileno())
        plain_write_s = time.perf_counter() - begin
        plain_read_s = median_s(lambda: [(plainly / name).read_bytes() for name in names], torch.device("cpu"))
        rows += [
            _share("copies", "file_write_gb_s", size / write_s / 1e9, size / plain_write_s / 1e9),
            _share("copies", "file_read_gb_s", size / read_s / 1e9, size / plain_read_s / 1e9),  # from the page cache
        ]
    return rows


def _check_round_trip(host: object, order: Sequence[int], back: Sequence[int]) -> None:
    """What was loaded is what was saved, gathered from the pool again."""
    device = host.records.device
    _synchronise(device)
    found = torch.zeros((1, host.records.record_bytes), dtype=torch.uint8, device=device)
    for i in range(0, len(order), 7):
        if order[i] not in back:  # the original is still there
            original = torch.zeros_like(found)
            host.records.gather(torch.tensor([order[i]], device=device), original)
            host.records.gather(torch.tensor([back[i]], device=device), found)
            assert torch.equal(found, original), f"page {order[i]} came back as another one"


def _share(work: str, metric: str, ours: float, limit: float) -> Row:
    return Row(work, metric, ours, limit, ours / limit)


# ------------------------------------------------------------------------------------------------ time to first token


def ttft(contender: str, args: argparse.Namespace, flags: Sequence[str], logs: Path) -> dict[str, dict[str, float]]:
    """tier -> milliseconds until the first token (median), and tokens that the server says it took from its cache."""
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = random.Random(3)

    def prompt() -> list[int]:
        return [prompts.randrange(10, vocab) for _ in range(args.prefix)]

    found: dict[str, list[tuple[float, float]]] = {tier: [] for tier in TIERS}
    fillers = -(-5 * args.pool // (2 * args.prefix))
    with tempfile.TemporaryDirectory() as folder, _environment(STORE_VARIABLE, folder):
        with serve_ab.running(contender, args.model, flags, args.port, logs / f"{contender}_tiers.log") as server:
            _first_token(server, prompt())  # compiles what still has to be
            for _ in range(args.repeats):
                asked = prompt()
                found["cold"].append(_first_token(server, asked))
                found["device"].append(_first_token(server, asked))
                for _ in range(fillers):
                    _first_token(server, prompt())
                found["host"].append(_first_token(server, asked))
                _until_quiet(Path(folder))
                _flush(server)
                found["disk"].append(_first_token(server, asked))
                _flush(server)
    return {
        tier: {"ms": statistics.median(ms for ms, _ in runs), "hit_tokens": statistics.median(hit for _, hit in runs)}
        for tier, runs in found.items()
    }


def _first_token(server: serve_ab.Server, prompt: list[int]) -> tuple[float, float]:
    begin = time.perf_counter()
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    return 1e3 * (time.perf_counter() - begin), float(answer["meta_info"]["cached_tokens"])


def _flush(server: serve_ab.Server) -> None:
    """Device and host memory; the files stay. SGLang answers 400 while it is busy."""
    for _ in range(300):
        with contextlib.suppress(urllib.error.HTTPError):
            request = urllib.request.Request(f"{server.url}/flush_cache", b"")
            urllib.request.urlopen(request, timeout=600).close()
            return
        time.sleep(0.1)
    raise RuntimeError("the server does not become idle")


def _until_quiet(folder: Path, quiet_s: float = 1.0) -> None:
    """Until no file has been added for a second."""
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


def rows_of(found: dict[str, dict[str, dict[str, float]]]) -> list[Row]:
    """Both servers' times by tier, and the tokens that they took from it."""
    ours, builtin = found["ours"], found.get("builtin")
    rows = []
    for tier in TIERS:
        other = None if builtin is None else builtin[tier]["ms"]
        ratio = None if other is None else other / ours[tier]["ms"]
        rows.append(Row(f"ttft_{tier}", "ms", ours[tier]["ms"], other, ratio))
        other = None if builtin is None else builtin[tier]["hit_tokens"]
        ratio = ours[tier]["hit_tokens"] / other if other else None
        rows.append(Row(f"ttft_{tier}", "hit_tokens", ours[tier]["hit_tokens"], other, ratio))
    return rows


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--contenders", nargs="+", choices=("ours", "builtin"), default=("ours", "builtin"))
    parser.add_argument("--prefix", type=int, default=50_000, help="tokens of the prompt")
    parser.add_argument("--pool", type=int, default=131_072, help="tokens of the device's pool")
    parser.add_argument("--ratio", type=float, default=4.0, help="--hicache-ratio: all that is pushed out must fit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=30_117)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("flags", nargs="*", help="further server flags, behind --")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    if "copies" in args.works:
        rows += copies(args.model, args.prefix, device)
    if "ttft" in args.works:
        tiers = ("--enable-hierarchical-cache", "--hicache-ratio", str(args.ratio), "--hicache-storage-backend", "file")
        wait = ("--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", str(args.pool))
        flags = (*tiers, *wait, *args.flags)
        rows += rows_of({name: ttft(name, args, flags, args.logs) for name in args.contenders})
    for row in rows:
        other = "" if row.builtin is None else f"{row.builtin:12,.4g}{row.ratio or float('nan'):8.2f}"
        print(f"{row.work:14}{row.metric:18}{row.ours:12,.4g}{other}")
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": serve_ab.versions(),
        "model": args.model.name,
        "prefix_tokens": args.prefix,
        "pool_tokens": args.pool,
        "rows": [asdict(row) for row in rows],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"out": str(args.out), "rows": len(rows)}))


if __name__ == "__main__":
    main()
