"""mbarriers, bulk copies and TMA tensor copies against NumPy."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind
from ptx_emulator.device.tensor_map import ElementType, Swizzle, encode
from ptx_emulator.samples.handwritten import aligned, run
from ptx_emulator.samples.tensor_maps import tensor_map_of

RNG = np.random.default_rng(5)
WAIT = "{{ .reg .pred q; W{0}: mbarrier.try_wait.parity.shared::cta.b64 q, [%r103], {0}; @!q bra W{0}; }}"
INIT = """setp.ne.u32 %p1, %r100, 0; @%p1 bra I; mbarrier.init.shared::cta.b64 [%r103], 1; fence.mbarrier_init.release.cluster; I: bar.sync 0;"""
COPY_OUT = """W: mov.u32 %r50, %r100; C: setp.ge.u32 %p3, %r50, {words}; @%p3 bra E; shl.b32 %r51, %r50, 2; add.u32 %r52, %r103, %r51; ld.shared.u32 %r53, [%r52+1024];
    mul.wide.u32 %rd50, %r50, 4; add.s64 %rd51, %rd{out}, %rd50; st.global.u32 [%rd51], %r53; add.u32 %r50, %r50, {threads}; bra C; E:"""


def _load(
    tensor: np.ndarray,
    tensor_map: np.ndarray,
    coordinates: tuple[int, ...],
    nbytes: int,
    schedule: str = "late",
    form: str = "tile",
    expect: int | None = None,
) -> np.ndarray:
    out = np.zeros(nbytes // 4, np.uint32)
    rank = 2 if "gather" in form else len(coordinates)
    c = ", ".join(map(str, coordinates))
    run(
        INIT
        + f"""@%p1 bra W; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], {nbytes if expect is None else expect};
    add.u32 %r1, %r103, 1024; cp.async.bulk.tensor.{rank}d.shared::cta.global.{form}.mbarrier::complete_tx::bytes [%r1], [%rd101, {{{c}}}], [%r103]; W:"""
        + WAIT.format(0)
        + COPY_OUT.format(words=nbytes // 4, out=102, threads=64).replace("W: mov", "mov"),
        tensor,
        tensor_map,
        out,
        threads=64,
        schedule=schedule,
    )
    return out


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_box_with_coordinates(schedule: str) -> None:
    t = aligned(RNG.integers(0, 1 << 30, (5, 24, 32), dtype=np.uint32))
    got = _load(t, tensor_map_of(t, (16, 4, 2)), (8, 3, 1), 16 * 4 * 2 * 4, schedule)
    np.testing.assert_array_equal(got.reshape(2, 4, 16), t[1:3, 3:7, 8:24])


def test_outside_of_the_tensor_is_zero() -> None:
    t = aligned(RNG.integers(1, 1 << 30, (10, 32), dtype=np.uint32))
    got = _load(t, tensor_map_of(t, (16, 8)), (-4, 6), 16 * 8 * 4).reshape(8, 16)
    expected = np.zeros((8, 16), np.uint32)
    expected[:4, 4:] = t[6:, :12]
    np.testing.assert_array_equal(got, expected)


def test_nan_fill() -> None:
    t = aligned(RNG.standard_normal((4, 32)).astype(np.float32))
    got = (
        _load(t, tensor_map_of(t, (32, 8), kind=ElementType.F32, oob_nan=True), (0, 0), 32 * 8 * 4)
        .view(np.float32)
        .reshape(8, 32)
    )
    np.testing.assert_array_equal(got[:4], t)
    assert np.isnan(got[4:]).all()


@pytest.mark.parametrize("swizzle", list(Swizzle))
def test_swizzle_xors_the_chunk_with_the_row(swizzle: Swizzle) -> None:
    span = {0: 32, 1: 32, 2: 64, 3: 128, 4: 128}[swizzle]
    t = aligned(RNG.integers(0, 1 << 30, (32, span // 4), dtype=np.uint32))
    got = _load(t, tensor_map_of(t, (span // 4, 32), swizzle), (0, 0), span * 32).reshape(-1, 4)
    expected = np.zeros_like(got)
    for chunk, data in enumerate(t.reshape(-1, 4)):
        at = chunk * 16
        # Bits 7.. XOR the index of the 16-byte chunk; with atoms of 32 bytes, bits 7 and 8 XOR the index of the atom.
        moved = at >> 2 & 0x60 if swizzle is Swizzle.B128_ATOM32 else at >> 3 & (0, 0x10, 0x30, 0x70)[swizzle]
        expected[(at ^ moved) // 16] = data
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("kind", "bits"), [(ElementType.U4_ALIGN16, 4), (ElementType.U6_ALIGN16, 6)])
def test_16_padded_elements_occupy_16_bytes(kind: ElementType, bits: int) -> None:
    """Two rows of 128 elements; the mbarrier counts the bytes of global memory."""
    row_bytes = 128 * bits // 8
    t = aligned(RNG.integers(0, 256, (8, 2 * row_bytes), dtype=np.uint8))
    sizes = (256, 8)
    tensor_map = aligned(np.frombuffer(encode(t.ctypes.data, kind, sizes, (2 * row_bytes,), (128, 2)), np.uint8).copy())
    got = _load(t, tensor_map, (128, 3), 2 * 128, expect=2 * row_bytes).view(np.uint8).reshape(2, 8, 16)
    np.testing.assert_array_equal(got[:, :, : 2 * bits], t[3:5, row_bytes:].reshape(2, 8, 2 * bits))
    with pytest.raises(EmulationError, match="multiple of 128"):
        _load(t, tensor_map, (16, 3), 2 * 128, expect=2 * row_bytes)


REPLACE = """setp.ne.u32 %p9, %r102, 0; @%p9 bra J; setp.ne.u32 %p8, %r101, 0;
{fill} @%p8 bra D; tensormap.replace.tile.global_address.{space}.b1024.b64 [{map}], %rd100;
tensormap.replace.tile.global_dim.{space}.b1024.b32 [{map}], 0, 32; tensormap.replace.tile.global_dim.{space}.b1024.b32 [{map}], 1, 20;
tensormap.replace.tile.global_stride.{space}.b1024.b64 [{map}], 0, 256; D: {publish} J: bar.sync 0;
fence.proxy.tensormap::generic.acquire.gpu [%rd101], 128;"""
"""Warp 0 changes the map in p1 to a map of p0 [20, 64] that covers the first half of the columns."""


@pytest.mark.parametrize("space", ["global", "shared::cta"])
def test_a_kernel_replaces_fields_of_a_tensor_map(space: str) -> None:
    t = aligned(RNG.integers(1, 1 << 30, (20, 64), dtype=np.uint32))
    other = aligned(np.zeros((4, 32), np.uint32))
    tensor_map = tensor_map_of(other, (16, 4))
    out = np.zeros(64, np.uint32)
    if space == "global":
        change = REPLACE.format(
            space=space, map="%rd101", fill="", publish="fence.proxy.tensormap::generic.release.gpu;"
        )
    else:
        fill = """shl.b32 %r1, %r101, 2; cvt.u64.u32 %rd1, %r1; add.s64 %rd1, %rd101, %rd1; ld.global.u32 %r2, [%rd1];
        add.u32 %r3, %r103, 512; add.u32 %r4, %r3, %r1; st.shared.u32 [%r4], %r2; bar.warp.sync -1;"""
        publish = """bar.warp.sync -1; tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%rd101], [%r3], 128;"""
        change = REPLACE.format(space=space, map="%r3", fill=fill, publish=publish)
    run(
        INIT
        + change
        + """@%p1 bra W; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 256; add.u32 %r5, %r103, 1024;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r5], [%rd101, {24, 17}], [%r103]; W:"""
        + WAIT.format(0)
        + COPY_OUT.format(words=64, out=102, threads=64).replace("W: mov", "mov"),
        t,
        tensor_map,
        out,
        threads=64,
    )
    expected = np.zeros((4, 16), np.uint32)
    expected[:3, :8] = t[17:20, 24:32]
    np.testing.assert_array_equal(out.reshape(4, 16), expected)


def test_gather4_loads_four_rows() -> None:
    t = aligned(RNG.integers(0, 1 << 30, (50, 32), dtype=np.uint32))
    got = _load(t, tensor_map_of(t, (32, 1), Swizzle.NONE), (0, 7, 49, 0, 23), 4 * 128, form="tile::gather4")
    np.testing.assert_array_equal(got.reshape(4, 32), t[[7, 49, 0, 23]])


@pytest.mark.parametrize(("expect", "kind"), [(256, ErrorKind.deadlock), (1024, ErrorKind.deadlock)])
def test_wrong_transaction_count(expect: int, kind: ErrorKind) -> None:
    t = aligned(np.zeros((8, 32), np.uint32))
    with pytest.raises(EmulationError) as e:
        _load(t, tensor_map_of(t, (32, 4)), (0, 0), 512, expect=expect)
    assert e.value.kind in (kind, ErrorKind.tx_count) and "bytes" in e.value.message


@pytest.mark.parametrize(
    ("form", "reference"),
    [
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group", lambda old, new: new),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group", lambda old, new: old + new),
    ],
)
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_store_clips_and_reduces(form: str, reference, schedule: str) -> None:  # noqa: ANN001
    t = aligned(RNG.integers(0, 1000, (10, 16), dtype=np.uint32))
    before = t.copy()
    run(
        f"""mul.lo.u32 %r1, %r100, 3; shl.b32 %r2, %r100, 2; add.u32 %r3, %r103, %r2; st.shared.u32 [%r3], %r1; fence.proxy.async.shared::cta; bar.sync 0;
    setp.ne.u32 %p1, %r100, 0; @%p1 bra E; {form} [%rd101, {{8, 6}}], [%r103]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:""",
        t,
        tensor_map_of(t, (16, 8)),
        threads=128,
        schedule=schedule,
    )
    expected = before.copy()
    expected[6:, 8:] = reference(before[6:, 8:], (np.arange(128, dtype=np.uint32) * 3).reshape(8, 16)[:4, :8])
    np.testing.assert_array_equal(t, expected)


def test_bulk_copy_to_peer_and_multicast() -> None:
    t = aligned(RNG.integers(0, 1 << 30, 64, dtype=np.uint32))
    out = np.zeros(128, np.uint32)
    run(
        INIT
        + """barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r9, %cluster_ctarank; @%p1 bra W;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 256; setp.ne.u32 %p2, %r9, 0; @%p2 bra W; mov.u16 %h1, 3; add.u32 %r1, %r103, 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%rd100], 256, [%r103], %h1; W:"""
        + WAIT.format(0)
        + """shl.b32 %r2, %r100, 2; add.u32 %r3, %r103, %r2; ld.shared.u32 %r4, [%r3+1024]; mad.lo.u32 %r5, %r9, 64, %r100; mul.wide.u32 %rd1, %r5, 4;
    add.s64 %rd2, %rd101, %rd1; st.global.u32 [%rd2], %r4; barrier.cluster.arrive; barrier.cluster.wait;""",
        t,
        out,
        threads=64,
        grid=2,
        cluster=2,
        schedule="late",
    )
    np.testing.assert_array_equal(out, np.concatenate([t, t]))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [%r103+8];", ErrorKind.mbarrier),
        ("mbarrier.arrive.shared::cta.b64 _, [%r103], 2;", ErrorKind.mbarrier),
        ("st.shared.u32 [%r103], %r100; mbarrier.arrive.shared::cta.b64 _, [%r103];", ErrorKind.mbarrier),
        ("mbarrier.init.shared::cta.b64 [%r103+4], 1;", ErrorKind.misaligned),
        (
            "add.u32 %r1, %r103, 1032; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd100], 16, [%r103];",
            ErrorKind.misaligned,
        ),
    ],
)
def test_misuse(body: str, kind: ErrorKind) -> None:
    with pytest.raises(EmulationError) as e:
        run(INIT + "@%p1 bra E;" + body + "E:", aligned(np.zeros(64, np.uint32)), threads=32)
    assert e.value.kind is kind


def test_phase_alternates() -> None:
    out = np.zeros(1, np.uint32)
    run(
        INIT
        + """@%p1 bra E; mov.u32 %r1, 0; L: mbarrier.arrive.shared::cta.b64 _, [%r103]; and.b32 %r2, %r1, 1;
    mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r103], %r2; @!%p2 trap; xor.b32 %r2, %r2, 1; mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r103], %r2; @%p2 trap;
    add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 5; @%p3 bra L; st.global.u32 [%rd100], %r1; E:""",
        out,
    )
    assert out[0] == 5


@pytest.mark.parametrize("schedule", ["eager", "late", "random"])
def test_two_halves_of_a_warp_wait_for_deferred_loads(schedule: str) -> None:
    """Both halves poll at different program counters; neither may keep the loads from completing."""
    t = aligned(np.arange(8, dtype=np.uint32))
    out = np.zeros(32, np.uint32)
    run(
        """setp.ne.u32 %p1, %r101, 0; @%p1 bra I; mbarrier.init.shared::cta.b64 [%r103], 1; mbarrier.init.shared::cta.b64 [%r103+8], 1;
    fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103], 16; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r103+8], 16;
    add.u32 %r1, %r103, 64; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd100], 16, [%r103];
    add.u32 %r2, %r103, 80; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd100+16], 16, [%r103+8]; I: bar.warp.sync -1;
    setp.lt.u32 %p2, %r101, 16; @%p2 bra A; B: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r103+8], 0; @!%p3 bra B; ld.shared.u32 %r3, [%r103+80]; bra J;
    A: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r103], 0; @!%p3 bra A; ld.shared.u32 %r3, [%r103+64]; J:
    mul.wide.u32 %rd1, %r101, 4; add.s64 %rd2, %rd101, %rd1; st.global.u32 [%rd2], %r3;""",
        t,
        out,
        schedule=schedule,
    )
    np.testing.assert_array_equal(out, np.repeat([0, 4], 16))
