#include "tensor_map.h"
#include "alu.h"
#include "memory.h"
#include "numeric.h"
#include "race.h"

void atomic_update(u8 *p, i64 op, i64 type, const void *operand, const void *swap);

TensorMap read_tensor_map(const Warp &w, const Instruction &in, u64 address) {
  if (address & 63)
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "tensor map at 0x%llx is not 64-byte aligned", (unsigned long long)address);
  u64 q[8];
  memcpy(q, global_data(&w, &in, address, 128, false, "tensor map"), 64);
  u32 flags = (u32)q[1];
  // u8 u16 u32 s32 u64 s64 f16 f32 f32.ftz f64 bf16, then 4-bit types packed two to a byte, padded 4- and 6-bit types.
  static const u8 bits[16] = {8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 4, 4, 6, 0, 0};
  TensorMap t{};
  t.address = q[0];
  t.rank = (flags >> 4 & 7) + 1;
  t.type = flags >> 7 & 15;
  t.element_bits = bits[t.type];
  t.padded = t.type == 12 || t.type == 13;
  t.nan_fill = flags >> 15 & 1;
  if ((flags & 15) != 2 || t.rank > 5)
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "no tensor map at 0x%llx (word 1 is 0x%llx)",
         (unsigned long long)address, (unsigned long long)q[1]);
  if (!t.element_bits)
    fail(ErrorKind::IllegalInstruction, &w, &in, "tensor map element type code %u is not modelled", t.type);
  if (t.address & 15)
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "the tensor's address 0x%llx is not 16-byte aligned",
         (unsigned long long)t.address);
  // Atoms of a 128-byte swizzle: 16 bytes, 32 bytes, 32 bytes with exchanged halves, 64 bytes.
  u32 swizzle = flags >> 13 & 3, atom = flags >> 19 & 3;
  if (atom > 1 || (atom && swizzle != 3))
    fail(ErrorKind::IllegalInstruction, &w, &in, "a tensor map with swizzle atom %u of swizzle mode %u is not modelled", atom, swizzle);
  t.swizzle = atom ? kSwizzle128Atom32 : swizzle;
  if (q[6] >> 32 & 0x7fff)
    fail(ErrorKind::IllegalInstruction, &w, &in, "traversal strides of a tensor map are not modelled");
  const u64 stride16[4] = {q[1] >> 32, q[2] & 0xffffffff, q[2] >> 32, q[3] & 0xffffffff};
  t.stride_bytes[0] = t.element_bits / 8;
  for (int i = 0; i < 4; i++) t.stride_bytes[i + 1] = (stride16[i] | (q[3] >> (32 + 4 * i) & 15) << 32) << 4;
  for (int i = 0; i < 5; i++) t.size[i] = (q[4 + i / 2] >> (32 * (i % 2)) & 0xffffffff) + 1;
  t.box[0] = (u32)(q[6] >> 56) + 1;
  for (int i = 0; i < 4; i++) t.box[i + 1] = (u32)(q[7] >> (8 * i) & 255) + 1;
  for (u32 i = t.rank; i < 5; i++) t.size[i] = t.box[i] = 1, t.stride_bytes[i] = 0;
  if (t.padded && (t.box[0] != 128 || t.size[0] % 128 || t.address % 32))
    fail(ErrorKind::MisalignedDescriptor, &w, &in,
         "padded 4- and 6-bit elements need boxes of 128, a size of a multiple of 128 and a 32-byte aligned tensor; box %u, size "
         "%llu, address 0x%llx",
         t.box[0], (unsigned long long)t.size[0], (unsigned long long)t.address);
  if (t.inner_bytes() % 16)
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "the box's inner dimension of %llu bytes is no multiple of 16",
         (unsigned long long)t.inner_bytes());
  if (t.swizzle && t.shared_inner_bytes() > swizzle_span_bytes(t.swizzle))
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "the box's inner dimension of %llu bytes exceeds the %u-byte swizzle",
         (unsigned long long)t.shared_inner_bytes(), swizzle_span_bytes(t.swizzle));
  return t;
}

namespace {

void fill_outside(const TensorMap &map, u8 *p, u32 bytes) {
  if (!map.nan_fill || !map.is_float()) {
    memset(p, 0, bytes);
    return;
  }
  u32 element = map.element_bits / 8;
  u64 nan = map.type == 10 ? 0x7fff : map.type == 6 ? 0x7fff : map.type == 9 ? 0x7fffffffffffffffull : 0x7fffffff;
  for (u32 k = 0; k + element <= bytes; k += element) memcpy(p + k, &nan, element);
}

i64 atom_type(u32 type) {  // tensor map type -> the type numbers of memory.cpp
  static const i64 table[11] = {-1, -1, 0, 1, 2, 3, 8, 4, 4, 5, 9};
  return type < 11 ? table[type] : -1;
}

}  // namespace

