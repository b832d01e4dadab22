// The lanes of one warp as threads: a lane may build on, or publish, the accesses of another lane only after a barrier
// between the two.
//
// A warp's clock stands for all its lanes. In addition, each of the warp's own access streams keeps the last event that all
// lanes are ordered after (by bar.warp.sync, or by a barrier that the warp both released to and acquired from), and the
// lanes that have accessed memory since. Instructions such as elect.sync and shfl.sync make lanes wait for each other
// without ordering memory: PTX grants memory order to bar.warp.sync only. An acquire by one lane counts for all lanes.
#pragma once
#include "machine.h"

namespace lanes {

bool tracked();
// The lane that executes alone, or kUnknownLane.
u8 executing(const Warp &w);
// Records that an event of the warp's own stream `k` accesses memory for the executing lanes.
void accessed(Warp &w, u32 k, u32 event);
// Orders every lane after all events of all lanes so far.
void meet(Warp &w);
// Orders every lane after the warp's own events that are in the acquired `clock`.
void acquired(Warp &w, const Clock &clock);

// During its lifetime, `clock` lacks the events of lanes other than `handing` since the lanes last met.
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

// The first hand-over from which this event of the warp was withheld, or null.
const LaneOrder::Handover *withheld(const Warp &w, u32 k, u32 event);

}  // namespace lanes
