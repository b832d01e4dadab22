#include "wgmma.h"
#include <cmath>
#include "async.h"
#include "numeric.h"
#include "operand.h"
#include "race.h"

using namespace numeric;

namespace {

constexpr u32 kRows = 64, kRowsOfWarp = 16;
enum Format : i64 { kHalf, kFloat, kInteger };

// wgmma.mma_async. aux: 0 N, 1 K, 2 and 3 elements of A and B, 4 format of D, 5 A in registers, 6 negated product, 7 and 8
// A and B not K-major, 9 .satfinite. Operands: registers of D, registers or descriptor of A, descriptor of B, scale-d.
struct Shape {
  const Instruction &in;
  u32 n() const { return (u32)in.aux[0]; }
  u32 k() const { return (u32)in.aux[1]; }
  Element a() const { return (Element)in.aux[2]; }
  Element b() const { return (Element)in.aux[3]; }
  i64 format() const { return in.aux[4]; }
  bool a_in_registers() const { return in.aux[5]; }
  bool negate() const { return in.aux[6]; }
  bool a_mn_major() const { return in.aux[7]; }
  bool b_mn_major() const { return in.aux[8]; }
  bool saturate() const { return in.aux[9]; }
  u32 d_registers() const { return format() == kHalf ? n() / 4 : n() / 2; }
  u32 a_registers() const { return a_in_registers() ? 4 : 0; }
  Operand a_operand(u32 r = 0) const { return in.op[d_registers() + r]; }
  Operand b_descriptor() const { return in.op[d_registers() + (a_in_registers() ? 4 : 1)]; }
  Operand scale_d() const { return in.op[d_registers() + (a_in_registers() ? 5 : 2)]; }
  // Accumulators of one shape may follow each other without a fence.
  u32 accumulator_shape(u32 place) const { return (n() << 2 | (u32)format()) << 8 | place; }
};

bool is_mma(const Instruction &in);

size_t row_of(Operand o) { return operand_offset(o) / 128; }

WgmmaOfWarp &state_of(Warp &w) {
  if (!w.wgmma) {
    w.wgmma = std::make_shared<WgmmaOfWarp>();
    w.wgmma->rows.resize(machine.program->register_bytes / 128 + 1);
  }
  return *w.wgmma;
}

Warpgroup &warpgroup_of(Warp &w, const Instruction &in) {
  auto &groups = w.cta->warpgroups;
  u32 index = w.index / kWarpgroupWarps;
  if ((index + 1) * kWarpgroupWarps > w.cta->warps.size())
    fail(ErrorKind::IllegalInstruction, &w, &in, "warp %u is in no warpgroup: the block has %zu warps", w.index, w.cta->warps.size());
  if (groups.size() <= index) groups.resize(index + 1);
  if (!groups[index]) {
    groups[index] = std::make_shared<Warpgroup>();
    groups[index]->cta = w.cta;
    groups[index]->first_warp = index * kWarpgroupWarps;
  }
  return *groups[index];
}
Agent agent_of(const Warpgroup &g) { return g.cta->warps[g.first_warp]->agent(kWgmma); }

// The register that holds element (row, column) of a fragment whose registers hold `packed` elements of `bits` bits, and the
// element's index in it. Rows are the warp's own 16 (PTX ISA "Register Fragments and Shared Memory Matrix Layouts").
struct Cell {
  u32 lane, reg, part;
};
Cell cell_of(u32 row, u32 column, u32 packed) {
  u32 unit = 4 * packed, reg_column = column / unit;  // 4 threads hold one row of a unit
  return {row % 8 * 4 + column % unit / packed, 2 * reg_column + row / 8, column % packed};
}
// f32 and s32 accumulators hold two neighbouring columns in two registers; packed halves would share one.
Cell accumulator_cell(u32 row, u32 column, bool half) {
  Cell c = cell_of(row, column, 2);
  return half ? c : Cell{c.lane, 2 * c.reg + c.part, 0};
}

// visit(element, column) for the f32 accumulators of one row: those of accumulator_cell, register after register.
template <class Visit>
void float_accumulators(Warp &w, const Shape &s, u32 r, Visit visit) {
  for (u32 unit = 0; unit < s.n() / 8; unit++)
    for (u32 part = 0; part < 2; part++) {
      float *d = row<float>(w, s.in.op[4 * unit + 2 * (r / 8) + part]) + r % 8 * 4;
      for (u32 t = 0; t < 4; t++) visit(d[t], 8 * unit + 2 * t + part);
    }
}

float element_of_register(u32 bits, Element e, u32 part) {
  switch (e) {
    case Element::F16: return half_to_float((u16)(bits >> 16 * part));
    case Element::BF16: return bf16_to_float((u16)(bits >> 16 * part));
    case Element::TF32: return bit_cast<float>(bits & 0xffffe000u);
    case Element::E4M3: return tables().e4m3[bits >> 8 * part & 255];
    case Element::E5M2: return tables().e5m2[bits >> 8 * part & 255];
    case Element::S8: return (float)(i8)(bits >> 8 * part);
    default: return (float)(bits >> 8 * part & 255);
  }
}

void load_a_fragment(Warp &w, const Shape &s, float *out) {
  u32 packed = 32 / packing_of(s.a(), false).bits;
  for (u32 r = 0; r < kRowsOfWarp; r++)
    for (u32 k = 0; k < s.k(); k++) {
      Cell c = cell_of(r, k, packed);
      out[(size_t)r * s.k() + k] = element_of_register(row<u32>(w, s.a_operand(c.reg))[c.lane], s.a(), c.part);
    }
}

i32 clamp_sum(i64 sum, bool saturate) { return saturate ? (i32)std::clamp<i64>(sum, INT32_MIN, INT32_MAX) : (i32)sum; }

void execute(Warpgroup &g, const WgmmaOperation &o) {
  static thread_local std::vector<float> a, bt, sums;
  Shape s{*o.in};
  u32 n = s.n(), k = s.k();
  bool half = s.format() == kHalf;
  a.resize((size_t)kRows * k);
  bt.resize((size_t)n * k);
  sums.resize(n);
  load_operand(*g.cta, o.b, s.b_mn_major(), s.b(), packing_of(s.b(), false), n, k, bt.data(), 1, n);
  if (!s.a_in_registers())
    load_operand(*g.cta, o.a, s.a_mn_major(), s.a(), packing_of(s.a(), false), kRows, k, a.data(), k, 1);
  for (u32 q = 0; q < kWarpgroupWarps; q++) {
    Warp &w = *g.cta->warps[g.first_warp + q];
    float *rows = a.data() + (size_t)q * kRowsOfWarp * k;
    if (s.a_in_registers()) load_a_fragment(w, s, rows);
    if (s.negate())
      for (size_t i = 0; i < (size_t)kRowsOfWarp * k; i++) rows[i] = -rows[i];
    for (u32 r = 0; r < kRowsOfWarp; r++) {
      auto cell = [&](u32 column) {
        Cell c = accumulator_cell(r, column, half);
        return std::pair<u32 *, u32>{row<u32>(w, o.in->op[c.reg]) + c.lane, c.part};
      };
      const float *row_a = rows + (size_t)r * k;
      if (s.format() == kInteger) {
        for (u32 j = 0; j < n; j++) {
          u32 *d = cell(j).first;
          i64 sum = o.accumulate ? (i32)*d : 0;
          for (u32 kk = 0; kk < k; kk++) sum += (i64)row_a[kk] * (i64)bt[(size_t)kk * n + j];
          *d = (u32)clamp_sum(sum, s.saturate());
        }
        continue;
      }
      if (!half) {
        float_accumulators(w, s, r, [&](float &d, u32 j) { sums[j] = o.accumulate ? d : 0.f; });
        multiply_row(n, k, row_a, bt.data(), n, sums.data());
        float_accumulators(w, s, r, [&](float &d, u32 j) { d = sums[j]; });
        continue;
      }
      for (u32 j = 0; j < n; j++) {
        auto [d, part] = cell(j);
        sums[j] = !o.accumulate ? 0.f : half_to_float((u16)(*d >> 16 * part));
      }
      multiply_row(n, k, row_a, bt.data(), n, sums.data());
      for (u32 j = 0; j < n; j++) {
        auto [d, part] = cell(j);
        *d = (*d & ~(0xffffu << 16 * part)) | (u32)float_to_half(sums[j]) << 16 * part;
      }
    }
  }
}

// ---- registers

void check_fence(Warp &w, const Instruction &in, const WgmmaOfWarp &state, WgmmaOfWarp::Row &r, const char *role) {
  if (r.fences == state.fences + 1)
    report(ErrorKind::WgmmaFence, &w, &in,
           "wgmma.mma_async uses a register as %s that ptx line %d accesses: no wgmma.fence lies between", role, r.access_line);
  else if (r.fences_at_move == state.fences + 1)
    warn(ErrorKind::WgmmaFence, &in, "a register of wgmma.mma_async is moved after the wgmma.fence");
  r.fences = r.fences_at_move = 0;
}

// Marks the registers of operation `number`, which the warp is about to execute.
void claim_registers(Warp &w, const Instruction &in, WgmmaOfWarp &state, u64 number) {
  Shape s{in};
  auto under_way = [&](u64 operation) { return operation > state.complete; };
  for (u32 i = 0; i < s.d_registers(); i++) {
    if (in.op[i] == kNone) continue;
    auto &r = state.rows[row_of(in.op[i])];
    check_fence(w, in, state, r, "accumulator");
    if (under_way(r.fragment_of))
      report(ErrorKind::WgmmaWait, &w, &in, "accumulates onto registers that the wgmma.mma_async at ptx line %d still reads as A",
             r.operation_line);
    if (under_way(r.accumulator_of) && r.shape != s.accumulator_shape(i))
      report(ErrorKind::WgmmaWait, &w, &in,
             "accumulates onto registers of the wgmma.mma_async at ptx line %d, which is under way with another shape", r.operation_line);
    r.accumulator_of = number;
    r.shape = s.accumulator_shape(i);
    r.operation_line = in.line;
  }
  for (u32 i = 0; i < s.a_registers(); i++) {
    auto &r = state.rows[row_of(s.a_operand(i))];
    check_fence(w, in, state, r, "A");
    if (under_way(r.accumulator_of))
      report(ErrorKind::WgmmaWait, &w, &in, "reads A from an accumulator of the wgmma.mma_async at ptx line %d, which is under way",
             r.operation_line);
    r.fragment_of = number;
    r.operation_line = in.line;
  }
}

// Whether the lanes of the warp agree on a value.
template <class T>
void check_uniform(Warp &w, const Instruction &in, Operand o, const char *what) {
  const T *v = row<T>(w, o);
  for (int i = 1; i < kLanes; i++)
    if (v[i] != v[0])
      report(ErrorKind::DivergentCollective, &w, &in, "wgmma.mma_async: lanes 0 and %d differ in the %s", i, what);
}

Clock known_to_all(const Clock *const (&clocks)[kWarpgroupWarps]) {
  Clock all = *clocks[0];
  for (u32 q = 1; q < kWarpgroupWarps; q++) all.meet(*clocks[q]);
  return all;
}

void issue(Warp &w, const Instruction &in, Warpgroup &g, const WgmmaOperation &o) {
  Shape s{in};
  const ClockPair *c = o.start;
  ClockPair everyone;
  everyone.order = known_to_all({&c[0].order, &c[1].order, &c[2].order, &c[3].order});
  everyone.fenced = known_to_all({&c[0].fenced, &c[1].fenced, &c[2].fenced, &c[3].fenced});
  race::Actor actor{agent_of(g), ++g.cta->warps[g.first_warp]->events[kWgmma], &everyone, false, true};
  track_operand(w, in, *g.cta, o.b, s.b_mn_major(), packing_of(s.b(), false), s.n(), s.k(), actor, "operand B of wgmma.mma_async");
  for (u32 q = 0; q < kWarpgroupWarps && !s.a_in_registers(); q++) {
    actor.known = &o.start[q];
    track_operand(w, in, *g.cta, o.a, s.a_mn_major(), packing_of(s.a(), false), kRowsOfWarp, s.k(), actor,
                  "operand A of wgmma.mma_async", q * kRowsOfWarp);
  }
  machine.counters.mma_flops += 2.0 * kRows * s.n() * s.k();
  static const char *const names[] = {"f16", "bf16", "tf32", "e4m3", "e5m2", "", "", "", "s8", "u8"};
  static const char *const formats[] = {"f16", "f32", "s32"};
  char shape[96];
  snprintf(shape, sizeof shape, "wgmma.mma_async %s.%s.%s %s %c%c m64 n%u k%u", formats[s.format()], names[(int)s.a()],
           names[(int)s.b()], s.a_in_registers() ? "RS" : "SS", s.a_mn_major() ? 'M' : 'K', s.b_mn_major() ? 'N' : 'K', s.n(), s.k());
  machine.shapes[shape]++;
}

}  // namespace

