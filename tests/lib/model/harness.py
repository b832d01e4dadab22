"""Drives our model in process through SGLang's own ModelRunner, request and page allocators, pool and backend.

The test decides what the scheduler would decide: which requests are in a batch, how many tokens each adds (also fewer
than a page, which the scheduler would not do), when slots are freed and reused. Everything else is a server's code.
Logits come back at every position of every request.
"""

import json
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

Mode = Literal["extend", "decode", "verify"]

_process_groups: dict[str, Any] = {}  # SGLang's parallel groups of this process, made by the first harness


@dataclass
class Request:
    """One live request, made by `Harness.open`: its row in ReqToTokenPool, and how many tokens it holds."""

    row: int
    num_tokens: int = 0
    num_allocated: int = 0  # >= num_tokens after a speculative rollback
    tokens: list[int] = field(default_factory=list)
    match: Any = None  # its prefix match, if a prefix cache has one
    lock: Any = None  # lock that keeps that prefix in the cache


class Harness:
    """A loaded checkpoint in a real ModelRunner. Several harnesses can exist in one process; they do not share state.

    Args:
        checkpoint: a folder in the released format.
        dtype: the model dtype, "float32" or "bfloat16".
        qat: fake-quantisers to run ("off", "kv", "full"), or None for the checkpoint's default.
        max_total_tokens: FULL token slots in the pool (a multiple of 256).
        max_requests: request slots.
        rank: of the process, with `tp_size` among the fields.
        port: port through which ranks connect; None for one rank.
        server_args: further fields of SGLang's ServerArgs.
    """

    def __init__(
        self,
        checkpoint: Path,
        dtype: str = "float32",
        qat: str | None = None,
        max_total_tokens: int = 8192,
        max_requests: int = 8,
        rank: int = 0,
        port: int | None = None,
        **server_args: Any,
    ) -> None:
        # As in a scheduler process, the scheduler's module is imported before the plugins are loaded.
        import sglang.srt.managers.scheduler  # noqa: F401
        from sglang.srt.plugins import load_plugins

        load_plugins()
        # A server on a CPU refuses speculation because of SGLang's Triton kernels around it; the modules themselves do
        # run.
        from sglang.srt.platforms import current_platform

        with mock.patch.object(type(current_platform), "supports_speculative_algorithm", lambda *_: True):
            self._load(checkpoint, dtype, qat, max_total_tokens, max_requests, rank, port, server_args)

    def _load(
        self,
        checkpoint: Path,
        dtype: str,
        qat: str | None,
        max_total_tokens: int,
        max_requests: int,
        rank: int,
        port: int | None,
        server_args: dict[str, Any],
    ) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import SpawnRanks, create_context
        from sglang.srt.server_args import ServerArgs

        self._environment = {} if qat is None else {"SGLANG_DSV4_QAT": qat}
        self.hf_config = json.loads((checkpoint / "config.json").read_text())
        arguments = dict(
            model_path=str(checkpoint),
            dtype=dtype,
            skip_tokenizer_init=True,
            max_total_tokens=max_total_tokens,
            max_running_requests=max_requests,
            context_length=4096,
            chunked_prefill_size=max_total_tokens,
            max_prefill_tokens=max_total_tokens,
            disable_cuda_graph=True,
            log_level="warning",
            random_seed=0,
        )
        arguments.update(server_args)
        self.server_args = ServerArgs(**arguments)
        self._context = create_context(self.server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        with self._active():
            _prepare_process(self.server_args, port)
            self.model_config = ModelConfig.from_server_args(self.server_args)
            self.runner = _load_runner(self.server_args, self.model_config)
        self.model = self.runner.model
        self.pool = self.runner.token_to_kv_pool
        self.backend = self.runner.attn_backend
        _keep_logits_of_every_position(self.model.logits_processor)

    @contextmanager
    def _active(self) -> Iterable[None]:
        from sglang.srt.runtime_context import use_context

        with use_context(self._context), mock.patch.dict(os.environ, self._environment):
            yield

    # -- requests ---------------------------------------------------------------------------------------------------

    def open(self) -> Request:
        """Allocate a request slot, as the scheduler does when it admits a request."""
        rows = self.runner.req_to_token_pool.alloc_rows(1)
        if rows is None:
            raise RuntimeError("the harness has no free request slot; close one first")
        return Request(rows[0])

    def close(self, request: Request) -> None:
        """Free the request's pages and its slot."""
        pool = self.runner.req_to_token_pool
        if request.num_allocated:
            slots = pool.req_to_token[request.row, : request.num_allocated].to(torch.int64)
            self.runner.token_to_kv_pool_allocator.free(slots)
        pool.free_rows([request.row])

    def rollback(self, request: Request, num_tokens: int) -> None:
        """Drop the tokens after the first `num_tokens`; their slots stay allocated, as after rejected drafts."""
        request.num_tokens = num_tokens
        del request.tokens[num_tokens:]

    def shuffle_free_pages(self, seed: int = 0) -> None:
        """Make the next page tables non-contiguous and unordered."""
        allocator = self.runner.token_to_kv_pool_allocator
        allocator.merge_and_sort_free()
        order = torch.randperm(len(allocator.free_pages), generator=torch.Generator().manual_seed(seed))
        allocator.free_pages = allocator.free_pages[order]

    def _allocate(self, parts: Sequence[tuple[Request, Sequence[int]]], decode: bool) -> Tensor:
        """Return FULL slots [num_tokens] for the parts' tokens, allocated where the request does not hold them yet."""
        table = self.runner.req_to_token_pool.req_to_token
        allocator = self.runner.token_to_kv_pool_allocator
        slots = []
        for request, tokens in parts:
            end = request.num_tokens + len(tokens)
            if end > request.num_allocated:
                start = request.num_allocated
                nothing = torch.tensor([-1], device=table.device)
                last = table[request.row, start - 1 : start].to(torch.int64) if start else nothing
                ends = torch.tensor([end])
                if decode and end == start + 1:
                    new = allocator.alloc_decode(ends.to(table.device), ends, last)
                else:
                    starts = torch.tensor([start])
                    on_device = (starts.to(table.device), starts, ends.to(table.device), ends)
                    new = allocator.alloc_extend(*on_device, last, end - start)
                if new is None:
                    raise RuntimeError("the harness's pool is full; raise max_total_tokens")
                table[request.row, start:end] = new.to(table.dtype)
                request.num_allocated = end
            slots.append(table[request.row, request.num_tokens : end].to(torch.int64))
        return torch.cat(slots)

    # -- forwards ---------------------------------------------------------------------------------------------------

    def step(self, parts: Sequence[tuple[Request, Sequence[int]]], mode: Mode = "extend") -> list[Tensor]:
        """Run one forward of a batch; return logits [len(tokens), vocab] fp32 for each (request, tokens) part.

        "decode" demands one token a request, "verify" the same number for all (the drafts of speculative decoding: they
        are kept, and `rollback` drops the rejected ones).
        """
        return [logits for logits, _ in self.step_with_streams(parts, mode)]

    def step_with_streams(
        self, parts: Sequence[tuple[Request, Sequence[int]]], mode: Mode = "extend"
    ) -> list[tuple[Tensor, Tensor]]:
        """Run `step`; return also the streams before hc_head [len(tokens), hc_mult * d], which an MTP draft reads."""
        output, lengths = self.forward(parts, mode), [len(tokens) for _, tokens in parts]
        logits, streams = output.next_token_logits, output.hidden_states
        if logits.shape[0] != sum(lengths):
            raise RuntimeError(f"expected logits of {sum(lengths)} positions, got {tuple(logits.shape)}")
        return [
            (row.float().cpu(), stream.cpu())
            for row, stream in zip(logits.clone().split(lengths), streams.clone().split(lengths), strict=True)
        ]

    def forward(self, parts: Sequence[tuple[Request, Sequence[int]]], mode: Mode = "extend", sent: Any = None) -> Any:
        """Run one forward of a batch, see `step`; return SGLang's output.

        `sent`: the output of the stage before, for a model that is a later stage of a pipeline.
        """
        lengths = [len(tokens) for _, tokens in parts]
        if min(lengths) < 1 or (mode == "decode" and max(lengths) > 1):
            raise ValueError(f"mode {mode!r} cannot take parts of {lengths} tokens")
        with self._active(), torch.no_grad():
            slots = self._allocate(parts, decode=mode == "decode")
            starts = [request.num_tokens for request, _ in parts]
            batch = self._forward_batch(self.runner, parts, starts, slots, mode)
            output = self.runner.forward(batch, pp_proxy_tensors=sent).logits_output
        for request, tokens in parts:
            request.tokens.extend(int(token) for token in tokens)
            request.num_tokens += len(tokens)
        return output

    def _forward_batch(
        self,
        runner: Any,
        parts: Sequence[tuple[Request, Sequence[int]]],
        starts: Sequence[int],
        slots: Tensor,
        mode: Mode,
        spec_info: Any = None,
    ) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        forward_mode = {
            "extend": ForwardMode.EXTEND,
            "decode": ForwardMode.DECODE,
            "verify": ForwardMode.TARGET_VERIFY,
        }[mode]
        rows = torch.tensor([request.row for request, _ in parts])
        lengths = [len(tokens) for _, tokens in parts]
        # A verify batch's seq_lens leave the drafts out, as SGLang's do; all others include this step's tokens.
        ends = starts if mode == "verify" else [s + n for s, n in zip(starts, lengths, strict=True)]
        seq_lens = torch.tensor(ends)
        reqs = [
            SimpleNamespace(
                rid=str(i),
                tail_match=parts[i][0].match,
                lock=parts[i][0].lock,
                lora_id=None,
                extend_end=end,
                full_untruncated_fill_ids=range(end),
                token_type_ids=None,
            )
            for i, end in enumerate(ends)
        ]
        token_ids = torch.tensor([int(token) for _, tokens in parts for token in tokens])
        batch = ScheduleBatch(
            reqs=reqs,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            model_config=runner.model_config,
            device=self.runner.device,
            forward_mode=forward_mode,
            input_ids=token_ids.to(runner.device),
            req_pool_indices=rows.to(runner.device),
            req_pool_indices_cpu=rows.clone(),
            seq_lens=seq_lens.to(runner.device),
            seq_lens_cpu=seq_lens.clone(),
            seq_lens_sum=int(seq_lens.sum()),
            orig_seq_lens=seq_lens.to(runner.device, torch.int32),
            out_cache_loc=slots,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            spec_info=spec_info,
        )
        if mode == "extend":
            batch.prefix_lens, batch.extend_lens = starts, lengths
            batch.extend_num_tokens = sum(lengths)
            batch.extend_logprob_start_lens = lengths
        elif mode == "verify":
            batch.spec_info = _verify_input(token_ids, starts, lengths, seq_lens)
        return ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )

    # -- conveniences -----------------------------------------------------------------------------------------------

    def run(self, tokens: Tensor, chunk_tokens: int | None = None, decode_from: int | None = None) -> Tensor:
        """Return logits [num_tokens, vocab] of one request alone: prefill in chunks, decode from `decode_from` on."""
        return self.run_many([tokens], chunk_tokens, [decode_from])[0]

    def run_many(
        self,
        prompts: Sequence[Tensor],
        chunk_tokens: int | None = None,
        decode_from: Sequence[int | None] | None = None,
        start_at_step: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return the logits of several requests served together. In every step each live request adds its next chunk,
        or one token once it has got to `decode_from`; a request joins at `start_at_step` and leaves when its tokens
        end. A step whose requests all decode runs as a decode batch, any other as an extend batch (as mixed batches
        do)."""
        count = len(prompts)
        limits = [n if n is not None else len(p) for n, p in zip(decode_from or [None] * count, prompts, strict=True)]
        joins = list(start_at_step or [0] * count)
        live: dict[int, Request] = {}
        logits: list[list[Tensor]] = [[] for _ in prompts]
        step, left = 0, set(range(count))
        while left:
            for i in sorted(left):
                if i not in live and joins[i] <= step:
                    live[i] = self.open()
            parts, indices, decoding = [], [], []
            for i, request in live.items():
                prompt, start = prompts[i], request.num_tokens
                end = start + 1 if start >= limits[i] else min(start + (chunk_tokens or limits[i]), limits[i])
                parts.append((request, prompt[start:end].tolist()))
                indices.append(i)
                decoding.append(start >= limits[i])
            if parts:
                mode: Mode = "decode" if all(decoding) else "extend"
                for i, part in zip(indices, self.step(parts, mode), strict=True):
                    logits[i].append(part)
            for i in [i for i, request in live.items() if request.num_tokens == len(prompts[i])]:
                self.close(live.pop(i))
                left.discard(i)
            step += 1
        return [torch.cat(parts) for parts in logits]

    def draft_runner(self) -> Any:
        """The draft's ModelRunner as SGLang's workers build it, on this runner's request slots and pages."""
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.runtime_context import get_spec

        with self._active():
            config = ModelConfig.from_server_args(
                self.server_args, model_path=get_spec().speculative_draft_model_path, is_draft_model=True
            )
            return _load_runner(
                self.server_args,
                config,
                is_draft_worker=True,
                req_to_token_pool=self.runner.req_to_token_pool,
                token_to_kv_pool_allocator=self.runner.token_to_kv_pool_allocator,
                memory_pool_config=self.runner.memory_pool_config,
            )


class Draft:
    """The MTP module of a harness with speculation, in the draft ModelRunner that SGLang's EAGLE worker builds.

    It has its own cache; request slots and pages are the harness's, so the harness must serve a position first.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness, self.runner = harness, harness.draft_runner()
        self.runner.model.set_embed_and_head(*harness.model.get_embed_and_head())
        self.model = self.runner.model
        self.backend = self.runner.attn_backend
        _keep_logits_of_every_position(self.model.logits_processor)

    def step(
        self, parts: Sequence[tuple[Request, int, Sequence[int], Tensor]], mode: Mode = "extend"
    ) -> list[tuple[Tensor, Tensor]]:
        """Run one forward. Each part is (request, position t of the first token, the ids at t+1.., the streams of t..
        [len(ids), hc_mult * d]); return (logits [len(ids), vocab], streams [len(ids), hc_mult * d]) for each."""
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        lengths = [len(tokens) for _, _, tokens, _ in parts]
        starts = [start for _, start, _, _ in parts]
        table = self.runner.req_to_token_pool.req_to_token
        slots = torch.cat([table[r.row, start : start + len(ids)].long() for r, start, ids, _ in parts])
        with self.harness._active(), torch.no_grad():
            spec_info = EagleDraftInput(hidden_states=torch.cat([streams for *_, streams in parts]))
            pairs = [(request, tokens) for request, _, tokens, _ in parts]
            batch = self.harness._forward_batch(self.runner, pairs, starts, slots, mode, spec_info)
            output = self.runner.forward(batch).logits_output
        return [
            (row.float().clone(), stream.clone())
            for row, stream in zip(
                output.next_token_logits.split(lengths), output.hidden_states.split(lengths), strict=True
            )
        ]


def _prepare_process(server_args: Any, port: int | None) -> None:
    """Set up what a scheduler process has: the process groups once, the per-config globals for every harness."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.runtime_context import get_device, get_parallel

    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()
    if _process_groups:
        get_parallel().override_permanently(**_process_groups)
        return
    if port is None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=port)
    stamped = get_parallel()._stamp
    _process_groups.update({name: group for name, group in stamped.items() if name.endswith("_group")})


