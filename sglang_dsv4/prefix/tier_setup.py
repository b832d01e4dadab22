"""Set-up of the host and storage tiers by SGLang's flags (`--enable-hierarchical-cache`, `--hicache-…`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.runtime_context import get_memory, get_parallel

from dsv4_radix_cache.pages import PAGE_TOKENS
from sglang_dsv4.cache.checked_storage import READ_SLOTS, CheckedStorage, StagedRecords, stage
from sglang_dsv4.cache.disk_limit import DiskLimit, DiskOptions
from sglang_dsv4.cache.page_copies import PageCopies
from sglang_dsv4.cache.pool_plan import format_bytes
from sglang_dsv4.cache.record_files import RecordFiles, identity_digest
from sglang_dsv4.pipeline.this_stage import Messages, is_divided
from sglang_dsv4.pipeline.votes import Votes
from sglang_dsv4.prefix.host_tier import HostTier, WritePolicy
from sglang_dsv4.prefix.identity import identity_of, weights_fingerprint
from sglang_dsv4.prefix.storage_tier import PrefetchOptions, StorageTier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dsv4.prefix.tail_nodes import TailNodes

logger = logging.getLogger(__name__)

IDENTITY_TAG, VOTES_TAG = int.from_bytes(b"D4Id", byteorder="big"), int.from_bytes(b"D4Vo", byteorder="big")
"""Tags of the messages between the stages of a pipeline."""
FINGERPRINT_BYTES = 16


def write_policy() -> WritePolicy:
    """The policy that `--hicache-write-policy` chooses."""
    return WritePolicy(get_memory().hicache_write_policy)


def log_host_memory(copies: PageCopies) -> None:
    """Log the size of the host tier and its write policy."""
    logger.info(
        "Whole prefixes in host memory: %d pages of %d tokens (%s), %s.",
        copies.host_slots,
        PAGE_TOKENS,
        format_bytes(copies.records.memory.nbytes),
        write_policy().value,
    )


def open_storage(
    runner: ModelRunner,
    host: HostTier,
    nodes: TailNodes,
    least_of_ranks: Callable[[list[int]], list[int]] = list,
) -> StorageTier:
    """The storage tier of a worker (`--hicache-storage-backend`).

    Args:
        runner: the worker's; its model is loaded.
        host: the host tier.
        nodes: the tails on the tree's nodes.
        least_of_ranks: the least of each number over the ranks that keep equal trees; of a pipeline, this stage's.
    """
    memory, parallel, pool = get_memory(), get_parallel(), runner.token_to_kv_pool
    name = memory.hicache_storage_backend
    extra, threshold, timeout_s, timeout_s_per_ki_token, _ = HybridCacheController.parse_storage_backend_extra_config(
        memory.hicache_storage_backend_extra_config
    )

    writes, sizes = parallel.attn_tp_rank == 0, (host.copies.records.memory.shape[1], pool.tail_memory.slot_bytes)

    @cache
    def connection() -> tuple[HiCacheStorage, StagedRecords | None]:
        """One connection for the server's life: a flush empties this server, not the storage backend."""
        staged = StagedRecords(READ_SLOTS + 1, max(sizes))
        backend = other_backend(name, extra, parallel.attn_tp_rank, parallel.attn_tp_size, staged)
        return backend, stage(backend, staged)

    bounds = DiskOptions.of(extra) if name == "file" else DiskOptions()

    @cache
    def limit(root: Path) -> DiskLimit | None:
        return DiskLimit(root, bounds) if bounds.max_bytes or bounds.min_free_bytes else None

    def open_backend() -> RecordFiles | CheckedStorage:
        # The experts of a rank's rows are on all ranks: groups of attention data parallelism flush together, too.
        draft, group = () if pool.draft is None else (pool.draft.model,), get_tp_group()
        ranks = [weights_fingerprint(runner.model, *draft)]
        if group.world_size > 1:
            ranks *= group.world_size
            torch.distributed.all_gather_object(ranks, ranks[0], group=group.cpu_group)
        if line is not None:  # rows depend on the weights of the stages before, too
            ranks = [*weights_before(line, ranks), *ranks]
        identity = identity_of(runner, host.copies.records.records, pool.tail_memory.host, ranks)
        if name == "file":
            root = RecordFiles.root_from_environment(getattr(runner.server_args, "file_storage_path", None))
            logger.info("Prefixes are kept in %s, those of this server in %s.", root, identity_digest(identity).hex())
            return RecordFiles(root, identity, limit(root))
        return CheckedStorage(*connection(), identity)

    line = Messages.between_stages(IDENTITY_TAG) if is_divided() else None
    votes = Votes(least_of_ranks, Messages.between_stages(VOTES_TAG) if is_divided() else None)
    options = PrefetchOptions(memory.hicache_storage_prefetch_policy, threshold, timeout_s, timeout_s_per_ki_token)
    storage = StorageTier(
        open_backend,
        host,
        nodes,
        pool.ledger,
        pool.tail_memory,
        writes=writes,
        options=options,
        votes=votes,
    )
    if isinstance(storage.backend, CheckedStorage) and writes:
        for size in sizes:
            storage.backend.probe(name, size)
    return storage


def weights_before(line: Messages, own: list[str]) -> list[str]:
    """The fingerprint of the weights of all stages before this one; none before the first.

    Each stage gets it from the stage before, and sends the next stage one that covers its own weights.

    Args:
        line: messages between the stages.
        own: `weights_fingerprint` of each rank of this stage.
    """
    before = [bytes(line.receive(FINGERPRINT_BYTES, line.index - 1)).hex()] if line.index else []
    if line.index + 1 < line.count:
        digest = blake2b(" ".join([*before, *own]).encode(), digest_size=FINGERPRINT_BYTES).digest()
        line.send(list(digest), line.index + 1)
    return before


def other_backend(name: str, extra: dict | None, rank: int, ranks: int, staged: StagedRecords) -> HiCacheStorage:
    """A storage backend of SGLang's registry, or the one that `extra` names (`dynamic`).

    Raises:
        ValueError: it cannot be made; the message says why.
    """
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,  # every rank has the same rows, so keys contain no rank
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=None,
        extra_config=extra,
    )
    try:
        return StorageBackendFactory.create_backend(name, config, staged)
    except Exception as error:
        raise ValueError(f"--hicache-storage-backend {name} can't be opened: {error}") from error
