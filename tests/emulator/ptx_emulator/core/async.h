// Asynchronous operations and when they take effect.
//
// An eager schedule performs an operation when it is issued. The other schedules queue it: it completes at a random time
// (random), or only once no warp can continue without it (late). The hardware's order is kept: operations of one warp's
// tensor pipe, of its cp.async and of its tcgen05.ld/st streams complete in order, TMA operations in any order.
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
// Called before an instruction executes. If it uses a register of a tcgen05.ld that no wait covers, this is reported and
// counts as the wait. A register move is not a use: its destination becomes pending too.
void check_pending_registers(Warp &w, const Instruction &in, u32 lanes);
void settle_tmem(Warp &w, bool loads, bool stores);
void settle_everything(Warp &w);
