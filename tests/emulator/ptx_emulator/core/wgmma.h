// wgmma: matrix products by warpgroups of sm_90a (PTX ISA "Asynchronous Warpgroup Level Matrix Instructions").
//
// One wgmma.mma_async is an operation of the whole warpgroup (four warps from a multiple of four on). It is issued when the
// last of them executes it, and is complete for all of them at once: released kernels hand a buffer back after one warp's
// wait. The operations of a warpgroup are performed in order. What they read must be ordered before the instruction in every
// warp; but a warp's own 16 rows of A in that warp only: FlashAttention-3 writes P so, with no barrier of the warpgroup.
#pragma once
#include "descriptor.h"
#include "machine.h"

constexpr u32 kWarpgroupWarps = 4;

struct WgmmaOperation {
  const Instruction *in;
  SmemDescriptor a, b;
  u64 a_bits, b_bits;  // of the descriptors
  bool accumulate;
  u32 arrived = 0;     // warps that have executed it
  ClockPair start[kWarpgroupWarps];  // what each warp knew
};

struct Warpgroup {
  Cta *cta;
  u32 first_warp;
  std::deque<WgmmaOperation> queue;  // executed by some warp, not yet performed
  u64 performed = 0;                 // operations that have left the queue
};

// What one warp has under way. Operations are numbered from 1 in the order of the program.
struct WgmmaOfWarp {
  u64 executed = 0;         // operations so far
  u64 committed = 0;        // of these, in a group
  u64 complete = 0;         // of these, waited for
  std::deque<u64> groups;   // last operation of each group not waited for
  u32 fences = 0;           // wgmma.fence so far
  // One row of 32-bit registers.
  struct Row {
    u64 accumulator_of = 0, fragment_of = 0;  // last operation that uses it so
    i32 operation_line = 0;
    u32 shape = 0;        // of the accumulator, with the register's place in it
    u32 fences = 0;       // wgmma.fence executed before the last use by another instruction, plus 1
    u32 fences_at_move = 0;  // the same for a plain mov
    i32 access_line = 0;
  };
  std::vector<Row> rows;
};

// Finds the instructions that name registers of a wgmma.mma_async.
void mark_wgmma_registers(Program &p);
// Such an instruction is executed: its registers must not be under way, and the next wgmma.mma_async needs a fence. False if
// it must be tried again later.
bool check_wgmma_registers(Warp &w, const Instruction &in);
void check_wgmma_at_exit(Warp &w);
// Whether the next operation of the warpgroup has been executed by all of its warps, and its effect.
bool wgmma_ready(const Warpgroup &g);
void perform_wgmma(Warpgroup &g);
