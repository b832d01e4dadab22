"""The identity of stored prefixes: everything that their bytes depend on. Two servers may read each other's records if
their identities are equal."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor, nn

import dsv4_kernels
import sglang_dsv4
from sglang_dsv4.attention.implementation import chosen_implementation
from sglang_dsv4.seam import compat

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dsv4.cache.page_records import PageRecords
    from sglang_dsv4.cache.tail_memory import TierSlots

WORDS = 1 << 22
"""8-byte words of a tensor that are summed at once: 32 MiB, and as much again for the products."""


def identity_of(runner: ModelRunner, records: PageRecords, tails: TierSlots, ranks: list[str]) -> dict[str, str]:
    """The identity of a worker's records.

    Args:
        runner: the worker's.
        records, tails: give the formats of page records and tails.
        ranks: `weights_fingerprint` of each tensor-parallel rank, in rank order. Another number of ranks adds
            partial sums in another order, so it computes other bits. In a pipeline the ranks of this stage, and a
            fingerprint of the stages before it.
    """
    config, arguments = runner.model.dsv4_config, runner.server_args
    device, geometry = torch.device(runner.device), runner.token_to_kv_pool.geometry
    # Groups of attention data parallelism share their records. TP without groups keeps the name that its records have.
    groups = f", groups {parallel.attn_dp_size}" if (parallel := get_parallel()).attn_dp_size > 1 else ""
    stage = f", {runner.model.stage.name}" if parallel.pp_size > 1 else ""
    attention = chosen_implementation(device, geometry.dtype, geometry.row_dim)
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "model": blake2b(repr(config).encode(), digest_size=8).hexdigest(),
        "draft": arguments.speculative_algorithm or "none",
        "weights": blake2b(" ".join(ranks).encode(), digest_size=16).hexdigest(),
        "ranks": f"tp {arguments.tp_size}, ep {arguments.ep_size}" + groups + stage,
        "quantisers": repr(config.qat),
        "dtype": str(geometry.dtype),
        "rows": f"{records.fingerprint} {geometry.row_format.value}",
        "tails": "; ".join(f"{name} {tuple(part[:, 0].shape)} {part.dtype}" for name, part in tails.named_parts()),
        "computed by": (
            f"attention {attention.name}, experts {arguments.moe_runner_backend}, "
            f"deterministic {bool(arguments.enable_deterministic_inference)}"
        ),
        "device": kind,
        "code": code_fingerprint(),
        "versions": f"sglang-dsv4 {compat.our_version()}, SGLang {compat.sglang_version()}, torch {torch.__version__}",
    }


@cache
def code_fingerprint() -> str:
    """A digest of this package's sources as they are at the first call: a checkout may compute other bits under the
    same version, and later changes of its files are not in the running code."""
    digest = blake2b(digest_size=8)
    for package in (sglang_dsv4, dsv4_kernels):
        for root in map(Path, package.__path__):
            for file in sorted(root.rglob("*.py")):
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@torch.no_grad()
def weights_fingerprint(*models: nn.Module) -> str:
    """A digest of every parameter and buffer of the models as loaded (a target and its draft): name, dtype, shape and
    contents.

    Contents enter as sums of their 8-byte words times fixed odd numbers, modulo 2**64, so a change of any single word
    changes the digest; every byte is read once, on its device. It distinguishes different weights; it does not
    withstand a deliberate collision.
    """
    digest, factors = blake2b(digest_size=16), {}
    tensors = (sorted((*model.named_parameters(), *model.named_buffers()), key=itemgetter(0)) for model in models)
    for name, tensor in chain.from_iterable(tensors):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sums = []
        for words in _words(tensor.detach()):
            if words.device not in factors:
                generator = torch.Generator().manual_seed(1)
                numbers = torch.randint(-(1 << 62), 1 << 62, (WORDS,), generator=generator) * 2 + 1
                factors[words.device] = numbers.to(words.device)
            sums.append((words * factors[words.device][: len(words)]).sum())
        for value in torch.stack(sums).tolist() if sums else ():
            digest.update(value.to_bytes(8, "little", signed=True))
    return digest.hexdigest()


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor as int64 words, up to `WORDS` at a time; the last word is padded with zeros."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    for first in range(0, data.numel(), 8 * WORDS):
        part = data[first : first + 8 * WORDS]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8)).clone()
        yield part.view(torch.int64)
