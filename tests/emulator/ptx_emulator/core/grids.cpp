// Grids and GPUs: when clusters start, when grids end, and when nothing can run any more.
//
// The grids of a GPU run one after the other; several GPUs run side by side on one memory, as peers whose memory is mapped
// into one address space. The end of a grid and the start of the next one order all accesses of the system (race::grid_knows).
#include "async.h"
#include "race.h"
#include "scheduler.h"

constexpr size_t kStartedAtOnce = 4;  // clusters of a GPU, in addition to those that a running cluster waits for
constexpr int kMostJumps = 64;        // of the timer, before a wait counts as a deadlock
constexpr int kPatience = 12;          // turns without progress before stores in flight become visible
constexpr u64 kJumpNs = 1000000000;

void Grid::first_cta(u64 cluster, u32 *id) const {
  const u32 *shape = machine.cluster_shape;
  u32 x = size[0] / shape[0], y = size[1] / shape[1];
  id[0] = (u32)(cluster % x) * shape[0];
  id[1] = (u32)(cluster / x % y) * shape[1];
  id[2] = (u32)(cluster / x / y) * shape[2];
}

namespace {

Grid &current_grid(const Gpu &gpu) { return machine.grids[gpu.grids[gpu.current]]; }
bool may_start(const Gpu &gpu) {
  return gpu.current < gpu.grids.size() && current_grid(gpu).started < current_grid(gpu).clusters &&
         gpu.resident < machine.multiprocessors;
}

// A GPU that may start a cluster and holds fewer than `most`; null if there is none. A late GPU only if `late`.
Gpu *startable(size_t most, bool late) {
  std::vector<Gpu *> found;
  for (Gpu &gpu : machine.gpus)
    if (may_start(gpu) && gpu.resident < most && (late || !gpu.late)) found.push_back(&gpu);
  if (found.empty()) return nullptr;
  return found.size() == 1 || !machine.random_order() ? found[0] : found[machine.random() % found.size()];
}

class Clusters {
 public:
  void start_one(Gpu &gpu) {
    std::unique_ptr<Cluster> c;
    Grid &grid = current_grid(gpu);
    machine.enter(grid);
    auto &idle = idle_[{grid.running, grid.threads()}];
    if (idle.empty()) {
      c = new_cluster(grid.threads());
    } else {
      c = std::move(idle.back());
      idle.pop_back();
    }
    start(*c, grid, grid.next_cluster());
    gpu.resident++;
    machine.active.push_back(std::move(c));
  }
  void end(size_t k) {
    Cluster &c = *machine.active[k];
    machine.enter(*c.grid);
    while (complete_one(c)) {
    }
    for (auto &cta : c.ctas) race::cta_ends(*cta);
    Gpu &gpu = machine.gpus[c.grid->device];
    if (machine.track_order && machine.grids.size() > 1) race::grid_knows(c, knows_[c.grid->device]);
    idle_[{c.grid->running, c.grid->threads()}].push_back(std::move(machine.active[k]));
    machine.active.erase(machine.active.begin() + (long)k);
    if (--gpu.resident || current_grid(gpu).started < current_grid(gpu).clusters) return;
    for (auto &[cluster, clock] : knows_[current_grid(gpu).device]) gpu.known[cluster].join(clock);
    gpu.current++;
  }

 private:
  std::map<std::pair<u32, u32>, std::vector<std::unique_ptr<Cluster>>> idle_;  // by program and threads of a CTA
  std::map<u32, std::map<u32, Clock>> knows_;  // by GPU: the events that completed clusters know
};

bool reads_timer() {
  for (const Running &running : machine.running)
    for (const Instruction &in : running.program->code)
      if (in.kind == Kind::Plain && in.aux[0] == kTimerRegister && in.run == handlers()["mov.special"].run) return true;
  return false;
}

bool grids_are_left() {
  for (const Gpu &gpu : machine.gpus)
    if (gpu.current < gpu.grids.size()) return true;
  return false;
}

// Starts clusters without need: in strict sequence, a wait for a CTA with a lower number would never have to wait.
void start_early(Clusters &clusters) {
  Machine &m = machine;
  if (m.active.empty()) {
    Gpu *gpu = startable(1, false);
    clusters.start_one(gpu ? *gpu : *startable(1, true));
  }
  if (m.random_order()) {
    if (Gpu *gpu = startable(kStartedAtOnce, false))
      if (m.random() % 8 == 0) clusters.start_one(*gpu);
  } else {
    while (Gpu *gpu = startable(1, false)) clusters.start_one(*gpu);
  }
}

}  // namespace

void run_grids() {
  Machine &m = machine;
  Clusters clusters;
  int idle = 0, patience = 0, jumps = reads_timer() ? 0 : kMostJumps;
  while (grids_are_left()) {
    start_early(clusters);
    u64 before = m.progress;
    bool busy = false;
    for (size_t k = 0; k < m.active.size();) {
      Cluster &c = *m.active[k];
      m.enter(*c.grid);
      busy |= turn(c);
      if (m.schedule == Schedule::Random && m.random() % 4 == 0)
        for (u64 n = m.random() % (4 + c.in_flight.size() / 8); n; n--) complete_one(c);
      if (c.live.empty() && c.in_flight.empty()) {  // a grid ends when all of its stores are visible
        clusters.end(k);
        busy = true;
      } else {
        k++;
      }
    }
    if (busy || m.progress != before) {
      idle = 0;
      continue;
    }
    // A strong load ends a warp's turn, also one that saw what it waited for: let its warp come to its next loads before more
    // stores become visible.
    size_t in_flight = 0;
    for (auto &c : m.active) in_flight += c->in_flight.size();
    if (in_flight && ++patience <= kPatience) continue;
    patience = 0;
    bool completed = false;
    for (u64 left = in_flight ? 1 + m.random() % (1 + in_flight / 4) : 1; left; left--) {
      size_t first = in_flight ? m.random() % m.active.size() : 0, k = 0;
      for (; k < m.active.size(); k++) {
        Cluster &c = *m.active[(first + k) % m.active.size()];
        m.enter(*c.grid);
        if (complete_one(c)) break;
      }
      completed |= k < m.active.size();
    }
    if (completed) {
      idle = 0;
      continue;
    }
    if (++idle > 8) {
      // CTAs may wait for each other through global memory: start another cluster before reporting a deadlock.
      if (Gpu *gpu = startable(m.multiprocessors, true)) {
        clusters.start_one(*gpu);
        idle = 0;
      }
    }
    if (idle > 64 && jumps < kMostJumps) {  // a wait that reads the timer may give up
      m.waited_ns += kJumpNs;
      jumps++;
      idle = 0;
    }
    if (idle > 64) {
      Warp *w = nullptr;
      for (auto &c : m.active) w = c->live.empty() ? w : c->live[0];
      if (w) m.enter(*w->cta->cluster->grid);
      fail(ErrorKind::Deadlock, w, &m.program->code[w->groups.empty() ? 0 : w->groups[0].pc], "%s",
           who_waits_for_what().c_str());
    }
  }
}
