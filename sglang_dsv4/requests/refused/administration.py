"""Checks of administrative calls that act after their answer.

The scheduler's guard (`requests.failures`) answers a call whose handler raises. It does not see the call's later effect
in the loop that runs forwards, where an error ends the server:

======================  ===================================================================  =========================
call                    its later effect                                                     checked by
======================  ===================================================================  =========================
`/start_profile`        starts and writes a profile between two forwards                     :func:`profile`
`/slow_down`            sleeps before each forward                                           :func:`check`
`/set_internal_state`   limits the requests of a batch                                       :func:`check`
`/configure_logging`    logs or writes each request, in the process that answers clients     :func:`check_logging`
`/pause_generation`     stops the loop, but not the loop of a pipeline's stages              :func:`check_pause`
======================  ===================================================================  =========================

A profile can still fail later, when the disk is full. Then its state is dropped, and the server goes on
(:func:`profile_step`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4.seam.live import live_parts, serves_deepseek_v4

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ConfigureLoggingReq, PauseGenerationReqInput, ProfileReq, ProfileReqOutput
    from sglang.srt.managers.scheduler_components.profiler_manager import SchedulerProfilerManager
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

LONGEST_SLEEP_S = 60
MOST_STEPS = 2**31 - 1
LONGEST_NAME = 128
"""Characters of a profile's id and of its prefix; a file name has at most 255 bytes."""
OF_CUDA = ("MEM", "CUDA_PROFILER")
LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
LOG_FORMATS = ("text", "json")
REQUEST_LOG_LEVELS = range(4)


def check(request: object) -> None:
    """Check an administrative call before the scheduler's dispatcher handles it; other requests pass.

    Raises:
        ValueError: it would end the scheduler, or stop it for hours, when the next forward runs.
    """
    name = type(request).__name__
    if name == "SlowDownReqInput":
        seconds = request.forward_sleep_time
        if seconds is not None and not (math.isfinite(seconds) and seconds <= LONGEST_SLEEP_S):
            raise ValueError(f"forward_sleep_time must be at most {LONGEST_SLEEP_S} seconds, got {seconds}.")
    elif name == "SetInternalStateReq":
        size = request.server_args.get("pp_max_micro_batch_size", 1)
        if type(size) is not int:
            raise ValueError(f"pp_max_micro_batch_size must be a whole number, got {size!r}.")


def check_pause(manager: TokenizerManager, request: PauseGenerationReqInput) -> None:
    """Refuse a pause that the stages of a pipeline would not make; runs before ``TokenizerManager.pause_generation``.

    SGLang's loop for stages does not look whether it is paused: it would compute on after the answer that it has
    stopped. The mode `abort` ends all requests without the loop's help.

    Raises:
        ValueError: names the mode, and what to do.
    """
    stages = manager.server_args.pp_size
    if serves_deepseek_v4() and stages > 1 and request.mode != "abort":
        raise ValueError(f"mode {request.mode!r} is not supported with --pp-size {stages}: pause with mode 'abort'.")


def check_logging(manager: TokenizerManager, request: ConfigureLoggingReq) -> None:
    """Check all fields before SGLang sets the first; runs before ``TokenizerManager.configure_logging``.

    Raises:
        ValueError: a level or a format that does not exist, or a folder in which no file can be made.
    """
    if not serves_deepseek_v4():
        return
    level, form, threshold = request.log_requests_level, request.log_requests_format, request.dump_requests_threshold
    if level is not None and level not in REQUEST_LOG_LEVELS:
        raise ValueError(f"log_requests_level must be from 0 to {REQUEST_LOG_LEVELS[-1]}, got {level}.")
    if form is not None and form not in LOG_FORMATS:
        raise ValueError(f"log_requests_format must be one of {', '.join(LOG_FORMATS)}, got {form!r}.")
    if request.log_level is not None and request.log_level.upper() not in LOG_LEVELS:
        raise ValueError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {request.log_level!r}.")
    if threshold is not None and threshold < 1:
        raise ValueError(f"dump_requests_threshold must be at least 1, got {threshold}.")
    for name in ("dump_requests_folder", "crash_dump_folder"):
        folder = getattr(request, name)
        if folder and (reason := why_not_writable(folder)):  # "" turns it off
            raise ValueError(f"{name}: {reason}")


