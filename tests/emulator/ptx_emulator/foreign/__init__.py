"""Third-party kernels on the emulator, unmodified: the validation suite."""
