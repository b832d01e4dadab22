// CTA barriers, the cluster barrier, fences, and the warp collectives (PTX ISA "Parallel Synchronization").
#include <cmath>
#include "alu.h"
#include "barrier.h"
#include "in_flight.h"
#include "numeric.h"
#include "race.h"

using namespace numeric;

// ---- bar / barrier ---------------------------------------------------------------------------------------------

void complete_named_barrier(Cta &c, NamedBarrier &b) {
  if (!b.arrived) return;
  u32 expected = b.expected;
  if (b.everyone) {  // a barrier over all threads does not wait for threads that have exited
    expected = 0;
    for (auto &w : c.warps)
      if (!w->finished && w->exited != kAllLanes) expected += kLanes;
  }
  if (b.arrived < expected) return;
  b.arrived = 0;
  b.generation++;
  b.last_true_lanes = b.true_lanes;
  b.last_lanes = b.lanes;
  b.true_lanes = b.lanes = 0;
  b.complete = b.gathering;
  machine.progress++;
}

// aux: 0 arrive only, 2 not .aligned: parts of a warp may arrive one by one. Operands: barrier, thread count or none.
static Step named_barrier(Warp &w, const Instruction &in, u32 lanes, u32 vote) {
  Group &g = w.groups[w.current];
  u32 everyone = ~w.exited;
  u32 id = uniform<u32>(w, in.op[0], lanes);
  if (id > 15) fail(ErrorKind::Barrier, &w, &in, "barrier %u: there are 16", id);
  NamedBarrier &b = w.cta->barriers[id];
  if (g.ticket) {  // waiting here since an earlier try
    if (b.generation < g.ticket) return Step::Blocked;
    g.ticket = 0;
    race::acquire(w, b.complete);
    return Step::Done;
  }
  bool part = in.aux[2] && lanes != everyone;
  if (lanes != everyone && !part) return Step::NeedConvergence;
  bool all = in.op[1] == kNone;
  u32 threads = w.cta->cluster->grid->threads();
  u32 expected = all ? (threads + 31) / 32 * 32 : uniform<u32>(w, in.op[1], lanes);
  if (expected == 0 || expected % kLanes || expected > (threads + 31) / 32 * 32)
    fail(ErrorKind::Barrier, &w, &in, "barrier %u: thread count %u is not a multiple of 32 within the block of %u", id,
         expected, threads);
  if (b.arrived && (b.expected != expected || b.everyone != all))
    fail(ErrorKind::Barrier, &w, &in, "barrier %u: thread count %u, but ptx line %d joined it with %u", id, expected,
         b.line, b.expected);
  b.expected = expected;
  b.everyone = all;
  b.line = in.line;
  b.arrived += part ? (u32)__builtin_popcount(lanes) : kLanes;
  if (b.arrived > expected) fail(ErrorKind::Barrier, &w, &in, "barrier %u: more than %u threads arrived", id, expected);
  b.true_lanes += (u32)__builtin_popcount(vote & lanes);
  b.lanes += (u32)__builtin_popcount(lanes);
  race::release(w, b.gathering);
  machine.progress++;
  u64 before = b.generation;
  complete_named_barrier(*w.cta, b);
  if (in.aux[0]) return Step::Done;
  if (b.generation != before) {
    race::acquire(w, b.complete);
    return Step::Done;
  }
  g.ticket = before + 1;
  return Step::Blocked;
}
HANDLER("bar", Sync) { return named_barrier(w, in, lanes, 0); }
// aux: 1 operation (0 and, 1 or, 2 popc). Operands: barrier, count, result, source predicate.
HANDLER("bar.red", Sync) {
  NamedBarrier &b = w.cta->barriers[uniform<u32>(w, in.op[0], lanes) & 15];
  Step s = named_barrier(w, in, lanes, predicate_of(w, in.op[3]));
  if (s != Step::Done) return s;
  if (in.aux[1] == 2) each_lane<u32>(w, in.op[2], lanes, [&](int) { return b.last_true_lanes; });
  else set_predicate(w, in.op[2], lanes, (in.aux[1] ? b.last_true_lanes != 0 : b.last_true_lanes == b.last_lanes) ? lanes : 0);
  return Step::Done;
}

