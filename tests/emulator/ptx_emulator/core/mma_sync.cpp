// mma.sync: a warp's matrix product in registers (PTX ISA "Warp Level Matrix Multiply-Accumulate: mma").
//
// All shapes m16n8k* have the same fragment layout. With g = lane / 4 and t = lane % 4, and e elements in a register:
// register r of A holds row g + 8 (r % 2), columns e (t + 4 (r / 2)) ..; register r of B holds rows e (t + 4 r) .. of
// column g; register r of a 32-bit C or D holds row g + 8 (r / 2), column 2 t + r % 2, and a 16-bit one two of these.
#include "alu.h"
#include "numeric.h"

using namespace numeric;

namespace {

enum Type : i64 { kF16, kBf16, kTf32, kE4m3, kE5m2, kS8, kU8 };
enum Accumulator : i64 { kF32, kHalf, kS32 };

float value(Type type, u32 bits) {
  switch (type) {
    case kF16: return half_to_float((u16)bits);
    case kBf16: return bf16_to_float((u16)bits);
    case kTf32: return bit_cast<float>(bits & 0xffffe000u);
    case kE4m3: return tables().e4m3[bits & 255];
    case kE5m2: return tables().e5m2[bits & 255];
    case kS8: return (float)(i8)bits;
    default: return (float)(bits & 255);
  }
}

}  // namespace

// aux: 0 type of A, 1 type of B, 2 K, 3 accumulator, 4 saturate. Operands: registers of D, A, B, C.
HANDLER("mma.sync", Sync) {
  if (lanes != kAllLanes) {
    if (w.exited) fail(ErrorKind::DivergentCollective, &w, &in, "mma.sync with exited lanes");
    return Step::NeedConvergence;
  }
  constexpr u32 kMaxK = 32;
  Type types[2] = {(Type)in.aux[0], (Type)in.aux[1]};
  u32 k_count = (u32)in.aux[2], bits = types[0] == kTf32 ? 32 : types[0] <= kBf16 ? 16 : 8, e = 32 / bits;
  Accumulator accumulator = (Accumulator)in.aux[3];
  u32 registers_a = 16 * k_count * bits / 1024, registers_b = registers_a / 2, registers_d = accumulator == kHalf ? 2 : 4;
  const Operand *d = in.op, *a = d + registers_d, *b = a + registers_a, *c = b + registers_b;
  float left[16][kMaxK], right[kMaxK][8];
  for (u32 lane = 0; lane < kLanes; lane++) {
    u32 g = lane / 4, t = lane % 4;
    for (u32 r = 0; r < registers_a; r++)
      for (u32 j = 0; j < e; j++)
        left[g + 8 * (r % 2)][e * (t + 4 * (r / 2)) + j] = value(types[0], row<u32>(w, a[r])[lane] >> bits * j);
    for (u32 r = 0; r < registers_b; r++)
      for (u32 j = 0; j < e; j++) right[e * (t + 4 * r) + j][g] = value(types[1], row<u32>(w, b[r])[lane] >> bits * j);
  }
  u32 results[4][kLanes] = {};
  for (u32 lane = 0; lane < kLanes; lane++)
    for (u32 n = 0; n < 4; n++) {
      u32 m = lane / 4 + 8 * (n / 2), column = lane % 4 * 2 + n % 2;
      if (accumulator == kS32) {
        i64 sum = (i32)row<u32>(w, c[n])[lane];
        for (u32 k = 0; k < k_count; k++) sum += (i64)left[m][k] * (i64)right[k][column];
        results[n][lane] = (u32)(in.aux[4] ? std::clamp<i64>(sum, INT32_MIN, INT32_MAX) : sum);
        continue;
      }
      u32 half = n % 2 * 16;
      float sum = accumulator == kF32 ? row<float>(w, c[n])[lane] : half_to_float((u16)(row<u32>(w, c[n / 2])[lane] >> half));
      for (u32 k = 0; k < k_count; k++) sum = __builtin_fmaf(left[m][k], right[k][column], sum);
      if (accumulator == kF32) results[n][lane] = bit_cast<u32>(sum);
      else results[n / 2][lane] |= (u32)float_to_half(sum) << half;
    }
  // D may overlap A, B or C, so it is written last.
  for (u32 r = 0; r < registers_d; r++) memcpy(row<u32>(w, d[r]), results[r], sizeof results[r]);
  machine.counters.mma_flops += 2.0 * 16 * 8 * k_count;
  return Step::Done;
}
