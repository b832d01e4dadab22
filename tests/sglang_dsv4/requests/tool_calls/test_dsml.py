"""Tool calls as the model writes them: each is final, with arguments that are a JSON object, or it stays text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable

import pytest
from serving.written_calls import BROKEN, GOOD, SCHEMAS, block, invoke, marked, parameter, some_answer

from sglang_dsv4.requests.tool_calls.arguments import Fault, Refused, Schema, read_value
from sglang_dsv4.requests.tool_calls.dsml import BLOCK_CLOSE, BLOCK_OPEN, INVOKE_CLOSE, MARK, MARKER, Reader


def answer(
    text: str, pieces: Iterable[str] | None = None, repair: bool = True
) -> tuple[str, list[tuple[str, str]], Reader]:
    """The text and the calls of an answer, given in pieces."""
    reader = Reader(SCHEMAS, repair)
    said = "".join([reader.feed(piece) for piece in ([text] if pieces is None else pieces)]) + reader.finish()
    return said, [(call.name, call.arguments) for call in reader.calls], reader


# ---- a call, or text

RIGHT = {
    "strings-and-json": (
        invoke("bash", parameter("command", "ls -l"), parameter("seconds", "5", False)),
        '{"command": "ls -l", "seconds": 5}',
    ),
    "a-value-of-many-lines": (
        invoke("bash", parameter("command", 'cat <<E\n a "b" \\n\nE\n')),
        '{"command": "cat <<E\\n a \\"b\\" \\\\n\\nE\\n"}',
    ),
    "digits-are-kept": (
        invoke("free", parameter("n", "1.10000000000000000001", False), parameter("m", "9" * 5000, False)),
        '{"n": 1.10000000000000000001, "m": ' + "9" * 5000 + "}",
    ),
    "no-parameters": (invoke("now"), "{}"),
    "an-empty-string": (invoke("bash", parameter("command", "")), '{"command": ""}'),
    "the-marker-in-letters": (
        invoke("bash", parameter("command", "echo '</｜DSML｜parameter>'")),
        '{"command": "echo \'</｜DSML｜parameter>\'"}',
    ),
    "the-marker-and-no-tag": (
        invoke("bash", parameter("command", f"echo {MARK} a<b")),
        '{"command": "echo ｜DSML｜ a<b"}',
    ),
    "a-tool-that-was-not-offered": (invoke("other", parameter("a", "[1]", False)), '{"a": [1]}'),
    "a-key-of-the-schema": (invoke("literal", parameter("arguments", '{"a": 1}', False)), '{"arguments": {"a": 1}}'),
    "what-the-schema-forbids-as-written": (invoke("bash", parameter("seconds", "soon")), '{"seconds": "soon"}'),
    "null-as-written": (invoke("bash", parameter("command", "null", False)), '{"command": null}'),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_call_is_given_as_it_was_written(case: str) -> None:
    call, arguments = RIGHT[case]
    name = re.search('name="([^"]+)"', call)[1]
    text = f"Let me see.\n\n{block(call)}"
    for pieces in (None, text):
        said, calls, reader = answer(text, pieces)
        assert (said, calls) == ("Let me see.", [(name, arguments)])
        assert not reader.calls[0].repairs and reader.refused is None
    assert answer(text, repair=False)[1] == calls


REPAIRED = {
    "a-string-marked-as-json": (
        Fault.MARKED_JSON,
        invoke("bash", parameter("command", 'echo "a"', False)),
        '{"command": "echo \\"a\\""}',
    ),
    "a-string-that-begins-with-a-quoted-word": (
        Fault.MARKED_JSON,
        invoke("bash", parameter("command", '"my prog" -f', False)),
        '{"command": "\\"my prog\\" -f"}',
    ),
    "an-open-bracket-that-only-a-string-has": (
        Fault.MARKED_JSON,
        invoke("bash", parameter("command", "[ -f x ]", False)),
        '{"command": "[ -f x ]"}',
    ),
    "a-number-for-a-string": (Fault.MARKED_JSON, invoke("write", parameter("path", "42", False)), '{"path": "42"}'),
    "an-object-for-a-string": (
        Fault.MARKED_JSON,
        invoke("write", parameter("path", '{"a": 1}', False)),
        '{"path": "{\\"a\\": 1}"}',
    ),
    "json-marked-as-a-string": (Fault.MARKED_STRING, invoke("bash", parameter("seconds", " 5 ")), '{"seconds": 5}'),
    "json-in-quotes": (Fault.QUOTED, invoke("write", parameter("lines", '"[1, 2]"', False)), '{"lines": [1, 2]}'),
    "a-newline-in-json": (
        Fault.CONTROL,
        invoke("write", parameter("lines", '["a\n\tb"\n]', False)),
        '{"lines": ["a\\u000a\\u0009b"\n]}',
    ),
    "a-constant-of-python": (Fault.CONSTANT, invoke("free2", parameter("on", "True", False)), '{"on": true}'),
    "no-mark-and-a-string": (Fault.UNMARKED, invoke("bash", parameter("command", "ls", None)), '{"command": "ls"}'),
    "no-mark-and-an-array": (Fault.UNMARKED, invoke("write", parameter("lines", "[1]", None)), '{"lines": [1]}'),
    "a-body-of-json": (Fault.BODY, invoke("bash", '{"command": "ls"}'), '{"command": "ls"}'),
    "arguments-in-a-parameter": (
        Fault.WRAPPED,
        invoke("bash", parameter("arguments", '{"command": "ls"}', False)),
        '{"command": "ls"}',
    ),
    "arguments-in-a-string": (
        Fault.WRAPPED,
        invoke("bash", parameter("arguments", '{"command": "ls"}')),
        '{"command": "ls"}',
    ),
    "arguments-in-a-body": (
        Fault.WRAPPED,
        invoke("bash", '{"name": "bash", "arguments": {"command": "ls"}}'),
        '{"command": "ls"}',
    ),
    "a-tag-that-closes-itself": (Fault.SELF_CLOSED, marked('<｜DSML｜invoke name="now"/>'), "{}"),
}


@pytest.mark.parametrize("case", REPAIRED)
def test_a_deviation_with_one_reading_is_repaired(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `repair=False` a call that needs this repair is text."""
    monkeypatch.setitem(SCHEMAS, "free2", {"properties": {"on": {"type": "boolean"}}})
    fault, call, arguments = REPAIRED[case]
    text = f"\n\n{block(call)}"
    for pieces in (None, text):
        said, calls, reader = answer(text, pieces)
        assert (said, [got for _, got in calls]) == ("", [arguments])
        assert fault in reader.calls[0].repairs
        said, calls, reader = answer(text, pieces, repair=False)
        assert (said, calls) == (text.replace(MARK, MARKER), [])
        assert reader.refused in (fault, Fault.BODY)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_call_is_text_and_so_is_all_after_it(case: str) -> None:
    """A call before the broken one is a call. A right call after it is text: the model wrote it on the assumption that
    the broken call is made."""
    fault, call = BROKEN[case]
    after = f"\n{call}\n{GOOD}\n{BLOCK_CLOSE} Done.\n\n{block(GOOD)}"
    text = f"First.\n\n{BLOCK_OPEN}\n{GOOD}{after}"
    for pieces in (None, text):
        said, calls, reader = answer(text, pieces)
        assert said == "First." + after.replace(MARK, MARKER)
        assert calls == [("bash", '{"command": "ls"}')]
        assert reader.refused is fault