void copy_box(const Warp *w, const Instruction *in, const TensorMap &map, const i32 *c, u8 *smem, u32 offset,
              BoxCopy kind, i64 reduction, const BoxVisitor &visit) {
  bool writes = kind == BoxCopy::Visit ? reduction != 0 : kind != BoxCopy::Load;
  u32 row_bytes = (u32)map.inner_bytes(), shared_row_bytes = (u32)map.shared_inner_bytes(), done = 0;
  u32 chunk = map.padded ? 2 * map.element_bits : 16;  // global bytes in every 16 bytes of shared memory
  u32 element = std::max(1u, map.element_bits / 8);
  for (u32 i4 = 0; i4 < map.box[4]; i4++)
    for (u32 i3 = 0; i3 < map.box[3]; i3++)
      for (u32 i2 = 0; i2 < map.box[2]; i2++)
        for (u32 i1 = 0; i1 < map.box[1]; i1++, done += shared_row_bytes) {
          const u32 index[5] = {0, i1, i2, i3, i4};
          bool inside = true;
          i64 address = (i64)map.address;
          for (u32 d = 1; d < map.rank; d++) {
            i64 at = (i64)c[d] + index[d];
            inside &= at >= 0 && at < (i64)map.size[d];
            address += at * (i64)map.stride_bytes[d];
          }
          i64 first = (i64)c[0] * map.element_bits / 8;                    // first byte of the box in the row
          i64 limit = ((i64)map.size[0] * map.element_bits + 7) / 8;
          i64 lo = inside ? std::max<i64>(0, -first) : row_bytes;          // [lo, hi) of the box's row is inside
          i64 hi = inside ? std::min<i64>(row_bytes, limit - first) : row_bytes;
          u8 *global = nullptr;
          if (lo < hi)
            global = global_data(w, in, (u64)(address + first + lo), (u64)(hi - lo), writes,
                                 writes ? "TMA store" : "TMA load") - lo;
          if (kind == BoxCopy::Visit) {
            if (lo < hi) visit((u64)global + (u64)lo, (u64)(hi - lo));
            continue;
          }
          for (u32 x = 0; x < row_bytes; x += chunk) {
            u32 n = std::min(chunk, row_bytes - x);
            u8 *s = smem + swizzle_offset(offset + done + x / chunk * 16, map.swizzle);
            i64 a = std::clamp<i64>(lo - x, 0, n), b = std::clamp<i64>(hi - x, 0, n);
            if (kind == BoxCopy::Load) {
              if (a > 0 || b < (i64)n) fill_outside(map, s, n);
              if (a < b) memcpy(s + a, global + x + a, (size_t)(b - a));
            } else if (a < b && kind == BoxCopy::Store) {
              memcpy(global + x + a, s + a, (size_t)(b - a));
            } else if (a < b) {
              for (i64 k = a; k < b; k += element) atomic_update(global + x + k, reduction, atom_type(map.type), s + k, nullptr);
            }
          }
        }
}

// ---- tensor maps changed by the kernel (PTX ISA "Tensormap manipulation") ------------------------------------------

namespace {

enum MapField : i64 { kGlobalAddress, kGlobalDim, kGlobalStride };

void replace_field(const Warp &w, const Instruction &in, u8 *map, MapField field, u32 dimension, u64 value) {
  u32 *words = reinterpret_cast<u32 *>(map);
  switch (field) {
    case kGlobalAddress:
      memcpy(map, &value, 8);
      return;
    case kGlobalDim:
      words[8 + dimension] = (u32)value - 1;
      return;
    case kGlobalStride:
      // Bytes, of dimension + 1; kept as bits 4..35 in a word each and bits 36..39 together in word 7.
      if (value & 15 || value >> 40)
        fail(ErrorKind::MisalignedDescriptor, &w, &in, "tensormap.replace: stride %llu is no multiple of 16 below 2^40",
             (unsigned long long)value);
      words[3 + dimension] = (u32)(value >> 4);
      words[7] = (words[7] & ~(15u << 4 * dimension)) | (u32)(value >> 36) << 4 * dimension;
      return;
  }
}

}  // namespace

// aux: 0 in shared memory, 1 address offset, 2 field, 3 dimension. Operands: address of the map, value.
HANDLER("tensormap.replace", Plain) {
  for (int i : lanes_of(lanes)) {
    u64 address = lane_address(w, in.op[0], i, in.aux[1]);
    MapField field = (MapField)in.aux[2];
    u64 value = field == kGlobalDim ? row<u32>(w, in.op[1])[i] : row<u64>(w, in.op[1])[i];
    u8 *map;
    if (in.aux[0]) {
      Cta &cta = shared_owner(w, in, (u32)address, 128, "tensormap.replace");
      race::shared_access(w, in, cta, shared_offset((u32)address), 128, true, race::generic(w));
      map = shared_data(cta, (u32)address);
    } else {
      check_waited_for_grid(w, in, 1u << i, address, true);
      map = global_data(&w, &in, address, 128, true, "tensormap.replace");
      race::global_access(w, in, address, 128, true, race::generic(w));
    }
    replace_field(w, in, map, field, (u32)in.aux[3], value);
  }
  return Step::Done;
}
// Copies a tensor map from shared to global memory, with the fence for threads that acquire it there.
// aux: 0 offset of the destination, 1 offset of the source. Operands: destination, source.
HANDLER("tensormap.cp_fenceproxy", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  int i = first_lane(lanes);
  u64 to = lane_address(w, in.op[0], i, in.aux[0]);
  u32 from = (u32)lane_address(w, in.op[1], i, in.aux[1]);
  Cta &cta = shared_owner(w, in, from, 128, "tensormap.cp_fenceproxy");
  race::shared_access(w, in, cta, shared_offset(from), 128, false, race::generic(w));
  check_waited_for_grid(w, in, 1u << i, to, true);
  u8 *target = global_data(&w, &in, to, 128, true, "tensormap.cp_fenceproxy");
  race::global_access(w, in, to, 128, true, race::generic(w));
  memcpy(target, shared_data(cta, from), 128);
  return Step::Done;
}
