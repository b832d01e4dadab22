// Shadow state of one memory (a CTA's shared or tensor memory): who touched each unit last, and what was ever written.
//
// A unit is a byte of shared memory or one lane of a tensor-memory column; 16 units make a granule (16 bytes, or 16 lanes
// of a column). A granule keeps a short list of accesses, each with the mask of units it still stands for: a write
// replaces what it covers, a read replaces earlier reads by the same agent.
#pragma once
#include <vector>
#include "clock.h"
#include "types.h"

// Access::lane, if not a lane: several read it, or it is not known who did.
constexpr u8 kSeveralLanes = kLanes, kUnknownLane = kLanes + 1;

struct Access {
  Agent agent;
  u32 event;
  i32 line;
  u16 mask;
  bool write;
  bool generic;  // written through the generic proxy: the async proxy needs a fence to read it
  u8 scope = kWeak;  // of a strong access: two whose scopes include each other do not conflict
  u8 rank = 0;       // of the agent's CTA in its cluster
  u32 cluster = 0;   // of the agent; in global memory only
  u8 lane = kUnknownLane;
  bool strong() const { return scope != kWeak; }
  bool same_agent(const Access &o) const { return agent == o.agent && cluster == o.cluster; }
};

struct Conflict {
  // Only the last two are races; the others are ordered, but without what the proxies or the tensor core ask for besides.
  enum Kind : u8 { None, TensorFence, AsyncWriteFence, ProxyFence, LaneRace, Race } kind = None;
  Access earlier{};
};

// What an access has to find besides order.
struct Demands {
  bool async_proxy;               // reads find a proxy fence behind generic writes
  bool async_write_fence = false; // and so do writes, behind any generic access
  Agent own = kNoAgent;           // accesses by agents outside of [own, own + kWarpAgents) are ordered by tcgen05.fence too
  u32 max_readers = ~0u;          // how many reads to remember for a later write
  Agent warp = kNoAgent;          // first agent of the accessing warp: its lanes are told apart (lanes.h)
  const u32 *met = nullptr;       // by its streams, the last event that all its lanes are ordered after
};

class Shadow {
 public:
  explicit Shadow(size_t granules) : heads_(granules), written_(granules, 0) {}

  // Records an access to `mask` of granule `g`; returns the worst conflict with an earlier one. `known` is what the
  // accessing agent knows at the start of the access.
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
