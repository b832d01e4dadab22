"""Rows of the table of hooks, `hooks.HOOKS`, from logits to tokens: not finite, sampled, penalised, accepted drafts."""

from __future__ import annotations

from sglang_dsv4.seam.hook_kinds import (
    EAGLE_SAMPLE,
    NOT_FINITE,
    REQUESTS,
    RUNNER,
    SCHEDULER,
    Hook,
    Kind,
    Process,
)

LOG_SOFTMAX = "enable_deterministic"

_SAMPLING = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLER = "sglang.srt.layers.sampler"
_DSPARK = "sglang.srt.speculative.dspark_components.dspark_verify"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_DRAWN = f"{REQUESTS}.sampling"

_SEEDS = "SGLang's sampler gives a request the same draw in every batch, seeds included"
_COUNTS = "SGLang counts the tokens of penalties where they are sampled"
_DRAFTED = "SGLang's verification samples each row as without drafts"

SAMPLING = (
    # ---- start-up
    Hook(f"{SCHEDULER}.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:start", "seeds the random numbers that all ranks share", _SEEDS),
    Hook(f"{SCHEDULER}.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{REQUESTS}.not_finite:start", "declares the metric of logits that are not finite", NOT_FINITE),
    # ---- logits that are not finite
    Hook(f"{RUNNER}.model_runner.ModelRunner.forward", Kind.AFTER, Process.SCHEDULER,
         f"{REQUESTS}.not_finite:note_rows", "marks of the model's rows are copied to the host", NOT_FINITE),
    Hook(f"{_SAMPLER}.Sampler._preprocess_logits", Kind.AFTER, Process.SCHEDULER,
         f"{REQUESTS}.not_finite:after_preprocessing",
         "rows in which penalties, biases and processors leave no token are marked", NOT_FINITE),
    Hook(f"{RUNNER}.model_runner.ModelRunner.sample", Kind.AFTER, Process.SCHEDULER,
         f"{REQUESTS}.not_finite:note_adjusted_rows", "and copied to the host", NOT_FINITE),
    Hook(f"{_RESULTS}.process_batch_result_prefill", Kind.BEFORE, Process.SCHEDULER,
         f"{REQUESTS}.not_finite:end_requests", "their requests end with a reason", NOT_FINITE),
    Hook(f"{_RESULTS}.process_batch_result_decode", Kind.BEFORE, Process.SCHEDULER,
         f"{REQUESTS}.not_finite:end_requests", "their requests end with a reason", NOT_FINITE),
    # ---- sampling, penalties, drafts
    Hook(f"{_SAMPLING}.adjusted_from_schedule_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:fill_seeds", "every request of a batch with seeds has a seed", _SEEDS),
    Hook(f"{_SAMPLING}.adjusted_from_schedule_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:ignore_greedy_temperatures",
         "a greedy request's log-probabilities do not depend on the other requests", _SEEDS),
    Hook(f"{_SAMPLING}.adjusted_from_schedule_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.penalties:complete",
         "a retracted request keeps its counts, and a thinking budget is a penaliser", _COUNTS),
    *(
        Hook(f"{_SAMPLING}.{method}", Kind.BEFORE, Process.SCHEDULER,
             f"{_DRAWN}.penalties:wait_for_counts", "the scheduler's stream reads complete counts", _COUNTS)
        for method in ("copy_for_forward", "filter_batch", "merge_batch")
    ),
    Hook(f"{_SAMPLING}.copy_for_forward", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.penalties:remember_source", "the copy leads to the batch's penalisers", _COUNTS),
    Hook(f"{RUNNER}.model_runner.ModelRunner.sample", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.penalties:count_sampled", "tokens are counted where they are sampled", _COUNTS),
    Hook("sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens", Kind.AROUND,
         Process.SCHEDULER, f"{_DRAWN}.penalties:leave_out_processed",
         "these tokens are not counted twice", _COUNTS),
    Hook(EAGLE_SAMPLE, Kind.BEFORE, Process.SCHEDULER,
         f"{_DRAWN}.drafts:before_eagle_sample",
         "each row of a verify step gets the penalties and processors that it has without drafts", _DRAFTED),
    Hook(EAGLE_SAMPLE, Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:after_eagle_sample", "accepted tokens are counted", _DRAFTED),
    Hook(f"{_DSPARK}.TargetVerifyExecutor.run_non_compact", Kind.AROUND, Process.SCHEDULER,
         f"{_DRAWN}.drafts:leave_rows", "SGLang gives all rows of a block the same penalties, or none", _DRAFTED),
    Hook(f"{_DSPARK}.TargetVerifyExecutor.accept_and_finalize", Kind.BEFORE, Process.SCHEDULER,
         f"{_DRAWN}.drafts:before_accept",
         "each row of a verify step gets the penalties and processors that it has without drafts", _DRAFTED),
    Hook(f"{_DSPARK}.TargetVerifyExecutor.accept_and_finalize", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:after_accept", "accepted tokens are counted", _DRAFTED),
    Hook(f"{_DSPARK}.verify_logits_adjustments_are_noop", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:rows_stay",
         "a batch with penalties accepts its drafts outside of the CUDA graph", _DRAFTED),
    Hook(f"{SCHEDULER}.is_disable_overlap_for_batch", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.drafts:process_results_first",
         "a custom logit processor sees the whole answer, not one that is a token late", _DRAFTED),
    Hook(f"{_SAMPLING}.merge_batch", Kind.BEFORE, Process.SCHEDULER,
         f"{_DRAWN}.sampler:align_seeds", "seeds survive the merge of two batches", _SEEDS),
    Hook(f"{_SAMPLER}.Sampler._preprocess_logits", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:note_greedy_tokens", "the argmax of a greedy request's logits is kept", _SEEDS),
    Hook(f"{_SAMPLER}.Sampler._sample_from_probs", Kind.AFTER, Process.SCHEDULER,
         f"{_DRAWN}.sampler:take_greedy_tokens", "that argmax is the request's token", _SEEDS),
    Hook(f"{_SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", Kind.AROUND, Process.SCHEDULER,
         f"{_DRAWN}.sampler:sample_with_seeds", "a seeded request's candidates do not depend on the batch", _SEEDS),
    Hook(f"{_SAMPLER}.multinomial_with_seed", Kind.AROUND, Process.SCHEDULER,
         f"{_DRAWN}.sampler:draw", "SGLang's seeded draw is a Triton kernel; a CPU needs another", _SEEDS),
    # ---- attributes of SGLang's objects, set by the function in brackets
    Hook(f"{_SAMPLER}.Sampler.{LOG_SOFTMAX}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_DRAWN}.sampler:use_log_softmax", "log-probabilities are `log_softmax` in every batch "
         "(`requests.sampling.sampler.start`)", _SEEDS),
)  # fmt: skip
