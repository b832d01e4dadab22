// Floating-point arithmetic in f32, f32x2, f64 and the half types (PTX ISA "Floating Point", "Half Precision").
// Approximate functions are computed to better than their documented error; .ftz flushes inputs and results.
#include <cmath>
#include "alu.h"
#include "numeric.h"

using namespace numeric;

namespace {

struct F2 {
  float x, y;
};

// Directed rounding through the control register; the barriers keep the compiler from moving the arithmetic out.
class Rounding {
 public:
  explicit Rounding(u32 mode) : saved_(_MM_GET_ROUNDING_MODE()) {
    _MM_SET_ROUNDING_MODE(mode);
    asm volatile("" ::: "memory");
  }
  ~Rounding() {
    asm volatile("" ::: "memory");
    _MM_SET_ROUNDING_MODE(saved_);
  }

 private:
  u32 saved_;
};
float saturate(float v) { return std::isnan(v) ? 0.f : std::fmin(std::fmax(v, 0.f), 1.f); }
float relu(float v) { return std::isnan(v) ? canonical_nan() : v > 0 ? v : 0.f; }

u32 half2(float lo, float hi) { return (u32)float_to_half(hi) << 16 | float_to_half(lo); }
u32 bf16x2(float lo, float hi) { return (u32)float_to_bf16(hi) << 16 | float_to_bf16(lo); }
float half_lo(u32 x) { return half_to_float((u16)x); }
float half_hi(u32 x) { return half_to_float((u16)(x >> 16)); }
float bf_lo(u32 x) { return bf16_to_float((u16)x); }
float bf_hi(u32 x) { return bf16_to_float((u16)(x >> 16)); }
// The exact result of a*b+c of halves needs more than a float; a double holds it.
u16 half_fma(u16 a, u16 b, u16 c) {
  double v = std::fma((double)half_to_float(a), (double)half_to_float(b), (double)half_to_float(c));
  float f = (float)v;  // round to odd, so that the second rounding is harmless
  if ((double)f != v && std::isfinite(f)) {
    u32 u = bit_cast<u32>(f);
    if (std::fabs((double)f) > std::fabs(v)) u--;
    f = bit_cast<float>(u | 1);
  }
  return float_to_half(f);
}
u16 bf16_fma(u16 a, u16 b, u16 c) {
  double v = std::fma((double)bf16_to_float(a), (double)bf16_to_float(b), (double)bf16_to_float(c));
  float f = (float)v;
  if ((double)f != v && std::isfinite(f)) {
    u32 u = bit_cast<u32>(f);
    if (std::fabs((double)f) > std::fabs(v)) u--;
    f = bit_cast<float>(u | 1);
  }
  return float_to_bf16(f);
}

}  // namespace

#define FLOAT_BINARY(mnemonic, expr)                      \
  BINARY(mnemonic ".f32", float, expr)                    \
  HANDLER(mnemonic ".ftz.f32", Plain) {                   \
    const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]); \
    each_lane<float>(w, in.op[0], lanes, [&](int i) { \
      float x = flush(a[i]), y = flush(b[i]);       \
      return flush(expr);                           \
    });                                             \
    return Step::Done;                              \
  }
FLOAT_BINARY("add", x + y)
FLOAT_BINARY("sub", x - y)
FLOAT_BINARY("mul", x *y)
FLOAT_BINARY("div", x / y)
FLOAT_BINARY("min", min_number(x, y))
FLOAT_BINARY("max", max_number(x, y))
FLOAT_BINARY("min.NaN", min_nan(x, y))
FLOAT_BINARY("max.NaN", max_nan(x, y))
FLOAT_BINARY("add.sat", saturate(x + y))
FLOAT_BINARY("sub.sat", saturate(x - y))
FLOAT_BINARY("mul.sat", saturate(x *y))
BINARY("copysign.f32", u32, (x & 0x80000000u) | (y & 0x7fffffffu))
TERNARY("fma.f32", float, __builtin_fmaf(x, y, z))
TERNARY("fma.ftz.f32", float, flush(__builtin_fmaf(flush(x), flush(y), flush(z))))
TERNARY("fma.sat.f32", float, saturate(__builtin_fmaf(x, y, z)))
TERNARY("fma.sat.ftz.f32", float, saturate(flush(__builtin_fmaf(flush(x), flush(y), flush(z)))))
TERNARY("fma.relu.f32", float, relu(__builtin_fmaf(x, y, z)))
TERNARY("min3.f32", float, min_number(min_number(x, y), z))
TERNARY("max3.f32", float, max_number(max_number(x, y), z))
TERNARY("min3.NaN.f32", float, min_nan(min_nan(x, y), z))
TERNARY("max3.NaN.f32", float, max_nan(max_nan(x, y), z))
TERNARY("min3.ftz.f32", float, min_number(min_number(flush(x), flush(y)), flush(z)))
TERNARY("max3.ftz.f32", float, max_number(max_number(flush(x), flush(y)), flush(z)))

