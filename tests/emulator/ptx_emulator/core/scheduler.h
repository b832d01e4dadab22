#pragma once
#include "machine.h"

// Runs every cluster of the launch that `machine` describes; throws Failure.
void run_grid();
