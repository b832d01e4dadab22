// Asynchronous copies: cp.async, bulk copies, and TMA tensor copies (PTX ISA "Data Movement: Asynchronous copy").
//
// A load is a free-running operation: it knows the events that its issuing warp knew, and a wait for the mbarrier acquires
// its completion. A store reads shared memory through the async proxy; wait_group acquires its completion.
#include <algorithm>
#include <array>
#include "alu.h"
#include "async.h"
#include "mbarrier.h"
#include "memory.h"
#include "race.h"
#include "tensor_map.h"

void atomic_update(u8 *p, i64 op, i64 type, const void *operand, const void *swap);

namespace {

void check_aligned(const Warp &w, const Instruction &in, u64 address, u64 alignment, const char *what) {
  if (address % alignment)
    fail(ErrorKind::Misaligned, &w, &in, "%s 0x%llx is not %llu-byte aligned", what, (unsigned long long)address,
         (unsigned long long)alignment);
}

// Reports the accesses of a copy to global memory.
using TrackGlobal = std::function<void(const race::Actor &)>;

TrackGlobal track_range(Warp &w, const Instruction &in, const void *data, u64 bytes, bool write) {
  return [&w, &in, data, bytes, write](const race::Actor &a) { race::global_access(w, in, (u64)data, bytes, write, a); };
}
// `rows` boxes of a tensor map: one, or four for gather4 and scatter4, which differ in their second coordinate.
TrackGlobal track_boxes(Warp &w, const Instruction &in, const TensorMap &map, const std::array<i32, 5> &at, u32 rows, bool write) {
  return [&w, &in, &map, at, rows, write](const race::Actor &a) {
    if (!machine.track_order) return;
    for (u32 k = 0; k < rows; k++) {
      const i32 gathered[5] = {at[0], at[1 + k], 0, 0, 0};
      copy_box(&w, &in, map, rows == 1 ? at.data() : gathered, nullptr, 0, BoxCopy::Visit, write,
               [&](u64 address, u64 bytes) { race::global_access(w, in, address, bytes, write, a); });
    }
  };
}

// The part of a load that goes to one CTA: its accesses are recorded now, data and mbarrier follow at completion.
// `transaction` is the number of bytes that the mbarrier counts.
void issue_load(Warp &w, const Instruction &in, Cta &target, u32 offset, u32 bytes, u32 transaction, u32 mbarrier_address,
                const TrackGlobal &track_source, std::function<void(u8 *)> copy) {
  race::Free op = race::free_running(w);
  race::Actor actor = op.actor();
  if (track_source) track_source(actor);
  race::shared_access(w, in, target, offset, bytes, true, actor);
  mbarrier_at(w, in, mbarrier_address, actor, "complete_tx of an asynchronous copy");
  machine.counters.tma_loaded += transaction;
  Warp *warp = &w;
  const Instruction *instruction = &in;
  u8 *smem = target.smem.data();
  issue_free(w, make_async(in, "load", [=, finished = op.finished(), copy = std::move(copy)] {
               copy(smem);
               mbarrier_complete_tx(*warp, *instruction, mbarrier_address, transaction, &finished);
             }));
}

// The mbarrier that the copy into CTA `rank` signals.
u32 barrier_for(const Warp &w, const Instruction &in, u32 rank, u32 address, bool multicast, bool pair) {
  if (multicast) {
    u32 target = pair ? (rank & ~1u) | (shared_rank(address) & 1) : rank;
    return shared_address(target, shared_offset(address));
  }
  u32 owner = shared_rank(address);
  if (owner != rank && !(pair && (owner ^ rank) == 1))
    report(ErrorKind::IllegalInstruction, &w, &in,
           "the mbarrier is in CTA rank %u and the data goes to CTA rank %u: only .cta_group::2 may signal the other CTA of "
           "the pair",
           owner, rank);
  return address;
}

u32 destinations(const Warp &w, const Instruction &in, bool multicast, u32 mask, u32 dst) {
  if (!multicast) return 1u << shared_rank(dst);
  mask &= 0xffff;
  if (!mask || mask >> w.cta->cluster->ctas.size())
    fail(ErrorKind::OutOfBounds, &w, &in, "multicast mask 0x%x names a CTA beyond the cluster of %zu", mask,
         w.cta->cluster->ctas.size());
  return mask;
}

void issue_store(Warp &w, const Instruction &in, int lane, u32 source, u32 bytes, bool reduces,
                 const TrackGlobal &track_target, std::function<void(const u8 *)> copy) {
  Cta &cta = shared_owner(w, in, source, bytes, "bulk store");
  if (&cta != w.cta) fail(ErrorKind::IllegalInstruction, &w, &in, "a bulk store reads the own CTA's shared memory only");
  race::Actor actor = race::stream(w, kBulkRead, true);
  race::shared_access(w, in, cta, shared_offset(source), bytes, false, actor);
  w.events[kBulkWrite] = actor.event;
  // A reduction is .relaxed.gpu.
  track_target({w.agent(kBulkWrite), actor.event, &w.now, false, true, reduces ? (u8)kGpuScope : kWeak});
  machine.counters.tma_stored += bytes;
  const u8 *smem = cta.smem.data();
  AsyncPtr op = make_async(in, "store", [=, copy = std::move(copy)] { copy(smem); });
  issue_free(w, op);
  BulkGroups &groups = w.bulk_groups[lane];
  groups.open.push_back(op);
  groups.open_event = actor.event;
}

void close_group(BulkGroups &groups, u32 event) {
  u32 last = groups.open.empty() ? event : groups.open_event;
  groups.closed.push_back({std::move(groups.open), last});
  groups.open.clear();
}

}  // namespace

