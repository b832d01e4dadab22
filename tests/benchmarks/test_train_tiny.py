"""The model that is trained is the one that is served, and it is trained on prompts as the server renders them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model.compare import relative_error
from model.dspark_reference import DSparkReference
from model.oracle import read_dequantised
from model.recording import Recording, recording
from model.reference import Reference
from model.trained import TRAINED, training_weights
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from train_tiny import tasks, variants
from train_tiny.bpe import Encoder
from train_tiny.chat import Chat, Frame
from train_tiny.corpus import frame_of
from train_tiny.curve import draw
from train_tiny.draft import DraftModel, DraftShape, draft_parameters
from train_tiny.export import tensors_of, write_checkpoint, write_draft
from train_tiny.model import Model, Quant, compute_weights
from train_tiny.optimiser import Optimiser
from train_tiny.quantisers import fp4_rows, fp8_matrix, fp8_rows
from train_tiny.restore import masters_of, state_of
from train_tiny.shape import TinyShape, initial, parameters
from train_tiny.state import compact, load_state, save_state
from train_tiny.widen import widen, widened

from dsv4_kernels import number_formats
from sglang_dsv4.cpu.random_tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, VISIBLE_TOKENS, build_tokenizer

TOOL = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def random_masters(shape: TinyShape, seed: int) -> dict[str, Tensor]:
    """Parameters of which every one changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    masters = initial(shape, seed)
    for name, p in parameters(shape).items():
        noise = torch.randn(p.shape, generator=generator)
        if name == "head.weight":
            masters[name] = noise / math.sqrt(shape.hidden_size)
        elif p.stored == "fp32" or p.std == 0:
            masters[name] = masters[name] + 0.3 * noise
    return masters


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_quantisers_are_those_of_the_kernels() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator) * torch.logspace(-6, 3, 64)[:, None]
    x[3, :128], x[5, 7] = 0, 448.0
    for block in (64, 128):
        expected = number_formats.decode_fp8(*number_formats.encode_fp8(x, block), block)
        assert torch.equal(fp8_rows(x, block), expected)
    assert torch.equal(fp4_rows(x), number_formats.decode_fp4(*number_formats.encode_fp4(x)))
    matrix = torch.randn(256, 384, generator=generator)
    expected = number_formats.dequantise_fp8_weight(*number_formats.quantise_fp8_weight(matrix), torch.float32)
    assert torch.equal(fp8_matrix(matrix), expected)


@pytest.mark.slow
@pytest.mark.parametrize("qat", ["off", "full"])
def test_the_trained_model_is_the_served_one(tmp_path: Path, qat: str) -> None:
    """Random weights, exported in the released format and loaded by SGLang through our loader.

    Without quantisers the logits agree to fp32 rounding at every position. With them a value at the edge of a quantiser
    may be rounded to the other side, which later layers amplify, so that each block is compared from the same input.
    """
    from model.harness import Harness

    shape = TinyShape(vocab_size=1024, index_topk=16)  # of up to 96 entries, so that the indexer's choice matters
    masters = random_masters(shape, 3)
    build_tokenizer(shape.vocab_size).save(str(tmp_path / "tokenizer.json"))
    write_checkpoint(tmp_path / "checkpoint", masters, shape, tmp_path / "tokenizer.json")
    tokens = torch.randint(3, 1000, (384,), generator=torch.Generator().manual_seed(2))
    harness = Harness(tmp_path / "checkpoint", dtype="float32", qat=qat)
    with recording(harness) as record:
        served = harness.run(tokens)
    weights = compute_weights(masters, parameters(shape))
    on = qat == "full"
    with torch.no_grad():
        model = Model(shape, Quant(on, on, on), torch.float32)
        trained = model.logits(model.streams(tokens[None], weights), weights)[0]
    error = relative_error(served, trained)
    if qat == "off":
        assert error.max() < 1e-4, error
    assert error[:8].max() < 1e-5, error[:8]
    for layer, ratio in enumerate(shape.compress_ratios):
        prefix = f"layers.{layer}."
        assert_block(model, record, weights, tokens, layer, ratio)
        # The comparison can fail: another sink is an error of every token.
        wrong = weights | {f"{prefix}attn.attn_sink": weights[f"{prefix}attn.attn_sink"] + 1}
        with pytest.raises(AssertionError, match="median"):
            assert_block(model, record, wrong, tokens, layer, ratio)


