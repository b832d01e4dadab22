#include "shadow.h"

i32 Shadow::allocate() {
  if (free_ >= 0) {
    i32 n = free_;
    free_ = pool_[n].next;
    return n;
  }
  pool_.push_back({});
  return (i32)pool_.size() - 1;
}

static bool ordered(const Access &e, const Access &a, const ClockPair &known) {
  if (e.cluster == a.cluster) return known.order[e.agent] >= e.event;
  auto of = known.foreign.find(e.cluster);
  return of != known.foreign.end() && of->second[e.agent] >= e.event;
}
static bool morally_strong(const Access &e, const Access &a) {
  if (!a.strong() || !e.strong()) return false;
  Scope common = e.device != a.device     ? kSysScope
                 : e.cluster != a.cluster ? kGpuScope
                 : e.rank != a.rank       ? kClusterScope
                                          : kCtaScope;
  return std::min(a.scope, e.scope) >= common;
}
// Whether two accesses of one warp by different lanes conflict. One instruction may write a location for several lanes.
static bool between_lanes(const Access &e, const Access &a, const Demands &d) {
  u32 k = e.agent - d.warp;
  if (e.cluster != a.cluster || (k != kGeneric && k != kSolo && k != kCpAsync) || e.event <= d.met[k]) return false;
  return e.lane != a.lane && e.lane != kUnknownLane && a.lane != kUnknownLane && !(e.line == a.line && e.write && a.write);
}
static Conflict::Kind between(const Access &e, const Access &a, const ClockPair &known, const Demands &d) {
  if (!(a.write || e.write) || morally_strong(e, a)) return Conflict::None;
  if (d.warp != kNoAgent && between_lanes(e, a, d)) return Conflict::LaneRace;
  if (e.same_agent(a)) return Conflict::None;
  if (!ordered(e, a, known)) return Conflict::Race;
  if (d.async_proxy && e.generic && (a.write ? d.async_write_fence : e.write) && known.fenced[e.agent] < e.event)
    return a.write ? Conflict::AsyncWriteFence : Conflict::ProxyFence;
  if (d.own != kNoAgent && e.agent - d.own >= kWarpAgents && known.tensor[e.agent] < e.event) return Conflict::TensorFence;
  return Conflict::None;
}

// The lane of two merged reads by one agent since its lanes last met.
static u8 reader(const Access &e, const Access &a, const Demands &d) {
  bool old = d.warp == kNoAgent || e.agent < d.warp || e.agent - d.warp >= kWarpAgents || e.event <= d.met[e.agent - d.warp];
  return old || e.lane == a.lane ? a.lane : e.lane == kUnknownLane ? kUnknownLane : kSeveralLanes;
}

Conflict Shadow::access(u32 g, const Access &a, const ClockPair &known, const Demands &demands) {
  i32 *link = &heads_[g].first;
  Conflict worst;
  bool merged = false;
  u32 readers = 1;
  while (*link >= 0) {
    i32 n = *link;
    Access &e = pool_[n].a;
    u16 overlap = e.mask & a.mask;
    if (!overlap) {
      link = &pool_[n].next;
      continue;
    }
    Conflict::Kind kind = between(e, a, known, demands);
    if (kind > worst.kind) worst = {kind, e};
    // A strong write is not ordered after other strong accesses, so it replaces only accesses of its own agent.
    bool replaced = (a.write && !(a.strong() && e.strong() && !e.same_agent(a))) || (!e.write && e.same_agent(a));
    if (demands.max_readers != ~0u && !a.write && !e.write) {
      // An access ordered after this read is ordered after every access before the read.
      bool implied = (e.mask & ~a.mask) == 0 && ordered(e, a, known);
      replaced |= implied || ++readers > demands.max_readers;
    }
    if (replaced) {
      // The same units are read again: refresh in place, the common case of a loop.
      if (!a.write && !merged && e.mask == a.mask) {
        u8 lane = reader(e, a, demands);
        e = a;
        e.lane = lane;
        merged = true;
        link = &pool_[n].next;
        continue;
      }
      e.mask &= (u16)~a.mask;
      if (!e.mask) {
        *link = pool_[n].next;
        pool_[n].next = free_;
        free_ = n;
        continue;
      }
    }
    link = &pool_[n].next;
  }
  if (!merged) {
    i32 n = allocate();
    pool_[n] = {a, heads_[g].first};
    heads_[g].first = n;
  }
  if (a.write) written_[g] |= a.mask;
  return worst;
}

const Access *Shadow::last_write(u32 g, u16 unit) const {
  // New accesses go to the head of the list.
  for (i32 n = heads_[g].first; n >= 0; n = pool_[n].next)
    if (pool_[n].a.write && pool_[n].a.mask & unit) return &pool_[n].a;
  return nullptr;
}

void Shadow::forget(u32 first, u32 count) {
  for (u32 g = first; g < first + count && g < written_.size(); g++) written_[g] = 0;
}

bool Shadow::unordered(u32 g, Agent self, const Clock &known, Access *out) const {
  for (i32 n = heads_[g].first; n >= 0; n = pool_[n].next)
    if (pool_[n].a.agent != self && known[pool_[n].a.agent] < pool_[n].a.event) {
      *out = pool_[n].a;
      return true;
    }
  return false;
}

void Shadow::reset() {
  for (auto &h : heads_) h.first = -1;
  std::fill(written_.begin(), written_.end(), 0);
  pool_.clear();
  free_ = -1;
}
