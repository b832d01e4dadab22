"""Refusals of the decoder, and the location in errors."""

import numpy as np
import pytest
from ptx_emulator import EmulationError, ErrorKind, Program, UnknownInstruction
from ptx_emulator.samples.handwritten import kernel, run


@pytest.mark.parametrize(
    "text",
    [
        "frobnicate.u32 %r1, %r2;",
        "add.sparkling.u32 %r1, %r2, %r3;",
        "add.u32 %r1, %r2;",
        "add.u32 %r1, %r2, %rd1;",
        "ld.global.v3.b32 {%r1,%r2,%r3}, [%rd100];",
        "tcgen05.mma.cta_group::1.kind::f12 [%r1], %rd1, %rd2, %r3, %p1;",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];",
        "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];",
        "mov.u32 %r1, %r9999;",
        "bra NOWHERE;",
    ],
)
def test_unknown_forms_are_refused(text: str) -> None:
    program = Program.from_ptx(kernel(text, 1))
    with pytest.raises(UnknownInstruction):
        program.kernel("k")


def test_refusal_names_line_and_text() -> None:
    ptx = kernel("add.u32 %r1, %r2, %r3;\nwhatever.b32 %r1;", 0)
    with pytest.raises(UnknownInstruction) as e:
        Program.from_ptx(ptx).kernel("k")
    assert e.value.line == ptx[: ptx.index("whatever")].count("\n") + 1
    assert "whatever.b32 %r1" in e.value.text


def test_error_names_line_warp_and_source() -> None:
    body = ".loc 1 42 3\n@!%p1 bra GO;\nGO: setp.ne.u32 %p2, %r102, 1; @%p2 bra END;\nld.global.u32 %r1, [%rd100+4096];\nEND:"
    ptx_line_text = "ld.global.u32 %r1, [%rd100+4096]"
    with pytest.raises(EmulationError) as e:
        run(body, np.zeros(32, np.uint32), threads=64)
    assert e.value.kind is ErrorKind.out_of_bounds
    assert e.value.warp == 1 and e.value.ptx_text == ptx_line_text and e.value.source.endswith(":42")
    assert "p0" in e.value.message


def test_scopes_shadow_registers_and_labels() -> None:
    out = np.zeros(32, np.uint32)
    run(
        """mov.u32 %r1, 5;
    { .reg .b32 %r1; mov.u32 %r1, 7; bra L; L: st.global.u32 [%rd100], %r1; }
    { .reg .b32 t; mov.u32 t, 9; bra L; L: st.global.u32 [%rd100+4], t; }
    st.global.u32 [%rd100+8], %r1;""",
        out,
        threads=1,
    )
    assert out[:3].tolist() == [7, 9, 5]


def test_vector_registers() -> None:
    out = np.zeros(4, np.float32)
    run(
        """{ .reg .v4 .f32 quad; .reg .v2 .b32 pair; mov.f32 quad.x, 1.0; mov.f32 quad.y, 2.0; mov.f32 quad.z, 3.0; mov.f32 quad.w, 4.0;
    st.global.v4.f32 [%rd100], quad; ld.global.v2.b32 pair, [%rd100+8]; add.f32 pair.x, pair.x, pair.y; st.global.b32 [%rd100], pair.x; }""",
        out,
    )
    np.testing.assert_array_equal(out, [7, 2, 3, 4])