// ---- barrier.cluster -------------------------------------------------------------------------------------------

void complete_cluster_barrier(Cluster &c) {
  for (;;) {
    bool anyone = false, all = true;
    for (auto &cta : c.ctas)
      for (auto &w : cta->warps)
        if (!w->finished) {
          anyone = true;
          all &= w->cluster_arrivals > c.barrier_generation;
        }
    if (!anyone || !all) return;
    u64 parity = c.barrier_generation++ & 1;
    c.barrier_complete[parity] = c.barrier_gathering[parity];
    c.barrier_executed_complete[parity] = c.barrier_executed[parity];
    machine.progress++;
  }
}
HANDLER("barrier.cluster.arrive", Sync) {  // aux: 0 relaxed
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  if (w.cluster_arrivals > w.cluster_waits)
    // Undefined in PTX, but FlashAttention-4 does it and runs.
    warn(ErrorKind::Barrier, &in, "barrier.cluster.arrive twice without a wait between");
  u64 parity = w.cluster_arrivals++ & 1;
  race::release(w, w.cta->cluster->barrier_gathering[parity], in.aux[0], 0, kClusterScope);
  race::executed(w, w.cta->cluster->barrier_executed[parity]);
  machine.progress++;
  complete_cluster_barrier(*w.cta->cluster);
  return Step::Done;
}
HANDLER("barrier.cluster.wait", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  Cluster &c = *w.cta->cluster;
  if (w.cluster_waits >= w.cluster_arrivals)
    report(ErrorKind::Barrier, &w, &in, "barrier.cluster.wait without an arrive before it");
  if (c.barrier_generation <= w.cluster_waits) return Step::Blocked;
  u64 parity = w.cluster_waits++ & 1;
  race::acquire(w, c.barrier_complete[parity], in.aux[0], kClusterScope);
  if (machine.track_order) w.cta->exit_clock.join(c.barrier_executed_complete[parity]);
  return Step::Done;
}

// ---- fences. aux[0]: 0 both, 1 acquire, 2 release; aux[1]: scope.
HANDLER("fence", Plain) {
  if (in.aux[0] != 1) {
    if (in.aux[1] == kSysScope) settle_in_flight(*w.cta->cluster);
    race::release_fence(w, (Scope)in.aux[1]);
  }
  if (in.aux[0] != 2) race::acquire_fence(w, (Scope)in.aux[1]);
  return Step::Done;
}
HANDLER("fence.mbarrier_init", Plain) {
  race::barrier_init_fence(w);
  return Step::Done;
}
// A .relaxed mbarrier orders tensor-core work between a tcgen05.fence::before_thread_sync before the arrival and an
// ::after_thread_sync after the wait (PTX ISA "Tensorcore 5th generation: canonical synchronization patterns").
static void carry_tensor_work(const Warp &w, const Clock &from, Clock &into) {
  for (Agent warp = 0; warp < w.cta->cluster->warp_count * kWarpAgents; warp += kWarpAgents)
    for (Agent kind : {kTensorPipe, kTmemLoad, kTmemStore})
      if (u32 event = from[warp + kind]) into.raise(warp + kind, event);
}
HANDLER("tcgen05.fence", Plain) {  // aux: 0 after_thread_sync
  race::tensor_fence(w, in.aux[0]);
  if (machine.track_order) {
    for (Scope s : {kCtaScope, kClusterScope}) {  // this fence has no scope, and tensor memory is the cluster's
      if (in.aux[0]) carry_tensor_work(w, w.to_acquire[s].order, w.now.order);
      else carry_tensor_work(w, w.now.order, w.released[s].order);
    }
    if (!in.aux[0]) w.released_copy = {};
  }
  return Step::Done;
}
HANDLER("fence.proxy.async", Plain) {
  race::proxy_fence(w);
  return Step::Done;
}

