// Moves, packing, special registers, predicates and comparisons.
#include <cmath>
#include "alu.h"
#include "memory.h"
#include "numeric.h"

UNARY_KIND("mov.b32", Move, u32, u32, x)
UNARY_KIND("mov.b64", Move, u64, u64, x)
UNARY_KIND("mov.b128", Move, u128, u128, x)
UNARY("cvta.shared", u64, u64, x + kSharedWindow)
UNARY("cvta.to.shared", u64, u64, x - kSharedWindow)
UNARY("cvta.local", u64, u64, x + kLocalWindow)
UNARY("cvta.to.local", u64, u64, x - kLocalWindow)

// aux[0]: bits per element. Operands: destination, then sources from the low end.
HANDLER("pack", Move) {
  u32 n = in.operand_count - 1, bits = (u32)in.aux[0], total = bits * n;
  u64 mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
  for (int i : lanes_of(lanes)) {
    u128 v = 0;
    for (u32 k = 0; k < n; k++) {
      u64 x = bits == 64 ? row<u64>(w, in.op[1 + k])[i] : row<u32>(w, in.op[1 + k])[i];
      v |= (u128)(x & mask) << (bits * k);
    }
    if (total == 128) row<u128>(w, in.op[0])[i] = v;
    else if (total == 64) row<u64>(w, in.op[0])[i] = (u64)v;
    else row<u32>(w, in.op[0])[i] = (u32)v;
  }
  return Step::Done;
}
// Operands: destinations from the low end, then the source.
HANDLER("unpack", Move) {
  u32 n = in.operand_count - 1, bits = (u32)in.aux[0], total = bits * n;
  u64 mask = bits == 64 ? ~0ull : (1ull << bits) - 1;
  for (int i : lanes_of(lanes)) {
    u128 v = total == 128 ? row<u128>(w, in.op[n])[i]
             : total == 64 ? (u128)row<u64>(w, in.op[n])[i] : (u128)row<u32>(w, in.op[n])[i];
    for (u32 k = 0; k < n; k++) {
      if (in.op[k] == kNone) continue;
      u64 x = (u64)(v >> (bits * k)) & mask;
      if (bits == 64) row<u64>(w, in.op[k])[i] = x;
      else row<u32>(w, in.op[k])[i] = (u32)x;
    }
  }
  return Step::Done;
}
HANDLER("pack.2x32", Move) {
  const u32 *a = row<u32>(w, in.op[1]), *b = row<u32>(w, in.op[2]);
  each_lane<u64>(w, in.op[0], lanes, [&](int i) { return (u64)b[i] << 32 | a[i]; });
  return Step::Done;
}
HANDLER("unpack.2x32", Move) {
  u64 t[kLanes];
  memcpy(t, row<u64>(w, in.op[2]), sizeof t);
  if (in.op[0] != kNone) each_lane<u32>(w, in.op[0], lanes, [&](int i) { return (u32)t[i]; });
  if (in.op[1] != kNone) each_lane<u32>(w, in.op[1], lanes, [&](int i) { return (u32)(t[i] >> 32); });
  return Step::Done;
}

