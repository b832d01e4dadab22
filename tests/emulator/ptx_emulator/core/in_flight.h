// Stores that other GPUs do not see yet.
//
// With several GPUs, and unless the schedule is eager, a relaxed store of .sys scope to global memory becomes visible word by
// word, in any order. PTX orders the words neither with each other (a vector is several accesses) nor with the thread's later
// relaxed stores to other locations. A thread's accesses to one location keep their order; a releasing store or fence of .sys
// scope comes after all earlier stores of its cluster. (Weak stores that no synchronisation orders are races, in any order.)
#pragma once
#include "memory.h"

// Whether this store becomes visible later.
bool flies(Order order, Scope scope, const Location &at);
// Stores `count` words, which become visible one by one. What the store publishes is published with its last word.
void store_in_flight(Warp &w, const Instruction &in, Scope scope, u8 *data, const u32 *words, u32 count);
// Makes the cluster's stores in flight visible: to these bytes, or all of them.
void settle_in_flight(Cluster &c, const u8 *data, u64 bytes);
void settle_in_flight(Cluster &c);
