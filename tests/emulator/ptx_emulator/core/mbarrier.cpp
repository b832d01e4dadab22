#include "mbarrier.h"
#include "memory.h"

namespace {

constexpr u64 kMark = 0x6d62617272696572ull;  // "mbarrier"
constexpr u32 kMaxCount = (1u << 20) - 1;     // PTX ISA: valid range of the expected arrival count and of tx-count
constexpr i64 kMaxTx = (1 << 20) - 1;

Mbarrier *find(const Warp &w, const Instruction &in, u32 address, Cta **owner, const char *what) {
  if (address & 7) fail(ErrorKind::Misaligned, &w, &in, "%s: mbarrier at 0x%x is not 8-byte aligned", what, address);
  Cta &c = shared_owner(w, in, address, 8, what);
  *owner = &c;
  auto it = c.mbarriers.find(shared_offset(address));
  if (it == c.mbarriers.end() || !it->second.live)
    fail(ErrorKind::Mbarrier, &w, &in, "%s: no initialised mbarrier at 0x%x of CTA rank %u", what,
         shared_offset(address), c.rank);
  u64 mark;
  memcpy(&mark, shared_data(c, address), 8);
  if (mark != kMark)
    fail(ErrorKind::Mbarrier, &w, &in,
         "%s: the mbarrier at 0x%x of CTA rank %u (initialised at ptx line %d) was overwritten by a plain store", what,
         shared_offset(address), c.rank, it->second.init_line);
  return &it->second;
}

void finish_phase_if_complete(Mbarrier &b) {
  machine.progress++;
  if (b.pending || b.tx) return;
  b.phase ^= 1;
  b.pending = b.expected;
  b.complete = b.gathering;
  if (b.gathering_from_peers.order.size()) b.complete_from_peers = b.gathering_from_peers;
  b.executed_complete = b.executed;
}

ClockPair &gathering_of(const Warp &w, Mbarrier &b, const Cta &owner) {
  return &owner == w.cta ? b.gathering : b.gathering_from_peers;
}

}  // namespace

Mbarrier &mbarrier_at(Warp &w, const Instruction &in, u32 address, const race::Actor &a, const char *what) {
  Cta *owner;
  Mbarrier &b = *find(w, in, address, &owner, what);
  if (machine.track_order) {
    if (owner != w.cta) race::touch_peer(w, in, *owner, a, a.async_proxy && a.agent == w.agent(kTensorPipe));
    if (a.known->order[b.init_agent] < b.init_event)
      report(ErrorKind::Race, &w, &in,
             "%s: the mbarrier at 0x%x of CTA rank %u is used, but its mbarrier.init at ptx line %d is not ordered before: "
             "a fence.mbarrier_init, CTA or cluster barrier is missing",
             what, shared_offset(address), owner->rank, b.init_line);
    else if (a.async_proxy && a.known->fenced[b.init_agent] < b.init_event)
      report(ErrorKind::MbarrierInitFence, &w, &in,
             "%s: the mbarrier.init at ptx line %d of the mbarrier at 0x%x of CTA rank %u is ordered before, but the async "
             "proxy need not see it: a fence.mbarrier_init by the initialising thread is missing",
             what, b.init_line, shared_offset(address), owner->rank);
  }
  return b;
}

void mbarrier_arrive(const Warp &w, const Instruction &in, u32 address, u32 count, const ClockPair *publish) {
  Cta *owner;
  Mbarrier &b = *find(w, in, address, &owner, "mbarrier arrive");
  if (publish && machine.track_order) gathering_of(w, b, *owner).join(*publish);
  if (count > b.pending)
    fail(ErrorKind::Mbarrier, &w, &in,
         "mbarrier at 0x%x of CTA rank %u: %u arrivals, but only %u are pending in this phase (initialised for %u at ptx "
         "line %d)",
         shared_offset(address), owner->rank, count, b.pending, b.expected, b.init_line);
  b.pending -= count;
  finish_phase_if_complete(b);
}

void mbarrier_expect(const Warp &w, const Instruction &in, u32 address, i64 bytes) {
  Cta *owner;
  Mbarrier &b = *find(w, in, address, &owner, "mbarrier expect_tx");
  b.tx += bytes;
  if (b.tx > kMaxTx)
    fail(ErrorKind::TxCount, &w, &in, "mbarrier at 0x%x of CTA rank %u: pending transaction count %lld exceeds 2^20 - 1",
         shared_offset(address), owner->rank, (long long)b.tx);
  machine.progress++;
}

void mbarrier_complete_tx(const Warp &w, const Instruction &in, u32 address, i64 bytes, const ClockPair *publish) {
  Cta *owner;
  Mbarrier &b = *find(w, in, address, &owner, "mbarrier complete_tx");
  if (publish && machine.track_order) gathering_of(w, b, *owner).join(*publish);
  b.tx -= bytes;
  if (b.tx < -kMaxTx)
    fail(ErrorKind::TxCount, &w, &in,
         "mbarrier at 0x%x of CTA rank %u: %lld more bytes arrived than were expected: the expect_tx count is too small",
         shared_offset(address), owner->rank, (long long)-b.tx);
  finish_phase_if_complete(b);
}

