"""Attention on Hopper (sm_90a): the choice of a kernel for a call, and its launch.

    cluster.py      few tokens with few keys: every step of 128 keys has a CTA; a token's CTAs are a cluster
    persistent.py   other calls: CTAs iterate over tokens, or splits of their keys, and over steps
    few_heads/      calls of at most FEW_HEADS heads: kernel.py, and tile.py for few tokens

The first two have the same bits (`persistent.py` says why), so the choice between them may depend on the batch and the
GPU. The kernels of few_heads/ have bits of their own, the same in any batch and on any GPU, so the
number of heads alone chooses them.
"""

import functools
from collections.abc import Callable, Sequence

import cutlass
import torch
from cutlass import Int32

from dsv4_kernels.host.addresses import address, row_bytes
from dsv4_kernels.host.arch import ARCHITECTURES, hardware_multiprocessors
from dsv4_kernels.host.launch import MOST_CTAS_IN_Y, current_stream, load_launcher
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.sparse_attention.problem import FEW_HEADS, Problem
from dsv4_kernels.sparse_attention.scratch import NUM_COUNTERS, Scratch
from dsv4_kernels.sparse_attention.sm90 import cluster, persistent
from dsv4_kernels.sparse_attention.sm90.cluster import MAX_CLUSTER
from dsv4_kernels.sparse_attention.sm90.few_heads import kernel as few_heads
from dsv4_kernels.sparse_attention.sm90.few_heads import tile as tile_of_few_heads
from dsv4_kernels.sparse_attention.sm90.few_heads.plan import (
    CTAS,
    FEW_TOKENS,
    MAX_ELEMENTS,
    MICROSECONDS,
    MOST_TILES,
    PARTS,
    PIECES,
    TILES_OF_STEP,
    FewHeads,
    TileOfFewHeads,
)
from dsv4_kernels.sparse_attention.sm90.plan import (
    CHANNEL_SPLITS,
    HEADS,
    LOG2_E,
    MAX_CTAS,
    MAX_SPLIT_TOKENS,
    MIN_CTAS_PER_TOKEN,
    ROW_STATS_BYTES,
    SLOT_BYTES,
    SLOTS_PER_CTA,
    Arguments,
    Configuration,
    Entries,
    Split,
)
from dsv4_kernels.sparse_attention.split import STEP_KEYS

ARCH = ARCHITECTURES["sm90"]
MAX_TOKENS = MOST_CTAS_IN_Y
"""Tokens of a launch of few_heads/ at most."""


def configurations() -> tuple[Configuration, ...]:
    """All configurations that a model's layers may need."""
    return tuple(
        Configuration(fp8_rows, entries, split, channel_splits)
        for fp8_rows in (True, False)
        for entries in Entries
        for split in Split
        for channel_splits in CHANNEL_SPLITS[split]
    )


def configurations_of_few_heads() -> tuple[FewHeads, ...]:
    """All configurations of the kernels for few heads."""
    kinds = (FewHeads, TileOfFewHeads)
    return tuple(kind(fp8_rows, entries) for kind in kinds for fp8_rows in (True, False) for entries in Entries)


def compile(configuration: Configuration | FewHeads) -> Callable[..., None]:
    """The launcher of a configuration: (arguments, CTAs, stream).

    "CTAs" are the CTAs of the launch for the persistent kernel, the CTAs of a cluster for the cluster kernel, and the
    clusters of the launch for the kernel for few heads.
    """
    launch = _launch_function(configuration)
    return load_launcher("sparse_attention_sm90", configuration, ARCH, launch, configuration, Arguments, Int32)


def _launch_function(configuration: Configuration | FewHeads) -> Callable[..., None]:
    if isinstance(configuration, TileOfFewHeads):
        return tile_of_few_heads.launch
    if isinstance(configuration, FewHeads):
        return few_heads.launch
    return cluster.launch if configuration.split == Split.STEPS else persistent.launch


