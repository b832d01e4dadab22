"""Memory scopes: which threads a release, an acquire, a fence or an atomic of a scope orders.

Two threads are in one CTA, in two CTAs of a cluster, or in two clusters. A scope orders them if it includes both.
"""

import numpy as np
import pytest
from ptx_emulator import EmulationError, UnknownInstruction
from ptx_emulator.samples.handwritten import run
from ptx_emulator.samples.scope_kernels import ARRIVE, LOAD, PLACES, REACH, ROLES, SCOPES, STORE, WAIT, arrival, message

SCHEDULES = [("eager", 0), ("late", 0), ("random", 1), ("random_warps", 2)]


def _rows() -> list[tuple[str, str, str, int]]:
    """Rows of (publish, observe, acquire after it, in how many of PLACES this orders)."""
    rows = []
    relaxed_store, relaxed_load = "st.relaxed.gpu.global.u32 [%rd101], %r5;", "ld.relaxed.gpu.global.u32 %r7, [%rd101];"
    exchange, compare = ".exch.b32 %r9, [%rd101], %r5;", ".cas.b32 %r7, [%rd101], 1, 1;"
    for scope in SCOPES:
        reach = REACH[scope]
        publishers = [
            f"st.release.{scope}.global.u32 [%rd101], %r5;",
            f"red.release.{scope}.global.add.u32 [%rd101], %r5;",
            f"atom.release.{scope}.global{exchange}",
            f"atom.acq_rel.{scope}.global{exchange}",
            f"fence.acq_rel.gpu; st.relaxed.{scope}.global.u32 [%rd101], %r5;",
            f"fence.acq_rel.gpu; red.relaxed.{scope}.global.add.u32 [%rd101], %r5;",
            f"fence.acq_rel.gpu; red.{scope}.global.add.u32 [%rd101], %r5;",
            f"fence.acq_rel.gpu; atom.acquire.{scope}.global{exchange}",
            f"fence.acq_rel.gpu; atom.global.{scope}{exchange}",
            *(f"fence.{order}.{scope}; {relaxed_store}" for order in ("release", "acq_rel", "sc")),
            f"fence.{scope}; {relaxed_store}",
        ]
        observers = [
            (f"ld.acquire.{scope}.global.u32 %r7, [%rd101];", ""),
            (f"atom.acquire.{scope}.global{compare}", ""),
            (f"atom.acq_rel.{scope}.global{compare}", ""),
            (f"ld.relaxed.{scope}.global.u32 %r7, [%rd101];", "fence.acq_rel.gpu;"),
            (f"atom.relaxed.{scope}.global{compare}", "fence.acq_rel.gpu;"),
            (f"atom.release.{scope}.global{compare}", "fence.acq_rel.gpu;"),
            *((relaxed_load, f"fence.{order}.{scope};") for order in ("acquire", "acq_rel", "sc")),
        ]
        rows += [(publish, LOAD, "", reach) for publish in publishers]
        rows += [(STORE, observe, acquire, reach) for observe, acquire in observers]
    for level in ("cta", "gl", "sys"):
        rows.append((f"membar.{level}; {relaxed_store}", LOAD, "", REACH[level]))
        rows.append((STORE, relaxed_load, f"membar.{level};", REACH[level]))
    # Atomics without a scope are .gpu, volatile accesses are relaxed at .sys.
    everywhere = len(PLACES)
    rows += [
        (f"atom.release.global{exchange}", LOAD, "", everywhere),
        (f"fence.acq_rel.gpu; atom.global{exchange}", LOAD, "", everywhere),
        ("fence.acq_rel.gpu; red.global.add.u32 [%rd101], %r5;", LOAD, "", everywhere),
        (STORE, f"atom.global{compare}", "fence.acq_rel.gpu;", everywhere),
        ("fence.acq_rel.gpu; st.volatile.global.u32 [%rd101], %r5;", LOAD, "", everywhere),
        (STORE, "ld.volatile.global.u32 %r7, [%rd101];", "fence.acq_rel.gpu;", everywhere),
        # The wider of two fences publishes only accesses before it.
        (f"fence.acq_rel.gpu; fence.acq_rel.cta; {relaxed_store}", LOAD, "", everywhere),
    ]
    return rows


ROWS = _rows()


def _run(body: str, place: str, schedule: str = "eager", seed: int = 0) -> np.ndarray:
    data, flag, out = np.zeros(4, np.uint32), np.zeros(4, np.uint32), np.zeros(4, np.uint32)
    report = run(body, data, flag, out, schedule=schedule, seed=seed, **PLACES[place])
    assert not report.warnings
    return out


def _ids(rows: list) -> list[str]:
    return [" ".join((row[0] + row[1] + row[2]).replace(".global", "").split()) for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=_ids(ROWS))
