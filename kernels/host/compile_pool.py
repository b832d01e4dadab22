"""Worker processes that compile missing kernels in parallel into the folder of `compile_cache`.

Compiling a CuTe DSL kernel keeps one core busy for seconds, in Python and in ptxas, and a server's first start needs
some fifty kernels. Workers compile the kernels that are not on disk, and the caller loads them from there:

    caller    finds the missing kernels; holding the folder's lock, hands them to workers one at a time
    worker    compiles for a named architecture with no GPU visible, so it takes no GPU memory; stores the object
    others    (ranks of tensor parallelism, another server) wait for the lock, and find every kernel on disk

Nothing depends on the pool: the caller itself compiles the kernels that are still missing after `fill`, for whatever
reason. A worker that dies, hangs or fails costs a warning and its kernel. If the folder takes no files, a temporary
folder of the user takes its place.
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
from filelock import Timeout

from dsv4_kernels.host import compile_cache

logger = logging.getLogger(__name__)

Compile = Callable[[], object]
"""A compile job: gets a kernel through `compile_cache.load_or_compile`. It can be pickled for a worker."""
Progress = Callable[[int, int, str, float], None]
"""Called with the number of finished kernels, the number of all, the newest one's name, and the seconds since the
start."""

WORKER_BYTES = 1e9
"""Memory reserved for a worker: the largest kernels take 0.7 GB, with PyTorch and the DSL."""
TASK_SECONDS = 600.0
"""How long a worker may take for one kernel; after that it is killed."""
SECONDS_A_LINE = 5.0
"""Seconds between two calls of `Progress`."""


def fill(todo: Sequence[tuple[str, Compile]], arch: str, progress: Progress, workers: int | None = None) -> int:
    """Compiles kernels that are missing on disk, and waits for them.

    Args:
        todo: kernels, each with a name for messages. Kernels that are on disk are loaded into this process.
        arch: of all of them, "sm_90a".
        progress: called from this thread.
        workers: number of processes; None for as many as cores, memory and missing kernels allow. With one worker there
            is nothing to gain, and the caller compiles.

    Returns:
        The number of kernels that workers compiled.
    """
    folder, rest = compile_cache.folder(), missing(todo)
    if folder is None or not rest:
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        instead = compile_cache.use_temporary_folder()
        kept = "compiled one after the other and not kept" if instead is None else f"kept in {instead} for now"
        name = compile_cache.FOLDER_VARIABLE
        logger.warning("kernels are %s: %s takes no files (%s). %s names another folder", kept, folder, error, name)
        if instead is None:
            return 0
        folder, rest = instead, missing(rest)
    with _alone(folder):
        rest = missing(rest)
        number = min(workers or most_workers(), len(rest))
        if number < 2:
            return 0
        logger.info("%d kernels are compiled by %d processes, into %s", len(rest), number, folder)
        return _Pool(rest, arch, number).run(progress)


def missing(todo: Sequence[tuple[str, Compile]]) -> list[tuple[str, Compile]]:
    """The kernels of `todo` that are neither in memory nor on disk; the others are loaded."""
    found = []
    with compile_cache.only_stored():
        for name, compile in todo:
            try:
                compile()
            except compile_cache.KernelMissing:
                found.append((name, compile))
    return found


def most_workers() -> int:
    """The number of workers that this process's cores and free memory allow, at least 1."""
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
    lock = compile_cache.lock_of(path)
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
    """Workers that share one queue of tasks; one thread of this process feeds each worker."""

    def __init__(self, todo: Sequence[tuple[str, Compile]], arch: str, number: int) -> None:
        self._todo: queue.SimpleQueue[tuple[str, Compile]] = queue.SimpleQueue()
        for task in todo:
            self._todo.put(task)
        self._count, self._arch, self._number = len(todo), arch, number
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Name of a kernel that is on disk; None when a thread has ended."""
        self._stopped = threading.Event()
        self._workers: list[_Worker] = []

    def run(self, progress: Progress) -> int:
        """Runs all tasks; returns the number of kernels that workers stored on disk."""
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
    """A worker process has ended; the message says how."""


class _Failed(Exception):
    """A compile job raised; the worker goes on."""


class _Worker:
    """A process that compiles one kernel after the other."""

    def __init__(self, arch: str) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from dsv4_kernels.host.compile_pool import work; work()"
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", compile_cache.ARCH_VARIABLE: arch, "OMP_NUM_THREADS": "1"}
        env[compile_cache.FOLDER_VARIABLE] = str(compile_cache.folder())
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, compile: Compile) -> bool:
        """Compiles a kernel in the worker; returns whether it is on disk now.

        Raises:
            _Failed: the compile job raised.
            _WorkerEnded: the process has ended.
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
        """Kills the process at once, whatever it does."""
        self._process.kill()
        self._process.wait()


def work() -> None:
    """A worker's main loop: reads compile jobs from standard input until it closes, and answers (is it on disk?,
    error)."""
    answers: IO[Any] = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers' output belongs to the log
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