// aux[0]: which register, in the order of SPECIAL_REGISTERS in decoder.py; aux[1]: bytes of the destination.
HANDLER("mov.special", Plain) {
  const Cta &c = *w.cta;
  const Machine &m = machine;
  const Grid &grid = *c.cluster->grid;
  for (int i : lanes_of(lanes)) {
    u32 t = w.index * kLanes + (u32)i;
    i64 which = in.aux[0];
    u64 v = 0;
    switch (which) {
      case 0: v = t % grid.block[0]; break;
      case 1: v = t / grid.block[0] % grid.block[1]; break;
      case 2: v = t / (grid.block[0] * grid.block[1]); break;
      case 3: case 4: case 5: v = c.id[which - 3]; break;
      case 6: case 7: case 8: v = grid.block[which - 6]; break;
      case 9: case 10: case 11: v = grid.size[which - 9]; break;
      case 12: v = (u64)i; break;
      case 13: v = w.index; break;
      case 14: v = c.rank; break;
      case 15: v = m.cluster_shape[0] * m.cluster_shape[1] * m.cluster_shape[2]; break;
      case 16: case 17: case 18: v = c.id[which - 16] % m.cluster_shape[which - 16]; break;
      case 19: case 20: case 21: v = m.cluster_shape[which - 19]; break;
      case 22: case 23: case 24: v = c.id[which - 22] / m.cluster_shape[which - 22]; break;
      case 25: case 26: case 27: v = grid.size[which - 25] / m.cluster_shape[which - 25]; break;
      case 28: v = w.executed; break;                                   // %clock, %clock64
      case 29: v = (c.id[0] + (u64)grid.size[0] * (c.id[1] + (u64)grid.size[1] * c.id[2])) % 148; break;  // %smid
      case 30: v = 148; break;                                          // %nsmid
      case 31: v = m.dynamic_smem; break;                               // %dynamic_smem_size
      case 32: v = m.dynamic_smem + m.program->static_smem_bytes; break;  // %total_smem_size
      case 33: v = (1u << i) - 1; break;                                // %lanemask_lt
      case 34: v = ((1u << i) - 1) | 1u << i; break;                    // %lanemask_le
      case 35: v = 1u << i; break;                                      // %lanemask_eq
      case 36: v = ~((1u << i) - 1); break;                             // %lanemask_ge
      case 37: v = ~(((1u << i) - 1) | 1u << i); break;                 // %lanemask_gt
      case 38: v = (grid.threads() + 31) / 32; break;  // %nwarpid
      case 39: v = m.cluster_shape[0] * m.cluster_shape[1] * m.cluster_shape[2] > 1; break;  // %is_explicit_cluster
      case 40: v = kReservedSmem; break;                                // %reserved_smem_offset_begin/_cap/...
      case 41: v = 0; break;
      case kTimerRegister: v = kTimerStart + w.executed + m.waited_ns; break;       // %globaltimer: a nanosecond an instruction
    }
    if (in.aux[1] == 8) row<u64>(w, in.op[0])[i] = v;
    else row<u32>(w, in.op[0])[i] = (u32)v;
  }
  return Step::Done;
}
// The address of a kernel parameter (parameters are read in place).
HANDLER("mov.param", Plain) {
  each_lane<u64>(w, in.op[0], lanes, [&](int) { return (u64)(w.cta->cluster->grid->params + in.aux[0]); });
  return Step::Done;
}
// The shared::cluster address of a variable of this CTA.
HANDLER("mov.shared", Plain) {
  u32 v = shared_address(w.cta->rank, (u32)in.aux[0]);
  if (in.aux[1] == 8) each_lane<u64>(w, in.op[0], lanes, [&](int) { return (u64)v; });
  else each_lane<u32>(w, in.op[0], lanes, [&](int) { return v; });
  return Step::Done;
}

#define PREDICATE_OP(name, expr)                                              \
  HANDLER(name, Plain) {                                                      \
    u32 x = predicate_of(w, in.op[1]);                                        \
    [[maybe_unused]] u32 y = in.operand_count > 2 ? predicate_of(w, in.op[2]) : 0; \
    set_predicate(w, in.op[0], lanes, expr);                                  \
    return Step::Done;                                                        \
  }
PREDICATE_OP("and.pred", x &y)
PREDICATE_OP("or.pred", x | y)
PREDICATE_OP("xor.pred", x ^ y)
PREDICATE_OP("not.pred", ~x)
PREDICATE_OP("mov.pred", x)

#define SELECT(name, T)                                                       \
  HANDLER(name, Move) {                                                       \
    const T *a = row<T>(w, in.op[1]), *b = row<T>(w, in.op[2]);               \
    u32 p = predicate_of(w, in.op[3]);                                        \
    each_lane<T>(w, in.op[0], lanes, [&](int i) { return p >> i & 1 ? a[i] : b[i]; }); \
    return Step::Done;                                                        \
  }
SELECT("selp.b32", u32)
SELECT("selp.b64", u64)
HANDLER("slct.b32.s32", Plain) {
  const u32 *a = row<u32>(w, in.op[1]), *b = row<u32>(w, in.op[2]);
  const i32 *c = row<i32>(w, in.op[3]);
  each_lane<u32>(w, in.op[0], lanes, [&](int i) { return c[i] >= 0 ? a[i] : b[i]; });
  return Step::Done;
}

