"""Weight updates are all or nothing: buckets of any tensors, checked whole, visible at the end only, or undone.

Requests go to SGLang's manager of weight updates, whose methods the package hooks. The target has the `tiny` preset's
layers, the draft is its MTP module.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from model.checkpoint_tensors import Checkpoint, snapshot, with_last, without
from model.harness import Harness
from model.updates import Named, Trainer, buckets_of, different, same
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.mxfp4_marlin_moe import Mxfp4MarlinMoEMethod
from torch import Tensor, nn

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint
from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.layers.moe import FusedExperts
from sglang_dsv4.weights import host_part, session
from sglang_dsv4.weights.routes import ABANDON
from sglang_dsv4.weights.session import reason_against
from sglang_dsv4.weights.tensor_table import main_model_tensors

SHAPE = replace(
    PRESETS["tiny"],
    hidden_size=256,
    num_attention_heads=8,
    q_lora_rank=128,
    moe_intermediate_size=128,
    n_routed_experts=4,
)
QUANTISED = "layers.1.attn.wq_b"


def read(folder: Path) -> Checkpoint:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for seed, name in enumerate(("old", "new"), 3):
        made[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(made[name], SHAPE, seed=seed)
    return made


@pytest.fixture(scope="module")
def old(folders: dict[str, Path]) -> Checkpoint:
    return read(folders["old"])


@pytest.fixture(scope="module")
def new(folders: dict[str, Path]) -> Checkpoint:
    return read(folders["new"])


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> Trainer:
    from sglang_dsv4.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN

    harness = Harness(folders["old"], dtype="bfloat16", max_total_tokens=1024, max_requests=2)
    with harness._active():
        torch.set_default_dtype(torch.bfloat16)
        try:
            draft = DeepseekV4ForCausalLMNextN(harness.model.config)
        finally:
            torch.set_default_dtype(torch.float32)
    draft.set_embed_and_head(*harness.model.get_embed_and_head())
    return Trainer(harness, draft)


@pytest.fixture(scope="module")
def old_values(models: Trainer, old: Checkpoint) -> dict[str, Checkpoint]:
    for model in models.models.values():
        model.load_weights(old.items())
    return {role: snapshot(model) for role, model in models.models.items()}


@pytest.fixture
def trainer(models: Trainer, old_values: dict[str, Checkpoint]) -> Trainer:
    """Both models with the old weights and no update."""
    for role, model in models.models.items():
        model.weight_update, model.weights_are_lost = None, False
        for name, parameter in model.named_parameters():
            parameter.data.copy_(old_values[role][name])
    models.manager._session, models.idle, models.flushes = None, True, 0
    models.manager.offload_tags.clear()
    models.versions.clear()
    return models


def loaded(trainer: Trainer, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The bits of both models after a load of this checkpoint; the old weights are in the models afterwards."""
    before = {role: snapshot(model) for role, model in trainer.models.items()}
    for model in trainer.models.values():
        model.load_weights(checkpoint.items())
    bits = trainer.bits()
    for role, model in trainer.models.items():
        for name, parameter in model.named_parameters():
            parameter.data.copy_(before[role][name])
    return bits


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 7, 10_000])
def test_any_buckets_in_any_order(trainer: Trainer, new: Checkpoint, size: int) -> None:
    """Nothing is visible before the end; then both models hold what a load of the new checkpoint gives."""
    expected, before, addresses = loaded(trainer, new), trainer.bits(), trainer.addresses()
    assert trainer.begin() == (True, "Success")
    for bucket in buckets_of(new, size, seed=size):
        sent = [(name, tensor.clone()) for name, tensor in bucket]
        accepted, message = trainer.send(sent)
        assert accepted, message
        for _, tensor in sent:  # a trainer uses a bucket's memory again
            tensor.view(torch.uint8).fill_(0x7F)
    assert same(trainer.bits(), before) and trainer.flushes == 0
    parameters = {id(p): p.nbytes for model in trainer.models.values() for p in model.parameters()}
    staged = sum(model.weight_update.nbytes for model in trainer.models.values())
    assert staged == sum(parameters.values()), "one copy of every parameter, those of both models once"
    success, message = trainer.end()
    assert success and message.startswith(f"{count(new)} tensors of the target and {len(new) - count(new)} tensors")
    assert different(trainer.bits(), expected) == []
    assert trainer.flushes == 1 and trainer.addresses() == addresses


def count(checkpoint: Checkpoint) -> int:
    return sum(not name.startswith("mtp.") for name in checkpoint)


def test_flattened_buckets(trainer: Trainer, new: Checkpoint) -> None:
    expected = loaded(trainer, new)
    assert trainer.begin()[0]
    for bucket in buckets_of(new, 50, seed=1):
        assert trainer.send(bucket, load_format="flattened_bucket")[0]
    assert trainer.end()[0]
    assert different(trainer.bits(), expected) == []