// ---- tensor copies ---------------------------------------------------------------------------------------------

// aux: 0 coordinates, 1 dst offset, 2 mbarrier offset, 3 multicast, 4 cta_group::2, 5 gather4.
// Operands: dst, map, coordinates.., mbarrier, mask or none.
HANDLER("tma.load", Plain) {
  u32 n = (u32)in.aux[0];
  for (int i : lanes_of(lanes)) {
    TensorMap map = read_tensor_map(w, in, row<u64>(w, in.op[1])[i]);
    check_waited_for_grid(w, in, 1u << i, map.address, false);
    bool gather = in.aux[5];
    if (map.rank != (gather ? 2 : n))
      fail(ErrorKind::MisalignedDescriptor, &w, &in, "the tensor map has rank %u, the instruction %u", map.rank, gather ? 2 : n);
    i32 c[5] = {};
    for (u32 k = 0; k < n; k++) c[k] = (i32)row<u32>(w, in.op[2 + k])[i];
    u32 dst = (u32)lane_address(w, in.op[0], i, in.aux[1]), mb = (u32)lane_address(w, in.op[2 + n], i, in.aux[2]);
    check_aligned(w, in, shared_offset(dst), 128, "TMA destination");
    if (gather && map.box[1] != 1)
      fail(ErrorKind::MisalignedDescriptor, &w, &in, "tile::gather4 needs a box of one row, the map has %u", map.box[1]);
    if (map.padded && c[0] % 128)
      fail(ErrorKind::MisalignedDescriptor, &w, &in, "coordinate %d of padded 4- or 6-bit elements is no multiple of 128", c[0]);
    u32 bytes = (u32)map.shared_bytes() * (gather ? 4 : 1), transaction = (u32)map.transaction_bytes() * (gather ? 4 : 1);
    u32 mask = destinations(w, in, in.aux[3], in.aux[3] ? row<u32>(w, in.op[3 + n])[i] : 0, dst);
    for (int r : lanes_of(mask)) {
      Cta &target = shared_owner(w, in, shared_address((u32)r, shared_offset(dst)), bytes, "TMA load");
      u32 offset = shared_offset(dst), row_bytes = (u32)map.shared_bytes();
      Warp *warp = &w;
      const Instruction *instruction = &in;
      std::array<i32, 5> at{c[0], c[1], c[2], c[3], c[4]};
      u32 barrier = barrier_for(w, in, (u32)r, mb, in.aux[3], in.aux[4]);
      TrackGlobal source = track_boxes(w, in, map, at, gather ? 4 : 1, false);
      issue_load(w, in, target, offset, bytes, transaction, barrier, source, [=](u8 *smem) {
        if (!gather) {
          copy_box(warp, instruction, map, at.data(), smem, offset, BoxCopy::Load, 0);
          return;
        }
        for (u32 k = 0; k < 4; k++) {
          const i32 row_at[5] = {at[0], at[1 + k], 0, 0, 0};
          copy_box(warp, instruction, map, row_at, smem, offset + k * row_bytes, BoxCopy::Load, 0);
        }
      });
    }
  }
  return Step::Done;
}
// aux: 0 coordinates, 1 smem offset, 2 reduction + 1 or 0, 5 scatter4. Operands: map, coordinates.., smem.
HANDLER("tma.store", Plain) {
  u32 n = (u32)in.aux[0];
  for (int i : lanes_of(lanes)) {
    TensorMap map = read_tensor_map(w, in, row<u64>(w, in.op[0])[i]);
    check_waited_for_grid(w, in, 1u << i, map.address, true);
    bool scatter = in.aux[5];
    if (map.rank != (scatter ? 2 : n))
      fail(ErrorKind::MisalignedDescriptor, &w, &in, "the tensor map has rank %u, the instruction %u", map.rank, scatter ? 2 : n);
    std::array<i32, 5> c{};
    for (u32 k = 0; k < n; k++) c[k] = (i32)row<u32>(w, in.op[1 + k])[i];
    u32 source = (u32)lane_address(w, in.op[1 + n], i, in.aux[1]);
    check_aligned(w, in, shared_offset(source), 128, "TMA source");
    if (map.padded) fail(ErrorKind::IllegalInstruction, &w, &in, "padded 4- and 6-bit elements can only be loaded");
    u32 row_bytes = (u32)map.shared_bytes(), offset = shared_offset(source);
    BoxCopy kind = in.aux[2] ? BoxCopy::Reduce : BoxCopy::Store;
    i64 reduction = in.aux[2] - 1;
    Warp *warp = &w;
    const Instruction *instruction = &in;
    TrackGlobal target = track_boxes(w, in, map, c, scatter ? 4 : 1, true);
    issue_store(w, in, i, source, row_bytes * (scatter ? 4 : 1), kind == BoxCopy::Reduce, target, [=](const u8 *smem) {
      u8 *s = const_cast<u8 *>(smem);  // copy_box only reads it here
      if (!scatter) {
        copy_box(warp, instruction, map, c.data(), s, offset, kind, reduction);
        return;
      }
      for (u32 k = 0; k < 4; k++) {
        const i32 row_at[5] = {c[0], c[1 + k], 0, 0, 0};
        copy_box(warp, instruction, map, row_at, s, offset + k * row_bytes, kind, reduction);
      }
    });
  }
  return Step::Done;
}