def why_not_writable(folder: str) -> str | None:
    """The reason why no file can be made in a folder, which is made if it does not exist; None if one can."""
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return None
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; a home that does not exist
        return f"no file can be made in {folder!r}: {error}. Name a folder that this server may write to."


# ------------------------------------------------------------------------------ profiles


def profile(
    original: Callable[[SchedulerProfilerManager, ProfileReq], ProfileReqOutput | None],
    manager: SchedulerProfilerManager,
    request: ProfileReq,
) -> ProfileReqOutput | None:
    """SGLang's answer to a call that starts or ends a profile; if that fails, an answer with the reason.

    Runs around ``SchedulerProfilerManager._profile``.
    """
    if live_parts() is None:
        return original(manager, request)
    from sglang.srt.managers.io_struct import ProfileReqOutput, ProfileReqType

    if request.req_type is ProfileReqType.START_PROFILE and (reason := reason_against_profile(manager, request)):
        return ProfileReqOutput(success=False, message=reason)
    try:
        return original(manager, request)
    except Exception as error:
        logger.exception("The profile failed; it is dropped")
        drop_profile(manager)
        return ProfileReqOutput(success=False, message=f"The profile failed: {type(error).__name__}: {error}")


def profile_step(
    original: Callable[[SchedulerProfilerManager, Any], None], manager: SchedulerProfilerManager, batch: Any
) -> None:
    """Start or end a profile before a forward; one that fails is dropped.

    Runs around ``SchedulerProfilerManager._profile_batch_predicate``.
    """
    try:
        original(manager, batch)
    except Exception:
        if live_parts() is None:
            raise
        logger.exception("The profile failed; it is dropped, and the server goes on")
        drop_profile(manager)


def reason_against_profile(manager: SchedulerProfilerManager, request: ProfileReq) -> str | None:
    """The reason for a 400 to a call that starts a profile; None if the profile can be made."""
    if getattr(manager, "profile_in_progress", False):
        return "Profiling is already in progress. Call /stop_profile first."
    for name in ("num_steps", "start_step"):
        steps = getattr(request, name)
        if steps is not None and not 1 <= steps <= MOST_STEPS:
            return f"{name} must be at least 1 and at most {MOST_STEPS}, got {steps}."
    if request.profile_by_stage and request.num_steps is None:
        return "profile_by_stage needs num_steps, the number of forwards of each stage."
    known = known_activities()
    unknown = [activity for activity in request.activities or () if activity not in known]
    if unknown or request.activities == []:
        return f"activities must be some of {', '.join(known)}, got {request.activities}."
    for name in ("profile_id", "profile_prefix"):
        text = getattr(request, name) or ""
        if len(text) > LONGEST_NAME or "/" in text or "\0" in text:
            return f"{name} is a part of file names: at most {LONGEST_NAME} characters and no /, got {text!r}."
    return why_not_writable(profile_folder(request))


def profile_folder(request: ProfileReq) -> str:
    """The folder that SGLang writes a profile to."""
    from sglang.srt.environ import envs

    return envs.SGLANG_TORCH_PROFILER_DIR.get() if request.output_dir is None else request.output_dir


def known_activities() -> list[str]:
    """The activities that this process can record."""
    import torch
    from sglang.srt.platforms import current_platform

    known = ["CPU", "GPU", *(OF_CUDA if torch.cuda.is_available() else ())]
    if current_platform.is_out_of_tree():
        known.append(current_platform.get_torch_profiler_activity_str())
    if importlib.util.find_spec("rpdTracerControl") is not None:
        known.append("RPD")
    return list(dict.fromkeys(known))


def drop_profile(manager: SchedulerProfilerManager) -> None:
    """End what a failed profile records, and forget it: the next call starts from a new state."""
    from sglang.srt.model_executor.step_span_utils import set_detailed_annotations_enabled

    for recorder in ("torch_profiler", "rpd_profiler"):
        started = getattr(manager, recorder, None)
        if started is not None:
            with contextlib.suppress(Exception):  # it may be what failed
                started.stop()
    group = manager.dp_tp_cpu_group
    manager.__post_init__()
    manager.dp_tp_cpu_group = group  # the group that the scheduler was made with, see SGLang's comment
    set_detailed_annotations_enabled(False)
