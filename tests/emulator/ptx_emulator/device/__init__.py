"""An emulated device: memory, launches, recordings, tensor maps."""
