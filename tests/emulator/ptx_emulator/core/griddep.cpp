// Programmatic dependent launch (PTX ISA "griddepcontrol"; CUDA's launch attribute for programmatic stream serialization).
//
// A grid launched with this attribute begins when all CTAs of the previous grid have executed launch_dependents or have
// exited, and may then run while the previous grids still read and write memory, until griddepcontrol.wait, which returns
// once the previous grid has ended. The emulator does not overlap launches; it checks the rules that make overlap safe.
#include "griddep.h"
#include "memory.h"

HANDLER("griddepcontrol.wait", Plain) {
  w.waited_for_grid |= lanes;
  w.cta->waited_for_grid = true;
  return Step::Done;
}
HANDLER("griddepcontrol.launch_dependents", Plain) {
  (void)lanes;
  w.cta->lets_next_grid_in = true;
  return Step::Done;
}

static const GlobalRange *range_of(u64 address) {
  for (const GlobalRange &r : machine.ranges)
    if (address >= r.begin && address < r.end) return &r;
  return nullptr;
}

void check_waited_for_grid(const Warp &w, const Instruction &in, u32 lanes, u64 address, bool write) {
  if (!w.cta->cluster->grid->dependent || !(lanes & ~w.waited_for_grid)) return;
  const GlobalRange *range = range_of(address);
  if (range && range->constant && !write) return;
  report(ErrorKind::GridDependency, &w, &in, "%s %s before griddepcontrol.wait, while the previous grid may still use it",
         write ? "writes" : "reads", range ? range->name.c_str() : "global memory");
}

// Tensor memory is allocated at run time, and an allocation waits until the current owner frees the columns.
void check_allocation_beside_grids(const Warp &w, const Instruction &in) {
  if (!w.cta->cluster->grid->dependent) return;
  if (!w.cta->waited_for_grid || !w.waited_for_grid)
    report(ErrorKind::GridDependency, &w, &in,
           "tcgen05.alloc before griddepcontrol.wait: the previous grid may need the columns that this CTA holds while it waits");
  if (w.cta->lets_next_grid_in)
    report(ErrorKind::GridDependency, &w, &in,
           "tcgen05.alloc after griddepcontrol.launch_dependents: the next grid may hold the columns while it waits for this grid");
}

// The next grid's wait covers the end of this grid only. If no thread here waited, it implies nothing about earlier grids.
void check_grid_dependency_at_exit(const Warp &w) {
  if (!w.cta->cluster->grid->dependent || w.cta->waited_for_grid) return;
  Instruction at{};
  report(ErrorKind::GridDependency, &w, &at, "the CTA exits, and no thread of it executed griddepcontrol.wait");
}
