"""FlashMLA's sm_100 sparse kernels, compiled from C++ by nvcc, against float64.

    python -m ptx_emulator.foreign.flash_mla --checkout PATH prefill --heads 64 --queries 2 --keys 1024 --topk 512
    python -m ptx_emulator.foreign.flash_mla --checkout PATH decode --heads 64 --batch 2 --keys 1024 --topk 512

nvcc compiles FlashMLA's own sources with a small driver (flash_mla_driver.cu) that calls its host functions; these
build the tensor maps and launch. If the checkout's CUTLASS submodule is absent, a CUTLASS checkout in the same folder
is used.
"""

import argparse
import ctypes
import math
import time
from pathlib import Path

import torch

from ptx_emulator import Device, Options
from ptx_emulator.foreign.flash_attention_4 import relative_error
from ptx_emulator.foreign.nvcc_program import attach, build, pointer
from ptx_emulator.foreign.run_program import checks_with_warnings, finish

HERE = Path(__file__).resolve().parent
KERNELS = {("prefill", 64): 1, ("prefill", 128): 2, ("decode", 64): 3, ("decode", 128): 4}
HEAD_DIM, LATENT_DIM, ROPE_DIM = 512, 448, 64
TILE_DIM = 64  # elements of the latent that share a scale
PAGE_TOKENS = 64
TOKEN_BYTES = LATENT_DIM + 2 * ROPE_DIM  # then, after all tokens of the page, 8 bytes of scales each
SCALE_BYTES = 8
KEYS_PER_BLOCK = 64

FLAGS = [
    "--expt-extended-lambda",
    "--use_fast_math",
    "-D_USE_MATH_DEFINES",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]


def build_kernel(checkout: Path, cutlass: Path, kernel: int) -> tuple[Path, str]:
    includes = [checkout / "csrc", checkout / "csrc/kerutils/include", cutlass / "include"]
    sources = sorted((checkout / "csrc").rglob("*.cu*"))
    driver = HERE / "flash_mla_driver.cu"
    return build(driver, f"flash_mla-{kernel}", [*FLAGS, f"-DKERNEL={kernel}"], includes, sources)


def quantised_pages(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages [num_pages, page_bytes] u8, their values [num_keys, 512] f64), quantised from float kv."""
    num_keys = kv.shape[0]
    latent = kv[:, :LATENT_DIM].reshape(num_keys, -1, TILE_DIM).double()
    exponents = (latent.abs().amax(-1) / 448).clamp_min(1e-4).log2().ceil()
    e4m3 = (latent / exponents.exp2()[..., None]).float().to(torch.float8_e4m3fn)
    rope = kv[:, LATENT_DIM:].bfloat16()
    values = torch.cat([(e4m3.double() * exponents.exp2()[..., None]).reshape(num_keys, -1), rope.double()], 1)
    num_pages = -(-num_keys // PAGE_TOKENS)
    page_bytes = PAGE_TOKENS * (TOKEN_BYTES + SCALE_BYTES)
    page_bytes = -(-page_bytes // TOKEN_BYTES) * TOKEN_BYTES  # the kernel's row stride divides it
    pages = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
    for key in range(num_keys):
        page, slot = pages[key // PAGE_TOKENS], key % PAGE_TOKENS
        start = slot * TOKEN_BYTES
        page[start : start + LATENT_DIM] = e4m3[key].reshape(-1).view(torch.uint8)
        page[start + LATENT_DIM : start + TOKEN_BYTES] = rope[key].view(torch.uint8)
        start = PAGE_TOKENS * TOKEN_BYTES + slot * SCALE_BYTES
        page[start : start + LATENT_DIM // TILE_DIM] = (exponents[key] + 127).to(torch.uint8)
    return pages, values


def sparse_attention(
    q: torch.Tensor,  # [queries, heads, 512]
    kv: torch.Tensor,  # [keys, 512]: the keys are the values
    indices: torch.Tensor,  # [queries, topk], -1: none
    sink: torch.Tensor,  # [heads]
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [queries, heads, 512], log-sum-exp without the sink [queries, heads]) in float64."""
    outs, lses = [], []
    for query, row in zip(q.double(), indices, strict=True):
        keys = kv[row[row >= 0].long()].double()
        scores = query @ keys.T * scale
        lse = scores.logsumexp(-1)
        total = torch.logaddexp(lse, sink.double())
        outs.append((scores - total[:, None]).exp() @ keys)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def _top_k(queries: int, keys: int, topk: int, padding: int) -> torch.Tensor:
    indices = torch.stack([torch.randperm(keys)[:topk] for _ in range(queries)]).int()
    indices[:, topk - padding :] = -1
    return indices


