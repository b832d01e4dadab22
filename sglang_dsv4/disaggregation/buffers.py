"""The request rows of our pools in SGLang's description of what a server sends or receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4.cache.kv_pool import Dsv4KVPool
from sglang_dsv4.seam.install import set_attribute
from sglang_dsv4.seam.live import live_parts
from sglang_dsv4.seam.rows.disaggregation import CARRIES_REASON

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.common.conn import CommonKVSender


def list_rings(
    original: Callable[..., None],
    kv_args: KVArgs,
    token_to_kv_pool: Any,
    draft_token_to_kv_pool: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Describe our pools' rings as request rows: the target's as one component, a draft's as a second.

    Around `setup_state_kv_args`, which asks DeepSeek-V4 pools for pages of window rows. SGLang sends a component of
    type REQUEST_ROW with the last chunk of a prompt, from the sender's request slot to the receiver's.
    """
    if not isinstance(token_to_kv_pool, Dsv4KVPool):
        original(kv_args, token_to_kv_pool, draft_token_to_kv_pool, *args, **kwargs)
        return
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.disaggregation.utils import append_state_component

    set_attribute(CommonKVManager, CARRIES_REASON)  # before the manager is made from this description
    kv_args.state_types = []
    kv_args.state_data_ptrs, kv_args.state_data_lens, kv_args.state_item_lens = [], [], []
    kv_args.state_dim_per_tensor, kv_args.state_slice_outer_counts = [], []
    kv_args.state_layer_ids, kv_args.state_conv_shard_groups = [], []
    kv_args.is_hybrid_mla_backend = False
    kv_args.swa_kv_cache_layout = None
    kv_args.mla_compression_ratios = None  # needed only where a pipeline's stages hold different layers
    for pool in filter(None, (token_to_kv_pool, draft_token_to_kv_pool)):
        append_state_component(kv_args, StateType.REQUEST_ROW, *pool.ring_buf_infos())


def count_rings_once(
    original: Callable[..., None], sender: CommonKVSender, kv_indices: Any, state_indices: list[Any] | None
) -> None:
    """Record what a sender has sent, for its metrics; around SGLang's method.

    SGLang multiplies the request slots of all components by the bytes of all components: with a draft it counted the
    rings of both twice. Each component sends the one slot of its request, so the first component's slot is enough.
    """
    original(sender, kv_indices, state_indices[:1] if live_parts() is not None and state_indices else state_indices)


def with_reason(before: bool, manager: type) -> bool:
    """The value of `CommonKVManager.kv_status_msg_carries_reason`: True. Receivers read the reason where it is sent."""
    return True