// ---- warp collectives. The membermask names the lanes that must execute together.
static bool members_here(Warp &w, u32 lanes, u32 members) { return (lanes & members & ~w.exited) == (members & ~w.exited); }
static u32 members_of(Warp &w, const Instruction &in, Operand o, u32 lanes) {
  u32 m = uniform<u32>(w, o, lanes);
  if ((m & lanes) != lanes)
    report(ErrorKind::DivergentCollective, &w, &in, "lanes %08x execute a collective whose membermask is %08x", lanes, m);
  return m & ~w.exited;
}

// aux: 0 mode. Operands: d, predicate or none, a, b, c, membermask.
HANDLER("shfl", Sync) {
  u32 members = members_of(w, in, in.op[5], lanes);
  if (!members_here(w, lanes, members)) return Step::NeedConvergence;
  u32 value[kLanes], result[kLanes], valid = 0;
  const u32 *b = row<u32>(w, in.op[3]), *c = row<u32>(w, in.op[4]);
  memcpy(value, row<u32>(w, in.op[2]), sizeof value);
  for (int i : lanes_of(lanes)) {
    int distance = b[i] & 31, clamp = c[i] & 31, segment = c[i] >> 8 & 31;
    int max_lane = (i & segment) | (clamp & ~segment), min_lane = i & segment, j;
    bool ok;
    switch (in.aux[0]) {
      case 0: j = min_lane | (distance & ~segment); ok = j <= max_lane; break;  // idx
      case 1: j = i - distance; ok = j >= max_lane; break;                      // up
      case 2: j = i + distance; ok = j <= max_lane; break;                      // down
      default: j = i ^ distance; ok = j <= max_lane; break;                     // bfly
    }
    if (!ok) j = i;
    if (!(members >> j & 1))
      report(ErrorKind::DivergentCollective, &w, &in, "shfl lane %d reads lane %d, which does not take part", i, j);
    result[i] = value[j];
    valid |= (u32)ok << i;
  }
  if (in.op[0] != kNone) each_lane<u32>(w, in.op[0], lanes, [&](int i) { return result[i]; });
  set_predicate(w, in.op[1], lanes, valid);
  return Step::Done;
}
HANDLER("elect", Sync) {
  u32 members = members_of(w, in, in.op[2], lanes);
  if (!members_here(w, lanes, members)) return Step::NeedConvergence;
  u32 leader = (u32)first_lane(members);
  if (in.op[0] != kNone) each_lane<u32>(w, in.op[0], lanes, [&](int) { return leader; });
  set_predicate(w, in.op[1], lanes, 1u << leader);
  return Step::Done;
}
// aux: 0 all, 1 any, 2 uni, 3 ballot. Operands: d, source predicate, membermask.
HANDLER("vote", Sync) {
  u32 members = members_of(w, in, in.op[2], lanes);
  if (!members_here(w, lanes, members)) return Step::NeedConvergence;
  u32 votes = predicate_of(w, in.op[1]) & members;
  switch (in.aux[0]) {
    case 0: set_predicate(w, in.op[0], lanes, votes == members ? lanes : 0); break;
    case 1: set_predicate(w, in.op[0], lanes, votes ? lanes : 0); break;
    case 2: set_predicate(w, in.op[0], lanes, votes == members || !votes ? lanes : 0); break;
    default: each_lane<u32>(w, in.op[0], lanes, [&](int) { return votes; });
  }
  return Step::Done;
}
// aux: 0 any, 1 all; 2 the value has 64 bits. Operands: d, predicate or none, a, membermask.
HANDLER("match", Sync) {
  u32 members = members_of(w, in, in.op[3], lanes);
  if (!members_here(w, lanes, members)) return Step::NeedConvergence;
  u64 v[kLanes];
  for (int i : lanes_of(members)) v[i] = in.aux[2] ? row<u64>(w, in.op[2])[i] : row<u32>(w, in.op[2])[i];
  u32 all = members;
  for (int i : lanes_of(members))
    if (v[i] != v[first_lane(members)]) all = 0;
  each_lane<u32>(w, in.op[0], lanes, [&](int i) {
    if (in.aux[0]) return all;
    u32 same = 0;
    for (int j : lanes_of(members)) same |= (u32)(v[j] == v[i]) << j;
    return same;
  });
  if (in.aux[0]) set_predicate(w, in.op[1], lanes, all ? lanes : 0);
  return Step::Done;
}
HANDLER("activemask", Plain) {
  each_lane<u32>(w, in.op[0], lanes, [&](int) { return lanes; });
  return Step::Done;
}
HANDLER("bar.warp", Sync) {
  u32 members = members_of(w, in, in.op[0], lanes);
  if (!members_here(w, lanes, members)) return Step::NeedConvergence;
  race::lanes_meet(w);
  return Step::Done;
}
// aux: 0 operation. Operands: d, a, membermask.
HANDLER("redux", Sync) {
  u32 members = members_of(w, in, in.op[2], lanes);
  if (!members_here(w, lanes, members)) return Step::NeedConvergence;
  const u32 *a = row<u32>(w, in.op[1]);
  auto fold = [&](auto f) {
    int first = first_lane(members);
    auto r = f(a[first], a[first]);
    for (int i : lanes_of(members & (members - 1))) r = f(r, a[i]);
    return (u32)r;
  };
  auto fold_float = [&](bool absolute, float (*f)(float, float)) {
    float r = 0;
    bool any = false;
    for (int i : lanes_of(members)) {
      float x = bit_cast<float>(a[i]);
      if (absolute) x = std::fabs(x);
      r = any ? f(r, x) : x;
      any = true;
    }
    return bit_cast<u32>(r);
  };
  u32 r = 0;
  switch (in.aux[0]) {
    case 0:
      for (int i : lanes_of(members)) r += a[i];
      break;
    case 1: r = fold([](u32 x, u32 y) { return (u32)std::max((i32)x, (i32)y); }); break;
    case 2: r = fold([](u32 x, u32 y) { return (u32)std::min((i32)x, (i32)y); }); break;
    case 3: r = fold([](u32 x, u32 y) { return std::max(x, y); }); break;
    case 4: r = fold([](u32 x, u32 y) { return std::min(x, y); }); break;
    case 5: r = fold([](u32 x, u32 y) { return x & y; }); break;
    case 6: r = fold([](u32 x, u32 y) { return x | y; }); break;
    case 7:
      for (int i : lanes_of(members)) r ^= a[i];
      break;
    case 8: r = fold_float(false, max_number); break;
    case 9: r = fold_float(false, min_number); break;
    case 10: r = fold_float(false, max_nan); break;
    case 11: r = fold_float(false, min_nan); break;
    case 12: r = fold_float(true, max_number); break;
    case 13: r = fold_float(true, min_number); break;
    case 14: r = fold_float(true, max_nan); break;
    case 15: r = fold_float(true, min_nan); break;
  }
  each_lane<u32>(w, in.op[0], lanes, [&](int) { return r; });
  return Step::Done;
}
// setmaxnreg: aux[0] 1 increase, 0 decrease; aux[1] registers. A CTA never has more registers than at its launch: at most
// the register file divided by its threads, in eights. An increase waits until other warps have freed enough.
HANDLER("setmaxnreg", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  i64 n = in.aux[1];
  if (n < 24 || n > 256 || n % 8)
    fail(ErrorKind::IllegalInstruction, &w, &in, "setmaxnreg %lld: not a multiple of 8 in [24, 256]", (long long)n);
  i64 at_launch = std::min<i64>(256, 65536 / (32 * (i64)w.cta->warps.size()) / 8 * 8);
  i64 more = n - (w.registers ? w.registers : at_launch);
  if (in.aux[0] && more > w.cta->registers_given_back) return Step::Blocked;
  w.cta->registers_given_back -= more;
  w.registers = (u32)n;
  return Step::Done;
}
