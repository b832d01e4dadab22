// Loads, stores and atomics (PTX ISA "Data Movement: ld, st, atom, red, ldmatrix, stmatrix, mapa, cp.async").
#include "memory.h"
#include "alu.h"
#include "in_flight.h"
#include "numeric.h"
#include "race.h"

using numeric::float_to_bf16;
using numeric::float_to_half;

Cta &shared_owner(const Warp &w, const Instruction &in, u32 address, u32 bytes, const char *what) {
  Cluster &cluster = *w.cta->cluster;
  u32 rank = shared_rank(address), offset = shared_offset(address);
  u32 limit = kReservedSmem + machine.program->static_smem_bytes + (u32)machine.dynamic_smem;
  if (rank >= cluster.ctas.size())
    fail(ErrorKind::OutOfBounds, &w, &in, "%s: shared address 0x%x names CTA rank %u of a cluster of %zu", what, address,
         rank, cluster.ctas.size());
  if (offset + bytes > limit || offset < kReservedSmem)
    fail(ErrorKind::OutOfBounds, &w, &in,
         "%s: shared memory [0x%x, 0x%x) lies outside the CTA's allocation [0x%x, 0x%x)", what, offset, offset + bytes,
         kReservedSmem, limit);
  return *cluster.ctas[rank];
}

u8 *global_data(const Warp *w, const Instruction *in, u64 address, u64 bytes, bool write, const char *what) {
  if (address < 65536)
    fail(ErrorKind::OutOfBounds, w, in, "%s: global address 0x%llx is (nearly) null", what, (unsigned long long)address);
  if (machine.check_global) {
    static size_t last = 0;
    auto &ranges = machine.ranges;
    auto inside = [&](const GlobalRange &r) { return address >= r.begin && address + bytes <= r.end; };
    if (last >= ranges.size() || !inside(ranges[last])) {
      size_t k = (size_t)(std::upper_bound(ranges.begin(), ranges.end(), address,
                                           [](u64 a, const GlobalRange &r) { return a < r.begin; }) - ranges.begin());
      if (k == 0 || !inside(ranges[k - 1])) {
        const GlobalRange *near = k ? &ranges[k - 1] : nullptr;
        fail(ErrorKind::OutOfBounds, w, in,
             "%s: global [0x%llx, +%llu) is in no registered tensor%s%s%s", what, (unsigned long long)address,
             (unsigned long long)bytes, near ? " (the nearest below is " : "", near ? near->name.c_str() : "",
             near ? (", ending " + std::to_string((i64)(address - near->end)) + " bytes before)").c_str() : "");
      }
      last = k - 1;
    }
    if (write && !ranges[last].writable)
      fail(ErrorKind::OutOfBounds, w, in, "%s: writes to read-only %s", what, ranges[last].name.c_str());
  }
  return reinterpret_cast<u8 *>(address);
}

Location locate(Warp &w, const Instruction &in, int lane, u64 address, Space space, u32 bytes, bool write) {
  if (space == Space::Generic) {
    u64 window = address >> 60;
    space = window == 1 ? Space::Shared : window == 2 ? Space::Local : Space::Global;
    if (space != Space::Global) address &= kSharedWindow - 1;
  }
  if (bytes && (bytes & (bytes - 1)) == 0 && (address & (bytes - 1)))
    report(ErrorKind::Misaligned, &w, &in, "lane %d: %u-byte %s at address 0x%llx", lane, bytes,
           write ? "store" : "load", (unsigned long long)address);
  switch (space) {
    case Space::Shared: {
      Cta &c = shared_owner(w, in, (u32)address, bytes, write ? "store" : "load");
      return {shared_data(c, (u32)address), &c, shared_offset((u32)address), false};
    }
    case Space::Local: {
      u64 offset = address & 0xffffffff;
      if (offset + bytes > machine.program->local_bytes)
        fail(ErrorKind::OutOfBounds, &w, &in, "local memory [0x%llx, +%u) beyond the frame of %u bytes",
             (unsigned long long)offset, bytes, machine.program->local_bytes);
      return {w.local.data() + (size_t)lane * machine.program->local_bytes + offset, nullptr, 0, false};
    }
    case Space::Param:
      return {reinterpret_cast<u8 *>(address), nullptr, 0, false};
    default:
      check_waited_for_grid(w, in, 1u << lane, address, write);
      return {global_data(&w, &in, address, bytes, write, write ? "store" : "load"), nullptr, 0, true};
  }
}

