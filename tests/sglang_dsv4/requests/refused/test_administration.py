"""Administrative calls that would fail later, in the forward loop, are refused when they are asked."""

from __future__ import annotations

import inspect
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    ConfigureLoggingReq,
    PauseGenerationReqInput,
    ProfileReq,
    ProfileReqType,
    SetInternalStateReq,
    SlowDownReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import profiler_manager
from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_dsv4.requests.failures import GuardedRequests
from sglang_dsv4.requests.refused import administration
from sglang_dsv4.seam import live

BATCH = SimpleNamespace(forward_mode=SimpleNamespace(is_prefill=lambda: True, is_decode=lambda: False))


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_live", object())


class Profiler:
    """SGLang's profiler of one rank, with our hooks around it."""

    def __init__(self) -> None:
        self.forwards = 0
        self.manager = SchedulerProfilerManager(get_forward_ct=lambda: self.forwards)

    def ask(self, **fields: Any) -> str | None:
        """Return the reason why a call is refused; None if it is accepted."""
        request = ProfileReq(profile_id="p", **fields)
        answer = administration.profile(SchedulerProfilerManager._profile, self.manager, request)
        return None if answer is None or answer.success else answer.message

    def run(self, forwards: int) -> None:
        for _ in range(forwards):
            administration.profile_step(SchedulerProfilerManager._profile_batch_predicate, self.manager, BATCH)
            self.forwards += 1


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Profiler]:
    rank = SimpleNamespace(tp_rank=0, num_dp_ranks=1, pp_size=1, moe_ep_size=1)
    monkeypatch.setattr(profiler_manager, "get_parallel", lambda: rank)
    monkeypatch.setattr(profiler_manager, "get_dp_tp_group", lambda: SimpleNamespace(cpu_group="group"))
    monkeypatch.setattr(torch.distributed, "barrier", lambda group: None)
    made = Profiler()
    yield made
    administration.drop_profile(made.manager)


