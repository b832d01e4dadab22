"""Fixtures that several folders share, shards of the suite, and the distribution of tests over `make test`'s
processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selection.shards import Shard
    from serving.server import Server

# Fixtures import what only they need: this file is also read where kernels are tested without SGLang.


@pytest.fixture(scope="session", autouse=True)
def bookkeeping_errors_are_fatal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make bookkeeping errors raise, here and in every server that a test starts; outside of tests they are counted."""
    from serving import strict_bookkeeping

    strict_bookkeeping.setup()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in strict_bookkeeping.install(tmp_path_factory.mktemp("strict")).items():
            environment.setenv(name, value)
        yield


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Delete at the session's end the files that servers leave in the temporary folder (locks, sockets, metrics).

    The folder is outside of pytest's own, since a socket's path may have no more than 107 characters.
    """
    tmp_path_factory.getbasetemp()  # fixes pytest's own folder before TMPDIR changes
    with (
        tempfile.TemporaryDirectory(prefix="dsv4-tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as environment,
    ):
        environment.setenv("TMPDIR", folder)
        environment.setattr(tempfile, "tempdir", folder)
        yield


LEFT_BY_AN_ENGINE = ("NCCL_GRAPH_REGISTER", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_RUN_ID")


@pytest.fixture(scope="module", autouse=True)
def what_an_engine_leaves() -> Iterator[None]:
    """Remove the variables that `sglang.Engine` sets: with them, servers of later files could not be forked
    (`serving.preloaded`). Other variables stay, because the package's set-up sets them only once a process."""
    before = {name for name in LEFT_BY_AN_ENGINE if name in os.environ}
    yield
    for name in set(LEFT_BY_AN_ENGINE) - before:
        os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("parts of the suite (tests/lib/selection/shards.py)")
    options.addoption("--shard", metavar="K/N", help="run part K of N; a commit's hash in place of K chooses one")
    options.addoption("--minutes", type=float, help="begin no test later than this; the tests left out are listed")


DEADLINE = "DSV4_TESTS_DEADLINE"
"""Seconds since 1970, for the session and for its worker processes."""
LEFT_OUT = "out of time"


def shard_of(config: pytest.Config) -> Shard:
    from selection.shards import Shard

    try:
        return Shard.of(config.getoption("shard"))
    except ValueError as error:
        raise pytest.UsageError(f"--shard: {error}") from None


def pytest_configure(config: pytest.Config) -> None:
    """Check the options; under `make test` a missing package is an error, elsewhere the tests that need it are
    skipped."""
    if config.getoption("shard") is not None:
        shard_of(config)
    minutes = config.getoption("minutes")
    if minutes is not None and not hasattr(config, "workerinput"):
        os.environ[DEADLINE] = str(time.time() + 60 * minutes)
    missing = [name for name in os.environ.get("DSV4_TESTS_NEED", "").split() if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(
            f"the tests need {', '.join(missing)}, which this Python cannot import. `make setup` installs what "
            "requirements-cpu.txt and requirements-test.txt pin; without DSV4_TESTS_NEED these tests are skipped"
        )


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("shard") is None:
        return
    from selection.shards import chosen

    by_id = {item.nodeid: item for item in items}
    own = chosen(list(by_id), shard_of(config))
    config.hook.pytest_deselected(items=[item for nodeid, item in by_id.items() if nodeid not in set(own)])
    items[:] = [by_id[nodeid] for nodeid in own]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the shard, and each test that it left out."""
    if config.getoption("shard") is not None:
        terminalreporter.write_line(f"shard {shard_of(config)} of the selected tests")
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report.nodeid for report in skipped if LEFT_OUT in str(report.longrepr)]
    if left_out:
        terminalreporter.section(f"{len(left_out)} tests not run within {config.getoption('minutes'):g} minutes")
        for nodeid in left_out:
            terminalreporter.write_line(nodeid)


def pytest_collection_finish() -> None:
    """Freeze the imported objects, so that the garbage collector does not scan them again and again while kernels are
    traced."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the test's registrations at its end."""
    from dsv4_kernels import registry

    monkeypatch.setattr(registry, "_table", {op: dict(rows) for op, rows in registry._table.items()})
    monkeypatch.setattr(registry, "_resolved", {})


@pytest.fixture(scope="module")
def compiled_here() -> Iterator[None]:
    """Compile kernels in this process, since the emulator needs their PTX; none is loaded from disk or kept afterwards.

    Scratch memory of earlier launches is hidden as well, because the emulator would copy it for every launch.
    """
    from dsv4_kernels.host import compile_cache
    from dsv4_kernels.sparse_attention import scratch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.FOLDER_VARIABLE, "off")
        patch.setattr(scratch, "_by_stream", {})
        patch.setattr(scratch, "_graph_counters", {})
        patch.setattr(compile_cache, "_in_memory", {})
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the random checkpoint of `make serve`, in the released format."""
    from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, PRESETS["tiny"])
    return path


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield the session's server: the tiny checkpoint with a small pool, short prefill chunks and few tail slots."""
    from serving.server import MAX_RUNNING, POOL_TOKENS, SLEEP_ON_IDLE, TAILS, running_server

    from sglang_dsv4.cpu.quickstart import parser_flags

    log_path = tmp_path_factory.mktemp("server") / "log"
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", str(MAX_RUNNING))
    # A random model would generate the white space that a JSON grammar allows without end.
    flags += ("--chunked-prefill-size", "512", "--constrained-json-disable-any-whitespace", "--enable-metrics")
    flags += ("--enable-custom-logit-processor",)
    flags += tuple(parser_flags([]))  # as `make serve` has them
    with running_server(checkpoint, log_path, *flags, SLEEP_ON_IDLE, env=TAILS, from_command=True) as running:
        yield running


