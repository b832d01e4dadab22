"""Weight updates in the scheduler: from tensors, a process group, files or IPC, all or nothing on every rank.

Each function runs around the method of SGLang's `SchedulerWeightUpdaterManager` that handles the request. The session
between `begin_weight_update` and `end_weight_update` is SGLang's; here the target and the draft each have a
`WeightUpdate`, and the served weights change in `end_weight_update` only:

1. every rank checks the tensors that came; if one rank or model failed, all drop the update;
2. no request may be running, since its KV is of the old weights; else the client gets a 400 and may try again later;
3. target and draft exchange their weights; if one rank fails, all swap back;
4. the prefix cache is flushed, which also opens stored prefixes anew, under the identity of the new weights.

An update from files or through IPC is one request, which does all of these steps. Where a quantisation method of SGLang
keeps its weights in a layout of its own (`reason_against`), weights come from files only, as SGLang loads them
(`weights.updates.old_files`).
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers import io_struct
from torch import Tensor, nn

from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.moe import FusedExperts
from sglang_dsv4.layers.nvfp4_experts import Nvfp4PackedExperts
from sglang_dsv4.model_config.config import Config, ConfigError
from sglang_dsv4.pipeline.this_stage import is_divided
from sglang_dsv4.seam.all_groups import true_in_all_groups
from sglang_dsv4.seam.compat import is_our_class
from sglang_dsv4.seam.weight_manager import close_session, is_idle, runners_of, tensors_of, timed
from sglang_dsv4.weights.checkpoint_files import read_config, stated
from sglang_dsv4.weights.loader import CheckpointError
from sglang_dsv4.weights.updates.routes import ABANDON, BUSY, UNCHANGED
from sglang_dsv4.weights.updates.staging import WeightUpdate

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner import ModelRunner

    Handler = Callable[[SchedulerWeightUpdaterManager, Any], Any]

logger = logging.getLogger(__name__)

OPEN = "a weight update is open: end it with /end_weight_update, or drop it with /abandon_weight_update"
IN_STAGES = "weights can't be exchanged with --pp-size above 1: start a server with the new checkpoint"
FILES_ONLY = (
    "into which tensors can't be exchanged one by one: write the new checkpoint to a folder and POST "
    "/update_weights_from_disk"
)
_WEIGHTS = "weights"  # SGLang's tag of the weights' memory


def begin(original: Handler, manager: SchedulerWeightUpdaterManager, request: Any) -> Any:
    """SGLang's answer to `/begin_weight_update`; from now on tensors are kept in host memory."""
    if not _is_ours(manager):
        return original(manager, request)
    runners = runners_of(manager, request.selector)
    reason = _released(manager) or _reason_against(runners) or (IN_STAGES if is_divided() else None)
    if not runners:
        reason = f"there is no model to update: the server has no {request.selector}"
    if reason is not None:
        return io_struct.BeginWeightUpdateReqOutput(success=False, message=reason)
    if _updates(manager):
        return io_struct.BeginWeightUpdateReqOutput(success=False, message=OPEN)
    answer = original(manager, request)
    if answer.success:
        for _, runner in runners:
            runner.model.weight_update = WeightUpdate(runner.model)
    return answer


def from_tensors(original: Handler, manager: SchedulerWeightUpdaterManager, request: Any) -> Any:
    """The answer to `/update_weights_from_tensor`: whether every rank could take the bucket."""
    if not _is_ours(manager):
        return original(manager, request)

    def receive() -> None:
        named = manager.tp_worker.deserialize_own_rank(request.serialized_named_tensors)
        runners = _opened(manager, request)
        if request.load_format is not None:
            named = _unflattened(named)
        for _, runner in runners:
            success, message = runner.weight_updater.update_weights_from_tensor(named)
            if not success:
                raise CheckpointError(message)

    return io_struct.UpdateWeightsFromTensorReqOutput(**_receive_bucket(manager, "tensor", receive))