#define DIRECTED(suffix, mode)                                                                      \
  HANDLER("add." suffix ".f32", Plain) {                                                            \
    Rounding r(mode);                                                                               \
    const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]);                         \
    each_lane<float>(w, in.op[0], lanes, [&](int i) {                                               \
      return in.aux[0] ? flush(flush(a[i]) + flush(b[i])) : a[i] + b[i];                            \
    });                                                                                             \
    return Step::Done;                                                                              \
  }                                                                                                 \
  HANDLER("sub." suffix ".f32", Plain) {                                                            \
    Rounding r(mode);                                                                               \
    const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]);                         \
    each_lane<float>(w, in.op[0], lanes, [&](int i) {                                               \
      return in.aux[0] ? flush(flush(a[i]) - flush(b[i])) : a[i] - b[i];                            \
    });                                                                                             \
    return Step::Done;                                                                              \
  }                                                                                                 \
  HANDLER("mul." suffix ".f32", Plain) {                                                            \
    Rounding r(mode);                                                                               \
    const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]);                         \
    each_lane<float>(w, in.op[0], lanes, [&](int i) {                                               \
      return in.aux[0] ? flush(flush(a[i]) * flush(b[i])) : a[i] * b[i];                            \
    });                                                                                             \
    return Step::Done;                                                                              \
  }                                                                                                 \
  HANDLER("div." suffix ".f32", Plain) {                                                            \
    Rounding r(mode);                                                                               \
    const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]);                         \
    each_lane<float>(w, in.op[0], lanes, [&](int i) { return a[i] / b[i]; });                       \
    return Step::Done;                                                                              \
  }                                                                                                 \
  HANDLER("fma." suffix ".f32", Plain) {                                                            \
    Rounding r(mode);                                                                               \
    const float *a = row<float>(w, in.op[1]), *b = row<float>(w, in.op[2]), *c = row<float>(w, in.op[3]); \
    each_lane<float>(w, in.op[0], lanes, [&](int i) {                                               \
      return in.aux[0] ? flush(__builtin_fmaf(flush(a[i]), flush(b[i]), flush(c[i])))               \
                       : __builtin_fmaf(a[i], b[i], c[i]);                                          \
    });                                                                                             \
    return Step::Done;                                                                              \
  }                                                                                                 \
  HANDLER("add." suffix ".f32x2", Plain) {                                                          \
    Rounding r(mode);                                                                               \
    const F2 *a = row<F2>(w, in.op[1]), *b = row<F2>(w, in.op[2]);                                  \
    each_lane<F2>(w, in.op[0], lanes, [&](int i) { return F2{a[i].x + b[i].x, a[i].y + b[i].y}; }); \
    return Step::Done;                                                                              \
  }
DIRECTED("rz", _MM_ROUND_TOWARD_ZERO)
DIRECTED("rm", _MM_ROUND_DOWN)
DIRECTED("rp", _MM_ROUND_UP)

#define FLOAT_UNARY(mnemonic, expr)     \
  UNARY(mnemonic ".f32", float, float, expr) \
  HANDLER(mnemonic ".ftz.f32", Plain) { \
    const float *a = row<float>(w, in.op[1]); \
    each_lane<float>(w, in.op[0], lanes, [&](int i) { \
      float x = flush(a[i]);      \
      return flush(expr);         \
    });                           \
    return Step::Done;            \
  }
FLOAT_UNARY("neg", -x)
FLOAT_UNARY("abs", std::fabs(x))
FLOAT_UNARY("ex2", std::exp2(x))
FLOAT_UNARY("lg2", std::log2(x))
FLOAT_UNARY("rcp", 1.f / x)
FLOAT_UNARY("rsqrt", (float)(1.0 / std::sqrt((double)x)))
FLOAT_UNARY("sqrt", std::sqrt(x))
FLOAT_UNARY("sin", std::sin(x))
FLOAT_UNARY("cos", std::cos(x))
FLOAT_UNARY("tanh", std::tanh(x))