def _load_runner(server_args: Any, model_config: Any, **draft: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner

    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=resolving_view(server_args).mem_fraction_static,
        gpu_id=0,
        nccl_port=0,
        server_args=server_args,
        **draft,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def _keep_logits_of_every_position(processor: Any) -> None:
    """Keep logits of every position: an extend forward prunes to the last token of each request before lm_head."""

    def everything(hidden_states: Tensor, before_norm: Any, aux: Any, metadata: Any) -> tuple[Any, ...]:
        return hidden_states, before_norm, aux, None, None, []

    processor._get_pruned_states = everything


def _verify_input(token_ids: Tensor, starts: Sequence[int], lengths: Sequence[int], seq_lens: Tensor) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    if len(set(lengths)) != 1:
        raise ValueError(f"a verify batch needs the same number of drafts for every request, got {lengths}")
    count = lengths[0]
    positions = torch.cat([torch.arange(start, start + count) for start in starts])
    links = torch.arange(count).repeat(len(starts), 1)
    return EagleVerifyInput(
        draft_token=token_ids,
        custom_mask=None,
        positions=positions,
        retrieve_index=links + count * torch.arange(len(starts))[:, None],
        retrieve_next_token=torch.where(links + 1 < count, links + 1, -1),
        retrieve_next_sibling=torch.full_like(links, -1),
        retrieve_cum_len=None,
        spec_steps=count - 1,
        topk=1,
        draft_token_num=count,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        seq_lens_sum=int(seq_lens.sum()),
        seq_lens_cpu=seq_lens.clone(),
    )
