"""The host side: arguments, device memory, recordings, tensor maps, and the DSL's state after a block."""

import os
import random

import numpy as np
import pytest
from ptx_emulator import EmulationError, Options, Recording, TensorMapOf, emulated, run_ptx
from ptx_emulator.device.memory import ARENA_BASE, DeviceMemory
from ptx_emulator.device.tensor_map import ElementType, Swizzle, TensorMapError, encode, words

torch = pytest.importorskip("torch", reason="torch is not installed")

SCALE = """
.version 8.6
.target sm_100a
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 factor, .param .u32 n)
{
  .reg .pred %p;
  .reg .b32 %i, %n, %c, %t, %b;
  .reg .f32 %v, %f;
  .reg .b64 %x, %y, %o;
  ld.param.u64 %x, [x];
  ld.param.u64 %y, [y];
  ld.param.f32 %f, [factor];
  ld.param.u32 %n, [n];
  mov.u32 %t, %tid.x;
  mov.u32 %b, %ctaid.x;
  mov.u32 %c, %ntid.x;
  mad.lo.s32 %i, %b, %c, %t;
  setp.ge.s32 %p, %i, %n;
  @%p bra DONE;
  mul.wide.s32 %o, %i, 4;
  add.s64 %x, %x, %o;
  add.s64 %y, %y, %o;
  ld.global.f32 %v, [%x];
  mul.f32 %v, %v, %f;
  st.global.f32 [%y], %v;
DONE:
  ret;
}
"""


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_run_ptx_reads_and_writes_arrays(library: str) -> None:
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    arrays = (x, y) if library == "numpy" else (torch.from_numpy(x), torch.from_numpy(y))
    report = run_ptx(SCALE, "scale", grid=2, block=64, args=[*arrays, 2.5, 100])
    np.testing.assert_array_equal(y, 2.5 * x)
    assert report.grid == (2, 1, 1)


@pytest.mark.parametrize("ends", [(1, 0), (0, 1), (2, 1), (0, 5), (5, 0), (3, 2), (9, 9)], ids=str)
@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_only_the_ends_of_a_grid_run(ends: tuple[int, int], schedule: str) -> None:
    """Five CTAs with 20 elements each, of which the first ones, the last ones or all run."""
    x, y = np.arange(100, dtype=np.float32), np.full(100, -1, np.float32)
    run_ptx(SCALE, "scale", 5, 20, [x, y, 2.0, 100], ends=ends, schedule=schedule)
    first, last = ends
    ran = np.repeat([cta < first or cta >= 5 - last for cta in range(5)], 20)
    np.testing.assert_array_equal(y, np.where(ran, 2 * x, -1))


@pytest.mark.parametrize("ends", [(0, 0), (-1, 3)], ids=str)
def test_ends_that_are_none(ends: tuple[int, int]) -> None:
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="numbers of first and of last clusters"):
        run_ptx(SCALE, "scale", 1, 8, [x, x.copy(), 1.0, 8], ends=ends)


def test_a_grid_that_no_gpu_launches_is_refused() -> None:
    x = np.zeros(8, np.float32)
    for grid in ((1, 65_536, 1), (1, 1, 65_536), (2**31, 1, 1)):
        with pytest.raises(ValueError, match=r"at most .* 65535, 65535"):
            run_ptx(SCALE, "scale", grid, 8, [x, x.copy(), 1.0, 8], ends=(1, 0))


def test_a_slice_is_the_bound_not_its_storage() -> None:
    """A kernel that gets half of a buffer may not read the other half."""
    buffer = torch.zeros(100)
    with pytest.raises(EmulationError) as caught:
        run_ptx(SCALE, "scale", grid=2, block=64, args=[buffer[:50], buffer.clone(), 1.0, 100])
    assert caught.value.kind.name == "out_of_bounds"


def test_views_of_one_storage_share_device_memory() -> None:
    buffer = torch.arange(64, dtype=torch.float32)
    run_ptx(SCALE, "scale", grid=1, block=32, args=[buffer[:32], buffer[32:], 3.0, 32])
    torch.testing.assert_close(buffer[32:], 3.0 * torch.arange(32.0))


def test_arguments_must_fit_their_parameters() -> None:
    with pytest.raises(ValueError, match="4 parameters, got 1"):
        run_ptx(SCALE, "scale", grid=1, block=32, args=[1])


