// The swizzles of shared memory, which TMA and the tensor core share: an XOR of address bits (PTX ISA "Tensors: swizzling
// modes"; CUTLASS's Swizzle<B, M, S>).
#pragma once
#include <algorithm>
#include "types.h"

// Modes 0..3: none, rows of 32, 64 and 128 bytes, in atoms of 16 bytes. kSwizzle128Atom32: rows of 128 bytes in atoms of 32.
constexpr u32 kSwizzle128Atom32 = 4;

static inline u32 swizzle_offset(u32 offset, u32 mode) {
  if (mode == kSwizzle128Atom32) return offset ^ (offset >> 2 & 0x60);
  constexpr u32 bits[4] = {0, 0x10, 0x30, 0x70};
  return offset ^ (offset >> 3 & bits[mode]);
}
static inline u32 swizzle_span_bytes(u32 mode) { return 16u << std::min(mode, 3u); }