def assert_block(
    model: Model, record: Recording, weights: dict[str, Tensor], tokens: Tensor, layer: int, ratio: int
) -> None:
    """A block of the trained model gives the served block's output for its input, but for values at an edge."""
    with torch.no_grad():
        x = record("block.in", layer)[None]
        out = model.block(x, tokens[None], weights, f"layers.{layer}.", ratio, None, True)[0]
    error = relative_error(record("block.out", layer).flatten(1), out.flatten(1))
    found = f"layer {layer}: median {error.median():.1e}, {(error > 1e-4).sum()} of {len(error)} above 1e-4"
    # An entry that was rounded to the other side moves every token that reads it.
    assert error.median() < 2e-6 and (error > 1e-4).float().mean() < 0.2, found


def test_the_widened_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """With the sizes that Hopper's kernels take it gives the logits of the sizes that were trained."""
    shape = TinyShape(vocab_size=1024, index_topk=4, compress_ratios=(0, 4), n_routed_experts=2)
    build_tokenizer(shape.vocab_size).save(str(tmp_path / "tokenizer.json"))
    write_checkpoint(tmp_path / "narrow", random_masters(shape, 5), shape, tmp_path / "tokenizer.json")
    widen(tmp_path / "narrow", tmp_path / "wide")
    tokens = torch.randint(3, 1000, (24,), generator=torch.Generator().manual_seed(2))
    logits = []
    for folder in (tmp_path / "narrow", tmp_path / "wide"):
        config = json.loads((folder / "config.json").read_text())
        reference = Reference(config, read_dequantised(folder))
        streams = reference.streams(tokens)
        drafted = reference.mtp_logits(reference.mtp_streams(streams, tokens.roll(-1)))
        logits.append(torch.cat((reference.logits(tokens), drafted)))
    assert relative_error(*logits).max() < 1e-4, relative_error(*logits)
    assert (config["hidden_size"], config["num_attention_heads"], config["moe_intermediate_size"]) == (1024, 64, 1024)
    (tmp_path / "narrow" / "config.json").write_text(json.dumps(config | {"index_n_heads": 48}))
    with pytest.raises(ValueError, match="index_n_heads is 48; expected a divisor of 64"):
        widen(tmp_path / "narrow", tmp_path / "wide")
    with pytest.raises(ValueError, match="expected 256 times 4"):
        widened("norm.weight", torch.ones(256), 256, 768)


def test_variants_are_the_same_model(tmp_path: Path) -> None:
    """NVFP4 experts have the values of MXFP4 ones, so the logits are equal. For four ranks sums have another order."""
    shape = TinyShape(vocab_size=1024, index_topk=4, compress_ratios=(0, 4), n_routed_experts=2)
    build_tokenizer(shape.vocab_size).save(str(tmp_path / "tokenizer.json"))
    write_checkpoint(tmp_path / "trained", random_masters(shape, 5), shape, tmp_path / "tokenizer.json")
    tokens, logits = torch.randint(3, 1000, (24,), generator=torch.Generator().manual_seed(2)), {}
    for kind in ("trained", *variants.CHANGES):
        if kind != "trained":
            variants.write(kind, tmp_path / "trained", tmp_path / kind)
        config = json.loads((tmp_path / kind / "config.json").read_text())
        logits[kind] = Reference(config, read_dequantised(tmp_path / kind)).logits(tokens)
    assert torch.equal(logits["nvfp4"], logits["trained"])
    assert config["o_groups"] == 4 and config["moe_intermediate_size"] == 512
    assert relative_error(logits["four-ranks"], logits["trained"]).max() < 1e-5
    tensors = load_file(next((tmp_path / "trained").glob("*.safetensors")))
    tensors["layers.0.ffn.experts.0.w2.scale"].view(torch.uint8)[0, 0] -= 30
    with pytest.raises(ValueError, match=r"experts\.0\.w2\.weight: its scales are further apart than e4m3 stores"):
        variants.to_nvfp4(tensors, {})