def from_group(original: Handler, manager: SchedulerWeightUpdaterManager, request: Any) -> Any:
    """The answer to `/update_weights_from_distributed`: whether every rank could take the bucket."""
    if not _is_ours(manager):
        return original(manager, request)

    def receive() -> None:
        # Received in any case: the trainer's broadcast waits for it. FP8 is received as bytes, since gloo does not know
        # it, nor NCCL the dtype of its scales.
        dtypes = [getattr(torch, name.removeprefix("torch.")) for name in request.dtypes]
        received = manager.tp_worker.model_runner.weight_updater.receive_weights_from_distributed(
            names=request.names,
            dtypes=[torch.uint8 if dtype.itemsize == 1 else dtype for dtype in dtypes],
            shapes=request.shapes,
            group_name=request.group_name,
            load_format=request.load_format,
        )
        named = [(name, tensor.view(dtype)) for (name, tensor), dtype in zip(received, dtypes, strict=True)]
        for _, runner in _opened(manager, request):
            runner.model.load_weights(named)

    return io_struct.UpdateWeightsFromDistributedReqOutput(**_receive_bucket(manager, "distributed", receive))


def end(original: Handler, manager: SchedulerWeightUpdaterManager, request: Any) -> Any:
    """The answer to `/end_weight_update`: whether the new weights are served; if not, the old weights are."""
    updates = _updates(manager)
    if not updates:
        return original(manager, request)
    if request.rid == ABANDON:
        _close(manager)
        return io_struct.EndWeightUpdateReqOutput(success=True, message="The update was dropped.")
    error = _first_error(manager, lambda: _check(manager, whole=False))
    if error is not None:
        _close(manager)
        return io_struct.EndWeightUpdateReqOutput(success=False, message=_unchanged(error))
    if not any(update.tensors for update in updates.values()):
        _close(manager)
        return io_struct.EndWeightUpdateReqOutput(success=True, message="No tensor came: the weights are as before.")
    if (busy := _busy(manager)) is not None:
        return io_struct.EndWeightUpdateReqOutput(
            success=False, message=f"{busy} The update stays open: end it again, or POST /abandon_weight_update."
        )
    success, message = _exchange(manager)
    _close(manager)
    return io_struct.EndWeightUpdateReqOutput(success=success, message=message)


def from_files(original: Handler, manager: SchedulerWeightUpdaterManager, request: Any) -> Any:
    """The answer to `/update_weights_from_disk`: whether the new weights are served; if not, the old weights are."""
    if not _is_ours(manager):
        return original(manager, request)
    runners = runners_of(manager)
    if _reason_against(runners) is not None:
        if (busy := _busy(manager)) is not None:
            return io_struct.UpdateWeightFromDiskReqOutput(success=False, message=busy)
        request.flush_cache = True
        return original(manager, request)
    loads: list[Callable[[], None]] = []

    def read() -> None:
        for _, runner in runners:
            loads.append(_read_files(runner, request.model_path, request.load_format))
        _check(manager, whole=True)

    success, message = _at_once(manager, "disk", read)
    if success:
        for note_new_files in loads:
            note_new_files()
        manager.record_weight_version_after_update(request.weight_version)
    return io_struct.UpdateWeightFromDiskReqOutput(success=success, message=message)


def from_ipc(original: Handler, manager: SchedulerWeightUpdaterManager, request: Any) -> Any:
    """The answer to `/update_weights_from_ipc` (checkpoint-engine): whether the new weights are served."""
    if not _is_ours(manager):
        return original(manager, request)
    runners = runners_of(manager)
    reason = _reason_against(runners)
    if reason is not None:
        return io_struct.UpdateWeightsFromIPCReqOutput(success=False, message=reason)

    def receive() -> None:
        for _, runner in runners:
            with AfterLoading.suspended():  # SGLang's worker calls it after the last bucket
                success, message = runner.weight_updater.update_weights_from_ipc(request)
            if not success:
                raise CheckpointError(message)
        _check(manager, whole=False)

    success, message = _at_once(manager, "ipc", receive)
    if success:
        manager.record_weight_version_after_update(request.weight_version)
    return io_struct.UpdateWeightsFromIPCReqOutput(success=success, message=message)


