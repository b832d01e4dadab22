"""Campaigns that ask whether the emulator notices errors. Each is a module to run by hand; tests run their quick
part."""
