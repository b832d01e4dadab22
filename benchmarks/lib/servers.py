"""Servers of SGLang for benchmarks: start one, wait for it, stop it, or use one that `servers.py` has started."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from lib import sessions

CONTENDERS = ("builtin", "ours")
HCA_GROUP = 128  # tokens of an HCA entry, and rows of a request's HCA state in the built-in
READY_TIMEOUT_S = 900
LINES_OF_REASON = 40
NODES_PORT = 500  # from a server's port to the port at which its nodes meet
NODE_PORTS = 1000  # from the port of a node to the next node's
PORT_TAKEN = "address already in use"
"""A server's log line when its port is in use; the server then never answers. Linux gives ports from 32768 on to any
process."""
STALL_S = 2.0  # twice the longest forward, a chunk of the 64K prefill
SWITCHES = (
    "DSV4_DEPENDENT_LAUNCH",
    "SGLANG_DSV4_ALL_REDUCE",
    "SGLANG_DSV4_EXPERT_ROWS",
    "SGLANG_DSV4_FP8_LINEAR",
    "SGLANG_DSV4_JOINT_LAUNCH",
    "SGLANG_DSV4_SEQUENCE_PARALLEL",
    "SGLANG_DSV4_VERIFY_EPILOGUE",
    "SGLANG_DSV4_WO_A",
)
"""Our switches that change how a step runs."""
FOLDER_VARIABLE = "BENCHMARK_SERVERS"
LIST = "servers.json"
"""File in the folder of `FOLDER_VARIABLE` that lists the running servers."""


class Server:
    """A running `sglang.launch_server`.

    Attributes:
        stall_s: for all servers: a silence of this many seconds is a stall and not serving.
    """

    stall_s = STALL_S

    def __init__(self, contender: str, model: Path, url: str, log: Path, ready_s: float) -> None:
        self.contender, self.model, self.url, self.log, self.ready_s = contender, model, url, log, ready_s

    def get(self, path: str) -> dict:
        """GET a path; return the JSON answer."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict) -> dict:
        """POST a JSON body; return the JSON answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def log_size(self) -> int:
        """Return the bytes of its log so far."""
        return self.log.stat().st_size

    def gpu_share(self, requests: int, since: int) -> float | None:
        """Return the share of the time between SGLang's events around forwards while so many requests decode.

        The median of the log's lines after `since` bytes; None if there are none (SGLANG_ENABLE_METRICS_DEVICE_TIMER).
        """
        return gpu_share(self.log.read_bytes()[since:].decode(errors="replace"), requests)

    def kv_memory(self) -> tuple[float, int]:
        """Return bytes of the KV pools and all that belongs to them (rings, states, tails), and the tokens that they
        hold.

        Both come from the log in which each server reports its own sizing. (Free GPU memory before and after has two
        decimals of a GB and includes what the allocator had already, so it cannot show a pool of 0.5 GB. Neither
        `/server_info` nor `/metrics` counts the built-in's pools.)
        """
        text = self.log.read_text(errors="replace")
        if self.contender == "ours":
            return our_pools(text)
        return builtin_pools(text, self.model)


def gpu_share(log: str, requests: int) -> float | None:
    """Return what `Server.gpu_share` does, of a log's text."""
    lines = re.findall(rf"Decode batch.* #running-req: {requests},.* fwd occupancy: ([\d.]+)%", log)
    return statistics.median(map(float, lines)) / 100 if lines else None


def our_pools(log: str) -> tuple[float, int]:
    """Return bytes and tokens of the memory plans in our server's log: the target's, and the draft worker's bytes
    added.

    Raises:
        ValueError: the log has no plan.
    """
    plans = {}  # every rank logs its plan: the last plan of each worker counts
    table = r"(Target|Draft) worker\nDeepSeek-V4 pools: ([\d,]+) tokens(?:.*\n)+?total +([\d,]+)"
    for worker, tokens, size in re.findall(table, log):
        plans[worker] = int(size.replace(",", "")), int(tokens.replace(",", ""))
    if "Target" not in plans:
        raise ValueError('the log has no memory plan of ours ("Target worker", "DeepSeek-V4 pools: …")')
    return float(sum(size for size, _ in plans.values())), plans["Target"][1]


def builtin_pools(log: str, model: Path) -> tuple[float, int]:
    """Return bytes and tokens of SGLang 0.5.23's own pools by its log: bytes a token, and the HCA layers' states.

    `DSV4PoolConfigurator` logs the bytes of a token (entries, indexer keys, paged windows and CSA states) and the rows
    of the requests' states: [rows, 2, head_dim] fp32 an HCA layer. `rows` is the logged number plus 129, rounded up to
    a multiple of 128.

    Raises:
        ValueError: a line is missing, or names memory of a kind that is not counted here.
    """
    cost = re.findall(r"DSV4 memory calculation: unified=(\w+),.*bytes_per_full_token=([\d.]+)", log)
    sizes = re.findall(r"Initialize DeepSeekV4TokenToKVPool with .*c128_state_pool_size=(\d+)", log)
    tokens = re.findall(r"max_total_num_tokens=(\d+)", log)
    if not (cost and sizes and tokens) or cost[-1][0] != "False":
        raise ValueError(
            "the built-in's log should have 'DSV4 memory calculation: unified=False, … bytes_per_full_token=', "
            "'Initialize DeepSeekV4TokenToKVPool with … c128_state_pool_size=' and 'max_total_num_tokens='"
        )
    config = json.loads((model / "config.json").read_text())
    layers = config["compress_ratios"][: config["num_hidden_layers"]].count(HCA_GROUP)
    rows = -(-(int(sizes[-1]) + HCA_GROUP + 1) // HCA_GROUP) * HCA_GROUP
    states = layers * rows * 2 * config["head_dim"] * 4
    return int(tokens[-1]) * float(cost[-1][1]) + states, int(tokens[-1])


Process = subprocess.Popen[bytes]


class DidNotComeUpError(RuntimeError):
    """Raised when a server does not come up; the message has the reason or its log's end."""


def environment_of(contender: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a server's process: this process's with `more`."""
    env = {**os.environ, **(more or {}), "SGLANG_DSV4": "off" if contender == "builtin" else ""}
    return {name: value for name, value in env.items() if value or name != "SGLANG_DSV4"}


def start(contender: str, model: Path, flags: Sequence[str], port: int, log: Path, env: Mapping[str, str]) -> Process:
    """Start a server's process in a session of its own, which ends with this process (`sessions`). With --nnodes it is
    a shell that becomes the first node's process.

    Raises:
        DidNotComeUpError: another process answers at the port; it would be taken for the new server.
    """
    if is_taken(port):
        raise DidNotComeUpError(
            f"port {port} should be free for the {contender} server, but a process listens there, perhaps a server of "
            "an earlier benchmark: end that process, or give another --port"
        )
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags]
    if "--nnodes" in flags:
        command = ["sh", "-c", nodes_script(command, int(flags[flags.index("--nnodes") + 1]), port, log)]
    else:
        command += ["--port", str(port)]
    with log.open("wb") as file:
        options = {"stdout": file, "stderr": subprocess.STDOUT, "env": dict(env), "start_new_session": True}
        process = subprocess.Popen(command, **options)
    sessions.own(process.pid)
    return process


def is_taken(port: int) -> bool:
    """Return whether a process listens at a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def nodes_script(command: Sequence[str], nodes: int, port: int, log: Path) -> str:
    """Return a shell command that starts several nodes on this machine in one session. NCCL treats them as machines:
    their ranks may share a GPU, and it connects them by sockets."""
    command = [*command, "--dist-init-addr", f"127.0.0.1:{port + NODES_PORT}"]
    lines = []
    for node in reversed(range(nodes)):
        names = {"NCCL_HOSTID": f"node{node}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        own = ["env", *(f"{name}={value}" for name, value in names.items()), *command]
        line = shlex.join([*own, "--node-rank", str(node), "--port", str(port + node * NODE_PORTS)])
        lines.append(f"{line} > {shlex.quote(f'{log}.node{node}')} 2>&1 &" if node else f"exec {line}")
    return "\n".join(lines)


def wait(contender: str, process: Process, url: str, log: Path, begin: float) -> float:
    """Wait until the server answers; return the seconds since `begin`.

    Raises:
        DidNotComeUpError: the server ended, was not ready in time, or ours is not live; the message has its log's end.
    """
    while not is_ready(contender, process.poll() is None, url, log, time.monotonic() - begin):
        time.sleep(0.5)
    return time.monotonic() - begin


def is_ready(contender: str, alive: bool, url: str, log: Path, waited_s: float) -> bool:
    """Return whether a server answers.

    Raises:
        DidNotComeUpError: it ended, was not ready in time, or ours is not live; the message has its log's end.
    """
    if not _answers(url):
        taken = PORT_TAKEN in log.read_text(errors="replace")  # SGLang's warm-up keeps trying for two minutes
        if taken or not alive or waited_s > READY_TIMEOUT_S:
            raise DidNotComeUpError(f"the {contender} server did not come up; {_end_of(log)}")
        return False
    text = log.read_text(errors="replace")
    live = "sglang_dsv4" in text and "is live on" in text
    if live != (contender == "ours"):
        raise DidNotComeUpError(
            f"{contender} was asked for, but sglang_dsv4 is {'' if live else 'not '}live: see {log}"
        )
    return True


@contextlib.contextmanager
def running(
    contender: str,
    model: Path,
    flags: Sequence[str],
    port: int,
    log: Path,
    alone: bool = False,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop it with all its processes at the end, also at SIGTERM.

    A server that `servers.py start` runs with the same model, flags and switches is used instead and keeps running.
    With `alone`, the processes of all other servers in that folder are suspended meanwhile, for measuring times.
    `env` is added to this process's environment.

    Raises:
        DidNotComeUpError: see `start` and `wait`.
    """
    here = already_running(contender, model, flags, {**os.environ, **(env or {})})
    if here is not None:
        print(f"{contender}: taking the server that runs at {here.url}, ready after {here.ready_s:.0f} s", flush=True)
        with others_suspended(Path(os.environ[FOLDER_VARIABLE]), here.url) if alone else contextlib.nullcontext():
            yield here
        return
    begin = time.monotonic()
    process = start(contender, model, flags, port, log, environment_of(contender, env))
    try:
        url = f"http://127.0.0.1:{port}"
        yield Server(contender, model, url, log, wait(contender, process, url, log, begin))
    finally:
        sessions.end(process.pid)
        process.wait()


@contextlib.contextmanager
def others_suspended(folder: Path, url: str) -> Iterator[None]:
    """Suspend the servers of `folder` except the one at `url`; they continue at the end."""
    others = [found["pid"] for found in listed_servers(folder).values() if found["url"] != url]
    try:
        for session in others:
            sessions.suspend(session)
        yield
    finally:
        for session in others:
            sessions.resume(session)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health_generate", timeout=20) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LINES_OF_REASON:]
    return "\n".join([f"{log} ends:", *lines])


# ------------------------------------------------------------------------------------------------ several at once


def identity(contender: str, model: Path, flags: Sequence[str], env: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that make two servers the same; the last value counts for a flag that is given twice."""
    options: dict[str, list[str]] = {}
    for word in flags:
        if word.startswith("--"):
            values = options[word] = []
        else:
            values.append(word)
    switches = {name: env[name] for name in sorted(env) if name.startswith(("SGLANG_", "DSV4_")) and env[name]}
    switches.pop("SGLANG_DSV4", None)  # the contender says that already
    return {"contender": contender, "model": str(model.resolve()), "options": options, "switches": switches}


def already_running(contender: str, model: Path, flags: Sequence[str], env: Mapping[str, str]) -> Server | None:
    """Return the running server with these settings, None if there is none."""
    if not env.get(FOLDER_VARIABLE):
        return None
    wanted = identity(contender, model, flags, env)
    for found in json.loads((Path(env[FOLDER_VARIABLE]) / LIST).read_text()).values():
        if found["identity"] != wanted:
            continue
        sessions.resume(found["pid"])
        if "ready_s" in found and _answers(found["url"]):
            return Server(contender, model, found["url"], Path(found["log"]), found["ready_s"])
    return None


def listed_servers(folder: Path) -> dict[str, dict]:
    """Return the servers that `servers.py start` noted in `folder`, by name."""
    return json.loads((folder / LIST).read_text()) if (folder / LIST).exists() else {}


def start_all(about: Mapping, folder: Path, port: int, seconds: float = math.inf) -> dict[str, str]:
    """Start all servers that SERVERS.json names at once and list them; return the failed ones' reasons, by name.

    A server that runs in the folder already, with the same settings, is not started again. A server that is neither
    ready nor ended after `seconds` stays in the list without `ready_s`: another call goes on waiting.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, common, deadline = Path(about["model"]), about.get("flags", []), time.monotonic() + seconds
    listed, failed, waiting = listed_servers(folder), {}, []
    for name, server in about["servers"].items():
        contender, flags = server["contender"], [*common, *server.get("flags", [])]
        env, where = environment_of(contender, server.get("env")), Path(server.get("model", model))
        wanted = identity(contender, where, flags, env)
        here = listed.get(name)
        if here is None or here["identity"] != wanted or not sessions.leader_runs(here["pid"]):
            if here is not None:
                sessions.end(here["pid"])
                del listed[name]
            used = {found["url"].rpartition(":")[2] for found in listed.values()}
            at = next(free for free in itertools.count(port) if str(free) not in used and not is_taken(free))
            log = folder / f"{name}.log"
            process = start(contender, where, flags, at, log, env)
            listed[name] = {
                "identity": wanted, "url": f"http://127.0.0.1:{at}", "log": str(log), "pid": process.pid,
                "begun": time.time(),
            }  # fmt: skip
        sessions.own(listed[name]["pid"])
        sessions.resume(listed[name]["pid"])
        waiting += [name] * ("ready_s" not in listed[name])
    _list(folder, listed)
    while waiting and time.monotonic() < deadline:
        for name in list(waiting):
            found = listed[name]
            try:
                alive, took = sessions.leader_runs(found["pid"]), time.time() - found["begun"]
                if not is_ready(found["identity"]["contender"], alive, found["url"], Path(found["log"]), took):
                    continue
                found["ready_s"] = took
                print(f"{name}: ready after {found['ready_s']:.0f} s", flush=True)
            except DidNotComeUpError as error:
                failed[name] = str(error)
                print(f"{name}: {error}", flush=True)
                sessions.end(found["pid"])
                del listed[name]
            waiting.remove(name)
            _list(folder, listed)
        time.sleep(0.5 if waiting else 0)
    return failed


def note(folder: Path, name: str, **facts: object) -> None:
    """Add facts to a server's entry in the list of FOLDER."""
    listed = listed_servers(folder)
    listed[name].update(facts)
    _list(folder, listed)


def _list(folder: Path, servers: Mapping[str, dict]) -> None:
    (folder / LIST).write_text(json.dumps(servers, indent=1))


def stop_all(folder: Path, but: Collection[str] = ()) -> None:
    """End the servers of FOLDER with all their processes, except the ones named."""
    listed = listed_servers(folder)
    for name in [name for name in listed if name not in but]:
        sessions.end(listed.pop(name)["pid"])
        _list(folder, listed)
