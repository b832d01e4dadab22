"""Missing kernels, compiled by several processes at once into the folder of `compile_cache`.

Compiling a CuTe DSL kernel keeps one core busy for seconds, in Python and in ptxas, and a server that starts for the
first time needs some fifty of them. Here workers compile what is not on disk, and the caller loads it from there:

    caller    finds out what is missing; with the folder's lock, hands it to workers one by one
    worker    compiles for a named architecture, with no GPU to see, so it takes no GPU memory; puts the object on disk
    others    (ranks of tensor parallelism, another server) wait for the lock, and find everything there

Nothing depends on it: what is still missing behind `fill`, for whatever reason, the caller compiles by itself. A worker
that dies, hangs or fails costs a warning and its kernel; if the folder takes no files, nothing is compiled here, since
it could not be handed over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from filelock import FileLock, Timeout

from dsv4_kernels.host import compile_cache

logger = logging.getLogger(__name__)

Compile = Callable[[], object]
"""Gets a kernel through `compile_cache.load_or_compile`. Others can do it, too: it can be pickled."""
Progress = Callable[[int, int, str, float], None]
"""Told how many kernels of how many are there, the newest one's name, and the seconds since the beginning."""

WORKER_BYTES = 1e9
"""Memory that a worker is given: the largest kernels take 0.7 GB, PyTorch and the DSL included."""
TASK_SECONDS = 600.0
"""So long a worker may take for one kernel; then it is ended."""
SECONDS_A_LINE = 5.0
"""Between two calls of `Progress`."""


def fill(todo: Sequence[tuple[str, Compile]], arch: str, progress: Progress, workers: int | None = None) -> int:
    """Compile what is missing on disk, and wait for it.

    Args:
        todo: kernels, each with a name for messages. Those that are on disk are loaded into this process.
        arch: of all of them, "sm_90a".
        progress: called from this thread.
        workers: processes; None for as many as cores, memory and missing kernels allow. With one there is nothing to
            gain: the caller compiles.

    Returns:
        How many kernels workers compiled.
    """
    folder, rest = compile_cache.folder(), missing(todo)
    if folder is None or not rest:
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning("kernels are compiled one after the other and not kept: %s takes no files (%s)", folder, error)
        return 0
    with _alone(folder):
        rest = missing(rest)
        number = min(workers or most_workers(), len(rest))
        if number < 2:
            return 0
        logger.info("%d kernels are compiled by %d processes, into %s", len(rest), number, folder)
        return _Pool(rest, arch, number).run(progress)


def missing(todo: Sequence[tuple[str, Compile]]) -> list[tuple[str, Compile]]:
    """Those that are neither in memory nor on disk; the others are loaded."""
    found = []
    with compile_cache.only_stored():
        for name, compile in todo:
            try:
                compile()
            except compile_cache.KernelMissing:
                found.append((name, compile))
    return found


def most_workers() -> int:
    """As many as there are cores for this process, and memory for."""
    return max(1, min(len(os.sched_getaffinity(0)), int(_available_bytes() // WORKER_BYTES)))


def _available_bytes() -> int:
    """Memory that new processes can use: the machine's, or the rest of the container's own limit where that is less."""
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, limit - used)
    return max(0, available)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, unless another process compiles into the folder for longer than LOCK_SECONDS."""
    path = folder / f"{compile_cache.PREFIX}pool.lock"
    lock = FileLock(path)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("another process compiles kernels into %s: waiting for it", folder)
            lock.acquire(timeout=compile_cache.LOCK_SECONDS)
    except Timeout:
        logger.warning(
            "another process has held %s for %.0f s: this one no longer waits, and compiles the kernels that it needs, "
            "too. `fuser %s` names the other one",
            *(path, compile_cache.LOCK_SECONDS, path),
        )
    except OSError as error:  # a file system without locks
        logger.warning("no lock on %s: %s", path, error)
    try:
        yield
    finally:
        lock.release()


class _Pool:
    """Workers that take tasks from one list, each followed by a thread of this process."""

    def __init__(self, todo: Sequence[tuple[str, Compile]], arch: str, number: int) -> None:
        self._todo: queue.SimpleQueue[tuple[str, Compile]] = queue.SimpleQueue()
        for task in todo:
            self._todo.put(task)
        self._count, self._arch, self._number = len(todo), arch, number
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """A kernel that is on disk; None: a thread has ended."""
        self._stopped = threading.Event()
        self._workers: list[_Worker] = []

    def run(self, progress: Progress) -> int:
        """How many kernels the workers put on disk, when none of them has anything to do."""
        begin = said = time.monotonic()
        done, name, running = 0, "", self._number
        try:
            for _ in range(self._number):
                self._workers.append(_Worker(self._arch))
            for worker in self._workers:
                threading.Thread(target=self._follow, args=(worker,), daemon=True).start()
            while running:
                try:
                    event = self._events.get(timeout=SECONDS_A_LINE / 10)
                    if event is None:
                        running -= 1
                    else:
                        done, name = done + 1, event
                except queue.Empty:
                    pass
                if time.monotonic() - said > SECONDS_A_LINE:
                    said = time.monotonic()
                    progress(done, self._count, name or "none yet", said - begin)
        except OSError as error:  # no process can be started
            logger.warning("kernels are compiled one after the other: %s", error)
        finally:
            self._stopped.set()
            for worker in self._workers:
                worker.end()
        return done

    def _follow(self, worker: _Worker) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    name, compile = self._todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    kept = worker.compile(compile)
                except _WorkerEnded as error:
                    if not self._stopped.is_set():
                        logger.warning(
                            "a process that compiled the kernel %r %s; the server compiles it by itself", name, error
                        )
                    return
                except _Failed as error:
                    logger.warning("the kernel %r was not compiled, the server tries by itself: %s", name, error)
                    continue
                if not kept:
                    logger.warning(
                        "kernels are compiled one after the other: compiled ones are not kept in %s, see above",
                        compile_cache.folder(),
                    )
                    self._stopped.set()
                    return
                self._events.put(name)
        finally:
            self._events.put(None)


class _WorkerEnded(Exception):
    """Says how."""


class _Failed(Exception):
    """The exception of a compiler that goes on."""


class _Worker:
    """A process that compiles one kernel after the other."""

    def __init__(self, arch: str) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from dsv4_kernels.host.compile_pool import work; work()"
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", compile_cache.ARCH_VARIABLE: arch, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, compile: Compile) -> bool:
        """Whether the kernel is on disk now.

        Raises:
            _Failed: the compiler raised.
            _WorkerEnded: the process is no longer there.
        """
        late = threading.Timer(TASK_SECONDS, self.end)
        late.start()
        try:
            pickle.dump(compile, self._process.stdin)
            self._process.stdin.flush()
            kept, error = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            status = self._process.wait()
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            if not late.is_alive():
                how = f"had not finished after {TASK_SECONDS:.0f} s"
            raise _WorkerEnded(how) from error
        finally:
            late.cancel()
        if error is not None:
            raise _Failed(error)
        return kept

    def end(self) -> None:
        """At once, whatever it does."""
        self._process.kill()
        self._process.wait()


def work() -> None:
    """A worker: reads what to compile from its standard input until that ends, and answers (is it on disk?, error)."""
    answers: IO[Any] = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print belongs to the log
    logging.basicConfig(level=logging.WARNING, format="compiling kernels: %(message)s")
    while True:
        try:
            compile = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        known, error = len(compile_cache.origins()), None
        try:
            compile()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        pickle.dump((all(origin.kept for origin in compile_cache.origins()[known:]), error), answers)
        answers.flush()
