#include "operand.h"
#include "memory.h"

void track_operand(Warp &w, const Instruction &in, Cta &c, const SmemDescriptor &d, bool mn_major, Packing p, u32 rows,
                   u32 k, const race::Actor &actor, const char *operand, u32 first_row, bool collected) {
  u32 outer = mn_major ? k : rows, inner = mn_major ? rows / p.per_chunk : k / p.per_chunk;
  if (d.swizzle_mode == kSwizzle128Atom32 && !(mn_major && p.bits == 32))
    fail(ErrorKind::MisalignedDescriptor, &w, &in, "%s: the swizzle of 32-byte atoms is for MN-major tf32", operand);
  // Groups of rows lie a stride apart; a stride of 0 repeats one group on purpose, and one of less than half a row
  // addresses the same rows further along K (CUTLASS's slicek example). Strides in elements or in units of 16 bytes are longer.
  u32 pattern = d.pattern_rows() * d.width;
  if (d.swizzle_mode && outer > d.pattern_rows() && 2 * d.stride >= d.width && d.stride < pattern)
    report(ErrorKind::MisalignedDescriptor, &w, &in,
           "%s: the descriptor's stride of %u bytes is less than the %u bytes of %u rows of the %u-byte swizzle, so rows "
           "overlap: a stride in elements, or of another layout?",
           operand, d.stride, pattern, d.pattern_rows(), d.width);
  for (u32 o = 0; o < outer; o++)
    for (u32 i = 0; i < inner; i++) {
      u32 offset = mn_major ? d.mn_major(first_row / p.per_chunk + i, o) : d.k_major(first_row + o, i);
      shared_owner(w, in, shared_address(c.rank, offset), 16, operand);
      race::shared_access(w, in, c, offset, 16, false, actor);
    }
  if (!collected) machine.counters.operands_read += (u64)outer * inner * 16;
}

void load_operand(const Cta &c, const SmemDescriptor &d, bool mn_major, Element e, Packing p, u32 rows, u32 k, float *out,
                  size_t row_stride, size_t k_stride) {
  float chunk[32];
  if (!mn_major) {
    for (u32 r = 0; r < rows; r++)
      for (u32 i = 0; i < k / p.per_chunk; i++) {
        u32 n = decode_chunk(c.smem.data() + d.k_major(r, i), e, p, chunk);
        for (u32 j = 0; j < n; j++) out[r * row_stride + (i * n + j) * k_stride] = chunk[j];
      }
  } else {
    for (u32 kk = 0; kk < k; kk++)
      for (u32 i = 0; i < rows / p.per_chunk; i++) {
        u32 n = decode_chunk(c.smem.data() + d.mn_major(i, kk), e, p, chunk);
        for (u32 j = 0; j < n; j++) out[(i * n + j) * row_stride + kk * k_stride] = chunk[j];
      }
  }
}

// The products are exact, so a fused multiply-add changes nothing.
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3"))) void multiply_row(
    u32 n, u32 k_count, const float *__restrict a, const float *__restrict bt, size_t stride, float *__restrict c) {
  for (u32 k = 0; k < k_count; k += 4) {
    float a0 = a[k], a1 = a[k + 1], a2 = a[k + 2], a3 = a[k + 3];
    const float *__restrict b0 = bt + k * stride, *__restrict b1 = b0 + stride, *__restrict b2 = b1 + stride,
                            *__restrict b3 = b2 + stride;
    for (u32 j = 0; j < n; j++)
      c[j] = __builtin_fmaf(a3, b3[j], __builtin_fmaf(a2, b2[j], __builtin_fmaf(a1, b1[j], __builtin_fmaf(a0, b0[j], c[j]))));
  }
}
