// tcgen05.alloc, dealloc, relinquish, ld, st, wait, cp (PTX ISA "Tensorcore 5th generation").
#include "tmem.h"
#include "alu.h"
#include "async.h"
#include "descriptor.h"
#include "griddep.h"
#include "memory.h"
#include "race.h"

void check_tmem_columns(const Warp &w, const Instruction &in, Cta &c, u32 column, u32 count, const char *what) {
  for (auto &a : c.tmem_allocations)
    if (column >= a.column && column + count <= a.column + a.columns) return;
  if (column + count <= kTmemColumns)
    for (auto &a : c.tmem_freed)
      if (column >= a.column && column + count <= a.column + a.columns) {
        report(ErrorKind::TmemFreed, &w, &in, "%s: columns [%u, %u) were freed at ptx line %d", what, column, column + count,
               a.line);
        return;
      }
  std::string live;
  for (auto &a : c.tmem_allocations)
    live += " [" + std::to_string(a.column) + ", " + std::to_string(a.column + a.columns) + ")";
  fail(ErrorKind::OutOfBounds, &w, &in, "%s: tensor memory columns [%u, %u) of CTA rank %u are not allocated; live are:%s",
       what, column, column + count, c.rank, live.empty() ? " none" : live.c_str());
}

void track_shift(Warp &w, const Instruction &in, Cta &c, u32 lane, u32 column, u32 columns, const race::Actor &a, const char *what) {
  for (u32 half = 0; half < 2; half++) {
    race::tmem_access(w, in, c, lane / 16 + half, column, columns, 0xffff, false, a, what);
    race::tmem_access(w, in, c, lane / 16 + half, column, columns, half ? 0x7fff : 0xffff, true, a, what);
  }
}
void shift_rows(Cta &c, u32 lane, u32 column, u32 columns) {
  for (u32 r = 0; r < 31; r++) memcpy(tmem_row(c, lane + r) + column, tmem_row(c, lane + r + 1) + column, columns * 4);
}

// cta_group::2: one warp of each CTA of the pair allocates, and neither continues before both have allocated.
static Step finish_allocation(Warp &w, const Instruction &in) {
  if (in.aux[1] == 1) return Step::Done;
  Group &g = w.groups[w.current];
  Cluster &cluster = *w.cta->cluster;
  if (cluster.ctas.size() < 2) fail(ErrorKind::IllegalInstruction, &w, &in, "cta_group::2 needs a cluster of CTA pairs");
  auto &of_peer = cluster.ctas[w.cta->rank ^ 1]->pair_allocations;
  if (of_peer.size() < g.ticket) return Step::Blocked;
  race::learn_agent(w, of_peer[g.ticket - 1].first, of_peer[g.ticket - 1].second);
  g.ticket = 0;
  return Step::Done;
}