def note_lost_weights(result: None, manager: SchedulerWeightUpdaterManager, request: Any) -> None:
    """After `/release_memory_occupation`: note that the weights have no values until an update brings all of them."""
    from sglang.srt.runtime_context import get_exec

    released = _WEIGHTS in (request.tags or [_WEIGHTS]) and manager.memory_saver_adapter.enabled
    if _is_ours(manager) and released:
        features = get_exec().features
        for role, runner in runners_of(manager):
            kept = features.enable_weights_cpu_backup or (role == "draft" and features.enable_draft_weights_cpu_backup)
            runner.model.weights_are_lost = runner.model.weights_are_lost or not kept


def reason_against(model: nn.Module) -> str | None:
    """The reason why this model's weights can't be exchanged part by part; None if they can.

    They can be exchanged if the parameters hold the checkpoint's bytes or values in its order, and in packed experts.
    """
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if isinstance(module, FusedExperts):
            return (
                f"{name} keeps its weights in the layout of SGLang's {method}, {FILES_ONLY}, or start the server with "
                "--moe-runner-backend dsv4 (MXFP4 experts)"
            )
        if isinstance(module, Nvfp4PackedExperts):
            return f"{name} has NVFP4 experts, whose scales are spread over several tensors, {FILES_ONLY}"
        scale = getattr(module, "weight_scale_inv", None)
        if method == "Fp8LinearMethod" and getattr(scale, "format_ue8m0", False):
            return f"{name} keeps its scales in DeepGEMM's layout for Blackwell, {FILES_ONLY}"
    return None


# ------------------------------------------------------------------------------ steps of the functions above


def _is_ours(manager: SchedulerWeightUpdaterManager) -> bool:
    return is_our_class(type(manager.tp_worker.model_runner.model))


def _updates(manager: SchedulerWeightUpdaterManager) -> dict[str, WeightUpdate]:
    """The open updates by role."""
    models = ((role, runner.model) for role, runner in runners_of(manager))
    return {role: model.weight_update for role, model in models if getattr(model, "weight_update", None) is not None}


def _opened(manager: SchedulerWeightUpdaterManager, request: Any) -> list[tuple[str, ModelRunner]]:
    """The runners that a bucket is for.

    Raises:
        CheckpointError: it is for a model that the session does not have, its format would write to parameters, or the
            parameters' memory is released.
    """
    if (released := _released(manager)) is not None:
        raise CheckpointError(released)
    if request.load_format not in (None, "flattened_bucket"):
        raise CheckpointError(
            f"load_format {request.load_format!r} writes to parameters unchecked: leave it out, or take "
            "'flattened_bucket'"
        )
    runners = runners_of(manager, request.selector)
    if unopened := [role for role, runner in runners if runner.model.weight_update is None]:
        raise CheckpointError(
            f"selector {request.selector!r} includes the {' and '.join(unopened)}, for which /begin_weight_update was "
            "not called: name the same selector in both"
        )
    return runners


def _unflattened(bucket: dict) -> list[tuple[str, Tensor]]:
    """The tensors of a flattened bucket. SGLang's own function can't take tensors of several dtypes in any order."""
    flat, named = bucket["flattened_tensor"], []
    for of_tensor in bucket["metadata"]:
        part = flat[of_tensor.start_idx : of_tensor.end_idx]
        if part.storage_offset() % of_tensor.dtype.itemsize:
            part = part.clone()
        named.append((of_tensor.name, part.view(of_tensor.dtype).reshape(of_tensor.shape)))
    return named


