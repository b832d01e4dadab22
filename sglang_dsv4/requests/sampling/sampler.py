"""Sampling in which a request's tokens do not depend on the other requests of its batch, and a seed decides its draws.

Greedy requests: if all requests of a batch are greedy, SGLang's sampler computes ``argmax`` and ``log_softmax`` of the
logits; else it computes the most likely token of ``softmax(logits / temperature)`` and the logarithm of that. Three
changes make the results equal:

* log-probabilities are always ``log_softmax``, as in SGLang's deterministic mode;
* a greedy row always gets the ``argmax`` of its logits, since ``softmax`` may round two logits to one number;
* a request with ``top_k = 1`` is greedy, and its temperature is 1, by which SGLang divides in mixed batches only.

Seeds, ``sampling_seed`` (``seed`` in the chat API): SGLang 0.5.23 reads them only under
``--enable-deterministic-inference``, where the default seed is 42; else it ignores them without a message. Its sampler
does accept one seed a row. So if one request of a batch has a seed, every row gets one: the request's own, else a
random one (42 under that flag). Four rules keep a seeded row independent of the others:

* a row's draw is keyed by its seed and position only;
* SGLang draws over the sorted vocabulary if a row limits top_k or top_p, else over the unsorted one, and the draw
  depends on the order: a batch with seeds is always sorted, equal probabilities by token id;
* top_p is compared with sums of probabilities, whose last bit on a GPU depends on the number of rows in fp32: here
  probabilities are integers, whose sum does not depend on the order;
* min_p of every row is applied; SGLang refuses it together with seeds.

Penalties are in :mod:`sglang_dsv4.requests.sampling.penalties`.

On CUDA only SGLang's pytorch sampler accepts seeds; flashinfer's has an assertion that would end the server. As
flashinfer's is the faster one for all requests, a seed gets a 400 there that names ``--sampling-backend pytorch``.
Speculative decoding on a GPU draws in other code, so seeds get a 400 there, too; on a CPU EAGLE's tokens are drawn as
here (``cpu.speculation``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.live import live_parts
from sglang_dsv4.seam.rows.sampling import LOG_SOFTMAX

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_unseeded = random.Random()
"""Random seeds for requests without one. All ranks draw the same seeds, since they must choose the same tokens."""


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
    """Set the temperature of every greedy request in a new batch to 1."""
    temperatures = [1.0 if is_greedy(req) else req.sampling_params.temperature for req in batch.reqs]
    if live_parts() is not None and temperatures != [req.sampling_params.temperature for req in batch.reqs]:
        info.temperatures = torch.tensor(temperatures).view(-1, 1).to(info.temperatures, non_blocking=True)


def note_greedy_tokens(logits: Tensor, sampler: Sampler, _: Tensor, sampling_info: SamplingBatchInfo) -> None:
    """Keep the argmax of `logits [batch, vocab]`, which SGLang overwrites with probabilities.

    Runs after ``Sampler._preprocess_logits``. The arguments have SGLang's names, since it passes `sampling_info` by
    name where only log-probabilities are wanted.
    """
    info = sampling_info
    mixed = live_parts() is not None and info.is_any_greedy and not info.is_all_greedy
    if mixed and getattr(info, "greedy_tokens", None) is None:  # SGLang calls it twice with watermarks
        info.greedy_tokens = logits.argmax(-1)


def take_greedy_tokens(
    sampled: tuple[Tensor, Any], sampler: Sampler, probs: Tensor, info: SamplingBatchInfo, *args: Any
) -> tuple[Tensor, Any] | None:
    """The tokens [batch]; greedy rows get :func:`note_greedy_tokens`' tokens. After ``Sampler._sample_from_probs``.

    If a request wants its sampling mask, SGLang's tokens stay, since the mask must contain them.
    """
    (tokens, mask), greedy = sampled, getattr(info, "greedy_tokens", None)
    if greedy is None or mask is not None:
        return None
    info.greedy_tokens = None
    return torch.where(info.top_ks <= 1, greedy.to(tokens.dtype), tokens), mask


def is_greedy(req: Req) -> bool:
    """Whether a request draws nothing; SGLang turns a temperature of 0 into ``top_k = 1``."""
    return req.sampling_params.top_k <= 1


def seed_of(req: Req) -> int | None:
    """The seed that a request asks for; None also for a greedy request, which draws nothing."""
    return None if is_greedy(req) else req.sampling_params.sampling_seed


def reason_against_seeds(sampling_backend: str, speculative_algorithm: str | None) -> str | None:
    """Why this server can't use a seed, for a 400; None if it can."""
    if speculative_algorithm is not None:
        return "sampling_seed (seed) is not supported by a server with --speculative-algorithm; send none."
    if sampling_backend != "pytorch":
        return (
            f"sampling_seed (seed) is not supported by this server's sampling backend {sampling_backend!r}; send none, "
            "or start the server with --sampling-backend pytorch."
        )
    return None