def test_a_profile_is_made(profiler: Profiler, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert profiler.ask(num_steps=2, output_dir=str(folder), activities=["CPU"]) is None
    profiler.run(4)
    assert [path.name for path in folder.iterdir()] == ["p-TP-0.trace.json.gz"]
    assert profiler.ask(req_type=ProfileReqType.STOP_PROFILE) is not None  # it has ended


REFUSED = {
    "a-folder-that-can-not-be": ({"output_dir": "/proc/nope", "num_steps": 1}, "no file can be made in '/proc/nope'"),
    "a-folder-without-a-name": ({"output_dir": "a\0b"}, "no file can be made in"),
    "nobodys-home": ({"output_dir": "~nobody_of_this_name/x"}, "no file can be made in"),
    "no-steps": ({"num_steps": 0}, "num_steps must be at least 1"),
    "steps-beyond-int32": ({"num_steps": 2**31}, "num_steps must be at least 1 and at most 2147483647"),
    "a-start-in-the-past": ({"start_step": -1}, "start_step must be at least 1"),
    "stages-without-end": ({"profile_by_stage": True}, "profile_by_stage needs num_steps"),
    "an-activity-that-is-none": ({"activities": ["CPU", "x"]}, "activities must be some of CPU, GPU"),
    "no-activity": ({"activities": []}, "activities must be some of"),
    "a-prefix-elsewhere": ({"profile_prefix": "../x"}, "profile_prefix is a part of file names"),
    "a-prefix-longer-than-a-file-name": ({"profile_prefix": "x" * 129}, "profile_prefix is a part of file names"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_profile_that_would_fail_later_is_refused(profiler: Profiler, fields: dict[str, Any], reason: str) -> None:
    """`{"num_steps": 1, "output_dir": "/proc/nope"}` got 200, and the next forward ended the server."""
    assert reason in (profiler.ask(**fields) or "")
    profiler.run(3)
    assert not profiler.manager.profile_in_progress and profiler.manager.torch_profiler is None


@pytest.mark.parametrize("later", [{}, {"start_step": 3}, {"profile_by_stage": True}], ids=["now", "later", "stage"])
def test_a_profile_that_fails_later_is_dropped(profiler: Profiler, tmp_path: Path, later: dict[str, Any]) -> None:
    """The folder was removed after the call had been accepted."""
    folder = tmp_path / "gone"
    assert profiler.ask(num_steps=1, output_dir=str(folder), activities=["CPU"], **later) is None
    shutil.rmtree(folder)
    folder.write_text("in its place")
    profiler.run(6)
    manager = profiler.manager
    assert not manager.profile_in_progress and manager.torch_profiler is None and manager.dp_tp_cpu_group == "group"
    assert profiler.ask(num_steps=1, output_dir=str(tmp_path / "other"), activities=["CPU"]) is None
    profiler.run(4)
    assert list((tmp_path / "other").iterdir())


def test_a_profile_that_fails_when_it_is_ended_is_dropped(profiler: Profiler, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    assert profiler.ask(output_dir=str(folder), activities=["CPU"]) is None
    assert "already in progress" in (profiler.ask(output_dir=str(tmp_path / "second"), activities=["CPU"]) or "")
    shutil.rmtree(folder)
    folder.write_text("in its place")
    assert "The profile failed" in (profiler.ask(req_type=ProfileReqType.STOP_PROFILE) or "")
    assert not profiler.manager.profile_in_progress
    assert profiler.ask(output_dir=str(tmp_path / "third"), activities=["CPU"]) is None


# ---- calls through the scheduler's dispatcher


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (SlowDownReqInput(forward_sleep_time=float("inf")), "forward_sleep_time must be at most 60 seconds, got inf"),
        (SlowDownReqInput(forward_sleep_time=float("nan")), "got nan"),
        (SlowDownReqInput(forward_sleep_time=1e10), "at most 60 seconds"),
        (SetInternalStateReq(server_args={"pp_max_micro_batch_size": 1.5}), "must be a whole number, got 1.5"),
        (SetInternalStateReq(server_args={"pp_max_micro_batch_size": None}), "must be a whole number, got None"),
    ],
    ids=["endless", "not-a-number", "of-years", "half-a-request", "no-number"],
)
def test_a_call_that_would_stop_the_loop_is_refused(request_: Any, reason: str) -> None:
    handled: list[Any] = []
    answer = GuardedRequests(handled.append, lambda answer, request: None)(request_)
    assert reason in answer.rid and not handled


@pytest.mark.parametrize(
    "request_",
    [
        SlowDownReqInput(forward_sleep_time=0.5),
        SlowDownReqInput(forward_sleep_time=None),
        SlowDownReqInput(forward_sleep_time=-1.0),
        SetInternalStateReq(server_args={"pp_max_micro_batch_size": 3}),
        SetInternalStateReq(server_args={}),
    ],
)
def test_other_calls_are_handled(request_: Any) -> None:
    handled: list[Any] = []
    GuardedRequests(handled.append, lambda answer, request: None)(request_)
    assert handled == [request_]


# ---- logging


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"log_requests_level": 99}, "log_requests_level must be from 0 to 3"),
        ({"log_requests_format": "xml"}, "log_requests_format must be one of text, json"),
        ({"log_level": "loud"}, "log_level must be one of CRITICAL"),
        ({"dump_requests_folder": "/proc/nope"}, "dump_requests_folder: no file can be made"),
        ({"crash_dump_folder": "/proc/nope"}, "crash_dump_folder: no file can be made"),
        ({"dump_requests_threshold": 0}, "dump_requests_threshold must be at least 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_logging_that_can_not_be_is_refused_before_a_field_is_set(fields: dict[str, Any], reason: str) -> None:
    """SGLang set the fields before the bad one, raised, and then failed at each request."""
    with pytest.raises(ValueError, match=reason):
        administration.check_logging(object(), ConfigureLoggingReq(log_requests=True, **fields))  # type: ignore[arg-type]


def test_other_logging_is_set(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    manager = SimpleNamespace(request_logger=SimpleNamespace(configure=lambda **fields: seen.append(fields)))
    request = ConfigureLoggingReq(log_requests_level=3, log_requests_format="json", dump_requests_folder=str(tmp_path))
    level = logging.getLogger().level
    administration.check_logging(manager, request)  # type: ignore[arg-type]
    TokenizerManager.configure_logging(manager, request)
    assert seen and manager.dump_requests_folder == str(tmp_path) and logging.getLogger().level == level


@pytest.mark.parametrize(("mode", "stages"), [("in_place", 2), ("retract", 2), ("abort", 2), ("in_place", 1)])
def test_stages_that_would_not_pause_say_so(mode: str, stages: int) -> None:
    """SGLang's loop for stages does not know the flag that a pause sets."""
    loop = inspect.getsource(inspect.unwrap(SchedulerPPMixin.event_loop_pp))
    assert "_engine_paused" not in loop and "_engine_paused" in inspect.getsource(
        inspect.unwrap(Scheduler.event_loop_normal)
    )
    manager = SimpleNamespace(server_args=SimpleNamespace(pp_size=stages))
    request = PauseGenerationReqInput(mode=mode)
    if stages == 1 or mode == "abort":
        administration.check_pause(manager, request)  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"mode '{mode}' is not supported with --pp-size 2: pause with mode 'abort'"):
        administration.check_pause(manager, request)  # type: ignore[arg-type]
