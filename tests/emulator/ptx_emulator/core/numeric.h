// Number formats of the PTX ISA (section "Data types"): decode to float, encode with an exact rounding.
#pragma once
#include <cmath>
#include <immintrin.h>
#include "types.h"

namespace numeric {

static inline float half_to_float(u16 h) { return _cvtsh_ss(h); }
static inline u16 float_to_half(float f) {
  return std::isnan(f) ? 0x7fff : (u16)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
}
static inline float bf16_to_float(u16 h) { return bit_cast<float>((u32)h << 16); }
static inline u16 float_to_bf16(float f) {
  u32 u = bit_cast<u32>(f);
  if (std::isnan(f)) return 0x7fff;
  return (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static inline u16 float_to_bf16_rz(float f) { return std::isnan(f) ? 0x7fff : (u16)(bit_cast<u32>(f) >> 16); }
u16 float_to_half_rz(float f);

enum class Round { Nearest, TowardZero, Up };

// A small binary float: `exponent_bits` biased by `bias`, `mantissa_bits` stored, subnormals, no implicit saturation.
struct SmallFloat {
  int exponent_bits, mantissa_bits, bias;
  u32 max_finite;  // code of the largest finite magnitude
  int nan_code;    // -1: the format has no NaN
  int inf_code;    // -1: the format has no infinity
};
extern const SmallFloat kE4M3, kE5M2, kE2M1, kE2M3, kE3M2;

float decode(const SmallFloat &format, u32 code);
// cvt.{rn}.satfinite: overflow goes to the largest finite value; NaN goes to NaN, or to +max in a format without NaN.
u32 encode_satfinite(const SmallFloat &format, float value, Round round = Round::Nearest);

float decode_ue8m0(u8 code);
u8 encode_ue8m0(float value, Round round);  // rz or rp, satfinite

// Decoded values of every code, for the tensor core's operand loads.
struct Tables {
  float e4m3[256], e5m2[256], e2m1[16], e2m3[64], e3m2[64], ue8m0[256];
  Tables();
};
const Tables &tables();

static inline float flush(float f) { return std::fabs(f) < 1.17549435e-38f ? std::copysign(0.f, f) : f; }
static inline float canonical_nan() { return bit_cast<float>(0x7fffffffu); }
// min/max of IEEE 754-2019 minimumNumber/maximumNumber: NaN loses, -0 < +0.
static inline float max_number(float x, float y) {
  if (std::isnan(x)) return std::isnan(y) ? canonical_nan() : y;
  if (std::isnan(y)) return x;
  if (x == y) return bit_cast<float>(bit_cast<u32>(x) & bit_cast<u32>(y));
  return x > y ? x : y;
}
static inline float min_number(float x, float y) {
  if (std::isnan(x)) return std::isnan(y) ? canonical_nan() : y;
  if (std::isnan(y)) return x;
  if (x == y) return bit_cast<float>(bit_cast<u32>(x) | bit_cast<u32>(y));
  return x < y ? x : y;
}
static inline float max_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? canonical_nan() : max_number(x, y);
}
static inline float min_nan(float x, float y) {
  return std::isnan(x) || std::isnan(y) ? canonical_nan() : min_number(x, y);
}

}  // namespace numeric
