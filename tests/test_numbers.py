"""Divisions, roots, logarithms and exponentials of a forward: docs/numbers.md lists all of them, and they are finite.

The places are found in the sources: calls of the functions below anywhere, and the operator `/` in definitions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
CALLS = {
    *("softmax", "log_softmax", "logsumexp", "log", "log_", "log2", "log1p", "exp", "exp_", "exp2", "sqrt", "rsqrt"),
    *("reciprocal", "div", "div_", "sigmoid", "silu", "softplus", "normalize"),
    *("divide", "reciprocal_root", "root", "rcp_approx"),  # of the kernels
}
SOURCES = (
    *("kernels", "sglang_dsv4/layers", "sglang_dsv4/models", "sglang_dsv4/requests"),
    "sglang_dsv4/cpu/speculation.py",
)
DEFINITIONS = ("ref.py", "batch_invariant.py", "number_formats.py", "deepseek_v4.py", "speculation.py")
"""Files whose operator `/` counts; in a kernel it divides numbers of the host."""
WHOLE_NUMBERS = "ptx"
"""`ptx.divide` divides indices."""
NOT_OF_A_FORWARD = {
    "kernels/number_formats.py: quantise_fp8_weight": "writes checkpoints",
    "kernels/number_formats.py: quantise_nvfp4_weight": "writes checkpoints",
    "kernels/number_formats.py: dequantise_fp4_weight": "a number of columns in an error",
    "kernels/number_formats.py: dequantise_nvfp4_weight": "a number of columns in an error",
    "kernels/sparse_attention/sm100/plan.py: ": "a constant",
}


def places_in(tree: ast.AST, operators: bool) -> set[str]:
    """Names of the functions that divide or call one of CALLS; "" for a module's top."""
    found: set[str] = set()

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                visit(child, function or child.name)  # a function's own functions are part of it
                continue
            if isinstance(child, ast.BinOp | ast.AugAssign) and isinstance(child.op, ast.Div) and operators:
                found.add(function)
            if isinstance(child, ast.Call):
                name = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                owner = child.func.value if isinstance(child.func, ast.Attribute) else None
                whole = name == "divide" and isinstance(owner, ast.Name) and owner.id == WHOLE_NUMBERS
                if name in CALLS and not whole:
                    found.add(function)
            visit(child, function)

    visit(tree, "")
    return found


@cache
def places() -> set[str]:
    found = set()
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")) if (ROOT / source).is_dir() else [ROOT / source]:
            operators = path.name in DEFINITIONS
            names = places_in(ast.parse(path.read_text()), operators)
            found |= {f"{path.relative_to(ROOT)}: {name}" for name in names}
    return found


@cache
def rows() -> dict[str, list[str]]:
    """Quantity -> its row's cells, of the table in docs/numbers.md."""
    table = (ROOT / "docs" / "numbers.md").read_text().split("<!-- places -->")[1].split("<!-- end -->")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line]
    return {row[0]: row for row in cells[2:]}


def test_every_place_is_in_the_table() -> None:
    listed = {name for row in rows().values() for name in re.findall(r"`(\S+\.py: \w*)`", row[1] + row[2])}
    missing = places() - listed - set(NOT_OF_A_FORWARD)
    assert not missing, "add it to docs/numbers.md, with its guard"
    gone = listed - places()
    assert not gone, "docs/numbers.md lists a place that is gone"
    assert set(NOT_OF_A_FORWARD) <= places()
    assert all(len(row) == 5 and row[3] for row in rows().values())


def test_new_places_are_found() -> None:
    """The search above, on a definition that divides in each way."""
    tree = ast.parse(
        "def f(x):\n    return x / x.sum()\n"
        "def g(x):\n    x /= 2\n"
        "def h(x):\n    return torch.rsqrt(x)\n"
        "def i(x):\n    return reciprocal(x)\n"
        "def j(x):\n    return ptx.divide(x, 2)\n"
    )
    assert places_in(tree, True) == {"f", "g", "h", "i"}
    assert places_in(tree, False) == {"h", "i"}


# ---- at the ends of the inputs' range

LARGEST = 3.3895e38  # of bf16
TINY = 2.0**-133  # the least subnormal bf16
VALUES = (0.0, TINY, -TINY, 1e-20, -1e-4, 1.0, -104.0, 88.0, 1e4, -1e10, 1e19)
"""Activations whose squares fp32 holds."""
BEYOND = (*VALUES, 1e20, -1e30, LARGEST, -LARGEST)
CODED = (*VALUES, 1e20, -1e30, 2.9e38, -2.9e38)
"""The largest values that both quantisers keep finite."""