PROSE = {
    "the-marker": f"The marker is {MARK}, and then text.",
    "an-opening-tag": f"A block begins with `{BLOCK_OPEN}` and then text.",
    "a-tag-at-the-end": f"It begins with {BLOCK_OPEN}",
    "an-opening-tag-and-nothing": f"\n\n{BLOCK_OPEN}\n",
    "an-empty-block": f"{BLOCK_OPEN}\n{BLOCK_CLOSE} and text",
    "other-tags": f"<{MARK}invoke> and {INVOKE_CLOSE} and {BLOCK_CLOSE}",
    "a-call-in-a-line": f'Write `{GOOD}` or `<{MARK}invoke name="now"/>`.',
    "a-call's-opening-tag": f'<{MARK}invoke name="bash"> and `<{MARK}invoke name="bash">`',
    "half-a-tag": f"\n\n<{MARK}tool",
    "letters": block(GOOD).replace(MARK, MARKER),
    "newlines-and-brackets": "a\n\n\n<\n\n< b </\n\n",
    "nothing": "",
}


@pytest.mark.parametrize("case", PROSE)
@pytest.mark.parametrize("then", ["", f"\n\n{block(GOOD)} End.\n"], ids=["alone", "then-a-call"])
def test_text_that_mentions_the_markup_is_text(case: str, then: str) -> None:
    """Text that quotes a tag stays text, and a later call is a call."""
    text = PROSE[case] + then
    if then and case in ("a-tag-at-the-end", "an-opening-tag-and-nothing"):
        text = PROSE[case] + "." + then
    for pieces in (None, text):
        said, calls, _ = answer(text, pieces)
        before = text.removesuffix(then)
        assert said == (before.rstrip("\n") + " End.\n" if then else before).replace(MARK, MARKER)
        assert len(calls) == bool(then)


