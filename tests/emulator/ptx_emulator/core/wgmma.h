// wgmma: matrix products by warpgroups of sm_90a (PTX ISA "Asynchronous Warpgroup Level Matrix Instructions").
//
// One wgmma.mma_async is an operation of the whole warpgroup (four warps, the first a multiple of four). It is issued when
// the last of its warps executes it, and is complete for all of them at once: released kernels free a buffer after one
// warp's wait. The operations of a warpgroup are performed in order. Their operands must be ordered before the instruction
// in every warp, with one exception: a warp's own 16 rows of A, in that warp only. FlashAttention-3 writes P this way,
// without a barrier of the warpgroup.
#pragma once
#include "descriptor.h"
#include "machine.h"

constexpr u32 kWarpgroupWarps = 4;

struct WgmmaOperation {
  const Instruction *in;
  SmemDescriptor a, b;
  u64 a_bits, b_bits;  // the descriptors
  bool accumulate;
  u32 arrived = 0;     // warps that have executed it
  ClockPair start[kWarpgroupWarps];  // the events that each warp knew
};

struct Warpgroup {
  Cta *cta;
  u32 first_warp;
  std::deque<WgmmaOperation> queue;  // executed by some warp, not yet performed
  u64 performed = 0;                 // operations that have left the queue
};

// One warp's pending operations. Operations are numbered from 1 in program order.
struct WgmmaOfWarp {
  u64 executed = 0;         // operations executed so far
  u64 committed = 0;        // of these, how many are in a group
  u64 complete = 0;         // of these, how many a wait covers
  std::deque<u64> groups;   // last operation of each group that no wait covers
  u32 fences = 0;           // wgmma.fence so far
  // One row of 32-bit registers.
  struct Row {
    u64 accumulator_of = 0, fragment_of = 0;  // last operation with the register as accumulator, as A fragment
    i32 operation_line = 0;
    u32 shape = 0;        // of the accumulator, with the register's index in it
    u32 fences = 0;       // wgmma.fence executed before the last use by another instruction, plus 1
    u32 fences_at_move = 0;  // the same for a plain mov
    i32 access_line = 0;
  };
  std::vector<Row> rows;
};

// Finds the instructions that name registers of a wgmma.mma_async.
void mark_wgmma_registers(Program &p);
// Called when such an instruction executes: no pending operation may use its registers, and the next wgmma.mma_async needs
// a fence. Returns false if the instruction must be retried later.
bool check_wgmma_registers(Warp &w, const Instruction &in);
void check_wgmma_at_exit(Warp &w);
// Whether all warps of the warpgroup have executed its next operation; and the effect of that operation.
bool wgmma_ready(const Warpgroup &g);
void perform_wgmma(Warpgroup &g);
