"""Start on a GPU host as a stranger does: README's GPU section from a wheel alone, step by step.

    make dist                                 # in the checkout; this file and the wheel then go to the host
    . /tmp/stack/env.sh                       # there: of unpack.sh, or any environment in which SGLang serves
    python3 stranger.py --wheel sglang_dsv4-….whl --out stranger.json

Standard library only, and nothing of the checkout: the wheel is installed into an empty folder in front of PYTHONPATH,
and all commands run in an empty folder, as users whose homes are empty. As root, the users are three uids of one group;
otherwise they are three homes of one uid. Variables of this package are removed from the environment. Each step passes
or fails; a table is printed, and the last line is the result as JSON:

    wheel            the three packages are imported from the wheel, SGLang finds the entry points
    doctor           the doctor finds the tested SGLang and GPU kernels, and prints versions
    checkpoint       a small random checkpoint in the released format is written by the wheel's own command
    first start      empty kernel cache: every kernel is compiled and kept, the server answers a chat
    no compiler      the processes that compiled had no compiler on PATH (the server has: SGLang's kernels need nvcc)
    second start     the same user again: no kernel is compiled, and the same tokens come
    read-only home   another user whose home takes no files: kernels go to a temporary folder, which is said once
    shared cache     two users start at once with one empty folder in DSV4_KERNEL_CACHE: each kernel is compiled once

SGLang's own caches are in a folder of each user; where a variable of SGLANG_CACHES is set, its contents are copied
there, and the later users get what the first start made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SGLANG_CACHES = (
    *("SGLANG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR", "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR"),
    *("FLASHINFER_WORKSPACE_BASE", "TVM_FFI_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
)
"""Variables that name where SGLang and its libraries keep what they compile."""
OURS = ("SGLANG_DSV4", "DSV4_")
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "nvcc", "ptxas", "ld", "as")
GROUP, FIRST_UID = 61_000, 61_001
FLAGS = ("--max-total-tokens", "65536", "--max-running-requests", "16", "--context-length", "8192")
FLAGS += ("--chunked-prefill-size", "2048", "--cuda-graph-bs-decode", "1", "4", "16")
"""Flags beside README's: a pool of which two fit on the GPU, and few CUDA graphs."""
PROMPT = [*range(100, 400)]
SESSIONS: set[int] = set()  # of the servers that run
STARTS = ("first start", "no compiler", "second start", "read-only home", "shared cache")
CHECKPOINT = """
import sys
from dataclasses import replace
from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
# The smallest widths that the GPU's kernels support.
small = {"compress_ratios": (0, 4, 128), "num_hash_layers": 1, "hidden_size": 1024, "q_lora_rank": 512}
print(write_checkpoint(sys.argv[1], replace(PRESETS["flash"], **small)))
"""
ORIGINS = """
import json, importlib, importlib.metadata as metadata, sys
names = ("sglang_dsv4.plugin", "dsv4_kernels.registry", "dsv4_radix_cache.ledger")
print(json.dumps({
    "files": [importlib.import_module(name).__file__ for name in names],
    "entry_points": [
        point.value
        for group in ("sglang.srt.plugins", "sglang.srt.platforms")
        for point in metadata.entry_points(group=group)
        if point.name.startswith("sglang_dsv4")
    ],
    "version": metadata.version("sglang-dsv4"),
}))
"""
# Runs at the start of every Python process of the first start; only those that compile kernels of ours are changed.
SITECUSTOMIZE = """
import os, sys
if any("dsv4_kernels.host.compile_pool" in word for word in sys.orig_argv):
    import shutil
    os.environ["PATH"] = os.environ["STRANGER_EMPTY"]
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
        os.environ.pop(name, None)
    found = [name for name in {compilers!r} if shutil.which(name)]
    with open(os.path.join(os.environ["STRANGER_WORKERS"], str(os.getpid())), "w") as file:
        file.write(" ".join(found))
"""


class Failed(Exception):
    """Raised by a step that does not pass; the message says what was expected and what came."""