def checkpoint_with_draft(
    folder: Path,
    shape: TinyShape,
    masters: dict[str, Tensor],
    of_draft: dict[str, Tensor],
    draft: DraftShape,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Export the model and its draft, and return the folder of the checkpoint with both."""
    monkeypatch.setattr(variants, "DraftShape", lambda: draft)
    build_tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    write_checkpoint(folder / "model", masters, shape, folder / "tokenizer.json")
    write_draft(folder / "model", of_draft, shape, draft)
    variants.write("dspark", folder / "model", folder / "with_draft")
    return folder / "with_draft"


def test_the_trained_dspark_draft_is_the_one_that_is_defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights of target and draft, exported and read again: the blocks' logits are the reference's. So are those
    of the checkpoint with the sizes that Hopper's kernels take."""
    shape, draft = TinyShape(vocab_size=1024, compress_ratios=(0, 4, 0), n_routed_experts=2), DraftShape((0, 1, 2))
    table = draft_parameters(shape, draft)
    masters = random_masters(shape, 3)
    of_draft = {
        name: value + (0.1 * torch.randn(value.shape) if table[name].std == 0 else 0)
        for name, value in initial(shape, 4, table).items()
    }
    checkpoint = checkpoint_with_draft(tmp_path, shape, masters, of_draft, draft, monkeypatch)
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["compress_ratios"] == [0, 4, 0, 0, 0, 0]  # of the model, then of the draft's stages
    reference = DSparkReference(Reference(config, read_dequantised(checkpoint)))
    tokens = torch.randint(3, 1000, (256,), generator=torch.Generator().manual_seed(2))
    weights = compute_weights(masters | of_draft, parameters(shape) | table)
    model = DraftModel(shape, draft, quant=Quant(False, False, False), dtype=torch.float32)
    at = torch.tensor([[3, 200]])  # fewer tokens before a block than the window has, and more
    with torch.no_grad():
        context = model.context(model.taps(tokens[None], weights)[0], weights)
        ours, mixed = model.blocks(context, tokens[at], at, weights)
    rows = reference.context(reference.taps(tokens))
    for index, position in enumerate(at[0].tolist()):
        expected = reference.block([row[:position] for row in rows], int(tokens[position]))
        assert relative_error(ours[0, index], expected.logits).max() < 1e-4
        assert relative_error(mixed[0, index], expected.mixed).max() < 1e-4
    widen(checkpoint, tmp_path / "wide")
    wide_config = json.loads((tmp_path / "wide" / "config.json").read_text())
    wide = DSparkReference(Reference(wide_config, read_dequantised(tmp_path / "wide")))
    found = wide.block([row[:position] for row in wide.context(wide.taps(tokens))], int(tokens[position]))
    assert relative_error(found.logits, expected.logits).max() < 1e-4
    loss, parts = model.draft_loss(tokens[None], at, weights)
    loss.backward()
    assert all(weights[name].grad is not None for name, p in table.items() if p.update != "none")
    assert 0 <= parts["accepted"] <= 1


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as `corpus.py` makes it, of fewer merges."""
    splitting = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splitting, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(tasks.__file__).read_text()], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens(list(VISIBLE_TOKENS))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def frame(tokenizer_file: Path) -> Frame:
    return Frame(**frame_of(Tokenizer.from_file(str(tokenizer_file))))


def test_plain_encoder_has_the_ids_of_tokenizers(tokenizer_file: Path) -> None:
    encoder, tokenizer = Encoder(tokenizer_file), Tokenizer.from_file(str(tokenizer_file))
    texts = [
        Path(tasks.__file__).read_text(),
        "What's 17 + 25?  I'll say:\n\n\t42  \n x_y__z 3.14 ... a1b2 'tis",
        f"{BOS}a{EOS}<｜User｜> b <｜Assistant｜></think>\n\n<｜DSML｜tool_calls>",
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert encoder.encode(text) == ids
        assert encoder.decode(ids) == tokenizer.decode(ids)


def conversations(frame: Frame) -> dict[str, tuple[Chat, dict[str, Any]]]:
    """Chats, and the requests that the server renders to the same prompts and answers."""

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def called(text: str, **fields: Any) -> dict[str, Any]:
        arguments = json.dumps({"city": "Rome", "days": 3})
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return {"role": "assistant", "content": text, "tool_calls": [call], **fields}

    call = (("get_weather", {"city": "Rome", "days": 3}),)
    result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    tools = [{"type": "function", "function": TOOL}]
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    plain = [user("Hi"), {"role": "assistant", "content": "Hello!"}, user("Bye"), {"role": "assistant", "content": "."}]
    thought = [
        message | {"reasoning_content": "hm"} if message["role"] == "assistant" else message for message in plain
    ]
    return {
        "turns": (
            Chat(frame, "Be kind.").user("Hi").answer("Hello!").user("Bye").answer("."),
            {"messages": [{"role": "system", "content": "Be kind."}, *plain]},
        ),
        "thinking": (
            Chat(frame, thinking=True).user("Hi").answer("Hello!", "hm").user("Bye").answer(".", "hm"),
            {"messages": thought, "thinking": True, "reasoning_effort": "low"},
        ),
        "schema": (
            Chat(frame, "S", schema=SCHEMA).user("Age?").answer('{"age": 3}'),
            {
                "messages": [
                    {"role": "system", "content": "S"},
                    user("Age?"),
                    {"role": "assistant", "content": '{"age": 3}'},
                ],
                "response_format": format_,
            },
        ),
        "tools": (
            Chat(frame, tools=[TOOL]).user("Rome?").answer("", calls=call).results("sunny").answer("Sun."),
            {
                "messages": [user("Rome?"), called(""), result, {"role": "assistant", "content": "Sun."}],
                "tools": tools,
            },
        ),
        "tools, thinking": (
            Chat(frame, tools=[TOOL], thinking=True)
            .user("Rome?")
            .answer("", "hm", call)
            .results("sunny")
            .answer("Sun.", "so"),
            {
                "messages": [
                    user("Rome?"),
                    called("", reasoning_content="hm"),
                    result,
                    {"role": "assistant", "content": "Sun.", "reasoning_content": "so"},
                ],
                "tools": tools,
                "thinking": True,
                "reasoning_effort": "low",
            },
        ),
    }


@pytest.mark.parametrize("kind", ["turns", "thinking", "schema", "tools", "tools, thinking"])
def test_conversations_are_rendered_as_the_server_renders_them(tokenizer_file: Path, frame: Frame, kind: str) -> None:
    from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    chat, request = conversations(frame)[kind]
    prompt = {"thinking": False} | request | {"messages": request["messages"][:-1]}
    ids = DeepSeekRecipe("dsv4", tokenizer).encode(prompt)
    ours = Encoder(tokenizer_file).encode("".join(text for text, _ in chat.runs()[:-1]))  # the last run is the answer
    assert tokenizer.decode(ours, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert ours == ids


def test_every_task_makes_conversations_whose_answers_are_marked(frame: Frame) -> None:
    rng = random.Random(1)
    hay = ["nothing here"] * 30
    for _ in range(50):
        made = [tasks.small_talk(rng, frame), tasks.json_answer(rng, frame), tasks.tool_call(rng, frame)]
        made.append(tasks.retrieval(rng, frame, hay, 3))
        for chat in made:
            runs = chat.runs()
            assert runs[0][0].startswith(BOS) and runs[-1][0].endswith(EOS) and runs[-1][1] >= 1
        asked = [text for role, text, weight in made[-1].turns if role == "assistant" and weight > 1]
        body = "".join(text for role, text, _ in made[-1].turns if role == "user")
        assert len(asked) == 3 and all(text.split("</think>")[1] in body for text in asked)


# -- training ----------------------------------------------------------------------------------------------------------


def test_state_in_parts_is_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_tiny.state.PART_BYTES", 1000)
    for step in (1, 2):
        parts = save_state(tmp_path, {"step": step, "masters": {"a": torch.arange(2000) * step}, "log": [{"x": 1.5}]})
    assert len(parts) > 1 and len(list(tmp_path.glob("*.part"))) == len(parts)
    state = load_state(tmp_path)
    assert state["step"] == 2 and torch.equal(state["masters"]["a"], torch.arange(2000) * 2)
    parts[1].write_bytes(b"cut")
    with pytest.raises(ValueError, match="the parts have"):
        load_state(tmp_path)


def test_optimiser_lowers_a_loss_and_its_state_comes_back() -> None:
    shape = TinyShape(compress_ratios=(0,), hidden_size=128, vocab_size=64, n_routed_experts=2)
    table = parameters(shape)
    masters = initial(shape)
    target = {name: value + 0.05 * torch.ones_like(value) for name, value in masters.items()}
    optimiser = Optimiser(masters, table, shape.o_groups)

    def distance() -> float:
        return sum(float((masters[name] - target[name]).square().sum()) for name in optimiser.moments)

    before = distance()
    for step in range(5):
        optimiser.step({name: masters[name] - target[name] for name in optimiser.moments}, step, 1.0)
    assert distance() < before
    other = Optimiser(masters, table, shape.o_groups)
    other.load(optimiser.state())
    for name, moment in optimiser.moments.items():
        assert (other.moments[name] - moment).abs().max() <= moment.abs().max() / 16
    small = compact({"masters": masters, "moments": optimiser.state(), "step": 5})
    third = Optimiser(masters, table, shape.o_groups)
    third.load(small["moments"])
    for name, squares in optimiser.squares.items():
        assert torch.allclose(third.squares[name], squares, rtol=1e-2) and not third.moments[name].any()
    assert {value.dtype for value in small["masters"].values()} == {torch.bfloat16}


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """The state has the checkpoint's values, and its export has them again."""
    log = json.loads((TRAINED.parent / "benchmarks/results/train_tiny.json").read_text())
    save_state(tmp_path / "state", state_of(TRAINED, log))
    state, expected, table = load_state(tmp_path / "state"), training_weights(), parameters(TinyShape())
    assert (state["step"], state["tokens"], state["log"]) == (log["step"], log["tokens"], log["rows"])
    assert set(state["masters"]) == set(table)
    for name, value in state["masters"].items():
        assert torch.equal(value.float(), expected[name]), name
    masters = {name: value.float() for name, value in state["masters"].items()}
    again = compute_weights(masters, table)
    assert all(torch.equal(again[name].float(), expected[name]) for name in table)
    stored = load_file(TRAINED / "model-00001-of-00001.safetensors")
    exported = tensors_of(masters, table)
    assert set(stored) - set(exported) == {"layers.0.ffn.gate.tid2eid"} and not set(exported) - set(stored)
    Optimiser(masters, table, TinyShape().o_groups).load(state["moments"])


@pytest.mark.parametrize("name", ["train_tiny", "train_tiny_draft"])
def test_a_log_is_drawn(tmp_path: Path, name: str) -> None:
    log = json.loads((TRAINED.parent / f"benchmarks/results/{name}.json").read_text())
    draw(log, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a checkpoint with the MTP module"):
        masters_of(tmp_path, TinyShape())
    with pytest.raises(ValueError, match=r"embed.weight is \[3840, 256\]; expected \[3840, 128\]"):
        masters_of(TRAINED, TinyShape(hidden_size=128))