#define PACKED_BINARY(mnemonic, expr1, expr2)                                  \
  HANDLER(mnemonic ".f32x2", Plain) {                                          \
    const F2 *a = row<F2>(w, in.op[1]), *b = row<F2>(w, in.op[2]);       \
    each_lane<F2>(w, in.op[0], lanes, [&](int i) {                       \
      F2 x = a[i], y = b[i];                                             \
      return F2{expr1, expr2};                                           \
    });                                                                  \
    return Step::Done;                                                   \
  }                                                                      \
  HANDLER(mnemonic ".ftz.f32x2", Plain) {                                      \
    const F2 *a = row<F2>(w, in.op[1]), *b = row<F2>(w, in.op[2]);       \
    each_lane<F2>(w, in.op[0], lanes, [&](int i) {                       \
      F2 x{flush(a[i].x), flush(a[i].y)}, y{flush(b[i].x), flush(b[i].y)}; \
      return F2{flush(expr1), flush(expr2)};                             \
    });                                                                  \
    return Step::Done;                                                   \
  }
PACKED_BINARY("add", x.x + y.x, x.y + y.y)
PACKED_BINARY("sub", x.x - y.x, x.y - y.y)
PACKED_BINARY("mul", x.x *y.x, x.y *y.y)
HANDLER("fma.f32x2", Plain) {
  const F2 *a = row<F2>(w, in.op[1]), *b = row<F2>(w, in.op[2]), *c = row<F2>(w, in.op[3]);
  each_lane<F2>(w, in.op[0], lanes, [&](int i) {
    return F2{__builtin_fmaf(a[i].x, b[i].x, c[i].x), __builtin_fmaf(a[i].y, b[i].y, c[i].y)};
  });
  return Step::Done;
}
HANDLER("fma.ftz.f32x2", Plain) {
  const F2 *a = row<F2>(w, in.op[1]), *b = row<F2>(w, in.op[2]), *c = row<F2>(w, in.op[3]);
  each_lane<F2>(w, in.op[0], lanes, [&](int i) {
    return F2{flush(__builtin_fmaf(flush(a[i].x), flush(b[i].x), flush(c[i].x))),
              flush(__builtin_fmaf(flush(a[i].y), flush(b[i].y), flush(c[i].y)))};
  });
  return Step::Done;
}

BINARY("add.f64", double, x + y)
BINARY("sub.f64", double, x - y)
BINARY("mul.f64", double, x *y)
BINARY("div.f64", double, x / y)
BINARY("min.f64", double, std::fmin(x, y))
BINARY("max.f64", double, std::fmax(x, y))
TERNARY("fma.f64", double, std::fma(x, y, z))
UNARY("neg.f64", double, double, -x)
UNARY("abs.f64", double, double, std::fabs(x))
UNARY("rcp.f64", double, double, 1.0 / x)
UNARY("sqrt.f64", double, double, std::sqrt(x))

// Half types: the operation on floats, then one rounding. A float holds the exact sum or product of two halves well
// enough that rounding twice equals rounding once (24 >= 2 * 11 + 2); the fused forms go through a double.
#define HALF_BINARY(mnemonic, expr)                                                                     \
  BINARY_MIXED(mnemonic ".f16", u32, u32, u32, ([](float x, float y) { return float_to_half(expr); })(half_lo(x), half_lo(y))) \
  BINARY_MIXED(mnemonic ".bf16", u32, u32, u32, ([](float x, float y) { return float_to_bf16(expr); })(bf_lo(x), bf_lo(y))) \
  BINARY_MIXED(mnemonic ".f16x2", u32, u32, u32,                                                        \
               half2(([](float x, float y) { return expr; })(half_lo(x), half_lo(y)),              \
                     ([](float x, float y) { return expr; })(half_hi(x), half_hi(y))))             \
  BINARY_MIXED(mnemonic ".bf16x2", u32, u32, u32,                                                       \
               bf16x2(([](float x, float y) { return expr; })(bf_lo(x), bf_lo(y)),                 \
                      ([](float x, float y) { return expr; })(bf_hi(x), bf_hi(y))))
