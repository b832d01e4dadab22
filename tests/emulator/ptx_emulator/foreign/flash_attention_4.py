"""FlashAttention-4's sm_100 and sm_90 kernels against float64, on the emulator.

    python -m ptx_emulator.foreign.flash_attention_4 --checkout PATH forward --head-dim 128 --queries 256 --keys 256 ...
    python -m ptx_emulator.foreign.flash_attention_4 --checkout PATH backward --head-dim 128 --queries 256 --keys 256
    ... python -m ptx_emulator.foreign.flash_attention_4 --checkout PATH mla --queries 2 --keys 1024 --topk 512

The reported error is ||o - reference|| / ||reference|| over the whole output; with the backward pass, the largest over
output and gradients. Outputs and P are bf16, so a right kernel has an error of about 2e-3; with dS, which is bf16 as
well, 3e-3 to 4e-3.
"""

import argparse
import contextlib
import math
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ptx_emulator import Device, emulated
from ptx_emulator.dsl.torch_as_cuda import torch_as_cuda
from ptx_emulator.foreign.run_program import checks_with_warnings, driver_answers, finish

MLA_HEADS, MLA_ROPE_DIM, MLA_LATENT_DIM = 128, 64, 512


def import_interface(checkout: Path, arch: str) -> Any:
    """The kernels' interface without the package's __init__, which needs the compiled CUDA extension."""
    os.environ.setdefault("FLASH_ATTENTION_ARCH", arch.rstrip("a"))
    package = types.ModuleType("flash_attn")
    package.__path__ = [str(checkout / "flash_attn")]
    sys.modules["flash_attn"] = package
    from flash_attn.cute import interface

    return interface


def reference(
    q: torch.Tensor,  # [1, queries, heads, dim]
    k: torch.Tensor,  # [1, keys, kv_heads, dim]
    v: torch.Tensor,  # [1, keys, kv_heads, dim_v]
    *,
    scale: float,
    causal: bool = False,
    q_latent: torch.Tensor | None = None,  # [1, queries, heads, dim_v]: scored against v
    indices: torch.Tensor | None = None,  # [1, queries, topk], -1: no key
) -> torch.Tensor:
    """Attention in float64: softmax(scale * (q k^T + q_latent v^T)) v over the allowed keys."""
    group = q.shape[2] // k.shape[2]
    keys, values = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q.double(), keys)
    if q_latent is not None:
        scores += torch.einsum("bshd,bthd->bhst", q_latent.double(), values)
    scores *= scale
    num_queries, num_keys = scores.shape[-2:]
    if causal:
        hidden = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
        scores = scores.masked_fill(hidden, -math.inf)
    if indices is not None:
        allowed = torch.zeros(1, num_queries, num_keys + 1, dtype=torch.bool)
        slots = indices.long()
        allowed.scatter_(2, torch.where(slots < 0, num_keys, slots), True)
        scores = scores.masked_fill(~allowed[:, None, :, :num_keys], -math.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), values)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@contextlib.contextmanager
def fa4_device(arch: str, **options: Any) -> Iterator[Device]:
    with emulated(arch=arch, **options) as device, torch_as_cuda(arch), driver_answers():
        yield device


def run_forward(
    interface: Any,
    *,
    head_dim: int,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int,
    causal: bool,
    backward: bool = False,
) -> float:
    q = torch.randn(1, queries, heads, head_dim).bfloat16()
    k = torch.randn(1, keys, kv_heads, head_dim).bfloat16()
    v = torch.randn(1, keys, kv_heads, head_dim).bfloat16()
    out, lse = interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]
    leaves = [x.double().requires_grad_(backward) for x in (q, k, v)]
    expected = reference(*leaves, scale=head_dim**-0.5, causal=causal)
    errors = [relative_error(out, expected.detach())]
    if backward:
        grad = torch.randn_like(out)
        gradients = interface._flash_attn_bwd(q, k, v, out, grad, lse, causal=causal)
        expected.backward(grad.double())
        errors += [relative_error(x, leaf.grad) for x, leaf in zip(gradients, leaves, strict=False)]
    return max(errors)


