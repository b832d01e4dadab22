// Asynchronous operations and when they take effect.
//
// An eager schedule performs an operation when it is issued. The others queue it: it takes effect at a random time, or
// not before everybody who could go on without it has stopped. Ordering between operations is kept where the hardware
// keeps it: a warp's tensor pipe, its cp.async and its tcgen05.ld/st streams are in order, TMA operations are not.
#pragma once
#include "machine.h"

AsyncPtr make_async(const Instruction &in, const char *what, std::function<void()> effect);
void issue_free(Warp &w, const AsyncPtr &op);
void issue_tensor_pipe(Warp &w, const AsyncPtr &op);
void issue_cp_async(Warp &w, const AsyncPtr &op);
void issue_tmem(Warp &w, const Instruction &in, const AsyncPtr &op, bool is_load, u32 event,
                u32 registers);

// Completes one queued operation of the cluster; false if there is none.
bool complete_one(Cluster &c);
// The instruction may use registers whose tcgen05.ld nothing has waited for: that is reported and counts as the wait. A
// register move is no use; what it writes is pending in turn.
void check_pending_registers(Warp &w, const Instruction &in, u32 lanes);
void settle_tmem(Warp &w, bool loads, bool stores);
void settle_everything(Warp &w);