// aux: 0 address offset, 1 cta_group. Operands: shared address of the result, columns.
HANDLER("tcgen05.alloc", Sync) {
  if (w.groups[w.current].ticket) return finish_allocation(w, in);
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = uniform<u32>(w, in.op[1], lanes);
  if (n < 32 || n > kTmemColumns || (n & (n - 1)))
    fail(ErrorKind::IllegalInstruction, &w, &in, "tcgen05.alloc of %u columns: a power of two in [32, 512] is needed", n);
  Cta &c = *w.cta;
  check_allocation_beside_grids(w, in);
  if (!c.tmem_permit) fail(ErrorKind::IllegalInstruction, &w, &in, "tcgen05.alloc after relinquish_alloc_permit");
  for (u32 column = 0; column + n <= kTmemColumns; column += n) {
    bool free = true;
    for (auto &a : c.tmem_allocations) free &= column + n <= a.column || a.column + a.columns <= column;
    if (!free) continue;
    u32 event = ++w.events[kTmemStore];
    race::learn(w, kTmemStore, event);
    c.tmem_allocations.push_back({column, n, in.line, (i32)w.index, w.agent(kTmemStore), event});
    auto &freed = c.tmem_freed;
    freed.erase(std::remove_if(freed.begin(), freed.end(),
                               [&](auto &a) { return a.column < column + n && column < a.column + a.columns; }),
                freed.end());
    for (u32 lane16 = 0; lane16 < 8; lane16++) c.tmem_shadow->forget(lane16 * kTmemColumns + column, n);
    u32 address = (u32)lane_address(w, in.op[0], first_lane(lanes), in.aux[0]);
    Cta &owner = shared_owner(w, in, address, 4, "tcgen05.alloc");
    race::shared_access(w, in, owner, shared_offset(address), 4, true, race::generic(w));
    memcpy(shared_data(owner, address), &column, 4);
    machine.progress++;
    if (in.aux[1] == 2) {
      c.pair_allocations.emplace_back(w.agent(kTmemStore), event);
      w.groups[w.current].ticket = c.pair_allocations.size();
    }
    return finish_allocation(w, in);
  }
  return Step::Blocked;
}
HANDLER("tcgen05.dealloc", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 column = tmem_column(uniform<u32>(w, in.op[0], lanes)), n = uniform<u32>(w, in.op[1], lanes);
  Cta &c = *w.cta;
  for (size_t k = 0; k < c.tmem_allocations.size(); k++) {
    if (c.tmem_allocations[k].column != column || c.tmem_allocations[k].columns != n) continue;
    if (machine.track_order && machine.level[(int)ErrorKind::TmemFreed] != Level::Off) {
      Access open;
      for (u32 g = 0; g < 8 * n; g++)
        if (c.tmem_shadow->unordered(g / n * kTmemColumns + column + g % n, w.agent(kGeneric), w.now.order, &open)) {
          report(ErrorKind::TmemFreed, &w, &in,
                 "tcgen05.dealloc while the %s at ptx line %d is not ordered before it: the columns may be reallocated too early",
                 open.write ? "write" : "read", open.line);
          break;
        }
    }
    if (race::tracks_tensor_fences()) {
      Access open;
      for (u32 g = 0; g < 8 * n; g++)
        if (c.tmem_shadow->unordered(g / n * kTmemColumns + column + g % n, w.agent(kGeneric), w.now.tensor, &open) &&
            open.agent - w.agent(kGeneric) >= kWarpAgents) {
          report(ErrorKind::TensorFence, &w, &in,
                 "tcgen05.dealloc: tcgen05.fence does not order it after the %s at ptx line %d: ::before_thread_sync before "
                 "that side's arrival or ::after_thread_sync after this side's wait is missing",
                 open.write ? "write" : "read", open.line);
          break;
        }
    }
    c.tmem_freed.push_back({column, n, in.line, (i32)w.index});
    c.tmem_allocations.erase(c.tmem_allocations.begin() + (long)k);
    machine.progress++;
    return Step::Done;
  }
  fail(ErrorKind::IllegalInstruction, &w, &in, "tcgen05.dealloc of %u columns from %u, which is no allocation", n, column);
}
HANDLER("tcgen05.relinquish", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  w.cta->tmem_permit = false;
  return Step::Done;
}
// aux: 0 loads, 1 stores
HANDLER("tcgen05.wait", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  settle_tmem(w, in.aux[0], in.aux[1]);
  return Step::Done;
}

// ---- ld / st ---------------------------------------------------------------------------------------------------

