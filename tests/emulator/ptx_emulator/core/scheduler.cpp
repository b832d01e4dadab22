// Warps, divergence, and the order of execution.
//
// A warp is a list of groups of lanes with a common program counter. The lowest program counter runs first and groups
// merge at equal program counters, which reconverges structured control flow at the earliest point, as the hardware's
// convergence optimiser does. Warps run cooperatively: a warp runs until it waits or its quantum ends.
#include "scheduler.h"
#include "async.h"
#include "barrier.h"
#include "griddep.h"
#include "memory.h"
#include "race.h"
#include "wgmma.h"

Machine machine;

std::unordered_map<std::string, HandlerEntry> &handlers() {
  static std::unordered_map<std::string, HandlerEntry> table;
  return table;
}

// ---- errors ----------------------------------------------------------------------------------------------------

static void raise(ErrorKind kind, const Warp *w, const Instruction *in, const char *text) {
  Failure f{kind, text, in ? in->line : -1, w ? (i32)w->index : -1, {0, 0, 0}};
  if (w)
    for (int k = 0; k < 3; k++) f.cta[k] = w->cta->id[k];
  throw f;
}
void fail(ErrorKind kind, const Warp *w, const Instruction *in, const char *format, ...) {
  char text[8192];
  va_list ap;
  va_start(ap, format);
  vsnprintf(text, sizeof text, format, ap);
  va_end(ap);
  raise(kind, w, in, text);
  __builtin_unreachable();
}
void report(ErrorKind kind, const Warp *w, const Instruction *in, const char *format, ...) {
  Level level = machine.level[(int)kind];
  if (level == Level::Off) return;
  char text[8192];
  va_list ap;
  va_start(ap, format);
  vsnprintf(text, sizeof text, format, ap);
  va_end(ap);
  if (level == Level::Error) raise(kind, w, in, text);
  warn(kind, in, text);
}
void warn(ErrorKind kind, const Instruction *in, const std::string &text) {
  auto &entry = machine.now->warnings[{(u32)kind, in ? in->line : -1}];
  if (!entry.second++) entry.first = text;
}

// ---- one warp --------------------------------------------------------------------------------------------------

enum class Turn { QuantumOver, Waiting };

static void merge_groups(Warp &w) {
  for (size_t a = 0; a < w.groups.size(); a++)
    for (size_t b = a + 1; b < w.groups.size();) {
      if (w.groups[a].pc == w.groups[b].pc && !w.groups[a].ticket && !w.groups[b].ticket) {
        w.groups[a].mask |= w.groups[b].mask;
        w.groups[a].waiting_to_converge = false;
        w.groups[a].waited = false;
        w.groups.erase(w.groups.begin() + (long)b);
      } else {
        b++;
      }
    }
}

static void exit_lanes(Warp &w, u32 lanes) {
  Group &g = w.groups[w.current];
  w.exited |= lanes;
  g.mask &= ~lanes;
  machine.progress++;
  if (!g.mask) w.groups.erase(w.groups.begin() + w.current);
  else g.pc++;
  for (auto &h : w.groups) h.waiting_to_converge = false;
}

