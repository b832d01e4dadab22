"""griddepcontrol: accesses of a launch with programmatic stream serialization before the previous grid has ended."""

import numpy as np
import pytest
from ptx_emulator import Checks, EmulationError, ErrorKind
from ptx_emulator.device.tensor_map import ElementType, encode
from ptx_emulator.samples.handwritten import aligned, run

WAIT, NEXT = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
# Accesses of one thread to the array at [%rd100], with shared memory at %r103 and an mbarrier after its first 1 KiB.
SETUP = "mbarrier.init.shared::cta.b64 [%r103+1024], 1; fence.mbarrier_init.release.cluster;"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103+1024], 128;"
DONE = "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r103+1024], 0; @!%p2 bra W;"
COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "".join(f"st.shared.v4.u32 [%r103+{i}], {{%r101, %r101, %r101, %r101}};" for i in range(0, 128, 16))
STORE += "fence.proxy.async.shared::cta;"
GROUP = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
READS = {
    "ld": "ld.global.u32 %r1, [%rd100];",
    "ld generic": "ld.u32 %r1, [%rd100];",
    "ld.acquire": "ld.acquire.gpu.global.u32 %r1, [%rd100];",
    "cp.async": "cp.async.cg.shared.global [%r103], [%rd100], 16; cp.async.wait_all;",
    "bulk load": f"{EXPECT} {COPY} [%r103], [%rd100], 128, [%r103+1024]; {DONE}",
    "tensor load": f"{EXPECT} mov.u32 %r5, 0; cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier"
    f"::complete_tx::bytes [%r103], [%rd101, {{%r5}}], [%r103+1024]; {DONE}",
}
WRITES = {
    "st": "st.global.u32 [%rd100], %r101;",
    "atom": "atom.global.add.u32 %r1, [%rd100], 1;",
    "red": "red.global.add.u32 [%rd100], 1;",
    "bulk store": f"{STORE} cp.async.bulk.global.shared::cta.bulk_group [%rd100], [%r103], 16; {GROUP}",
    "tensor store": f"{STORE} mov.u32 %r5, 0; cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group "
    f"[%rd101, {{%r5}}], [%r103]; {GROUP}",
}


def launched(
    body: str, *, threads: int = 1, constant: tuple[int, ...] = (), dependent: bool = True, **options: object
) -> None:
    array = aligned(np.zeros(64, np.uint32))
    map_at = aligned(np.frombuffer(encode(array.ctypes.data, ElementType.U32, (32,), (), (32,)), np.uint8))
    run(body, array, map_at, threads=threads, constant=(1, *constant), dependent=dependent, **options)


def refused(body: str, says: str, **options: object) -> None:
    with pytest.raises(EmulationError, match=says) as e:
        launched(body, **options)
    assert e.value.kind is ErrorKind.grid_dependency


@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize("access", READS | WRITES)
def test_accesses_need_the_wait_before_them(access: str, schedule: str) -> None:
    code = (READS | WRITES)[access]
    verb = "reads p0" if access in READS else "writes p0"
    launched(f"{SETUP} {NEXT} {WAIT} {code}", schedule=schedule)
    launched(f"{SETUP} {code}", schedule=schedule, dependent=False)
    refused(f"{SETUP} {code} {WAIT}", f"{verb} before griddepcontrol.wait", schedule=schedule)


@pytest.mark.parametrize("access", READS)
def test_constants_may_be_read_before_the_wait(access: str) -> None:
    launched(f"{SETUP} {READS[access]} {WAIT}", constant=(0,))


@pytest.mark.parametrize("access", WRITES)
def test_writes_before_the_wait_are_refused(access: str) -> None:
    refused(f"{SETUP} {WRITES[access]} {WAIT}", "writes p0 before griddepcontrol.wait", constant=(0,))


def test_every_lane_waits_for_itself() -> None:
    some = "setp.lt.u32 %p1, %r101, 16;"
    launched(f"{some} @%p1 {WAIT} @%p1 ld.global.u32 %r1, [%rd100];", threads=32)
    refused(f"{some} @%p1 {WAIT} ld.global.u32 %r1, [%rd100];", "reads p0 before", threads=32)
    # Another warp's wait, even with a barrier between.
    first = f"setp.lt.u32 %p1, %r100, 32; @%p1 {WAIT} bar.sync 0;"
    refused(f"{first} @!%p1 ld.global.u32 %r1, [%rd100];", "reads p0 before", threads=64)


def test_every_cta_waits() -> None:
    """If one CTA does not wait, the next grid's wait implies nothing about the grids before this one."""
    some = "mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 1;"
    refused("", "no thread of it executed griddepcontrol.wait")
    refused(f"{some} @%p1 {WAIT}", "no thread of it executed griddepcontrol.wait", grid=3)
    launched(f"setp.eq.u32 %p1, %r100, 5; @%p1 {WAIT}", threads=32, grid=3)


def test_a_second_cta_waits_anew() -> None:
    """The emulator reuses the warps of one multiprocessor, whose state must be reset."""
    some = "mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0;"
    body = f"{some} @%p1 {WAIT} ld.global.u32 %r1, [%rd100]; {WAIT}"
    refused(body, "reads p0 before", grid=2)


def test_tensor_memory_is_allocated_between_the_wait_and_launch_dependents() -> None:
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r103], 512;"
    free = "ld.shared.u32 %r1, [%r103]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;"
    launched(f"{WAIT} {alloc} {NEXT} {free}", threads=32)
    launched(f"{NEXT} {alloc} {free}", threads=32, dependent=False)
    refused(f"{alloc} {WAIT} {NEXT} {free}", "tcgen05.alloc before griddepcontrol.wait", threads=32)
    refused(f"{NEXT} {WAIT} {alloc} {free}", "tcgen05.alloc after griddepcontrol.launch_dependents", threads=32)


def test_the_check_can_be_switched_off() -> None:
    launched("ld.global.u32 %r1, [%rd100];", checks=Checks(grid_dependency="off"))
