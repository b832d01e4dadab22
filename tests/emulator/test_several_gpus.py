"""Several GPUs on one memory: scopes, stores that arrive in any order, grids in a stream, a GPU that comes late."""

import struct
from collections.abc import Sequence

import numpy as np
import pytest
from ptx_emulator import Checks, EmulationError, Launch, Loaded, MemoryMap, Options, Program, launch_together
from ptx_emulator.samples.handwritten import kernel

SCHEDULES = [("eager", 0), ("late", 0), ("random", 1), ("random", 2), ("random_warps", 3)]
ROLES = "setp.ne.u64 %p1, %rd103, 0; mov.u32 %r5, 1; mov.u32 %r6, 7; setp.ne.u32 %p2, %r100, 0; @%p2 bra E;"
POLL = "S: {} setp.eq.u32 %p3, %r2, 0; @%p3 bra S;"
LEAVE = "st.global.u32 [%rd102], %r3; E:"


def run(
    body: str, launches: Sequence[tuple[int, int]], schedule: str = "eager", seed: int = 0, late: int | None = None
) -> np.ndarray:
    """The words that the kernel left at [%rd102], [4], after launches (GPU, role) with data at %rd100, a flag at %rd101
    and the role in %rd103."""
    data, flag, out = np.zeros(64, np.uint32), np.zeros(16, np.uint32), np.zeros(4, np.uint32)
    memory = MemoryMap()
    for name, array in (("data", data), ("flag", flag), ("out", out)):
        memory.add(array.ctypes.data, array.nbytes, name)
    launch_together(
        Program.from_ptx(kernel(body, 4)),
        "k",
        [
            Launch((1, 1, 1), (32, 1, 1), [*(struct.pack("<Q", a.ctypes.data) for a in (data, flag, out)), struct.pack("<Q", role)],
                   gpu, late=gpu == late)
            for gpu, role in launches
        ],
        memory=memory,
        options=Options(schedule=schedule, seed=seed, checks=Checks(), max_instructions=5_000_000),
    )  # fmt: skip
    return out


def message(publish: str, observe: str, acquire: str = "") -> str:
    """Role 0 writes data and a flag, role 1 waits for the flag and reads the data."""
    return f"""{ROLES} @%p1 bra C; st.global.u32 [%rd100], %r6; {publish} bra E;
C: {POLL.format(observe)} {acquire} ld.global.u32 %r3, [%rd100]; {LEAVE}"""


STORE, LOAD = "st.release.sys.global.u32 [%rd101], %r5;", "ld.acquire.sys.global.u32 %r2, [%rd101];"
RELAXED_STORE, RELAXED_LOAD = STORE.replace("release", "relaxed"), LOAD.replace("acquire", "relaxed")
FENCE = "fence.acq_rel.sys; "
TWO_GPUS, ONE_GPU = [(0, 0), (1, 1)], [(0, 0), (0, 1)]

RIGHT = {
    "release": (STORE, LOAD),
    "fences": (FENCE + RELAXED_STORE, RELAXED_LOAD, FENCE),
    "membar": ("membar.sys; " + RELAXED_STORE, RELAXED_LOAD, "membar.sys;"),
    "atomics": (
        "atom.release.sys.global.exch.b32 %r9, [%rd101], %r5;",
        "atom.acquire.sys.global.cas.b32 %r2, [%rd101], 1, 1;",
    ),
}
WRONG = {
    "no_release": (RELAXED_STORE, LOAD),
    "no_acquire": (STORE, RELAXED_LOAD),
    "release_of_one_gpu": (STORE.replace("sys", "gpu"), LOAD),
    "acquire_of_one_gpu": (STORE, LOAD.replace("sys", "gpu")),
    "fence_of_one_gpu": ("fence.acq_rel.gpu; " + RELAXED_STORE, LOAD),
    "acquire_fence_of_one_gpu": (STORE, RELAXED_LOAD, "fence.acq_rel.gpu;"),
    "membar_of_one_gpu": ("membar.gl; " + RELAXED_STORE, LOAD),
}


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", RIGHT)
def test_a_message_to_another_gpu(name: str, schedule: str, seed: int) -> None:
    for launches in (TWO_GPUS, TWO_GPUS[::-1]):
        assert run(message(*RIGHT[name]), launches, schedule, seed)[0] == 7


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("name", WRONG)
def test_a_message_that_is_not_ordered(name: str, schedule: str, seed: int) -> None:
    with pytest.raises(EmulationError) as e:
        run(message(*WRONG[name]), TWO_GPUS, schedule, seed)
    assert e.value.kind.name == "global_race"
    assert run(message(*WRONG[name]), ONE_GPU, schedule, seed)[0] == 7  # the launches of one GPU are ordered


@pytest.mark.parametrize("scope", ["gpu", "sys"])
def test_two_updates_by_two_gpus(scope: str) -> None:
    body = f"{ROLES} atom.relaxed.{scope}.global.add.u32 %r9, [%rd102], 1; E:"
    if scope == "sys":
        assert run(body, TWO_GPUS)[0] == 2
        return
    with pytest.raises(EmulationError) as e:
        run(body, TWO_GPUS)
    assert "the scope of one does not include the other" in e.value.message and "on GPU 0" in e.value.message