// setp: operands p, q (or none), combine predicate (or none), a, b. aux[0]: 0 none, 1 and, 2 or, 3 xor.
static void finish_compare(Warp &w, const Instruction &in, u32 lanes, u32 bits) {
  u32 inverse = ~bits;
  if (in.aux[0]) {
    u32 c = predicate_of(w, in.op[2]);
    bits = in.aux[0] == 1 ? bits & c : in.aux[0] == 2 ? bits | c : bits ^ c;
    inverse = in.aux[0] == 1 ? inverse & c : in.aux[0] == 2 ? inverse | c : inverse ^ c;
  }
  set_predicate(w, in.op[0], lanes, bits);
  set_predicate(w, in.op[1], lanes, inverse);
}
#define COMPARE(name, T, expr)                                          \
  HANDLER("setp." name, Plain) {                                        \
    const T *a = row<T>(w, in.op[3]), *b = row<T>(w, in.op[4]);         \
    u32 bits = 0;                                                       \
    for (int i = 0; i < kLanes; i++) {                                  \
      T x = a[i], y = b[i];                                             \
      bits |= (u32)(expr) << i;                                         \
    }                                                                   \
    finish_compare(w, in, lanes, bits);                                 \
    return Step::Done;                                                  \
  }                                                                     \
  HANDLER("set." name, Plain) { /* d = all ones or 1.0f (aux[1]) */     \
    const T *a = row<T>(w, in.op[1]), *b = row<T>(w, in.op[2]);         \
    u32 yes = (u32)in.aux[1];                                           \
    each_lane<u32>(w, in.op[0], lanes, [&](int i) -> u32 {              \
      T x = a[i], y = b[i];                                             \
      return (expr) ? yes : 0u;                                         \
    });                                                                 \
    return Step::Done;                                                  \
  }
#define COMPARE_ORDERED(type, T) \
  COMPARE("eq." type, T, x == y) \
  COMPARE("ne." type, T, x != y) \
  COMPARE("lt." type, T, x < y)  \
  COMPARE("le." type, T, x <= y) \
  COMPARE("gt." type, T, x > y)  \
  COMPARE("ge." type, T, x >= y)
COMPARE_ORDERED("s32", i32)
COMPARE_ORDERED("u32", u32)
COMPARE_ORDERED("s64", i64)
COMPARE_ORDERED("u64", u64)
struct Signed16 {
  u32 raw;
  operator i32() const { return (i16)raw; }
};
COMPARE_ORDERED("s16", Signed16)

#define COMPARE_FLOAT(type, T, get)                                                             \
  COMPARE("eq." type, T, get(x) == get(y))                                                      \
  COMPARE("ne." type, T, !std::isnan(get(x)) && !std::isnan(get(y)) && get(x) != get(y))        \
  COMPARE("lt." type, T, get(x) < get(y))                                                       \
  COMPARE("le." type, T, get(x) <= get(y))                                                      \
  COMPARE("gt." type, T, get(x) > get(y))                                                       \
  COMPARE("ge." type, T, get(x) >= get(y))                                                      \
  COMPARE("num." type, T, !std::isnan(get(x)) && !std::isnan(get(y)))                           \
  COMPARE("nan." type, T, std::isnan(get(x)) || std::isnan(get(y)))                             \
  COMPARE("equ." type, T, std::isnan(get(x)) || std::isnan(get(y)) || get(x) == get(y))         \
  COMPARE("neu." type, T, !(get(x) == get(y)))                                                  \
  COMPARE("ltu." type, T, !(get(x) >= get(y)))                                                  \
  COMPARE("leu." type, T, !(get(x) > get(y)))                                                   \
  COMPARE("gtu." type, T, !(get(x) <= get(y)))                                                  \
  COMPARE("geu." type, T, !(get(x) < get(y)))
#define AS_IS(v) (v)
#define AS_FLUSHED(v) numeric::flush(v)
#define AS_HALF(v) numeric::half_to_float((u16)(v))
#define AS_BF16(v) numeric::bf16_to_float((u16)(v))
COMPARE_FLOAT("f32", float, AS_IS)
COMPARE_FLOAT("ftz.f32", float, AS_FLUSHED)
COMPARE_FLOAT("f64", double, AS_IS)
COMPARE_FLOAT("f16", u32, AS_HALF)
COMPARE_FLOAT("bf16", u32, AS_BF16)

HANDLER("nop", Plain) { return Step::Done; }
HANDLER("yield", Sync) { return Step::Yield; }
HANDLER("trap", Plain) { fail(ErrorKind::Trap, &w, &in, "trap: the kernel stopped itself (an assertion failed)"); }
