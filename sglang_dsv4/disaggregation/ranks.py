"""Data-parallel ranks of a prefill server: which of them has a request, and who is told of an abort.

A prefill server with `--dp-size` or `--attn-dp-size` chooses a rank by the prompt's prefix (`prefix.rank_choice`), and
tells its bootstrap server which rank has which room. The decode server asks for it before it names its pages. The
bootstrap server forgets rooms in time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.compat import place_of_rank
from sglang_dsv4.seam.live import live_parts

if TYPE_CHECKING:
    from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeRequest


def count_replicas(manager: CommonKVManager) -> None:
    """Before a room is opened: give the manager of a replica of `--dp-size` the replica's number.

    SGLang registers a replica under the number `system_dp_rank`, and its rooms under `attn_dp_rank`, which is 0 on
    every replica. So it would send decode servers to replica 0, or fail the rooms of the others.
    """
    if manager.system_dp_size > 1:
        manager.attn_dp_rank = manager.system_dp_rank


def keep_rank(queue: DecodePreallocQueue, decode_req: DecodeRequest, prefill_dp_rank: int) -> None:
    """Before a request's pages are named to its rank on the prefill server: remember the rank.

    If a pause retracts the request, the prefill server computes it again: on this rank, which waits for its pages.
    SGLang would ask the bootstrap server again, which may have forgotten the room, and let the prefill server choose.
    """
    info = queue.kv_manager.prefill_info_table.get(decode_req.kv_receiver.bootstrap_addr)
    if live_parts() is not None and info is not None and info.dp_size > 1:
        decode_req.req.disagg_prefill_dp_rank = prefill_dp_rank


def tell_every_rank(original: Callable[..., None], receiver: CommonKVReceiver, *args: Any, **kwargs: Any) -> None:
    """Tell the prefill server that a request is aborted here; around `ensure_abort_notified`.

    Before the rank of the request's room is known SGLang tells nobody, and the prefill server keeps the request for
    minutes. All ranks are told then: the rank that has the room ends it, or does so when it gets the request
    (`disaggregation.rooms`); the others forget the number in time.
    """
    info = receiver.kv_mgr.prefill_info_table.get(receiver.bootstrap_addr)
    unknown = info is not None and info.dp_size > 1 and not hasattr(receiver, "prefill_dp_rank")
    if live_parts() is None or not unknown or receiver.abort_notified:
        return original(receiver, *args, **kwargs)
    found = (
        place_of_rank(receiver, rank, cp_rank, tp_rank, pp_rank)
        for rank in range(info.dp_size)
        for cp_rank in info.target_cp_ranks
        for tp_rank in info.target_tp_ranks
        for pp_rank in info.target_pp_ranks
    )
    # A server that does not say where one rank is may be dead, and each question would wait for its timeout.
    receiver.bootstrap_infos = list(itertools.takewhile(lambda place: place is not None, found))
    return original(receiver, *args, **kwargs)
