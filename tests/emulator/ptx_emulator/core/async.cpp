#include "async.h"
#include "race.h"
#include "wgmma.h"

AsyncPtr make_async(const Instruction &in, const char *what, std::function<void()> effect) {
  auto op = std::make_shared<AsyncOp>();
  op->effect = std::move(effect);
  op->what = what;
  op->line = in.line;
  return op;
}

void issue_free(Warp &w, const AsyncPtr &op) {
  if (machine.deferring()) w.cta->cluster->free_running.push_back(op);
  else op->complete();
}
void issue_tensor_pipe(Warp &w, const AsyncPtr &op) {
  if (machine.deferring()) w.tensor_pipe.push_back(op);
  else op->complete();
}
void issue_cp_async(Warp &w, const AsyncPtr &op) {
  if (machine.deferring()) w.cp_async_pending.push_back(op);
  else op->complete();
}

// A register's row occupies one unit of 128 bytes, or more if its elements are wide. `pending_loads` has for each unit the
// event of the tcgen05.ld whose values it holds and that no wait covers; 0: none.
static u32 pending_load(const Warp &w, Operand o) {
  if (o == kNone || o >> 31 || operand_is_predicate(o)) return 0;
  u32 last = 0;
  for (u32 unit = 0; unit < operand_bytes(o) / 4; unit++) last = std::max(last, w.pending_loads[operand_offset(o) / 128 + unit]);
  return last;
}
static void set_pending_load(Warp &w, Operand o, u32 event) {
  if (o == kNone) return;
  for (u32 unit = 0; unit < operand_bytes(o) / 4; unit++) w.pending_loads[operand_offset(o) / 128 + unit] = event;
}

void issue_tmem(Warp &w, const Instruction &in, const AsyncPtr &op, bool is_load, u32 event, u32 registers) {
  if (!machine.deferring()) op->complete();
  w.tmem_pending.push_back({op, is_load, event});
  if (!is_load) return;
  w.pending_loads.resize(machine.program->register_bytes / 128 + 1);
  for (u32 k = 0; k < registers; k++) set_pending_load(w, in.op[k], event);
}

static void settle_loads(Warp &w, u32 last) {
  std::deque<Warp::PendingTmem> rest;
  bool more = false;
  for (auto &p : w.tmem_pending) {
    if (p.is_load && p.event <= last) {
      p.op->complete();
      race::learn(w, kTmemLoad, p.event);
    } else {
      more |= p.is_load;
      rest.push_back(p);
    }
  }
  w.tmem_pending.swap(rest);
  if (!more) w.pending_loads.clear();
  for (u32 &event : w.pending_loads)
    if (event <= last) event = 0;
}

void settle_tmem(Warp &w, bool loads, bool stores) {
  if (loads) settle_loads(w, ~0u);
  if (!stores) return;
  std::deque<Warp::PendingTmem> rest;
  for (auto &p : w.tmem_pending) {
    if (p.is_load) {
      rest.push_back(p);
    } else {
      p.op->complete();
      race::learn(w, kTmemStore, p.event);
    }
  }
  w.tmem_pending.swap(rest);
}

void check_pending_registers(Warp &w, const Instruction &in, u32 lanes) {
  if (w.pending_loads.empty()) return;
  u32 last = 0;
  for (u32 k = 0; k < in.operand_count; k++) last = std::max(last, pending_load(w, in.op[k]));
  if (!last) return;
  if (in.kind == Kind::Move) {
    // NVVM moves and packs the registers right after the load, and the machine code contains no such move. The copy gets
    // the loaded value, but does not count as a wait for the load.
    for (auto &p : w.tmem_pending)
      if (p.is_load && p.event <= last) p.op->complete();
    u32 carried = 0;
    for (u32 k = in.destinations; k < in.operand_count; k++) carried = std::max(carried, pending_load(w, in.op[k]));
    // A copy by some of the lanes leaves the rest of the row unchanged.
    if (carried || lanes == (u32)~w.exited)
      for (u32 k = 0; k < in.destinations; k++) set_pending_load(w, in.op[k], carried);
    return;
  }
  // PTX requires the wait; the compiler tracks these registers itself, so the use counts as the wait for this load and all
  // earlier ones.
  report(ErrorKind::TmemWait, &w, &in, "uses the registers of a tcgen05.ld before tcgen05.wait::ld");
  settle_loads(w, last);
}

void settle_everything(Warp &w) {
  settle_tmem(w, true, true);
  for (auto &op : w.cp_async_pending) op->complete();
  w.cp_async_pending.clear();
}

bool complete_one(Cluster &c) {
  struct Queue {
    std::deque<AsyncPtr> *ops;
    Warp *tmem;
    Warpgroup *wgmma;
  };
  auto &free = c.free_running;
  free.erase(std::remove_if(free.begin(), free.end(), [](const AsyncPtr &op) { return op->done; }), free.end());
  std::vector<Queue> queues;
  for (auto &cta : c.ctas) {
    for (auto &g : cta->warpgroups)
      if (g && wgmma_ready(*g)) queues.push_back({nullptr, nullptr, g.get()});
    for (auto &w : cta->warps) {
      for (auto *q : {&w->tensor_pipe, &w->cp_async_pending}) {
        while (!q->empty() && q->front()->done) q->pop_front();
        if (!q->empty()) queues.push_back({q, nullptr, nullptr});
      }
      for (auto &p : w->tmem_pending)
        if (!p.op->done) {
          queues.push_back({nullptr, w.get(), nullptr});
          break;
        }
    }
  }
  size_t choices = free.size() + queues.size();
  if (!choices) return false;
  size_t k = machine.random() % choices;
  if (k < free.size()) {
    AsyncPtr op = free[k];
    free.erase(free.begin() + (long)k);
    op->complete();
    if (free.empty()) c.in_flight.clear();
  } else if (queues[k - free.size()].ops) {
    auto *q = queues[k - free.size()].ops;
    AsyncPtr op = q->front();
    q->pop_front();
    op->complete();
  } else if (queues[k - free.size()].wgmma) {
    perform_wgmma(*queues[k - free.size()].wgmma);
  } else {
    for (auto &p : queues[k - free.size()].tmem->tmem_pending)
      if (!p.op->done) {
        p.op->complete();
        break;
      }
  }
  machine.progress++;
  return true;
}
