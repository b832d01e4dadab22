// Checks of griddepcontrol: see griddep.cpp.
#pragma once
#include "machine.h"

void check_allocation_beside_grids(const Warp &w, const Instruction &in);
void check_grid_dependency_at_exit(const Warp &w);