HALF_BINARY("add", x + y)
HALF_BINARY("sub", x - y)
HALF_BINARY("mul", x *y)
HALF_BINARY("min", min_number(x, y))
HALF_BINARY("max", max_number(x, y))
HALF_BINARY("min.NaN", min_nan(x, y))
HALF_BINARY("max.NaN", max_nan(x, y))
TERNARY("fma.f16", u32, half_fma((u16)x, (u16)y, (u16)z))
TERNARY("fma.bf16", u32, bf16_fma((u16)x, (u16)y, (u16)z))
TERNARY("fma.f16x2", u32,
        (u32)half_fma((u16)(x >> 16), (u16)(y >> 16), (u16)(z >> 16)) << 16 | half_fma((u16)x, (u16)y, (u16)z))
TERNARY("fma.bf16x2", u32,
        (u32)bf16_fma((u16)(x >> 16), (u16)(y >> 16), (u16)(z >> 16)) << 16 | bf16_fma((u16)x, (u16)y, (u16)z))
TERNARY("fma.relu.f16x2", u32,
        half2(relu(half_lo(half_fma((u16)x, (u16)y, (u16)z))),
              relu(half_lo(half_fma((u16)(x >> 16), (u16)(y >> 16), (u16)(z >> 16))))))
TERNARY("fma.relu.bf16x2", u32,
        bf16x2(relu(bf_lo(bf16_fma((u16)x, (u16)y, (u16)z))),
               relu(bf_lo(bf16_fma((u16)(x >> 16), (u16)(y >> 16), (u16)(z >> 16))))))
UNARY("neg.f16", u32, u32, x ^ 0x8000u)
UNARY("neg.f16x2", u32, u32, x ^ 0x80008000u)
UNARY("abs.f16", u32, u32, x & 0x7fffu)
UNARY("abs.f16x2", u32, u32, x & 0x7fff7fffu)
UNARY("ex2.f16", u32, u32, float_to_half(std::exp2(half_lo(x))))
UNARY("ex2.f16x2", u32, u32, half2(std::exp2(half_lo(x)), std::exp2(half_hi(x))))
UNARY("ex2.bf16", u32, u32, float_to_bf16(std::exp2(bf_lo(x))))
UNARY("ex2.bf16x2", u32, u32, bf16x2(std::exp2(bf_lo(x)), std::exp2(bf_hi(x))))
UNARY("tanh.f16", u32, u32, float_to_half(std::tanh(half_lo(x))))
UNARY("tanh.f16x2", u32, u32, half2(std::tanh(half_lo(x)), std::tanh(half_hi(x))))
UNARY("tanh.bf16", u32, u32, float_to_bf16(std::tanh(bf_lo(x))))
UNARY("tanh.bf16x2", u32, u32, bf16x2(std::tanh(bf_lo(x)), std::tanh(bf_hi(x))))
// Mixed precision: f32 accumulator, half operands (sm_100).
BINARY_MIXED("add.f32.f16", float, u32, float, half_lo(x) + y)
BINARY_MIXED("add.f32.bf16", float, u32, float, bf_lo(x) + y)
BINARY_MIXED("sub.f32.f16", float, u32, float, half_lo(x) - y)
BINARY_MIXED("sub.f32.bf16", float, u32, float, bf_lo(x) - y)
TERNARY_MIXED("fma.f32.f16", float, u32, u32, float, __builtin_fmaf(half_lo(x), half_lo(y), z))
TERNARY_MIXED("fma.f32.bf16", float, u32, u32, float, __builtin_fmaf(bf_lo(x), bf_lo(y), z))

// testp: aux[0] selects the property.
HANDLER("testp.f32", Plain) {
  const float *a = row<float>(w, in.op[1]);
  u32 bits = 0;
  for (int i : lanes_of(lanes)) {
    float x = a[i];
    bool v = false;
    switch (in.aux[0]) {
      case 0: v = std::isfinite(x); break;
      case 1: v = std::isinf(x); break;
      case 2: v = !std::isnan(x); break;
      case 3: v = std::isnan(x); break;
      case 4: v = std::isnormal(x); break;
      case 5: v = x != 0 && !std::isnormal(x) && std::isfinite(x); break;
    }
    bits |= (u32)v << i;
  }
  set_predicate(w, in.op[0], lanes, bits);
  return Step::Done;
}
