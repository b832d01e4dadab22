#include "race_report.h"
#include "lanes.h"

namespace race {

const char *describe(const Cluster &cluster, Agent agent, char *buffer, size_t size) {
  u32 fixed = cluster.warp_count * kWarpAgents;
  if (agent >= fixed) return "a TMA or bulk copy";
  static const char *const kind[] = {"", " through tcgen05.mma/cp", " through tcgen05.ld", " through tcgen05.st",
                                     " through cp.async", " through a bulk store", " through a bulk store",
                                     " through mbarrier.init", " through wgmma", ""};
  u32 warp = agent / kWarpAgents, per_cta = cluster.warp_count / (u32)cluster.ctas.size();
  snprintf(buffer, size, "warp %u of CTA rank %u%s", warp % per_cta, warp / per_cta, kind[agent % kWarpAgents]);
  return buffer;
}

// Reports a conflict that is due to the lanes of one warp: between two lanes, or because a lane published another lane's
// events. Returns false for other conflicts.
static bool report_lanes(Warp &w, const Instruction &in, const char *place, const char *doing, const Conflict &c) {
  if (!lanes::tracked()) return false;
  const char *earlier = c.earlier.write ? "the write" : "the read";
  if (c.kind == Conflict::LaneRace) {
    report(ErrorKind::LaneRace, &w, &in,
           "%s %s while %s by another lane of this warp at ptx line %d is not ordered before it: bar.warp.sync, or another "
           "barrier of both lanes, is missing between",
           doing, place, earlier, c.earlier.line);
    return true;
  }
  Cluster &cluster = *w.cta->cluster;
  u32 warp = c.earlier.agent / kWarpAgents, per_cta = cluster.warp_count / (u32)cluster.ctas.size();
  if (c.earlier.cluster || warp >= cluster.warp_count) return false;
  const Warp &other = *cluster.ctas[warp / per_cta]->warps[warp % per_cta];
  const LaneOrder::Handover *h = lanes::withheld(other, c.earlier.agent % kWarpAgents, c.earlier.event);
  if (!h) return false;
  char buffer[96];
  report(ErrorKind::LaneRace, &w, &in,
         "%s %s after %s by %s at ptx line %d, which lanes %08x handed on at ptx line %d for lanes that nothing had ordered "
         "before: bar.warp.sync is missing there",
         doing, place, earlier, describe(cluster, c.earlier.agent, buffer, sizeof buffer), c.earlier.line, h->lanes, h->line);
  return true;
}

void report_conflict(Warp &w, const Instruction &in, Cta &cta, const char *memory, u32 at,
                                              bool write, bool strong, const Conflict &c) {
  char buffer[96];
  const char *who = describe(*w.cta->cluster, c.earlier.agent, buffer, sizeof buffer);
  const char *doing = write ? "writes" : "reads", *earlier = c.earlier.write ? "the write" : "the read";
  char place[128];
  snprintf(place, sizeof place, "%s 0x%x (CTA rank %u)", memory, at, cta.rank);
  if (report_lanes(w, in, place, doing, c)) return;
  switch (c.kind) {
    case Conflict::None:
    case Conflict::LaneRace: break;
    case Conflict::TensorFence:
      report(ErrorKind::TensorFence, &w, &in,
             "%s %s 0x%x (CTA rank %u): a barrier orders it after %s by %s at ptx line %d, but tcgen05.fence does not: "
             "::before_thread_sync before that side's arrival or ::after_thread_sync after this side's wait is missing",
             doing, memory, at, cta.rank, earlier, who, c.earlier.line);
      break;
    case Conflict::ProxyFence:
      report(ErrorKind::ProxyFence, &w, &in,
             "the async proxy reads %s 0x%x (CTA rank %u), which %s wrote through the generic proxy at ptx line %d: no "
             "fence.proxy.async lies between",
             memory, at, cta.rank, who, c.earlier.line);
      break;
    case Conflict::AsyncWriteFence:
      report(ErrorKind::AsyncWriteFence, &w, &in,
             "the async proxy writes %s 0x%x (CTA rank %u) after %s by %s through the generic proxy at ptx line %d: no "
             "fence.proxy.async lies between",
             memory, at, cta.rank, earlier, who, c.earlier.line);
      break;
    case Conflict::Race:
      report(ErrorKind::Race, &w, &in,
             "%s %s 0x%x (CTA rank %u) while %s by %s at ptx line %d is not ordered before it: %s", doing, memory, at,
             cta.rank, earlier, who, c.earlier.line,
             c.earlier.strong() && strong ? "both are strong, but the scope of one does not include the other"
                                          : "a wait, barrier or commit is missing");
  }
}

void report_global_race(Warp &w, const Instruction &in, u64 at, bool write, bool strong,
                                                 const Conflict &conflict) {
  const Access &e = conflict.earlier;
  char buffer[96], place[128] = "";
  const char *who = describe(*w.cta->cluster, e.agent, buffer, sizeof buffer);
  if (e.cluster != w.cta->cluster->sequence) {
    const Grid *grid = &machine.grids[0];
    for (const Grid &g : machine.grids)
      if (g.first_sequence <= e.cluster) grid = &g;
    u32 id[3];
    grid->first_cta(e.cluster - grid->first_sequence, id);
    int n = snprintf(place, sizeof place, " of the cluster that began at CTA (%u,%u,%u)", id[0], id[1], id[2]);
    if (machine.grids.size() > 1)
      snprintf(place + n, sizeof place - (size_t)n, " of launch %zu on GPU %u", (size_t)(grid - machine.grids.data()), grid->device);
  }
  const GlobalRange *in_range = nullptr;
  for (auto &r : machine.ranges)
    if (at >= r.begin && at < r.end) in_range = &r;
  if (conflict.earlier.cluster == w.cta->cluster->sequence) {
    Conflict here = conflict;
    here.earlier.cluster = 0;
    char global[160];
    snprintf(global, sizeof global, "global memory 0x%llx (%s + %llu)", (unsigned long long)at,
             in_range ? in_range->name.c_str() : "unnamed", (unsigned long long)(in_range ? at - in_range->begin : 0));
    if (report_lanes(w, in, global, write ? "writes" : "reads", here)) return;
  }
  report(ErrorKind::GlobalRace, &w, &in,
         "%s global memory 0x%llx (%s + %llu) while %s by %s%s at ptx line %d is not ordered before it: %s",
         write ? "writes" : "reads", (unsigned long long)at, in_range ? in_range->name.c_str() : "unnamed",
         (unsigned long long)(in_range ? at - in_range->begin : 0), e.write ? "the write" : "the read", who, place, e.line,
         e.strong() && strong ? "both are strong, but the scope of one does not include the other"
         : e.device != w.cta->cluster->grid->device ? "only strong accesses and fences of .sys scope order different GPUs"
         : *place             ? "only strong accesses and fences of .gpu scope order different clusters"
                              : "a wait, barrier or fence is missing");
}

}  // namespace race