def test_a_call_outside_of_a_block_is_repaired() -> None:
    text = f"Now:\n{GOOD}\n{GOOD} and text"
    for pieces in (None, text):
        said, calls, reader = answer(text, pieces)
        assert (said, calls) == ("Now: and text", [("bash", '{"command": "ls"}')] * 2)
        assert [call.repairs for call in reader.calls] == [{Fault.BARE}, set()]
        assert answer(text, pieces, repair=False)[:2] == (text.replace(MARK, MARKER), [])
    assert answer(GOOD.replace("</", "<", 1))[2].refused is Fault.TAG_IN_VALUE
    assert answer(f"{block(GOOD)}{GOOD}")[:2] == ("", [("bash", '{"command": "ls"}')] * 2)


def test_a_call_in_reasoning_is_a_draft_unless_the_answer_ends_with_it() -> None:
    thought = f"I call.\n\n{block(GOOD)}"
    for text, expected in (
        (thought, "I call."),
        (thought + "\n\n", "I call."),
        (thought + "\nOr not.", None),
        (thought + "<", None),
        (f"{thought}\n{thought}", None),
        (f"{thought}\n{block(GOOD)}", "I call."),
        (thought[:-60], None),
    ):
        for pieces in ([text], text):
            reader = Reader(SCHEMAS, reasoning=True)
            said = "".join(map(reader.feed, pieces)) + reader.finish()
            drafted = Reader(SCHEMAS, reasoning=True)
            assert "".join(map(drafted.feed, pieces)) + drafted.revoke() == text.replace(MARK, MARKER)
            assert not drafted.calls
            if expected is not None:
                assert said == expected and {Fault.REASONING} <= reader.calls[-1].repairs
            elif text.count(BLOCK_OPEN) == 2:
                assert said == thought.replace(MARK, MARKER) + "\nI call." and len(reader.calls) == 1
            else:
                assert said == text.replace(MARK, MARKER) and not reader.calls
            assert not Reader(SCHEMAS, repair=False, reasoning=True).calls


def test_text_comes_as_soon_as_it_can_be_no_call() -> None:
    reader = Reader(SCHEMAS)
    assert reader.feed("Hello ") == "Hello "
    assert reader.feed("you\n\n") == "you"
    assert reader.feed(f"and <{MARK}tool") == "\n\nand "
    assert reader.feed("s are") == "<｜DSML｜tools are"
    assert reader.feed(f"\n{BLOCK_OPEN}\n<") == ""
    assert reader.feed("b>") == f"\n{BLOCK_OPEN}\n<b>".replace(MARK, MARKER)
    assert reader.feed(f"\n\n{BLOCK_OPEN}\n{GOOD[:-1]}") == "" and not reader.calls
    assert reader.feed(">") == "" and len(reader.calls) == 1
    assert reader.feed("\n text") == "\n text"


def test_a_long_value_in_many_pieces() -> None:
    """A value of 200,000 characters in pieces of 4 characters, the size of a token."""
    text = block(invoke("bash", parameter("command", "a<b " * 50_000)))
    _, calls, _ = answer(text, (text[begin : begin + 4] for begin in range(0, len(text), 4)))
    assert json.loads(calls[0][1]) == {"command": "a<b " * 50_000}


# ---- generated answers


def copied(reader: Reader) -> Reader:
    """A reader in the same state, which goes on alone."""
    other = Reader.__new__(Reader)
    vars(other).update(vars(reader))
    other.calls, other._out = list(reader.calls), list(reader._out)
    other._parameters, other._repairs = dict(reader._parameters), set(reader._repairs)
    return other


def check_answer(seed: int) -> int:
    """Check an answer letter by letter, with an end after each; how many calls it has."""
    written = some_answer(random.Random(seed))
    text = written.text
    said, reader = "", Reader(SCHEMAS)
    for end in range(len(text) + 1):
        said += reader.feed(text[end - 1 : end] if end else "")
        last = copied(reader)
        got = said + last.finish()
        calls = [(call.name, json.loads(call.arguments)) for call in last.calls]
        assert (got, calls) == written.expected(end), (seed, end, text[:end])
    check_divisions(text, seed)
    return len(calls)


FEW_LETTERS = 120


