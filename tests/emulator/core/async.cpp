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

static void mark_rows(Warp &w, const Instruction &in, u32 first, u32 rows, bool pending) {
  if (w.pending_rows.empty()) w.pending_rows.resize(machine.program->register_bytes / 128 / 64 + 1);
  for (u32 k = first; k < first + rows; k++) {
    if (in.op[k] == kNone) continue;
    u32 bit = operand_offset(in.op[k]) / 128;
    if (pending) w.pending_rows[bit / 64] |= 1ull << (bit % 64);
    else w.pending_rows[bit / 64] &= ~(1ull << (bit % 64));
  }
}

void issue_tmem(Warp &w, const Instruction &in, const AsyncPtr &op, bool is_load, u32 event, u32 first_row, u32 rows) {
  if (!machine.deferring()) op->complete();
  w.tmem_pending.push_back({op, is_load, event, &in, first_row, rows});
  if (is_load) mark_rows(w, in, first_row, rows, true);
}

static void finish(Warp &w, const Warp::PendingTmem &p) {
  p.op->complete();
  if (p.is_load) mark_rows(w, *p.from, p.first_row, p.rows, false);
}

void settle_tmem(Warp &w, bool loads, bool stores) {
  std::deque<Warp::PendingTmem> rest;
  for (auto &p : w.tmem_pending) {
    if (p.is_load ? loads : stores) {
      finish(w, p);
      race::learn(w, p.is_load ? kTmemLoad : kTmemStore, p.event);
    } else {
      rest.push_back(p);
    }
  }
  w.tmem_pending.swap(rest);
}

void settle_pending_registers(Warp &w, const Instruction &in) {
  if (w.pending_rows.empty()) return;
  bool hit = false;
  for (u32 k = 0; k < in.operand_count && !hit; k++) {
    Operand o = in.op[k];
    if (o == kNone || o >> 31 || operand_is_predicate(o)) continue;
    // A row of wide elements covers two or four 128-byte units.
    for (u32 unit = 0; unit < operand_bytes(o) / 4; unit++) {
      u32 bit = operand_offset(o) / 128 + unit;
      hit |= w.pending_rows[bit / 64] >> (bit % 64) & 1;
    }
  }
  if (!hit) return;
  // The compiler tracks the registers of a tcgen05.ld, so this is a wait; only later loads may still be under way.
  report(ErrorKind::TmemWait, &w, &in, "uses the registers of a tcgen05.ld before tcgen05.wait::ld");
  settle_tmem(w, true, false);
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
