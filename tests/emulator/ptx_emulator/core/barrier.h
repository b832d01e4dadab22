// Completes barriers that have all arrivals; also called when a warp exits.
#pragma once
#include "machine.h"

void complete_named_barrier(Cta &c, NamedBarrier &b);
void complete_cluster_barrier(Cluster &c);
