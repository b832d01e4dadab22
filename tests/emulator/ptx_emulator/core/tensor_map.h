// The 128-byte tensor map (CUtensorMap) as the driver and CuTe DSL's host code pack it, and the copies it describes.
//
// The layout is not documented; it was found by varying the inputs of the DSL's own host code (MODEL.md). Modelled are
// tiled maps of byte-sized types, of 4-bit types packed or padded and of padded 6-bit types, the swizzles of 16-byte and of
// 32-byte atoms, and zero or NaN fill outside the tensor.
#pragma once
#include "machine.h"
#include "swizzle.h"

struct TensorMap {
  u64 address;
  u32 rank, type, element_bits, swizzle;
  bool nan_fill;
  bool padded;  // 16 elements in every 16 bytes of shared memory, and in fewer bytes of global memory
  u64 size[5], stride_bytes[5];
  u32 box[5];

  u64 rows() const { return (u64)box[1] * box[2] * box[3] * box[4]; }
  u64 inner_bytes() const { return (u64)box[0] * element_bits / 8; }  // in global memory
  u64 shared_inner_bytes() const { return padded ? box[0] : inner_bytes(); }
  u64 shared_bytes() const { return shared_inner_bytes() * rows(); }
  u64 transaction_bytes() const { return inner_bytes() * rows(); }  // the bytes that an mbarrier counts: without padding
  bool is_float() const { return type >= 6 && type <= 10; }
};

TensorMap read_tensor_map(const Warp &w, const Instruction &in, u64 address);

enum class BoxCopy { Load, Store, Reduce, Visit };
// Copies one box between shared memory at `offset` of `smem` and global memory at `coordinates`.
// `reduction` is an atomic operation number (memory.cpp) for BoxCopy::Reduce. BoxCopy::Visit copies nothing: it calls
// `visit` with the ranges of global memory, which are written if `reduction` is not 0.
using BoxVisitor = std::function<void(u64 address, u64 bytes)>;
void copy_box(const Warp *w, const Instruction *in, const TensorMap &map, const i32 *coordinates, u8 *smem, u32 offset,
              BoxCopy kind, i64 reduction, const BoxVisitor &visit = nullptr);