SENT = "st.relaxed.sys.global.u32 [%rd100+64], %r6; {} " + RELAXED_STORE
READ = "ld.relaxed.sys.global.u32 %r3, [%rd100+64];"
IN_ANY_ORDER = {
    "two_stores": f"{ROLES} @%p1 bra C; {SENT.format('')} bra E; C: {POLL.format(RELAXED_LOAD)} {READ} {LEAVE}",
    "words_of_a_vector": f"""{ROLES} @%p1 bra C; st.relaxed.sys.global.v4.b32 [%rd100], {{%r6, %r6, %r6, %r6}}; bra E;
C: {POLL.format("ld.relaxed.sys.global.u32 %r2, [%rd100+12];")} ld.relaxed.sys.global.u32 %r3, [%rd100]; {LEAVE}""",
}


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_relaxed_stores_arrive_in_any_order(name: str) -> None:
    """A reader that sees the later word does not always see the earlier one. Nothing of this is a race."""
    for schedule in ("random", "late"):
        assert {run(IN_ANY_ORDER[name], TWO_GPUS, schedule, seed)[0] for seed in range(40)} == {0, 7}
    assert {run(IN_ANY_ORDER[name], TWO_GPUS, schedule, seed)[0] for schedule, seed in SCHEDULES[::4]} == {7}


@pytest.mark.parametrize("between", [FENCE, "fence.release.sys;", ""])
def test_what_keeps_two_stores_in_order(between: str) -> None:
    """A release fence orders the words, and so does a releasing store."""
    body = IN_ANY_ORDER["two_stores"].replace(RELAXED_STORE, f"{between} {RELAXED_STORE if between else STORE}")
    assert {run(body, TWO_GPUS, schedule, seed)[0] for schedule in ("random", "late") for seed in range(12)} == {7}


def test_a_thread_s_accesses_to_one_location_stay_in_order() -> None:
    """Two stores, an atomic update, and the thread's own load."""
    body = f"""{ROLES} @%p1 bra E; st.relaxed.sys.global.u32 [%rd100], %r6; st.relaxed.sys.global.u32 [%rd100], %r5;
ld.relaxed.sys.global.u32 %r3, [%rd100]; st.relaxed.sys.global.u32 [%rd102+4], %r6;
atom.relaxed.sys.global.add.u32 %r9, [%rd102+4], 1; st.relaxed.sys.global.u32 [%rd102+8], %r6; st.global.u32 [%rd102+8], %r5;
{LEAVE}"""
    for schedule, seed in SCHEDULES:
        assert run(body, TWO_GPUS, schedule, seed)[:3].tolist() == [1, 8, 1]


CHAIN = f"""mov.u32 %r5, 1; mov.u32 %r6, 7; setp.ne.u32 %p2, %r100, 0; @%p2 bra E; mov.b64 {{%r1, %r4}}, %rd103;
setp.eq.u32 %p4, %r1, 1; @%p4 bra F; setp.eq.u32 %p4, %r1, 2; @%p4 bra W; setp.eq.u32 %p4, %r1, 3; @%p4 bra R;
st.global.u32 [%rd100], %r6; bra E;
F: {RELAXED_STORE} bra E;
W: {POLL.format(RELAXED_LOAD)} bra E;
R: ld.global.u32 %r3, [%rd100]; {LEAVE}"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_the_ends_of_grids_order_what_relaxed_accesses_carry(schedule: str, seed: int) -> None:
    """One GPU writes, and sets a flag in its next grid; the other sees the flag, and reads in its next grid."""
    assert run(CHAIN, [(0, 0), (0, 1), (1, 2), (1, 3)], schedule, seed)[0] == 7


def test_a_grid_does_not_order_its_own_relaxed_accesses() -> None:
    """The flag is set in the grid that writes the data, or seen in the grid that reads them."""
    writes = CHAIN.replace("F: ", "F: st.global.u32 [%rd100], %r6; ")
    reads = CHAIN.replace("@%p3 bra S; bra E;", "@%p3 bra S; bra R;")
    for body, launches in ((writes, [(0, 1), (1, 2), (1, 3)]), (reads, [(0, 0), (0, 1), (1, 2)])):
        with pytest.raises(EmulationError) as e:
            run(body, launches)
        assert e.value.kind.name == "global_race" and "fences of .sys scope" in e.value.message


LIMITED = f"""{ROLES} @%p1 bra C; {STORE} bra E; C: mov.u64 %rd1, %globaltimer; mov.u32 %r3, 5;
S: {LOAD} setp.ne.u32 %p3, %r2, 0; @%p3 bra D; mov.u64 %rd2, %globaltimer; sub.u64 %rd3, %rd2, %rd1;
setp.lt.u64 %p4, %rd3, 2000000000; @%p4 bra S; bra L; D: mov.u32 %r3, 6; L: {LEAVE}"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_time_passes_when_all_wait(schedule: str, seed: int) -> None:
    """A wait with a time limit gives up if the other GPU never comes, and not if it comes late."""
    assert run(LIMITED, [(1, 1)], schedule, seed)[0] == 5
    for late in (None, 0, 1):
        assert run(LIMITED, TWO_GPUS[::-1], schedule, seed, late)[0] == 6


