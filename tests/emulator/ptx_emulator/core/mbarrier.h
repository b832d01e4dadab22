// mbarrier objects (PTX ISA "Parallel Synchronization: mbarrier").
//
// The state is kept outside of shared memory; the eight bytes hold a mark, which reveals a plain store over a live barrier.
// A phase completes when no arrivals and no transaction bytes are pending. A successful wait acquires the events that the
// arriving threads knew (release / acquire) and those of completed asynchronous operations.
#pragma once
#include "machine.h"
#include "race.h"

// The barrier at a shared::cluster address; reports it unless it is live and its initialisation is ordered before `known`.
Mbarrier &mbarrier_at(Warp &w, const Instruction &in, u32 address, const race::Actor &a, const char *what);
// n arrivals that publish the clock `what` (null: none).
void mbarrier_arrive(const Warp &w, const Instruction &in, u32 address, u32 count, const ClockPair *publish);
void mbarrier_expect(const Warp &w, const Instruction &in, u32 address, i64 bytes);
void mbarrier_complete_tx(const Warp &w, const Instruction &in, u32 address, i64 bytes, const ClockPair *publish);