HANDLER("wgmma.fence", Sync) {
  if (lanes != kAllLanes) return Step::NeedConvergence;
  warpgroup_of(w, in);
  state_of(w).fences++;
  return Step::Done;
}

HANDLER("wgmma.mma_async", Sync) {
  if (lanes != kAllLanes) return Step::NeedConvergence;
  Warpgroup &g = warpgroup_of(w, in);
  WgmmaOfWarp &state = state_of(w);
  Shape s{in};
  if (!state.fences) report(ErrorKind::WgmmaFence, &w, &in, "the warp's first wgmma.mma_async has no wgmma.fence before it");
  claim_registers(w, in, state, ++state.executed);
  if (!s.a_in_registers()) check_uniform<u64>(w, in, s.a_operand(), "descriptor of A");
  check_uniform<u64>(w, in, s.b_descriptor(), "descriptor of B");
  u32 scale_d = predicate_of(w, s.scale_d());
  if (scale_d && scale_d != kAllLanes)
    report(ErrorKind::DivergentCollective, &w, &in, "wgmma.mma_async: the lanes differ in scale-d");
  u64 a_bits = s.a_in_registers() ? 0 : row<u64>(w, s.a_operand())[0], b_bits = row<u64>(w, s.b_descriptor())[0];
  size_t place = (size_t)(state.executed - 1 - g.performed);
  if (place == g.queue.size()) {
    WgmmaOperation o{};
    o.in = &in;
    o.a_bits = a_bits, o.b_bits = b_bits;
    o.accumulate = scale_d;
    if (!s.a_in_registers()) o.a = read_smem_descriptor(w, in, a_bits, "A", true);
    o.b = read_smem_descriptor(w, in, b_bits, "B", true);
    g.queue.push_back(o);
  }
  WgmmaOperation &o = g.queue[place];
  if (o.in != &in || o.a_bits != a_bits || o.b_bits != b_bits || o.accumulate != (scale_d != 0))
    fail(ErrorKind::DivergentCollective, &w, &in,
         "the warps of the warpgroup differ in %s of their wgmma.mma_async: another one executed ptx line %d",
         o.in != &in ? "the place" : "a descriptor or scale-d", o.in->line);
  race::release(w, o.start[w.index % kWarpgroupWarps]);  // later accesses of the warp are not ordered before it
  machine.progress++;
  if (++o.arrived < kWarpgroupWarps) return Step::Done;
  issue(w, in, g, o);
  if (!machine.deferring())
    while (wgmma_ready(g)) perform_wgmma(g);
  return Step::Done;
}