def test_a_message(row: tuple[str, str, str, int]) -> None:
    body = message(*row[:3])
    for n, place in enumerate(PLACES):
        if n < row[3]:
            assert _run(body, place)[0] == 7
            continue
        with pytest.raises(EmulationError) as e:
            _run(body, place)
        assert e.value.kind.name == "global_race", str(e.value)
    if row[3] < len(PLACES):
        assert "scope" in e.value.message


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("scope", SCOPES)
def test_under_every_schedule(scope: str, schedule: str, seed: int) -> None:
    store = f"st.release.{scope}.global.u32 [%rd101], %r5;"
    body = message(store, LOAD.replace("gpu", scope))
    for n, place in enumerate(PLACES):
        if n < REACH[scope]:
            assert _run(body, place, schedule, seed)[0] == 7
        else:
            with pytest.raises(EmulationError) as e:
                _run(body, place, schedule, seed)
            assert e.value.kind.name == "global_race"


def test_accesses_after_the_wider_fence_are_not_published() -> None:
    """Each of two fences publishes the accesses before it to its own scope."""
    body = message("fence.acq_rel.gpu; WRITE fence.acq_rel.cta; st.relaxed.gpu.global.u32 [%rd101], %r5;", LOAD)
    assert _run(body.replace("WRITE", ""), "two clusters")[0] == 7
    late = body.replace("WRITE", "st.global.u32 [%rd100], 8;").replace("mov.u32 %r6, 7;", "mov.u32 %r6, 6;")
    late = late.replace("st.global.u32 [%rd100], 8;", "mov.u32 %r6, 8; st.global.u32 [%rd100], %r6;")
    assert _run(late, "one CTA")[0] == 8
    for place in ("one cluster", "two clusters"):
        with pytest.raises(EmulationError) as e:
            _run(late, place)
        assert e.value.kind.name == "global_race"


# Warp 0 signals warp 1 of its CTA with a narrow scope; warp 1 signals the other cluster with a wide scope.
RELAY = """and.b32 %r1, %r100, 31; setp.ne.u32 %p1, %r1, 0; @%p1 bra E; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p0, %r2, 0; mov.u32 %r5, 1;
@%p0 bra C; setp.ne.u32 %p2, %r102, 0; @%p2 bra B; mov.u32 %r6, 7; st.global.u32 [%rd100], %r6;
st.release.FIRST.global.u32 [%rd101], %r5; bra E;
B: ld.acquire.FIRST.global.u32 %r7, [%rd101]; setp.eq.u32 %p3, %r7, 0; @%p3 bra B;
st.release.SECOND.global.u32 [%rd101+4], %r5; bra E;
C: setp.ne.u32 %p2, %r102, 0; @%p2 bra E; D: ld.acquire.SECOND.global.u32 %r7, [%rd101+4]; setp.eq.u32 %p3, %r7, 0; @%p3 bra D;
ld.global.u32 %r8, [%rd100]; st.global.u32 [%rd102], %r8; E:"""


def test_order_is_transitive_over_scopes() -> None:
    data, flags, out = np.zeros(1, np.uint32), np.zeros(2, np.uint32), np.zeros(1, np.uint32)
    run(RELAY.replace("FIRST", "cta").replace("SECOND", "gpu"), data, flags, out, threads=64, grid=2)
    assert out[0] == 7
    with pytest.raises(EmulationError) as e:
        run(RELAY.replace("FIRST", "gpu").replace("SECOND", "cta"), data, 0 * flags, out, threads=64, grid=2)
    assert e.value.kind.name == "global_race"


# ---- races between strong accesses to one location

UPDATES = {
    "red": "red.relaxed.{}.global.add.u32 [%rd101], %r5;",
    "atom": "atom.relaxed.{}.global.add.u32 %r7, [%rd101], %r5;",
    "st": "st.relaxed.{}.global.u32 [%rd101], %r2;",
}


@pytest.mark.parametrize("first", SCOPES)
@pytest.mark.parametrize("second", SCOPES)
@pytest.mark.parametrize("op", UPDATES)
def test_two_updates(op: str, first: str, second: str) -> None:
    """Each scope must include the other thread."""
    body = f"{ROLES} @%p0 bra C; {UPDATES[op].format(first)} bra E; C: {UPDATES[op].format(second)} E:"
    for n, place in enumerate(PLACES):
        if n < min(REACH[first], REACH[second]):
            _run(body, place)
            continue
        with pytest.raises(EmulationError) as e:
            _run(body, place)
        assert e.value.kind.name == "global_race"
        assert "the scope of one does not include the other" in e.value.message


@pytest.mark.parametrize("scope", ["cta", "cluster"])
def test_updates_of_a_peers_shared_memory(scope: str) -> None:
    body = f"""setp.ne.u32 %p1, %r101, 0; mov.u32 %r1, 0; mapa.shared::cluster.u32 %r2, %r103, %r1; mov.u32 %r3, %cluster_ctarank;
setp.ne.or.u32 %p2, %r3, 0, %p1; @!%p2 st.shared.u32 [%r103], %r1; barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra E;
red.relaxed.{scope}.shared::cluster.add.u32 [%r2], 1; E: barrier.cluster.arrive; barrier.cluster.wait;
@%p2 bra Z; ld.shared.u32 %r4, [%r103]; st.global.u32 [%rd100], %r4; Z:"""
    out = np.zeros(1, np.uint32)
    if scope == "cluster":
        run(body, out, grid=2, cluster=2)
        assert out[0] == 2
        return
    with pytest.raises(EmulationError) as e:
        run(body, out, grid=2, cluster=2)
    assert e.value.kind.name == "race" and "the scope of one does not include the other" in e.value.message


