"""Weight updates in the process that answers clients: versions, retries, and the route that drops an update.

* A bucket's `weight_version` is reported once the update has ended, not when the bucket came.
* If the scheduler is still finishing its last step when it is asked to exchange weights, it is asked again.
* Replicas (`--dp-size`) take weights from files only, and no replica exchanges its own while another can't.
* `POST /abandon_weight_update` drops an update that its trainer does not end.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.all_replicas import replicas
from sglang_dsv4.seam.live import serves_deepseek_v4

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

BUSY = "Requests are running"
"""Beginning of the scheduler's answer while requests are running; see `session`."""
UNCHANGED = "The old weights stay"
"""End of the scheduler's answer to an update that has changed nothing."""
NOT_ASKED = f"{BUSY} on a replica: pause with mode retract or abort, or continue and wait for them."
"""The answer of a paused server with replicas, none of which was asked to exchange its weights."""
ABANDON = "sglang_dsv4: abandon the weight update"
"""`rid` of a request to end an update that drops it."""
ASK_FOR_S = 5.0
"""How long the scheduler is asked again; a step takes some milliseconds."""
_PAUSE_S = 0.05


def refuse_parts(manager: TokenizerManager, *args: object) -> None:
    """Before a weight update that comes in parts: refuse it with replicas, whose updates would not end together.

    Raises:
        ValueError: names the flag, and what to do.
    """
    if serves_deepseek_v4() and replicas() > 1:
        raise ValueError(
            f"replicas (--dp-size {replicas()}) take new weights from files only: write the checkpoint to a folder and "
            "POST /update_weights_from_disk, or start the server with --attn-dp-size, whose groups take tensors"
        )


def hold_version(manager: TokenizerManager, obj: Any, *args: object) -> None:
    """Before a bucket is sent to the scheduler: keep its weight version until the update ends."""
    if serves_deepseek_v4() and obj.weight_version is not None:
        manager.dsv4_weight_version, obj.weight_version = obj.weight_version, None


async def end(original: Callable[..., Awaitable[tuple[bool, str]]], manager: TokenizerManager, *args: Any) -> tuple:
    """The answer to `/end_weight_update`; if the new weights are served, the buckets' weight version is set."""
    success, message = await _ask(original, manager, *args)
    if not success and message.startswith(BUSY):
        return success, message  # the update is still open
    version = getattr(manager, "dsv4_weight_version", None)
    if version is not None:
        manager.dsv4_weight_version = None
        if success and args[0].rid != ABANDON:
            from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

            await manager.update_weight_version(UpdateWeightVersionReqInput(new_version=version))
            message += f" Weight version updated to {version}."
    return success, message


async def from_files(original: Callable[..., Awaitable[tuple]], manager: TokenizerManager, *args: Any) -> tuple:
    """The answer to `/update_weights_from_disk`."""
    if replicas() == 1 or not serves_deepseek_v4():
        return await _ask(original, manager, *args)
    success, message, *rest = await _ask(functools.partial(_if_all_are_idle, original), manager, *args)
    unchanged = message.count(UNCHANGED) + message.count(BUSY)
    if not success and message != NOT_ASKED and unchanged < replicas():
        message += " Replicas may have other weights now: repeat this with the old folder or the new one."
    return success, message, *rest


async def _if_all_are_idle(original: Callable[..., Awaitable[tuple]], manager: TokenizerManager, *args: Any) -> tuple:
    """The replicas' answer, if no replica of a paused server has requests; an idle replica would exchange its weights
    while a busy one refuses. Without a pause SGLang waits until no replica has requests, and takes no new ones.

    The question is a flush, which empties the caches of idle replicas: an update would empty them, too.
    """
    if manager.is_pause:
        if args[0].abort_all_requests:
            manager.abort_request(abort_all=True)  # as SGLang does, before it exchanges weights
        if not (await manager.flush_cache()).success:
            return False, NOT_ASKED, [0] * replicas()
    return await original(manager, *args)


async def _ask(original: Callable[..., Awaitable[tuple]], manager: TokenizerManager, *args: Any) -> tuple:
    """The scheduler's answer; it is asked again for `ASK_FOR_S` while requests are running, on any replica."""
    for _ in range(int(ASK_FOR_S / _PAUSE_S)):
        answer = await original(manager, *args)
        if answer[0] or BUSY not in answer[1]:
            break
        await asyncio.sleep(_PAUSE_S)
    return answer


def add_route(result: None, manager: TokenizerManager, *args: object, **kwargs: object) -> None:
    """After ``TokenizerManager.__init__``: serve `/abandon_weight_update`, with the rights of `/end_weight_update`."""
    server = sys.modules.get("sglang.srt.entrypoints.http_server")  # an Engine without HTTP has none
    if server is None or not serves_deepseek_v4():
        return
    from fastapi.responses import JSONResponse
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @server.app.post("/abandon_weight_update", response_model=None)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def abandon_weight_update() -> object:
        success, message = await manager.end_weight_update(EndWeightUpdateReqInput(rid=ABANDON))
        return JSONResponse({"success": success, "message": message}, 200 if success else 400)