namespace {

// Shared-memory wavefronts of one warp access: 32 banks of 4 bytes; wider accesses go in half or quarter warps.
void count_banks(const u32 *offsets, u32 lanes, u32 bytes) {
  u32 words = std::max(1u, bytes / 4), per_phase = std::max(1u, 32 / words), ideal = 0, waves = 0;
  for (u32 first = 0; first < 32; first += per_phase) {
    u32 seen[32][4];
    u8 used[32] = {};
    u32 worst = 0;
    for (int i : lanes_of(lanes & (per_phase == 32 ? kAllLanes : ((1u << per_phase) - 1) << first)))
      for (u32 k = 0; k < words; k++) {
        u32 word = offsets[i] / 4 + k, bank = word & 31;
        bool known = false;
        for (u32 s = 0; s < used[bank] && s < 4; s++) known |= seen[bank][s] == word;
        if (known) continue;
        if (used[bank] < 4) seen[bank][used[bank]] = word;
        worst = std::max<u32>(worst, ++used[bank]);
      }
    if (worst) ideal++;
    waves += worst;
  }
  machine.counters.shared_accesses += ideal;
  machine.counters.shared_wavefronts += waves;
}

void order_before(Warp &w, Order order, Scope scope, const Location &at) {
  bool releases = order == Order::Release || order == Order::AcquireRelease;
  if (releases && scope == kSysScope) settle_in_flight(*w.cta->cluster);
  if (order != Order::Weak) race::release_at(w, at.data, !releases, scope);
}
void order_after(Warp &w, Order order, Scope scope, const Location &at) {
  bool acquires = order == Order::Acquire || order == Order::AcquireRelease;
  if (order != Order::Weak) race::acquire_at(w, at.data, at.global, !acquires, scope);
}

// The global accesses of a warp, with those of neighbouring lanes merged.
class GlobalAccesses {
 public:
  GlobalAccesses(Warp &w, const Instruction &in, bool write, const race::Actor &actor)
      : w_(w), in_(in), write_(write), actor_(actor) {}
  // `same`: memory already holds these bytes.
  void add(int lane, const void *data, u32 bytes, bool same = false) {
    u64 address = (u64)data;
    if (same != same_ || (address != end_ && !(address == begin_ && bytes <= end_ - begin_))) {
      flush();
      begin_ = address;
      same_ = same;
      actor_.lane = (u8)lane;
    } else {
      bool all_same = address == begin_ && bytes == end_ - begin_ && actor_.lane != kUnknownLane;
      actor_.lane = all_same ? kSeveralLanes : kUnknownLane;
    }
    end_ = std::max(end_, address + bytes);
  }
  void flush() {
    if (begin_ < end_) race::global_access(w_, in_, begin_, end_ - begin_, write_, actor_, same_);
    begin_ = end_ = 0;
  }

 private:
  Warp &w_;
  const Instruction &in_;
  bool write_, same_ = false;
  race::Actor actor_;
  u64 begin_ = 0, end_ = 0;
};

// sign: 0 zero-extend, 1 sign-extend to the row, 2 sign-extend to 16 bits.
void put_element(Warp &w, Operand o, int lane, const u8 *p, u32 bytes, i64 sign) {
  u64 x = 0;
  if (bytes == 16) {
    memcpy(&row<u128>(w, o)[lane], p, 16);
    return;
  }
  memcpy(&x, p, bytes);
  if (sign) {
    int shift = 64 - 8 * (int)bytes;
    x = (u64)((i64)(x << shift) >> shift);
    if (sign == 2) x &= 0xffff;
  }
  if (operand_bytes(o) == 8) row<u64>(w, o)[lane] = x;
  else row<u32>(w, o)[lane] = (u32)x;
}
void get_element(Warp &w, Operand o, int lane, u8 *p, u32 bytes) {
  if (bytes == 16) memcpy(p, &row<u128>(w, o)[lane], 16);
  else if (operand_bytes(o) == 8) memcpy(p, &row<u64>(w, o)[lane], bytes);
  else memcpy(p, &row<u32>(w, o)[lane], bytes);
}

}  // namespace