def test_device_memory_is_aligned_and_at_a_fixed_address() -> None:
    with DeviceMemory() as memory:
        assert memory.address_of(np.zeros(3)) == ARENA_BASE
        second = memory.address_of(torch.zeros(7)[2:])
        assert (second - 8) % 512 == 0
        with pytest.raises(RuntimeError, match="another emulated device"):
            DeviceMemory().__enter__()


def test_freed_storage_is_dropped() -> None:
    with DeviceMemory() as memory:
        tensor = torch.zeros(16)
        memory.address_of(tensor)
        del tensor
        with memory.on_device():
            assert list(memory.extents()) == []


def test_read_only_arrays_are_not_written_back() -> None:
    array = np.frombuffer(bytes(16), np.uint8)
    with DeviceMemory() as memory:
        memory.address_of(array)
        with memory.on_device():
            pass


# ---- recordings


def test_a_recorded_launch_replays_from_disk(tmp_path: "os.PathLike[str]") -> None:
    from ptx_emulator import Device

    x, y = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    with Device(Options(), record=True) as device:
        device.run_ptx(SCALE, "scale", 1, 32, [x, y, 2.0, 32])
    path = os.path.join(tmp_path, "launch.npz")
    device.recordings[0].save(path)
    report, memory = Recording.load(path).replay(Options(schedule="random", seed=1))
    assert memory[1] == y.tobytes() and report.kernel == "scale"
    doubled = SCALE.replace("mul.f32 %v, %v, %f;", "mul.f32 %v, %v, %f; add.f32 %v, %v, %v;")
    _, memory = Recording.load(path).replay(Options(), doubled)
    assert memory[1] == (2 * y).tobytes()


# ---- tensor maps


def test_encoder_agrees_with_the_driver() -> None:
    """The words are from cuTensorMapEncodeTiled on a Hopper GPU (driver 580), whose version nibble is 0 where sm_100a
    has 2, and which adds the box's bytes in word 8."""
    f16 = ElementType.F16
    address = 0x7F1234567000

    def ours(**changes: object) -> list[int]:
        arguments: dict = {
            "element_type": f16,
            "sizes": (512, 256),
            "strides_bytes": (1024,),
            "box": (64, 32),
            "swizzle": Swizzle.B128,
        } | changes
        got = list(words(encode(address, **arguments)))
        got[1] &= ~0xF
        return got[1:8]

    assert ours() == [0x4000006310, 0, 0, 0xFF000001FF, 0, 0x3F00000000000000, 0x1F]
    assert ours(oob_nan=True)[0] == 0x400000E310
    assert ours(l2_promotion=2)[0] == 0x4000046310
    assert ours(swizzle=Swizzle.B64, box=(32, 32))[0] == 0x4000004310
    assert ours(element_strides=(1, 2))[5] == 0x3F00000800000000
    assert ours(element_type=ElementType.BF16)[0] == 0x4000006510
    tf32 = ours(element_type=ElementType.TF32, strides_bytes=(2048,), box=(8, 32), swizzle=Swizzle(0))
    assert tf32[0] == 0x8000010390
    five = ours(
        sizes=(512, 33, 17, 9, 8),
        strides_bytes=(1024, 33792, 574464, 5170176),
        box=(64, 2, 3, 4, 5),
    )
    assert five == [
        0x4000006340,
        0x8C4000000840,
        0x4EE40,
        0x20000001FF,
        0x800000010,
        0x3F00000000000007,
        0x4030201,
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"address": 8}, "multiple of 16"),
        ({"strides_bytes": (1000,)}, "stride 1000"),
        ({"box": (64, 257)}, "box size 257"),
        ({"box": (128, 8), "swizzle": Swizzle.B128}, "exceeds the B128 span"),
        ({"box": (4, 8)}, "inner box of 8 bytes"),
        ({"element_strides": (1, 9)}, "element stride 9"),
    ],
)
def test_encoder_refuses_what_the_driver_refuses(changes: dict, message: str) -> None:
    arguments: dict = {
        "address": 0,
        "element_type": ElementType.F16,
        "sizes": (512, 256),
        "strides_bytes": (1024,),
        "box": (64, 32),
    } | changes
    with pytest.raises(TensorMapError, match=message):
        encode(**arguments)