namespace {

enum Shape : i64 { k32x32b, k16x64b, k16x128b, k16x256b, k16x32bx2 };

// Lane (of the 32 or 16 accessed) and column of register r of thread i (CUTLASS copy_traits_sm100.hpp).
void cell_of(i64 shape, u32 i, u32 r, u32 split, u32 *lane, u32 *column) {
  switch (shape) {
    case k32x32b: *lane = i, *column = r; break;
    case k16x64b: *lane = 8 * (i & 1) + (i >> 2), *column = (i >> 1 & 1) + 2 * r; break;
    case k16x128b: *lane = i / 4 + 8 * (r & 1), *column = i % 4 + 4 * (r >> 1); break;
    case k16x256b: *lane = i / 4 + 8 * (r >> 1 & 1), *column = 2 * (i % 4) + (r & 1) + 8 * (r >> 2); break;
    default: *lane = i % 16, *column = r + (i / 16 ? split : 0); break;
  }
}

struct Target {
  u32 lane, column, columns, split;
  bool packed;
};

Target tmem_target(Warp &w, const Instruction &in, u32 lanes, Operand address_operand, u32 registers, const char *what) {
  i64 shape = in.aux[0];
  u32 address = (u32)lane_address(w, address_operand, first_lane(lanes), in.aux[2]);
  for (int i : lanes_of(lanes))
    if ((u32)lane_address(w, address_operand, i, in.aux[2]) != address) {
      // Undefined in PTX; a released kernel does it and means the first lane's address.
      warn(ErrorKind::DivergentCollective, &in, std::string(what) + ": the lanes of the warp give different addresses");
      break;
    }
  Target t{tmem_lane(address), tmem_column(address), 0, (u32)in.aux[4], in.aux[3] != 0};
  u32 rows = shape == k32x32b ? 32 : 16;
  if (t.lane % rows)
    fail(ErrorKind::IllegalInstruction, &w, &in, "%s: lane %u is not a multiple of %u", what, t.lane, rows);
  u32 own = w.index % 4;
  if (t.lane / 32 != own) {
    // A zero lane field selects the warp's own quarter; kernels that are right on hardware use it.
    if (t.lane / 32 != 0)
      fail(ErrorKind::IllegalInstruction, &w, &in,
           "%s: warp %u may access tensor memory lanes [%u, %u) only, the address names lane %u", what, w.index, own * 32,
           own * 32 + 32, t.lane);
    warn(ErrorKind::IllegalInstruction, &in, std::string(what) + ": lane field 0 in a warp of another quarter");
    t.lane = own * 32 + t.lane % 32;
  }
  u32 factor = t.packed ? 2 : 1;
  switch (shape) {
    case k32x32b: t.columns = registers; break;
    case k16x64b: t.columns = 2 * registers; break;
    case k16x128b: t.columns = 4 * (registers / 2); break;
    case k16x256b: t.columns = 8 * (registers / 4); break;
    default: t.columns = registers; break;
  }
  t.columns *= factor;
  check_tmem_columns(w, in, *w.cta, t.column, t.columns, what);
  if (shape == k16x32bx2) check_tmem_columns(w, in, *w.cta, t.column + t.split, t.columns, what);
  return t;
}

void track(Warp &w, const Instruction &in, const Target &t, bool write, const race::Actor &a, const char *what) {
  bool both = in.aux[0] == k32x32b;
  for (u32 half = 0; half < (both ? 2u : 1u); half++) {
    race::tmem_access(w, in, *w.cta, t.lane / 16 + half, t.column, t.columns, 0xffff, write, a, what);
    if (in.aux[0] == k16x32bx2)
      race::tmem_access(w, in, *w.cta, t.lane / 16 + half, t.column + t.split, t.columns, 0xffff, write, a, what);
  }
}

}  // namespace