// aux: 0 space, 1 elements, 2 bytes per element, 3 signed, 4 address offset, 5 order, 6 scope. Operands: elements, address.
HANDLER("ld", Plain) {
  Space space = (Space)in.aux[0];
  u32 n = (u32)in.aux[1], bytes = (u32)in.aux[2];
  Order order = (Order)in.aux[5];
  Scope scope = (Scope)in.aux[6];
  u32 offsets[kLanes], shared_lanes = 0;
  race::Actor actor = race::generic(w);
  if (order != Order::Weak) actor.scope = scope;
  GlobalAccesses global(w, in, false, actor);
  for (int i : lanes_of(lanes)) {
    u64 address = space == Space::Param && in.op[n] == kNone ? (u64)w.cta->cluster->grid->params + (u64)in.aux[4]
                                                             : lane_address(w, in.op[n], i, in.aux[4]);
    Location at = locate(w, in, i, address, space, n * bytes, false);
    if (at.cta) {
      actor.lane = (u8)i;
      race::shared_access(w, in, *at.cta, at.offset, n * bytes, false, actor);
      offsets[i] = at.offset;
      shared_lanes |= 1u << i;
      (at.cta == w.cta ? machine.counters.shared_read : machine.counters.dsmem) += n * bytes;
    } else if (at.global) {
      machine.counters.global_read += n * bytes;
      settle_in_flight(*w.cta->cluster, at.data, n * bytes);
      global.add(i, at.data, n * bytes);
    }
    for (u32 k = 0; k < n; k++)
      if (in.op[k] != kNone) put_element(w, in.op[k], i, at.data + k * bytes, bytes, in.aux[3]);
    if (order != Order::Weak) order_after(w, order, scope, at);
  }
  global.flush();
  if (shared_lanes) count_banks(offsets, shared_lanes, n * bytes);
  return Step::Done;
}

// A warp polls a flag by strong loads: let other warps run.
HANDLER("ld.spin", Sync) {
  static const Handler plain = handlers()["ld"].run;
  plain(w, in, lanes);
  return Step::Yield;
}

// Operands: elements, address.
HANDLER("st", Plain) {
  Space space = (Space)in.aux[0];
  u32 n = (u32)in.aux[1], bytes = (u32)in.aux[2];
  Order order = (Order)in.aux[5];
  Scope scope = (Scope)in.aux[6];
  u32 offsets[kLanes], shared_lanes = 0;
  race::Actor actor = race::generic(w);
  if (order != Order::Weak) actor.scope = scope;
  GlobalAccesses global(w, in, true, actor);
  for (int i : lanes_of(lanes)) {
    Location at = locate(w, in, i, lane_address(w, in.op[n], i, in.aux[4]), space, n * bytes, true);
    if (at.cta) {
      actor.lane = (u8)i;
      race::shared_access(w, in, *at.cta, at.offset, n * bytes, true, actor);
      offsets[i] = at.offset;
      shared_lanes |= 1u << i;
      (at.cta == w.cta ? machine.counters.shared_written : machine.counters.dsmem) += n * bytes;
    } else if (at.global) {
      machine.counters.global_written += n * bytes;
    }
    if (flies(order, scope, at) && bytes % 4 == 0) {
      u8 stored[32];
      for (u32 k = 0; k < n; k++) get_element(w, in.op[k], i, stored + k * bytes, bytes);
      global.add(i, at.data, n * bytes);
      store_in_flight(w, in, scope, at.data, reinterpret_cast<const u32 *>(stored), n * bytes / 4);
      continue;
    }
    if (at.global) settle_in_flight(*w.cta->cluster, at.data, n * bytes);
    if (order != Order::Weak) order_before(w, order, scope, at);
    u8 before[32];  // the widest vector
    if (at.global) memcpy(before, at.data, n * bytes);
    for (u32 k = 0; k < n; k++) get_element(w, in.op[k], i, at.data + k * bytes, bytes);
    if (at.global) global.add(i, at.data, n * bytes, memcmp(before, at.data, n * bytes) == 0);
  }
  global.flush();
  if (order != Order::Weak) machine.progress++;
  if (shared_lanes) count_banks(offsets, shared_lanes, n * bytes);
  return Step::Done;
}

