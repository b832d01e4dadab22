"""Weight updates from a process group, files and IPC, and models whose weights SGLang keeps in its own layouts."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from model.checkpoint_tensors import Checkpoint, with_last
from model.updates import Named, Trainer, buckets_of, different, loaded, same
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod
from torch import Tensor, nn

from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.moe import FusedExperts
from sglang_dsv4.weights.updates import session
from sglang_dsv4.weights.updates.session import reason_against

# ---- a process group


def test_buckets_of_a_process_group(trainer: Trainer, new: Checkpoint) -> None:
    """Broadcast by gloo, weights and scales in different buckets; a bad bucket is received before it is refused."""
    expected, before = loaded(trainer, new), trainer.bits()
    group = SendingGroup(trainer)
    assert trainer.begin()[0]
    for bucket in buckets_of(new, 64, seed=4):
        accepted, message = group.send(bucket)
        assert accepted, message
    assert same(trainer.bits(), before)
    assert trainer.end()[0]
    assert different(trainer.bits(), expected) == []
    now = trainer.bits()
    assert trainer.begin()[0]
    assert not group.send([("nothing", torch.zeros(3))])[0]
    assert not group.send([("norm.weight", new["norm.weight"])])[0]
    assert not trainer.end()[0] and same(trainer.bits(), now)


class SendingGroup:
    """Rank 0 of a group of two, in a thread; the model's runner is rank 1."""

    def __init__(self, trainer: Trainer) -> None:
        from torch.distributed import HashStore, ProcessGroupGloo

        self.trainer, store = trainer, HashStore()
        with ThreadPoolExecutor(2) as pool:
            self.sender, self.receiver = pool.map(lambda rank: ProcessGroupGloo(store, rank, 2), range(2))

    def send(self, bucket: Named) -> tuple[bool, str]:
        """Broadcast a bucket to the runner; return the answer to the request that announces it."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0

        def broadcast(tensor: Tensor, src: int, group: object, async_op: bool) -> object:
            assert (src, group, async_op) == (0, self.receiver, True)
            return self.receiver.broadcast([tensor], options)

        def send() -> None:
            for _, tensor in bucket:  # gloo does not know FP8
                sent = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
                self.sender.broadcast([sent.clone()], options).wait()

        updater = self.trainer.harness.runner.weight_updater
        updater._model_update_group["weight_update_group"] = self.receiver
        with ThreadPoolExecutor(1) as pool, mock.patch.object(torch.distributed, "broadcast", broadcast):
            sent = pool.submit(send)
            answer = self.trainer.call(
                "update_weights_from_distributed",
                names=[name for name, _ in bucket],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
            )
            sent.result()
        return answer


# ---- files


def test_files(trainer: Trainer, folders: dict[str, Path], new: Checkpoint) -> None:
    expected, addresses = loaded(trainer, new), trainer.addresses()
    success, message = trainer.call(
        "update_weights_from_disk", model_path=str(folders["new"]), load_format="auto", weight_version="7"
    )
    assert success, message
    assert different(trainer.bits(), expected) == [] and trainer.addresses() == addresses
    assert trainer.flushes == 1 and trainer.versions == ["7"]
    assert trainer.harness.runner.weight_updater.model_config.model_path == str(folders["new"])


def copied(folder: Path, to: Path) -> None:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())


def without_a_tensor(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file)
    return f"1 missing tensors: '{name}'"


def with_a_cut_file(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    return "cut short or damaged"


def with_another_config(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 9.5}))
    return "routed_scaling_factor"


@pytest.mark.parametrize("spoil", [without_a_tensor, with_a_cut_file, with_another_config])
def test_files_that_do_not_fit(
    trainer: Trainer, folders: dict[str, Path], tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    copied(folders["new"], tmp_path / "bad")
    reason = spoil(tmp_path / "bad")
    before, path = trainer.bits(), trainer.harness.runner.weight_updater.model_config.model_path
    success, message = trainer.call(
        "update_weights_from_disk", model_path=str(tmp_path / "bad"), load_format="auto", weight_version="7"
    )
    assert not success and reason in message and "The old weights stay" in message, message
    assert same(trainer.bits(), before) and trainer.flushes == 0 and not trainer.versions
    assert trainer.harness.runner.weight_updater.model_config.model_path == path


def test_files_while_requests_run_or_an_update_is_open(trainer: Trainer, folders: dict[str, Path]) -> None:
    before = trainer.bits()
    fields = {"model_path": str(folders["new"]), "load_format": "auto"}
    trainer.idle = False
    assert trainer.call("update_weights_from_disk", **fields)[1].startswith("Requests are running")
    trainer.idle = True
    assert trainer.begin()[0]
    success, message = trainer.call("update_weights_from_disk", **fields)
    assert not success and "a weight update is open" in message
    assert same(trainer.bits(), before)


# ---- layouts of SGLang's own


@pytest.mark.parametrize("bad", [False, True])
def test_other_layouts_take_files_only(
    trainer: Trainer,
    folders: dict[str, Path],
    new: Checkpoint,
    bad: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang loads them; if the files do not fit, the old ones are loaded again."""
    monkeypatch.setattr(session, "reason_against", lambda model: "layer 3 keeps its weights in a layout of its own")
    before, expected = trainer.bits(), loaded(trainer, new)
    for method, fields in (("begin_weight_update", {}), ("update_weights_from_ipc", {"zmq_handles": {}})):
        success, message = trainer.call(method, **fields)
        assert not success and "layer 3" in message
    copied(folders["new"], tmp_path / "files")
    if bad:
        without_a_tensor(tmp_path / "files")
    fields = {"model_path": str(tmp_path / "files"), "load_format": "auto", "flush_cache": False}
    trainer.idle = False
    assert trainer.call("update_weights_from_disk", **fields)[1].startswith("Requests are running")
    trainer.idle = True
    trainer.harness.runner.weight_updater.model_config.model_path = str(folders["old"])
    success, message = trainer.call("update_weights_from_disk", **fields)
    assert success is not bad and trainer.flushes == int(not bad), message
    found = trainer.bits()
    of_target = [name for name in found if name.startswith("target ")]
    wanted = before if bad else expected
    assert all(torch.equal(found[name], wanted[name]) for name in of_target)
    assert not bad or f"The weights of {folders['old']} were loaded again" in message


