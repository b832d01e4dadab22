"""The indexer on a GPU: scores are written to a bounded buffer and the top-k chosen from it, for as many tokens at a
time as fit.

The launches depend on shapes alone, so a CUDA graph can capture them: CTAs read from memory how many entries their
token sees.

Each architecture has a score kernel for prefills beside that of decode steps, and both give a token the same scores:
they weight and add heads alike, and their instructions (`mma.sync`; `wgmma`, `tcgen05.mma`) sum the same sets of 16
channels in the same order. On Hopper they were measured to have the same bits.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from cutlass import Int32, Int64
from torch import Tensor

from dsv4_kernels.host.arch import ARCHITECTURES, architecture
from dsv4_kernels.host.launch import MOST_CTAS_IN_Y, current_stream
from dsv4_kernels.host.strides import check_rows, stride_bytes
from dsv4_kernels.indexer import SCRATCH_BYTES, prefill_scores, prefill_tcgen05, scores, topk
from dsv4_kernels.kv_layout import PAGE_ROWS, KVRows, RowFormat
from dsv4_kernels.model_shapes import ModelShapes

RUNS = 64
"""The most CTAs of one token: each CTA gets as many pages as this limit requires, and at least PAGES_A_CTA."""
PAGES_A_CTA = 4
FEW_TOKENS = {"sm90": 16, "sm100": 128}
"""Implementation -> the most tokens of a call that gets the kernels for few tokens, whose time is one CTA's chain of
loads. An H200 was measured up to 16 tokens; by the model of time (docs/step_model.md) both gain up to 128."""
CTAS_OF_FEW = 264
"""Score CTAs of a call of few tokens: two for each multiprocessor of an H200."""
RUNS_OF_FEW = 32
"""The fewest score CTAs of a token in a call of few tokens: a request much longer than the others is shared."""


def tokens_at_a_time(tokens: int, max_entries: int) -> int:
    """Number of tokens whose scores are in the buffer together, and whose CTAs are in one grid.

    Args:
        tokens: of the call.
        max_entries: of a token; the page table has room for them.
    """
    return max(1, min(tokens, SCRATCH_BYTES // max(1, 4 * max_entries), MOST_CTAS_IN_Y))


def score_kernels(arch: str) -> tuple[ModuleType, ModuleType]:
    """The modules of the score kernels: decode's, and prefill's."""
    return scores, prefill_scores if arch == ARCHITECTURES["sm90"] else prefill_tcgen05


def _run(
    name: str,
    q: Tensor,
    head_weights: Tensor,
    keys: KVRows,
    page_table: Tensor,
    entries_per_page: int,
    token_to_request: Tensor,
    visible: Tensor,
    top_k: int,
    row_pages: Tensor,
    prefill: bool,
) -> Tensor:
    heads = _check(q, head_weights, keys, entries_per_page, (page_table, token_to_request, visible, row_pages))
    tokens, device = q.shape[0], q.device
    rows = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    num_pages = page_table.shape[1]
    if not tokens or not num_pages:
        return rows.fill_(-1)
    arch, stream = architecture(name, device), current_stream(device)
    at_a_time = tokens_at_a_time(tokens, num_pages * PAGE_ROWS)
    score_kernel, of_prefill = score_kernels(arch)
    few_tokens = tokens <= FEW_TOKENS[name] and not prefill
    pages_a_cta = max(PAGES_A_CTA, -(-num_pages // RUNS))
    runs = -(-num_pages // pages_a_cta)
    if few_tokens:
        runs = min(num_pages, max(RUNS_OF_FEW, CTAS_OF_FEW // tokens))
    elif prefill:
        score_kernel, pages_a_cta = of_prefill, of_prefill.pages_a_cta(at_a_time, num_pages)
        runs = -(-num_pages // pages_a_cta)
    options = (True,) if few_tokens else ()
    buffer = None
    if num_pages * PAGE_ROWS > top_k:
        buffer = torch.empty(at_a_time, num_pages * PAGE_ROWS, dtype=torch.float32, device=device)
    for begin in range(0, tokens, at_a_time):
        count = min(at_a_time, tokens - begin)
        of_tokens = {
            "token_to_request": Int64(token_to_request.data_ptr() + 4 * begin),
            "visible": Int64(visible.data_ptr() + 4 * begin),
            "top_k": Int32(top_k),
            "scores": Int64(buffer.data_ptr() if buffer is not None else 0),
            "scores_row_bytes": Int64(num_pages * PAGE_ROWS * 4),
        }
        if buffer is not None:
            score_arguments = scores.Arguments(
                q=q.data_ptr() + begin * stride_bytes(q, 0),
                q_token_bytes=stride_bytes(q, 0),
                head_weights=head_weights.data_ptr() + begin * stride_bytes(head_weights, 0),
                head_weights_token_bytes=stride_bytes(head_weights, 0),
                keys=keys.storage.data_ptr(),
                page_bytes=stride_bytes(keys.storage, 0),
                page_table=page_table.data_ptr(),
                page_table_row_bytes=stride_bytes(page_table, 0),
                pages_a_cta=pages_a_cta,
                **of_tokens,
            )
            score_kernel.compile(arch, heads, *options)(score_arguments, Int32(runs), Int32(count), stream)
        topk_arguments = topk.Arguments(
            row_pages=row_pages.data_ptr(),
            row_pages_row_bytes=stride_bytes(row_pages, 0),
            rows=rows.data_ptr() + begin * top_k * 4,
            **of_tokens,
        )
        topk.compile(arch, few_tokens)(topk_arguments, Int32(count), stream)
    return rows


def _check(q: Tensor, head_weights: Tensor, keys: KVRows, entries_per_page: int, lists: tuple[Tensor, ...]) -> int:
    """The number of heads, after a check that the kernels support the arguments.

    Raises:
        ValueError: arguments that the kernels do not support.
    """
    heads = q.shape[1]
    check_rows("index_topk: q", q, scores.KEY_DIM)
    if heads % scores.HEADS_A_TILE or not 0 < heads <= 64 or q.stride(1) != scores.KEY_DIM:
        raise ValueError(
            f"index_topk on a GPU takes a multiple of {scores.HEADS_A_TILE} heads, at most 64, side by side; got "
            f"{heads} with stride {q.stride(1)}. The implementation 'ref' takes any"
        )
    if keys.format is not RowFormat.INDEX_FP4 or entries_per_page != PAGE_ROWS:
        raise ValueError(
            f"index_topk on a GPU reads FP4 keys in pages of {PAGE_ROWS} entries; got {keys.format.value} keys in "
            f"pages of {entries_per_page}. The implementation 'ref' takes any"
        )
    for tensor in (head_weights, *lists):
        expected = torch.float32 if tensor is head_weights else torch.int32
        if tensor.dtype != expected or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            raise ValueError(
                f"index_topk on a GPU takes contiguous rows of {expected}; got {tensor.dtype} {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
    return heads


def sm90(*arguments: object) -> Tensor:
    """`dsv4_kernels.indexer.index_topk` on Hopper."""
    return _run("sm90", *arguments)


def sm100(*arguments: object) -> Tensor:
    """`dsv4_kernels.indexer.index_topk` on Blackwell (B200, GB200, B300)."""
    return _run("sm100", *arguments)


def compile_jobs(model: ModelShapes, arch: str) -> list[Callable[[], object]]:
    """Compile jobs of the score kernels and of the top-k kernels; none for a model without an indexer."""
    if not model.index_heads:
        return []
    scores_of = [partial(kernel.compile, arch, model.index_heads) for kernel in score_kernels(arch)]
    of_few = [partial(scores.compile, arch, model.index_heads, True), partial(topk.compile, arch, True)]
    return [*scores_of, partial(topk.compile, arch), *of_few]
