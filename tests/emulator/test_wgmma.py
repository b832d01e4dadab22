"""wgmma of sm_90a against NumPy: operand sources, layouts, kinds, shapes; and planted faults, each named by the error.

Operands and fragments are laid out here from the PTX manual's figures, not by TMA or by the emulator's own maps.
"""

import re

import numpy as np
import pytest
from ptx_emulator import H200, Checks, EmulationError, ErrorKind, UnknownInstruction
from ptx_emulator.samples.handwritten import run
from ptx_emulator.samples.small_floats import FORMATS, decode

RNG = np.random.default_rng(5)
THREADS, M = 128, 64
IMAGE = 0x800  # shared address of the operands: after the reserved kilobyte and 1024 bytes for the test
A_AT, B_AT, IMAGE_BYTES = 0, 8192, 8192 + 16384
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
LAYOUT = {16: 0, 128: 1, 64: 2, 32: 3}

# p0: the image of shared memory; p1: A's registers [128, 4]; p2, p3: the accumulator [128, registers] before and after.
DECLARE = """.reg .b32 %acc<128>, %a<4>; .reg .b64 %desc<4>;
mov.u32 %r50, %r100; C0: setp.ge.u32 %p3, %r50, {words}; @%p3 bra C1; shl.b32 %r51, %r50, 2; add.u32 %r52, %r103, %r51;
mul.wide.u32 %rd50, %r50, 4; add.s64 %rd51, %rd100, %rd50; ld.global.u32 %r53, [%rd51]; st.shared.u32 [%r52+1024], %r53;
add.u32 %r50, %r50, 128; bra C0; C1:
mul.wide.u32 %rd52, %r100, 16; add.s64 %rd53, %rd101, %rd52; ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%rd53];
mul.wide.u32 %rd54, %r100, {row_bytes}; add.s64 %rd55, %rd102, %rd54; add.s64 %rd56, %rd103, %rd54;
{loads}
fence.proxy.async.shared::cta; bar.sync 0; mov.b64 %desc0, {a_desc}; mov.b64 %desc1, {b_desc};
setp.ne.u32 %p10, {scale_d}, 0;
"""