// ---- bulk copies -----------------------------------------------------------------------------------------------

// global -> shared. aux: 0 dst offset, 1 src offset, 2 mbarrier offset, 3 multicast. Operands: dst, src, size, mbarrier,
// mask or none.
HANDLER("bulk.load", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 dst = (u32)lane_address(w, in.op[0], i, in.aux[0]), bytes = row<u32>(w, in.op[2])[i];
    u64 src = lane_address(w, in.op[1], i, in.aux[1]);
    u32 mb = (u32)lane_address(w, in.op[3], i, in.aux[2]);
    check_aligned(w, in, dst, 16, "bulk copy destination");
    check_aligned(w, in, src, 16, "bulk copy source");
    check_aligned(w, in, bytes, 16, "bulk copy size");
    check_waited_for_grid(w, in, 1u << i, src, false);
    const u8 *from = global_data(&w, &in, src, bytes, false, "bulk load");
    u32 mask = destinations(w, in, in.aux[3], in.aux[3] ? row<u32>(w, in.op[4])[i] : 0, dst), offset = shared_offset(dst);
    for (int r : lanes_of(mask)) {
      Cta &target = shared_owner(w, in, shared_address((u32)r, offset), bytes, "bulk load");
      u32 barrier = barrier_for(w, in, (u32)r, mb, in.aux[3], false);
      issue_load(w, in, target, offset, bytes, bytes, barrier, track_range(w, in, from, bytes, false),
                 [=](u8 *smem) { memcpy(smem + offset, from, bytes); });
    }
  }
  return Step::Done;
}
// shared::cta -> shared::cluster. aux as above; 3: reduction + 1 or 0, 4: its type.
HANDLER("bulk.peer", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 dst = (u32)lane_address(w, in.op[0], i, in.aux[0]), bytes = row<u32>(w, in.op[2])[i];
    u32 src = (u32)lane_address(w, in.op[1], i, in.aux[1]), mb = (u32)lane_address(w, in.op[3], i, in.aux[2]);
    check_aligned(w, in, dst, 16, "bulk copy destination");
    check_aligned(w, in, src, 16, "bulk copy source");
    check_aligned(w, in, bytes, 16, "bulk copy size");
    Cta &source = shared_owner(w, in, src, bytes, "bulk copy");
    Cta &target = shared_owner(w, in, dst, bytes, "bulk copy");
    race::Free op = race::free_running(w);
    race::shared_access(w, in, source, shared_offset(src), bytes, false, op.actor());
    race::shared_access(w, in, target, shared_offset(dst), bytes, true, op.actor());
    mbarrier_at(w, in, mb, op.actor(), "complete_tx of an asynchronous copy");
    machine.counters.dsmem += bytes;
    u8 *to = shared_data(target, dst);
    const u8 *from = shared_data(source, src);
    i64 reduction = in.aux[3] - 1, type = in.aux[4];
    Warp *warp = &w;
    const Instruction *instruction = &in;
    issue_free(w, make_async(in, "copy to a peer", [=, finished = op.finished()] {
                 if (reduction < 0) memcpy(to, from, bytes);
                 else
                   for (u32 k = 0; k < bytes; k += type == 2 || type == 3 ? 8 : 4)
                     atomic_update(to + k, reduction, type, from + k, nullptr);
                 mbarrier_complete_tx(*warp, *instruction, mb, bytes, &finished);
               }));
  }
  return Step::Done;
}
// shared -> global. aux: 0 dst offset, 1 src offset, 2 reduction + 1 or 0, 3 its type, 4 bytes per element.
HANDLER("bulk.store", Plain) {
  for (int i : lanes_of(lanes)) {
    u64 dst = lane_address(w, in.op[0], i, in.aux[0]);
    u32 src = (u32)lane_address(w, in.op[1], i, in.aux[1]), bytes = row<u32>(w, in.op[2])[i];
    check_aligned(w, in, dst, 16, "bulk copy destination");
    check_aligned(w, in, src, 16, "bulk copy source");
    check_aligned(w, in, bytes, 16, "bulk copy size");
    check_waited_for_grid(w, in, 1u << i, dst, true);
    u8 *to = global_data(&w, &in, dst, bytes, true, "bulk store");
    u32 offset = shared_offset(src);
    i64 reduction = in.aux[2] - 1, type = in.aux[3], element = in.aux[4];
    issue_store(w, in, i, src, bytes, reduction >= 0, track_range(w, in, to, bytes, true), [=](const u8 *smem) {
      if (reduction < 0) memcpy(to, smem + offset, bytes);
      else
        for (i64 k = 0; k < bytes; k += element) atomic_update(to + k, reduction, type, smem + offset + k, nullptr);
    });
  }
  return Step::Done;
}
HANDLER("bulk.commit_group", Plain) {
  for (int i : lanes_of(lanes)) close_group(w.bulk_groups[i], 0);
  return Step::Done;
}
// aux: 0 groups that may remain, 1 wait for the reads of the sources only.
HANDLER("bulk.wait_group", Plain) {
  for (int i : lanes_of(lanes)) {
    BulkGroups &groups = w.bulk_groups[i];
    while (groups.closed.size() > (size_t)in.aux[0]) {
      for (auto &op : groups.closed.front().ops) op->complete();
      race::learn(w, kBulkRead, groups.closed.front().event);
      if (!in.aux[1]) race::learn(w, kBulkWrite, groups.closed.front().event);
      groups.closed.pop_front();
    }
  }
  machine.progress++;
  return Step::Done;
}

