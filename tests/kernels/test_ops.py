"""The table of ops: one row an op, equal to the public functions, to the ops that models call and to the kernels."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dsv4_kernels import registry
from dsv4_kernels.model_shapes import ModelShapes, Option
from dsv4_kernels.ops import _ROWS, OPS, Implementation, Op, Runs, forward_ops, step_ops

ROOT = Path(__file__).resolve().parents[2]
OP_FOLDERS = sorted({op.folder for op in OPS.values()})
FORWARD = [op for op in OPS.values() if op.runs in (Runs.STEP, Runs.PREFILL)]
CPU = torch.device("cpu")


def loaded(loader: str) -> object:
    module, _, attribute = loader.partition(":")
    return getattr(importlib.import_module(module), attribute)


def kernels_of(op: Op) -> list[Implementation]:
    return [implementation for implementation in op.implementations if implementation.name in ("sm90", "sm100")]


def test_an_op_has_one_row() -> None:
    assert len(OPS) == len(_ROWS)
    for op in OPS.values():
        names = [implementation.name for implementation in op.implementations]
        assert len(set(names)) == len(names) and names[-1] == "ref", op.name


def called_in(function: ast.FunctionDef) -> set[str]:
    """Ops that a function passes to `select`, by a literal or by a variable that a literal is assigned to."""
    named = {
        target.id: node.value.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    first = [
        node.args[0]
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "select"
    ]
    return {named[arg.id] if isinstance(arg, ast.Name) else arg.value for arg in first}


@pytest.mark.parametrize("folder", OP_FOLDERS)
def test_rows_are_the_public_functions_that_select(folder: str) -> None:
    """A function selects the op of its own name, and no row lacks its function."""
    tree = ast.parse((ROOT / "kernels" / folder / "__init__.py").read_text())
    selecting = {
        node.name: called
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (called := called_in(node))
    }
    assert selecting == {op.name: {op.name} for op in OPS.values() if op.folder == folder}


def test_every_folder_with_ops_is_in_the_table() -> None:
    selecting = {
        path.parent.name
        for path in (ROOT / "kernels").glob("*/__init__.py")
        if "dsv4_kernels.registry import select" in path.read_text()
    }
    assert selecting == set(OP_FOLDERS)


@pytest.mark.parametrize("op", OPS)
def test_every_loader_loads(op: str) -> None:
    for implementation in OPS[op].implementations:
        if implementation.name in ("sm90", "sm100"):
            pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
        assert callable(loaded(implementation.loader))
        if implementation.jobs is not None:
            assert list(inspect.signature(loaded(implementation.jobs)).parameters) == ["model", "arch"]
        if implementation.name in ("ref", "tiled"):
            assert callable(registry.select(op, CPU, torch.float32, implementation.name))


def test_ops_that_forwards_run_are_those_that_models_call() -> None:
    """Read from the imports of the model's code; an op that its layer calls by name is imported from its kernel."""
    called = set()
    for folder in ("layers", "models", "attention"):
        for path in (ROOT / "sglang_dsv4" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsv4_kernels."):
                    called |= {alias.name for alias in node.names if alias.name in OPS}
    assert called == {op.name for op in FORWARD if not op.by_name}


@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_kernels_that_forwards_run_can_be_captured_compiled_ahead_and_are_batch_invariant(op: Op) -> None:
    run = kernels_of(op)
    assert bool(run) == ("cuda" in op.devices)
    for row in run:
        assert row.graph_safe and row.batch_invariant and row.jobs is not None


def test_an_op_without_a_forward_has_no_kernel() -> None:
    for op in OPS.values():
        if op.runs is Runs.NOWHERE:
            assert not kernels_of(op), op.name


def test_jobs_belong_to_kernels_that_forwards_run() -> None:
    for op in OPS.values():
        for row in op.implementations:
            if row.jobs is not None:
                assert op in FORWARD and row in kernels_of(op)


def test_on_a_cpu_every_op_of_a_forward_is_batch_invariant() -> None:
    for op in forward_ops("cpu"):
        assert any(row.is_batch_invariant(CPU) and row.supports(CPU, torch.float32) for row in OPS[op].implementations)


def test_options_are_fields_of_the_shapes_and_have_an_op() -> None:
    assert {option.value for option in Option} <= {field.name for field in fields(ModelShapes)}
    assert {op.option for op in OPS.values()} == {None, *Option}


def test_ops_of_a_step_leave_out_prefills_other_devices_and_other_options() -> None:
    assert set(forward_ops("cuda", Option)) - set(step_ops("cuda", Option)) == {"unpack_pages"}
    assert "linear" in step_ops("cpu") and "linear" not in step_ops("cuda")
    assert set(step_ops("cuda", {Option.FP8_LINEAR})) - set(step_ops("cuda")) == {"linear_fp8"}
    assert "hc_pre" not in forward_ops("cpu")


def test_which_implementations_are_batch_invariant() -> None:
    """Kernels and a CPU's products are, cuBLAS's are not; references are if they have neither a product nor a sum."""
    rows = [(op.name, row) for op in OPS.values() for row in op.implementations]
    assert {row.name for _, row in rows if row.name != "ref" and not row.batch_invariant} == {"cublas"}
    assert {op for op, row in rows if row.name == "ref" and row.batch_invariant} == {
        *("apply_rope", "apply_rope_in_place", "compress", "fp4_qdq", "fp8_qdq", "fp8_quantise", "hadamard", "hc_post"),
        *("fused_swiglu", "index_query", "route_hash_logits", "route_topk_logits", "step_mapping", "swiglu"),
        *("swiglu_fp8", "unpack_pages"),
    }


def test_importing_the_table_imports_no_kernel() -> None:
    program = "import sys, dsv4_kernels.registry; print(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    imported = {tuple(name.split(".")[:2]) for name in out.split() if name.split(".")[0] in ("cutlass", "dsv4_kernels")}
    rest = {("dsv4_kernels", name) for name in ("host", "model_shapes", "ops", "registry")}
    assert imported == {("dsv4_kernels",), *rest}
