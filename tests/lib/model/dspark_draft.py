"""A DSpark draft in the draft ModelRunner that SGLang's worker builds, driven as that worker drives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from model.harness import Harness, Request
from torch import Tensor


class DSparkDraft:
    """The draft of a harness with `speculative_algorithm="DSPARK"`; request slots are the harness's."""

    def __init__(self, harness: Harness) -> None:
        from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector

        self.harness, self.runner, target = harness, harness.draft_runner(), harness.runner
        self.model, self.pool, self.backend = self.runner.model, self.runner.token_to_kv_pool, self.runner.attn_backend
        self.model.attach_shared_modules(embed_tokens=target.model.get_input_embeddings(), lm_head=target.model.lm_head)
        self.injector = TargetHiddenKvInjector(
            draft_model=self.model,
            draft_model_runner=self.runner,
            model_runner=target,
            device="cpu",
            verify_num_draft_tokens=self.model.gamma + 1,
            block_pos_offsets=torch.arange(self.model.gamma + 1),
        )

    def inject_prefill(self, request: Request, taps: Tensor, first: int) -> None:
        """Store the context rows of a chunk whose first token is at `first`; SGLang keeps the chunk's last window."""
        positions = torch.arange(first, first + len(taps))
        with self.harness._active():
            self.injector.inject_target_hidden(
                target_hidden=taps,
                cache_loc=positions,
                positions=positions,
                state_slot=torch.full_like(positions, request.row),
                final_pos=torch.full_like(positions, first + len(taps) - 1),
            )

    def commit(self, request: Request, taps: Tensor, first: int, kept: int) -> None:
        """Store the context rows after a verify step at `first`: of the anchor and `kept - 1` drafts."""
        positions = torch.arange(first, first + len(taps))
        with self.harness._active():
            self.injector.inject_target_hidden(
                target_hidden=taps,
                cache_loc=positions,
                positions=positions,
                cache_loc_2d=positions[None],
                commit_lens=torch.tensor([kept]),
                state_slot=torch.full_like(positions, request.row),
            )

    def blocks(self, parts: Sequence[tuple[Request, int]]) -> Tensor:
        """Return rows [B, k, d] after the last norm, for each (request, anchor)."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        k, noise = self.model.gamma, self.harness.hf_config["dspark_noise_token_id"]
        lengths = torch.tensor([request.num_tokens for request, _ in parts])
        ids = torch.tensor([[anchor] + [noise] * (k - 1) for _, anchor in parts])
        positions = (lengths[:, None] + torch.arange(k)).flatten()
        with self.harness._active(), torch.no_grad():
            batch = ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                batch_size=len(parts),
                input_ids=ids.flatten(),
                req_pool_indices=torch.tensor([request.row for request, _ in parts]),
                seq_lens=lengths,
                out_cache_loc=torch.zeros_like(positions),
                seq_lens_sum=int(lengths.sum()) + k * len(parts),
                seq_lens_cpu=lengths + k,  # as SGLang counts them in a draft's forward
                positions=positions,
                spec_algorithm=SpeculativeAlgorithm.DSPARK,
                spec_info=make_draft_block_spec_info(draft_token_num=k, device="cpu"),
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
            return self.runner.forward(batch).logits_output.hidden_states.view(len(parts), k, -1).clone()

    def logits(self, rows: Tensor) -> Tensor:
        """Return [B, k, V] fp32 logits of `blocks`, before the Markov head."""
        with self.harness._active(), torch.no_grad():
            return self.model.compute_base_logits(rows.flatten(0, 1))[0].view(*rows.shape[:2], -1)

    def drafts(self, rows: Tensor, anchors: Sequence[int]) -> list[list[int]]:
        """Return greedy proposals of `blocks`, by SGLang's own loop over the rows."""
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise, draft_markov_block

        noise: Any = DraftNoise(key=0, offset=torch.zeros(1, dtype=torch.int64))

        class Alone:
            @staticmethod
            def sync(site: object, tensor: Tensor) -> Tensor:
                return tensor

        with self.harness._active(), torch.no_grad():
            tokens, _ = draft_markov_block(
                markov_head=self.model.markov_head,
                base_logits=self.logits(rows),
                anchor_tokens=torch.tensor(list(anchors)),
                draft_hidden=None,
                step_temperatures=torch.zeros(len(anchors)),
                noise=noise,
                tp_sync=Alone(),
                greedy_draft=True,
            )
        return tokens.tolist()
