// Happens-before: who did what, what was ordered before it, and what a synchronisation hands on.
#pragma once
#include "machine.h"
#include "shadow.h"

namespace race {

// The performer of an access: an agent, its event number, and what it knew when the access started.
struct Actor {
  Agent agent;
  u32 event;
  const ClockPair *known;
  bool generic;      // generic proxy
  bool async_proxy;  // reads shared memory through the async proxy
  u8 scope = kWeak;  // of a strong access
  u8 lane = kUnknownLane;  // for whom
  bool updates = false;    // its writes depend on what was there
};

void start_cluster(Cluster &c);
Actor generic(Warp &w);
// A new event on one of the warp's in-order streams.
Actor stream(Warp &w, WarpAgent kind, bool async_proxy);
// A free-running operation of its own: it knows what the warp knows now. Its clock must be kept by the caller.
struct Free {
  Agent agent;
  u32 event;
  ClockPair start;
  u8 lane = kUnknownLane;
  Actor actor(bool generic_proxy = false) const { return {agent, event, &start, generic_proxy, !generic_proxy, kWeak, lane}; }
  ClockPair finished() const {
    ClockPair c = start;
    c.order.raise(agent, event);
    c.fenced.raise(agent, event);
    return c;
  }
};
Free free_running(Warp &w);
// An operation joins the warp's tensor pipe: a later commit hands on what the warp knows now.
void enter_tensor_pipe(Warp &w);

void shared_access(Warp &w, const Instruction &in, Cta &cta, u32 offset, u32 bytes, bool write, const Actor &a);
void global_access(Warp &w, const Instruction &in, u64 address, u64 bytes, bool write, const Actor &a,
                   bool same_value = false);
// Tensor memory: `lanes` of 16 lanes from lane16 * 16, columns [column, column + count).
void tmem_access(Warp &w, const Instruction &in, Cta &cta, u32 lane16, u32 column, u32 count, u16 lanes, bool write,
                 const Actor &a, const char *what, bool also_read = false);
// An access to a CTA of the cluster that is not the warp's own: the CTA must still be there.
void touch_peer(Warp &w, const Instruction &in, Cta &cta, const Actor &a, bool commit = false);

// Synchronisation of the generic program.
// `lanes`: who releases, if not all that execute. `common`: the scope that has both sides in it. If relaxed, a fence of that
// scope has to release or to acquire.
void release(Warp &w, ClockPair &into, bool relaxed = false, u32 lanes = 0, Scope common = kCtaScope);
void acquire(Warp &w, const ClockPair &from, bool relaxed = false, Scope common = kCtaScope);
// The same through a strong access of a scope to a location in memory. Other clusters see those to global memory.
void release_at(Warp &w, const void *location, bool relaxed, Scope scope);
void acquire_at(Warp &w, const void *location, bool global, bool relaxed, Scope scope);
void lanes_meet(Warp &w);  // bar.warp.sync
void release_fence(Warp &w, Scope scope);
void acquire_fence(Warp &w, Scope scope);
void barrier_init_fence(Warp &w);
void proxy_fence(Warp &w);
void tensor_fence(Warp &w, bool after);
void learn(Warp &w, WarpAgent kind, u32 event);  // the warp waited for its own stream
void learn_agent(Warp &w, Agent agent, u32 event);
// Execution order alone, which even a .relaxed barrier gives: `into` gets all that the warp has done.
void executed(Warp &w, Clock &into);
void warp_exits(Warp &w);
void cta_ends(Cta &c);
// Whether Checks.tcgen05_fence is on.
bool tracks_tensor_fences();

}  // namespace race
