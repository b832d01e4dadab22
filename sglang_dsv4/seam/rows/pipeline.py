"""Rows of the table of hooks, `hooks.HOOKS`, for stages of a pipeline (`--pp-size`) and ranks on other nodes."""

from __future__ import annotations

from sglang_dsv4.seam.hook_kinds import SCHEDULER, Hook, Kind, Process

_MIXIN = "sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin"
_OURS = "sglang_dsv4.pipeline"
_MARKS = "SGLang's stages exchange what a plugin adds to a forward's result"

PIPELINE = (
    Hook(f"{SCHEDULER}.get_next_batch_to_run", Kind.AFTER, Process.SCHEDULER,
         f"{_OURS}.plans:compare", "a stage that decides otherwise than the one before ends the server, and is named",
         "SGLang compares the plans of its stages"),
    Hook(f"{_MIXIN}._pp_prepare_tensor_dict", Kind.AFTER, Process.SCHEDULER, f"{_OURS}.marks:send_marks",
         "rows whose logits are not finite end their requests on all stages", _MARKS),
    Hook(f"{_MIXIN}._pp_prep_batch_result", Kind.AFTER, Process.SCHEDULER, f"{_OURS}.marks:receive_marks",
         "rows whose logits are not finite end their requests on all stages", _MARKS),
    Hook(f"{SCHEDULER}.run_event_loop", Kind.AROUND, Process.SCHEDULER,
         "sglang_dsv4.seam.lost_rank:explain", "the log says that another rank has ended, and what to do",
         "SGLang's error names the rank that it has lost"),
    Hook("sglang.srt.distributed.parallel_state.GroupCoordinator.__init__", Kind.AROUND, Process.SCHEDULER,
         "sglang_dsv4.seam.lost_rank:limit_waits", "exchanges between CPUs end after `--dist-timeout`, too",
         "SGLang takes the flag for its groups of CPUs"),
    Hook("sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop", Kind.BEFORE,
         Process.SCHEDULER, "sglang_dsv4.seam.lost_rank:watch_replicas",
         "a replica that is killed ends the server; its clients would wait for ever",
         "SGLang's controller watches its replicas"),
)  # fmt: skip
