// Integer, logic, shift and bit-field instructions (PTX ISA "Integer Arithmetic", "Logic and Shift").
// 8- and 16-bit values are stored zero-extended in 32-bit rows.
#include <limits>
#include "alu.h"

namespace {

u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u64 bytes = ((u64)b << 32) | a;
  u32 r = 0;
  for (int k = 0; k < 4; k++) {
    u32 s = selector >> (4 * k) & 15;
    u32 byte = bytes >> (8 * (s & 7)) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;  // msb: replicate the sign
    r |= byte << (8 * k);
  }
  return r;
}
// prmt.b32.{f4e,b4e,rc8,ecl,ecr,rc16}: the selector of each mode, by its two low bits.
u32 permute_mode(u32 mode, u32 a, u32 b, u32 c) {
  static const u16 selector[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                     {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                     {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
  return permute_bytes(a, b, selector[mode][c & 3]);
}
u32 reverse_bits(u32 x) {
  u32 r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
  return r;
}
template <class U>
U extract_unsigned(U x, u32 pos, u32 len) {
  constexpr u32 bits = sizeof(U) * 8;
  pos &= 255, len &= 255;
  if (len == 0 || pos >= bits) return 0;
  U v = x >> pos;
  return len >= bits ? v : v & (((U)1 << len) - 1);
}
template <class S, class U>
S extract_signed(U x, u32 pos, u32 len) {
  constexpr u32 bits = sizeof(U) * 8;
  pos &= 255, len &= 255;
  if (len == 0) return 0;
  u32 sign_at = std::min(pos + len - 1, bits - 1);
  bool negative = x >> sign_at & 1;
  U v = pos >= bits ? (negative ? ~(U)0 : 0) : extract_unsigned<U>(x, pos, len);
  u32 got = std::min(len, pos >= bits ? 0u : bits - pos);
  if (negative && got < bits) v |= ~(U)0 << got;
  return (S)v;
}
template <class U>
U insert_field(U a, U b, u32 pos, u32 len) {
  constexpr u32 bits = sizeof(U) * 8;
  pos &= 255, len &= 255;
  if (len == 0 || pos >= bits) return b;
  U mask = (len >= bits ? ~(U)0 : ((U)1 << len) - 1) << pos;
  return (b & ~mask) | ((a << pos) & mask);
}
u32 logic3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (int k = 0; k < 8; k++)
    if (table >> k & 1) r |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return r;
}
template <class T>
T saturating(i64 v) {
  return (T)std::min<i64>(std::max<i64>(v, std::numeric_limits<T>::min()), std::numeric_limits<T>::max());
}
// Applies f to both 16-bit halves.
template <class T, class F>
u32 by_halves(u32 x, u32 y, F f) {
  return (u32)(u16)f((T)x, (T)y) | (u32)(u16)f((T)(x >> 16), (T)(y >> 16)) << 16;
}
i32 dot4(u32 a, u32 b, i32 c, bool a_signed, bool b_signed) {
  u32 sum = (u32)c;
  for (int k = 0; k < 4; k++) {
    i32 x = a_signed ? (i32)(i8)(a >> (8 * k)) : (i32)(u8)(a >> (8 * k));
    i32 y = b_signed ? (i32)(i8)(b >> (8 * k)) : (i32)(u8)(b >> (8 * k));
    sum += (u32)(x * y);
  }
  return (i32)sum;
}

}  // namespace

BINARY("add.u16", u32, (x + y) & 0xffff)
BINARY("add.u32", u32, x + y)
BINARY("add.u64", u64, x + y)
BINARY("add.sat.s32", i32, saturating<i32>((i64)x + y))
BINARY("sub.u16", u32, (x - y) & 0xffff)
BINARY("sub.u32", u32, x - y)
BINARY("sub.u64", u64, x - y)
BINARY("sub.sat.s32", i32, saturating<i32>((i64)x - y))
BINARY("mul.lo.u16", u32, (x * y) & 0xffff)
BINARY("mul.lo.u32", u32, x * y)
BINARY("mul.lo.u64", u64, x * y)
BINARY("mul.hi.u16", u32, ((x * y) >> 16) & 0xffff)
BINARY("mul.hi.s16", u32, (u32)(((i32)(i16)x * (i32)(i16)y) >> 16) & 0xffff)
BINARY("mul.hi.u32", u32, ((u64)x * y) >> 32)
BINARY("mul.hi.s32", i32, ((i64)x * y) >> 32)
BINARY("mul.hi.u64", u64, ((u128)x * y) >> 64)
BINARY("mul.hi.s64", i64, ((__int128)x * y) >> 64)
BINARY("mul.wide.u16", u32, (x & 0xffff) * (y & 0xffff))
BINARY("mul.wide.s16", u32, (u32)((i32)(i16)x * (i32)(i16)y))
BINARY_MIXED("mul.wide.u32", u64, u32, u32, (u64)x *y)
BINARY_MIXED("mul.wide.s32", i64, i32, i32, (i64)x *y)
BINARY("mul24.lo.u32", u32, (x & 0xffffff) * (y & 0xffffff))
TERNARY("mad.lo.u16", u32, (x * y + z) & 0xffff)
TERNARY("mad.lo.u32", u32, x *y + z)
TERNARY("mad.lo.u64", u64, x *y + z)
TERNARY("mad.hi.u32", u32, (u32)(((u64)x * y) >> 32) + z)
TERNARY("mad.hi.s32", i32, (u32)(((i64)x * y) >> 32) + (u32)z)
TERNARY("mad.wide.u16", u32, (x & 0xffff) * (y & 0xffff) + z)
TERNARY("mad.wide.s16", u32, (u32)((i32)(i16)x * (i32)(i16)y) + z)
TERNARY_MIXED("mad.wide.u32", u64, u32, u32, u64, (u64)x *y + z)
TERNARY_MIXED("mad.wide.s32", u64, i32, i32, u64, (u64)((i64)x * y) + z)
TERNARY("sad.u32", u32, (x > y ? x - y : y - x) + z)
TERNARY("sad.s32", i32, (i32)((x > y ? (u32)x - (u32)y : (u32)y - (u32)x) + (u32)z))
TERNARY_MIXED("dp4a.u32.u32", i32, u32, u32, i32, dot4(x, y, z, false, false))
TERNARY_MIXED("dp4a.s32.s32", i32, u32, u32, i32, dot4(x, y, z, true, true))
TERNARY("dp2a.lo.u32.u32", u32, (x & 0xffff) * (y & 0xff) + (x >> 16) * (y >> 8 & 0xff) + z)
TERNARY("dp2a.hi.u32.u32", u32, (x & 0xffff) * (y >> 16 & 0xff) + (x >> 16) * (y >> 24) + z)

// PTX does not define division by zero; these are the results of the code that the hardware's compiler generates.
BINARY("div.s32", i32, y == 0 ? -1 : y == -1 ? (i32)(0u - (u32)x) : x / y)
BINARY("div.u32", u32, y == 0 ? ~0u : x / y)
BINARY("div.s64", i64, y == 0 ? -1 : y == -1 ? (i64)(0ull - (u64)x) : x / y)
BINARY("div.u64", u64, y == 0 ? ~0ull : x / y)
BINARY("div.u16", u32, y == 0 ? 0xffffu : x / y)
BINARY("div.s16", u32, (u32)((i16)y == 0 ? -1 : (i32)(i16)x / (i32)(i16)y) & 0xffff)
BINARY("rem.s32", i32, y == 0 ? x : y == -1 ? 0 : x % y)
BINARY("rem.u32", u32, y == 0 ? x : x % y)
BINARY("rem.s64", i64, y == 0 ? x : y == -1 ? 0 : x % y)
BINARY("rem.u64", u64, y == 0 ? x : x % y)
BINARY("rem.u16", u32, y == 0 ? x : x % y)
BINARY("rem.s16", u32, (u32)((i16)y == 0 ? (i16)x : (i32)(i16)x % (i32)(i16)y) & 0xffff)

BINARY("min.s16", u32, (u32)std::min((i16)x, (i16)y) & 0xffff)
BINARY("max.s16", u32, (u32)std::max((i16)x, (i16)y) & 0xffff)
BINARY("min.s16x2", u32, by_halves<i16>(x, y, [](i16 a, i16 b) { return std::min(a, b); }))
BINARY("max.s16x2", u32, by_halves<i16>(x, y, [](i16 a, i16 b) { return std::max(a, b); }))
BINARY("min.u16x2", u32, by_halves<u16>(x, y, [](u16 a, u16 b) { return std::min(a, b); }))
BINARY("max.u16x2", u32, by_halves<u16>(x, y, [](u16 a, u16 b) { return std::max(a, b); }))
BINARY("min.s32", i32, std::min(x, y))
BINARY("max.s32", i32, std::max(x, y))
BINARY("min.u32", u32, std::min(x, y))
BINARY("max.u32", u32, std::max(x, y))
BINARY("min.s64", i64, std::min(x, y))
BINARY("max.s64", i64, std::max(x, y))
BINARY("min.u64", u64, std::min(x, y))
BINARY("max.u64", u64, std::max(x, y))
BINARY("min.relu.s32", i32, std::max(std::min(x, y), 0))
BINARY("max.relu.s32", i32, std::max(std::max(x, y), 0))
UNARY("neg.s16", u32, u32, (0 - x) & 0xffff)
UNARY("neg.s32", u32, u32, 0 - x)
UNARY("neg.s64", u64, u64, 0 - x)
UNARY("abs.s16", u32, u32, (u32)((i16)x < 0 ? -(i32)(i16)x : (i32)(i16)x) & 0xffff)
UNARY("abs.s32", u32, i32, x < 0 ? 0u - (u32)x : (u32)x)
UNARY("abs.s64", u64, i64, x < 0 ? 0ull - (u64)x : (u64)x)

BINARY("and.b32", u32, x &y)
BINARY("and.b64", u64, x &y)
BINARY("or.b32", u32, x | y)
BINARY("or.b64", u64, x | y)
BINARY("xor.b32", u32, x ^ y)
BINARY("xor.b64", u64, x ^ y)
UNARY("not.b16", u32, u32, ~x & 0xffff)
UNARY("not.b32", u32, u32, ~x)
UNARY("not.b64", u64, u64, ~x)
UNARY("cnot.b32", u32, u32, x == 0)
UNARY("cnot.b64", u64, u64, x == 0)

BINARY("shl.b16", u32, y > 15 ? 0 : (x << y) & 0xffff)
BINARY("shl.b32", u32, y > 31 ? 0 : x << y)
BINARY_MIXED("shl.b64", u64, u64, u32, y > 63 ? 0 : x << y)
BINARY("shr.u16", u32, y > 15 ? 0 : x >> y)
BINARY("shr.s16", u32, (u32)((i16)x >> std::min(y, 15u)) & 0xffff)
BINARY("shr.u32", u32, y > 31 ? 0 : x >> y)
BINARY_MIXED("shr.s32", i32, i32, u32, x >> std::min(y, 31u))
BINARY_MIXED("shr.u64", u64, u64, u32, y > 63 ? 0 : x >> y)
BINARY_MIXED("shr.s64", i64, i64, u32, x >> std::min(y, 63u))
TERNARY("shf.l.wrap", u32, (((u64)y << 32 | x) << (z & 31)) >> 32)
TERNARY("shf.r.wrap", u32, ((u64)y << 32 | x) >> (z & 31))
TERNARY("shf.l.clamp", u32, z >= 32 ? x : (((u64)y << 32 | x) << z) >> 32)
TERNARY("shf.r.clamp", u32, ((u64)y << 32 | x) >> std::min(z, 32u))

UNARY("popc.b32", u32, u32, __builtin_popcount(x))
UNARY("popc.b64", u32, u64, __builtin_popcountll(x))
UNARY("clz.b32", u32, u32, x ? __builtin_clz(x) : 32)
UNARY("clz.b64", u32, u64, x ? __builtin_clzll(x) : 64)
UNARY("brev.b32", u32, u32, reverse_bits(x))
UNARY("brev.b64", u64, u64, (u64)reverse_bits((u32)x) << 32 | reverse_bits((u32)(x >> 32)))
UNARY("bfind.u32", u32, u32, x ? 31 - __builtin_clz(x) : ~0u)
UNARY("bfind.s32", u32, i32, (x < 0 ? ~x : x) ? 31 - __builtin_clz((u32)(x < 0 ? ~x : x)) : ~0u)
UNARY("bfind.u64", u32, u64, x ? 63 - __builtin_clzll(x) : ~0u)
UNARY("bfind.shiftamt.u32", u32, u32, x ? __builtin_clz(x) : ~0u)
TERNARY("bfe.u32", u32, extract_unsigned<u32>(x, y, z))
TERNARY_MIXED("bfe.s32", i32, u32, u32, u32, (extract_signed<i32, u32>(x, y, z)))
TERNARY_MIXED("bfe.u64", u64, u64, u32, u32, extract_unsigned<u64>(x, y, z))
TERNARY_MIXED("bfe.s64", i64, u64, u32, u32, (extract_signed<i64, u64>(x, y, z)))
TERNARY("prmt.b32", u32, permute_bytes(x, y, z))

HANDLER("prmt.mode", Plain) {
  const u32 *a = row<u32>(w, in.op[1]), *b = row<u32>(w, in.op[2]), *c = row<u32>(w, in.op[3]);
  each_lane<u32>(w, in.op[0], lanes, [&](int i) { return permute_mode((u32)in.aux[0], a[i], b[i], c[i]); });
  return Step::Done;
}
HANDLER("bfi.b32", Plain) {
  const u32 *a = row<u32>(w, in.op[1]), *b = row<u32>(w, in.op[2]), *pos = row<u32>(w, in.op[3]),
            *len = row<u32>(w, in.op[4]);
  each_lane<u32>(w, in.op[0], lanes, [&](int i) { return insert_field<u32>(a[i], b[i], pos[i], len[i]); });
  return Step::Done;
}
HANDLER("bfi.b64", Plain) {
  const u64 *a = row<u64>(w, in.op[1]), *b = row<u64>(w, in.op[2]);
  const u32 *pos = row<u32>(w, in.op[3]), *len = row<u32>(w, in.op[4]);
  each_lane<u64>(w, in.op[0], lanes, [&](int i) { return insert_field<u64>(a[i], b[i], pos[i], len[i]); });
  return Step::Done;
}
HANDLER("lop3.b32", Plain) {
  const u32 *a = row<u32>(w, in.op[1]), *b = row<u32>(w, in.op[2]), *c = row<u32>(w, in.op[3]);
  u32 table = row<u32>(w, in.op[4])[0];
  each_lane<u32>(w, in.op[0], lanes, [&](int i) { return logic3(a[i], b[i], c[i], table); });
  return Step::Done;
}
// add.cc / addc / sub.cc / subc: the carry of each lane is in predicate aux[0]; aux[1] reads it, aux[2] writes it.
template <class T>
static Step add_with_carry(Warp &w, const Instruction &in, u32 lanes, bool subtract) {
  const T *a = row<T>(w, in.op[1]), *b = row<T>(w, in.op[2]);
  T *d = row<T>(w, in.op[0]);
  u32 &carry = w.predicate[(size_t)in.aux[0]];
  u32 out = carry;
  for (int i : lanes_of(lanes)) {
    u128 y = subtract ? (T)~b[i] : b[i];
    u128 c = subtract ? (in.aux[1] ? (carry >> i & 1) : 1) : (in.aux[1] ? (carry >> i & 1) : 0);
    u128 sum = (u128)a[i] + y + c;
    d[i] = (T)sum;
    u32 bit = (u32)(sum >> (8 * sizeof(T))) & 1;
    out = (out & ~(1u << i)) | bit << i;
  }
  if (in.aux[2]) carry = out;
  return Step::Done;
}
HANDLER("addc.u32", Plain) { return add_with_carry<u32>(w, in, lanes, false); }
HANDLER("addc.u64", Plain) { return add_with_carry<u64>(w, in, lanes, false); }
HANDLER("subc.u32", Plain) { return add_with_carry<u32>(w, in, lanes, true); }
HANDLER("subc.u64", Plain) { return add_with_carry<u64>(w, in, lanes, true); }
