// Shared-memory matrix descriptors and the MMA instruction descriptor (PTX ISA "Tensorcore 5th generation: matrix
// descriptor, instruction descriptor").
#pragma once
#include "machine.h"
#include "swizzle.h"

enum class Element : u8 { F16, BF16, TF32, E4M3, E5M2, E2M3, E3M2, E2M1, S8, U8 };

// The packing of an operand's elements in 16-byte chunks of shared memory.
struct Packing {
  u32 bits;       // per element
  u32 per_chunk;  // elements per 16-byte chunk
};
// kind::f8f6f4 and mxf8f6f4 keep 16 elements in each chunk, whatever their width (the rest is padding); the 4-bit kinds
// are dense.
static inline Packing packing_of(Element e, bool dense4) {
  switch (e) {
    case Element::F16: case Element::BF16: return {16, 8};
    case Element::TF32: return {32, 4};
    case Element::E2M1: return {4, dense4 ? 32u : 16u};
    case Element::E2M3: case Element::E3M2: return {6, 16};
    default: return {8, 16};
  }
}

// A decoded shared-memory descriptor. `chunk` gives the swizzled byte address of the 16-byte chunk that begins at element
// (row, k) of an operand with `rows` along M or N.
struct SmemDescriptor {
  u32 start, leading, stride, layout;
  u32 width;         // bytes of a swizzled row: 16 (none), 32, 64, 128
  u32 swizzle_mode;  // swizzle.h

  u32 swizzle(u32 a) const { return swizzle_offset(a, swizzle_mode); }
  u32 pattern_rows() const { return swizzle_mode == kSwizzle128Atom32 ? 4 : 8; }  // rows of one swizzle pattern
  // K-major: a chunk holds elements consecutive in K; `c` counts chunks along K.
  u32 k_major(u32 row, u32 c) const {
    if (width == 16) return start + row % 8 * 16 + row / 8 * stride + c * leading;
    return swizzle(start + row % 8 * width + row / 8 * stride + c * 16);
  }
  // MN-major: a chunk holds elements consecutive in M or N; `c` counts chunks along M or N.
  u32 mn_major(u32 c, u32 k) const {
    if (width == 16) return start + c * stride + k % 8 * 16 + k / 8 * leading;
    u32 per_row = width / 16, rows = pattern_rows();
    return swizzle(start + c / per_row * leading + k % rows * width + k / rows * stride + c % per_row * 16);
  }
};
// The descriptor of wgmma (PTX ISA "Asynchronous warpgroup level matrix shared memory layout") has the same fields at the
// same bits, without a version.
SmemDescriptor read_smem_descriptor(const Warp &w, const Instruction &in, u64 bits, const char *operand, bool wgmma = false);

// Decodes one 16-byte chunk to floats; returns how many.
u32 decode_chunk(const u8 *chunk, Element e, Packing p, float *out);
