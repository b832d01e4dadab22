"""Counts of what a prefill or decode server holds for requests: rooms, slots, pages and queues, in a file.

In a server's schedulers this module is a plugin of SGLang, found through PYTHONPATH. Each rank writes its counts twice
a second to the file that PYTEST_TRANSFER_ROOMS names, with the side in place of {side} and its numbers of {rank}.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FILE = "PYTEST_TRANSFER_ROOMS"
PERIOD_S = 0.5
ENTRY_POINT = "[sglang.srt.plugins]\ntransfer_rooms = transfer_rooms:setup\n"
TABLES = (
    *("request_status", "failure_records", "_deferred_ack_targets"),
    *("transfer_infos", "req_to_decode_prefix_len"),
    *("required_prefill_response_num_table", "prefill_response_tracker", "_deferred_abort_ack_tracker"),
)
"""Tables of SGLang's manager of transfers whose keys are rooms. (It remembers the numbers of the rooms whose transfer
has failed half-way, in `_deferred_ack_poisoned_rooms`.)"""


def install(folder: Path) -> dict[str, str]:
    """Write a distribution with this plugin into `folder`; returns the environment of servers that load it."""
    info = folder / "transfer_rooms-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transfer-rooms\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "transfer_rooms.py").write_text(Path(__file__).read_text())
    return {"PYTHONPATH": str(folder), FILE: str(folder / "{side}-{rank}.json")}


def counts(folder: Path, side: str) -> dict[str, int]:
    """Return the newest counts of a side, `prefill` or `decode`, that were written after this call: sums over ranks."""
    begin, sums = time.time(), Counter()
    while time.time() - begin < 60:
        files = list(folder.glob(f"{side}-*.json"))
        if files and all(file.stat().st_mtime > begin + PERIOD_S for file in files):
            for file in files:
                sums.update(json.loads(file.read_text()))
            return dict(sums)
        time.sleep(PERIOD_S)
    raise AssertionError(f"a rank of the {side} server has written no counts for a minute")


def setup() -> None:
    """The plugin's entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if FILE in os.environ:
        HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_disaggregation", begin, HookType.AFTER)


def begin(result: Any, scheduler: Any) -> None:
    side = scheduler.disaggregation_mode.value
    if side != "null":
        threading.Thread(target=write_always, args=(scheduler, side), name="rooms", daemon=True).start()


def write_always(scheduler: Any, side: str) -> None:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = f"{parallel.dp_rank or 0}-{parallel.tp_rank}"
    file = Path(os.environ[FILE].replace("{side}", side).replace("{rank}", rank))
    while True:
        time.sleep(PERIOD_S)
        try:
            text = json.dumps(measured(scheduler))
        except RuntimeError:  # a table has changed while it was read
            continue
        written = file.with_suffix(".new")
        written.write_text(text)
        written.rename(file)


def measured(scheduler: Any) -> dict[str, int]:
    """Return what is held, by name; all but what the tree keeps for other requests must be 0 on an idle server."""
    bootstrap, preallocation = scheduler.disagg_prefill_bootstrap_queue, scheduler.disagg_decode_prealloc_queue
    manager = (bootstrap or preallocation).kv_manager
    held = {name.strip("_"): len(getattr(manager, name)) for name in TABLES if hasattr(manager, name)}
    held["addr_to_rooms"] = sum(map(len, getattr(manager, "addr_to_rooms_tracker", {}).values()))
    if bootstrap is not None:
        held |= {"bootstrap_queue": len(bootstrap.queue), "inflight": len(scheduler.disagg_prefill_inflight_queue)}
    else:
        transfer = scheduler.disagg_decode_transfer_queue
        held |= {"prealloc_queue": len(preallocation.queue), "pending": len(preallocation.pending_reqs)}
        held |= {"retracted": len(preallocation.retracted_queue), "transfer_queue": len(transfer.queue)}
        held |= {"deferred_releases": len(transfer._deferred_releases)}
    metadata = scheduler.req_to_metadata_buffer_idx_allocator
    held["metadata_rows"] = metadata.size - metadata.available_size()
    requests, pages = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    held["request_slots"] = len(requests.req_to_token) - 1 - requests.available_size()  # slot 0 pads
    in_tree = scheduler.tree_cache.evictable_size()
    held["pages"] = (pages.size - pages.available_size() - in_tree) // pages.page_size
    held["protected_tokens"] = scheduler.tree_cache.protected_size()
    held["waiting"] = len(scheduler.waiting_queue)
    return held
