"""Wrong-emulator controls: would the tests notice if the emulator were wrong?

Each control is the core with one semantic deliberately wrong, made by replacing a line of its source. Two kinds of
kernels are replayed on it: known-right ones, and ones with a memory scope that is too narrow. A control is killed when
a right kernel ends with an error or with another result, or when a kernel with a narrow scope is accepted.

    PYTHONPATH=tests/emulator python -m ptx_emulator.campaigns.wrong_semantics [--write]

A control whose line is no longer in the core stops with an error: it must be restated, not skipped. --write replaces
results/wrong_semantics.json: {control: {recording: how it noticed}}.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptx_emulator import Device, EmulationError, Options, Recording, emulated
from ptx_emulator.campaigns import summaries
from ptx_emulator.core import build

MODULE = "ptx_emulator.campaigns.wrong_semantics"
MAX_INSTRUCTIONS = 2_000_000
NARROW = "too narrow"  # in the names of recordings that the emulator must refuse
RACES = ("race", "global_race")


@dataclass(frozen=True)
class Control:
    """A wrong core: edits of its sources."""

    name: str
    edits: tuple[tuple[str, str, str], ...]  # (file of the core, text, replacement)


_UNSWIZZLED_MMA = (
    "descriptor.cpp",
    "  if (absolute) fail",
    "  d.swizzle_mode = 0;\n  if (absolute) fail",
)

_ACCESSES = (
    ("memory.cpp", "Scope scope = (Scope)in.aux[6];", "Scope scope = kGpuScope;"),
    ("memory.cpp", "Scope scope = (Scope)in.aux[8];", "Scope scope = kGpuScope;"),
)
_FENCES = (("barrier.cpp", "_fence(w, (Scope)in.aux[1])", "_fence(w, kGpuScope)"),)
_MBARRIERS = (
    ("mbarrier.cpp", "!in.aux[3] || in.aux[6] >= common", "true"),
    ("mbarrier.cpp", "!in.aux[2] || in.aux[4] >= kClusterScope", "true"),
)

CONTROLS: list[Control] = [
    Control("all memory scopes alike", _ACCESSES + _FENCES + _MBARRIERS),
    Control("scopes of loads, stores and atomics alike", _ACCESSES),
    Control("scopes of fences alike", _FENCES),
    Control("scopes at mbarriers alike", _MBARRIERS),
    Control(
        "strong accesses never race, whatever their scopes",
        (("shadow.cpp", "return std::min(a.scope, e.scope) >= common;", "return kGpuScope >= common;"),),
    ),
    Control(
        "scopes narrower than the GPU order nothing",
        (("race.cpp", "if (common > scope || ", "if (scope < kGpuScope || "),),
    ),
    Control(
        "no swizzle at all",
        (
            _UNSWIZZLED_MMA,
            (
                "tensor_map.cpp",
                "swizzle_offset(offset + done + x / chunk * 16, map.swizzle)",
                "offset + done + x / chunk * 16",
            ),
        ),
    ),
    Control("no swizzle in MMA operands", (_UNSWIZZLED_MMA,)),
    Control(
        "leading and stride byte offsets exchanged",
        (
            (
                "descriptor.cpp",
                "  d.layout = (u32)(bits >> 61 & 7);",
                "  d.layout = (u32)(bits >> 61 & 7);\n  std::swap(d.leading, d.stride);",
            ),
        ),
    ),
    Control(
        "M=64 accumulators in lanes 0..63",
        (("mma.cpp", "row / 16 * 32 + row % 16 + d_lane", "row + d_lane"),),
    ),
    Control(
        "2-CTA: the halves of B exchanged",
        (
            (
                "mma.cpp",
                "load_operand(*cluster.ctas[first_rank + h], x.b_desc",
                "load_operand(*cluster.ctas[first_rank + (x.group == 2 ? 1 - h : h)], x.b_desc",
            ),
        ),
    ),
    Control(
        "2-CTA M=128: columns not split over lane halves",
        (("mma.cpp", "return group == 2 && m == 128 ? 2 : 1;", "return 1;"),),
    ),
    Control(
        "N-major bit ignored",
        (("mma.cpp", "x.b_mn_major = id >> 16 & 1;", "x.b_mn_major = false;"),),
    ),
    Control(
        "A in tensor memory: elements of a column in reverse",
        (
            (
                "mma.cpp",
                "(k % per_column * x.a_tmem_bits)",
                "((per_column - 1 - k % per_column) * x.a_tmem_bits)",
            ),
        ),
    ),
    Control(
        "mbarrier parity inverted",
        (("mbarrier.cpp", "if (b.phase == phase) {", "if (b.phase != phase) {"),),
    ),
    Control(
        "every warp accesses the first 32 lanes of tensor memory",
        (
            (
                "tmem.cpp",
                "u32 factor = t.packed ? 2 : 1;",
                "t.lane %= 32;\n  u32 factor = t.packed ? 2 : 1;",
            ),
        ),
    ),
    Control(
        "no fill outside of a TMA tensor",
        (
            (
                "tensor_map.cpp",
                "if (a > 0 || b < (i64)n) fill_outside(map, s, n);",
                "(void)fill_outside;",
            ),
        ),
    ),
    Control(
        "the accumulate predicate ignored",
        (
            (
                "mma.cpp",
                "x.accumulate = ",
                "x.accumulate = true || ",
            ),
        ),
    ),
]


def variant(control: Control, folder: Path) -> Path:
    """A copy of the core's sources with the control's edits."""
    core = folder / "core"
    shutil.copytree(build.CORE, core, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text, replacement in control.edits:
        source = (core / name).read_text()
        if text not in source:
            raise SystemExit(f"{control.name!r}: {name} no longer has {text!r}; restate the control")
        (core / name).write_text(source.replace(text, replacement))
    return core


def save_right_kernels(folder: Path) -> list[str]:
    """Saves recordings of right kernels, checked against their references; returns their names."""
    import torch

    from ptx_emulator.samples.attention import attention, attention_ref
    from ptx_emulator.samples.gemm import SHAPES, gemm, gemm_inputs, gemm_ref

    names = []

    def keep(name: str, device: Any) -> None:
        device.recordings[-1].save(folder / f"{name}.npz")
        names.append(name)

    torch.manual_seed(0)
    tensors = [torch.randn(rows, 64).half() for rows in (128, 320, 320)]
    with emulated(record=True, lineinfo=False) as device:
        out = attention(*tensors)
        expected = attention_ref(*tensors)
        assert (out.double() - expected).norm() < 1e-3 * expected.norm()
        keep("attention", device)
        for shape in SHAPES:
            for k in (64, 40):
                a, b = gemm_inputs(shape, k)
                assert torch.equal(gemm(a, b, shape), gemm_ref(a, b))
                keep(f"gemm m{shape.m} {shape.ctas} CTA k{k}", device)
    return names


def save_scopes(folder: Path) -> list[str]:
    """Saves recordings of messages between threads, checked on the right core; returns their names.

    One recording is right for each relation of the two threads (same CTA, same cluster, two clusters); in the others
    one part has a scope that is too narrow.
    """
    import numpy as np

    from ptx_emulator.samples.handwritten import kernel
    from ptx_emulator.samples.scope_kernels import ARRIVE, LOAD, PLACES, ROLES, STORE, WAIT, arrival, message

    names = []

    def keep(name: str, body: str, threads: int, grid: int = 1, cluster: int = 1) -> None:
        data = [np.zeros(4, np.uint32) for _ in range(3)]
        refused = ""
        with Device(Options(max_instructions=MAX_INSTRUCTIONS), record=True) as device:
            try:
                device.run_ptx(kernel(body, 3), "k", grid, threads, data, cluster=cluster, dynamic_smem_bytes=1024)
            except EmulationError as error:
                refused = error.kind.name
            device.recordings[-1].save(folder / f"{name}.npz")
        assert refused in RACES if NARROW in name else not refused, f"{name}: {refused}"
        names.append(name)

    def narrow(text: str) -> str:
        return text.replace(".gpu", ".cta")

    for place, scope in zip(PLACES, ("cta", "cluster", "gpu"), strict=True):
        keep(f"message, {place}", message(STORE, LOAD).replace(".gpu", f".{scope}"), **PLACES[place])
    relaxed_store, relaxed_load = STORE.replace("release", "relaxed"), LOAD.replace("acquire", "relaxed")
    fence, update = "fence.acq_rel.gpu;", "red.relaxed.{}.global.add.u32 [%rd101], %r5;"
    parts = {
        "store": message(narrow(STORE), LOAD),
        "load": message(STORE, narrow(LOAD)),
        "atomic": message(f"{fence} red.relaxed.cta.global.add.u32 [%rd101], %r5;", LOAD),
        "release fence": message(f"{narrow(fence)} {relaxed_store}", LOAD),
        "acquire fence": message(STORE, relaxed_load, narrow(fence)),
        "updates": f"{ROLES} @%p0 bra C; {update.format('cta')} bra E; C: {update.format('cta')} E:",
    }
    for part, body in parts.items():
        keep(f"{part} {NARROW}", body, **PLACES["two clusters"])
    relaxed = {
        "arrive": ARRIVE.replace("arrive", "arrive.relaxed.cta", 1),
        "wait": WAIT.replace("parity", "parity.relaxed.cta"),
    }
    keep(f"arrival {NARROW}", arrival(1, f"{fence} {relaxed['arrive']}"), threads=64, grid=2, cluster=2)
    keep(f"wait {NARROW}", arrival(1, wait=relaxed["wait"], acquire=fence), threads=64, grid=2, cluster=2)
    return names


def verdicts(core: Path, recordings: Path) -> dict[str, str]:
    """Recording -> how it notices the core built from these sources, or ""."""
    build.CORE = core
    results = {}
    options = Options(max_instructions=MAX_INSTRUCTIONS)
    for path in sorted(recordings.glob("*.npz")):
        recording, narrow = Recording.load(path), NARROW in path.stem
        try:
            _, memory = recording.replay(options)
            results[path.stem] = "accepted" if narrow else "" if memory == recording.results else "wrong result"
        except EmulationError as error:
            results[path.stem] = "" if narrow and error.kind.name in RACES else error.kind.name
    return results


def run(control: Control, recordings: Path) -> dict[str, str]:
    """The verdicts on a control, from a new process, which loads the changed core."""
    with tempfile.TemporaryDirectory() as folder:
        core = variant(control, Path(folder))
        command = [sys.executable, "-m", MODULE, "--core", str(core), "--recordings", str(recordings)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--core", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--recordings", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.core:
        print(json.dumps(verdicts(options.core, options.recordings)))
        return
    document = {}
    with tempfile.TemporaryDirectory() as folder:
        save_right_kernels(Path(folder))
        save_scopes(Path(folder))
        for control in CONTROLS:
            found = run(control, Path(folder))
            killers = {name: how for name, how in found.items() if how}
            document[control.name] = killers
            print("killed " if killers else "SURVIVED", control.name, killers, flush=True)
    if options.write:
        summaries.write("wrong_semantics", document)


if __name__ == "__main__":
    main()