def run_mla(
    interface: Any,
    *,
    queries: int,
    keys: int,
    topk: int | None,
    padding: int,
    query_scale: float = 1.0,
    backward: bool = False,
) -> float:
    """The relative error of sparse MLA.

    topk: gathered keys per query, the last `padding` of them -1; None: dense and causal. query_scale multiplies the
    scores: with small scores the running maximum never rises enough for the kernel to rescale its output.
    """
    q = (query_scale * torch.randn(1, queries, MLA_HEADS, MLA_ROPE_DIM)).bfloat16()
    k = torch.randn(1, keys, 1, MLA_ROPE_DIM).bfloat16()
    q_latent = (query_scale * torch.randn(1, queries, MLA_HEADS, MLA_LATENT_DIM)).bfloat16()
    v = torch.randn(1, keys, 1, MLA_LATENT_DIM).bfloat16()
    scale = (MLA_ROPE_DIM + MLA_LATENT_DIM) ** -0.5
    indices = None
    if topk is not None:
        indices = torch.stack([torch.randperm(keys)[:topk] for _ in range(queries)])[None].int()
        indices[:, :, topk - padding :] = -1
    causal = topk is None
    tensors = (q, k, v, q_latent)
    for tensor in tensors:
        tensor.requires_grad_(backward)  # the forward pass then keeps P for the backward pass
    out, lse, p, row_max = interface._flash_attn_fwd(
        q,
        k,
        v,
        qv=q_latent,
        gather_kv_indices=indices,
        causal=causal,
        softmax_scale=scale,
        return_lse=True,
    )
    leaves = [tensor.detach().double().requires_grad_(backward) for tensor in tensors]
    expected = reference(*leaves[:3], scale=scale, causal=causal, q_latent=leaves[3], indices=indices)
    errors = [relative_error(out.detach(), expected.detach())]
    if backward:
        grad = torch.randn_like(out)
        saved = [x.detach() for x in (*tensors, out)]
        gradients = interface._flash_attn_bwd_sparse_mla(
            *saved, grad, lse, p, row_max, indices, softmax_scale=scale, causal=causal
        )
        expected.backward(grad.double())
        errors += [relative_error(x, leaf.grad) for x, leaf in zip(gradients, leaves, strict=True)]
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--warn", default="", help="error kinds to report as warnings")
    parser.add_argument("--recording", type=Path, help="save the launch here, for campaigns/mutation.py")
    parser.add_argument("--max-error", type=float, default=5e-3)
    commands = parser.add_subparsers(dest="command", required=True)
    attention_parsers = [commands.add_parser(name) for name in ("forward", "backward")]
    for command in attention_parsers:
        command.add_argument("--head-dim", type=int, required=True)
        command.add_argument("--heads", type=int, required=True)
        command.add_argument("--kv-heads", type=int, required=True)
        command.add_argument("--causal", action="store_true")
    mla_parser = commands.add_parser("mla")
    mla_parser.add_argument("--topk", type=int)
    mla_parser.add_argument("--padding", type=int, default=0)
    mla_parser.add_argument("--query-scale", type=float, default=1.0)
    mla_parser.add_argument("--backward", action="store_true")
    for command in (*attention_parsers, mla_parser):
        command.add_argument("--queries", type=int, required=True)
        command.add_argument("--keys", type=int, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    start = time.monotonic()
    recording = options.recording is not None
    with fa4_device(
        options.arch,
        schedule=options.schedule,
        seed=options.seed,
        checks=checks_with_warnings(options.warn),
        record=recording,
        lineinfo=not recording,
    ) as device:
        interface = import_interface(options.checkout, options.arch)
        sizes = {"queries": options.queries, "keys": options.keys}
        if options.command != "mla":
            error = run_forward(
                interface,
                head_dim=options.head_dim,
                heads=options.heads,
                kv_heads=options.kv_heads,
                causal=options.causal,
                backward=options.command == "backward",
                **sizes,
            )
        else:
            names = ("topk", "padding", "query_scale", "backward")
            mla = {name: getattr(options, name) for name in names}
            error = run_mla(interface, **mla, **sizes)
    if options.recording:
        device.recordings[-1].save(options.recording)
    finish(device, start, error, options)


if __name__ == "__main__":
    main()