// ---- cp.async: 4, 8 or 16 bytes per lane, through the generic proxy ----------------------------------------------

// aux: 0 bytes, 1 dst offset, 2 src offset, 3 third operand: 0 none, 1 source size, 2 ignore-source predicate.
HANDLER("cp.async", Plain) {
  u32 n = (u32)in.aux[0];
  race::Actor actor = race::stream(w, kCpAsync, false);
  struct Copy {
    u8 *to;
    const u8 *from;
    u32 bytes;
  };
  std::vector<Copy> copies;
  u32 ignore = in.aux[3] == 2 ? predicate_of(w, in.op[2]) : 0;
  for (int i : lanes_of(lanes)) {
    u32 dst = (u32)lane_address(w, in.op[0], i, in.aux[1]);
    u64 src = lane_address(w, in.op[1], i, in.aux[2]);
    u32 bytes = in.aux[3] == 1 ? row<u32>(w, in.op[2])[i] : ignore >> i & 1 ? 0 : n;
    if (bytes > n) fail(ErrorKind::IllegalInstruction, &w, &in, "cp.async: source size %u exceeds %u", bytes, n);
    check_aligned(w, in, dst, n, "cp.async destination");
    check_aligned(w, in, src, n, "cp.async source");
    Cta &cta = shared_owner(w, in, dst, n, "cp.async");
    actor.lane = (u8)i;
    race::shared_access(w, in, cta, shared_offset(dst), n, true, actor);
    if (bytes) check_waited_for_grid(w, in, 1u << i, src, false);
    copies.push_back({shared_data(cta, dst), bytes ? global_data(&w, &in, src, bytes, false, "cp.async") : nullptr, bytes});
    race::global_access(w, in, src, bytes, false, actor);
    machine.counters.global_read += bytes;
    machine.counters.shared_written += n;
  }
  AsyncPtr op = make_async(in, "cp.async", [=] {
    for (const Copy &c : copies) {
      if (c.bytes) memcpy(c.to, c.from, c.bytes);
      memset(c.to + c.bytes, 0, n - c.bytes);
    }
  });
  issue_cp_async(w, op);
  BulkGroups &groups = w.cp_async_groups[0];
  groups.open.push_back(op);
  groups.open_event = actor.event;
  return Step::Done;
}
HANDLER("cp.async.commit_group", Plain) {
  close_group(w.cp_async_groups[0], w.events[kCpAsync]);
  return Step::Done;
}
// aux: 0 groups that may remain, or -1 for all operations, in a group or not.
HANDLER("cp.async.wait_group", Plain) {
  BulkGroups &groups = w.cp_async_groups[0];
  if (in.aux[0] < 0) {
    for (auto &op : groups.open) op->complete();
    groups.open.clear();
    race::learn(w, kCpAsync, w.events[kCpAsync]);
  }
  while (groups.closed.size() > (size_t)std::max<i64>(in.aux[0], 0)) {
    for (auto &op : groups.closed.front().ops) op->complete();
    race::learn(w, kCpAsync, groups.closed.front().event);
    groups.closed.pop_front();
  }
  return Step::Done;
}
// The mbarrier gets an arrival per lane when the lane's earlier cp.async are complete. aux: 0 offset, 1 noinc.
HANDLER("cp.async.mbarrier.arrive", Plain) {
  auto publish = std::make_shared<ClockPair>();
  race::release(w, *publish);
  if (machine.track_order) publish->order.raise(w.agent(kCpAsync), w.events[kCpAsync]);
  std::map<u32, u32> arrivals;
  for (int i : lanes_of(lanes)) arrivals[(u32)lane_address(w, in.op[0], i, in.aux[0])]++;
  for (auto [address, count] : arrivals) {
    Mbarrier &b = mbarrier_at(w, in, address, race::generic(w), "cp.async.mbarrier.arrive");
    if (!in.aux[1]) b.pending += count;
    Warp *warp = &w;
    const Instruction *instruction = &in;
    u32 a = address, n = count;
    issue_cp_async(w, make_async(in, "arrival of cp.async",
                                 [=] { mbarrier_arrive(*warp, *instruction, a, n, publish.get()); }));
  }
  return Step::Done;
}

