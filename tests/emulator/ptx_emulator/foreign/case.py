"""A case of the foreign suite: a third-party program, its arguments, and how it is run.

DSV4_FOREIGN_KERNELS names a folder with checkouts `cutlass`, `flash-attention` and `FlashMLA`. Sources are never
copied; a case whose file is absent is skipped with that reason.
"""

import os
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT_VARIABLE = "DSV4_FOREIGN_KERNELS"
DSL = "cutlass/examples/python/CuTeDSL"
CUTE = f"{DSL}/cute/blackwell"


@dataclass(frozen=True)
class Case:
    """One program of the suite, with its arguments."""

    name: str
    program: str  # relative to the folder; for a runner of ours, the checkout
    arguments: str = ""
    runner: str = "run_program"  # a module of this package
    quick: bool = False  # part of `make test`
    skip: str = ""  # why the program cannot run here, independent of the emulator
    forgiven: tuple[str, ...] = ()  # error kinds of the program that hardware timing hides; FINDINGS.md argues each
    arch: str = "sm_100a"
    pad_vectors: bool = False  # pad vectors on the second try, since the program reads beyond the end of one

    def unavailable(self) -> str:
        """The reason for which this case cannot run, or an empty string."""
        if self.skip:
            return self.skip
        if ENVIRONMENT_VARIABLE not in os.environ:
            return f"{ENVIRONMENT_VARIABLE} is not set"
        if not self.path.exists():
            return f"{self.path} does not exist"
        return ""

    @property
    def path(self) -> Path:
        return Path(os.environ[ENVIRONMENT_VARIABLE]) / self.program

    def command(self, report: Path, schedule: str, seed: int) -> list[str]:
        """The runner's module, then its arguments."""
        options = ["--schedule", schedule, "--seed", str(seed), "--report", str(report)]
        if self.arch != "sm_100a":
            options += ["--arch", self.arch]
        if self.runner == "run_program":
            return [self.runner, *options, str(self.path), *self.arguments.split()]
        return [self.runner, "--checkout", str(self.path), *options, *self.arguments.split()]