def pieces(checkpoint: Checkpoint) -> list[Checkpoint]:
    """The smallest updates: a tensor, with its scale if it has one."""
    return [
        {other: checkpoint[other] for other in (name, name.removesuffix("weight") + "scale") if other in checkpoint}
        for name in checkpoint
        if not name.endswith(".scale")
    ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_any_subset_that_is_complete_in_itself(trainer: Trainer, old: Checkpoint, new: Checkpoint, seed: int) -> None:
    """A random half of the tensors: w1 of an expert without its w3, wq_a without wkv, a draft's without a target's."""
    rng = random.Random(seed)
    chosen = {name: tensor for piece in pieces(new) if rng.random() < 0.5 for name, tensor in piece.items()}
    expected = loaded(trainer, old | chosen)
    success, message = trainer.update(buckets_of(chosen, 40, seed))
    assert success, message
    assert different(trainer.bits(), expected) == []


@pytest.mark.parametrize(
    ("piece", "parameter"),
    [
        ("norm.weight", "target model.norm.weight"),
        ("embed.weight", "model.embed.weight"),
        ("layers.0.ffn.gate.tid2eid", "target model.layers.0.ffn.gate.tid2eid"),
        ("layers.1.attn.wkv.weight", "target model.layers.1.attn.wqkv_a.weight"),
        ("layers.2.ffn.experts.3.w3.weight", "target model.layers.2.ffn.experts.w13_weight"),
        ("layers.2.ffn.shared_experts.w1.weight", "target model.layers.2.ffn.shared_experts.w13.weight"),
        ("mtp.0.e_proj.weight", "draft model.e_proj.weight"),
    ],
)
def test_one_tensor(trainer: Trainer, old: Checkpoint, new: Checkpoint, piece: str, parameter: str) -> None:
    """No other parameter changes; the draft shares the target's embedding."""
    (alone,) = [found for found in pieces(new) if piece in found]
    before, expected = trainer.bits(), loaded(trainer, old | alone)
    success, message = trainer.update([alone])
    assert success, message
    assert different(trainer.bits(), expected) == []
    changed = different(expected, before)
    assert changed and all(name.endswith(parameter) for name in changed)


def test_nothing_sent_is_nothing_changed(trainer: Trainer) -> None:
    before = trainer.bits()
    success, message = trainer.update([])
    assert success and "No tensor came" in message and trainer.flushes == 0
    assert same(trainer.bits(), before)


# ---- failures


def nan_weight(bucket: Checkpoint) -> None:
    bucket["norm.weight"] = with_last(bucket["norm.weight"], math.nan)


def infinite_scale(bucket: Checkpoint) -> None:
    name = f"{QUANTISED}.scale"
    bucket[name] = with_last(bucket[name].float(), math.inf)


def cut(bucket: Checkpoint) -> None:
    bucket[f"{QUANTISED}.weight"] = bucket[f"{QUANTISED}.weight"][:-1]


def unknown(bucket: Checkpoint) -> None:
    bucket["layers.1.attn.q_norm.weigth"] = bucket["layers.1.attn.q_norm.weight"]


def other_dtype(bucket: Checkpoint) -> None:
    bucket[f"{QUANTISED}.weight"] = bucket[f"{QUANTISED}.weight"].view(torch.int8)


def nan_in_the_draft(bucket: Checkpoint) -> None:
    bucket["mtp.0.norm.weight"] = with_last(bucket["mtp.0.norm.weight"], math.nan)


BAD_BUCKETS: dict[str, tuple[Callable[[Checkpoint], None], str]] = {
    "nan": (nan_weight, r"'norm\.weight' \(NaN\)"),
    "infinite-scale": (infinite_scale, r"wq_b\.scale' \(infinite\)"),
    "shape": (cut, r"'layers\.1\.attn\.wq_b\.weight' is float8_e4m3fn \(\d+, 128\); expected"),
    "dtype": (other_dtype, r"wq_b\.weight' is int8"),
    "unknown": (unknown, r"1 unknown tensors: .*did you mean 'layers\.1\.attn\.q_norm\.weight'"),
    "nan-in-the-draft": (nan_in_the_draft, r"'mtp\.0\.norm\.weight' \(NaN\)"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_BUCKETS.values(), ids=BAD_BUCKETS)
def test_a_bad_bucket_spoils_the_update_and_nothing_else(
    trainer: Trainer, new: Checkpoint, spoil: Callable[[Checkpoint], None], message: str
) -> None:
    before, bad = trainer.bits(), dict(new)
    spoil(bad)
    assert trainer.begin()[0]
    accepted, reason = trainer.send(bad)
    assert not accepted and "The update is of no use any more" in reason
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)
    assert not trainer.send({"norm.weight": new["norm.weight"]})[0]
    ended, reason = trainer.end()
    assert not ended and "The weights are those of before" in reason
    assert same(trainer.bits(), before) and trainer.flushes == 0
    assert trainer.update([new])[0]  # and the next update works


INCOMPLETE = {
    "weight-without-scale": (without(f"{QUANTISED}.scale"), r"1 missing tensors: 'layers\.1\.attn\.wq_b\.scale'"),
    "scale-without-weight": (without(f"{QUANTISED}.weight"), r"1 missing tensors: 'layers\.1\.attn\.wq_b\.weight'"),
    "draft": (without("mtp.0.e_proj.scale"), r"draft: .*1 missing tensors: 'mtp\.0\.e_proj\.scale'"),
}


@pytest.mark.parametrize(("spoil", "message"), INCOMPLETE.values(), ids=INCOMPLETE)
def test_a_pair_that_is_not_complete_changes_nothing(
    trainer: Trainer, new: Checkpoint, spoil: Callable[[Checkpoint], None], message: str
) -> None:
    before, bad = trainer.bits(), dict(new)
    spoil(bad)
    assert trainer.begin()[0]
    for bucket in buckets_of(bad, 60, seed=2):
        assert trainer.send(bucket)[0]
    ended, reason = trainer.end()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reason)
    assert not ended and same(trainer.bits(), before) and trainer.flushes == 0