def num_multiprocessors(device: torch.device) -> int:
    """CTAs that are resident at once: one a multiprocessor, at most MAX_CTAS."""
    return min(MAX_CTAS, hardware_multiprocessors(device))


@functools.cache
def num_clusters(device: torch.device) -> tuple[int, ...]:
    """Clusters that are resident at once, by the number of CTAs of a cluster.

    The first call queries all sizes, because a query loads a kernel, which is forbidden while a CUDA graph is captured.
    """
    device_info = cutlass.utils.HardwareInfo(device.index or 0)
    return 0, *(device_info.get_max_active_clusters(size) for size in range(1, MAX_CLUSTER + 1))


def sparse_attention(problem: Problem) -> None:
    """Writes `problem.out`.

    See `dsv4_kernels.sparse_attention.sparse_attention` for the definition.

    Raises:
        RuntimeError: a CUDA graph is being captured with `split_keys`, and no call that needs scratch memory has been
            made on the device.
        ValueError: `split_keys` is so small that a token has more KV splits than there are CTAs.
    """
    if problem.num_heads <= FEW_HEADS:
        _launch_few_heads(problem)
        return
    if channel_splits := _channel_splits_of_clusters(problem):
        launcher = compile(_configuration(problem, Split.STEPS, channel_splits))
        arguments = _arguments(problem, slice(0, problem.num_tokens))
        launcher(arguments, Int32(_cluster_size(problem)), current_stream(problem.q.device))
        return
    split = _divides(problem)
    step = MAX_SPLIT_TOKENS if split else problem.num_tokens
    for first in range(0, problem.num_tokens, step):
        _launch(problem, slice(first, min(first + step, problem.num_tokens)), split)


def _cluster_size(problem: Problem) -> int:
    """CTAs of a token with a CTA for every step."""
    return max(1, problem.max_steps)