static Turn run_warp(Warp &w, int quantum) {
  const Instruction *code = machine.program->code.data();
  u64 *executions = machine.now->executions.data(), *lane_executions = machine.now->lane_executions.data();
  for (auto &g : w.groups) g.waited = false;  // a waiting group lets the other groups of its warp run
  while (quantum-- > 0) {
    if (w.groups.empty()) {
      w.finished = true;
      return Turn::Waiting;
    }
    if (w.groups.size() > 1) {
      merge_groups(w);
      int best = -1;
      bool any_waited = false;
      for (int k = 0; k < (int)w.groups.size(); k++) {
        any_waited |= w.groups[k].waited;
        if (!w.groups[k].waiting_to_converge && !w.groups[k].waited && (best < 0 || w.groups[k].pc < w.groups[best].pc)) best = k;
      }
      if (best < 0) {
        if (!any_waited) {
          const Instruction &at = code[w.groups[0].pc];
          std::string where;
          for (auto &g : w.groups) {
            char b[64];
            snprintf(b, sizeof b, " lanes %08x at ptx line %d;", g.mask, code[g.pc].line);
            where += b;
          }
          fail(ErrorKind::DivergentCollective, &w, &at,
               "the warp is split, and each part waits for the others at a different collective:%s", where.c_str());
        }
        return Turn::Waiting;
      }
      w.current = (u32)best;
    } else {
      w.current = 0;
    }
    Group *g = &w.groups[w.current];
    const Instruction &in = code[g->pc];
    u32 lanes = g->mask;
    if (in.guard != kTruePredicate) lanes &= predicate_of(w, in.guard);
    if (lanes && in.wgmma_registers && !check_wgmma_registers(w, in)) {
      if (w.groups.size() == 1) return Turn::Waiting;
      g->waited = true;
      continue;
    }
    w.executed++;
    if (lanes) {
      executions[in.index]++;
      lane_executions[in.index] += (u32)__builtin_popcount(lanes);
      w.executing = &in;
      w.lanes = lanes;
      if (!w.tmem_pending.empty()) check_pending_registers(w, in, lanes);
    }
    switch (in.kind) {
      case Kind::Plain:
      case Kind::Move:
        if (lanes) in.run(w, in, lanes);
        g->pc++;
        break;
      case Kind::Branch:
      case Kind::BranchIndexed: {
        if (!lanes) {
          g->pc++;
          break;
        }
        if (in.kind == Kind::BranchIndexed) {  // lanes split by target
          u32 index = uniform<u32>(w, in.op[0], lanes), same = 0;
          for (int i : lanes_of(lanes)) same |= (u32)(row<u32>(w, in.op[0])[i] == index) << i;
          if (index >= (u64)in.aux[1]) fail(ErrorKind::IllegalInstruction, &w, &in, "brx.idx: index %u of %lld", index, (long long)in.aux[1]);
          u32 target = machine.program->jump_tables[(size_t)in.aux[0] + index];
          if (same == g->mask) {
            g->pc = target;
          } else {
            Group taken = *g;
            taken.mask = same;
            taken.pc = target;
            g->mask &= ~same;
            w.groups.push_back(taken);
          }
          break;
        }
        if (lanes == g->mask) {
          g->pc = (u32)in.aux[0];
          break;
        }
        Group taken = *g;
        taken.mask = lanes;
        taken.pc = (u32)in.aux[0];
        g->mask &= ~lanes;
        g->pc++;
        w.groups.push_back(taken);
        break;
      }
      case Kind::Exit:
        if (!lanes) {
          g->pc++;
          break;
        }
        exit_lanes(w, lanes);
        break;
      case Kind::Sync: {
        if (!lanes) {
          g->pc++;
          break;
        }
        Step step = in.run(w, in, lanes);
        g = &w.groups[w.current];
        switch (step) {
          case Step::Done:
            g->pc++;
            g->waiting_to_converge = false;
            break;
          case Step::Yield:
            g->pc++;
            w.executed_at_yield = (i64)w.executed;
            if (w.groups.size() == 1) return Turn::Waiting;
            g->waited = true;
            break;
          case Step::Blocked:
            w.executed--;  // retried later, and counted once
            executions[in.index]--;
            lane_executions[in.index] -= (u32)__builtin_popcount(lanes);
            if (w.groups.size() == 1) return Turn::Waiting;
            g->waited = true;
            break;
          case Step::NeedConvergence:
            w.executed--;  // retried later, and counted once
            executions[in.index]--;
            lane_executions[in.index] -= (u32)__builtin_popcount(lanes);
            if (w.groups.size() == 1)
              fail(ErrorKind::DivergentCollective, &w, &in,
                   "a warp collective is executed by lanes %08x only (lanes %08x have exited): the other lanes never execute it",
                   lanes, w.exited);
            g->waiting_to_converge = true;
            break;
        }
      }
    }
  }
  return Turn::QuantumOver;
}

constexpr i64 kLongestSpin = 64;  // instructions in one turn of a polling loop

// ---- clusters --------------------------------------------------------------------------------------------------

Cta::Cta() = default;
Cta::~Cta() = default;
Cta::Cta(Cta &&) noexcept = default;

