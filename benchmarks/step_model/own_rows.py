"""Prefill chunks whose rows are sharded over the ranks (`SGLANG_DSV4_SEQUENCE_PARALLEL`), on and attention."""

from __future__ import annotations

from dataclasses import replace

from step_model import rows
from step_model.hardware import B200, H200, Gpu
from step_model.launch import Launch, time_us
from step_model.step import FLASH, Forward, attention_sublayer, experts_sublayer, predict

CHUNK = 8192
CONTEXTS = (8192, 32_768, 65_536, 262_144)
"""Tokens of the request up to the end of the chunk; a prompt of 64K is, in the mean, a chunk that ends at 36K."""
OF_ALL_ROWS = ("wqkv_a", "projections", "compress_store")
"""Launches that store what every rank's pools keep, or make it."""
OF_THE_CHOICE = ("index wq_b", "index_query", "scores", "choice")
CHOSEN_BYTES = 4


def ring(name: str, num_bytes: float, ranks: int) -> Launch:
    """Return the counts of NCCL's gather or reduce-scatter of rows that have `num_bytes` on all ranks together."""
    moved = num_bytes * (ranks - 1) / ranks
    return Launch(name, ctas=rows.RING_CTAS, l2=2 * moved, crossings=ranks - 1, link=moved, from_memory=0)


def chunk_us(f: Forward, gpu: Gpu, attends: bool) -> float:
    """Return the microseconds of a chunk of the rank that has its last rows.

    Args:
        f: with all rows.
        gpu: each rank's.
        attends: whether the rank attends for its own rows only, with all heads.
    """
    t, dim, ranks = f.tokens, f.model.dim, f.ranks
    own = replace(f, tokens=-(-t // ranks), ranks=1)
    gathered = [ring("gather", t * dim * 2, ranks), rows.row_kernel("fp8_quantise", t, gpu, dim / 4096)]
    around = [rows.boundary("boundary", own.tokens, dim, gpu), *gathered]
    scattered = ring("reduce-scatter", t * dim * 2, ranks)
    launches: list[Launch] = []
    for ratio in f.kinds:
        whole = attention_sublayer(f, ratio, gpu).all
        share = {launch.name: launch for launch in attention_sublayer(own, ratio, gpu).all}
        for launch in whole:
            is_shared = launch.name in OF_THE_CHOICE or (attends and launch.name not in OF_ALL_ROWS)
            launches.append(share[launch.name] if is_shared else launch)
        if attends:
            launches += parts_of_wo_b(f, gpu)
        else:
            launches += [scattered, ring("chosen", t * f.model.top_k * CHOSEN_BYTES * (ratio == 4), ranks)]
        launches += [*around, *experts_sublayer(f, gpu).all, scattered, *around]
    without_layers = predict(replace(f, model=replace(f.model, layers=())), gpu).us
    return sum(time_us(launch, gpu, early=False) for launch in launches) + without_layers


def parts_of_wo_b(f: Forward, gpu: Gpu) -> list[Launch]:
    """Return what a product a rank, and their sum by PyTorch, add to one product of all heads and one norm of queries;
    and the store of all rows."""
    own_bytes = -(-f.tokens // f.ranks) * f.model.dim
    gaps = Launch("further launches", from_memory=0)
    total = Launch("sum of parts", ctas=gpu.multiprocessors, memory=own_bytes * (6 + 10 * (f.ranks - 1) + 6))
    return [*[gaps] * (2 * f.ranks), total, rows.row_kernel("norm_rope_store", f.tokens, gpu, 2 / 9)]


def table() -> list[dict[str, object]]:
    """Return the milliseconds of a chunk of V4-Flash by GPUs and context: all rows on every rank, `on`, `attention`."""
    found = []
    for gpu in (H200, B200):
        for ranks in (2, 4):
            for context in CONTEXTS:
                f = Forward(FLASH, CHUNK, context, ranks, prefill=True)
                times = predict(f, gpu).us, chunk_us(f, gpu, attends=False), chunk_us(f, gpu, attends=True)
                off, on, attention = (round(us / 1e3, 1) for us in times)
                case = {"gpu": gpu.name, "ranks": ranks, "context": context}
                found.append(case | {"off_ms": off, "on_ms": on, "attention_ms": attention})
    return found