def _swizzle(address: int, width: int) -> int:
    """The address with bits 4.. XORed with bits 7..; the width's number of 16-byte chunks gives how many bits."""
    return address ^ (address >> 7 & (width // 16 - 1)) << 4


def _place(values: np.ndarray, mn_major: bool, width: int, base: int, image: np.ndarray) -> int:
    """Stores an operand [rows, k] of whole bytes; returns its descriptor. Strides are larger than necessary."""
    k = values.shape[1]
    size = values.itemsize
    per_chunk = 16 // size
    raw = (np.ascontiguousarray(values.T) if mn_major else np.ascontiguousarray(values)).view(np.uint8)
    chunks = raw.reshape(raw.shape[0], -1, 16)  # [row][chunk along k], or [k][chunk along rows]
    if width == 16:
        # 8x8 blocks of 128 bytes each; `near` bytes apart along K, `far` bytes along rows.
        near, far = 128, 128 * (k // per_chunk if not mn_major else k // 8)
        leading, stride = near, far
        for i in range(chunks.shape[0]):
            for c in range(chunks.shape[1]):
                along_k, along_rows = (i // 8, c) if mn_major else (c, i // 8)
                at = base + i % 8 * 16 + along_k * near + along_rows * far
                image[at : at + 16] = chunks[i, c]
    else:
        # Rows of `width` bytes in groups of 8. Wider MN-major operands continue `leading` bytes further.
        columns = -(-chunks.shape[1] * 16 // width)
        stride = 8 * width
        leading = stride * (chunks.shape[0] // 8) if mn_major else 16
        for i in range(chunks.shape[0]):
            for c in range(chunks.shape[1]):
                column, rest = divmod(16 * c, width)
                assert column < max(columns, 1)
                at = _swizzle(IMAGE + base + i % 8 * width + i // 8 * stride + column * leading + rest, width) - IMAGE
                image[at : at + 16] = chunks[i, c]
    return (IMAGE + base) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | LAYOUT[width] << 62


def _operand(kind: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [rows, k] that the kind represents exactly, and their stored form."""
    if kind in FORMATS:
        codes = RNG.integers(0, 72, (rows, k)) | RNG.integers(0, 2, (rows, k)) << 7
        return decode(kind)[codes & 127] * (1.0 - 2.0 * (codes >> 7)), codes.astype(np.uint8)
    if kind == "s8" or kind == "u8":
        values = RNG.integers(-128, 128, (rows, k)).astype(np.int8)
        return values.view(np.uint8 if kind == "u8" else np.int8).astype(np.float64), values.view(np.uint8)
    values = RNG.integers(-8, 9, (rows, k)) / 4
    if kind == "f16":
        return values, values.astype(np.float16)
    stored = values.astype(np.float32)
    if kind == "bf16":
        return values, (stored.view(np.uint32) >> 16).astype(np.uint16)
    return values, (stored.view(np.uint32) | 0x0FFF).view(np.float32)  # the low 13 bits of tf32 are ignored


def _fragment_of_a(stored: np.ndarray) -> np.ndarray:
    """A [64, k] as registers [128, 4] of consecutive columns (the manual's figures of m64k16, m64k8, m64k32)."""
    per_register = 4 // stored.itemsize
    out = np.zeros((THREADS, 4), np.uint32)
    for t in range(THREADS):
        for r in range(4):
            row = 16 * (t // 32) + t % 32 // 4 + 8 * (r % 2)
            column = (t % 4 + 4 * (r // 2)) * per_register
            out[t, r] = np.ascontiguousarray(stored[row, column : column + per_register]).view(np.uint32)[0]
    return out


def _accumulator_cells(n: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of element [thread, i] of D."""
    t, i = np.mgrid[0:THREADS, 0 : n // 2]
    return 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2


class Problem:
    """One product D = A B^T + D of M=64, its memory image and its PTX."""

    def __init__(
        self,
        n: int = 64,
        a: str = "f16",
        b: str = "",
        form: str = "f32",
        *,
        registers: bool = False,
        a_mn: bool = False,
        b_mn: bool = False,
        widths: tuple[int, int] = (32, 32),
        signs: tuple[int, int] = (1, 1),
        scale_d: int = 1,
        saturate: bool = False,
        near_limit: bool = False,
    ) -> None:
        b = b or a
        k = 256 // BITS[a]
        self.n, self.form = n, form
        values_a, stored_a = _operand(a, M, k)
        values_b, stored_b = _operand(b, n, k)
        self.image = np.zeros(IMAGE_BYTES, np.uint8)
        self.a_desc = _place(stored_a, a_mn, widths[0], A_AT, self.image)
        self.b_desc = _place(stored_b, b_mn, widths[1], B_AT, self.image)
        self.fragment = _fragment_of_a(stored_a)
        integer = form == "s32"
        c = RNG.integers(-8, 9, (M, n)) / (1 if integer else 4)
        if near_limit:
            c = np.where(c < 0, -(2.0**31) - c, 2.0**31 - 1 - c)
        self.expected = values_a @ values_b.T * (signs[0] * signs[1]) + (c if scale_d else 0)
        rows, columns = _accumulator_cells(n)
        type_of = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[form]
        self.before = np.ascontiguousarray(c[rows, columns].astype(type_of)).view(np.uint32)
        self.count = self.before.shape[1]
        accumulator = ", ".join(f"%acc{i}" for i in range(self.count))
        sign_text = "" if integer else f", {signs[0]}, {signs[1]}"
        majors = (f", {int(a_mn)}" * (not registers) + f", {int(b_mn)}") if BITS[a] == 16 else ""
        a_text = "{%a0, %a1, %a2, %a3}" if registers else "%desc0"
        saturation = ".satfinite" if saturate else ""
        self.mma = (
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}{saturation}.{form}.{a}.{b} {{{accumulator}}}, {a_text}, %desc1, "
            f"%p10{sign_text}{majors};"
        )
        self.prologue = DECLARE.format(
            words=IMAGE_BYTES // 4,
            row_bytes=4 * self.count,
            loads="".join(f"ld.global.b32 %acc{i}, [%rd55+{4 * i}];" for i in range(self.count)),
            a_desc=self.a_desc,
            b_desc=self.b_desc,
            scale_d=scale_d,
        )
        self.epilogue = "\n" + "".join(f"st.global.b32 [%rd56+{4 * i}], %acc{i};" for i in range(self.count))

    @property
    def body(self) -> str:
        return (
            f"{self.prologue}\nwgmma.fence.sync.aligned;\n{self.mma}\nwgmma.commit_group.sync.aligned;\n"
            f"wgmma.wait_group.sync.aligned 0;\n{self.epilogue}"
        )

    def run(self, body: str = "", schedule: str = "late", threads: int = THREADS, **options: object) -> np.ndarray:
        """D [64, n] as float64; leaves the launch's report."""
        after = np.zeros_like(self.before)
        padded = np.zeros((threads, self.count), np.uint32)
        padded[:THREADS] = self.before
        fragment = np.zeros((threads, 4), np.uint32)
        fragment[:THREADS] = self.fragment
        options = {"target": "sm_90a"} | options
        self.report = run(
            body or self.body, self.image, fragment, padded, after, threads=threads, schedule=schedule, **options
        )
        type_of = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[self.form]
        rows, columns = _accumulator_cells(self.n)
        out = np.zeros((M, self.n))
        out[rows, columns] = after.view(type_of)
        return out


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
SCHEDULES = ["eager", "random", "late", "random_warps"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sources_of_a(kind: str, registers: bool, schedule: str) -> None:
    p = Problem(a=kind, registers=registers)
    np.testing.assert_array_equal(p.run(schedule=schedule), p.expected)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(n: int) -> None:
    p = Problem(n)
    np.testing.assert_array_equal(p.run(), p.expected)


@pytest.mark.parametrize("width_b", [16, 32, 64, 128])
@pytest.mark.parametrize("width_a", [16, 32, 64, 128])
@pytest.mark.parametrize("a_mn, b_mn", [(False, False), (True, False), (False, True), (True, True)])
def test_majors_and_swizzles(a_mn: bool, b_mn: bool, width_a: int, width_b: int) -> None:
    p = Problem(128, "bf16", a_mn=a_mn, b_mn=b_mn, widths=(width_a, width_b))
    np.testing.assert_array_equal(p.run(), p.expected)


@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize(
    "a, b, form",
    [
        ("f16", "f16", "f16"),
        ("tf32", "tf32", "f32"),
        ("e4m3", "e4m3", "f32"),
        ("e4m3", "e5m2", "f32"),
        ("e5m2", "e4m3", "f32"),
        ("s8", "s8", "s32"),
        ("s8", "u8", "s32"),
        ("u8", "s8", "s32"),
    ],
)
def test_kinds(a: str, b: str, form: str, registers: bool) -> None:
    p = Problem(96, a, b, form, registers=registers)
    tolerance = 1e-6 * np.abs(p.expected).max() if a.startswith("e") else 0
    np.testing.assert_allclose(p.run(), p.expected, rtol=0, atol=tolerance)


def test_integers_saturate_or_wrap() -> None:
    limits = np.iinfo(np.int32)
    for saturate in (False, True):
        p = Problem(16, "s8", form="s32", saturate=saturate, near_limit=True)
        wrapped = (p.expected.astype(np.int64) + 2**31) % 2**32 - 2**31
        assert (wrapped != p.expected).any()
        np.testing.assert_array_equal(p.run(), p.expected.clip(limits.min, limits.max) if saturate else wrapped)


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("scale_d", [0, 1])
def test_signs_and_scale_d(scale_d: int, signs: tuple[int, int]) -> None:
    p = Problem(32, signs=signs, scale_d=scale_d)
    np.testing.assert_array_equal(p.run(), p.expected)


def test_accumulation_of_one_shape_needs_no_fence_between() -> None:
    p = Problem()
    c = p.run(p.body.replace(p.mma, ""))
    np.testing.assert_array_equal(p.run(p.body.replace(p.mma, p.mma * 3)), 3 * p.expected - 2 * c)


def test_report() -> None:
    p = Problem(128, "bf16", registers=True, b_mn=True, widths=(32, 128))
    p.run()
    assert p.report.mma_flops == 2 * 64 * 128 * 16
    assert p.report.by_form["wgmma.mma_async f32.bf16.bf16 RS KN m64 n128 k16"] == 1
    assert p.report.by_class["mma"] == 4  # warps
    assert p.report.cycles["tensor"] == 2 * 64 * 128 * 16 / H200.tensor_flops_per_clock["bf16"] == 64
    b_bytes = 16 * 128 * 2  # A comes from registers
    assert p.report.bytes["operands_read"] == b_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_own_rows_of_a_need_no_barrier(schedule: str) -> None:
    """A warp's own rows of A need only a proxy fence and bar.warp.sync: FlashAttention-3 passes P through shared memory
    this way. Data of another warp in A or B needs a barrier."""
    p = Problem(widths=(16, 16))
    # In this layout of A, 8 rows and all of K take 256 bytes: the warp's 16 rows begin at 512 times its index.
    rewrite = """add.u32 %r60, %r102, {shift}; and.b32 %r60, %r60, 3; shl.b32 %r60, %r60, 9; shl.b32 %r61, %r101, 4;
add.u32 %r60, %r60, %r61; add.u32 %r60, %r60, %r103; ld.shared.v4.b32 {{%r61, %r62, %r63, %r64}}, [%r60+{at}];
st.shared.v4.b32 [%r60+{at}], {{%r61, %r62, %r63, %r64}}; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;"""
    np.testing.assert_array_equal(
        p.run(p.body.replace(FENCE, rewrite.format(shift=0, at=1024 + A_AT) + FENCE), schedule), p.expected
    )
    for shift, at in ((1, A_AT), (0, B_AT)):
        with pytest.raises(EmulationError, match="reads shared memory") as e:
            p.run(p.body.replace(FENCE, rewrite.format(shift=shift, at=1024 + at) + FENCE), schedule)
        assert e.value.kind is ErrorKind.race


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_moves_by_the_compiler_warn(schedule: str) -> None:
    """Zeroing f32 accumulators after the fence and unpacking halves right after the product are warnings, since the
    assembler keeps them in order."""
    p = Problem(8, scale_d=0)
    p.run(p.body.replace(FENCE, FENCE + "mov.b32 %acc1, 0;"), schedule)
    assert "moved after the wgmma.fence" in "".join(p.report.warnings)
    p = Problem(8, form="f16")
    unpacked = p.run(
        p.body.replace(COMMIT, "mov.b32 {%h1, %h2}, %acc0;" + COMMIT)
        + "mov.b32 %acc0, {%h1, %h2}; st.global.b32 [%rd56], %acc0;",
        schedule,
    )
    np.testing.assert_array_equal(unpacked, p.expected)
    assert "unpacks a register" in "".join(p.report.warnings)


# ---- planted faults: an edit of the right program, the kind that it must raise, and a pattern of the message.

OVERWRITE = f"setp.eq.u32 %p12, %r100, 77; @%p12 st.shared.u32 [%r103+{1024 + B_AT}], %r100;"
FAULTS = {
    "no fence": (FENCE, "", ErrorKind.wgmma_fence, "first"),
    "fence before the accumulator's last use": (
        FENCE,
        FENCE + "add.f32 %acc5, %acc5, %acc5;",
        ErrorKind.wgmma_fence,
        "as accumulator that ptx line",
    ),
    "fence before A's last use": (FENCE, FENCE + "xor.b32 %a1, %a1, 0;", ErrorKind.wgmma_fence, "as A that ptx line"),
    "no wait": (WAIT, "", ErrorKind.wgmma_wait, "wait_group is missing"),
    "no commit": (COMMIT, "", ErrorKind.wgmma_wait, "commit_group and wgmma.wait_group are missing"),
    "wait for all but one group": (WAIT, "wgmma.wait_group.sync.aligned 1;", ErrorKind.wgmma_wait, "under way"),
    "accumulator read before the wait": (WAIT, "mov.b32 %r1, %acc3;" + WAIT, ErrorKind.wgmma_wait, "under way"),
    "A changed before the wait": (WAIT, "xor.b32 %a0, %a0, 1;" + WAIT, ErrorKind.wgmma_wait, "under way"),
    "no proxy fence": ("fence.proxy.async.shared::cta;", "", ErrorKind.proxy_fence, "no fence.proxy.async"),
    "no barrier after the stores": ("bar.sync 0;", "", ErrorKind.race, "reads shared memory"),
    "buffer overwritten before the wait": (WAIT, OVERWRITE + WAIT, ErrorKind.race, "shared memory 0x2800"),
    "one warp stays away": (
        "wgmma.fence",
        "setp.eq.u32 %p11, %r102, 2; @%p11 bra Z; wgmma.fence",
        ErrorKind.deadlock,
        "nothing can run",
    ),
    "warps differ in a descriptor": (
        FENCE,
        FENCE + "cvt.u64.u32 %desc2, %r102; shl.b64 %desc2, %desc2, 1; add.s64 %desc1, %desc1, %desc2;",
        ErrorKind.divergent_collective,
        "warpgroup differ in a descriptor",
    ),
    "lanes differ in scale-d": (
        FENCE,
        FENCE + "setp.ne.u32 %p10, %r101, 3;",
        ErrorKind.divergent_collective,
        "differ in scale-d",
    ),
    "a descriptor of tcgen05": (
        FENCE,
        FENCE + "or.b64 %desc1, %desc1, 0x400000000000;",
        ErrorKind.misaligned_descriptor,
        "version",
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault: str, schedule: str) -> None:
    old, new, kind, text = FAULTS[fault]
    p = Problem(registers=True)
    assert p.body.count(old) == 1
    with pytest.raises(EmulationError, match=text) as e:
        p.run(p.body.replace(old, new) + "Z:", schedule=schedule)
    assert e.value.kind is kind


def test_exit_without_wait() -> None:
    p = Problem()
    with pytest.raises(EmulationError, match="exits while wgmma") as e:
        p.run(p.body.replace(WAIT, "").replace(p.epilogue, ""))
    assert e.value.kind is ErrorKind.wgmma_wait


def test_another_shape_under_way() -> None:
    p = Problem(64, registers=True)
    narrow = re.sub(
        r"n64k16",
        "n8k16",
        p.mma.replace(p.mma[p.mma.index("{") : p.mma.index("}") + 1], "{%acc0, %acc1, %acc2, %acc3}", 1),
    )
    with pytest.raises(EmulationError, match="another shape") as e:
        p.run(p.body.replace(p.mma, p.mma + narrow))
    assert e.value.kind is ErrorKind.wgmma_wait


def test_late_means_at_the_wait() -> None:
    """With the checker off, overwriting a buffer too early spoils the product under a late schedule only."""
    p = Problem()
    overwrite = f"""bar.sync 0; mov.b32 %r1, 0x7fff7fff; shl.b32 %r2, %r100, 2; add.u32 %r2, %r2, %r103;
st.shared.b32 [%r2+{1024 + B_AT}], %r1; bar.sync 0;"""
    body = p.body.replace(WAIT, overwrite + WAIT)
    off = Checks(order=False)
    np.testing.assert_array_equal(p.run(body, schedule="eager", checks=off), p.expected)
    assert np.isnan(p.run(body, schedule="late", checks=off)).any()


def test_wait_of_one_warp_frees_the_buffer() -> None:
    """One thread of the warpgroup arrives at the `empty` barrier after its wait, as in CUTLASS's pipelines, and a
    producer warp that waits for the barrier may overwrite the buffer that the whole warpgroup has read."""
    p = Problem()
    barrier = "setp.ne.u32 %p4, %r100, 0; @%p4 bra S1; mbarrier.init.shared::cta.b64 [%r103], 1; S1: bar.sync 1;"
    producer = f"""setp.lt.u32 %p5, %r102, 4; @%p5 bra CONSUMER; W0: mbarrier.try_wait.parity.shared::cta.b64 %p6, [%r103], 0;
@!%p6 bra W0; shl.b32 %r2, %r101, 2; add.u32 %r2, %r2, %r103; st.shared.b32 [%r2+{1024 + B_AT}], %r1; bra Z; CONSUMER:"""
    release = "@%p4 bra R1; mbarrier.arrive.shared::cta.b64 %rd1, [%r103]; R1:"
    right = p.body.replace(FENCE, barrier + producer + FENCE).replace(WAIT, WAIT + release) + "Z:"
    # All 160 threads take part in the copy of the image; the arrays of the fifth warp are padding.
    right = right.replace("add.u32 %r50, %r50, 128;", "add.u32 %r50, %r50, 160;")
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(p.run(right, schedule, threads=160), p.expected)
    wrong = right.replace(WAIT + release, release + WAIT)
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError, match="through wgmma") as e:
            p.run(wrong, schedule, threads=160)
        assert e.value.kind is ErrorKind.race


@pytest.mark.parametrize(
    "change",
    [
        ("m64n64k16", "m64n60k16"),
        ("m64n64k16", "m64n64k32"),
        ("f32.f16.f16", "f32.f16.bf16"),
        ("f32.f16.f16", "s32.f16.f16"),
        ("%acc31}", "%acc31, %acc32}"),
        (", 1, 1, 0, 0;", ", 1, 2, 0, 0;"),
        (", 1, 1, 0, 0;", ", 1, 1, 0;"),
        ("mma_async.sync", "mma_async.sp.sync"),
    ],
)
def test_unknown_forms_are_refused(change: tuple[str, str]) -> None:
    p = Problem()
    assert p.mma.count(change[0]) == 1
    with pytest.raises(UnknownInstruction):
        p.run(p.body.replace(p.mma, p.mma.replace(*change)))


def test_needs_sm_90a() -> None:
    p = Problem()
    with pytest.raises(UnknownInstruction, match="sm_90a"):
        p.run(target="sm_100a")
