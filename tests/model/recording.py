"""What our model's sublayers and its backend see and return while a request runs, token by token in order."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from model.harness import Harness
from torch import Tensor


class Recording:
    """Tensors by (name, layer), concatenated over the forwards; token axis first.

    "attn.in", "attn.out", "ffn.in", "ffn.out": normed inputs and outputs of the sublayers. "block.in", "block.out":
    streams. "kv", "entries", "index_keys": rows on their way to the pools. "q", "attended": in and out of the
    attention kernel. "index_q", "index_weights", "selected" [num_tokens, num_entries] bool: the indexer. "experts",
    "weights": the router.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], list[Tensor]] = defaultdict(list)

    def add(self, name: str, layer: int, value: Tensor) -> None:
        self._parts[name, layer].append(value.detach().clone())

    def __call__(self, name: str, layer: int) -> Tensor:
        parts = self._parts[name, layer]
        if name == "selected":
            width = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts]
        return torch.cat(parts)


@contextmanager
def recording(harness: Harness) -> Iterator[Recording]:
    """Records one request's forwards (several requests in a batch would be mixed up)."""
    record, backend, undo = Recording(), harness.backend, []

    def wrap(name: str, before: Any) -> None:
        original = getattr(backend, name)

        def call(layer: int, *args: Any, **kwargs: Any) -> Any:
            before(layer, *args)
            return original(layer, *args, **kwargs)

        setattr(backend, name, call)
        undo.append(lambda: delattr(backend, name))

    wrap("window", lambda layer, kv: record.add("kv", layer, kv))

    def closed(layer: int, rows: Tensor) -> Tensor:
        """A decode request that closes no group writes to a row of page 0, which is nobody's."""
        ratio = harness.pool.geometry.layer_ratio(layer)
        return rows[backend.metadata.compress[ratio].slots >= 256 // ratio]

    wrap("write_entries", lambda layer, entries: record.add("entries", layer, closed(layer, entries)))
    wrap("write_index_keys", lambda layer, keys: record.add("index_keys", layer, closed(layer, keys)))

    select, attend = backend.select, backend.attend

    def recorded_select(layer: int, q: Tensor, weights: Tensor, top_k: int, num_heads: int) -> Tensor:
        rows = select(layer, q, weights, top_k, num_heads)
        record.add("index_q", layer, q)
        record.add("index_weights", layer, weights)
        rows_of = backend.metadata.unpack if backend._unpacks(4, top_k, num_heads) else backend.metadata
        pages = rows_of.page_table[0].long()
        place = torch.full((int(pages.max()) + 1,), -1)
        place[pages] = torch.arange(len(pages))
        entries = place[rows.long().clamp(min=0) // 64] * 64 + rows % 64
        mask = torch.zeros(len(rows), 64 * len(pages) + 1, dtype=torch.bool)
        record.add("selected", layer, mask.scatter(1, torch.where(rows < 0, 64 * len(pages), entries), True)[:, :-1])
        return rows

    def recorded_attend(layer: int, q: Tensor, *rest: Any) -> Tensor:
        out = attend(layer, q, *rest)
        record.add("q", layer, q)
        record.add("attended", layer, out)
        return out

    backend.select, backend.attend = recorded_select, recorded_attend
    undo += [lambda: delattr(backend, "select"), lambda: delattr(backend, "attend")]

    def hook(layer: int, name: str) -> Any:
        def store(module: Any, args: tuple[Any, ...], output: Any) -> None:
            record.add(f"{name}.in", layer, args[0])
            record.add(f"{name}.out", layer, output)

        return store

    def router(layer: int) -> Any:
        def store(module: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            record.add("weights", layer, output[0])
            record.add("experts", layer, output[1].long())

        return store

    for i, block in enumerate(harness.model.model.layers):
        for name, module in (("block", block), ("attn", block.attn), ("ffn", block.ffn)):
            undo.append(module.register_forward_hook(hook(i, name)).remove)
        undo.append(block.ffn.gate.register_forward_hook(router(i)).remove)
    try:
        yield record
    finally:
        for restore in undo:
            restore()