def _receive_bucket(manager: SchedulerWeightUpdaterManager, source: str, receive: Callable[[], object]) -> dict:
    """Fields of the answer to a bucket."""
    updates = _updates(manager)
    if not updates:
        message = "No weight update is open: POST /begin_weight_update first, then tensors, then /end_weight_update."
        return {"success": False, "message": message}
    with timed(manager, source):
        error = _first_error(manager, receive)
    if error is None:
        counts = ", ".join(f"{update.tensors} of the {role}" for role, update in updates.items())
        return {"success": True, "message": f"Tensors kept for /end_weight_update: {counts}."}
    for update in updates.values():  # on every rank
        update.failure = update.failure or error
    message = f"{error}. The update is of no use any more: /end_weight_update drops it, and the weights stay."
    logger.error(message)
    return {"success": False, "message": message}


def _at_once(manager: SchedulerWeightUpdaterManager, source: str, receive: Callable[[], None]) -> tuple[bool, str]:
    """Whether the weights that `receive` gives to all models are served now, and a sentence for the client."""
    if _updates(manager):
        return False, OPEN
    if (busy := _busy(manager)) is not None:
        return False, busy
    for _, runner in runners_of(manager):
        runner.model.weight_update = WeightUpdate(runner.model)
    try:
        with timed(manager, source):
            error = _first_error(manager, receive)
            return (False, _unchanged(error)) if error is not None else _exchange(manager)
    finally:
        _close(manager)


def _read_files(runner: ModelRunner, path: str, load_format: str) -> Callable[[], None]:
    """Read a checkpoint into the runner's open update.

    Returns:
        A function that notes the checkpoint as the runner's, once its weights serve.

    Raises:
        CheckpointError, ConfigError: it does not fit the model.
    """
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
    from sglang.srt.model_loader.weight_utils import get_pp_stage_load_group

    updater, model = runner.weight_updater, runner.model
    config = copy.copy(updater.model_config)
    config.model_path = path
    _require_same_config(model.dsv4_config, path, config)
    load_config = LoadConfig(load_format=load_format, load_group=get_pp_stage_load_group())
    loader = get_model_loader(load_config, config)
    if not isinstance(loader, DefaultModelLoader):
        raise CheckpointError(f"load_format {load_format!r} can't be read while the server runs: expected 'auto'")
    model.weight_update.add(tensors_of(loader, config, model), path)

    def note() -> None:
        updater.model_config.model_path = path
        updater.update_model_fields(model, model_path=path, load_format=load_format, load_config=load_config)

    return note


def _require_same_config(ours: Config, path: str, model_config: Any) -> None:
    """Raise a ConfigError if the new folder's config.json describes another model; a trainer's folder may have none."""
    try:
        fields = read_config(path, model_config.revision)
    except OSError:
        return
    theirs = Config.from_hf(stated(fields, model_config.model_override_args))
    for field in vars(ours):
        if getattr(ours, field) != getattr(theirs, field):
            raise ConfigError(
                field, getattr(theirs, field), f"{getattr(ours, field)!r}, which the server was built for"
            )


def _check(manager: SchedulerWeightUpdaterManager, whole: bool) -> None:
    """Check every open update; a model whose weights were lost needs all tensors."""
    for role, runner in runners_of(manager):
        model = runner.model
        if model.weight_update is not None:
            try:
                model.weight_update.check(whole or model.weights_are_lost)
            except CheckpointError as error:
                why = "; its memory was released without a copy, so all tensors must come" * model.weights_are_lost
                raise CheckpointError(f"{role}: {error}{why}") from error


def _first_error(manager: SchedulerWeightUpdaterManager, do: Callable[[], object]) -> str | None:
    """Run `do`; returns the error of the lowest rank on which it raised, None for none. Every rank must call this."""
    error, group = None, manager.tp_cpu_group
    try:
        do()
    except Exception as raised:
        if isinstance(raised, CheckpointError):
            error = str(raised)
        else:
            logger.exception("a weight update failed")
            error = f"{type(raised).__name__}: {raised}"
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return error
    errors = [None] * ranks
    torch.distributed.all_gather_object(errors, error, group=group)
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None), None)