def prefill(device: Device, run: "ctypes._CFuncPtr", heads: int, queries: int, keys: int, topk: int) -> float:
    q = torch.randn(queries, heads, HEAD_DIM).bfloat16()
    kv = torch.randn(keys, 1, HEAD_DIM).bfloat16()
    indices, sink = _top_k(queries, keys, topk, padding=topk // 8), torch.randn(heads)
    out = torch.zeros_like(q)
    max_logits, lse = torch.zeros(queries, heads), torch.zeros(queries, heads)
    scale = HEAD_DIM**-0.5
    tensors = [q, kv, indices, sink, out, max_logits, lse]
    pointers = [pointer(device, tensor) for tensor in tensors]
    run(queries, keys, heads, topk, ctypes.c_float(scale), *pointers)
    return relative_error(out, sparse_attention(q, kv[:, 0], indices, sink, scale)[0])


def decode(
    device: Device,
    run: "ctypes._CFuncPtr",
    heads: int,
    batch: int,
    keys: int,
    topk: int,
    parts_per_request: int,
) -> float:
    q = torch.randn(batch, heads, HEAD_DIM).bfloat16()
    pages, kv = quantised_pages(torch.randn(keys, HEAD_DIM))
    indices, sink = _top_k(batch, keys, topk, padding=topk // 8), torch.randn(heads)
    out, lse = torch.zeros_like(q), torch.zeros(batch, heads)
    num_parts, blocks = batch * parts_per_request, topk // KEYS_PER_BLOCK
    bounds = [blocks * part // parts_per_request for part in range(parts_per_request + 1)]
    is_split = int(parts_per_request > 1)
    schedule = torch.tensor(
        # begin request, end request, begin block, end block, begin split, first and last are split
        [
            [request, request, bounds[part], bounds[part + 1], part, is_split, is_split, 0]
            for request in range(batch)
            for part in range(parts_per_request)
        ],
        dtype=torch.int32,
    )
    num_splits = torch.arange(batch + 1, dtype=torch.int32) * parts_per_request
    lse_parts = torch.zeros(batch + num_parts, heads)
    out_parts = torch.zeros(batch + num_parts, heads, HEAD_DIM)
    scale = HEAD_DIM**-0.5
    sizes = [batch, heads, pages.shape[0], PAGE_TOKENS, pages.shape[1], TOKEN_BYTES + SCALE_BYTES]
    tensors = [q, pages, indices, sink, out, lse, schedule, num_splits]
    run(
        *sizes,
        topk,
        ctypes.c_float(scale),
        *[pointer(device, tensor) for tensor in tensors],
        num_parts,
        pointer(device, lse_parts),
        pointer(device, out_parts),
    )
    if is_split:
        # As FlashMLA's combine kernel does; the parts' log-sum-exps are in base 2.
        logs = lse_parts[:num_parts].view(batch, parts_per_request, heads).double() * math.log(2)
        total = torch.logaddexp(logs.logsumexp(1), sink.double())
        weights = (logs - total[:, None]).exp()[..., None]
        parts = out_parts[:num_parts].view(batch, parts_per_request, heads, HEAD_DIM).double()
        out = (weights * parts).sum(1)
    return relative_error(out, sparse_attention(q, kv, indices, sink, scale)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--cutlass", type=Path, help="default: `cutlass` in the checkout's parent folder")
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--warn", default="", help="error kinds to report as warnings")
    parser.add_argument("--max-error", type=float, default=4e-3)
    commands = parser.add_subparsers(dest="command", required=True)
    prefill_parser, decode_parser = commands.add_parser("prefill"), commands.add_parser("decode")
    for command in (prefill_parser, decode_parser):
        command.add_argument("--heads", type=int, choices=(64, 128), required=True)
        command.add_argument("--keys", type=int, required=True)
        command.add_argument("--topk", type=int, required=True)
    prefill_parser.add_argument("--queries", type=int, required=True)
    decode_parser.add_argument("--batch", type=int, required=True)
    decode_parser.add_argument("--parts-per-request", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(0)
    cutlass = options.cutlass or options.checkout.parent / "cutlass"
    library, ptx = build_kernel(options.checkout, cutlass, KERNELS[options.command, options.heads])
    start = time.monotonic()
    checks = checks_with_warnings(options.warn)
    emulation = Options(schedule=options.schedule, seed=options.seed, checks=checks)
    with Device(emulation) as device:
        callbacks = attach(device, ptx)
        driver = ctypes.CDLL(str(library))

        def run(*arguments: object) -> None:
            failed = driver.run(*arguments)
            callbacks.raise_pending()
            if failed:
                raise RuntimeError("FlashMLA's host code refused the arguments")

        sizes = {"heads": options.heads, "keys": options.keys, "topk": options.topk}
        if options.command == "prefill":
            error = prefill(device, run, queries=options.queries, **sizes)
        else:
            parts = options.parts_per_request
            error = decode(device, run, batch=options.batch, parts_per_request=parts, **sizes)
    finish(device, start, error, options)


if __name__ == "__main__":
    main()
