// Shadow state of one memory (a CTA's shared or tensor memory): the last accesses to each unit, and which were ever written.
//
// A unit is a byte of shared memory or one lane of a tensor-memory column; 16 units make a granule (16 bytes, or 16 lanes
// of a column). A granule keeps a short list of accesses, each with the mask of units that it is the latest for: a
// write replaces the accesses to its units, a read replaces earlier reads by the same agent.
#pragma once
#include <vector>
#include "clock.h"
#include "types.h"

// Values of Access::lane that are no lane: several lanes read, or the lane is unknown.
constexpr u8 kSeveralLanes = kLanes, kUnknownLane = kLanes + 1;

struct Access {
  Agent agent;
  u32 event;
  i32 line;
  u16 mask;
  bool write;
  bool generic;  // written through the generic proxy: the async proxy needs a fence to read it
  u8 scope = kWeak;  // of a strong access: two strong accesses whose scopes include each other do not conflict
  u8 rank = 0;       // rank of the agent's CTA in its cluster
  u32 cluster = 0;   // the agent's cluster; used for global memory only
  u8 lane = kUnknownLane;
  u8 device = 0;     // the agent's GPU
  bool strong() const { return scope != kWeak; }
  bool same_agent(const Access &o) const { return agent == o.agent && cluster == o.cluster; }
};

struct Conflict {
  // Only the last two are races; the other kinds are ordered, but a fence for the proxies or the tensor core is missing.
  enum Kind : u8 { None, TensorFence, AsyncWriteFence, ProxyFence, LaneRace, Race } kind = None;
  Access earlier{};
};

// The conditions on an access in addition to order.
struct Demands {
  bool async_proxy;               // reads need a proxy fence after generic writes
  bool async_write_fence = false; // writes need a proxy fence after any generic access
  Agent own = kNoAgent;           // accesses by agents outside of [own, own + kWarpAgents) need tcgen05.fence too
  u32 max_readers = ~0u;          // number of reads to remember for a later write
  Agent warp = kNoAgent;          // first agent of the accessing warp: its lanes are told apart (lanes.h)
  const u32 *met = nullptr;       // by stream of that warp: the last event that all its lanes are ordered after
};

class Shadow {
 public:
  explicit Shadow(size_t granules) : heads_(granules), written_(granules, 0) {}

  // Records an access to `mask` of granule `g`; returns the worst conflict with an earlier one. `known` holds
  // the events that the accessing agent knows at the start of the access.
  Conflict access(u32 g, const Access &a, const ClockPair &known, const Demands &demands);

  u16 written(u32 g) const { return written_[g]; }
  // The latest write to a unit of granule `g`, or null.
  const Access *last_write(u32 g, u16 unit) const;
  void mark_written(u32 g, u16 mask) { written_[g] |= mask; }
  void forget(u32 first, u32 count);         // contents become undefined, ordering is kept
  size_t granules() const { return heads_.size(); }
  void reset();
  // Accesses to a granule that `known` does not cover (for frees).
  bool unordered(u32 g, Agent self, const Clock &known, Access *out) const;

 private:
  struct Node {
    Access a;
    i32 next;
  };
  struct Head {
    i32 first = -1;
  };
  i32 allocate();
  std::vector<Head> heads_;
  std::vector<u16> written_;
  std::vector<Node> pool_;
  i32 free_ = -1;
};
