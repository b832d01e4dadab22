// Vector clocks of the happens-before checker.
//
// An *agent* is a sequence of accesses that are ordered among themselves: the generic instructions of a warp, the tensor
// pipe that a warp feeds, the tcgen05.ld stream of a warp, one agent slot of a warp's TMA loads. Component i of a clock is
// the last event of agent i that is known to have happened.
//
// A ClockPair holds `order`, which is happens-before, and `fenced`, the part of it with a fence.proxy.async on the path:
// the async proxy may read a generic-proxy write only if `fenced` covers it (PTX ISA, "Memory Consistency Model:
// proxy-preserved base causality order"). A third clock, `tensor`, is the part with tcgen05.fence::before_thread_sync and
// ::after_thread_sync (or a commit) on the path; it is kept for Checks.tcgen05_fence.
//
// Agents are numbered within a cluster. `foreign` holds the known events of agents in other clusters, by the sequence
// number of the cluster; only strong accesses to global memory add to it, so it is mostly empty.
#pragma once
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <vector>
#include "types.h"

using Agent = u32;
constexpr Agent kNoAgent = ~0u;

// Memory scopes (PTX ISA, "Memory Consistency Model: Scope"); also the narrowest scope that includes two given threads.
enum Scope : u8 { kCtaScope, kClusterScope, kGpuScope, kSysScope, kScopes };
constexpr u8 kWeak = 0xff;  // the scope of an access that is not strong

class Clock {
 public:
  u32 operator[](Agent a) const { return a < v_.size() ? v_[a] : 0; }
  void raise(Agent a, u32 event) {
    if (a >= v_.size()) v_.resize(a + 1, 0);
    if (v_[a] < event) v_[a] = event;
  }
  void set(Agent a, u32 event) { v_[a] = event; }  // the agent must have a component
  void join(const Clock &o) {
    if (o.v_.size() > v_.size()) v_.resize(o.v_.size(), 0);
    u32 *__restrict d = v_.data();
    const u32 *__restrict s = o.v_.data();
    for (size_t i = 0, n = o.v_.size(); i < n; i++) d[i] = std::max(d[i], s[i]);
  }
  // The events that both clocks know.
  void meet(const Clock &o) {
    if (o.v_.size() < v_.size()) v_.resize(o.v_.size());
    u32 *__restrict d = v_.data();
    const u32 *__restrict s = o.v_.data();
    for (size_t i = 0, n = v_.size(); i < n; i++) d[i] = std::min(d[i], s[i]);
  }
  bool covers(const Clock &o) const {
    for (size_t i = 0; i < o.v_.size(); i++)
      if (o.v_[i] > (*this)[(Agent)i]) return false;
    return true;
  }
  size_t size() const { return v_.size(); }
  bool operator==(const Clock &o) const { return v_ == o.v_; }
  void clear() { v_.clear(); }

 private:
  std::vector<u32> v_;
};

struct ClockPair {
  Clock order, fenced, tensor;
  std::map<u32, Clock> foreign;
  // Joins all clocks except `tensor`.
  void join_order(const ClockPair &o) {
    order.join(o.order);
    fenced.join(o.fenced);
    for (auto &[cluster, clock] : o.foreign) foreign[cluster].join(clock);
  }
  void join(const ClockPair &o) {
    join_order(o);
    tensor.join(o.tensor);
  }
  void clear() {
    order.clear();
    fenced.clear();
    tensor.clear();
    foreign.clear();
  }
  bool operator==(const ClockPair &o) const {
    return order == o.order && fenced == o.fenced && tensor == o.tensor && foreign == o.foreign;
  }
};
// The clock that a strong store publishes to a reader in the same CTA, in another CTA of the cluster, in another cluster, or
// on another GPU.
using HandedOn = std::array<std::shared_ptr<const ClockPair>, kScopes>;

// The fixed agents of every warp; TMA loads and other free-running operations get agents after these (race::free_running).
enum WarpAgent : u32 {
  kGeneric,      // instructions of the warp itself
  kTensorPipe,   // tcgen05.mma / cp / shift issued by the warp: one in-order pipe
  kTmemLoad,     // tcgen05.ld, known complete after tcgen05.wait::ld
  kTmemStore,    // tcgen05.st, known complete after tcgen05.wait::st
  kCpAsync,      // cp.async, known complete after a wait or through an mbarrier
  kBulkRead,     // shared-memory reads of bulk stores
  kBulkWrite,    // global-memory writes of bulk stores
  kBarrierInit,  // mbarrier.init, the only events that fence.mbarrier_init publishes
  kWgmma,        // wgmma.mma_async (sm_90a)
  kSolo,         // kGeneric while one lane executes alone; both share one numbering of events
  kWarpAgents
};