@dataclass
class User:
    """A user of the machine: a home, a folder for SGLang's caches, and a uid of its own if this process is root."""

    name: str
    uid: int | None
    home: Path
    caches: Path

    def owns(self, *paths: Path) -> None:
        """Give folders, with all that they contain, to this user."""
        for path in paths if self.uid is not None else ():
            for found in (path, *path.rglob("*")):
                os.chown(found, self.uid, GROUP, follow_symlinks=False)

    def popen(self, command: list[str], env: dict[str, str], **options: object) -> subprocess.Popen:
        """Start a command as this user, in a session of its own, so that it can be ended with all its children."""
        ids = {} if self.uid is None else {"user": self.uid, "group": GROUP, "extra_groups": []}
        # The group may write what a user makes, which a shared folder needs.
        return subprocess.Popen(command, env=env, umask=0o002, start_new_session=True, **ids, **options)


@dataclass
class Host:
    """Folders and settings of one run."""

    work: Path
    python: str
    start_limit_s: float
    users: list[User] = field(default_factory=list)

    @property
    def site(self) -> Path:
        """The folder that holds the installed wheel and nothing else."""
        return self.work / "site"

    @property
    def checkpoint(self) -> Path:
        """The random checkpoint."""
        return self.work / "checkpoint"

    def environment(self, user: User, **extra: str) -> dict[str, str]:
        """The caller's environment without this package's variables, as a user whose home is empty sees it."""
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith((*OURS, "XDG_")) and name not in SGLANG_CACHES
        }
        paths = [extra.pop("FRONT", ""), str(self.site), os.environ.get("PYTHONPATH", "")]
        env |= {name: str(user.caches / name) for name in SGLANG_CACHES}
        env |= {"HOME": str(user.home), "USER": user.name, "LOGNAME": user.name, "PYTHONUNBUFFERED": "1"}
        return env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | extra

    def output(self, user: User, *words: str) -> str:
        """The output of a Python command, run as a user in an empty folder.

        Raises:
            Failed: its exit status is not 0.
        """
        command = [self.python, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with user.popen(command, self.environment(user), cwd=self.work / "empty", **pipes) as process:
            out, errors = process.communicate(timeout=600)
        if process.returncode:
            raise Failed(f"{' '.join(words[:3])} ended with status {process.returncode}: {errors[-2000:]}")
        return out


@dataclass(frozen=True)
class Started:
    """A server that answered, and was ended: what its log says, and what it answered."""

    seconds: float
    log: str
    tokens: list[int]
    chat: str

    def facts(self) -> dict[str, object]:
        """Figures for the result.

        Raises:
            Failed: the log lacks a line that every start of the plugin has.
        """
        live = re.search(r"sglang_dsv4 (\S+) is live on SGLang (\S+):", self.log)
        kernels = re.search(r"all (\d+) kernels are ready after ([\d.]+) s, (\d+) of them compiled", self.log)
        if live is None:
            raise Failed("the log has no line 'sglang_dsv4 … is live on SGLang': SGLang served without this package")
        if kernels is None:
            raise Failed("the log has no line 'all … kernels are ready': references served, no GPU kernel of ours")
        pool = re.search(r"\d+ kernels are compiled by (\d+) processes", self.log)
        startup = re.search(r"sglang_dsv4 start-up.*", self.log)
        return {
            "ready_s": round(self.seconds, 1),
            "kernels": int(kernels[1]),
            "kernels_s": float(kernels[2]),
            "compiled": int(kernels[3]),
            "workers": int(pool[1]) if pool else 0,
            "not_kept": len(re.findall(r"are not kept|is not kept|and not kept", self.log)),
            "no_lock": len(re.findall(r"no locks? (?:on|in) ", self.log)),
            "compiled_again": len(re.findall(r"cannot be used and is compiled again", self.log)),
            "start_up": startup[0] if startup else None,
        }


def objects(folder: Path) -> int:
    """The number of compiled kernels in a folder."""
    return len(list(folder.glob("dsv4-kernel-*.o")))


def expect(condition: bool, message: str) -> None:
    """Raise `Failed` unless a condition holds."""
    if not condition:
        raise Failed(message)


def post(url: str, body: dict) -> dict:
    """POST a JSON body; the JSON answer.

    Raises:
        Failed: the answer is an error.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise Failed(f"{url} answered {error.code}: {error.read().decode(errors='replace')[:1000]}") from error


@contextmanager
def serving(host: Host, user: User, port: int, log: Path, env: dict[str, str]) -> Iterator[float]:
    """A server, started by README's command; yields the seconds until it was ready, and ends it with its children.

    Raises:
        Failed: it ended, or was not ready in time; the end of its log is in the message.
    """
    command = [host.python, "-m", "sglang.launch_server", "--model-path", str(host.checkpoint)]
    begin = time.monotonic()
    with log.open("wb") as file:
        process = user.popen(
            [*command, "--port", str(port), *FLAGS], env, cwd=host.work / "empty", stdout=file, stderr=file
        )
    SESSIONS.add(process.pid)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            seconds = time.monotonic() - begin
            if process.poll() is not None or seconds > host.start_limit_s:
                how = "is not ready" if process.poll() is None else f"ended with status {process.poll()}"
                raise Failed(f"the server {how} after {seconds:.0f} s:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.5)
        yield time.monotonic() - begin
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, how)
                process.wait(timeout=20)
        SESSIONS.discard(process.pid)


def end_all(number: int, frame: object) -> None:
    """Answer SIGTERM: end all servers and this process. A `finally` would wait for starts in other threads first."""
    for session in list(SESSIONS):
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)
    os._exit(128 + number)


def answers(url: str) -> bool:
    """Whether a GET of the URL is answered with 200."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return answer.status == 200
    return False


def start(host: Host, name: str, user: User, port: int, **extra: str) -> Started:
    """Start a server as a user, ask it twice, end it.

    Args:
        name: of the log file.
        extra: environment variables; FRONT is a folder in front of PYTHONPATH.

    Raises:
        Failed: it does not start, or an answer is an error or not as long as asked for.
    """
    log, url = host.work / f"{name}.log", f"http://127.0.0.1:{port}"
    with serving(host, user, port, log, host.environment(user, **extra)) as seconds:
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        generated = post(f"{url}/generate", {"input_ids": PROMPT, "sampling_params": sampling})["output_ids"]
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
        chat = post(f"{url}/v1/chat/completions", body)
    expect(len(generated) == 16, f"expected 16 generated tokens, got {len(generated)}")
    spoken = chat["usage"]["completion_tokens"]
    expect(1 <= spoken <= 8, f"expected a chat answer of 1 to 8 tokens, got {spoken}")
    return Started(seconds, log.read_text(errors="replace"), generated, str(chat["choices"][0]["message"]))


def at_once(*starts: Callable[[], Started]) -> list[Started]:
    """The results of several starts that run at the same time; raises what the first of them raises."""
    with ThreadPoolExecutor(len(starts)) as threads:
        running = [threads.submit(start) for start in starts]
    return [one.result() for one in running]


class Run:
    """The steps, in order; each returns its facts or raises `Failed`."""

    def __init__(self, host: Host, wheel: Path, port: int) -> None:
        self.host, self.wheel, self.port = host, wheel, port
        self.first: Started | None = None

    def steps(self) -> list[tuple[str, Callable[[], dict[str, object]]]]:
        """(name, step) of every step."""
        methods = (self.install, self.doctor, self.write_checkpoint, self.first_start, self.no_compiler)
        methods += (self.second_start, self.read_only_home, self.shared_cache)
        return list(zip(("wheel", "doctor", "checkpoint", *STARTS), methods, strict=True))

    def install(self) -> dict[str, object]:
        """Install the wheel into an empty folder; its name and version."""
        pip = [self.host.python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(self.host.site), str(self.wheel)], check=True)
        facts = json.loads(self.host.output(self.host.users[0], "-c", ORIGINS))
        for origin in facts["files"]:
            expect(Path(origin).is_relative_to(self.host.site), f"expected a module of the wheel, got {origin}")
        points = ["sglang_dsv4.plugin:setup", "sglang_dsv4.cpu.platform:activate"]
        expect(facts["entry_points"] == points, f"expected the entry points {points}, got {facts['entry_points']}")
        return {"wheel": self.wheel.name, "version": facts["version"]}

    def doctor(self) -> dict[str, object]:
        """Run the doctor; the attention's implementation, and versions."""
        said = self.host.output(self.host.users[0], "-m", "sglang_dsv4.doctor")
        for wanted in ("the tested version", "entry points: installed", "compiled kernels: 0 in"):
            expect(wanted in said, f"expected {wanted!r} in the doctor's report, got:\n{said}")
        attention = re.search(r"sparse_attention +(\S+) of", said)
        expect(attention is not None and attention[1] != "ref", f"expected a GPU kernel of the attention, got:\n{said}")
        lines = self.host.output(self.host.users[0], "-m", "sglang_dsv4.doctor", "--versions").splitlines()
        column = len(lines[0]) - len(lines[0].split()[-1])
        versions = {line[:column].strip(): line[column:] for line in lines}
        return {"attention": attention[1], "versions": versions}

    def write_checkpoint(self) -> dict[str, object]:
        """Write the checkpoint; its bytes."""
        return {"bytes": int(self.host.output(self.host.users[0], "-c", CHECKPOINT, str(self.host.checkpoint)))}

    def first_start(self) -> dict[str, object]:
        """Start with an empty kernel cache; its figures. SGLang's caches are then given to the other users."""
        user, front = self.host.users[0], self.host.work / "front"
        workers = {"STRANGER_EMPTY": str(self.host.work / "empty"), "STRANGER_WORKERS": str(self.host.work / "workers")}
        self.first = start(self.host, "first", user, self.port, FRONT=str(front), **workers)
        facts = self.first.facts() | {"kept": objects(self.kernels_of(user))}
        expect(facts["compiled"] > 0, "expected kernels to be compiled, since the folder was empty; none was")
        expect(
            facts["compiled"] == facts["kernels"] and facts["kept"] >= facts["kernels"],
            f"expected all {facts['kernels']} kernels compiled and kept, got {facts['compiled']} and {facts['kept']}",
        )
        expect(not facts["not_kept"], "expected no line 'not kept' in the log")
        for other in self.host.users[1:]:
            shutil.copytree(user.caches, other.caches, dirs_exist_ok=True, symlinks=True)
            other.owns(other.caches)
        return facts

    def no_compiler(self) -> dict[str, object]:
        """Compare the processes that compiled with those that had no compiler; their number."""
        expect(self.first is not None, "needs the first start")
        marks = {path.name: path.read_text() for path in (self.host.work / "workers").iterdir()}
        workers = self.first.facts()["workers"]
        expect(workers >= 2, f"expected kernels compiled by several processes, got {workers}")
        expect(len(marks) == workers, f"expected {workers} processes without PATH, got {len(marks)}")
        found = sorted(set(" ".join(marks.values()).split()))
        expect(not found, f"expected no compiler on PATH, got {found}")
        by_server = len(re.findall(r"the server (?:compiles it|tries) by itself", self.first.log))
        expect(by_server == 0, f"expected every kernel from these processes, {by_server} came from the server")
        return {"workers": workers}

    def second_start(self) -> dict[str, object]:
        """Start again as the same user; its figures."""
        expect(self.first is not None, "needs the first start")
        user = self.host.users[0]
        before = objects(self.kernels_of(user))
        second = start(self.host, "second", user, self.port)
        facts = second.facts() | {"kept": objects(self.kernels_of(user))}
        expect(
            facts["compiled"] == 0 and facts["kept"] == before,
            f"expected no kernel compiled and {before} on disk, got {facts['compiled']} and {facts['kept']}",
        )
        same = second.tokens == self.first.tokens
        expect(same, f"expected the tokens {self.first.tokens} again, got {second.tokens}")
        return facts

    def read_only_home(self) -> dict[str, object]:
        """Start as a user whose home takes no files; its figures."""
        user = self.host.users[1]
        if user.uid is not None:
            os.chown(user.home, 0, 0)
        user.home.chmod(0o555)
        facts = (started := start(self.host, "read_only", user, self.port)).facts()
        expect(not any(user.home.iterdir()), f"expected an empty home, got {[*user.home.iterdir()]}")
        expect(facts["compiled"] == facts["kernels"], "expected all kernels compiled: the home has none")
        expect(facts["workers"] >= 2, f"expected kernels compiled by several processes, got {facts['workers']}")
        said = re.findall(r"kernels are kept in \S+ for now: .*DSV4_KERNEL_CACHE", started.log)
        expect(len(said) == 1 and not facts["not_kept"], f"expected one line on the temporary folder, got {said}")
        return facts

    def shared_cache(self) -> dict[str, object]:
        """Start two servers of two users at once with one empty folder; the figures of both."""
        folder = self.host.work / "shared"
        folder.mkdir()
        if self.host.users[0].uid is not None:
            os.chown(folder, 0, GROUP)
        folder.chmod(0o2775)
        both = (self.host.users[0], self.host.users[2])

        def started(index: int) -> Started:
            port, kernels = self.port + 100 * index, {"DSV4_KERNEL_CACHE": str(folder)}
            return start(self.host, f"shared_{index}", both[index], port, **kernels)

        results = at_once(lambda: started(0), lambda: started(1))
        facts = [result.facts() for result in results]
        count, compiled = facts[0]["kernels"], sum(fact["compiled"] for fact in facts)
        expect(compiled == count, f"expected {count} kernels compiled by both together, got {compiled}")
        for bad in ("not_kept", "no_lock", "compiled_again"):
            lines = [fact[bad] for fact in facts]
            expect(not any(lines), f"expected no line of the kind {bad!r} in the logs, got {lines}")
        expect(results[0].tokens == results[1].tokens, f"expected equal tokens, got {[r.tokens for r in results]}")
        return {"kept": objects(folder), "users": facts}

    @staticmethod
    def kernels_of(user: User) -> Path:
        """The default folder of compiled kernels of a user."""
        return user.home / ".cache" / "sglang-dsv4" / "kernels"


