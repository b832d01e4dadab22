"""A request's answer does not depend on how the others in its batch are sampled, and a seed decides what it draws.

Greedy requests: SGLang's sampler takes ``argmax`` and ``log_softmax`` of the logits if all requests of a batch are
greedy, and else the likeliest of ``softmax(logits / temperature)`` and its logarithm. What makes the two the same:

* log-probabilities are ``log_softmax`` always, as in SGLang's deterministic mode;
* a greedy row gets the ``argmax`` of its logits also beside others: ``softmax`` may round two logits to one number;
* ``top_k = 1`` with a temperature is greedy, and its temperature is 1: SGLang divides by it only beside others.

Seeds, ``sampling_seed`` (``seed`` in the chat API): SGLang 0.5.23 reads them only under
``--enable-deterministic-inference``, where a request without one has 42, and otherwise drops them without a word. Its
sampler does take seeds, one a row: so as soon as one request of a batch has one, every row gets one, random where none
was asked for (42 under that flag). What keeps a seeded row independent of the others:

* the draw is keyed by (seed, position) of the row alone;
* SGLang draws over the sorted vocabulary if some row limits top_k or top_p and over the unsorted one if none does, and
  the draw depends on which: a batch with seeds is always sorted, and equal probabilities by token id;
* where top_p cuts is decided by sums, whose last bit on a GPU depends on the number of rows if they are summed in fp32:
  here they are whole numbers, which add up alike in any order;
* min_p of any row is applied too, which SGLang refuses beside seeds.

Penalties are a subject of their own: :mod:`sglang_dsv4.requests.penalties`.

On CUDA only SGLang's pytorch sampler takes seeds; flashinfer's asserts and would end the server. It is the faster one
and every request would pay for another choice, so a seed gets a 400 there that names ``--sampling-backend pytorch``.
The rejection sampling of speculative decoding draws elsewhere on a GPU, so seeds get a 400 there as well; on a CPU its
EAGLE's tokens are drawn as here (``cpu.speculation``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sglang_dsv4.seam.hooks import LOG_SOFTMAX
from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_unseeded = random.Random()
"""Seeds of requests that have none. All ranks of a server draw the same ones: each must choose the same tokens."""


def start(result: None, scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """After ``Scheduler.__init__``: seed the ranks' random numbers alike, and choose ``log_softmax``."""
    if live_parts() is None:
        return
    _unseeded.seed(scheduler.random_seed)
    set_attribute(scheduler.tp_worker.model_runner.sampler, LOG_SOFTMAX)


def use_log_softmax(before: bool, sampler: Sampler) -> bool:
    """True, for ``Sampler.enable_deterministic``: log-probabilities are ``log_softmax``, and softmax is PyTorch's.

    The attribute changes nothing else, and softmax is PyTorch's on most devices without it, too.
    """
    return True


