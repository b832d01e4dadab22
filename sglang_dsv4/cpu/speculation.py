"""Speculation on a machine with no GPU: PyTorch versions of SGLang's Triton kernels for drafts.

They serve chains of drafts only: EAGLE with topk 1, and DSPARK. Rows of `seam.hooks` replace SGLang's
functions by these on a CPU; SGLang's workers, scheduler and allocator are unchanged.

EAGLE's verification draws the target's token of every row as a decode step would, and accepts the drafts that equal
the drawn tokens. The result has the distribution of SGLang's target-only sampling: a draft is accepted with the
target's probability of it, and the token after the last accepted draft follows the target's distribution without the
refused draft. With a seed the drawn tokens equal those of a server without speculation. DSPARK's drafts are drawn, too,
and its verification compares the draft's and the target's distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dsv4.seam import compat
from sglang_dsv4.seam.install import attribute_set
from sglang_dsv4.seam.live import live_parts
from sglang_dsv4.seam.rows.cpu import RESOLVING_VIEW

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_info import EagleVerifyInput


def last_locations(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """`get_last_loc`: the pool slot of each request's last token, [B] in `prefix_lens`' dtype; -1 for no token."""
    rows = req_to_token[req_pool_indices.long(), (prefix_lens - 1).clamp(min=0).long()]
    return torch.where(prefix_lens > 0, rows.to(prefix_lens.dtype), -1)


def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """`assign_req_to_token_pool_func`: write request b's new pool slots to positions [start[b], end[b]) of its row."""
    begin = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for slot, start, end in spans:
        if end > start:  # else no slot was allocated, and `out_cache_loc` is None
            req_to_token[slot, start:end] = out_cache_loc[begin : begin + end - start].to(req_to_token.dtype)
            begin += end - start


def slots_of_steps(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    draft_token_num: int,
    **sizes: object,
) -> Tensor:
    """The pool slots of each request's next tokens, [B * draft_token_num] int64; a function of SGLang's platform."""
    positions = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], positions].long().flatten()


def assign_draft_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """`assign_draft_cache_locs_contiguous_func`: write a chain's pool slots to `out_cache_loc [B * num_cols]`."""
    assert topk == 1 and positions is None and mrope is None, (
        "a CPU drafts chains, and their positions are computed elsewhere"
    )
    out_cache_loc.copy_(
        slots_of_steps(
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            start_offset=seq_lens,
            draft_token_num=num_cols,
        )
    )


