"""Rows of the table of hooks, `hooks.HOOKS`, for prefill and decode on different servers."""

from __future__ import annotations

from sglang_dsv4.seam.hook_kinds import ASKS_PLATFORM, NOT_FINITE, REQUESTS, SCHEDULER, Hook, Kind, Process

HOST_INDICES = "supports_host_tensor_indices"
CARRIES_REASON = "kv_status_msg_carries_reason"
HANDLES_ABORTS = "_handle_abort_notification"
SOCKET = "server_socket"
REGISTERS_BUFFERS = "register_buffer_to_engine"

_SGLANG = "sglang.srt.disaggregation"
_MOONCAKE = "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine"
_OURS = "sglang_dsv4.disaggregation"
_ENGINE = "sglang_dsv4.cpu.transfer_engine"

_POOLS = "a pool says what it transfers, and how a request is copied to the host"

DISAGGREGATION = (
    Hook(f"{_SGLANG}.utils.setup_state_kv_args", Kind.AROUND, Process.SCHEDULER, f"{_OURS}.buffers:list_rings",
         "rings travel as request rows, a draft's too; SGLang asks for pages of window rows", _POOLS),
    Hook(f"{_SGLANG}.common.conn.CommonKVSender._record_transfer_indices", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.buffers:count_rings_once", "with a draft SGLang counts the bytes of all rings twice",
         "SGLang multiplies each component's slots by its own bytes"),
    Hook(f"{_SGLANG}.decode.DecodePreallocQueue._ensure_prefill_info", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.decode_side:refuse_other_prefills",
         "requests of a prefill server with other pools end with what differs; SGLang's decode server ends itself",
         "SGLang refuses these requests alone"),
    Hook(f"{_SGLANG}.decode.DecodePreallocQueue._send_kv_metadata", Kind.BEFORE, Process.SCHEDULER,
         f"{_OURS}.decode_side:wait_for_forwards",
         "a slot is not written by its former request's last step after another server has written it",
         "SGLang waits for that step"),
    Hook(f"{_SGLANG}.decode.DecodeTransferQueue._commit_transfer_to_req", Kind.AFTER, Process.SCHEDULER,
         f"{_OURS}.decode_side:unpack_pages", "HCA pages in the FP8 format travel packed", _POOLS),
    Hook(f"{_SGLANG}.decode.DecodePreallocQueue._radix_full_available", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.decode_side:free_tokens", "our pools have one allocator; SGLang asks for one of window pages, too",
         "SGLang asks the allocator whether it has window pages"),
    Hook("sglang.srt.mem_cache.common.dsv4_needs_rebootstrap", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.decode_side:keep_bytes",
         "a retracted request is copied to the host and back, and not computed again by its prefill server", _POOLS),
    Hook(f"{_SGLANG}.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk", Kind.AROUND,
         Process.SCHEDULER, f"{_OURS}.prefill_side:send_prefix_early",
         "a reused prefix is not sent while copies from host memory write it",
         "SGLang asks the prefix cache whether copies are pending"),
    Hook(f"{_SGLANG}.common.conn.CommonKVSender.abort", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.rooms:tell_decode",
         "a request that the prefill server gives up ends on the decode server, too, and not after minutes",
         "SGLang tells the decode server"),
    # Not around the class's method: plugins are loaded before a launcher names the folder of its metrics. A launcher
    # that has imported the scheduler would import Mooncake's module, and prometheus_client without that folder.
    Hook(f"{_SGLANG}.mooncake.conn.MooncakeKVManager.{HANDLES_ABORTS}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_OURS}.rooms:hear_decode",
         "a request that ends on one server before the other knows of it ends there, too, and not after minutes "
         "(`disaggregation.rooms.hear_under_lock`, `disaggregation.rooms.hear_nixl_under_lock`)",
         "SGLang remembers rooms that have ended"),
    Hook(f"{_SGLANG}.common.conn.CommonKVManager.__init__", Kind.AFTER, Process.SCHEDULER,
         f"{_OURS}.rooms:hear_nixl_under_lock", "NIXL's manager gets its attributes before its threads start",
         "SGLang's scheduler and its thread share a lock"),
    Hook(f"{_SGLANG}.common.conn.CommonKVManager.{SOCKET}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_OURS}.rooms:lock_socket",
         "no room ends while a message about it is handled, over NIXL (`disaggregation.rooms.hear_nixl_under_lock`)",
         "SGLang's scheduler and its thread share a lock"),
    Hook(f"{_SGLANG}.common.conn.CommonKVManager._make_worker_recv", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.rooms:hear_under_lock", "no room ends while a decode server's message about it is handled",
         "SGLang's scheduler and its thread share a lock"),
    Hook(f"{_SGLANG}.common.conn.CommonKVSender.__init__", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.rooms:open_room", "the same, where the decode server has aborted first",
         "SGLang remembers rooms that have ended"),
    Hook(f"{_SGLANG}.common.conn.CommonKVSender.clear", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.rooms:end_room", "rooms that have ended by a timeout are remembered, too",
         "SGLang remembers rooms that have ended"),
    Hook(f"{_SGLANG}.common.conn.CommonKVReceiver.ensure_abort_notified", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.ranks:tell_every_rank",
         "a prefill server with data-parallel ranks is told of an abort before the request's rank is known",
         "SGLang tells all ranks"),
    Hook(f"{_SGLANG}.decode.DecodePreallocQueue._init_receiver", Kind.BEFORE, Process.SCHEDULER,
         f"{_OURS}.ranks:keep_rank", "a request that a pause retracts is computed again on the rank that had it",
         "SGLang remembers the rank whatever the allocation policy"),
    *(
        Hook(f"{_SGLANG}.prefill.SchedulerDisaggregationPrefillMixin.{name}", Kind.AFTER, Process.SCHEDULER,
             f"{_OURS}.rooms:forget_aborted", "the rooms of aborted requests are forgotten",
             "SGLang clears their senders")
        for name in ("_retire_aborted_prefill_result", "release_aborted_prefill_waiting_req")
    ),
    Hook(f"{SCHEDULER}.process_pending_chunked_abort", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.rooms:forget_aborted_chunks", "the same for a request between two chunks",
         "SGLang clears its sender"),
    Hook(f"{_SGLANG}.prefill.SchedulerDisaggregationPrefillMixin._retire_aborted_prefill_result", Kind.BEFORE,
         Process.SCHEDULER, f"{_OURS}.rooms:give_reason",
         "the decode server, which answers the client, knows why its request ended", "SGLang sends the reason"),
    Hook(f"{_SGLANG}.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill", Kind.BEFORE,
         Process.SCHEDULER, f"{REQUESTS}.not_finite:end_requests",
         "requests whose first logits are not finite end with a reason",
         NOT_FINITE),
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.forward", Kind.AFTER, Process.SCHEDULER,
         f"{_OURS}.prefill_side:pack_pages", "HCA pages in the FP8 format travel packed", _POOLS),
    Hook(f"{_SGLANG}.common.conn.CommonKVManager.{CARRIES_REASON}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_OURS}.buffers:with_reason",
         "the decode server is told why a transfer failed, and tells the client (`disaggregation.buffers.list_rings`)",
         "SGLang's Mooncake messages have the reason"),
    Hook(f"{_MOONCAKE}.batch_transfer_sync", Kind.AROUND, Process.SCHEDULER,
         f"{_OURS}.pieces:transfer_in_pieces", "Mooncake's TCP transport refuses a call of more than 2048 blocks",
         "SGLang or Mooncake splits it"),
    Hook(f"{_MOONCAKE}.__init__", Kind.BEFORE, Process.SCHEDULER, f"{_ENGINE}:prepare",
         "transfers over TCP on a CPU where Mooncake is not installed", "SGLang has a transfer engine for CPUs",
         only_cpu=True),
    Hook(f"{_SGLANG}.common.conn.CommonKVManager.__init__", Kind.AFTER, Process.SCHEDULER,
         "sglang_dsv4.cpu.nixl_memory:prepare", "NIXL's manager gets the attribute below", ASKS_PLATFORM,
         only_cpu=True),
    Hook(f"{_SGLANG}.nixl.conn.NixlKVManager.{REGISTERS_BUFFERS}", Kind.ATTRIBUTE, Process.SCHEDULER,
         "sglang_dsv4.cpu.nixl_memory:register_host_memory",
         "pools are registered as host memory; SGLang registers all as a GPU's (`cpu.nixl_memory.prepare`)",
         ASKS_PLATFORM, only_cpu=True),
    *(
        Hook(f"{_SGLANG}.{mixin}", Kind.AFTER, Process.SCHEDULER, "sglang_dsv4.cpu.overrides:rest_while_transferring",
             "SGLang's loop takes a core that the other server needs", "the loop waits for transfers", only_cpu=True)
        for mixin in ("prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
                      "decode.SchedulerDisaggregationDecodeMixin.process_decode_queue")
    ),
    Hook(f"{_SGLANG}.mooncake.conn.MooncakeKVSender.{HOST_INDICES}", Kind.ATTRIBUTE, Process.SCHEDULER,
         f"{_ENGINE}:stays_on_host",
         "page numbers are on the host; SGLang would pin memory (`cpu.transfer_engine.prepare`)",
         ASKS_PLATFORM, only_cpu=True),
)  # fmt: skip