// st.async / red.async to a peer's shared memory. aux: 0 dst offset, 1 elements, 2 bytes per element, 3 mbarrier offset,
// 4 reduction + 1 or 0, 5 its type. Operands: values.., dst, mbarrier.
//
// Lanes that signal the same mbarrier form one operation, which arrives at once: one operation a lane would need one
// component a lane in every clock. So a phase that ends between the bytes of one instruction goes unnoticed. Stores of two
// lanes to one location are separate operations, which race.
HANDLER("st.async", Plain) {
  u32 n = (u32)in.aux[1], bytes = (u32)in.aux[2], size = n * bytes;
  i64 reduction = in.aux[4] - 1, type = in.aux[5];
  struct Write {
    u32 dst;
    Cta *target;
    u8 *to;
    std::array<u8, 16> data;
  };
  std::map<std::pair<u32, u32>, std::vector<Write>> operations;  // by mbarrier, then one for each store to the same location
  for (int i : lanes_of(lanes)) {
    u32 dst = (u32)lane_address(w, in.op[n], i, in.aux[0]), mb = (u32)lane_address(w, in.op[n + 1], i, in.aux[3]);
    check_aligned(w, in, dst, size, "st.async destination");
    Cta &target = shared_owner(w, in, dst, size, "st.async");
    Write write{dst, &target, shared_data(target, dst), {}};
    for (u32 k = 0; k < n; k++) {
      if (bytes == 8) memcpy(&write.data[k * 8], &row<u64>(w, in.op[k])[i], 8);
      else memcpy(&write.data[k * bytes], &row<u32>(w, in.op[k])[i], bytes);
    }
    u32 again = 0;
    auto overlaps = [&](const Write &o) { return o.dst < dst + size && dst < o.dst + size; };
    for (; reduction < 0; again++) {
      auto &before = operations[{mb, again}];
      if (std::none_of(before.begin(), before.end(), overlaps)) break;
    }
    operations[{mb, again}].push_back(write);
  }
  for (auto &[key, writes] : operations) {
    u32 mb = key.first, total = (u32)writes.size() * size;
    race::Free op = race::free_running(w);
    mbarrier_at(w, in, mb, op.actor(true), "complete_tx of st.async");
    for (const Write &write : writes)
      race::shared_access(w, in, *write.target, shared_offset(write.dst), size, true, op.actor(true));
    Warp *warp = &w;
    const Instruction *instruction = &in;
    machine.counters.dsmem += total;
    issue_free(w, make_async(in, "st.async", [=, writes = std::move(writes), finished = op.finished()] {
                 for (const Write &write : writes)
                   if (reduction < 0) memcpy(write.to, write.data.data(), size);
                   else atomic_update(write.to, reduction, type, write.data.data(), nullptr);
                 mbarrier_complete_tx(*warp, *instruction, mb, total, &finished);
               }));
  }
  return Step::Done;
}

