// The lanes of one warp as threads: what one did, another may follow or hand on only behind a barrier between them.
//
// A warp's clock stands for all its lanes. Beside it, each of the warp's own streams of accesses keeps the last event that
// all lanes are ordered after, by bar.warp.sync or a barrier that brings back what the warp released, and which lanes have
// accessed memory since. Instructions such as elect.sync and shfl.sync make lanes wait for each other, which orders no
// memory: PTX says so of bar.warp.sync only. What one lane acquires counts for all.
#pragma once
#include "machine.h"

namespace lanes {

bool tracked();
// The lane that executes alone, or kUnknownLane.
u8 executing(const Warp &w);
// An event of the warp's own stream `k` accesses memory for the lanes that execute.
void accessed(Warp &w, u32 k, u32 event);
// All lanes are ordered after what all of them did.
void meet(Warp &w);
// So they are after those of the warp's own events that a barrier brought.
void acquired(Warp &w, const Clock &clock);

// While it lives, `clock` lacks what lanes other than `handing` did since the lanes last met.
class Withheld {
 public:
  Withheld(Warp &w, ClockPair &clock, u32 handing);
  ~Withheld();
  Withheld(const Withheld &) = delete;
  Withheld &operator=(const Withheld &) = delete;

 private:
  Warp &w_;
  ClockPair &clock_;
  bool anything_ = false;
  u32 order_[kWarpAgents] = {}, fenced_[kWarpAgents] = {};
};

// Where an event of this warp was withheld first, or null.
const LaneOrder::Handover *withheld(const Warp &w, u32 k, u32 event);

}  // namespace lanes
