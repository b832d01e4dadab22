"""CuTe DSL and torch programs on an emulated device."""
