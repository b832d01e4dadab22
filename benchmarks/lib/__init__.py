"""What several benchmarks share, and what tests outside of tests/benchmarks use of them; scripts import no scripts."""
