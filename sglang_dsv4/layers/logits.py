"""Logits in fp32: `h.float() @ head.float().T` (DeepSeek-V4 specification, section 2.1)."""

from __future__ import annotations

import torch
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from torch import Tensor

from dsv4_kernels.linear import linear_fp32
from sglang_dsv4.layers.linear import builds_on_cpu
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.seam.bases import LogitsProcessorWithHead


def build_lm_head(config: Config, prefix: str) -> ParallelLMHead:
    """The output matrix [V, d], sharded over the vocabulary; fp32 on a CPU, which has no product of bf16 into fp32."""
    dtype = torch.float32 if builds_on_cpu() else None
    return ParallelLMHead(config.vocab_size, config.hidden_size, params_dtype=dtype, prefix=prefix)


class Fp32LogitsProcessor(LogitsProcessorWithHead):
    """SGLang's logits processor with fp32 logits by this package's products."""

    def __init__(self, hf_config: object) -> None:
        super().__init__(hf_config)
        self.use_fp32_lm_head = True

    def lm_head_logits(self, hidden_states: Tensor, lm_head: ParallelLMHead) -> Tensor:
        """Logits [T, V / tp] fp32 of `hidden_states [T, d]` for this rank's rows of the head."""
        # On a GPU the operands are bf16, whose products fp32 holds without rounding.
        return linear_fp32(hidden_states if hidden_states.is_cuda else hidden_states.float(), lm_head.weight)