def test_a_tensor_that_comes_twice(trainer: Trainer, new: Checkpoint) -> None:
    assert trainer.begin()[0]
    assert trainer.send({"norm.weight": new["norm.weight"]})[0]
    accepted, reason = trainer.send({"norm.weight": new["norm.weight"]})
    assert not accepted and "'norm.weight' comes twice in the weight update" in reason


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_exchange_that_fails_is_undone(
    trainer: Trainer, new: Checkpoint, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The device's memory may be full: parts that were exchanged, and the other model's, are exchanged back."""
    before, calls, exchange = trainer.bits(), [], host_part.HostPart.exchange
    fails_at = 100 if role == "target" else len(list(trainer.models["target"].parameters())) + 50

    def sometimes(part: host_part.HostPart) -> None:
        calls.append(part)
        if len(calls) == fails_at:
            raise MemoryError("the device's memory is full")
        exchange(part)

    monkeypatch.setattr(host_part.HostPart, "exchange", sometimes)
    success, message = trainer.update([new])
    assert not success and "memory is full. The weights are those of before" in message
    assert different(trainer.bits(), before) == [] and trainer.flushes == 0
    monkeypatch.undo()
    assert trainer.update([new])[0]


@pytest.mark.parametrize("fails", [False, True])
def test_derived_tensors_follow_their_parameter(
    trainer: Trainer, new: Checkpoint, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wo_a's bf16 copy on a GPU, for example: computed from the new weights, and from the old if the flush fails."""
    norm, seen = trainer.models["target"].model.norm, []
    method = AfterLoading(lambda: seen.append(norm.weight.clone()), derives=True)
    monkeypatch.setattr(norm, "quant_method", method, raising=False)
    monkeypatch.setattr(trainer.manager, "flush_cache", lambda **_: not fails)
    before, wanted = norm.weight.clone(), new["norm.weight"].float().flip(0)
    assert trainer.update([{"norm.weight": wanted.to(new["norm.weight"].dtype)}])[0] is not fails
    assert len(seen) == 1 + fails and torch.equal(seen[0], wanted)
    assert not fails or torch.equal(seen[1], before)


def test_weights_that_can_not_be_restored_end_the_server(
    trainer: Trainer, old: Checkpoint, new: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.manager, "flush_cache", lambda **_: False)
    calls, exchange = [], host_part.HostPart.exchange

    def once(part: host_part.HostPart) -> None:
        calls.append(part)
        if len(calls) > 1:
            raise MemoryError
        exchange(part)

    monkeypatch.setattr(host_part.HostPart, "exchange", once)
    with pytest.raises(SystemExit, match="holds some of both"):
        trainer.update([{"norm.weight": new["norm.weight"]}])


def test_a_cache_that_can_not_be_flushed_undoes_the_exchange(
    trainer: Trainer, new: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trainer.bits()
    monkeypatch.setattr(trainer.manager, "flush_cache", lambda **_: False)
    success, message = trainer.update([new])
    assert not success and "could not be flushed" in message and same(trainer.bits(), before)


# ---- sessions


def test_running_requests_keep_the_update_open(trainer: Trainer, new: Checkpoint) -> None:
    before = trainer.bits()
    assert trainer.begin()[0] and trainer.send(new)[0]
    trainer.idle = False
    ended, reason = trainer.end()
    assert not ended and reason.startswith("Requests are running") and "mode retract or abort" in reason
    assert same(trainer.bits(), before)
    trainer.idle = True
    assert trainer.end()[0] and not same(trainer.bits(), before)


def test_an_abandoned_update_changes_nothing(trainer: Trainer, new: Checkpoint) -> None:
    before = trainer.bits()
    assert trainer.begin()[0] and trainer.send(new)[0]
    again, reason = trainer.begin()
    assert not again and "/abandon_weight_update" in reason
    assert trainer.call("end_weight_update", rid=ABANDON)[0]
    assert same(trainer.bits(), before) and trainer.flushes == 0
    assert not trainer.end()[0]  # SGLang's: no update is open
    assert trainer.update([new])[0]


def test_buckets_outside_of_an_update(trainer: Trainer, new: Checkpoint) -> None:
    before = trainer.bits()
    accepted, reason = trainer.send(new)
    assert not accepted and "between /begin_weight_update and /end_weight_update" in reason
    assert same(trainer.bits(), before)


@pytest.mark.parametrize("selector", ["target", "draft"])
def test_a_selector_names_one_model(trainer: Trainer, old: Checkpoint, new: Checkpoint, selector: str) -> None:
    of_draft = selector == "draft"
    mixed = {name: new[name] if name.startswith("mtp.") is of_draft else old[name] for name in new}
    expected = loaded(trainer, mixed)
    success, message = trainer.update([new], selector)
    assert success, message
    assert different(trainer.bits(), expected) == []


def test_a_bucket_for_a_model_that_was_not_named(trainer: Trainer, new: Checkpoint) -> None:
    before = trainer.bits()
    assert trainer.begin("target")[0]
    accepted, reason = trainer.send(new)
    assert not accepted and "includes the draft" in reason
    assert not trainer.end()[0] and same(trainer.bits(), before)


@pytest.mark.parametrize("load_format", ["direct", "os.system"])
def test_formats_that_write_unchecked_are_refused(trainer: Trainer, new: Checkpoint, load_format: str) -> None:
    before = trainer.bits()
    assert trainer.begin()[0]
    accepted, reason = trainer.send({"model.norm.weight": new["norm.weight"]}, load_format=load_format)
    assert not accepted and load_format in reason and "unchecked" in reason
    assert same(trainer.bits(), before)


def test_a_payload_that_is_no_pickle(trainer: Trainer) -> None:
    before = trainer.bits()
    assert trainer.begin()[0]
    accepted, reason = trainer.call("update_weights_from_tensor", serialized_named_tensors=[b"nothing"])
    assert not accepted and "UnpicklingError" in reason
    assert not trainer.end()[0] and same(trainer.bits(), before)


@pytest.mark.parametrize("backup", [False, True])
def test_lost_weights_must_come_whole(
    trainer: Trainer, new: Checkpoint, backup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a release of memory without a copy a part of the weights would serve together with garbage."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.runtime_context import get_exec

    tags = ["weights"]
    monkeypatch.setattr(torch, "get_device_module", lambda *_: torch.cpu)
    with trainer.harness._active(), get_exec().features.override(enable_weights_cpu_backup=backup):
        trainer.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))
        assert trainer.begin()[0] is False  # there is no memory to write to
        trainer.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    one = {"norm.weight": new["norm.weight"]}
    success, reason = trainer.update([one])
    assert success is backup and (backup or "all tensors must come" in reason)
    assert trainer.update([new])[0]
    assert trainer.update([one])[0]


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
    assert not success and reason in message and "The weights are those of before" in message, message
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
    """SGLang loads them; if the files do not fit, those of before are loaded again."""
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
    assert re.match(r"experts keeps .* Mxfp4MarlinMoEMethod: take --moe-runner-backend dsv4", reason_against(model))
    linear = nn.Linear(2, 2)
    linear.quant_method = Fp8LinearMethod.__new__(Fp8LinearMethod)
    linear.weight_scale_inv = nn.Parameter(torch.ones(1, 1))
    assert reason_against(linear) is None
    linear.weight_scale_inv.format_ue8m0 = True
    assert "DeepGEMM's layout for Blackwell" in reason_against(linear)


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


def test_every_parameter_is_in_the_table(trainer: Trainer) -> None:
    """A parameter that no tensor fills could not be updated."""
    specs = main_model_tensors(trainer.harness.model.dsv4_config).specs.values()
    filled = {spec.parameter for spec in specs}
    assert filled == {name for name, _ in trainer.harness.model.named_parameters()}
