// mbarrier objects (PTX ISA "Parallel Synchronization: mbarrier").
//
// The state lives beside shared memory; the eight bytes hold a mark, so that a plain store over a live barrier shows.
// A phase completes when no arrivals and no transaction bytes are pending. Whoever waits for it takes over what the
// arriving parties knew (release / acquire), and what completed operations did.
#pragma once
#include "machine.h"
#include "race.h"

// The barrier at a shared::cluster address, live and initialised as far as `known` tells.
Mbarrier &mbarrier_at(Warp &w, const Instruction &in, u32 address, const race::Actor &a, const char *what);
// n arrivals that publish `what` (null: nothing).
void mbarrier_arrive(const Warp &w, const Instruction &in, u32 address, u32 count, const ClockPair *publish);
void mbarrier_expect(const Warp &w, const Instruction &in, u32 address, i64 bytes);
void mbarrier_complete_tx(const Warp &w, const Instruction &in, u32 address, i64 bytes, const ClockPair *publish);
