// The 128-byte tensor map (CUtensorMap) as the driver and CuTe DSL's host code pack it, and the copies it describes.
//
// The layout is not documented; it was found by varying the inputs of the DSL's own host code (README.md). Modelled are
// tiled maps of byte-sized types and of packed 4-bit types, all four swizzles, and zero or NaN fill outside the tensor.
#pragma once
#include "machine.h"

struct TensorMap {
  u64 address;
  u32 rank, type, element_bits, swizzle;
  bool nan_fill;
  u64 size[5], stride_bytes[5];
  u32 box[5];

  u64 inner_bytes() const { return (u64)box[0] * element_bits / 8; }
  u64 box_bytes() const { return inner_bytes() * box[1] * box[2] * box[3] * box[4]; }
  bool is_float() const { return type >= 6 && type <= 10; }
};

TensorMap read_tensor_map(const Warp &w, const Instruction &in, u64 address);

// Swizzled shared-memory offset: XOR of the 16-byte chunk index with address bits 7.. (none, 32, 64, 128 bytes).
static inline u32 swizzle_offset(u32 offset, u32 mode) {
  constexpr u32 bits[4] = {0, 0x10, 0x30, 0x70};
  return offset ^ (offset >> 3 & bits[mode]);
}

enum class BoxCopy { Load, Store, Reduce, Visit };
// Copies one box between shared memory at `offset` of `smem` and global memory at `coordinates`.
// `reduction` is an atomic operation number (memory.cpp) for BoxCopy::Reduce. BoxCopy::Visit copies nothing: it calls
// `visit` with the pieces of global memory, to be written if `reduction` is not 0.
using BoxVisitor = std::function<void(u64 address, u64 bytes)>;
void copy_box(const Warp *w, const Instruction *in, const TensorMap &map, const i32 *coordinates, u8 *smem, u32 offset,
              BoxCopy kind, i64 reduction, const BoxVisitor &visit = nullptr);
