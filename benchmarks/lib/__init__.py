"""Code that several benchmarks share. Scripts and tests import it as `lib.…`; no script imports another script."""