def build_chain(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """`build_tree_kernel_efficient_func` for chains: fill `positions [B * k]` and the links [B, k].

    `tree_mask` is not written: our attention is causal and reads none.
    """
    assert topk == 1, "a CPU drafts chains"
    k = num_verify_tokens
    steps = torch.arange(k)
    positions.copy_((seq_lens.long()[:, None] + steps).flatten())
    retrieve_index.copy_(torch.arange(seq_lens.shape[0] * k).view(-1, k))
    retrieve_next_token.copy_(torch.where(steps < k - 1, steps + 1, -1))
    retrieve_next_sibling.fill_(-1)


def fill_bonus_tokens(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """`fill_bonus_tokens_func`: write the last of each request's `accept_tokens [B * stride]` to `bonus_tokens [B]`."""
    last = torch.arange(batch_size) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def verify(
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: GrammarMask | None = None,
    uno_target_max_top_k: int | None = None,
    *,
    watermark_state: object = None,
    watermark_full_mask: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`eagle_sample`: accept drafts, and draw the token after them.

    `requests.sampling.drafts` has applied penalties, grammar and biases to the logits before.

    Returns:
        the target's token after every row, [B * k] int32; the number of tokens that each request keeps, [B] int32; the
        rows of these tokens, [B, k] int32, -1 after the last one.

    Raises:
        NotImplementedError: the model is of another architecture, or a request is to be watermarked.
    """
    if live_parts() is None:
        raise NotImplementedError("sglang-dsv4 verifies drafts on a CPU only for DeepSeek-V4 models")
    k = verify_input.draft_token_num
    if batch.forward_mode.is_idle():
        return (torch.empty(0, dtype=torch.int32),) * 3
    if watermark_state is not None and batch.sampling_info.has_watermark_candidates:
        raise NotImplementedError("sglang-dsv4 does not support watermarks with speculation on a CPU")
    logits, info = logits_output.next_token_logits, batch.sampling_info
    assert grammar_mask is None, "the hook before this function applies it"
    positions = (batch.seq_lens.long()[:, None] + torch.arange(k)).flatten()
    predicted = draw_rows(logits, info, positions).view(-1, k)
    return chain_of(predicted, verify_input.draft_token.view(-1, k))


def chain_of(predicted: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result of :func:`verify` for the target's tokens and the drafts, both [B, k]; column 0 is always kept."""
    bs, k = candidates.shape
    matches = (candidates[:, 1:] == predicted[:, :-1]).int().cumprod(1)
    accept_lens = (1 + matches.sum(1)).int()
    rows = torch.arange(bs * k, dtype=torch.int32).view(bs, k)
    accept_index = rows.masked_fill(torch.arange(k) >= accept_lens[:, None], -1)
    return predicted.flatten().int(), accept_lens, accept_index


def draw_rows(logits: Tensor, info: SamplingBatchInfo, positions: Tensor) -> Tensor:
    """The target's token of each row as SGLang's sampler draws it, [B * k] integers.

    Args:
        logits: [B * k, V], the rows of a request adjacent.
        info: of the B requests.
        positions: [B * k] int64, the positions of the rows' tokens, with which seeds are combined.
    """
    from sglang.kernels.ops.sampling import softmax
    from sglang.srt.layers import sampler

    if info.is_all_greedy:
        return logits.argmax(-1)
    k = logits.shape[0] // info.temperatures.shape[0]

    def by_row(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(k, 0)

    probs, seed = softmax(logits / by_row(info.temperatures)), by_row(info.sampling_seed)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return sampler.sampling_from_probs_torch(probs, sampling_seed=seed, positions=positions)
    return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        by_row(info.top_ks),
        by_row(info.top_ps),
        by_row(info.min_ps),
        info.need_min_p_sampling,
        seed,
        positions,
    )


class _OnAGpu:
    """The server's arguments, except that the device is a GPU."""

    device = "cuda"

    def __init__(self, arguments: object) -> None:
        self._arguments = arguments

    def __getattr__(self, name: str) -> object:
        return getattr(self._arguments, name)


def resolve_dspark(original: Callable[[ServerArgs], None], server_args: ServerArgs) -> None:
    """Run SGLang's resolution step for DSPARK, which refuses a CPU, with arguments whose device is a GPU."""
    from sglang.srt.arg_groups import speculative_hook

    if compat.resolving_view(server_args).device != "cpu":
        return original(server_args)
    with attribute_set(speculative_hook, RESOLVING_VIEW):
        return original(server_args)


def view_as_on_a_gpu(view: Callable[[ServerArgs], Any], module: ModuleType) -> Callable[[ServerArgs], _OnAGpu]:
    """The value of ``speculative_hook.resolving_view``: SGLang's view, except that the device is a GPU."""
    return lambda record: _OnAGpu(view(record))


def keep_for_stream(original: Callable[..., None], tensor: Tensor, stream: object) -> None:
    """Call `Tensor.record_stream`, except for CPU tensors: it refuses them, and no kernel outlives a call on a CPU."""
    if tensor.device.type != "cpu":
        original(tensor, stream)


def accept_block(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    block_verification: bool = False,
    **links_and_thresholds: object,
) -> None:
    """`chain_speculative_sampling_triton`: accept drafts that were drawn from `draft_probs`, and draw the next token.

    A draft x is accepted with probability min(1, p(x) / q(x)). After the first refused draft the token is drawn from
    max(0, p - q), normalised; after a block without a refused draft, from p.

    Args:
        predicts: [B * k] int32, written: the accepted tokens and the next one, each at the row of the token before it.
        accept_index: [B, k] int32, written: the rows of these tokens.
        accept_token_num: [B] int32, written: the number of accepted drafts.
        candidates: [B, k], the last verified token and the drafts.
        uniform_samples: [B, k - 1] or wider, in [0, 1); column i is for draft i.
        uniform_samples_for_final_sampling: [B], in [0, 1).
        target_probs: [B, k, V], p.
        draft_probs: [B, k - 1, V], q.

    Raises:
        NotImplementedError: block verification is asked for.
    """
    if block_verification:
        raise NotImplementedError("sglang-dsv4 does not support --speculative-use-block-verification on a CPU")
    bs, k = candidates.shape
    for request in range(bs):
        kept, rest = 0, target_probs[request, k - 1]
        for step in range(k - 1):
            p, q = target_probs[request, step], draft_probs[request, step]
            token = int(candidates[request, step + 1])
            if not float(uniform_samples[request, step] * q[token]) < float(p[token]):
                rest = (p - q).clamp(min=0)
                rest = rest if float(rest.sum()) > 0 else p
                break
            predicts[request * k + step] = token
            kept += 1
        drawn = uniform_samples_for_final_sampling[request].double() * rest.double().sum()
        token = int((rest.double().cumsum(0) <= drawn).sum())
        # By rounding the sum may end below `drawn`: then the last token with a probability is drawn.
        predicts[request * k + kept] = min(token, int(rest.nonzero().max()))
        accept_token_num[request] = kept
        accept_index[request, : kept + 1] = torch.arange(request * k, request * k + kept + 1, dtype=torch.int32)
