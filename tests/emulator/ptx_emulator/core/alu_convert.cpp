// cvt, all modelled forms (PTX ISA "Data Movement and Conversion: cvt").
#include <cmath>
#include <limits>
#include "alu.h"
#include "numeric.h"

using namespace numeric;

namespace {

template <class T>
T clamp_to(double v) {
  if (std::isnan(v)) return std::is_same_v<T, i64> ? (T)(1ull << 63) : (T)0;
  if (v <= (double)std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
  if (v >= (double)std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
  return (T)v;
}
double round_to_integer(double v, i64 mode) {  // 0 rni, 1 rzi, 2 rmi, 3 rpi
  switch (mode) {
    case 0: return std::nearbyint(v);
    case 1: return std::trunc(v);
    case 2: return std::floor(v);
    default: return std::ceil(v);
  }
}
float relu(float v) { return std::isnan(v) ? canonical_nan() : v > 0 ? v : 0.f; }
float half_satfinite(float v) { return std::isnan(v) ? v : std::fmin(std::fmax(v, -65504.f), 65504.f); }
float bf16_satfinite(float v) { return std::isnan(v) ? v : std::fmin(std::fmax(v, -3.38953139e38f), 3.38953139e38f); }
u32 tf32_nearest_away(float f) {
  u32 u = bit_cast<u32>(f);
  return std::isnan(f) ? 0x7fffffffu : std::isinf(f) ? u : (u + 0x1000u) & 0xffffe000u;
}
u32 tf32_nearest_even(float f) {
  u32 u = bit_cast<u32>(f);
  return std::isnan(f) ? 0x7fffffffu : std::isinf(f) ? u : (u + 0xfffu + (u >> 13 & 1)) & 0xffffe000u;
}
u32 tf32_toward_zero(float f) { return std::isnan(f) ? 0x7fffffffu : bit_cast<u32>(f) & 0xffffe000u; }

const SmallFloat &small_format(i64 id) {
  static const SmallFloat *const formats[] = {&kE4M3, &kE5M2, &kE2M1, &kE2M3, &kE3M2};
  return *formats[id];
}

}  // namespace

// ---- integers. Sources are zero-extended in their row unless the handler sign-extends.
UNARY("cvt.u8", u32, u32, x & 0xff)
UNARY("cvt.u16", u32, u32, x & 0xffff)
UNARY("cvt.u32.s8", u32, u32, (u32)(i32)(i8)x)
UNARY("cvt.u16.s8", u32, u32, (u32)(i32)(i8)x & 0xffff)
UNARY("cvt.u32.s16", u32, u32, (u32)(i32)(i16)x)
UNARY("cvt.u64.u8", u64, u32, x & 0xff)
UNARY("cvt.u64.u16", u64, u32, x & 0xffff)
UNARY("cvt.u64.u32", u64, u32, x)
UNARY("cvt.s64.s8", i64, u32, (i8)x)
UNARY("cvt.s64.s16", i64, u32, (i16)x)
UNARY("cvt.s64.s32", i64, i32, x)
UNARY("cvt.u32.u64", u32, u64, x)
UNARY("cvt.u16.u64", u32, u64, x & 0xffff)
UNARY("cvt.u8.u64", u32, u64, x & 0xff)
UNARY("cvt.sat.u8.s32", u32, i32, std::clamp(x, 0, 255))
UNARY("cvt.sat.s8.s32", u32, i32, (u32)std::clamp(x, -128, 127) & 0xff)
UNARY("cvt.sat.u16.s32", u32, i32, std::clamp(x, 0, 65535))
UNARY("cvt.sat.s16.s32", u32, i32, (u32)std::clamp(x, -32768, 32767) & 0xffff)
UNARY("cvt.sat.u32.s32", u32, i32, std::max(x, 0))

// ---- integer to float and back. aux[0]: rounding to integer.
UNARY("cvt.f32.s32", float, i32, x)
UNARY("cvt.f32.u32", float, u32, x)
UNARY("cvt.f32.s16", float, u32, (i16)x)
UNARY("cvt.f32.u16", float, u32, x & 0xffff)
UNARY("cvt.f32.s8", float, u32, (i8)x)
UNARY("cvt.f32.u8", float, u32, x & 0xff)
UNARY("cvt.f32.s64", float, i64, x)
UNARY("cvt.f32.u64", float, u64, x)
UNARY("cvt.f64.s32", double, i32, x)
UNARY("cvt.f64.u32", double, u32, x)
UNARY("cvt.f64.s64", double, i64, x)
UNARY("cvt.f64.u64", double, u64, x)
UNARY("cvt.f16.s32", u32, i32, float_to_half((float)x))
UNARY("cvt.f16.u32", u32, u32, float_to_half((float)x))
UNARY("cvt.f16.s16", u32, u32, float_to_half((float)(i16)x))
UNARY("cvt.f16.u16", u32, u32, float_to_half((float)(x & 0xffff)))
UNARY("cvt.f16.s8", u32, u32, float_to_half((float)(i8)x))
UNARY("cvt.f16.u8", u32, u32, float_to_half((float)(x & 0xff)))
UNARY("cvt.bf16.s32", u32, i32, float_to_bf16((float)x))
UNARY("cvt.bf16.u32", u32, u32, float_to_bf16((float)x))
UNARY("cvt.bf16.s16", u32, u32, float_to_bf16((float)(i16)x))
UNARY("cvt.bf16.u16", u32, u32, float_to_bf16((float)(x & 0xffff)))
UNARY("cvt.bf16.s8", u32, u32, float_to_bf16((float)(i8)x))
UNARY("cvt.bf16.u8", u32, u32, float_to_bf16((float)(x & 0xff)))
UNARY("cvt.s32.f32", i32, float, clamp_to<i32>(round_to_integer(x, in.aux[0])))
UNARY("cvt.u32.f32", u32, float, clamp_to<u32>(round_to_integer(x, in.aux[0])))
UNARY("cvt.s16.f32", u32, float, (u32)clamp_to<i16>(round_to_integer(x, in.aux[0])) & 0xffff)
UNARY("cvt.u16.f32", u32, float, clamp_to<u16>(round_to_integer(x, in.aux[0])))
UNARY("cvt.s8.f32", u32, float, (u32)clamp_to<i8>(round_to_integer(x, in.aux[0])) & 0xff)
UNARY("cvt.u8.f32", u32, float, clamp_to<u8>(round_to_integer(x, in.aux[0])))
UNARY("cvt.s64.f32", i64, float, clamp_to<i64>(round_to_integer(x, in.aux[0])))
UNARY("cvt.u64.f32", u64, float, clamp_to<u64>(round_to_integer(x, in.aux[0])))
UNARY("cvt.s32.f64", i32, double, clamp_to<i32>(round_to_integer(x, in.aux[0])))
UNARY("cvt.u32.f64", u32, double, clamp_to<u32>(round_to_integer(x, in.aux[0])))
UNARY("cvt.s64.f64", i64, double, clamp_to<i64>(round_to_integer(x, in.aux[0])))
UNARY("cvt.u64.f64", u64, double, clamp_to<u64>(round_to_integer(x, in.aux[0])))
UNARY("cvt.s32.f16", i32, u32, clamp_to<i32>(round_to_integer(half_to_float((u16)x), in.aux[0])))
UNARY("cvt.u32.f16", u32, u32, clamp_to<u32>(round_to_integer(half_to_float((u16)x), in.aux[0])))
UNARY("cvt.s16.f16", u32, u32, (u32)clamp_to<i16>(round_to_integer(half_to_float((u16)x), in.aux[0])) & 0xffff)
UNARY("cvt.u16.f16", u32, u32, clamp_to<u16>(round_to_integer(half_to_float((u16)x), in.aux[0])))
UNARY("cvt.round.f32", float, float, (float)round_to_integer(x, in.aux[0]))
UNARY("cvt.round.f64", double, double, round_to_integer(x, in.aux[0]))

// ---- between float types
UNARY("cvt.f32.f16", float, u32, half_to_float((u16)x))
UNARY("cvt.f32.bf16", float, u32, bf16_to_float((u16)x))
UNARY("cvt.f64.f32", double, float, x)
UNARY("cvt.f64.f16", double, u32, half_to_float((u16)x))
UNARY("cvt.f32.f64", float, double, x)
UNARY("cvt.f32.f32", float, float, x)
UNARY("cvt.ftz.f32.f32", float, float, flush(x))
UNARY("cvt.sat.f32.f32", float, float, std::isnan(x) ? 0.f : std::fmin(std::fmax(x, 0.f), 1.f))
UNARY("cvt.f16.f64", u32, double, float_to_half((float)x))
UNARY("cvt.bf16.f16", u32, u32, float_to_bf16(half_to_float((u16)x)))
UNARY("cvt.f16.bf16", u32, u32, float_to_half(bf16_to_float((u16)x)))
UNARY("cvt.rn.f16.f32", u32, float, float_to_half(x))
UNARY("cvt.rz.f16.f32", u32, float, float_to_half_rz(x))
UNARY("cvt.rn.relu.f16.f32", u32, float, float_to_half(relu(x)))
UNARY("cvt.rn.satfinite.f16.f32", u32, float, float_to_half(half_satfinite(x)))
UNARY("cvt.rn.bf16.f32", u32, float, float_to_bf16(x))
UNARY("cvt.rz.bf16.f32", u32, float, float_to_bf16_rz(x))
UNARY("cvt.rn.relu.bf16.f32", u32, float, float_to_bf16(relu(x)))
UNARY("cvt.rn.satfinite.bf16.f32", u32, float, float_to_bf16(bf16_satfinite(x)))
UNARY("cvt.rna.tf32.f32", u32, float, tf32_nearest_away(x))
UNARY("cvt.rn.tf32.f32", u32, float, tf32_nearest_even(x))
UNARY("cvt.rz.tf32.f32", u32, float, tf32_toward_zero(x))
UNARY("cvt.rn.relu.tf32.f32", u32, float, tf32_nearest_even(relu(x)))

// d = {hi: a, lo: b}
BINARY_MIXED("cvt.rn.f16x2.f32", u32, float, float, (u32)float_to_half(x) << 16 | float_to_half(y))
BINARY_MIXED("cvt.rz.f16x2.f32", u32, float, float, (u32)float_to_half_rz(x) << 16 | float_to_half_rz(y))
BINARY_MIXED("cvt.rn.relu.f16x2.f32", u32, float, float, (u32)float_to_half(relu(x)) << 16 | float_to_half(relu(y)))
BINARY_MIXED("cvt.rn.satfinite.f16x2.f32", u32, float, float,
             (u32)float_to_half(half_satfinite(x)) << 16 | float_to_half(half_satfinite(y)))
BINARY_MIXED("cvt.rn.bf16x2.f32", u32, float, float, (u32)float_to_bf16(x) << 16 | float_to_bf16(y))
BINARY_MIXED("cvt.rz.bf16x2.f32", u32, float, float, (u32)float_to_bf16_rz(x) << 16 | float_to_bf16_rz(y))
BINARY_MIXED("cvt.rn.relu.bf16x2.f32", u32, float, float, (u32)float_to_bf16(relu(x)) << 16 | float_to_bf16(relu(y)))
BINARY_MIXED("cvt.rn.satfinite.bf16x2.f32", u32, float, float,
             (u32)float_to_bf16(bf16_satfinite(x)) << 16 | float_to_bf16(bf16_satfinite(y)))

// ---- 8-, 6- and 4-bit floats in pairs. aux[0] format, aux[1] relu, aux[2] bits per element (4 packs into a byte).
HANDLER("cvt.small.from_f32", Plain) {
  const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]);
  const SmallFloat &f = small_format(in.aux[0]);
  each_lane<u32>(w, in.op[0], lanes, [&](int i) -> u32 {
    float hi = in.aux[1] ? relu(a[i]) : a[i], lo = in.aux[1] ? relu(b[i]) : b[i];
    return encode_satfinite(f, hi) << in.aux[2] | encode_satfinite(f, lo);
  });
  return Step::Done;
}
// from f16x2 (aux[3] = 0) or bf16x2 (1)
HANDLER("cvt.small.from_half2", Plain) {
  const u32 *a = row<u32>(w, in.op[1]);
  const SmallFloat &f = small_format(in.aux[0]);
  each_lane<u32>(w, in.op[0], lanes, [&](int i) -> u32 {
    float lo = in.aux[3] ? bf16_to_float((u16)a[i]) : half_to_float((u16)a[i]);
    float hi = in.aux[3] ? bf16_to_float((u16)(a[i] >> 16)) : half_to_float((u16)(a[i] >> 16));
    if (in.aux[1]) lo = relu(lo), hi = relu(hi);
    return encode_satfinite(f, hi) << in.aux[2] | encode_satfinite(f, lo);
  });
  return Step::Done;
}
// to f16x2 or bf16x2 (aux[3])
HANDLER("cvt.small.to_half2", Plain) {
  const u32 *a = row<u32>(w, in.op[1]);
  const SmallFloat &f = small_format(in.aux[0]);
  u32 mask = (1u << in.aux[2]) - 1;
  each_lane<u32>(w, in.op[0], lanes, [&](int i) -> u32 {
    float lo = decode(f, a[i] & mask), hi = decode(f, a[i] >> in.aux[2] & mask);
    if (in.aux[1]) lo = relu(lo), hi = relu(hi);
    return in.aux[3] ? (u32)float_to_bf16(hi) << 16 | float_to_bf16(lo)
                     : (u32)float_to_half(hi) << 16 | float_to_half(lo);
  });
  return Step::Done;
}
// Scale factors. aux[0]: 1 rp, 0 rz.
HANDLER("cvt.ue8m0x2.f32", Plain) {
  const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]);
  Round r = in.aux[0] ? Round::Up : Round::TowardZero;
  each_lane<u32>(w, in.op[0], lanes,
                 [&](int i) -> u32 { return (u32)encode_ue8m0(a[i], r) << 8 | encode_ue8m0(b[i], r); });
  return Step::Done;
}
HANDLER("cvt.ue8m0x2.bf16x2", Plain) {
  const u32 *a = row<u32>(w, in.op[1]);
  Round r = in.aux[0] ? Round::Up : Round::TowardZero;
  each_lane<u32>(w, in.op[0], lanes, [&](int i) -> u32 {
    return (u32)encode_ue8m0(bf16_to_float((u16)(a[i] >> 16)), r) << 8 | encode_ue8m0(bf16_to_float((u16)a[i]), r);
  });
  return Step::Done;
}
UNARY("cvt.bf16x2.ue8m0x2", u32, u32,
      (u32)float_to_bf16(decode_ue8m0((u8)(x >> 8))) << 16 | float_to_bf16(decode_ue8m0((u8)x)))
// s2f6: signed fixed point with 6 fraction bits; scaled by a pair of ue8m0.
BINARY_MIXED("cvt.scaled.bf16x2.s2f6x2", u32, u32, u32,
             (u32)float_to_bf16((float)(i8)(x >> 8) / 64.f * decode_ue8m0((u8)(y >> 8))) << 16 |
                 float_to_bf16((float)(i8)x / 64.f * decode_ue8m0((u8)y)))
BINARY_MIXED("cvt.scaled.bf16x2.e4m3x2", u32, u32, u32,
             (u32)float_to_bf16(decode(kE4M3, x >> 8 & 255) * decode_ue8m0((u8)(y >> 8))) << 16 |
                 float_to_bf16(decode(kE4M3, x & 255) * decode_ue8m0((u8)y)))
