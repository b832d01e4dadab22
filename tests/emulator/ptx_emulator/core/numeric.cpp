#include "numeric.h"
#include <algorithm>

namespace numeric {

const SmallFloat kE4M3{4, 3, 7, 0x7e, 0x7f, -1};
const SmallFloat kE5M2{5, 2, 15, 0x7b, 0x7f, 0x7c};
const SmallFloat kE2M1{2, 1, 1, 0x7, -1, -1};
const SmallFloat kE2M3{2, 3, 1, 0x1f, -1, -1};
const SmallFloat kE3M2{3, 2, 3, 0x1f, -1, -1};

float decode(const SmallFloat &f, u32 code) {
  int magnitude_bits = f.exponent_bits + f.mantissa_bits;
  u32 sign = code >> magnitude_bits & 1, magnitude = code & ((1u << magnitude_bits) - 1);
  u32 exponent = magnitude >> f.mantissa_bits, mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  float v;
  if (f.inf_code >= 0 && magnitude >= (u32)f.inf_code)
    v = magnitude == (u32)f.inf_code ? INFINITY : NAN;
  else if (f.nan_code >= 0 && magnitude == (u32)f.nan_code)
    v = NAN;
  else if (exponent == 0)
    v = std::ldexp((float)mantissa, 1 - f.bias - f.mantissa_bits);
  else
    v = std::ldexp((float)(mantissa + (1u << f.mantissa_bits)), (int)exponent - f.bias - f.mantissa_bits);
  return sign ? -v : v;
}

u32 encode_satfinite(const SmallFloat &f, float value, Round round) {
  int magnitude_bits = f.exponent_bits + f.mantissa_bits;
  if (std::isnan(value)) return f.nan_code >= 0 ? (u32)f.nan_code : f.max_finite;
  u32 sign = (u32)std::signbit(value) << magnitude_bits;
  double a = std::fabs((double)value);
  if (a == 0) return sign;
  if (std::isinf(a)) return sign | f.max_finite;
  int exponent = std::max(std::ilogb(a), 1 - f.bias);
  double q = std::ldexp(a, f.mantissa_bits - exponent);  // exact: a power-of-two scaling of a float
  q = round == Round::Nearest ? std::nearbyint(q) : round == Round::TowardZero ? std::floor(q) : std::ceil(q);
  // q in [0, 2^(m+1)]; adding it to the biased exponent lets a carry move into the exponent field.
  u32 code = (u32)q + ((u32)(exponent + f.bias - 1) << f.mantissa_bits);
  return sign | std::min(code, f.max_finite);
}

u16 float_to_half_rz(float f) {
  if (std::isnan(f)) return 0x7fff;
  return (u16)_cvtss_sh(f, _MM_FROUND_TO_ZERO);
}

float decode_ue8m0(u8 code) { return code == 0xff ? NAN : std::ldexp(1.f, (int)code - 127); }

u8 encode_ue8m0(float value, Round round) {
  if (std::isnan(value)) return 0xff;
  double a = std::fabs((double)value);
  if (a == 0) return 0;
  if (std::isinf(a)) return 0xfe;
  int e = std::ilogb(a);
  if (round == Round::Up && std::ldexp(1.0, e) < a) e++;
  return (u8)std::clamp(e + 127, 0, 0xfe);
}

Tables::Tables() {
  for (u32 i = 0; i < 256; i++) {
    e4m3[i] = decode(kE4M3, i);
    e5m2[i] = decode(kE5M2, i);
    ue8m0[i] = decode_ue8m0((u8)i);
  }
  for (u32 i = 0; i < 16; i++) e2m1[i] = decode(kE2M1, i);
  for (u32 i = 0; i < 64; i++) e2m3[i] = decode(kE2M3, i), e3m2[i] = decode(kE3M2, i);
}

const Tables &tables() {
  static const Tables t;
  return t;
}

}  // namespace numeric