def ignore_greedy_temperatures(result: None, info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """A greedy request of a new batch has the temperature 1, whatever it says."""
    temperatures = [1.0 if is_greedy(req) else req.sampling_params.temperature for req in batch.reqs]
    if live_parts() is not None and temperatures != [req.sampling_params.temperature for req in batch.reqs]:
        info.temperatures = torch.tensor(temperatures).view(-1, 1).to(info.temperatures, non_blocking=True)


def note_greedy_tokens(logits: Tensor, sampler: Sampler, _: Tensor, sampling_info: SamplingBatchInfo) -> None:
    """After ``Sampler._preprocess_logits``, whose `logits [batch, vocab]` SGLang overwrites with probabilities.

    Arguments are named as SGLang's: it gives `sampling_info` by name where only log-probabilities are wanted.
    """
    info = sampling_info
    mixed = live_parts() is not None and info.is_any_greedy and not info.is_all_greedy
    if mixed and getattr(info, "greedy_tokens", None) is None:  # with watermarks it is called twice
        info.greedy_tokens = logits.argmax(-1)


def take_greedy_tokens(
    sampled: tuple[Tensor, Any], sampler: Sampler, probs: Tensor, info: SamplingBatchInfo, *args: Any
) -> tuple[Tensor, Any] | None:
    """After ``Sampler._sample_from_probs``: the tokens [batch], greedy ones as :func:`note_greedy_tokens` found them.

    Where a request wants its sampling mask, SGLang's tokens stay: the mask must hold them.
    """
    (tokens, mask), greedy = sampled, getattr(info, "greedy_tokens", None)
    if greedy is None or mask is not None:
        return None
    info.greedy_tokens = None
    return torch.where(info.top_ks <= 1, greedy.to(tokens.dtype), tokens), mask


def is_greedy(req: Req) -> bool:
    """Whether it draws nothing; SGLang makes ``top_k = 1`` of a temperature of 0."""
    return req.sampling_params.top_k <= 1


def seed_of(req: Req) -> int | None:
    """The seed that a request asks for; None also if it is greedy and draws nothing."""
    return None if is_greedy(req) else req.sampling_params.sampling_seed


def reason_against_seeds(sampling_backend: str, speculative_algorithm: str | None) -> str | None:
    """Why this server can't honour a seed, for a 400; None if it can."""
    if speculative_algorithm is not None:
        return "sampling_seed (seed) is not supported by a server with --speculative-algorithm; send none."
    if sampling_backend != "pytorch":
        return (
            f"sampling_seed (seed) is not supported by this server's sampling backend {sampling_backend!r}; send none, "
            "or start the server with --sampling-backend pytorch."
        )
    return None


def fill_seeds(result: None, info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """Gives each request of a new batch a seed if one of them asks for one."""
    seeds = [seed_of(req) for req in batch.reqs]
    if live_parts() is None:
        return
    if info.sampling_seed is not None:  # deterministic inference: SGLang has filled them in
        info.need_top_k_sampling = True
    elif any(seed is not None for seed in seeds):
        _set_seeds(info, seeds)


def align_seeds(info: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    """Before two batches become one: SGLang drops the seeds of one if the other has none."""
    for this, that in ((info, other), (other, info)):
        if this.sampling_seed is None and that.sampling_seed is not None:
            _set_seeds(this, [None] * len(this))


def _set_seeds(info: SamplingBatchInfo, seeds: list[int | None]) -> None:
    filled = [_unseeded.getrandbits(63) if seed is None else seed for seed in seeds]
    info.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(info.device, non_blocking=True)
    info.need_top_k_sampling = True  # always over the sorted vocabulary; "all" stays the limit of who set none


WHOLE = 2**40
"""Of a probability of 1, as a whole number. A vocabulary's roundings are off by 2**-23 of it together, at most."""


def sample_with_seeds(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    *,
    return_filtered_probs: bool = False,
    **options: Any,
) -> Any:
    """In place of SGLang's ``top_k_top_p_min_p_sampling_from_probs_torch`` [batch, vocab], for a batch with seeds.

    What is left of a row is decided by the row alone: its top_k first tokens of those sorted by probability and then
    by id, of these the ones before which at most top_p lies, and of these the ones with min_p of the likeliest.
    """
    if sampling_seed is None:
        return original(
            probs,
            top_ks,
            top_ps,
            min_ps,
            need_min_p_sampling,
            sampling_seed,
            positions,
            return_filtered_probs=return_filtered_probs,
            **options,
        )
    left, ids = probs.sort(dim=-1, descending=True, stable=True)
    whole = (left.double() * WHOLE).round_().long()
    before = whole.cumsum(-1) - whole
    kept = torch.arange(left.shape[1], device=left.device) < top_ks.view(-1, 1)
    kept &= (before <= (top_ps.double() * WHOLE).view(-1, 1)) | (top_ps >= 1.0).view(-1, 1)
    if need_min_p_sampling:
        kept &= left >= left[:, :1] * min_ps.view(-1, 1)
    left = left.masked_fill_(~kept, 0.0)
    chosen = draw_by_seed(left.double().log_(), sampling_seed, positions)
    ids = ids.to(torch.int32)
    tokens = ids.gather(1, chosen).view(-1)
    return (tokens, left, ids, left.gather(1, chosen).view(-1)) if return_filtered_probs else tokens


def draw_by_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """SGLang's ``multinomial_with_seed``, which :func:`draw` is around."""
    from sglang.srt.layers import sampler

    return sampler.multinomial_with_seed(logprobs, seed, positions)


def draw(original: Callable[..., Tensor], logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Around SGLang's ``multinomial_with_seed``: ``argmax(logprobs + gumbel noise)``, [batch, vocab] -> [batch, 1].

    SGLang's hash of (seed, position, column) is a Triton kernel. On a CPU the noise comes from Philox, keyed likewise.
    """
    if logprobs.device.type != "cpu":
        return original(logprobs, seed, positions)
    noise = torch.empty(logprobs.shape, dtype=torch.float64)
    for row, (key, position) in enumerate(zip(seed.tolist(), positions.tolist(), strict=True)):
        generator = np.random.Generator(np.random.Philox(key=np.array([key % 2**64, position], np.uint64)))
        noise[row] = torch.from_numpy(generator.standard_exponential(logprobs.shape[1]))
    return (logprobs.double() - noise.log_()).argmax(1, keepdim=True)