def uses_min_p(req: Req) -> bool:
    """Whether a request limits its draws by min_p; a greedy request draws nothing."""
    return not is_greedy(req) and req.sampling_params.min_p > 0


def reason_against_min_p(speculative_algorithm: str | None) -> str | None:
    """Why this server can't use min_p, for a 400; None if it can."""
    if speculative_algorithm is None:
        return None
    return (
        f"min_p is not supported by a server with --speculative-algorithm {speculative_algorithm}, whose verification "
        "ignores it; send none, or use top_p or top_k."
    )


def fill_seeds(result: None, info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int) -> None:
    """Give each request of a new batch a seed if one of them asks for one."""
    seeds = [seed_of(req) for req in batch.reqs]
    if live_parts() is None:
        return
    if info.sampling_seed is not None:  # deterministic inference: SGLang has set them
        info.need_top_k_sampling = True
    elif any(seed is not None for seed in seeds):
        _set_seeds(info, seeds)


def align_seeds(info: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    """Before two batches are merged, give both seeds: SGLang drops the seeds of one if the other has none."""
    for this, that in ((info, other), (other, info)):
        if this.sampling_seed is None and that.sampling_seed is not None:
            _set_seeds(this, [None] * len(this))


def _set_seeds(info: SamplingBatchInfo, seeds: list[int | None]) -> None:
    filled = [_unseeded.getrandbits(63) if seed is None else seed for seed in seeds]
    info.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(info.device, non_blocking=True)
    info.need_top_k_sampling = True  # draw over the sorted vocabulary; the limit of a request without top_k stays "all"


WHOLE = 2**40
"""The integer for a probability of 1. The rounding errors of a vocabulary add up to at most 2**-23 of it."""


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
    """Tokens [batch] int32 of a batch with seeds, from `probs [batch, vocab]`; other batches go to SGLang.

    Runs around ``top_k_top_p_min_p_sampling_from_probs_torch``. The candidates of a row depend on that row only: of its
    tokens, sorted by probability and then by id, the first top_k; of these the tokens whose predecessors sum up to at
    most top_p; of these the tokens with at least min_p of the most likely token's probability.
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
    """Columns [batch, 1] drawn by SGLang's ``multinomial_with_seed``, around which :func:`draw` runs."""
    from sglang.srt.layers import sampler

    return sampler.multinomial_with_seed(logprobs, seed, positions)


def draw(original: Callable[..., Tensor], logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Columns [batch, 1] of ``argmax(logprobs [batch, vocab] + gumbel noise)``; runs around ``multinomial_with_seed``.

    SGLang's hash of (seed, position, column) is a Triton kernel. On a CPU the noise is Philox's, with the same key.
    """
    if logprobs.device.type != "cpu":
        return original(logprobs, seed, positions)
    noise = torch.empty(logprobs.shape, dtype=torch.float64)
    for row, (key, position) in enumerate(zip(seed.tolist(), positions.tolist(), strict=True)):
        generator = np.random.Generator(np.random.Philox(key=np.array([key % 2**64, position], np.uint64)))
        noise[row] = torch.from_numpy(generator.standard_exponential(logprobs.shape[1]))
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)  # 0 is possible, and the logarithm of its token would be NaN
    return (logprobs.double() - noise.log_()).argmax(1, keepdim=True)