// ---- atomics. aux: 0 space, 1 operation, 2 type, 3 has a destination, 4 offset, 5 order, 6 vector length, 7 compares,
// 8 scope.
namespace {
enum AtomOp : i64 { kAdd, kMax, kMin, kExch, kCas, kAnd, kOr, kXor, kInc, kDec };
enum AtomType : i64 { kU32, kS32, kU64, kS64, kF32, kF64, kF16x2, kBf16x2, kF16, kBf16, kB128 };

template <class T>
T integer_op(i64 op, T old, T x, T y) {
  switch (op) {
    case kAdd: return (T)(old + x);
    case kMax: return std::max(old, x);
    case kMin: return std::min(old, x);
    case kExch: return x;
    case kCas: return old == x ? y : old;
    case kAnd: return old & x;
    case kOr: return old | x;
    case kXor: return old ^ x;
    case kInc: return old >= x ? 0 : (T)(old + 1);
    case kDec: return old == 0 || old > x ? x : (T)(old - 1);
  }
  return old;
}
template <class T>
T float_op(i64 op, T old, T x) {
  switch (op) {
    case kAdd: return old + x;
    case kMax: return std::fmax(old, x);
    case kMin: return std::fmin(old, x);
    default: return x;
  }
}
u32 atom_bytes(i64 type) {
  switch (type) {
    case kU64: case kS64: case kF64: return 8;
    case kF16: case kBf16: return 2;
    case kB128: return 16;
    default: return 4;
  }
}
u16 half_op(i64 op, u16 old, u16 x, bool bf16) {
  if (bf16) return float_to_bf16(float_op(op, numeric::bf16_to_float(old), numeric::bf16_to_float(x)));
  return float_to_half(float_op(op, numeric::half_to_float(old), numeric::half_to_float(x)));
}
}  // namespace

void atomic_update(u8 *p, i64 op, i64 type, const void *operand, const void *swap) {
  u64 x = 0, y = 0, old = 0, result = 0;
  u32 bytes = atom_bytes(type);
  memcpy(&x, operand, std::min(bytes, 8u));
  if (swap) memcpy(&y, swap, std::min(bytes, 8u));
  memcpy(&old, p, std::min(bytes, 8u));
  switch (type) {
    case kU32: result = integer_op<u32>(op, (u32)old, (u32)x, (u32)y); break;
    case kS32: result = (u32)integer_op<i32>(op, (i32)old, (i32)x, (i32)y); break;
    case kU64: result = integer_op<u64>(op, old, x, y); break;
    case kS64: result = (u64)integer_op<i64>(op, (i64)old, (i64)x, (i64)y); break;
    case kF32: result = bit_cast<u32>(float_op(op, bit_cast<float>((u32)old), bit_cast<float>((u32)x))); break;
    case kF64: result = bit_cast<u64>(float_op(op, bit_cast<double>(old), bit_cast<double>(x))); break;
    case kF16x2: case kBf16x2:
      result = half_op(op, (u16)old, (u16)x, type == kBf16x2) |
               (u32)half_op(op, (u16)(old >> 16), (u16)(x >> 16), type == kBf16x2) << 16;
      break;
    case kF16: case kBf16: result = half_op(op, (u16)old, (u16)x, type == kBf16); break;
  }
  memcpy(p, &result, std::min(bytes, 8u));
}