def each_with_each(values: tuple[float, ...], columns: int = 4) -> Tensor:
    """Rows [len(values)**2, columns]; each alternates two of the values, for every pair."""
    pairs = torch.tensor([[a, b] for a in values for b in values])
    return pairs.repeat(1, columns // 2)


def norms() -> list[Tensor]:
    from dsv4_kernels.norm.ref import rms_norm

    return [rms_norm(each_with_each(BEYOND), torch.ones(4), 1e-6), rms_norm(torch.zeros(2, 4), None, 1e-6)]


def streams() -> list[Tensor]:
    from dsv4_kernels.hyper_connection.ref import hc_pre

    x = each_with_each(VALUES, 8).unflatten(1, (4, 2))
    fn = torch.eye(24, 8)
    row, post, comb = hc_pre(x, fn, torch.zeros(24), torch.full((3,), 1e4), 1e-6, 1e-6, 20)
    return [row, post, comb]


def gates() -> list[Tensor]:
    from dsv4_kernels.reference.batch_invariant import sigmoid

    return [sigmoid(torch.tensor(BEYOND))]


def sinkhorn() -> list[Tensor]:
    from dsv4_kernels.hyper_connection.ref import _sinkhorn

    made = _sinkhorn(each_with_each(BEYOND, 16).unflatten(1, (4, 4)), 1e-6, 20)
    assert (made.sum(1) - 1).abs().max() < 1e-3
    return [made]


def compressor() -> list[Tensor]:
    from dsv4_kernels.compressor.ref import compress

    scores, kv = each_with_each(BEYOND, 8), each_with_each(VALUES, 8)[: len(BEYOND) ** 2]
    kv = kv[torch.arange(len(scores)) % len(kv)]
    state = torch.zeros(0, 2, 8)
    sources = torch.arange(len(scores)).view(-1, 1).repeat(1, 4)
    sources[::3, 1:] = -1  # slots without a token
    sources[1] = -1  # none at all
    return [compress(state, kv, scores, sources, 4, 8)]


def attention() -> list[Tensor]:
    from dsv4_kernels.sparse_attention.ref import _divided

    largest = torch.tensor([0.0, 1e4, -1e4, 3e38]).repeat_interleave(4).view(-1, 1)
    sinks = torch.tensor([-torch.inf, -3e38, 0.0, 3e38]).repeat(4).view(-1, 1)
    sums = torch.ones_like(largest)
    made = [_divided(torch.ones(16, 1, 8), largest, sums, sinks[0, :])]
    for sink in sinks[:4, 0]:
        made.append(_divided(torch.ones(16, 1, 8), largest, sums, sink.view(1)))
    no_rows = torch.zeros(16, 1)
    return [*made, _divided(torch.zeros(16, 1, 8), no_rows, no_rows, None)]


def fp8() -> list[Tensor]:
    from dsv4_kernels.number_formats import decode_fp8, encode_fp8

    codes, scales = encode_fp8(each_with_each(CODED, 8), 8)
    return [codes.float(), scales, decode_fp8(codes, scales, 8)]


def fp4() -> list[Tensor]:
    from dsv4_kernels.number_formats import decode_fp4, encode_fp4

    codes, scales = encode_fp4(each_with_each(CODED, 8), 8)
    return [scales, decode_fp4(codes, scales, 8)]


def nvfp4() -> list[Tensor]:
    from dsv4_kernels.number_formats import dequantise_nvfp4_weight, encode_nvfp4

    made = []
    for scale in (2.0**-120, 1e-4, 1.0):
        global_scale = torch.tensor(scale)
        codes, scales = encode_nvfp4(each_with_each(VALUES, 16), global_scale)
        made += [scales.float(), dequantise_nvfp4_weight(codes, scales, global_scale, torch.float32)]
    return made


def scores() -> list[Tensor]:
    from dsv4_kernels.router.ref import _scores

    return [_scores(torch.tensor(BEYOND))]


def weights() -> list[Tensor]:
    from dsv4_kernels.router import route_hash_logits, route_topk_logits

    logits = each_with_each(BEYOND, 8)
    table = torch.arange(6).expand(1, 6)
    ids = torch.zeros(len(logits), dtype=torch.int64)
    return [route_topk_logits(logits, torch.zeros(8), 6, 1.5)[0], route_hash_logits(logits, table, ids, 1.5)[0]]


def swiglu_ends() -> list[Tensor]:
    from dsv4_kernels.moe.ref import swiglu

    pairs = each_with_each(BEYOND, 2)
    return [swiglu(pairs[:, 0], pairs[:, 1], 10.0)]


def rope() -> list[Tensor]:
    from dsv4_kernels.rope.ref import YarnScaling, rope_frequencies

    return [rope_frequencies(64, 1e4, None), rope_frequencies(64, 1.6e5, YarnScaling(16.0, 65536, 32.0, 1.0))]


def means() -> list[Tensor]:
    from sglang_dsv4.models.deepseek_v4 import mean_of_streams

    return [mean_of_streams(each_with_each(VALUES, 8).unflatten(1, (4, 2)))]


def draws() -> list[Tensor]:
    """The largest and the least logits, biases, penalties and temperatures that a request can get."""
    from sglang_dsv4.layers.logits import LARGEST_LOGIT
    from sglang_dsv4.requests.refused.sampling_numbers import LARGEST_BIAS, LEAST_DIVISOR

    logits = torch.tensor([[LARGEST_LOGIT, -LARGEST_LOGIT, 0.0, 30.0]]).repeat(4, 1)
    bias = torch.tensor([[b, -b, b, 0.0] for b in (LARGEST_BIAS, -LARGEST_BIAS, 1.0, 0.0)])
    scaled = torch.where(logits < 0, logits * 2.0, logits / LEAST_DIVISOR) + bias
    return [*(torch.softmax(scaled / temperature, -1) for temperature in (1e-6, 1.0, 3e38)), scaled]


AT_THE_ENDS: dict[str, Callable[[], list[Tensor]]] = {
    "RMS norm": norms,
    "norm of the streams": streams,
    "gates of the streams": gates,
    "Sinkhorn": sinkhorn,
    "compressor's softmax": compressor,
    "attention": attention,
    "FP8 codes": fp8,
    "FP4 codes": fp4,
    "NVFP4 codes": nvfp4,
    "router's scores": scores,
    "router's weights": weights,
    "SwiGLU": swiglu_ends,
    "RoPE": rope,
    "mean of the streams": means,
    "draws": draws,
}


def test_every_row_is_evaluated() -> None:
    assert list(AT_THE_ENDS) == list(rows())


@pytest.mark.parametrize("quantity", AT_THE_ENDS)
def test_the_definition_is_finite_at_the_ends(quantity: str) -> None:
    for number, made in enumerate(AT_THE_ENDS[quantity]()):
        assert made.isfinite().all(), f"result {number}: {made[~made.isfinite()]}"