def prepared(work: Path, python: str, start_limit_s: float, with_caches: int = 1) -> Host:
    """Empty folders and three users, of whom the first `with_caches` have a copy of SGLang's caches."""
    host = Host(work, python, start_limit_s)
    for name in ("site", "empty", "workers", "front"):
        (work / name).mkdir(parents=True)
    (work / "front" / "sitecustomize.py").write_text(SITECUSTOMIZE.format(compilers=COMPILERS))
    for index in range(3):
        home = work / f"user{index}"
        user = User(f"stranger{index}", FIRST_UID + index if os.getuid() == 0 else None, home / "home", home / "caches")
        user.home.mkdir(parents=True)
        for name in SGLANG_CACHES:
            seed = os.environ.get(name)
            target = user.caches / name
            if seed and index < with_caches and Path(seed).is_dir():
                shutil.copytree(seed, target, symlinks=True)
            else:
                target.mkdir(parents=True)
        user.owns(home)
        host.users.append(user)
    host.users[0].owns(work / "workers")
    work.chmod(0o755)
    (work / "checkpoint").mkdir()
    host.users[0].owns(work / "checkpoint")
    return host


def main() -> int:
    """Run all steps; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/stranger"), help="a folder that does not exist")
    parser.add_argument("--out", type=Path, help="write the result here, and logs beside it")
    parser.add_argument("--python", default=sys.executable, help="of an environment with SGLang's GPU packages")
    parser.add_argument("--port", type=int, default=30_000)
    parser.add_argument("--start-limit", type=float, default=900, help="seconds until a server must be ready")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, help="steps that start servers, to run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end_all)
    if not arguments.wheel.is_file():
        parser.error(f"--wheel: expected a file, got {arguments.wheel}; `make dist` writes one to dist/")
    if arguments.work.exists():
        parser.error(f"--work: expected a folder that does not exist, got {arguments.work}; remove it or name another")
    left_out = {name for name in STARTS if name not in arguments.starts}
    with_caches = 3 if STARTS[0] in left_out else 1  # the first start gives its caches to the other users
    host = prepared(arguments.work.resolve(), arguments.python, arguments.start_limit, with_caches)
    report: dict[str, object] = {"uids": 1 if host.users[0].uid is None else len(host.users), "steps": {}}
    for name, step in Run(host, arguments.wheel.resolve(), arguments.port).steps():
        if name in left_out:
            continue
        begin = time.monotonic()
        try:
            result = {"passed": True} | step()
        except Failed as error:
            result = {"passed": False, "reason": str(error)}
        except Exception:
            result = {"passed": False, "reason": traceback.format_exc()[-2000:]}
        result["seconds"] = round(time.monotonic() - begin, 1)
        report["steps"][name] = result
        verdict = "passed" if result["passed"] else f"FAILED: {result['reason'][-600:]}"
        print(f"{name:15} {result['seconds']:7.1f} s  {verdict}", flush=True)
        report["passed"] = all(step["passed"] for step in report["steps"].values())
        if arguments.out is not None:  # after each step: what is known outlives a time limit
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            for log in host.work.glob("*.log"):
                shutil.copy(log, arguments.out.with_name(f"{arguments.out.stem}_{log.name}"))
    print(json.dumps(report))
    return int(not report["passed"])


if __name__ == "__main__":
    sys.exit(main())
