// Shared-memory operands and the product, for both tensor-core generations (tcgen05.mma, wgmma).
#pragma once
#include "descriptor.h"
#include "race.h"

// Accesses of rows [first_row, first_row + rows) and columns [0, k) of one operand in shared memory: every 16-byte
// chunk. A collected operand is still in the collector from an earlier instruction: it must be unchanged in shared memory,
// and costs no bandwidth.
void track_operand(Warp &w, const Instruction &in, Cta &c, const SmemDescriptor &d, bool mn_major, Packing p, u32 rows,
                   u32 k, const race::Actor &actor, const char *operand, u32 first_row = 0,
                   bool collected = false);
// Reads an operand to out[row * row_stride + k * k_stride].
void load_operand(const Cta &c, const SmemDescriptor &d, bool mn_major, Element e, Packing p, u32 rows, u32 k, float *out,
                  size_t row_stride, size_t k_stride);
// c[0..n) += sum over k of a[k] * bt[k][0..n), where row k of bt begins at bt + k * stride.
void multiply_row(u32 n, u32 k_count, const float *a, const float *bt, size_t stride, float *c);