std::unique_ptr<Cluster> new_cluster(u32 threads) {
  const Machine &m = machine;
  u32 warps = (threads + kLanes - 1) / kLanes;
  u32 size = m.cluster_shape[0] * m.cluster_shape[1] * m.cluster_shape[2];
  auto c = std::make_unique<Cluster>();
  for (u32 r = 0; r < size; r++) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = c.get();
    cta->rank = r;
    cta->smem.resize(kSmemBytes + 16);
    cta->smem_shadow = std::make_unique<Shadow>(kSmemBytes / 16 + 1);
    if (m.program->uses_tmem) {
      cta->tmem.resize(128 * 512);
      cta->tmem_shadow = std::make_unique<Shadow>(8 * 512);
    }
    for (u32 k = 0; k < warps; k++) {
      auto w = std::make_unique<Warp>();
      w->cta = cta.get();
      w->index = k;
      w->global_index = r * warps + k;
      size_t bytes = (m.program->register_bytes + 255) / 128 * 128;
      w->base[0] = static_cast<u8 *>(std::aligned_alloc(128, bytes));
      w->base[1] = const_cast<u8 *>(m.program->constants.data());
      w->predicate.resize(m.program->predicates + 1);
      w->local.resize((size_t)m.program->local_bytes * kLanes);
      cta->warps.push_back(std::move(w));
    }
    c->ctas.push_back(std::move(cta));
  }
  c->warp_count = warps * size;
  return c;
}
Warp::~Warp() { std::free(base[0]); }

void start(Cluster &c, Grid &grid, u64 number) {
  const Machine &m = machine;
  u32 threads = grid.threads(), rank = 0;
  u32 first[3];
  grid.first_cta(number, first);
  c.grid = &grid;
  c.sequence = grid.first_sequence + (u32)number;
  c.in_flight.clear();
  c.barrier_generation = 0;
  for (int parity = 0; parity < 2; parity++) {
    c.barrier_gathering[parity].clear();
    c.barrier_complete[parity].clear();
    c.barrier_executed[parity].clear();
    c.barrier_executed_complete[parity].clear();
  }
  c.free_running.clear();
  c.live.clear();
  for (u32 cz = 0; cz < m.cluster_shape[2]; cz++)
    for (u32 cy = 0; cy < m.cluster_shape[1]; cy++)
      for (u32 cx = 0; cx < m.cluster_shape[0]; cx++, rank++) {
        Cta &cta = *c.ctas[rank];
        cta.id[0] = first[0] + cx, cta.id[1] = first[1] + cy, cta.id[2] = first[2] + cz;
        std::fill(cta.smem.begin(), cta.smem.end(), 0xff);          // NaN in every float format
        std::fill(cta.tmem.begin(), cta.tmem.end(), 0x7fffffffu);
        cta.smem_shadow->reset();
        if (cta.tmem_shadow) cta.tmem_shadow->reset();
        cta.mbarriers.clear();
        for (auto &b : cta.barriers) b = NamedBarrier{};
        cta.tmem_allocations.clear();
        cta.tmem_freed.clear();
        cta.tmem_permit = true;
        cta.waited_for_grid = cta.lets_next_grid_in = false;
        cta.pair_allocations.clear();
        cta.remote_accesses.clear();
        cta.remote_lines.clear();
        cta.warpgroups.clear();
        cta.remote_commits.clear();
        cta.exit_clock.clear();
        cta.live_warps = (u32)cta.warps.size();
        for (u32 k = 0; k < cta.warps.size(); k++) {
          Warp &w = *cta.warps[k];
          u32 lanes = (k + 1) * kLanes <= threads ? kAllLanes : (1u << (threads % kLanes)) - 1;
          w.groups = {{0, lanes, false, 0, false}};
          w.exited = ~lanes;
          w.finished = false;
          w.executed = 0;
          w.waited_for_grid = 0;
          w.executed_at_yield = -kLongestSpin;
          w.cluster_arrivals = w.cluster_waits = 0;
          w.last_wait = {};
          w.tensor_pipe.clear();
          w.tmem_pending.clear();
          w.cp_async_pending.clear();
          w.bulk_groups.clear();
          w.cp_async_groups.clear();
          w.wgmma.reset();
          w.pending_loads.clear();
          memset(w.base[0], 0, m.program->register_bytes);
          std::fill(w.predicate.begin(), w.predicate.end(), 0);
          w.predicate[0] = kAllLanes;
          c.live.push_back(&w);
        }
      }
  race::start_cluster(c);
}

// A bulk store reads shared memory until its group is waited for, and a CTA's memory may be reused as soon as it exits. A
// warning, since FlashMLA exits without waiting.
static void check_bulk_stores(Warp &w) {
  for (auto &[lane, groups] : w.bulk_groups) {
    const AsyncOp *open = groups.open.empty() ? nullptr : groups.open[0].get();
    for (auto &g : groups.closed)
      if (!g.ops.empty()) open = g.ops[0].get();
    if (!open) continue;
    Instruction at{};
    at.line = open->line;
    warn(ErrorKind::ExitedCta, &at, "the CTA exits while this bulk store may still read shared memory: wait_group(.read) is missing");
    return;
  }
}