# ---- pytest-xdist: a file is a unit of work, and all tests that start a server are one unit

SERVERS = "what starts a server"
STARTS_A_SERVER = (
    "tests/serving/",
    "tests/benchmarks/test_agents_served.py",
    "tests/benchmarks/test_serve_attention.py",
    "tests/benchmarks/test_benchmark_servers.py",
)
# The longest units come first, so that no process still runs a long unit when the others have ended. The list changes
# nothing but the time.
LONG = (
    SERVERS,
    "tests/kernels/sparse_attention/test_sparse_attention_sm90.py",
    "tests/sglang_dsv4/prefix/test_exact.py",
    "tests/kernels/sparse_attention/test_sparse_attention_sm100.py",
    "tests/sglang_dsv4/models/test_state.py",
    "tests/sglang_dsv4/prefix/test_exact_tiers.py",
    "tests/sglang_dsv4/models/test_logits.py",
    "tests/sglang_dsv4/prefix/test_draft_tails.py",
    "tests/kernels/moe/test_experts_sm90.py",
    "tests/kernels/linear/test_linear_gpu.py",
    "tests/kernels/hyper_connection/test_hyper_connection_gpu.py",
    "tests/sglang_dsv4/models/test_invariance.py",
    "tests/sglang_dsv4/models/test_qat.py",
    "tests/kernels/sparse_attention/test_sparse_attention_few_heads.py",
    "tests/sglang_dsv4/models/test_dspark_mistakes.py",
    "tests/emulator/test_wrong_semantics.py",
)


def unit_of(nodeid: str) -> str:
    """Return the unit of a test. All tests that start a server are one unit: they share the session's server, and other
    servers run one at a time, so that no two contend for a port."""
    path = nodeid.split("::")[0]
    return SERVERS if path.startswith(STARTS_A_SERVER) else path


@pytest.hookimpl(tryfirst=True)  # before a fixture is set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(DEADLINE, "inf")):
        pytest.skip(LEFT_OUT)
    if "server" in getattr(item, "fixturenames", ()) and unit_of(item.nodeid) != SERVERS:
        pytest.fail(f"this test uses the server: name its file in STARTS_A_SERVER ({__file__})", pytrace=False)


ROOT_LEVEL = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    item.stash[ROOT_LEVEL] = logging.getLogger().level
    return (yield)


def resident_bytes() -> int:
    """Return this process's resident memory; 0 where it is not known."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


RESIDENT = pytest.StashKey[int]()
GROWTH = 512 << 20


def return_freed_memory(config: pytest.Config) -> None:
    """Give freed memory back to the system when the process has grown: the allocator keeps up to 3 GB after kernels
    have been compiled, and the tests' processes and servers share 24 GB."""
    if resident_bytes() > config.stash.get(RESIDENT, 0) + GROWTH:
        with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        config.stash[RESIDENT] = resident_bytes()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the test's fixtures are torn down
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail a test that leaves the root logger at another level: later tests that count records would fail."""
    result = yield
    return_freed_memory(item.config)
    root, before = logging.getLogger(), item.stash[ROOT_LEVEL]
    if root.level != before:
        left = root.level
        root.setLevel(before)
        pytest.fail(f"the root logger's level was {before} before this test, and is {left}: set it back", pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # in a single process xdist need not be installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace `--dist load`, the default; another `--dist` is left alone."""
    if config.getoption("dist") != "load":
        return None
    from selection.units import Units

    order = {unit: place for place, unit in enumerate(LONG)}
    in_order = config.getoption("shard") is not None  # a shard has an order of its own
    return Units(config, log, unit_of, None if in_order else lambda unit: order.get(unit, len(order)))
