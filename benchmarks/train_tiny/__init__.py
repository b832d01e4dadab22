"""Training of the small DeepSeek-V4 that ``make serve`` serves; README.md has the commands.

The training host needs PyTorch and numpy only: `corpus` and `export` run where this repository is installed.
"""