static void finish_warp(Cluster &c, Warp &w) {
  check_bulk_stores(w);
  check_wgmma_at_exit(w);
  settle_everything(w);
  machine.executed += w.executed;
  race::warp_exits(w);
  complete_cluster_barrier(c);
  for (auto &b : w.cta->barriers)
    if (b.everyone) complete_named_barrier(*w.cta, b);
  if (--w.cta->live_warps == 0) {
    check_grid_dependency_at_exit(w);
    if (!w.cta->tmem_allocations.empty()) {
      auto &a = w.cta->tmem_allocations[0];
      Instruction at{};
      at.line = a.line;
      report(ErrorKind::TmemLeak, &w, &at,
             "the CTA exits with %u columns of tensor memory from column %u still allocated: tcgen05.dealloc is missing",
             a.columns, a.column);
    }
    for (u32 id = 0; id < 16; id++)
      if (const NamedBarrier &b = w.cta->barriers[id]; b.arrived) {
        Instruction at{};
        at.line = b.line;
        warn(ErrorKind::Barrier, &at, "the CTA exits with barrier " + std::to_string(id) + " incomplete: " +
             std::to_string(b.arrived) + " of " + std::to_string(b.expected) + " threads arrived");
      }
  }
  machine.progress++;
}

std::string who_waits_for_what() {
  std::string s = "nothing can run, and no asynchronous operation is left:";
  for (auto &c : machine.active)
    for (Warp *w : c->live) {
      const Instruction *code = machine.running[c->grid->running].program->code.data();
      char b[256];
      if (machine.gpus.size() > 1) s += "\n  GPU " + std::to_string(c->grid->device) + ", launch " + std::to_string(c->grid - machine.grids.data());
      snprintf(b, sizeof b, "\n  cta (%u,%u,%u) warp %u:", w->cta->id[0], w->cta->id[1], w->cta->id[2], w->index);
      s += b;
      for (auto &g : w->groups) {
        const Instruction &in = code[g.pc];
        snprintf(b, sizeof b, " lanes %08x at ptx line %d%s", g.mask, in.line,
                 g.ticket ? " in a CTA barrier" : g.waiting_to_converge ? " waiting for the other lanes" : "");
        s += b;
      }
      if (w->cluster_arrivals > w->cluster_waits && c->barrier_generation < w->cluster_arrivals) s += " [cluster barrier open]";
      if (w->last_wait.line >= 0) {
        u32 rank = shared_rank(w->last_wait.address);
        auto &table = c->ctas[rank]->mbarriers;
        auto it = table.find(shared_offset(w->last_wait.address));
        if (it != table.end()) {
          Mbarrier &m = it->second;
          snprintf(b, sizeof b,
                   " [last waited at ptx line %d for mbarrier 0x%x phase %u: now in phase %u, %u of %u arrivals and %lld "
                   "bytes pending]",
                   w->last_wait.line, shared_offset(w->last_wait.address), w->last_wait.phase, m.phase, m.pending,
                   m.expected, (long long)m.tx);
          s += b;
        }
      }
      if (s.size() > 6000) return s + "\n  ...";
    }
  return s;
}

// One turn for every warp of a cluster; true if a warp used a whole quantum for work other than waiting.
bool turn(Cluster &c) {
  bool busy = false;
  if (machine.random_order())
    for (size_t k = c.live.size(); k > 1; k--) std::swap(c.live[k - 1], c.live[machine.random() % k]);
  for (size_t k = 0; k < c.live.size();) {
    Warp *w = c.live[k];
    int quantum = machine.random_order() ? 1 + (int)(machine.random() % 400) : 4096;
    u64 before = w->executed;
    // A short quantum may end in the middle of a polling loop, which is not work.
    busy |= run_warp(*w, quantum) == Turn::QuantumOver && (i64)w->executed - w->executed_at_yield > kLongestSpin;
    machine.limit -= std::min(machine.limit, w->executed - before);
    if (!machine.limit) fail(ErrorKind::InstructionLimit, w, nullptr, "the launch's instruction limit is used up");
    if (w->finished) {
      c.live.erase(c.live.begin() + (long)k);
      finish_warp(c, *w);
    } else {
      k++;
    }
  }
  return busy;
}
