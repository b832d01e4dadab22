"""A prefill and a decode server: bytes a second of transfers, and times under a mixed load beside one server.

    python benchmarks/bench_disaggregation.py --model MODEL --out benchmarks/results/pd_h200_x2.json
        [--backend nixl] [--works transfer serve] [--contenders pd one] [--lengths 256 2048 16384] [--chats 32]
        [--prompt 1024] [--answer 256] [--long 16384] [--every 2] [--seconds 60] [--port 30500] [--logs DIR]
        [-- flags of all servers]

Works:

    transfer   pages and rings of a prompt from one pool of V4-Flash to another (no weights, no MODEL), against a plain
               copy of as many bytes by the same engine in the same run; the goal is a share of 0.7
    serve      `pd`, a prefill server on the first GPU and a decode server on the second, and `one`, a server on both
               (`--tp 2`): the same load, --seconds long, after two rounds that are not measured. Each of --chats
               clients sends prompts of --prompt tokens, one after the other, and reads --answer tokens of each; every
               --every seconds another client asks for 16 tokens after --long tokens. Results: milliseconds to the
               first token of chats and of long prompts, and between a chat's tokens; tokens a second of the chats. A
               request to `pd` goes to both servers, as a router sends it.

With `--backend nixl` NIXL transfers, over UCX. Otherwise it is Mooncake over TCP where it is installed, else on a CPU
the engine of this package. On GPUs without either, `PYTHONPATH=tests/lib/gpu_sockets` provides an engine for tests. On
a CPU `serve` runs with one rank a server, and its times say only that the script works.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import torch
from lib import serve_load, servers, transfer_rate
from lib.http_client import new_session
from lib.transfer_engines import ENGINES, visible_gpus
from lib.versions import versions

WORKS = ("transfer", "serve")
PD, ONE = "pd", "one"
GOAL = 0.7
LONG_ANSWER = 16
HOST = "127.0.0.1"
MODE = "--disaggregation-mode"


class PairClient(serve_load.Client):
    """Sends each request to a prefill server and a decode server, and reads the decode server's answer."""

    def __init__(self, session: object, urls: Sequence[str], bootstrap_port: int) -> None:
        super().__init__(session, urls[-1])
        self._prefill, self._bootstrap, self._rooms = urls[0], bootstrap_port, random.SystemRandom()

    async def generate(
        self, input_ids: Sequence[int], new_tokens: int, begun: Callable[[], object] | None = None
    ) -> serve_load.Reply:
        """Send one request and wait for its end."""
        room = self._rooms.randrange(2**62)
        about = {"bootstrap_host": HOST, "bootstrap_port": self._bootstrap, "bootstrap_room": room}
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0.0}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, **about}

        async def at_prefill() -> None:
            async with self.session.post(f"{self._prefill}/generate", json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"the prefill server answered {response.status}: {await response.text()}")

        # The first error is raised at once: the other server may wait minutes for a request that has failed.
        _, reply = await asyncio.gather(at_prefill(), super().generate(input_ids, new_tokens, begun, about))
        return reply


def mixed(args: argparse.Namespace) -> Callable[[serve_load.Client], Awaitable[dict[str, float]]]:
    """Return the load of `serve`."""

    async def load(client: serve_load.Client) -> dict[str, float]:
        rng = random.Random(1)

        def ids(count: int) -> list[int]:
            return [rng.randrange(3, args.vocabulary) for _ in range(count)]

        for _ in range(2):  # not measured: they compile kernels for these batches
            chats_at_once = (client.generate(ids(args.prompt), args.answer) for _ in range(args.chats))
            await asyncio.gather(client.generate(ids(args.long), LONG_ANSWER), *chats_at_once)
        begin = time.perf_counter()
        chats: list[serve_load.Reply] = []
        longs: list[asyncio.Task[serve_load.Reply]] = []

        async def chat() -> None:
            while time.perf_counter() - begin < args.seconds:
                chats.append(await client.generate(ids(args.prompt), args.answer))

        async def long_prompts() -> None:
            while time.perf_counter() - begin < args.seconds:
                longs.append(asyncio.create_task(client.generate(ids(args.long), LONG_ANSWER)))
                await asyncio.sleep(args.every)

        await asyncio.gather(long_prompts(), *(chat() for _ in range(args.chats)))
        spent = time.perf_counter() - begin
        asked = await asyncio.gather(*longs)
        return {
            "chats": len(chats),
            "long_prompts": len(asked),
            "tok_s": sum(len(reply.token_times) for reply in chats) / spent,
            **serve_load.milliseconds("chat_ttft", [reply.ttft for reply in chats]),
            **serve_load.milliseconds("chat_itl", [gap for reply in chats for gap in reply.gaps]),
            **serve_load.milliseconds("long_ttft", [reply.ttft for reply in asked]),
        }

    return load