HANDLER("wgmma.commit_group", Sync) {
  if (lanes != kAllLanes) return Step::NeedConvergence;
  WgmmaOfWarp &state = state_of(w);
  state.committed = state.executed;
  state.groups.push_back(state.committed);
  return Step::Done;
}

// aux: 0 groups that may remain.
HANDLER("wgmma.wait_group", Sync) {
  if (lanes != kAllLanes) return Step::NeedConvergence;
  WgmmaOfWarp &state = state_of(w);
  if (state.groups.size() <= (size_t)in.aux[0]) return Step::Done;
  u64 last = state.groups[state.groups.size() - 1 - (size_t)in.aux[0]];
  Warpgroup &g = warpgroup_of(w, in);
  while (g.performed < last) {
    if (!wgmma_ready(g)) return Step::Blocked;  // not yet executed by all warps
    perform_wgmma(g);
  }
  state.groups.erase(state.groups.begin(), state.groups.end() - in.aux[0]);
  state.complete = last;
  // Operations are issued in order, each with the next event of the agent.
  race::learn_agent(w, agent_of(g), (u32)last);
  return Step::Done;
}

bool wgmma_ready(const Warpgroup &g) { return !g.queue.empty() && g.queue.front().arrived == kWarpgroupWarps; }

void perform_wgmma(Warpgroup &g) {
  execute(g, g.queue.front());
  g.queue.pop_front();
  g.performed++;
  machine.progress++;
}

