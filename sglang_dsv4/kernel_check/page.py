"""The page of a run in Markdown, to be pasted into an issue."""

from __future__ import annotations

from typing import Any

from sglang_dsv4.kernel_check.children import Checked

WORDS = {True: "right", False: "**WRONG**", None: "left out"}
BITS = {True: "same", False: "other", None: "unknown"}
MODELLED = {(9, 0): "for an H200", (10, 0): "for a B200", (10, 3): "for a B300"}
"""Compute capability -> the GPU whose times the model has."""


def page(gpu: dict[str, Any], implementation: str, kernels: list[Checked], command: str) -> str:
    """The page.

    Args:
        gpu: result of `children.described`.
        implementation: "sm90" or "sm100".
        kernels: in the order of the run.
        command: that made the page.
    """
    of_gpu = MODELLED.get(tuple(gpu["capability"]), "which has no constants for this GPU")
    wrong = [kernel.name for kernel in kernels if kernel.ok is False]
    out = [kernel.name for kernel in kernels if kernel.ok is None]
    versions = ", ".join(f"{name} {version}" for name, version in gpu["versions"].items() if version)
    lines = [
        f"# Kernels `{implementation}` on {gpu['name']}",
        "",
        f"{len(kernels) - len(wrong) - len(out)} of {len(kernels)} kernels right"
        + (f"; wrong: {', '.join(wrong)}" if wrong else "")
        + (f"; left out: {', '.join(out)}" if out else "")
        + ".",
        "",
        f"Compute capability {'.'.join(map(str, gpu['capability']))}, {gpu['multiprocessors']} multiprocessors, "
        f"{gpu['memory_bytes'] / 2**30:.0f} GiB, {gpu['gpus']} GPUs, CUDA {gpu['cuda']}; {versions}. `{command}`",
        "",
        "| kernel | result | tests passed, failed, skipped | seconds |",
        "| --- | --- | --- | --- |",
        *(f"| {kernel.name} | {WORDS[kernel.ok]} | {_numbers(kernel)} | {kernel.seconds:.0f} |" for kernel in kernels),
        "",
        "Small cases: three tokens at the sizes of V4-Flash, experts and attention smaller. *bits*: compared with the "
        "emulator's. *distance*: from the reference, relative. *us*: one of many calls in a replayed CUDA graph. "
        f"*modelled*: the time by benchmarks/step_model {of_gpu}; empty where it does not count the kernel. Its "
        "constants were fitted on an H200.",
        "",
        "Every case but `fp8_quantise`, `step_mapping` and `unpack_pages` may have *other* bits: a tensor core aligns "
        "and truncates the terms of an instruction before it adds them, and a GPU's `ex2`, `rcp` and `rsqrt` are "
        "approximate, where the emulator adds in order and rounds correctly. The distance decides whether such a case "
        "is right.",
        "",
        "| case | result | distance | bits | us | modelled |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_case(case) for kernel in kernels for case in kernel.cases),
    ]
    problems = [(kernel.name, text) for kernel in kernels for text in kernel.failures]
    problems += [(case["case"], case["said"]) for kernel in kernels for case in kernel.cases if not case["ok"]]
    problems += [(kernel.name, kernel.left_out) for kernel in kernels if kernel.left_out]
    if problems:
        lines += ["", "## What was wrong", ""]
        lines += [f"* {name}:\n\n{_indented(text)}\n" for name, text in problems]
    return "\n".join(lines) + "\n"


def _numbers(kernel: Checked) -> str:
    return ", ".join(str(kernel.tests[word]) for word in ("passed", "failed", "skipped")) if kernel.tests else ""


def _case(case: dict[str, Any]) -> str:
    if "distance" not in case:
        return f"| {case['case']} | {WORDS[case['ok']]} | | | | |"
    modelled = "" if case["modelled"] is None else f"{case['modelled']:.1f}"
    numbers = f"{case['distance']:.2g} | {BITS[case['same_bits']]} | {case['microseconds']:.1f} | {modelled}"
    return f"| {case['case']} | {WORDS[case['ok']]} | {numbers} |"


def _indented(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.splitlines())