// aux[0] is the address offset throughout.
HANDLER("mbarrier.init", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]), count = row<u32>(w, in.op[1])[i];
    if (address & 7) fail(ErrorKind::Misaligned, &w, &in, "mbarrier.init: 0x%x is not 8-byte aligned", address);
    if (count == 0 || count > kMaxCount)
      fail(ErrorKind::Mbarrier, &w, &in, "mbarrier.init: count %u is not in [1, 2^20 - 1]", count);
    Cta &c = shared_owner(w, in, address, 8, "mbarrier.init");
    race::shared_access(w, in, c, shared_offset(address), 8, true, race::generic(w));
    Mbarrier &b = c.mbarriers[shared_offset(address)];
    b = Mbarrier{};
    b.pending = b.expected = count;
    b.live = true;
    b.init_line = in.line;
    b.init_agent = w.agent(kBarrierInit);
    b.init_event = ++w.events[kBarrierInit];
    race::learn(w, kBarrierInit, b.init_event);
    memcpy(shared_data(c, address), &kMark, 8);
  }
  machine.progress++;
  return Step::Done;
}
HANDLER("mbarrier.inval", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]);
    mbarrier_at(w, in, address, race::generic(w), "mbarrier.inval").live = false;
    memset(shared_data(shared_owner(w, in, address, 8, "mbarrier.inval"), address), 0, 8);
  }
  return Step::Done;
}

// aux: 1 operand holds a count, 2 operand holds expect_tx bytes, 3 relaxed, 4 returns the state (operand 2), 5 drop, 6 scope.
// The scope is checked for .relaxed only: released kernels arrive at peers, and wait for them, by forms of scope .cta.
// Operands: address, count or bytes (or none), state (or none).
HANDLER("mbarrier.arrive", Plain) {
  // Lanes that arrive at the same barrier publish the same clock once.
  u32 left = lanes;
  while (left) {
    int i = first_lane(left);
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]);
    u32 same = 0, count = 0;
    i64 bytes = 0;
    for (int j : lanes_of(left)) {
      if ((u32)lane_address(w, in.op[0], j, in.aux[0]) != address) continue;
      same |= 1u << j;
      count += in.aux[1] ? row<u32>(w, in.op[1])[j] : 1;
      bytes += in.aux[2] ? row<u32>(w, in.op[1])[j] : 0;
    }
    left &= ~same;
    Mbarrier &b = mbarrier_at(w, in, address, race::generic(w), "mbarrier.arrive");
    if (in.aux[4])
      for (int j : lanes_of(same)) row<u64>(w, in.op[2])[j] = b.phase;
    if (bytes) mbarrier_expect(w, in, address, bytes);
    if (in.aux[5]) b.expected -= count;
    const Cta &owner = *w.cta->cluster->ctas[shared_rank(address)];
    Scope common = &owner == w.cta ? kCtaScope : kClusterScope;
    if (!in.aux[3] || in.aux[6] >= common) race::release(w, gathering_of(w, b, owner), in.aux[3], same, common);
    mbarrier_arrive(w, in, address, count, nullptr);
  }
  return Step::Done;
}
HANDLER("mbarrier.expect_tx", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]);
    mbarrier_at(w, in, address, race::generic(w), "mbarrier.expect_tx");
    mbarrier_expect(w, in, address, (i32)row<u32>(w, in.op[1])[i]);
  }
  return Step::Done;
}
HANDLER("mbarrier.complete_tx", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]);
    race::executed(w, mbarrier_at(w, in, address, race::generic(w), "mbarrier.complete_tx").executed);
    mbarrier_complete_tx(w, in, address, (i32)row<u32>(w, in.op[1])[i], nullptr);
  }
  return Step::Done;
}
HANDLER("mbarrier.pending_count", Plain) {
  fail(ErrorKind::IllegalInstruction, &w, &in, "mbarrier.pending_count is not modelled");
}

// aux: 1 the phase is given by parity (else by state), 2 relaxed, 3 test_wait (never suspends), 4 scope.
// Operands: result predicate, address, parity or state.
HANDLER("mbarrier.wait", Sync) {
  u32 done = 0, left = lanes;
  while (left) {
    int i = first_lane(left);
    u32 address = (u32)lane_address(w, in.op[1], i, in.aux[0]);
    Mbarrier &b = mbarrier_at(w, in, address, race::generic(w), "mbarrier.try_wait");
    if (&shared_owner(w, in, address, 8, "mbarrier.try_wait") != w.cta)
      fail(ErrorKind::IllegalInstruction, &w, &in, "mbarrier.try_wait on a barrier of another CTA");
    bool acquired = false;
    for (int j : lanes_of(left)) {
      if ((u32)lane_address(w, in.op[1], j, in.aux[0]) != address) continue;
      left &= ~(1u << j);
      u32 phase = in.aux[1] ? row<u32>(w, in.op[2])[j] & 1 : (u32)row<u64>(w, in.op[2])[j] & 1;
      if (b.phase == phase) {
        w.last_wait = {address, phase, in.line};
        continue;
      }
      done |= 1u << j;
      if (!acquired) {
        race::acquire(w, b.complete, in.aux[2]);
        if (b.complete_from_peers.order.size() && (!in.aux[2] || in.aux[4] >= kClusterScope))
          race::acquire(w, b.complete_from_peers, in.aux[2], kClusterScope);
        if (machine.track_order) w.cta->exit_clock.join(b.executed_complete);
      }
      acquired = true;
    }
  }
  set_predicate(w, in.op[0], lanes, done);
  if (done == lanes) return Step::Done;
  machine.now->blocked[in.index]++;
  return Step::Yield;
}
