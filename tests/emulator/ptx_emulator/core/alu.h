// Element-wise instructions: one expression per handler, applied to the participating lanes.
#pragma once
#include "machine.h"

template <class D, class F>
static inline void each_lane(Warp &w, Operand dst, u32 lanes, F f) {
  D *d = row<D>(w, dst);
  if (lanes == kAllLanes)
    for (int i = 0; i < kLanes; i++) d[i] = f(i);  // the common case vectorises
  else
    for (int i : lanes_of(lanes)) d[i] = f(i);
}

#define UNARY_KIND(name, kind, TD, TA, expr)                         \
  HANDLER(name, kind) {                                              \
    const TA *a = row<TA>(w, in.op[1]);                              \
    each_lane<TD>(w, in.op[0], lanes, [&](int i) -> TD {             \
      TA x = a[i];                                                   \
      return (TD)(expr);                                             \
    });                                                              \
    return Step::Done;                                               \
  }
#define UNARY(name, TD, TA, expr) UNARY_KIND(name, Plain, TD, TA, expr)
#define BINARY_MIXED(name, TD, TA, TB, expr)                         \
  HANDLER(name, Plain) {                                             \
    const TA *a = row<TA>(w, in.op[1]);                              \
    const TB *b = row<TB>(w, in.op[2]);                              \
    each_lane<TD>(w, in.op[0], lanes, [&](int i) -> TD {             \
      TA x = a[i];                                                   \
      TB y = b[i];                                                   \
      return (TD)(expr);                                             \
    });                                                              \
    return Step::Done;                                               \
  }
#define BINARY(name, T, expr) BINARY_MIXED(name, T, T, T, expr)
#define TERNARY_MIXED(name, TD, TA, TB, TC, expr)                    \
  HANDLER(name, Plain) {                                             \
    const TA *a = row<TA>(w, in.op[1]);                              \
    const TB *b = row<TB>(w, in.op[2]);                              \
    const TC *c = row<TC>(w, in.op[3]);                              \
    each_lane<TD>(w, in.op[0], lanes, [&](int i) -> TD {             \
      TA x = a[i];                                                   \
      TB y = b[i];                                                   \
      TC z = c[i];                                                   \
      return (TD)(expr);                                             \
    });                                                              \
    return Step::Done;                                               \
  }
#define TERNARY(name, T, expr) TERNARY_MIXED(name, T, T, T, T, expr)