HANDLER("atom", Sync) {
  bool has_dst = in.aux[3];
  u32 vector = std::max<u32>(1, (u32)in.aux[6]);
  u32 address_at = has_dst ? vector : 0;
  u32 bytes = atom_bytes(in.aux[2]);
  Order order = (Order)in.aux[5];
  Scope scope = (Scope)in.aux[8];
  race::Actor actor = race::generic(w);
  actor.scope = scope;
  actor.updates = has_dst || in.aux[1] != kExch;
  bool changed = false;
  for (int i : lanes_of(lanes)) {
    Location at = locate(w, in, i, lane_address(w, in.op[address_at], i, in.aux[4]), (Space)in.aux[0], bytes * vector, true);
    actor.lane = (u8)i;
    if (at.cta) race::shared_access(w, in, *at.cta, at.offset, bytes * vector, true, actor);
    else if (at.global) {
      machine.counters.global_read += bytes, machine.counters.global_written += bytes;
      settle_in_flight(*w.cta->cluster, at.data, bytes * vector);
      race::global_access(w, in, (u64)at.data, bytes * vector, true, actor);
    }
    order_before(w, order, scope, at);
    order_after(w, order, scope, at);
    for (u32 k = 0; k < vector; k++) {
      u8 *p = at.data + k * bytes, old[16];
      memcpy(old, p, bytes);
      u8 x[16], y[16];
      get_element(w, in.op[address_at + 1 + k], i, x, bytes);
      bool cas = in.aux[1] == kCas;
      if (cas) get_element(w, in.op[address_at + 2], i, y, bytes);
      if (bytes == 16) {
        if (!cas) memcpy(p, x, 16);
        else if (memcmp(old, x, 16) == 0) memcpy(p, y, 16);
      } else {
        atomic_update(p, in.aux[1], in.aux[2], x, cas ? y : nullptr);
      }
      changed |= memcmp(old, p, bytes) != 0;
      if (has_dst && in.op[k] != kNone) put_element(w, in.op[k], i, old, bytes, false);
    }
  }
  // An atomic that changes nothing may be the poll of a waiting loop.
  if (changed) machine.progress++;
  return in.aux[7] || (has_dst && !changed) ? Step::Yield : Step::Done;
}

BINARY_MIXED("mapa.u32", u32, u32, u32, shared_address(y, shared_offset(x)))
BINARY_MIXED("mapa.u64", u64, u64, u32, (x & ~(u64)0xff000000) | (u64)y << 24)
UNARY("getctarank.u32", u32, u32, shared_rank(x))
UNARY("getctarank.u64", u32, u64, shared_rank((u32)x))

// isspacep: aux[0] window (0 global, 1 shared, 2 local); only the executing CTA if aux[1].
HANDLER("isspacep", Plain) {
  const u64 *a = row<u64>(w, in.op[1]);
  u32 bits = 0;
  for (int i : lanes_of(lanes)) {
    bool yes = (i64)(a[i] >> 60) == in.aux[0];
    if (in.aux[1]) yes = yes && shared_rank((u32)a[i]) == w.cta->rank;
    bits |= (u32)yes << i;
  }
  set_predicate(w, in.op[0], lanes, bits);
  return Step::Done;
}

// ---- ldmatrix / stmatrix. aux: 0 matrices, 1 transposed, 2 offset.
namespace {
// A row belongs to four lanes or more, which are not told apart.
u8 *matrix_row(Warp &w, const Instruction &in, u32 address, bool write) {
  if (address & 15) report(ErrorKind::Misaligned, &w, &in, "matrix row at 0x%x is not 16-byte aligned", address);
  Cta &c = shared_owner(w, in, address, 16, write ? "stmatrix" : "ldmatrix");
  race::Actor actor = race::generic(w);
  actor.lane = kSeveralLanes;
  race::shared_access(w, in, c, shared_offset(address), 16, write, actor);
  (write ? machine.counters.shared_written : machine.counters.shared_read) += 16;
  return shared_data(c, address);
}

// The rows of all matrices, whose addresses the first lanes have.
struct MatrixRows {
  u8 *data[kLanes];
  u32 offsets[kLanes];
};
MatrixRows matrix_rows(Warp &w, const Instruction &in, Operand addresses, u32 count, bool write) {
  MatrixRows rows;
  const u32 *of_lanes = row<u32>(w, addresses);
  for (u32 r = 0; r < count; r++) {
    u32 address = of_lanes[r] + (u32)in.aux[2];
    rows.data[r] = matrix_row(w, in, address, write);
    rows.offsets[r] = shared_offset(address);
  }
  return rows;
}
u32 first_lanes(u32 count) { return count == kLanes ? kAllLanes : (1u << count) - 1; }
}  // namespace