def test_a_wait_without_a_limit_is_a_deadlock_that_names_the_gpu() -> None:
    with pytest.raises(EmulationError, match="GPU 1, launch 0") as e:
        run(message(STORE, LOAD), [(1, 1)])
    assert e.value.kind.name == "deadlock"


def test_a_late_gpu_starts_when_the_others_wait() -> None:
    """The other GPU has polled for several turns when the late one starts."""
    counts = (
        message(STORE, LOAD)
        .replace("S: ", "mov.u32 %r3, 0; S: add.u32 %r3, %r3, 1; ")
        .replace("ld.global.u32 %r3, [%rd100];", "")
    )
    assert min(run(counts, TWO_GPUS, "random", seed)[0] for seed in range(5)) == 1
    assert min(run(counts, TWO_GPUS, "random", seed, late=0)[0] for seed in range(5)) > 8


def test_launches_of_a_device_run_together() -> None:
    """Each kernel has a report with its own instructions."""
    from ptx_emulator import Device

    x = np.zeros(32, np.uint32)
    with Device(Options()) as device:
        with device.several_gpus() as choose:
            for gpu, threads in enumerate((32, 64, 33)):
                choose(gpu)
                for adds in (1, 1000):
                    body = f"red.relaxed.sys.global.add.u32 [%rd100], {adds};"
                    device.run_ptx(kernel(body, 1), "k", 1, threads, [x])
            assert not device.reports
        assert x[0] == (32 + 64 + 33) * 1001 and len(device.reports) == 2
        counts = [sum(report.executed_lines.values()) for report in device.reports]
        assert counts[0] == counts[1] > 0
    with Device(Options(), record=True) as device, pytest.raises(ValueError, match="cannot be recorded"):
        with device.several_gpus():
            pass


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_kernels_of_different_shapes_wait_for_each_other(schedule: str, seed: int) -> None:
    """Two kernels on each GPU, in turns; one has clusters, shared memory and more registers and instructions."""
    from ptx_emulator import launch_kernels

    data, flags, out = np.zeros(64, np.uint32), np.zeros(16, np.uint32), np.zeros(4, np.uint32)
    memory = MemoryMap()
    for name, array in (("data", data), ("flags", flags), ("out", out)):
        memory.add(array.ctypes.data, array.nbytes, name)
    first_cta_only = "mov.u32 %r50, %ctaid.x; setp.ne.u32 %p5, %r50, 0; @%p5 bra E;"
    longer = f"{first_cta_only} {'add.u32 %r51, %r50, %r50; ' * 20} {message(STORE, LOAD)}"
    loaded = [
        Loaded(Program.from_ptx(kernel(message(STORE, LOAD), 4)), "k"),
        Loaded(Program.from_ptx(kernel(longer, 4)), "k", (2, 1, 1), 2048),
    ]

    def one(number: int, gpu: int, role: int) -> Launch:
        places = (data.ctypes.data + 64 * number, flags.ctypes.data + 4 * number, out.ctypes.data + 4 * number)
        params = [struct.pack("<Q", p) for p in (*places, role)]
        return Launch((1 + number, 1, 1), (32, 1, 1), params, gpu, kernel=number)

    launches = [one(number, gpu, gpu) for gpu in (0, 1) for number in (0, 1)]
    reports = launch_kernels(loaded, launches, memory, Options(schedule=schedule, seed=seed))
    assert out[:2].tolist() == [7, 7] and [report.cluster for report in reports] == [(1, 1, 1), (2, 1, 1)]


def test_an_error_names_the_kernel_s_line() -> None:
    """The second of two kernels deadlocks, in a line that only its own text explains."""
    from ptx_emulator import launch_kernels

    flag = np.zeros(16, np.uint32)
    memory = MemoryMap()
    memory.add(flag.ctypes.data, flag.nbytes, "flag")
    spin = "S: ld.relaxed.sys.global.u32 %r2, [%rd100]; setp.eq.u32 %p3, %r2, 0; @%p3 bra S;"
    loaded = [Loaded(Program.from_ptx(kernel(body, 1)), "k") for body in ("mov.u32 %r1, 0;", spin)]
    params = [struct.pack("<Q", flag.ctypes.data)]
    with pytest.raises(EmulationError) as e:
        launch_kernels(loaded, [Launch((1, 1, 1), (32, 1, 1), params, n, kernel=n) for n in (0, 1)], memory)
    assert (
        e.value.kind.name == "deadlock" and "ld.relaxed" in str(e.value.ptx_text) + e.value.message
    ) or e.value.ptx_line