def _channel_splits_of_clusters(problem: Problem) -> int:
    """The most channel splits with which every step of every token has its own CTA; 0 if no number fits on the GPU.

    At least two: exchanging all channels takes longer than the persistent kernel needs to combine.
    """
    size = _cluster_size(problem)
    if size > MAX_CLUSTER or problem.max_kv_splits > 1:
        return 0
    blocks = problem.num_tokens * -(-problem.num_heads // HEADS)
    fitting = (n for n in CHANNEL_SPLITS[Split.STEPS] if blocks * n <= num_clusters(problem.q.device)[size])
    return max(fitting, default=0)


def _divides(problem: Problem) -> bool:
    """Whether several CTAs may share a token's keys, which needs the kernel that combines partial results.

    Raises:
        ValueError: the keys exceed the range of the kernel's divisions.
    """
    if problem.split_keys is None:
        return False
    _check_divisions(problem)
    steps = problem.max_steps
    if problem.max_kv_splits > 1:
        return True
    # Measured on an H200: combining takes as long as one or two steps.
    ctas = num_multiprocessors(problem.q.device) // (problem.num_tokens * -(-problem.num_heads // HEADS))
    return (ctas >= 8 and steps > 1) or (ctas >= 4 and steps > 2)


def _check_divisions(problem: Problem) -> None:
    steps = problem.max_steps
    if problem.max_kv_splits * steps >= 1 << 20:
        raise ValueError(
            f"sparse_attention: a token of this call may have {steps} steps of {STEP_KEYS} keys in "
            f"{problem.max_kv_splits} KV splits; expected less than {1 << 20} as their product. Pass a larger "
            "split_keys, or None"
        )


def _channel_splits(problem: Problem, blocks: int, split: bool) -> int:
    """Channel splits for `blocks` pairs of a token and a block of heads.

    Every channel split computes the scores again, so dividing the keys has priority: channels are divided only if every
    step has its own CTA, or if there are too few steps to divide.
    """
    if problem.max_steps > 3 and not split:
        return 1
    ctas = num_multiprocessors(problem.q.device)
    tiles = blocks * (problem.max_steps if split else 1)
    possible = CHANNEL_SPLITS[Split.SUB_SPLITS if split else Split.NONE]
    return max(n for n in possible if n == 1 or tiles * n <= ctas)


def _launch(problem: Problem, tokens: slice, split: bool) -> None:
    device, num_tokens = problem.q.device, tokens.stop - tokens.start
    head_blocks = -(-problem.num_heads // HEADS)
    num_sms = num_multiprocessors(device)
    if split and problem.max_kv_splits * head_blocks > num_sms:
        raise ValueError(
            f"sparse_attention: split_keys {problem.split_keys} may divide a token of this call into "
            f"{problem.max_kv_splits} KV splits, times {head_blocks} blocks of heads; expected at most {num_sms} CTAs "
            "a token. Pass a larger split_keys"
        )
    channel_splits = _channel_splits(problem, num_tokens * head_blocks, split)
    num_ctas = num_sms // channel_splits * channel_splits  # all work tiles of a CTA have one channel split
    whole_tokens = num_tokens * head_blocks * channel_splits  # work tiles if keys are not divided
    ctas_per_token = num_ctas // whole_tokens
    few = ctas_per_token >= MIN_CTAS_PER_TOKEN
    kind = Split.NONE if not split else Split.SUB_SPLITS if few else Split.KV_SPLITS
    scratch = None
    if split:
        num_bytes = num_sms * SLOTS_PER_CTA * (SLOT_BYTES + ROW_STATS_BYTES)
        # Two for each token, block of heads and channel split (only few tokens have several), one for the launch.
        assert 2 * 2 * MAX_SPLIT_TOKENS + 1 <= NUM_COUNTERS
        scratch = Scratch.on(device, num_bytes)
    if not split:
        num_ctas = min(whole_tokens, num_ctas)
    arguments = _arguments(problem, tokens, scratch, ctas_per_token if few else 0)
    compile(_configuration(problem, kind, channel_splits))(arguments, Int32(num_ctas), current_stream(problem.q.device))


def _launch_few_heads(problem: Problem) -> None:
    _check_divisions(problem)
    configuration = _configuration_of_few_heads(problem)
    steps_per_kv_split = 0 if problem.split_keys is None else problem.split_keys // STEP_KEYS
    parts = _tiles_with_a_cta(problem) or _parts(problem)
    for first in range(0, problem.num_tokens, MAX_TOKENS):
        tokens = slice(first, min(first + MAX_TOKENS, problem.num_tokens))
        arguments = _arguments(problem, tokens, ctas_per_token=parts)
        arguments = arguments._replace(steps_per_kv_split=steps_per_kv_split)
        clusters = tokens.stop - tokens.start
        if parts == 1:
            clusters = min(clusters, num_multiprocessors(problem.q.device) * CTAS)
        compile(configuration)(arguments, Int32(clusters), current_stream(problem.q.device))


def _configuration_of_few_heads(problem: Problem) -> FewHeads:
    kind = TileOfFewHeads if _tiles_with_a_cta(problem) else FewHeads
    return kind(problem.row_format is RowFormat.FP8, _entries(problem))


def _tiles_with_a_cta(problem: Problem) -> int:
    """CTAs of a token in the kernel with a CTA for each tile (few_heads/tile.py), or 0 for the other kernel.

    All CTAs must find room at once, two on a multiprocessor: a cluster needs room for half of its CTAs. Only tokens
    whose entries are in a page table may have more tiles than CTAs. The kernel merges the tiles of one KV split, so a
    token of so many tiles must have no second one.
    """
    tiles, clusters = max(1, problem.max_steps) * TILES_OF_STEP, num_clusters(problem.q.device)
    sizes = (tiles,) if tiles <= MOST_TILES else ()
    if _entries(problem) is Entries.PAGES and problem.max_kv_splits <= MAX_ELEMENTS * PARTS[-1]:
        sizes = (*sizes, *(size for size in (MOST_TILES, PARTS[-1]) if size < tiles))
    if problem.num_tokens > FEW_TOKENS:
        return 0
    if problem.split_keys is not None:
        sizes = tuple(size for size in sizes if size <= problem.split_keys // STEP_KEYS * TILES_OF_STEP)
    return next((size for size in sizes if problem.num_tokens <= clusters[size // CTAS]), 0)


def _parts(problem: Problem) -> int:
    clusters = num_clusters(problem.q.device)
    return parts_of_few_heads(problem.num_tokens, problem.max_steps, problem.max_kv_splits, clusters)[0]


def parts_of_few_heads(num_tokens: int, steps: int, kv_splits: int, clusters: Sequence[int]) -> tuple[int, int, int]:
    """(CTAs among which a token's leaves (few_heads/elements.py) are divided, leaves, most tiles of a CTA): the fastest
    number of CTAs by MICROSECONDS.

    Args:
        num_tokens: of a launch.
        steps, kv_splits: the most of a token.
        clusters: by their CTAs, the clusters that run at once with a CTA on each multiprocessor.
    """
    tiles = steps * TILES_OF_STEP
    elements = max(kv_splits, min(PIECES, tiles))  # the most elements of a token

    def by_tiles(n: int) -> bool:
        return PIECES < n and elements < tiles <= MAX_ELEMENTS * n and kv_splits == 1

    def of_part(n: int) -> tuple[int, int, int]:
        leaves = tiles if by_tiles(n) else elements
        return n, leaves, -(-tiles * -(-leaves // n) // leaves) if tiles else 0

    def microseconds(part: tuple[int, int, int]) -> float:
        n, _, tiles_of_part = part
        ctas = CTAS if num_tokens > clusters[n] else 1
        beginning, of_a_tile = MICROSECONDS[ctas]
        return -(-num_tokens // (clusters[n] * ctas)) * (beginning + of_a_tile * tiles_of_part)

    divided = (n for n in PARTS[1:] if by_tiles(n) or n <= elements <= MAX_ELEMENTS * n)
    return min(map(of_part, (1, *(n for n in divided if clusters[n]))), key=microseconds)


def _entries(problem: Problem) -> Entries:
    if problem.entry_indices is not None:
        return Entries.LIST
    return Entries.NONE if problem.page_table is None else Entries.PAGES


def _configuration(problem: Problem, split: Split, channel_splits: int) -> Configuration:
    return Configuration(
        fp8_rows=problem.row_format is RowFormat.FP8,
        entries=_entries(problem),
        split=split,
        channel_splits=channel_splits,
    )


def _arguments(problem: Problem, tokens: slice, scratch: Scratch | None = None, ctas_per_token: int = 0) -> Arguments:
    entry_list = problem.entry_indices[tokens] if problem.entry_indices is not None else problem.page_table
    q, out, window_rows = problem.q[tokens], problem.out[tokens], problem.window_rows[tokens]
    return Arguments(
        q=address(q),
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        num_tokens=tokens.stop - tokens.start,
        num_heads=problem.num_heads,
        window=address(problem.window_storage),
        window_page_bytes=row_bytes(problem.window_storage),
        window_rows=address(window_rows),
        window_rows_stride=window_rows.stride(0),
        window_width=problem.window_slots,
        entries=address(problem.entry_storage),
        entries_page_bytes=row_bytes(problem.entry_storage),
        entry_list=address(entry_list),
        entry_list_stride=0 if entry_list is None else entry_list.stride(0),
        num_entries=problem.max_entry_slots,
        entries_per_page=problem.entries_per_page,
        token_to_request=address(problem.token_to_request, tokens),
        visible=address(problem.visible, tokens),
        sink=address(problem.sink),
        out=address(out),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        scale_log2=problem.scale * LOG2_E,
        steps_per_kv_split=problem.split_keys // STEP_KEYS if scratch else 0,
        ctas_per_token=ctas_per_token,
        scratch=address(scratch and scratch.slots),
        counters=address(scratch and scratch.counters),
    )