// ---- clusterlaunchcontrol: a running cluster cancels the next one that has not started, and does its work ----------

// The response is opaque to programs. Here: word 0 whether a cluster was canceled, words 1..3 the id of its first CTA.
// aux: 0 dst offset, 1 mbarrier offset, 2 multicast to the whole cluster.
HANDLER("clc.try_cancel", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 dst = (u32)lane_address(w, in.op[0], i, in.aux[0]), mb = (u32)lane_address(w, in.op[1], i, in.aux[1]);
    check_aligned(w, in, shared_offset(dst), 16, "clusterlaunchcontrol response");
    std::array<u32, 4> response{};
    // On a GPU the request may fail while clusters are left, depending on the GPU's other work.
    Grid &grid = *w.cta->cluster->grid;
    bool take = grid.started < grid.clusters && (!machine.random_order() || machine.random() % 2);
    if (take) {
      response[0] = 1;
      grid.first_cta(grid.next_cluster(), &response[1]);
      machine.progress++;
    }
    for (u32 r = 0; r < w.cta->cluster->ctas.size(); r++) {
      if (!in.aux[2] && r != w.cta->rank) continue;
      u32 offset = shared_offset(dst);
      Cta &target = shared_owner(w, in, shared_address(r, offset), 16, "clusterlaunchcontrol");
      issue_load(w, in, target, offset, 16, 16, shared_address(r, shared_offset(mb)), nullptr,
                 [=](u8 *smem) { memcpy(smem + offset, response.data(), 16); });
    }
  }
  return Step::Done;
}
HANDLER("clc.is_canceled", Plain) {
  u32 bits = 0;
  for (int i : lanes_of(lanes)) bits |= (u32)((u64)row<u128>(w, in.op[1])[i] & 1) << i;
  set_predicate(w, in.op[0], lanes, bits);
  return Step::Done;
}
// aux: 0 first dimension. Operands: x, y or z, or the vector {x, y, z, unused}; response.
HANDLER("clc.first_cta", Plain) {
  u32 n = in.operand_count - 1u;
  u128 response[kLanes];
  memcpy(response, row<u128>(w, in.op[n]), sizeof response);
  for (u32 k = 0; k < n; k++) {
    u32 word = 1 + (u32)in.aux[0] + k;
    if (in.op[k] != kNone)
      each_lane<u32>(w, in.op[k], lanes, [&](int i) { return word < 4 ? (u32)(response[i] >> (32 * word)) : 0u; });
  }
  return Step::Done;
}
