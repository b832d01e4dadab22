"""A stage of a pipeline that decides otherwise, as a plugin of SGLang in a server's processes.

The last stage does what the file `PLANTED_STAGE` says, once, before it plans the next batch: `evict` (a page of the
tree), `forget` (a tail), `drop` (the first waiting request), `abort` (a running request), `flush` (the cache, once this
stage is idle) or `skip` (a round without a batch).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ENTRY_POINT = "[sglang.srt.plugins]\nplanted_stage = planted_stage:setup\n"
VARIABLE = "PYTEST_PLANTED_STAGE"


def install(folder: Path) -> dict[str, str]:
    """Write a distribution with this plugin; return the environment of a server that is to load it."""
    info = folder / "planted_stage-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-stage\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "planted_stage.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, VARIABLE: str(folder / "now")}


def setup() -> None:
    """The plugin's entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run", otherwise, HookType.AROUND)


def otherwise(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan the next batch, after the fault or with it."""
    import msgspec
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    file = Path(os.environ[VARIABLE])
    if not scheduler.pp_group.is_last_rank or not file.exists():
        return original(scheduler, *args, **kwargs)
    fault = file.read_text()
    if fault == "evict":
        scheduler.tree_cache.evict(EvictParams(num_tokens=256))
    elif fault == "forget":
        store = scheduler.tree_cache.ledger.store
        store.release(next(iter(store.ids())))
    elif fault == "drop":
        if not scheduler.waiting_queue:
            return original(scheduler, *args, **kwargs)
        scheduler.waiting_queue.pop(0)
    elif fault == "abort":
        running = [req for req in scheduler.collect_inflight_reqs() if req.output_ids and not req.finished()]
        if not running:
            return original(scheduler, *args, **kwargs)
        scheduler.abort_request(AbortReq(rid=running[0].rid))
    elif fault == "flush" and not scheduler.flush_cache():
        return original(scheduler, *args, **kwargs)
    plan = original(scheduler, *args, **kwargs)
    if fault == "skip":
        if plan.batch_to_run is None:
            return plan
        plan = (
            msgspec.structs.replace(plan, batch_to_run=None)
            if hasattr(plan, "__struct_fields__")
            else (type(plan)(batch_to_run=None, running_batch=plan.running_batch))
        )
    file.unlink()
    return plan
