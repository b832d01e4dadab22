"""Counts of what a server holds for requests: slots, pages, tails and queues, in a file; rooms on a prefill or decode
server.

In a server's schedulers this module is a plugin of SGLang, found through PYTHONPATH. Each rank writes its counts twice
a second to the file that PYTEST_HELD_RESOURCES names, with the side in place of {side} and its numbers of {rank}.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FILE = "PYTEST_HELD_RESOURCES"
PERIOD_S = 0.5
WHOLE = "null"
"""The side of a server that does both prefill and decode: SGLang's value of --disaggregation-mode."""
ENTRY_POINT = "[sglang.srt.plugins]\nheld_resources = held_resources:setup\n"
TABLES = (
    *("request_status", "failure_records", "_deferred_ack_targets"),
    *("transfer_infos", "req_to_decode_prefix_len"),
    *("required_prefill_response_num_table", "prefill_response_tracker", "_deferred_abort_ack_tracker"),
)
"""Tables of SGLang's manager of transfers whose keys are rooms. (It remembers the numbers of the rooms whose transfer
has failed half-way, in `_deferred_ack_poisoned_rooms`.)"""


def install(folder: Path) -> dict[str, str]:
    """Write a distribution with this plugin into `folder`; returns the environment of servers that load it."""
    info = folder / "held_resources-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: held-resources\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "held_resources.py").write_text(Path(__file__).read_text())
    return {"PYTHONPATH": str(folder), FILE: str(folder / "{side}-{rank}.json")}


def counts(folder: Path, side: str) -> dict[str, int]:
    """Return the newest counts of a side, `prefill`, `decode` or `WHOLE`, that were written after this call: sums over
    ranks."""
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
    arguments = (scheduler, scheduler.disaggregation_mode.value)
    threading.Thread(target=write_always, args=arguments, name="held resources", daemon=True).start()


def write_always(scheduler: Any, side: str) -> None:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    rank = f"{parallel.dp_rank or 0}-{parallel.tp_rank}"
    file = Path(os.environ[FILE].replace("{side}", side).replace("{rank}", rank))
    while True:
        time.sleep(PERIOD_S)
        try:
            text = json.dumps(measured(scheduler))
        except (RuntimeError, KeyError):  # a table has changed while it was read
            continue
        written = file.with_suffix(".new")
        written.write_text(text)
        written.rename(file)


def measured(scheduler: Any) -> dict[str, int]:
    """Return what is held, by name; all but what the tree keeps for other requests must be 0 on an idle server."""
    held = {} if scheduler.disaggregation_mode.value == WHOLE else of_transfers(scheduler)
    requests, pages = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator
    held["request_slots"] = len(requests.req_to_token) - 1 - requests.available_size()  # slot 0 pads
    in_tree = scheduler.tree_cache.evictable_size()
    held["pages"] = (pages.size - pages.available_size() - in_tree) // pages.page_size
    held["protected_tokens"] = scheduler.tree_cache.protected_size()
    held["waiting"] = len(scheduler.waiting_queue)
    return held | of_prefixes(scheduler.tree_cache)


def of_transfers(scheduler: Any) -> dict[str, int]:
    """Return what transfers hold: rooms, queues, rows of metadata."""
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
    return held


def of_prefixes(cache: Any) -> dict[str, int]:
    """Return what the prefix cache holds for requests: tails that no node of the tree has, pins, reads from files."""
    from dsv4_radix_cache.slots import Holder

    ledger, host, storage, held = cache.ledger, cache.host, cache.storage, {}
    if ledger is not None:
        tails = [ledger.store[tail] for tail in list(ledger.store.ids())]
        held["tails"] = sum(tail.holder is Holder.REQUEST for tail in tails)
        held |= {"ledger": len(ledger), "pinned_tails": sum(tail.pins for tail in tails)}
    if host is not None:
        held["pinned_host_pages"] = sum(page.pins for page in host.pages._pages.values())
    if storage is not None:
        held |= {"reads_from_files": storage.fetching, "reserved_host_pages": storage.reserved}
    return held