TMA_COPY = """
.version 8.6
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry copy(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 bytes,
                     .param .u32 x, .param .u32 y)
{
  .reg .pred %p;
  .reg .b32 %bar, %dst, %bytes, %x, %y, %t, %i, %v, %a;
  .reg .b64 %map, %out, %o;
  mov.b64 %map, map;
  ld.param.u64 %out, [out];
  ld.param.u32 %bytes, [bytes];
  ld.param.u32 %x, [x];
  ld.param.u32 %y, [y];
  mov.u32 %dst, smem;
  add.s32 %bar, %dst, %bytes;
  mov.u32 %t, %tid.x;
  setp.ne.s32 %p, %t, 0;
  @%p bra WAIT;
  mbarrier.init.shared.b64 [%bar], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared.b64 _, [%bar], %bytes;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%dst], [%map, {%x, %y}], [%bar];
WAIT:
  bar.sync 0;
LOOP:
  mbarrier.try_wait.parity.shared.b64 %p, [%bar], 0;
  @!%p bra LOOP;
  shl.b32 %i, %t, 2;
NEXT:
  add.s32 %a, %dst, %i;
  ld.shared.b32 %v, [%a];
  cvt.u64.u32 %o, %i;
  add.s64 %o, %out, %o;
  st.global.b32 [%o], %v;
  add.s32 %i, %i, 128;
  setp.lt.u32 %p, %i, %bytes;
  @%p bra NEXT;
  ret;
}
"""


def swizzled(tile: np.ndarray, swizzle: Swizzle) -> np.ndarray:
    """A dense tile after TMA's swizzle: address bits 7-9 exchange 16-byte chunks, or bits 7-8 exchange 32-byte
    chunks."""
    chunks = tile.reshape(-1, 16)
    out = np.empty_like(chunks)
    mask = (1 << swizzle) - 1
    for n, chunk in enumerate(chunks):
        out[n ^ (n >> 2 & 6 if swizzle is Swizzle.B128_ATOM32 else n >> 3 & mask)] = chunk
    return out.reshape(-1)


@pytest.mark.parametrize("swizzle", list(Swizzle))
@pytest.mark.parametrize("corner", [(0, 0), (480, 250), (-8, 3)], ids=["inside", "ragged", "negative"])
def test_tma_load_with_an_encoded_map(swizzle: Swizzle, corner: tuple[int, int]) -> None:
    """Every swizzle, and zero fill beyond all four sides."""
    rng = random.Random(0)
    tensor = np.array([[rng.random() for _ in range(512)] for _ in range(256)], np.float16)
    width = 8 << min(swizzle, Swizzle.B128)
    padded = np.zeros((256 + 128, 512 + 256), np.float16)
    padded[64 : 64 + 256, 128 : 128 + 512] = tensor
    x, y = corner
    tile = padded[64 + y : 64 + y + 32, 128 + x : 128 + x + width]
    nbytes = tile.size * 2
    out = np.zeros(nbytes, np.uint8)
    tensor_map = TensorMapOf(tensor, (width, 32), ElementType.F16, swizzle)
    run_ptx(TMA_COPY, "copy", 1, 32, [tensor_map, out, nbytes, x, y], dynamic_smem_bytes=nbytes + 64)
    expected = swizzled(np.ascontiguousarray(tile).view(np.uint8), swizzle)
    np.testing.assert_array_equal(out, expected)


# ---- CuTe DSL


def test_cute_dsl_kernel_on_cpu_tensors() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator.samples.attention import attention, attention_ref

    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, 64).half() for rows in (256, 192, 192))
    with emulated(schedule="random", seed=5) as device:
        out = attention(query, key, value)
    expected = attention_ref(query, key, value)
    error = (out.double() - expected).norm() / expected.norm()
    # f16 rounding of P and of the output: 2^-11 each.
    assert error < 2 * 2**-11
    (report,) = device.reports
    assert report.grid == (2, 1, 1) and report.block == (192, 1, 1)


def test_a_block_restores_everything() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cute import runtime

    def state() -> list[object]:
        envars = [vars(dsl.envar).copy() for dsl in DSLSingletonMeta._instances.values()]
        return [envars, os.environ.copy(), runtime._Tensor.__init__, torch.Tensor.data_ptr]

    with emulated():
        pass
    before = state()
    with emulated():
        assert state() != before
    assert state() == before


def test_errors_come_from_the_call_that_launched() -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from ptx_emulator.samples.attention import Plan, attention

    tensors = [torch.randn(128, 64).half() for _ in range(3)]
    with emulated():
        with pytest.raises(EmulationError, match="dealloc"):
            attention(*tensors, Plan(free_tmem=False))
        attention(*tensors)
