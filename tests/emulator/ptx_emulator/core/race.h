// Happens-before: accesses, the events ordered before them, and the events that a synchronisation publishes.
#pragma once
#include "machine.h"
#include "shadow.h"

namespace race {

// The performer of an access: an agent, its event number, and the events it knew when the access started.
struct Actor {
  Agent agent;
  u32 event;
  const ClockPair *known;
  bool generic;      // generic proxy
  bool async_proxy;  // reads shared memory through the async proxy
  u8 scope = kWeak;  // the scope of a strong access
  u8 lane = kUnknownLane;  // the lane that accesses
  bool updates = false;    // a read-modify-write
};

void start_cluster(Cluster &c);
// Adds the events that a completed cluster knows, its own included.
void grid_knows(const Cluster &c, std::map<u32, Clock> &known);
Actor generic(Warp &w);
// A new event on one of the warp's in-order streams.
Actor stream(Warp &w, WarpAgent kind, bool async_proxy);
// A free-running operation with an agent of its own; it knows the events that the warp knows now. The caller must keep it
// alive while its actor is used.
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
// An operation joins the warp's tensor pipe: a later commit publishes the events that the warp knows now.
void enter_tensor_pipe(Warp &w);

void shared_access(Warp &w, const Instruction &in, Cta &cta, u32 offset, u32 bytes, bool write, const Actor &a);
void global_access(Warp &w, const Instruction &in, u64 address, u64 bytes, bool write, const Actor &a,
                   bool same_value = false);
// Tensor memory: `lanes` of 16 lanes from lane16 * 16, columns [column, column + count).
void tmem_access(Warp &w, const Instruction &in, Cta &cta, u32 lane16, u32 column, u32 count, u16 lanes, bool write,
                 const Actor &a, const char *what, bool also_read = false);
// Checks that the accessed CTA, another one of the cluster, has not exited, and records the access for its exit.
void touch_peer(Warp &w, const Instruction &in, Cta &cta, const Actor &a, bool commit = false);

// Synchronisation of the generic program.
// `lanes`: the releasing lanes, if not all executing ones. `common`: the narrowest scope that includes both sides. A relaxed
// operation publishes, or acquires, only through a fence of at least that scope.
void release(Warp &w, ClockPair &into, bool relaxed = false, u32 lanes = 0, Scope common = kCtaScope);
void acquire(Warp &w, const ClockPair &from, bool relaxed = false, Scope common = kCtaScope);
// The same through a strong access of a scope to a memory location. Other clusters see only accesses to global memory.
void release_at(Warp &w, const void *location, bool relaxed, Scope scope);
// The two halves of `release_at`, for a store that becomes visible later: what it publishes (null: nothing), and that it does.
std::unique_ptr<HandedOn> handed_on(Warp &w, bool relaxed, Scope scope);
void publish(const Warp &w, const void *location, const HandedOn &handed, Scope scope);
void acquire_at(Warp &w, const void *location, bool global, bool relaxed, Scope scope);
void lanes_meet(Warp &w);  // bar.warp.sync
void release_fence(Warp &w, Scope scope);
void acquire_fence(Warp &w, Scope scope);
void barrier_init_fence(Warp &w);
void proxy_fence(Warp &w);
void tensor_fence(Warp &w, bool after);
void learn(Warp &w, WarpAgent kind, u32 event);  // the warp has waited for its own stream
void learn_agent(Warp &w, Agent agent, u32 event);
// Execution order without memory order, which even a .relaxed barrier gives: `into` gets all events that the warp knows.
void executed(Warp &w, Clock &into);
void warp_exits(Warp &w);
void cta_ends(Cta &c);
// Whether Checks.tcgen05_fence is on.
bool tracks_tensor_fences();

}  // namespace race
