#include "race.h"
#include "lanes.h"
#include "memory.h"
#include "race_report.h"

namespace race {

constexpr u32 kPageGranules = 256;  // granules in a page of the global shadow
constexpr u32 kGlobalReaders = 4;   // remembered reads of a granule of global memory

// Begins a new event: later accesses of the warp are not part of the clocks that it has published so far.
static void next_event(Warp &w) {
  ++w.events[kGeneric];
  for (WarpAgent k : {kGeneric, kSolo}) w.now.order.raise(w.agent(k), w.events[kGeneric]);
}

// A grid begins after the earlier grids of its GPU have ended: it knows their events, as after an acquire fence of the system,
// and its relaxed stores publish them, as after a release fence of the system.
static void follow_earlier_grids(Warp &w) {
  const auto &known = machine.gpus[w.cta->cluster->grid->device].known;
  if (known.empty()) return;
  w.now.foreign = known;
  for (ClockPair &released : w.released) {
    released.order.raise(w.agent(kGeneric), 0);
    released.foreign = known;
  }
}

void grid_knows(const Cluster &c, std::map<u32, Clock> &known) {
  Clock &own = known[c.sequence];
  for (auto &cta : c.ctas)
    for (auto &w : cta->warps) {
      for (u32 k = 0; k < kWarpAgents; k++) own.raise(w->agent((WarpAgent)k), w->events[k]);
      own.join(w->now.order);
      for (auto &[cluster, clock] : w->now.foreign) known[cluster].join(clock);
      for (const ClockPair &seen : w->to_acquire)
        for (auto &[cluster, clock] : seen.foreign) known[cluster].join(clock);
    }
  for (u32 k = 0; k < c.slot_events.size(); k++) own.raise(c.warp_count * kWarpAgents + k, c.slot_events[k]);
}

void start_cluster(Cluster &c) {
  c.next_slot = 0;
  c.slot_events.clear();
  for (auto &cta : c.ctas)
    for (auto &w : cta->warps) {
      w->now.clear();
      for (int s = 0; s < kScopes; s++) {
        w->released[s].clear();
        w->to_acquire[s].clear();
      }
      w->released_copy = {};
      w->acquired = {};
      w->pipe.clear();
      w->tensor_published.clear();
      w->tensor_seen.clear();
      w->slots.clear();
      for (u32 &e : w->events) e = 0;
      w->lane_order = {};
      follow_earlier_grids(*w);
      next_event(*w);
    }
}

Actor generic(Warp &w) {
  u8 lane = lanes::executing(w);
  WarpAgent k = lane != kUnknownLane && lanes::tracked() ? kSolo : kGeneric;
  return {w.agent(k), w.events[kGeneric], &w.now, true, false, kWeak, lane};
}

Actor stream(Warp &w, WarpAgent kind, bool async_proxy) {
  // cp.async counts as generic proxy in PTX, but CUTLASS and FlashAttention-4 feed it to MMAs without a proxy fence.
  return {w.agent(kind), ++w.events[kind], &w.now, false, async_proxy, kWeak, lanes::executing(w)};
}

Free free_running(Warp &w) {
  Cluster &c = *w.cta->cluster;
  Free f;
  {
    lanes::Withheld others(w, w.now, w.lanes);
    f.start = w.now;
  }
  f.lane = lanes::executing(w);
  f.start.tensor.clear();
  next_event(w);
  // An agent slot is reused once its last operation is known to be complete: then knowing a later event implies the earlier.
  u32 fixed = c.warp_count * kWarpAgents;
  for (Agent a : w.slots)
    if (w.now.order[a] >= c.slot_events[a - fixed]) {
      f.agent = a;
      f.event = ++c.slot_events[a - fixed];
      return f;
    }
  f.agent = fixed + c.next_slot++;
  f.event = 1;
  c.slot_events.push_back(1);
  w.slots.push_back(f.agent);
  return f;
}

void enter_tensor_pipe(Warp &w) {
  if (!machine.track_order) return;
  {
    lanes::Withheld others(w, w.now, w.lanes);
    w.pipe.join(w.now);
  }
  next_event(w);
}

// Sets the demands for telling lanes apart, for an access by the warp or by an operation that it issued.
static void tell_lanes_apart(Warp &w, const Actor &a, Demands &demands) {
  if (!lanes::tracked()) return;
  demands.warp = w.agent(kGeneric);
  demands.met = w.lane_order.met;
  if (a.agent - demands.warp < kWarpAgents) lanes::accessed(w, a.agent - demands.warp, a.event);
}

void shared_access(Warp &w, const Instruction &in, Cta &cta, u32 offset, u32 bytes, bool write, const Actor &a) {
  if (!machine.track_order || !bytes) return;
  if (&cta != w.cta) touch_peer(w, in, cta, a);
  Shadow &s = *cta.smem_shadow;
  Demands demands{a.async_proxy, machine.level[(int)ErrorKind::AsyncWriteFence] != Level::Off};
  tell_lanes_apart(w, a, demands);
  u32 end = offset + bytes;
  for (u32 g = offset / 16; g * 16 < end; g++) {
    u32 lo = g * 16 < offset ? offset - g * 16 : 0, hi = std::min(16u, end - g * 16);
    u16 mask = (u16)(((1u << hi) - 1) & ~((1u << lo) - 1));
    if ((!write || a.updates) && (s.written(g) & mask) != mask) {
      report(ErrorKind::UninitialisedSmem, &w, &in,
             "reads shared memory 0x%x (CTA rank %u), which nothing has written", g * 16 + lo, cta.rank);
      s.mark_written(g, mask);
    }
    Access access{a.agent, a.event, in.line, mask, write, a.generic, a.scope, (u8)w.cta->rank, 0, a.lane};
    Conflict conflict = s.access(g, access, *a.known, demands);
    if (conflict.kind) report_conflict(w, in, cta, "shared memory", g * 16 + lo, write, access.strong(), conflict);
  }
}

void global_access(Warp &w, const Instruction &in, u64 address, u64 bytes, bool write, const Actor &a, bool same_value) {
  if (!machine.track_order || machine.level[(int)ErrorKind::GlobalRace] == Level::Off) return;
  Demands demands{false};
  demands.max_readers = kGlobalReaders;
  tell_lanes_apart(w, a, demands);
  u64 end = address + bytes;
  for (u64 g = address / 16; g * 16 < end; g++) {
    u32 lo = g * 16 < address ? (u32)(address - g * 16) : 0, hi = (u32)std::min<u64>(16, end - g * 16);
    u16 mask = (u16)(((1u << hi) - 1) & ~((1u << lo) - 1));
    if (machine.last_page != g / kPageGranules) {
      auto &page = machine.global_shadow[g / kPageGranules];
      if (!page) page = std::make_unique<Shadow>(kPageGranules);
      machine.last_page = g / kPageGranules;
      machine.last_page_shadow = page.get();
    }
    Access access{a.agent, a.event, in.line, mask, write, false, a.scope, (u8)w.cta->rank, w.cta->cluster->sequence, a.lane,
                  (u8)w.cta->cluster->grid->device};
    Conflict conflict = machine.last_page_shadow->access((u32)(g % kPageGranules), access, *a.known, demands);
    if (!conflict.kind) continue;
    // In released kernels several warps write the same result (CUTLASS's MLA decode) or issue the same bulk store (its tma_store).
    const Access &e = conflict.earlier;
    bool same_store = e.write && e.line == in.line && e.cluster == access.cluster && e.agent % kWarpAgents == kBulkWrite &&
                      a.agent % kWarpAgents == kBulkWrite;
    if (same_value || same_store)
      warn(ErrorKind::GlobalRace, &in,
           "several agents write the same to global memory, and nothing orders them; the other is at ptx line " + std::to_string(e.line));
    else
      report_global_race(w, in, g * 16 + lo, write, access.strong(), conflict);
  }
}

// The columns of an accumulator have one kind of last writer: MMAs, or stores. If both kinds occur in one accumulator, a
// region for stores overlaps it.
static void check_one_region(Warp &w, const Instruction &in, Cta &cta, u32 lane16, u32 column, u32 count, u16 lanes) {
  const Shadow &s = *cta.tmem_shadow;
  u16 lane = (u16)(lanes & -lanes);
  const Access *first = s.last_write(lane16 * 512 + column, lane);
  u32 fixed = cta.cluster->warp_count * kWarpAgents;
  for (u32 c = column + 1; first && c < column + count; c++) {
    const Access *other = s.last_write(lane16 * 512 + c, lane);
    if (!other || other->agent >= fixed || first->agent >= fixed) return;
    bool mma[2] = {first->agent % kWarpAgents == kTensorPipe, other->agent % kWarpAgents == kTensorPipe};
    if (mma[0] == mma[1]) continue;
    const Access *stored = mma[0] ? other : first;
    report(ErrorKind::TmemOverlap, &w, &in,
           "tcgen05.mma accumulates onto tensor memory columns [%u, %u) (CTA rank %u), of which column %u was last written "
           "by the store at ptx line %d and others by the MMA at ptx line %d: two live regions overlap",
           column, column + count, cta.rank, mma[0] ? c : column, stored->line, (mma[0] ? first : other)->line);
    return;
  }
}

void tmem_access(Warp &w, const Instruction &in, Cta &cta, u32 lane16, u32 column, u32 count, u16 lanes, bool write,
                 const Actor &a, const char *what, bool also_read) {
  if (!machine.track_order) return;
  Shadow &s = *cta.tmem_shadow;
  Demands demands{false};
  tell_lanes_apart(w, a, demands);
  if (also_read) check_one_region(w, in, cta, lane16, column, count, lanes);
  Agent own = demands.own = tracks_tensor_fences() ? w.agent(kGeneric) : kNoAgent;
  if (own != kNoAgent)
    for (auto &t : cta.tmem_allocations)
      if (column >= t.column && column < t.column + t.columns && t.agent - own >= kWarpAgents && a.known->tensor[t.agent] < t.event) {
        report(ErrorKind::TensorFence, &w, &in,
               "%s: tcgen05.fence does not order it after the tcgen05.alloc at ptx line %d: ::before_thread_sync before the "
               "allocating warp's arrival or ::after_thread_sync after this warp's wait is missing", what, t.line);
        break;
      }
  for (u32 c = column; c < column + count; c++) {
    u32 g = lane16 * 512 + c;
    if ((!write || also_read) && (s.written(g) & lanes) != lanes) {
      u32 missing = (u32)__builtin_ctz((u16)(lanes & ~s.written(g)));
      report(ErrorKind::UninitialisedTmem, &w, &in,
             "%s reads tensor memory lane %u column %u (CTA rank %u), which nothing has written since it was allocated",
             what, lane16 * 16 + missing, c, cta.rank);
      s.mark_written(g, lanes);
    }
    Conflict conflict = s.access(g, {a.agent, a.event, in.line, lanes, write, false}, *a.known, demands);
    if (conflict.kind) {
      char place[64];
      u32 lane = lane16 * 16 + (u32)__builtin_ctz(conflict.earlier.mask & lanes ? conflict.earlier.mask & lanes : lanes);
      snprintf(place, sizeof place, "tensor memory lane %u column %u, address", lane, c);
      report_conflict(w, in, cta, place, lane << 16 | c, write, false, conflict);
    }
  }
}

void touch_peer(Warp &w, const Instruction &in, Cta &cta, const Actor &a, bool commit) {
  if (cta.live_warps == 0)
    report(ErrorKind::ExitedCta, &w, &in, "accesses shared memory of CTA rank %u, which has exited", cta.rank);
  if (!machine.track_order) return;
  if (commit) {
    cta.remote_commits[a.agent] = {a.event, in.line};
    return;
  }
  cta.remote_accesses.raise(a.agent, a.event);
  cta.remote_lines[a.agent] = in.line;
}

void release(Warp &w, ClockPair &into, bool relaxed, u32 lanes, Scope common) {
  if (!machine.track_order) return;
  // Without tcgen05.fence::before_thread_sync, the warp's own tensor-memory accesses are not published to other warps.
  if (tracks_tensor_fences()) {
    into.tensor.join(w.tensor_published);
    into.tensor.join(w.tensor_seen);
  }
  {
    ClockPair &known = relaxed ? w.released[common] : w.now;
    lanes::Withheld others(w, known, lanes ? lanes : w.lanes);
    into.join_order(known);
  }
  if (relaxed) return;
  next_event(w);
}

void acquire(Warp &w, const ClockPair &from, bool relaxed, Scope common) {
  if (!machine.track_order) return;
  if (tracks_tensor_fences()) w.tensor_seen.join(from.tensor);
  (relaxed ? w.to_acquire[common] : w.now).join_order(from);
  if (!relaxed && lanes::tracked()) lanes::acquired(w, from.order);
}

void lanes_meet(Warp &w) {
  if (!lanes::tracked()) return;
  lanes::meet(w);
  next_event(w);
}

// The clocks that a strong store of this scope publishes, by the scope common with the reader.
static HandedOn hand_on(Warp &w, bool relaxed, Scope scope) {
  HandedOn handed;
  if (!relaxed) {
    auto copy = std::make_shared<ClockPair>();
    release(w, *copy);
    std::fill_n(handed.begin(), scope + 1, copy);
    return handed;
  }
  bool keep = !lanes::tracked() || (w.lanes | w.exited) == kAllLanes;  // else some lanes' events are withheld
  for (int s = 0; s <= scope && w.released[s].order.size(); s++) {
    if (keep) handed[s] = w.released_copy[s];
    if (!handed[s] && s && w.released[s] == w.released[s - 1]) handed[s] = handed[s - 1];
    if (!handed[s]) {
      auto copy = std::make_shared<ClockPair>();
      release(w, *copy, true, 0, (Scope)s);
      handed[s] = copy;
    }
    if (keep) w.released_copy[s] = handed[s];
  }
  return handed;
}

void release_at(Warp &w, const void *location, bool relaxed, Scope scope) {
  if (auto handed = handed_on(w, relaxed, scope)) publish(w, location, *handed, scope);
}

std::unique_ptr<HandedOn> handed_on(Warp &w, bool relaxed, Scope scope) {
  if (!machine.track_order) return nullptr;
  if (relaxed && !w.released[kCtaScope].order.size()) return nullptr;  // no release fence so far: nothing is published
  return std::make_unique<HandedOn>(hand_on(w, relaxed, scope));
}

void publish(const Warp &w, const void *location, const HandedOn &handed, Scope scope) {
  u32 cluster = w.cta->cluster->sequence;
  PublishedAt &published = machine.locations[location];
  published.version++;
  for (Published &p : published.stores)
    if (p.cluster == cluster && p.warp == w.global_index) {
      // A relaxed store publishes less than a releasing store before it, which later readers may still observe.
      HandedOn before = p.handed;
      for (int s = 0; s <= scope && handed[s]; s++) {
        if (!before[s]) {
          p.handed[s] = handed[s];
        } else if (before[s] != handed[s]) {
          if (s && before[s] == before[s - 1] && handed[s] == handed[s - 1]) {
            p.handed[s] = p.handed[s - 1];
            continue;
          }
          auto both = std::make_shared<ClockPair>(*before[s]);
          both->join(*handed[s]);
          p.handed[s] = both;
        }
      }
      return;
    }
  published.stores.push_back({cluster, w.global_index, w.cta->cluster->grid->device, handed});
}

void acquire_at(Warp &w, const void *location, bool global, bool relaxed, Scope scope) {
  if (!machine.track_order) return;
  auto it = machine.locations.find(location);
  if (it == machine.locations.end()) return;
  auto &last = w.acquired;
  if (last.location == location && last.version == it->second.version && last.relaxed == relaxed && last.scope == scope) return;
  last = {location, it->second.version, relaxed, scope};
  u32 own = w.cta->cluster->sequence, warps = (u32)w.cta->warps.size(), device = w.cta->cluster->grid->device;
  for (const Published &p : it->second.stores) {
    Scope common = p.device != device                 ? kSysScope
                   : p.cluster != own                 ? kGpuScope
                   : p.warp / warps != w.cta->rank    ? kClusterScope
                                                      : kCtaScope;
    if (common > scope || !p.handed[common]) continue;
    const ClockPair &clock = *p.handed[common];
    if (p.cluster == own) {
      acquire(w, clock, relaxed, common);
    } else if (global) {
      ClockPair &into = relaxed ? w.to_acquire[common] : w.now;
      into.foreign[p.cluster].join(clock.order);
      for (auto &[cluster, other] : clock.foreign) (cluster == own ? into.order : into.foreign[cluster]).join(other);
    }
  }
}

void release_fence(Warp &w, Scope scope) {
  if (!machine.track_order) return;
  {
    lanes::Withheld others(w, w.now, w.lanes);
    for (int s = 0; s <= scope; s++) {
      w.released[s].join(w.now);
      w.released_copy[s].reset();
    }
  }
  next_event(w);
}

void acquire_fence(Warp &w, Scope scope) {
  if (!machine.track_order) return;
  for (int s = 0; s <= scope; s++) {
    w.now.join(w.to_acquire[s]);
    if (lanes::tracked()) lanes::acquired(w, w.to_acquire[s].order);
  }
}

void barrier_init_fence(Warp &w) {
  if (!machine.track_order) return;
  w.released_copy = {};
  for (ClockPair *c : {&w.now, &w.released[kCtaScope], &w.released[kClusterScope]}) {
    c->order.raise(w.agent(kBarrierInit), w.events[kBarrierInit]);
    c->fenced.raise(w.agent(kBarrierInit), w.events[kBarrierInit]);
  }
}

void proxy_fence(Warp &w) {
  if (!machine.track_order) return;
  {
    lanes::Withheld others(w, w.now, w.lanes);
    w.now.fenced.join(w.now.order);
  }
  // Accesses after the fence belong to a new event, which is not fenced.
  next_event(w);
}

bool tracks_tensor_fences() { return machine.track_order && machine.level[(int)ErrorKind::TensorFence] != Level::Off; }

void tensor_fence(Warp &w, bool after) {
  if (!tracks_tensor_fences()) return;
  w.released_copy = {};
  if (after) w.now.tensor.join(w.tensor_seen);
  else w.tensor_published.join(w.now.tensor);
}

void learn(Warp &w, WarpAgent kind, u32 event) {
  if (!machine.track_order) return;
  w.now.order.raise(w.agent(kind), event);
  w.now.tensor.raise(w.agent(kind), event);
}
void learn_agent(Warp &w, Agent agent, u32 event) {
  if (machine.track_order) w.now.order.raise(agent, event);
}

void executed(Warp &w, Clock &into) {
  if (!machine.track_order) return;
  into.join(w.now.order);
  next_event(w);
}

void warp_exits(Warp &w) {
  if (machine.track_order) w.cta->exit_clock.join(w.now.order);
}

void cta_ends(Cta &cta) {
  if (!machine.track_order) return;
  for (auto &[agent, line] : cta.remote_lines)
    if (cta.exit_clock[agent] < cta.remote_accesses[agent]) {
      char buffer[96];
      const char *who = describe(*cta.cluster, agent, buffer, sizeof buffer);
      Instruction at{};
      at.line = line;
      report(ErrorKind::ExitedCta, cta.warps[0].get(), &at,
             "%s accesses memory of CTA rank %u, but nothing makes that CTA wait for it before it exits (a cluster "
             "barrier or a wait is missing at the end)",
             who, cta.rank);
      return;
    }
  // A warning only: CUTLASS's fp8 MLA decode waits for the data of the MMAs through another commit.
  for (auto &[agent, commit] : cta.remote_commits)
    if (cta.exit_clock[agent] < commit.event) {
      char buffer[96];
      Instruction at{};
      at.line = commit.line;
      warn(ErrorKind::ExitedCta, &at,
           "this commit by " + std::string(describe(*cta.cluster, agent, buffer, sizeof buffer)) + " arrives at CTA rank " +
               std::to_string(cta.rank) + ", which does not wait for it before it exits");
    }
}

}  // namespace race