// aux: 0 shape, 1 registers, 2 address offset, 3 16-bit packing, 4 half split. Operands of ld: registers.., address.
HANDLER("tcgen05.ld", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = (u32)in.aux[1];
  Target t = tmem_target(w, in, lanes, in.op[n], n, "tcgen05.ld");
  race::Actor actor = race::stream(w, kTmemLoad, false);
  track(w, in, t, false, actor, "tcgen05.ld");
  machine.counters.tmem_read += (u64)n * kLanes * 4;
  Warp *warp = &w;
  const Instruction *instruction = &in;
  auto load = [=] {
    const u32 *base = tmem_row(*warp->cta, t.lane) + t.column;
    for (u32 r = 0; r < n; r++) {
      if (instruction->op[r] == kNone) continue;
      u32 *d = row<u32>(*warp, instruction->op[r]);
      for (u32 i = 0; i < kLanes; i++) {
        u32 lane, column;
        cell_of(instruction->aux[0], i, r, t.split, &lane, &column);
        const u32 *cells = base + (size_t)lane * kTmemColumns;
        // Packed: the low halves of two neighbouring columns make one register.
        d[i] = t.packed ? (cells[2 * column] & 0xffff) | cells[2 * column + 1] << 16 : cells[column];
      }
    }
  };
  issue_tmem(w, in, make_async(in, "tcgen05.ld", load), true, actor.event, n);
  return Step::Done;
}
// Operands of st: address, registers..
HANDLER("tcgen05.st", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = (u32)in.aux[1];
  Target t = tmem_target(w, in, lanes, in.op[0], n, "tcgen05.st");
  race::Actor actor = race::stream(w, kTmemStore, false);
  track(w, in, t, true, actor, "tcgen05.st");
  machine.counters.tmem_written += (u64)n * kLanes * 4;
  // The registers are read at issue: the program may change them right after.
  auto values = std::make_shared<std::vector<u32>>((size_t)n * kLanes);
  for (u32 r = 0; r < n; r++) memcpy(values->data() + (size_t)r * kLanes, row<u32>(w, in.op[1 + r]), kLanes * 4);
  Warp *warp = &w;
  i64 shape = in.aux[0];
  auto store = [=] {
    u32 *base = tmem_row(*warp->cta, t.lane) + t.column;
    for (u32 r = 0; r < n; r++)
      for (u32 i = 0; i < kLanes; i++) {
        u32 lane, column, value = (*values)[(size_t)r * kLanes + i];
        cell_of(shape, i, r, t.split, &lane, &column);
        u32 *cells = base + (size_t)lane * kTmemColumns;
        if (t.packed) cells[2 * column] = value & 0xffff, cells[2 * column + 1] = value >> 16;
        else cells[column] = value;
      }
  };
  issue_tmem(w, in, make_async(in, "tcgen05.st", store), false, actor.event, 0);
  return Step::Done;
}

// ---- cp: shared to tensor memory -------------------------------------------------------------------------------

namespace {

// Copies 16 bytes unchanged (bits 0), or 16 elements of 4 or 6 bits, each to the middle of a byte.
void unpack_chunk(u32 *to, const u8 *from, u32 bits) {
  u8 out[16];
  for (u32 k = 0; bits && k < 16; k++) {
    u32 at = k * bits, pair = from[at / 8] | (u32)from[at / 8 + 1] << 8;
    out[k] = (u8)((pair >> (at % 8) & ((1u << bits) - 1)) << (8 - bits) / 2);
  }
  memcpy(to, bits ? out : from, 16);
}

}  // namespace

