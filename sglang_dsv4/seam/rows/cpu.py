"""Rows of the table of hooks, `hooks.HOOKS`, for a CPU."""

from __future__ import annotations

from sglang_dsv4.seam.hook_kinds import (
    ASKS_PLATFORM,
    EAGLE_SAMPLE,
    RUNNER,
    Hook,
    Kind,
    Process,
)

RESOLVING_VIEW = "resolving_view"
FORWARD_IS_ON_CPU = "_is_cpu"

_OPS = "sglang.kernels.ops.speculative"
_CPU = "sglang_dsv4.cpu"

_CPU_OPS = "SGLang's speculation has a path without Triton"

CPU = (
    Hook("sglang.srt.arg_groups.speculative_hook._handle_dspark", Kind.AROUND, Process.EVERY,
         f"{_CPU}.speculation:resolve_dspark",
         "SGLang's resolution step for DSPARK refuses a CPU",
         "that resolution step asks the platform, as EAGLE's does", only_cpu=True),
    Hook(f"{RUNNER}.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:keep_products",
         "SGLang would replace PyTorch's products by Triton kernels", ASKS_PLATFORM),
    Hook(f"{RUNNER}.model_runner.adjust_config_with_unaligned_cpu_tp", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:keep_config",
         "SGLang would pad heads and intermediate sizes for its own CPU layers", "SGLang asks the model first"),
    Hook(f"{RUNNER}.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:pad_on_cpu", "with attention data parallelism SGLang would pin memory here", ASKS_PLATFORM,
         only_cpu=True),
    Hook("sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop", Kind.BEFORE,
         Process.SCHEDULER, f"{_CPU}.overrides:wait_for_requests", "SGLang's loop takes a core that the ranks need",
         "the controller waits for requests", only_cpu=True),
    Hook("sglang.srt.model_loader.loader._get_quantization_config", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.overrides:skip_gpu_quantisation",
         "weights are dequantised while they are loaded; SGLang's FP8 method refuses float32",
         "SGLang's FP8 method runs on a CPU"),
    Hook("sglang.srt.mem_cache.allocation.get_last_loc", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:last_locations", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook("sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:assign_slots", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.cache_locs.assign_draft_cache_locs_contiguous_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:assign_draft_slots", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.spec_tree.build_tree_kernel_efficient_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:build_chain", "SGLang launches a CUDA kernel", _CPU_OPS, only_cpu=True),
    Hook(EAGLE_SAMPLE, Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:verify", "SGLang launches CUDA kernels", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.reject_sampling.chain_speculative_sampling_triton", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:accept_block", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    Hook("torch.Tensor.record_stream", Kind.AROUND, Process.SCHEDULER,
         f"{_CPU}.speculation:keep_for_stream", "PyTorch refuses CPU tensors", _CPU_OPS, only_cpu=True),
    Hook(f"{_OPS}.eagle.fill_bonus_tokens_func", Kind.REPLACE, Process.SCHEDULER,
         f"{_CPU}.speculation:fill_bonus_tokens", "SGLang launches a Triton kernel", _CPU_OPS, only_cpu=True),
    # ---- attributes of SGLang's objects, set by the function in brackets
    Hook(f"{RUNNER}.forward_batch_info.{FORWARD_IS_ON_CPU}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_CPU}.overrides:is_on_cpu", "while a batch is padded, it is on a CPU (`cpu.overrides.pad_on_cpu`)",
         ASKS_PLATFORM, only_cpu=True),
    Hook(f"sglang.srt.arg_groups.speculative_hook.{RESOLVING_VIEW}", Kind.ATTRIBUTE, Process.EVERY,
         f"{_CPU}.speculation:view_as_on_a_gpu", "while that step runs, the arguments' device is a GPU "
         "(`cpu.speculation.resolve_dspark`)", "that step asks the platform, as EAGLE's does", only_cpu=True),
)  # fmt: skip
