#include "lanes.h"

namespace lanes {

constexpr size_t kHandoversKept = 1024;
// Streams into which several lanes of a warp issue. The other streams belong to the thread that issues an operation, or to
// a warpgroup.
constexpr WarpAgent kStreams[] = {kGeneric, kSolo, kTmemLoad, kTmemStore, kCpAsync};

bool tracked() { return machine.track_order && machine.level[(int)ErrorKind::LaneRace] != Level::Off; }

u8 executing(const Warp &w) { return w.lanes & (w.lanes - 1) ? kUnknownLane : (u8)first_lane(w.lanes); }

void accessed(Warp &w, u32 k, u32 event) {
  LaneOrder &o = w.lane_order;
  if (o.last[k] <= o.met[k]) o.accessed[k] = 0;
  o.last[k] = event;
  o.accessed[k] |= w.lanes;
}

void meet(Warp &w) {
  for (WarpAgent k : kStreams) w.lane_order.met[k] = w.now.order[w.agent(k)];
}

void acquired(Warp &w, const Clock &clock) {
  for (WarpAgent k : kStreams) w.lane_order.met[k] = std::max(w.lane_order.met[k], clock[w.agent(k)]);
}

Withheld::Withheld(Warp &w, ClockPair &clock, u32 handing) : w_(w), clock_(clock) {
  if (!tracked() || !(~handing & ~w.exited)) return;
  LaneOrder &o = w.lane_order;
  for (WarpAgent k : kStreams) {
    u32 known = clock.order[w.agent(k)], met = o.met[k];
    if (known <= met || o.last[k] <= met || !(o.accessed[k] & ~handing)) continue;
    anything_ = true;
    order_[k] = known;
    fenced_[k] = clock.fenced[w.agent(k)];
    clock.order.set(w.agent(k), met);
    if (fenced_[k] > met) clock.fenced.set(w.agent(k), met);
    o.handovers.push_back({k, met, known, w.executing->line, handing});
    if (o.handovers.size() > kHandoversKept) o.handovers.pop_front();
  }
}

Withheld::~Withheld() {
  if (!anything_) return;
  for (WarpAgent k : kStreams)
    if (order_[k]) {
      clock_.order.raise(w_.agent(k), order_[k]);
      clock_.fenced.raise(w_.agent(k), fenced_[k]);
    }
}

const LaneOrder::Handover *withheld(const Warp &w, u32 k, u32 event) {
  for (const LaneOrder::Handover &h : w.lane_order.handovers)
    if (h.stream == k && event > h.met && event <= h.known) return &h;
  return nullptr;
}

}  // namespace lanes
