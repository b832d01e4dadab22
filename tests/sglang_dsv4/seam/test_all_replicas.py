"""Answers of replicas to a flush, merged, through SGLang's own function."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

from sglang_dsv4.seam import all_replicas, live


class Manager:
    """SGLang's tokenizer manager, as far as a flush uses it."""

    mm_processor = None

    def __init__(self, *answers: bool) -> None:
        self.answers, self.timeouts = answers, []

    def auto_create_handle_loop(self) -> None:
        pass

    async def flush_cache_communicator(self, request: FlushCacheReqInput) -> list[FlushCacheReqOutput]:
        self.timeouts.append(request.timeout_s)
        return [FlushCacheReqOutput(success=answer) for answer in self.answers]


def flushed(manager: Manager, *arguments: Any) -> FlushCacheReqOutput:
    original = inspect.unwrap(TokenizerControlMixin.flush_cache)
    return asyncio.run(all_replicas.flush(original, manager, *arguments))


@pytest.mark.parametrize("answers", [(True, True), (True, False), (False, True), (False, False)])
def test_a_flush_succeeds_if_every_replica_has_flushed(
    answers: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's answer is the first replica's: the other kept its cache, and the client heard 200."""
    monkeypatch.setattr(live, "_answers_clients", True)
    monkeypatch.setattr(all_replicas, "replicas", lambda: 2)
    manager = Manager(*answers)
    found = flushed(manager, 5.0)
    assert found.success is all(answers) and manager.timeouts == [5.0]
    refused = answers.count(False)
    assert found.message == "" if not refused else f"{refused} of 2 replicas (--dp-size) have requests" in found.message


@pytest.mark.parametrize("ours", [True, False])
def test_one_replica_or_another_model_answers_as_in_sglang(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_answers_clients", ours)
    monkeypatch.setattr(live, "_live", None)
    monkeypatch.setattr(all_replicas, "replicas", lambda: 1 if ours else 2)
    assert flushed(Manager(True, False)).success