def check_divisions(text: str, seed: int, few_letters: int = FEW_LETTERS) -> None:
    """Check that a reader's state does not depend on how the text so far was divided.

    Let ``L[i]`` be the state after the first `i` letters, one at a time. If feeding ``text[i:j]`` in one piece leads
    from ``L[i]`` to ``L[j]`` and gives the same text for all ``i < j``, every division gives the same: by induction
    over its pieces, the state before each piece is the one of the letters before it. All pairs are tried for a text of
    few letters, else those with ``i`` at the beginning or ``j`` at the end. Equal states end equally.
    """
    reader = Reader(SCHEMAS, repair=seed % 5 > 0, reasoning=seed % 2 > 0)
    states, said = [copied(reader)], [""]
    for letter in text:
        said.append(said[-1] + reader.feed(letter))
        states.append(copied(reader))
    size = len(text)
    for begin in range(size):
        ends = range(begin + 1, size + 1) if begin == 0 or size <= few_letters else (size,)
        for end in ends:
            other = copied(states[begin])
            given = other.feed(text[begin:end])
            assert said[begin] + given == said[end], (seed, begin, end)
            assert vars(other) == vars(states[end]), (seed, begin, end)


def test_generated_answers_cut_anywhere_in_pieces_of_any_size() -> None:
    """Right and broken calls in prose: valid JSON or no call, and no text is lost."""
    assert sum(check_answer(seed) for seed in range(40)) > 40


def test_every_division_of_an_answer_is_one_state() -> None:
    """All pairs of places, of answers that hold each state of the reader."""
    call = invoke("bash", parameter("command", "a<b"), parameter("n", "5", None))
    in_a_line = f"{block(GOOD)}\t{GOOD}"  # the tab may come alone, and is no beginning of a line
    texts = [f"A\n\n{block(call)}\n", f"\n{invoke('bash', '{}')}<", in_a_line, *SHORT, *PROSE.values()]
    for seed, text in enumerate(texts):
        for way in range(2):
            check_divisions(text, seed + way, few_letters=10**4)


SHORT = [block(call) for fault, call in BROKEN.values() if len(call) < 80]


def test_a_state_that_depends_on_the_division_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above, of a reader that takes a tag for text if it comes in two pieces."""
    feed = Reader.feed

    def careless(reader: Reader, text: str) -> str:
        return feed(reader, text) + (reader._held if reader._held.endswith("<") else "")

    monkeypatch.setattr(Reader, "feed", careless)
    with pytest.raises(AssertionError):
        check_divisions(f"A\n\n{block(GOOD)}", 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_twenty_thousand_generated_answers(part: int) -> None:
    for seed in range(1000 + part, 21_000, 8):
        check_answer(seed)


def test_any_tags_in_any_order_give_json_or_text() -> None:
    """Sequences of the format's tags without its grammar: no exception, every call's arguments are an object, and what
    is no call is text."""
    draw = random.Random(5)
    tags = [BLOCK_OPEN, BLOCK_CLOSE, INVOKE_CLOSE, f"</{MARK}parameter>", f'<{MARK}invoke name="bash">', "\n", " x "]
    tags += [f'<{MARK}parameter name="command" string="true">', f'<{MARK}parameter name="seconds" string="false">', "5"]
    calls = 0
    for _ in range(1500):
        text = "".join(draw.choices(tags, k=draw.randrange(14)))
        said, got, _ = answer(text)
        assert answer(text, text)[:2] == (said, got)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in got)
        if not got:
            assert said == text.replace(MARK, MARKER)
        calls += len(got)
    assert calls > 10


# ---- values


def kinds(value: str, mark: bool | None, types: str | None) -> str:
    repairs: set[Fault] = set()
    try:
        got = read_value(value, mark, None if types is None else frozenset(types.split()), repairs)
    except Refused as refused:
        return refused.fault.name
    json.loads(got)
    return got + "".join(f" {fault.name}" for fault in repairs)


def test_a_string_for_any_type() -> None:
    """Text that is JSON of no type goes to a string, and to nothing else; marked or not."""
    for types in (None, "string", "string integer", "integer", "object array"):
        expected = {True: '"so"', False: "NO_JSON", None: "NO_JSON"}
        if types is None or "string" in types:
            expected[None] = '"so" UNMARKED'
        if types is not None and "string" in types:
            expected[False] = '"so" MARKED_JSON'
        for mark, want in expected.items():
            assert kinds("so", mark, types) == want, (types, mark)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"type": "any"}, None),
        ({"type": [5]}, None),
        ({"enum": ["a", 1]}, {"string", "integer", "number"}),
        ({"const": None}, {"null"}),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/$defs/x"}]}, {"array", "boolean"}),
        ({"anyOf": [{"type": "array"}, {}]}, None),
        ({"allOf": [{"type": ["array", "null"]}, {"type": "array"}, {}]}, {"array"}),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"$ref": "https://example.com"}, None),
        (True, None),
        ([], None),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_types_of_a_schema(schema: object, types: set[str] | None) -> None:
    whole = {"properties": {"k": schema}, "$defs": {"x": {"type": "boolean"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert Schema(whole).types("k") == types
    assert Schema({"additionalProperties": schema, "$defs": whole["$defs"]}).types("k") == types
    assert Schema(schema).types("other") is None
