// Fixed-width names and bit casts used by every file of the core.
#pragma once
#include <cstdint>
#include <cstring>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using u128 = unsigned __int128;

constexpr int kLanes = 32;
constexpr u32 kAllLanes = 0xffffffffu;

template <class To, class From>
static inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast changes size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// for (int lane : lanes_of(mask)) visits the set bits of a lane mask, lowest first.
struct LaneRange {
  u32 mask;
  struct It {
    u32 m;
    int operator*() const { return __builtin_ctz(m); }
    It &operator++() { m &= m - 1; return *this; }
    bool operator!=(const It &o) const { return m != o.m; }
  };
  It begin() const { return {mask}; }
  It end() const { return {0}; }
};
static inline LaneRange lanes_of(u32 mask) { return {mask}; }
static inline int first_lane(u32 mask) { return __builtin_ctz(mask); }