// aux: 0 rows of the source, 1 bytes per row, 2 address offset, 3 cta_group, 4..7 for each quarter of the lanes: the first
// source row it receives, or -1; 8 bits per element of a padded source, or 0 to copy unchanged. Operands: tensor-memory address,
// descriptor.
HANDLER("tcgen05.cp", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[2]);
    SmemDescriptor d = read_smem_descriptor(w, in, row<u64>(w, in.op[1])[i], "of tcgen05.cp");
    u32 rows = (u32)in.aux[0], bytes = (u32)in.aux[1], chunks = bytes / 16, column = tmem_column(address);
    if (tmem_lane(address)) fail(ErrorKind::IllegalInstruction, &w, &in, "tcgen05.cp: the lane field must be 0");
    Cluster &cluster = *w.cta->cluster;
    u32 group = (u32)in.aux[3];
    if (group == 2 && (w.cta->rank & 1 || cluster.ctas.size() < 2))
      fail(ErrorKind::IllegalInstruction, &w, &in, "cta_group::2 is issued by the even CTA of a pair");
    race::Actor actor = race::stream(w, kTensorPipe, true);
    race::enter_tensor_pipe(w);
    for (u32 h = 0; h < group; h++) {
      Cta &c = *cluster.ctas[w.cta->rank + h];
      check_tmem_columns(w, in, c, column, bytes / 4, "tcgen05.cp");
      for (u32 r = 0; r < rows; r++)
        for (u32 k = 0; k < chunks; k++) {
          u32 a = shared_address(c.rank, d.k_major(r, k));
          shared_owner(w, in, a, 16, "tcgen05.cp source");
          race::shared_access(w, in, c, shared_offset(a), 16, false, actor);
        }
      for (u32 quarter = 0; quarter < 4; quarter++)
        if (in.aux[4 + quarter] >= 0)
          for (u32 half = 0; half < 2; half++)
            race::tmem_access(w, in, c, 2 * quarter + half, column, bytes / 4, 0xffff, true, actor, "tcgen05.cp");
    }
    machine.counters.operands_read += (u64)bytes * rows * group;
    Warp *warp = &w;
    const Instruction *instruction = &in;
    u32 rank = w.cta->rank;
    issue_tensor_pipe(w, make_async(in, "tcgen05.cp", [=] {
                        for (u32 h = 0; h < group; h++) {
                          Cta &c = *warp->cta->cluster->ctas[rank + h];
                          for (u32 quarter = 0; quarter < 4; quarter++) {
                            i64 first = instruction->aux[4 + quarter];
                            if (first < 0) continue;
                            for (u32 r = 0; r < 32; r++)
                              for (u32 k = 0; k < chunks; k++)
                                unpack_chunk(tmem_row(c, quarter * 32 + r) + column + 4 * k,
                                             c.smem.data() + d.k_major((u32)first + r, k), (u32)instruction->aux[8]);
                          }
                        }
                      }));
  }
  return Step::Done;
}

// ---- shift: 31 lanes of a quarter, 32 bytes each, get the contents of the next lane ------------------------------

// aux: 0 address offset, 1 cta_group. Operand: tensor-memory address.
HANDLER("tcgen05.shift", Plain) {
  for (int i : lanes_of(lanes)) {
    u32 address = (u32)lane_address(w, in.op[0], i, in.aux[0]), lane = tmem_lane(address), column = tmem_column(address);
    if (lane % 32 || lane >= 128)
      fail(ErrorKind::IllegalInstruction, &w, &in, "tcgen05.shift: lane %u is not a multiple of 32 below 128", lane);
    Cluster &cluster = *w.cta->cluster;
    u32 group = (u32)in.aux[1], rank = w.cta->rank;
    if (group == 2 && (rank & 1 || cluster.ctas.size() < 2))
      fail(ErrorKind::IllegalInstruction, &w, &in, "cta_group::2 is issued by the even CTA of a pair");
    race::Actor actor = race::stream(w, kTensorPipe, true);
    race::enter_tensor_pipe(w);
    for (u32 h = 0; h < group; h++) {
      Cta &c = *cluster.ctas[rank + h];
      if (&c != w.cta) race::touch_peer(w, in, c, actor);
      check_tmem_columns(w, in, c, column, kShiftColumns, "tcgen05.shift");
      track_shift(w, in, c, lane, column, kShiftColumns, actor, "tcgen05.shift");
    }
    issue_tensor_pipe(w, make_async(in, "tcgen05.shift", [&cluster, rank, group, lane, column] {
                        for (u32 h = 0; h < group; h++) shift_rows(*cluster.ctas[rank + h], lane, column, kShiftColumns);
                      }));
  }
  return Step::Done;
}