@contextmanager
def started(contender: str, args: argparse.Namespace) -> Iterator[Callable[[object], serve_load.Client]]:
    """Start a contender's servers; yield what makes a client of them."""
    gpus = torch.cuda.device_count()
    with ExitStack() as stack:

        def server(name: str, port: int, flags: Sequence[str], env: dict[str, str]) -> str:
            log = args.logs / f"{name}.log"
            running = servers.running("ours", args.model, [*args.flags, *flags], port, log, env=env)
            return stack.enter_context(running).url

        if contender == ONE:
            url = server(ONE, args.port, ["--tp", str(max(1, min(2, gpus)))], {})
            yield lambda session: serve_load.Client(session, url)
            return
        bootstrap = args.port + 3

        def one_side(number: int, side: str) -> str:
            flags = [MODE, side, "--disaggregation-bootstrap-port", str(bootstrap), "--host", HOST]
            flags += ["--disaggregation-transfer-backend", args.backend]
            flags += ["--disaggregation-decode-enable-radix-cache"] if side == "decode" else []
            env = {"SGLANG_HOST_IP": HOST, **({"CUDA_VISIBLE_DEVICES": visible_gpus(number)} if gpus else {})}
            return server(side, args.port + 1 + number, flags, env)

        # Both start at the same time, since a start takes minutes; one in this thread, as `sessions.own` demands.
        with ThreadPoolExecutor(1) as starting:
            decode = starting.submit(one_side, 1, "decode")
            urls = one_side(0, "prefill"), decode.result()
        yield lambda session: PairClient(session, urls, bootstrap)


def engine(backend: str) -> str:
    """Return which engine transfers, with the version of an installed one."""
    if backend == "nixl":
        return f"nixl {version('nixl')} over UCX"
    spec = find_spec("mooncake")
    if spec is None:
        return "sockets of sglang-dsv4"
    installed = packages_distributions().get("mooncake")
    return f"{installed[0]} {version(installed[0])} over TCP" if installed else f"{spec.origin}, not installed"


def serve(contender: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of a contender."""

    async def run(client_of: Callable[[object], serve_load.Client]) -> dict[str, float]:
        async with new_session() as session:
            return await mixed(args)(client_of(session))

    with started(contender, args) as client_of:
        return asyncio.run(run(client_of))


def table(result: dict) -> str:
    """Return the result as lines for a reader."""
    lines = []
    for rate in result.get("transfer", ()):
        where = f"{rate['tokens']:>6} tokens, pages {rate['pages']:<10}"
        lines.append(f"{where} {rate['gb_s']:6.2f} GB/s, {rate['share']:.0%} of a plain copy ({rate['blocks']} blocks)")
    for name in sorted({name for figures in result.get("serve", {}).values() for name in figures}):
        found = (f"{who} {figures.get(name, float('nan')):10.1f}" for who, figures in result["serve"].items())
        lines.append(f"{name:>14}  {'  '.join(found)}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=ENGINES, default="mooncake_tcp")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--contenders", nargs="+", choices=(PD, ONE), default=(PD, ONE))
    parser.add_argument("--lengths", nargs="+", type=int, default=(256, 2048, 16384))
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=30500)
    parser.add_argument("--logs", type=Path, default=Path())
    parser.add_argument("flags", nargs="*")
    return parser


def main() -> None:
    """Run the command line of the module's docstring."""
    command = parser()
    args = command.parse_args()
    gpus = torch.cuda.device_count()
    if any(length % transfer_rate.PAGE_TOKENS or length <= 0 for length in args.lengths):
        command.error(f"--lengths {args.lengths}: expected multiples of {transfer_rate.PAGE_TOKENS} tokens")
    if "serve" in args.works:
        if args.model is None:
            command.error("the work `serve` needs --model")
        if gpus == 1:
            command.error("the work `serve` needs two GPUs, or none: it compares two servers with one on both GPUs")
        args.vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    result = {
        "device": f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "cpu",
        "engine": engine(args.backend),
        "load_average": os.getloadavg()[0],  # of other work on this machine, at the start
        "cores": os.cpu_count(),
        "versions": versions(),
        "goal": GOAL,
    }
    if "transfer" in args.works:
        devices = ("cuda:0", f"cuda:{min(1, gpus - 1)}") if gpus else ("cpu", "cpu")
        result["transfer"] = [asdict(rate) for rate in transfer_rate.measure(args.lengths, devices, args.backend)]
    if "serve" in args.works:
        result["load"] = {
            name: getattr(args, name) for name in ("chats", "prompt", "answer", "long", "every", "seconds")
        }
        result["serve"] = {}
        for contender in args.contenders:
            result["serve"][contender] = serve(contender, args)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