void mark_wgmma_registers(Program &p) {
  std::vector<bool> used(p.register_bytes / 128 + 4);
  for (auto &in : p.code)
    if (is_mma(in)) {
      Shape s{in};
      for (u32 k = 0; k < s.d_registers(); k++)
        if (in.op[k] != kNone) used[row_of(in.op[k])] = true;
      for (u32 k = 0; k < s.a_registers(); k++) used[row_of(s.a_operand(k))] = true;
    }
  const Handler move = handlers().at("mov.b32").run, pack = handlers().at("pack").run, unpack = handlers().at("unpack").run;
  for (auto &in : p.code) {
    if (is_mma(in)) continue;
    bool named = false;
    for (u32 k = 0; k < in.operand_count; k++) {
      Operand o = in.op[k];
      if (o == kNone || o >> 31 || operand_is_predicate(o)) continue;
      named |= used[row_of(o)];
    }
    if (named)
      in.wgmma_registers = in.run == move || in.run == pack ? Instruction::kMoves
                           : in.run == unpack               ? Instruction::kUnpacks
                                                            : Instruction::kUses;
  }
}

bool check_wgmma_registers(Warp &w, const Instruction &in) {
  WgmmaOfWarp &state = state_of(w);
  for (u32 k = 0; k < in.operand_count; k++) {
    Operand o = in.op[k];
    if (o == kNone || o >> 31 || operand_is_predicate(o)) continue;
    auto &r = state.rows[row_of(o)];
    // NVVM unpacks accumulators of halves right after the product, and the assembler, which knows the registers, waits.
    if (in.wgmma_registers == Instruction::kUnpacks && r.accumulator_of > state.complete) {
      Warpgroup &g = warpgroup_of(w, in);
      while (g.performed < r.accumulator_of) {
        if (!wgmma_ready(g)) return false;
        perform_wgmma(g);
      }
      warn(ErrorKind::WgmmaWait, &in, "unpacks a register of a wgmma.mma_async that is under way: the assembler serialises them");
    } else if (std::max(r.accumulator_of, r.fragment_of) > state.complete) {
      report(ErrorKind::WgmmaWait, &w, &in,
             "accesses a register of the wgmma.mma_async at ptx line %d, which is under way: %s", r.operation_line,
             std::max(r.accumulator_of, r.fragment_of) > state.committed ? "wgmma.commit_group and wgmma.wait_group are missing"
                                                                         : "wgmma.wait_group is missing");
    }
    // NVVM puts copies and zeros of accumulators on either side of a fence (CUTLASS's dense_gemm_persistent), and the
    // assembler, which knows the registers, keeps them before the operation.
    if (in.wgmma_registers != Instruction::kUses) {
      r.fences_at_move = state.fences + 1;
      continue;
    }
    r.fences = state.fences + 1;
    r.access_line = in.line;
  }
  return true;
}

void check_wgmma_at_exit(Warp &w) {
  if (!w.wgmma || w.wgmma->executed == w.wgmma->complete) return;
  const Warpgroup &g = *w.cta->warpgroups[w.index / kWarpgroupWarps];
  Instruction at{};
  at.line = g.queue.empty() ? -1 : g.queue.back().in->line;
  report(ErrorKind::WgmmaWait, &w, &at, "the warp exits while wgmma.mma_async is under way: wgmma.wait_group is missing");
}

namespace {
bool is_mma(const Instruction &in) {
  static const Handler mma = handlers().at("wgmma.mma_async").run;
  return in.run == mma;
}
}  // namespace
