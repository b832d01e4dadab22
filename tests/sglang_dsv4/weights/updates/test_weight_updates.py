"""Weight updates are all or nothing: buckets of any tensors, checked whole, visible at the end only, or undone.

Requests go to SGLang's manager of weight updates, whose methods the package hooks. The target has the `tiny` preset's
layers, the draft is its MTP module.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from model.checkpoint_tensors import Checkpoint, with_last, without
from model.updates import Trainer, buckets_of, different, loaded, same

from sglang_dsv4.layers.after_loading import AfterLoading
from sglang_dsv4.weights.tensor_table import main_model_tensors
from sglang_dsv4.weights.updates import host_part
from sglang_dsv4.weights.updates.routes import ABANDON

QUANTISED = "layers.1.attn.wq_b"


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
    assert not ended and "The old weights stay" in reason
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
    assert not success and "memory is full. The old weights stay" in message
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
    assert not ended and reason.startswith("Requests are running")
    assert "with mode retract" in reason and "A pause in_place" in reason and "/continue_generation" in reason
    assert "The update stays open" in reason
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
    assert not accepted and reason.startswith("No weight update is open: POST /begin_weight_update first")
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


def test_every_parameter_is_in_the_table(trainer: Trainer) -> None:
    """A parameter that no tensor fills could not be updated."""
    specs = main_model_tensors(trainer.harness.model.dsv4_config).specs.values()
    filled = {spec.parameter for spec in specs}
    assert filled == {name for name, _ in trainer.harness.model.named_parameters()}