def _busy(manager: SchedulerWeightUpdaterManager) -> str | None:
    """The reason why weights can't be exchanged yet; None if they can be. It is the same on every rank."""
    if (released := _released(manager)) is not None:
        return released
    if is_divided():
        return IN_STAGES
    if true_in_all_groups(is_idle(manager)):
        return None
    return (
        f"{BUSY}: their KV is of the old weights. POST /pause_generation with mode retract (they are computed again "
        "with the new weights) or abort; or wait until they have finished. A pause in_place keeps them from finishing: "
        "POST /continue_generation, or pause again with another mode."
    )


def _released(manager: SchedulerWeightUpdaterManager) -> str | None:
    """An error if the weights have no memory now; None if they have."""
    if _WEIGHTS not in manager.offload_tags:
        return None
    return "The memory of the weights is released: POST /resume_memory_occupation with the tag weights first."


def _reason_against(runners: list[tuple[str, ModelRunner]]) -> str | None:
    """The reason why the weights of these runners can't be exchanged part by part; None if they can."""
    from sglang.srt.runtime_context import get_model

    if get_model().weight_cache_mode != "off":
        return "--weight-cache-mode shares the weights with other servers: start with off to exchange them"
    return next((reason for _, runner in runners if (reason := reason_against(runner.model)) is not None), None)


def _exchange(manager: SchedulerWeightUpdaterManager) -> tuple[bool, str]:
    """Exchange the weights of all models and flush the cache, or change nothing.

    Returns:
        Whether the new weights are served, and a sentence for the client.
    """
    updates, done, begin = _updates(manager), [], time.perf_counter()

    def exchange() -> None:
        _synchronise()
        for update in updates.values():
            update.exchange()
            done.append(update)
        _synchronise()

    error = _first_error(manager, exchange)
    if error is None and not manager.flush_cache(empty_cache=False):
        error = "the cache could not be flushed"
    if error is not None:
        try:
            for update in done:
                update.exchange()
            _synchronise()
        except Exception as again:
            raise SystemExit(
                f"New weights could not be exchanged ({error}), nor the old ones restored ({again}): the model holds "
                "some of both. Start the server again."
            ) from again
        return False, _unchanged(error)
    if (failed := _first_error(manager, functools.partial(_gather, manager))) is not None:
        raise SystemExit(f"New weights could not be gathered from the ranks ({failed}): start the server again.")
    for _, runner in runners_of(manager):
        if runner.model.weight_update is not None:
            runner.model.weights_are_lost = False
    counts = " and ".join(f"{update.tensors} tensors of the {role}" for role, update in updates.items())
    size = sum(update.nbytes for update in updates.values()) / 2**30
    message = f"{counts} serve; the prefix cache was flushed."
    seconds = time.perf_counter() - begin
    if rounded := sum(update.rounded for update in updates.values()):
        logger.warning("weight update: %d codes of experts were rounded, see `layers.packed_experts`", rounded)
    logger.info("weight update: %s %.2f GiB of host memory, exchanged in %.2f s", message, size, seconds)
    return True, message


def _gather(manager: SchedulerWeightUpdaterManager) -> None:
    """Compute the tensors again that layers derive from the parameters of all ranks; every rank must call this.

    It comes last: weights that are exchanged back need no gathering.
    """
    for _, runner in runners_of(manager):
        for module, method in AfterLoading.of_modules(runner.model):
            if method.gathers:
                method.process_weights_after_loading(module)
    _synchronise()


def _synchronise() -> None:
    """Wait for the device, so that the copies are complete and their errors appear here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _close(manager: SchedulerWeightUpdaterManager) -> None:
    """Drop all open updates and end SGLang's session."""
    for _, runner in runners_of(manager):
        runner.model.weight_update = None
    close_session(manager)


def _unchanged(error: str) -> str:
    message = f"{error}. {UNCHANGED}."
    logger.error(message)
    return message
