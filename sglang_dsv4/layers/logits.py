"""Logits in fp32: `h.float() @ head.float().T` (DeepSeek-V4 specification, section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.utils import all_gather_single
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from dsv4_kernels.linear import linear_fp32
from sglang_dsv4.layers.linear import builds_on_cpu
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.seam.bases import LogitsProcessorWithHead

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

LARGEST_LOGIT = 1e20
"""Largest absolute value of a logit that a token is drawn from. SGLang divides logits by a temperature and a repetition
penalty, each at least 1e-6, and adds biases of at most 1e20 (`requests.refused.sampling_numbers`): the quotient and the
sum stay finite in fp32."""
NOT_FINITE = 2e20
"""Value of all logits in a row that held NaN, an infinity or more than LARGEST_LOGIT; `requests.not_finite` ends the
request. Samplers take the row without an error, which they don't with NaN."""


def mark_rows_not_finite(logits: Tensor) -> None:
    """Fill the rows of `logits [T, V]` fp32 that have a value beyond LARGEST_LOGIT, or NaN, with NOT_FINITE.

    Other rows keep their bits. Nothing is read back, so that CUDA graphs can capture it.
    """
    largest = torch.linalg.vector_norm(logits, torch.inf, dim=-1, keepdim=True)  # NaN if a logit is NaN
    logits.masked_fill_(~(largest <= LARGEST_LOGIT), NOT_FINITE)


def build_lm_head(config: Config, prefix: str) -> ParallelLMHead:
    """The output matrix [V, d], sharded over the vocabulary; fp32 on a CPU, which has no product of bf16 into fp32."""
    dtype = torch.float32 if builds_on_cpu() else None
    own_group = get_parallel().enable_dp_lm_head  # with attention data parallelism: a group makes its own logits
    return ParallelLMHead(
        config.vocab_size, config.hidden_size, params_dtype=dtype, prefix=prefix, use_attn_tp_group=own_group
    )


class Fp32LogitsProcessor(LogitsProcessorWithHead):
    """SGLang's logits processor with fp32 logits by this package's products."""

    def __init__(self, hf_config: object) -> None:
        super().__init__(hf_config)
        self.use_fp32_lm_head = True

    def forward(self, *args: Any, **kwargs: Any) -> LogitsProcessorOutput:  # noqa: ANN401 - SGLang's
        """SGLang's output for a forward, with :func:`mark_rows_not_finite` applied to the logits of next tokens."""
        output = super().forward(*args, **kwargs)
        if output.next_token_logits is not None:
            mark_rows_not_finite(output.next_token_logits)
        return output

    def lm_head_logits(self, hidden_states: Tensor, lm_head: ParallelLMHead) -> Tensor:
        """Logits [T, V / ranks] fp32 of `hidden_states [T, d]` for this rank's rows of the head."""
        if not len(hidden_states):  # a group without requests, see `data_parallel`
            return hidden_states.new_empty(0, len(lm_head.weight), dtype=torch.float32)
        # On a GPU the operands are bf16, whose products fp32 holds without rounding.
        return linear_fp32(hidden_states if hidden_states.is_cuda else hidden_states.float(), lm_head.weight)

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Logits [T, V] of this group's rows, from those [T, V / attn_tp_size] of each rank's rows of the head."""
        if not len(logits):
            return logits.new_empty(0, self.vocab_size)
        parallel = get_parallel()
        gathered = logits.new_empty(parallel.attn_tp_size * logits.shape[0], logits.shape[1])
        all_gather_single(gathered, logits.contiguous(), group=parallel.attn_tp_group.device_group)
        by_rank = gathered.unflatten(0, (parallel.attn_tp_size, -1))
        return by_rank.transpose(0, 1).flatten(1)[:, : self.vocab_size].contiguous()
