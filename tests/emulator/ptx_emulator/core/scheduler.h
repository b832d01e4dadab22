// Warps, clusters and the order of execution.
#pragma once
#include "machine.h"

// Runs all grids of all GPUs to their ends (grids.cpp).
void run_grids();

// A cluster of CTAs with so many threads each.
std::unique_ptr<Cluster> new_cluster(u32 threads);
// Puts cluster `number` of a grid at the beginning of the program.
void start(Cluster &c, Grid &grid, u64 number);
// One turn for every warp of a cluster; true if a warp used a whole quantum for work other than waiting.
bool turn(Cluster &c);
// The state of every warp, for the message of a deadlock.
std::string who_waits_for_what();