def test_layouts_of_sglang_s_own_are_named() -> None:
    experts = FusedExperts.__new__(FusedExperts)
    nn.Module.__init__(experts)
    experts.quant_method = Mxfp4MarlinMoEMethod.__new__(Mxfp4MarlinMoEMethod)
    model = nn.ModuleDict({"norm": nn.LayerNorm(2), "experts": experts})
    reason = reason_against(model)
    assert reason.startswith("experts keeps its weights in the layout of SGLang's Mxfp4MarlinMoEMethod, into which")
    assert "POST /update_weights_from_disk" in reason and "start the server with --moe-runner-backend dsv4" in reason
    linear = nn.Linear(2, 2)
    linear.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    linear.weight_scale_inv = nn.Parameter(torch.ones(1, 1))
    assert reason_against(linear) is None
    linear.weight_scale_inv.format_ue8m0 = True
    assert re.search("DeepGEMM's layout for Blackwell, .* POST /update_weights_from_disk", reason_against(linear))


# ---- IPC


@pytest.mark.parametrize("bad", [False, True])
def test_ipc(trainer: Trainer, new: Checkpoint, bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's worker loads bucket by bucket and calls the modules' methods after loading, which must not run."""
    sent = new | ({"norm.weight": with_last(new["norm.weight"], math.nan)} if bad else {})

    def transport(context: object, handle: str, device_id: object, run: Callable, post_hook: Callable) -> None:
        for bucket in buckets_of(sent, 90, seed=5):
            run(bucket)
        post_hook()

    monkeypatch.setitem(sys.modules, "checkpoint_engine", ModuleType("checkpoint_engine"))
    monkeypatch.setitem(sys.modules, "checkpoint_engine.worker", SimpleNamespace(update_weights_from_ipc=transport))
    from sglang.srt.checkpoint_engine import checkpoint_engine_worker as engine

    monkeypatch.setattr(engine, "update_weights_from_ipc", transport)
    monkeypatch.setattr(engine, "get_device_module", lambda: SimpleNamespace(current_device=lambda: 0))
    monkeypatch.setattr(engine.SGLangCheckpointEngineWorkerExtensionImpl, "get_device_uuid", lambda _: "GPU-0")
    rearranged: list[str] = []
    method = AfterLoading(lambda: rearranged.append("norm"), derives=False)
    monkeypatch.setattr(trainer.models["target"].model.norm, "quant_method", method, raising=False)
    expected, before = loaded(trainer, new), trainer.bits()
    success, message = trainer.call("update_weights_from_ipc", zmq_handles={"GPU-0": "ipc://nowhere"})
    assert success is not bad, message
    assert different(trainer.bits(), before if bad else expected) == [] and not rearranged
