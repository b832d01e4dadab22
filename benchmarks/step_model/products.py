"""Counts of the products of a layer: FP8 layers, products in fp32, and the first half of the output projection."""

from __future__ import annotations

from dsv4_kernels.host.arch import ARCHITECTURES
from dsv4_kernels.linear import fp8_plan, fp8_tcgen05_plan, fp8_weight_gpu
from dsv4_kernels.linear import gpu as invariant
from dsv4_kernels.linear.kernel import CHUNK, SEGMENTS, Tile
from step_model.hardware import Gpu
from step_model.launch import Launch

HOPPER_BF16 = 4096
"""Dense flops in bf16 a clock and multiprocessor of Hopper. `mma.sync` is assumed to be as fast on Blackwell."""
STAGE_CLOCKS = 200
"""Clocks of a stage of the FP8 product besides its products: a wait, fragments, a wait for the last product (hand count
in `fp8_plan.planned`)."""
BLOCK_CLOCKS = 80
"""Clocks of a block of 128 channels: four dependent products of 16 clocks, and the latency of the first."""
SCALE_CLOCKS = 100
"""Clocks in which the one warp that loads tokens starts a copy of 32 of their scales: some 20 instructions, each after
the one before (`fp8_kernel.copy_scales`)."""
TCGEN05_SCALE_INSTRUCTIONS = 33, 24
"""PTX instructions of a warp that packs scales on Blackwell, in a stage and in each of its blocks (emulated). Two waits
and the loads of two tiles of scales come on top. The thread that issues the products has 42 and 24."""
STORE_CLOCKS = 300
"""A tile's sums to bf16 and to memory: conversions, addresses, stores on their way (some 300 clocks)."""
MMA_SYNC_CLOCKS = 33
"""Latency of `mma.sync` m16n8k16 on Hopper (Luo et al. 2024, arXiv 2402.13499)."""
MMA_SYNC_SHARE = 0.62
"""Rate of `mma.sync` in bf16 over that of `wgmma` (the same paper)."""
LDMATRIX_CLOCKS = 33
BARRIER_CLOCKS = 30
ALONE_CLOCKS, BESIDE_CLOCKS = 2.0, 4.9
"""Clocks of a scheduler for an integer instruction: alone, and while `wgmma` keeps the tensor core busy (measured,
docs/log/attention_hopper.md)."""
WO_A_INSTRUCTIONS = {8: 2900, 16: 3660}
"""PTX instructions of a warp of `wo_a` by the tokens of its tile, for a segment of 1,024 channels (emulated)."""
WO_A_FIXED = 1000
"""Those of them before the first step and after the last: cosines and sines, the exchange, the quantiser."""
CLUSTER_CLOCKS = 600
"""Sums to the other CTAs of a cluster, and its barrier."""