HANDLER("ldmatrix", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = (u32)in.aux[0];
  MatrixRows rows = matrix_rows(w, in, in.op[n], 8 * n, false);
  for (u32 k = 0; k < n; k++) {
    u8 *const *of_matrix = rows.data + 8 * k;
    u32 *d = row<u32>(w, in.op[k]);
    for (u32 i = 0; i < kLanes; i++) {
      if (!in.aux[1]) {
        memcpy(&d[i], of_matrix[i / 4] + i % 4 * 4, 4);
      } else {
        u16 lo, hi;
        memcpy(&lo, of_matrix[i % 4 * 2] + i / 4 * 2, 2);
        memcpy(&hi, of_matrix[i % 4 * 2 + 1] + i / 4 * 2, 2);
        d[i] = lo | (u32)hi << 16;
      }
    }
  }
  count_banks(rows.offsets, first_lanes(8 * n), 16);
  return Step::Done;
}
HANDLER("stmatrix", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = (u32)in.aux[0];
  MatrixRows rows = matrix_rows(w, in, in.op[n], 8 * n, true);
  for (u32 k = 0; k < n; k++) {
    u8 *const *of_matrix = rows.data + 8 * k;
    const u32 *d = row<u32>(w, in.op[k]);
    for (u32 i = 0; i < kLanes; i++) {
      if (!in.aux[1]) {
        memcpy(of_matrix[i / 4] + i % 4 * 4, &d[i], 4);
      } else {
        u16 lo = (u16)d[i], hi = (u16)(d[i] >> 16);
        memcpy(of_matrix[i % 4 * 2] + i / 4 * 2, &lo, 2);
        memcpy(of_matrix[i % 4 * 2 + 1] + i / 4 * 2, &hi, 2);
      }
    }
  }
  count_banks(rows.offsets, first_lanes(8 * n), 16);
  return Step::Done;
}

// The transposing byte forms. Register k of thread t holds, after ldmatrix.m16n16, rows 4 * (t % 4) + 0..3 of matrix k / 2 at
// byte t / 4 + 8 * (k % 2) (CuTe DSL's LdMatrix16x16x8bOp; CUTLASS C++ permutes the registers before its traits hold);
// for stmatrix.m16n8, byte b = j0 + 2 * j1 goes to row 2 * (t % 4) + j0 + 8 * k, byte t / 4 + 8 * j1. aux: 0 registers, 2 offset.
HANDLER("ldmatrix.m16n16.b8", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = (u32)in.aux[0];
  MatrixRows rows = matrix_rows(w, in, in.op[n], 8 * n, false);
  for (u32 k = 0; k < n; k++) {
    u32 *d = row<u32>(w, in.op[k]);
    for (u32 t = 0; t < kLanes; t++) {
      u32 v = 0;
      for (u32 b = 0; b < 4; b++) v |= (u32)rows.data[4 * (t % 4) + b + 16 * (k / 2)][t / 4 + 8 * (k % 2)] << (8 * b);
      d[t] = v;
    }
  }
  return Step::Done;
}
HANDLER("stmatrix.m16n8.b8", Sync) {
  if (lanes != (u32)~w.exited) return Step::NeedConvergence;
  u32 n = (u32)in.aux[0];
  MatrixRows rows = matrix_rows(w, in, in.op[n], 8 * n, true);
  for (u32 k = 0; k < n; k++) {
    const u32 *d = row<u32>(w, in.op[k]);
    for (u32 t = 0; t < kLanes; t++)
      for (u32 b = 0; b < 4; b++) rows.data[2 * (t % 4) + (b & 1) + 8 * k][t / 4 + 8 * (b >> 1)] = (u8)(d[t] >> (8 * b));
  }
  return Step::Done;
}
