// The messages of conflicts that the happens-before checker finds.
#pragma once
#include "race.h"

namespace race {

// Writes the name of an agent into `buffer`; returns the name.
const char *describe(const Cluster &cluster, Agent agent, char *buffer, size_t size);
// Reports a conflict in the shared or tensor memory of a CTA. `memory` and `at` name the location in the message.
[[gnu::noinline]] void report_conflict(Warp &w, const Instruction &in, Cta &cta, const char *memory, u32 at, bool write,
                                       bool strong, const Conflict &c);
// Reports a conflict in global memory.
[[gnu::noinline]] void report_global_race(Warp &w, const Instruction &in, u64 at, bool write, bool strong,
                                          const Conflict &conflict);

}  // namespace race
