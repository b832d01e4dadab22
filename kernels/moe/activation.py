"""Clamped SwiGLU of one channel on a GPU, to the same bits in every kernel (DeepSeek-V4 specification, section 5)."""

from cutlass import Float32

from dsv4_kernels.device.bf16_rows import add, at_least, at_most, exp, mul, reciprocal


def swiglu(gate: Float32, up: Float32, limit: Float32) -> Float32:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`; every operation is rounded to fp32 by itself."""
    gate = at_most(gate, limit)
    silu = mul(gate, reciprocal(add(Float32(1.0), exp(-gate))))
    return mul(silu, at_most(at_least(up, -limit), limit))