@pytest.mark.parametrize("scope", ["cta", "cluster"])
@pytest.mark.parametrize("side", ["release", "acquire"])
def test_a_flag_in_a_peers_shared_memory(side: str, scope: str) -> None:
    release, acquire = (scope, "cluster") if side == "release" else ("cluster", scope)
    body = f"""setp.ne.u32 %p1, %r101, 0; mov.u32 %r1, 0; mov.u32 %r3, %cluster_ctarank; setp.ne.u32 %p2, %r3, 0; mov.u32 %r5, 1;
@!%p1 st.shared.u32 [%r103], %r1; barrier.cluster.arrive; barrier.cluster.wait; @%p1 bra E; @%p2 bra C;
mapa.shared::cluster.u32 %r2, %r103, %r5; mov.u32 %r6, 7; st.shared::cluster.u32 [%r2+16], %r6;
st.release.{release}.shared::cluster.u32 [%r2], %r5; bra E;
C: ld.acquire.{acquire}.shared.u32 %r7, [%r103]; setp.eq.u32 %p3, %r7, 0; @%p3 bra C;
ld.shared.u32 %r8, [%r103+16]; st.global.u32 [%rd100], %r8; E: barrier.cluster.arrive; barrier.cluster.wait;"""
    out = np.zeros(1, np.uint32)
    if scope == "cluster":
        run(body, out, grid=2, cluster=2)
        assert out[0] == 7
        return
    with pytest.raises(EmulationError) as e:
        run(body, out, grid=2, cluster=2)
    assert e.value.kind.name == "race"


# ---- mbarriers and the cluster barrier


def _with(text: str, after: str, qualifiers: str) -> str:
    return text.replace(after, after + qualifiers)


def _arrivals() -> list[tuple[str, str, str, int]]:
    """Rows of (arrive, wait, acquire, in how many of the places "one CTA" and "one cluster" this orders)."""
    rows = [(ARRIVE, WAIT, "", 2)]
    # The scope of a releasing or acquiring form is ignored: released kernels leave it at its default, .cta.
    rows += [(_with(ARRIVE, "arrive", f".release.{s}"), WAIT, "", 2) for s in ("cta", "cluster")]
    rows += [(ARRIVE, _with(WAIT, "parity", f".acquire.{s}"), "", 2) for s in ("cta", "cluster")]
    for fence in ("cta", "cluster", "gpu"):
        for scope in ("cta", "cluster"):
            reach = min(2, REACH[fence], REACH[scope])
            rows.append((f"fence.acq_rel.{fence}; " + _with(ARRIVE, "arrive", f".relaxed.{scope}"), WAIT, "", reach))
            rows.append((ARRIVE, _with(WAIT, "parity", f".relaxed.{scope}"), f"fence.acq_rel.{fence};", reach))
    return rows


ARRIVALS = _arrivals()


@pytest.mark.parametrize("row", ARRIVALS, ids=_ids(ARRIVALS))
def test_an_arrival(row: tuple[str, str, str, int]) -> None:
    arrive, wait, acquire, reach = row
    for target in (0, 1):
        body, out = arrival(target, arrive, wait, acquire), np.zeros(1, np.uint32)
        if target < reach:
            run(body, out, threads=64, grid=2, cluster=2)
            assert out[0] == 7
            continue
        with pytest.raises(EmulationError) as e:
            run(body, out, threads=64, grid=2, cluster=2)
        assert e.value.kind.name == "race", str(e.value)


@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu"])
def test_a_relaxed_arrival_at_the_cluster_barrier(scope: str) -> None:
    body = f"""mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r101, 0; @%p1 bra B;
mapa.shared::cluster.u32 %r3, %r103, %r2; st.shared::cluster.u32 [%r3], %r1; fence.acq_rel.{scope};
B: barrier.cluster.arrive.relaxed; barrier.cluster.wait; @%p1 bra E; ld.shared.u32 %r4, [%r103];
mul.wide.u32 %rd1, %r1, 4; add.s64 %rd2, %rd100, %rd1; st.global.u32 [%rd2], %r4; E:"""
    out = np.zeros(2, np.uint32)
    if scope != "cta":
        run(body, out, grid=2, cluster=2)
        assert out.tolist() == [1, 0]
        return
    with pytest.raises(EmulationError) as e:
        run(body, out, grid=2, cluster=2)
    assert e.value.kind.name == "race"


@pytest.mark.parametrize("access", ["ld.relaxed.global.u32 %r7, [%rd100];", "st.release.global.u32 [%rd100], %r5;"])
def test_strong_accesses_name_their_scope(access: str) -> None:
    with pytest.raises(UnknownInstruction, match="scope"):
        run(access, np.zeros(1, np.uint32))
