"""Counts of attention on Hopper: the kernels for many heads and for few."""

from __future__ import annotations

from dsv4_kernels.kv_layout import ROW_BYTES, ROW_DIM
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    COLUMNS,
    CTAS,
    ELEMENT_BYTES,
    FEW_TOKENS,
    MOST_TILES,
    TILES_OF_STEP,
)
from dsv4_kernels.sparse_attention.sm90.launch import parts_of_few_heads
from dsv4_kernels.sparse_attention.sm90.plan import CHANNEL_SPLITS, HEADS, Split
from dsv4_kernels.sparse_attention.split import DECODE_SPLIT_KEYS, STEP_KEYS, num_kv_splits, num_steps
from step_model.hardware import BALANCED_WAVES, FLIGHT_US, L2_CLOCKS, Gpu
from step_model.launch import Launch

CLUSTERS = (0, 132, 66, 39, 30, 22, 17, 15, 15, 9)
"""Clusters of 1 to 9 CTAs that an H200 runs at once (measured, docs/log/attention_hopper.md)."""
EXPAND_ALONE = 13.6
"""Clocks of a scheduler to expand four e4m3 of each lane to bf16 and store them (the same entry)."""
SOFTMAX_CLOCKS = 1312
"""Softmax of a step of 64 heads and 128 keys by two warpgroups: 8,192 exponentials at 16 a clock, two warps of each
scheduler with 260 instructions, two barriers between the warpgroups, four shuffles, P to shared memory."""
DSMEM_CLOCK_BYTES, SCRATCH_CLOCK_BYTES = 10, 21
"""Bytes a clock and multiprocessor: `st.async` to another CTA; partial results to and from L2 (the same entry)."""
RESULT_BYTES = HEADS * ROW_DIM * 4
"""A partial result of 64 heads."""
RELEASE_CLOCKS = 1200
"""From the last store of a partial result to the counter that other CTAs wait for (the same entry)."""
MERGE_CLOCKS = 1500
"""Factors of all partial results of a row, sums, division, and the stores of O."""
PORT_CLOCK_BYTES = 128
SECTOR = 32
ROW_SECTORS = {True: SECTOR * (-(-(ROW_BYTES - 8) // SECTOR) + 1), False: 2 * ROW_DIM}
"""Bytes that memory moves for a row: whole sectors of 32 bytes; the scales of FP8 rows lie apart."""


def keys_of(kind: str, context: int) -> tuple[int, int]:
    """Return the window rows and entries that a token of this context reads."""
    ratio = {"swa": 0, "hca": 128}.get(kind, 4)
    entries = context // ratio if ratio else 0
    return min(128, context), min(entries, int(kind[3:])) if kind.startswith("csa") else entries


def step_clocks(fp8: bool) -> dict[str, float]:
    """Return the clocks of a step of 128 keys and 64 heads by unit, with everything in shared memory in time.

    The softmax uses neither the tensor core nor, with FP8 rows, the port of shared memory: no buffer for keys is free
    then. The port carries keys (written, read as K and as V), Q (twice), P (four times, and written) and FP8 rows.
    """
    tensor = 4 * HEADS * STEP_KEYS * ROW_DIM / 4096
    keys = STEP_KEYS * ROW_DIM * 2
    port = (3 * keys + 2 * HEADS * ROW_DIM * 2 + 5 * HEADS * STEP_KEYS * 2) / PORT_CLOCK_BYTES
    if not fp8:
        return {"tensor": tensor + SOFTMAX_CLOCKS, "port": port}
    return {"tensor": tensor + SOFTMAX_CLOCKS, "port": port + STEP_KEYS * ROW_BYTES / PORT_CLOCK_BYTES + SOFTMAX_CLOCKS}


def many_heads(
    name: str, kind: str, context: int, tokens: int, heads: int, gpu: Gpu, fp8: bool = True, prefill: bool = False
) -> Launch:
    """Return the counts of attention with 64 heads or more on Hopper (kernels/sparse_attention/sm90/launch.py)."""
    window, entries = keys_of(kind, context)
    steps, blocks = num_steps(window, entries), -(-heads // HEADS)
    splits = 1 if prefill else num_kv_splits(steps, DECODE_SPLIT_KEYS)
    row = ROW_BYTES if fp8 else 2 * ROW_DIM
    q_and_o = 2 * heads * ROW_DIM * 2
    memory = _distinct_rows(kind, context, tokens, prefill) * ROW_SECTORS[fp8] + tokens * (
        q_and_o + 4 * (window + entries)
    )
    work = tokens * blocks
    if not prefill:
        for n in sorted(CHANNEL_SPLITS[Split.STEPS], reverse=True):
            if steps < len(CLUSTERS) and splits == 1 and work * n <= CLUSTERS[steps]:
                return _cluster(name, steps, n, work, row, memory, fp8)
    free = gpu.multiprocessors // work
    divides = not prefill and (splits > 1 or (free >= 8 and steps > 1) or (free >= 4 and steps > 2))
    tiles, most, serial, ctas = 1, steps, MERGE_CLOCKS, work
    if divides and free >= 2:
        parts = min(free, steps)
        most, ctas = -(-steps // parts), work * parts
        merged = steps if parts > splits else splits
        # The last result on its way to L2, its release, then a part of all results.
        serial += RESULT_BYTES / SCRATCH_CLOCK_BYTES + RELEASE_CLOCKS
        serial += merged * (1 - 1 / parts) * RESULT_BYTES / parts / SCRATCH_CLOCK_BYTES
    elif divides:
        whole = -(-work // gpu.multiprocessors) * steps
        divided = -(-work * splits // gpu.multiprocessors) * -(-steps // splits)
        tiles, most = -(-work // gpu.multiprocessors), min(whole, divided)
        ctas = work * (1 if whole <= divided else splits)
        serial += most / -(-steps // splits) * RESULT_BYTES / SCRATCH_CLOCK_BYTES
    else:
        possible = [n for n in CHANNEL_SPLITS[Split.NONE] if n == 1 or work * n <= gpu.multiprocessors]
        tiles = -(-work * (1 if steps > 3 else max(possible)) // gpu.multiprocessors)
        most = tiles * steps
    units = step_clocks(fp8)
    if fp8:
        # A step's rows are known when the step before has its last row, so a load of each step is waited for: from
        # memory for the first CTA that reads a row, behind the loads of the other multiprocessors.
        loaded = min(1.0, work / gpu.multiprocessors)
        latency = FLIGHT_US + loaded * max(0.0, gpu.fitted.dram_us - FLIGHT_US)
        units["port"] += (latency / blocks + (1 - 1 / blocks) * L2_CLOCKS / gpu.clock(ctas)) * gpu.clock(ctas)
    q_clocks = q_and_o / blocks / gpu.fitted.l2_clock_bytes
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=memory,
        waves=most / BALANCED_WAVES,
        l2=work * steps * STEP_KEYS * row + tokens * q_and_o,
        busiest=most * STEP_KEYS * row + tiles * q_and_o / blocks,
        clocks={unit: most * n + tiles * q_clocks for unit, n in units.items()},
        chain=_first_step(fp8) + serial,
        from_memory=1,
        from_l2=3,
    )


def _distinct_rows(kind: str, context: int, tokens: int, prefill: bool) -> int:
    """Return the rows that a call reads from memory: requests share none; tokens of a chunk share their request's."""
    window, entries = keys_of(kind, context)
    if not prefill:
        return tokens * (window + entries)
    ratio = {"swa": 0, "hca": 128}.get(kind, 4)
    return tokens + window + min(tokens * entries, context // ratio if ratio else 0)


def _first_step(fp8: bool) -> float:
    """Return the clocks of the first keys' expansion, which nothing covers."""
    return STEP_KEYS * ROW_DIM / 4 / 32 / 4 * EXPAND_ALONE if fp8 else 0


def _cluster(name: str, steps: int, splits: int, work: int, row: int, memory: float, fp8: bool) -> Launch:
    """Return the counts of the kernel with a CTA for each step (kernels/sparse_attention/sm90/cluster.py)."""
    products = 2 * HEADS * STEP_KEYS * ROW_DIM / 4096
    sent = RESULT_BYTES / splits * (steps - 1) / steps
    chain = _first_step(fp8) + products + SOFTMAX_CLOCKS + products / splits + sent / DSMEM_CLOCK_BYTES
    num_bytes = STEP_KEYS * row + HEADS * ROW_DIM * 2
    return Launch(
        name,
        ctas=work * splits * steps,
        memory=memory,
        l2=work * splits * steps * num_bytes,
        busiest=num_bytes,
        chain=chain + (MERGE_CLOCKS if steps > 1 else 0),
        from_memory=1,
        from_l2=3,
    )


TILE_CLOCKS = 4455
"""Clocks of a tile of 64 keys and up to 16 heads by the one warp of a scheduler: its instructions, as emulated
(`sparse_attention_sm90_static.py --bounds`: 8,910 issue clocks for the two tiles of a step)."""
TILE_ISSUE_CLOCKS = 2300
"""Clocks of a scheduler for a tile where two CTAs share it: expansions, half-rate conversions counted once, softmax."""
ELEMENT_CLOCKS = 2500
"""A tile's result to another CTA of the cluster, and the sum of the results there (tile.py)."""
REMOTE_CLOCKS = 180
"""Latency of another multiprocessor's shared memory (Luo et al. 2024, arXiv 2402.13499)."""
LEAF_CLOCKS = REMOTE_CLOCKS + 80
"""A leaf in the loop that merges leaves one after the other (`elements.merge_all`): the latency of its loads, and two
exponentials, the products and sums that wait for them."""


def few_heads(name: str, kind: str, context: int, tokens: int, heads: int, gpu: Gpu, by_tiles: bool = True) -> Launch:
    """Return the counts of attention with up to 16 heads on Hopper (kernels/sparse_attention/sm90/few_heads).

    Args:
        name: of the launch.
        kind, context: see `keys_of`.
        tokens: T, with one token a request.
        heads: of the rank.
        gpu: its multiprocessors.
        by_tiles: whether few tokens may have a CTA for each tile (tile.py).
    """
    window, entries = keys_of(kind, context)
    steps, blocks = num_steps(window, entries), -(-heads // COLUMNS)
    tiles, splits = steps * TILES_OF_STEP, num_kv_splits(steps, DECODE_SPLIT_KEYS)
    memory = tokens * ((window + entries) * (ROW_SECTORS[True] + 4) + 2 * heads * ROW_DIM * 2)
    work = tokens * blocks
    room = gpu.multiprocessors * CTAS
    if by_tiles and tokens <= FEW_TOKENS and tiles <= MOST_TILES and work * tiles <= room:
        parts, of_part, at_once, merge = tiles, 1, room // tiles, ELEMENT_CLOCKS
    else:
        parts, leaves, of_part = parts_of_few_heads(work, steps, splits, CLUSTERS)
        at_once = CLUSTERS[parts] * (CTAS if work > CLUSTERS[parts] else 1)
        remote = (1 - 1 / parts) * ELEMENT_BYTES / parts  # bytes of a leaf that another CTA has, on average
        merge = MERGE_CLOCKS
        if parts > 1:  # two barriers of the cluster: all leaves are there, all are read
            merge = 2 * REMOTE_CLOCKS + leaves * (LEAF_CLOCKS + remote / DSMEM_CLOCK_BYTES)
    ctas = min(work, at_once) * parts
    rounds = -(-work // at_once)
    of_cta = rounds * of_part
    shared = -(-ctas // gpu.multiprocessors)
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=memory,
        waves=of_cta / BALANCED_WAVES,
        l2=memory * blocks,
        clocks={"tiles": of_cta * TILE_CLOCKS, "issue": of_cta * shared * TILE_ISSUE_CLOCKS},
        chain=rounds * merge if parts > 1 else merge,
        from_memory=1,
        from_l2=3,
    )