def fp8_hopper(name: str, tokens: int, rows: int, channels: int, gpu: Gpu) -> Launch:
    """Return the counts of `linear_fp8` for up to 128 tokens (kernels/linear/fp8_kernel.py)."""
    plan = fp8_plan.chosen(tokens, rows, gpu.multiprocessors)
    clusters = -(-rows // (plan.rows * plan.cluster))
    rounds = -(-clusters // (gpu.multiprocessors // plan.cluster))
    steps = -(-channels // fp8_plan.BLOCK // plan.blocks)
    products = (
        fp8_plan.PRODUCTS * plan.consumers * 2 * fp8_plan.MMA_TOKENS * plan.rows * 32 / (2 * gpu.bf16_flops_clock)
    )
    step = STAGE_CLOCKS + plan.blocks * max(BLOCK_CLOCKS, products)
    loads = STAGE_CLOCKS + -(-plan.blocks * plan.tokens // 32) * SCALE_CLOCKS
    tile = (plan.rows + tokens / plan.cluster) * channels
    return Launch(
        name,
        ctas=min(clusters * plan.cluster, gpu.multiprocessors),
        memory=rows * channels + tokens * (channels + 2 * rows),
        l2=clusters * plan.cluster * tile + 2 * tokens * rows,
        busiest=rounds * tile,
        in_flight=plan.stages * plan.stage_bytes,
        clocks={"consumer": rounds * steps * step, "tokens": rounds * steps * loads},
        chain=step + STORE_CLOCKS,
        from_l2=1,
        ahead=min(1.0, plan.stages * plan.weight_bytes / (rounds * plan.rows * channels)),
    )


def deepgemm_hopper(name: str, tokens: int, rows: int, channels: int, gpu: Gpu) -> Launch:
    """Return the counts of DeepGEMM's FP8 product of many tokens: tiles of 128 x 128 on one multiprocessor each."""
    tiles = -(-rows // 128) * -(-tokens // 128)
    rounds = -(-tiles // gpu.multiprocessors)
    bytes_of_tile = 256 * channels
    # A block of 128 channels: products at the FP8 rate, and 128 x 128 sums scaled in fp32 beside them.
    block = 2 * 128**3 / (2 * gpu.bf16_flops_clock) + 128 * 128 / 128
    return Launch(
        name,
        ctas=min(tiles, gpu.multiprocessors),
        memory=rows * channels + tokens * (channels + 2 * rows),
        waves=rounds,
        l2=tiles * bytes_of_tile,
        busiest=rounds * bytes_of_tile,
        clocks={"tensor": rounds * channels / 128 * block},
        chain=STAGE_CLOCKS + STORE_CLOCKS,
        from_l2=1,
    )


def fp8_by_tcgen05(
    name: str,
    tokens: int,
    rows: int,
    channels: int,
    gpu: Gpu,
    plan: fp8_tcgen05_plan.Plan | None = None,
    sharing: int = 1,
) -> Launch:
    """Return the counts of `linear_fp8` on Blackwell (kernels/linear/fp8_tcgen05.py).

    Args:
        name: of the launch.
        tokens, rows, channels: T, N and K.
        gpu: its multiprocessors.
        plan: None for the chosen one.
        sharing: CTAs, with neighbouring rows, each of which loads a part of the tokens for all of them. No kernel has
            more than one.
    """
    plan = plan or fp8_tcgen05_plan.plan_for(tokens, rows, gpu.multiprocessors)
    tiles = fp8_tcgen05_plan.num_tiles(plan, tokens, rows)
    rounds = -(-tiles // gpu.multiprocessors)
    blocks = channels // fp8_tcgen05_plan.BLOCK
    of_tokens = min(tokens, plan.tokens) / sharing
    tile = (plan.rows + of_tokens) * channels
    first = min(1.0, plan.stages * plan.blocks / (rounds * blocks))  # of a CTA's weights
    stage = plan.rows * 128 + plan.tokens * 128
    # A block writes both operands' codes and scales into shared memory, and the tensor core reads M and N rows.
    port = (stage + (fp8_tcgen05_plan.LANES + plan.tokens) * 128 + 2 * 1024) / 128
    tensor = 2 * fp8_tcgen05_plan.LANES * max(plan.tokens, 64) * 128 / (2 * gpu.bf16_flops_clock)
    of_stage, of_block = TCGEN05_SCALE_INSTRUCTIONS
    instructions = of_stage + plan.blocks * of_block
    scales = gpu.fitted.issue_clocks * instructions + 2 * BARRIER_CLOCKS + 2 * LDMATRIX_CLOCKS
    ctas = min(tiles, gpu.multiprocessors)
    return Launch(
        name,
        ctas=ctas,
        memory=rows * channels + tokens * (channels + 2 * rows),
        l2=tiles * tile + 2 * tokens * rows,
        busiest=rounds * tile,
        in_flight=plan.stages * plan.blocks * stage,
        clocks={
            "port": rounds * blocks * port,
            "tensor": rounds * blocks * tensor,
            "scales": rounds * -(-blocks // plan.blocks) * scales,
            "floor": 2 * rows * tokens * channels / (2 * gpu.bf16_flops_clock) / ctas,
        },
        chain=STAGE_CLOCKS + STORE_CLOCKS,
        from_l2=1,
        ahead=first * plan.rows / (plan.rows + of_tokens),
    )


def in_fp32(
    name: str, tokens: int, rows: int, gpu: Gpu, groups: int = 1, channels: int = 4096, one_cta_ahead: bool = True
) -> Launch:
    """Return the counts of `linear_fp32` or, with several groups, `grouped_linear` (kernels/linear/gpu.py).

    Args:
        name: of the launch.
        tokens, rows, channels: T, N and K.
        gpu: its multiprocessors.
        groups: G.
        one_cta_ahead: whether tiles of one CTA read their weight ahead; they did not before 2026-11-28.
    """
    arch = ARCHITECTURES["sm90" if gpu.is_hopper else "sm100"]
    tile = invariant.chosen(arch, tokens, rows, groups, gpu.multiprocessors)
    if isinstance(tile, Tile):
        return by_mma_sync(name, tile, tokens, rows, groups, gpu, channels, one_cta_ahead)
    ctas = groups * -(-rows // tile.rows) * -(-tokens // tile.tokens)
    rounds = -(-ctas // gpu.multiprocessors)
    a_step = 2 * tile.rows * tile.tokens * CHUNK / gpu.bf16_flops_clock
    bytes_of_tile = (tile.rows + min(tokens, tile.tokens)) * channels * 2
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=groups * (rows + tokens) * channels * 2 + groups * tokens * rows * (4 if groups == 1 else 2),
        l2=ctas * bytes_of_tile,
        busiest=rounds * bytes_of_tile,
        in_flight=tile.stages * (tile.rows + tile.tokens) * 2 * CHUNK,
        clocks={"tensor": rounds * channels / CHUNK * a_step},
        chain=STAGE_CLOCKS + STORE_CLOCKS,
        from_l2=0,
    )


def by_mma_sync(
    name: str,
    tile: Tile,
    tokens: int,
    rows: int,
    groups: int,
    gpu: Gpu,
    channels: int = 4096,
    one_cta_ahead: bool = True,
) -> Launch:
    """Return the counts of a product by a tile of kernels/linear/kernel.py, or of cluster.py.

    The port of shared memory is `linear.gpu.port_clocks`: a warp's reads at 128 bytes a clock, what `cp.async` writes
    at 64, with zeros for tokens that do not exist. That rate was found from the times of the 64 x 64 and 128 x 128
    tiles on an H200, whose times do not depend on the number of tokens. Arguments as for `in_fp32`.
    """
    ctas = groups * -(-rows // tile.rows) * -(-tokens // tile.tokens) * tile.ctas
    shared = invariant.resident(tile)
    rounds = -(-ctas // (gpu.multiprocessors * shared))
    busiest_ctas = min(rounds * shared, -(-ctas // gpu.multiprocessors))
    width, k = min(tokens, tile.tokens), channels / tile.ctas
    flops = 2 * tile.rows * tile.tokens * k / (HOPPER_BF16 * MMA_SYNC_SHARE)
    chunks = k / CHUNK / tile.at_once
    dependent = CHUNK // 16 * MMA_SYNC_CLOCKS + LDMATRIX_CLOCKS + BARRIER_CLOCKS
    bytes_of_cta = (tile.rows + width) * k * 2
    together = min(shared, busiest_ctas)
    ahead = 0.0
    # Weights of the first stages. Weights of later stages, which are fetched into L2, are not counted.
    if groups == 1 and (tile.ctas > 1 or (one_cta_ahead and tile.at_once > 1)):
        ahead = min(1.0, (tile.stages - 1) / chunks) * tile.rows / (tile.rows + width) * together / busiest_ctas
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=groups * (rows + tokens) * channels * 2 + groups * tokens * rows * (4 if groups == 1 else 2),
        waves=ctas / (gpu.multiprocessors * shared),
        l2=ctas * bytes_of_cta,
        busiest=busiest_ctas * bytes_of_cta,
        in_flight=together * (tile.stages - 1) * tile.at_once * (tile.rows + width) * 2 * CHUNK,
        clocks={
            "tensor": busiest_ctas * flops,
            "port": busiest_ctas * k / CHUNK * invariant.port_clocks(tile),
            "chunks": rounds * chunks * dependent,
        },
        chain=(CLUSTER_CLOCKS if tile.ctas > 1 else (SEGMENTS - 1) * BARRIER_CLOCKS) + STORE_CLOCKS,
        from_l2=0,
        ahead=ahead,
    )


def wo_a_from_fp8(
    name: str, tokens: int, groups: int, gpu: Gpu, rows: int = 1024, channels: int = 4096, may_reside: bool = True
) -> Launch:
    """Return the counts of `grouped_linear_fp8_weight` (kernels/linear/fp8_weight.py, fp8_weight_resident.py).

    Args:
        name: of the launch.
        tokens: T.
        groups: output groups of the rank.
        gpu: its multiprocessors.
        rows, channels: of a group.
        may_reside: whether the weight of few groups may lie in shared memory; it did not before 2026-11-27.
    """
    row_tiles, steps = rows // fp8_weight_gpu.ROWS, channels // (SEGMENTS * fp8_weight_gpu.STEP)
    tile = fp8_weight_gpu.chosen(tokens, row_tiles * groups, steps, gpu.multiprocessors if may_reside else 0)
    resident = tile.rows < fp8_weight_gpu.ROWS
    cluster = fp8_weight_gpu.CLUSTER if resident else SEGMENTS
    token_tiles = -(-tokens // tile.tokens)
    ctas = cluster * row_tiles * token_tiles * groups
    shared = 1 if resident else 2
    together = min(shared, -(-ctas // gpu.multiprocessors))
    rounds = -(-ctas // (gpu.multiprocessors * shared))
    busiest_ctas = min(rounds * shared, -(-ctas // gpu.multiprocessors))
    k = channels // SEGMENTS
    width = min(tokens, tile.tokens)
    bytes_of_cta = tile.rows * k + width * k * 2
    of_warp = WO_A_INSTRUCTIONS[tile.tokens] * k / 1024
    return Launch(
        name,
        ctas=min(ctas, gpu.multiprocessors),
        memory=groups * rows * channels + tokens * groups * (2 * channels + rows),
        l2=ctas * bytes_of_cta,
        busiest=busiest_ctas * bytes_of_cta,
        in_flight=together * (tile.stages if resident else tile.stages - 1) * tile.stage_bytes,
        clocks={"issue": busiest_ctas * of_warp * tile.warps / 4},
        chain=STORE_CLOCKS + CLUSTER_CLOCKS,
        instructions=WO_A_FIXED,
        from_l2=3,
        ahead=1.0 if resident else 0.0,
    )
