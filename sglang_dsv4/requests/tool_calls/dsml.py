"""Tool calls in a model's text: each is final, with arguments that are a JSON object, or it stays text.

The release writes calls in this form (specification, section 8); M is the token ``｜DSML｜``::

    <M tool_calls>                                      without the blanks around M
    <M invoke name="f">
    <M parameter name="k" string="true|false">v</M parameter>
    </M invoke>
    </M tool_calls>

A value is text with ``string="true"``, and JSON with ``"false"``. Nothing in a value is escaped, so no value can hold a
tag. :class:`Reader` takes the text in pieces of any size. Its state after a piece depends on the text so far and not on
the pieces in which it came, so every division gives the same text and calls:

* A call is final at its ``</M invoke>``. Before that it is held back, so that no client gets a part of one.
* A call that breaks the format, that has a value that is no JSON, or in which the answer ends, is text, and so is
  everything after it: the calls that a client gets are the first ones that the model wrote, without gaps.
* The opening tag of a block without a call after it is text that quotes the tag. So is the opening tag of a call
  outside of a block, if no part of a call follows or if it does not begin a line. Later calls are still read.
* Newlines before a block belong to it, as in deepseek-recipe's parser.
* A call in reasoning is a call if the answer ends with its block. In all other cases it is a draft, and stays text.
* A deviation with only one possible meaning is repaired (:class:`Fault`). The schema of a parameter decides between a
  string and JSON; if neither fits the schema better, the value stays as the model marked it.

This module knows nothing of SGLang. `output_parser` reads SGLang's answers with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_dsv4.requests.tool_calls.arguments import BLANKS, Fault, Refused, Schema, read_object, read_parameters

MARKER = "｜DSML｜"
MARK = "\udfff"
"""Stands for :data:`MARKER` where the model sampled it as one token: spelled by other tokens it is text. A lone
surrogate, which no decoded text holds."""

BLOCK_OPEN, BLOCK_CLOSE = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
INVOKE_OPEN, INVOKE_CLOSE = f"<{MARK}invoke", f"</{MARK}invoke>"
PARAMETER_OPEN, PARAMETER_CLOSE = f"<{MARK}parameter", f"</{MARK}parameter>"
LONGEST_HEADER = 512
"""Most characters of a tag from its name to its ``>``."""


@dataclass(frozen=True)
class Call:
    """One final call."""

    name: str
    arguments: str  # a JSON object
    repairs: frozenset[Fault]


class Reader:
    """One answer's content or reasoning, read in pieces.

    Attributes:
        calls: the final calls so far.
        refused: why the first refused call was refused; None while there is none.
    """

    def __init__(self, schemas: Mapping[str, Any], repair: bool = True, reasoning: bool = False) -> None:
        """Begin an answer.

        Args:
            schemas: JSON schema of the parameters of each tool; a call of another tool is read by its marks alone.
            repair: whether a deviation with one reading is repaired; else its call is refused.
            reasoning: whether the text is reasoning, in which a call is a draft if anything follows it.
        """
        self.calls: list[Call] = []
        self.refused: Fault | None = None
        self._schemas, self._repair, self._reasoning = schemas, repair, reasoning
        self._state: Callable[[Reader], bool] = Reader._text
        self._held = ""  # [0, _at): read; the rest: not yet
        self._at = 0
        self._out: list[str] = []
        self._markup = ""  # of the calls in reasoning
        self._at_start = True  # of the text, or of the text after a call
        self._blocks_calls = 0  # calls of the open block
        self._name, self._bare = "", False
        self._parameters: dict[str, tuple[str, bool | None]] = {}  # name -> value, and its mark
        self._body: str | None = None
        self._repairs: set[Fault] = set()
        self._begin = 0  # of the value
        self._key, self._mark = "", None

    def feed(self, text: str) -> str:
        """Read a further piece of the answer; returns the text that can't be part of a call.

        Args:
            text: the piece, with :data:`MARK` for each marker that was sampled as one token.
        """
        self._held += text
        while self._state(self):
            pass
        return self._taken()

    def finish(self) -> str:
        """The rest of the text, after the answer has ended; an unfinished closing tag of a block is dropped."""
        if self._state is Reader._block and self._blocks_calls:
            if BLOCK_CLOSE.startswith(self._held.lstrip(BLANKS)):
                self._consume(len(self._held))
        elif self._state not in (Reader._text, Reader._rest):
            self.refused = self.refused or Fault.CUT
        self._release(len(self._held))
        return self._taken()

    def revoke(self) -> str:
        """The rest of the reasoning with its calls as text, since content follows."""
        text = self.finish()
        return self._drafted() + text

    # ---- text that the reader returns

    def _taken(self) -> str:
        text, self._out = "".join(self._out), []
        return text

    def _release(self, count: int) -> None:
        """Return the first characters of the held text to the caller, as text."""
        text = self._held[:count]
        self._at_start = self._at_start and not text
        if self._reasoning and self.calls:
            if not text.strip(BLANKS):
                self._markup += text
                return self._drop(count)
            self._out.append(self._drafted())
        self._out.append(_letters(text))
        self._drop(count)

    def _drafted(self) -> str:
        """The calls in reasoning as text."""
        text, self._markup = _letters(self._markup), ""
        self.calls.clear()
        return text

    def _consume(self, count: int) -> None:
        """Drop the first characters of the held text: they are part of calls."""
        self._markup += self._held[:count] if self._reasoning else ""
        self._at_start = True
        self._drop(count)

    def _drop(self, count: int) -> None:
        self._held, self._at = self._held[count:], 0

    def _refuse(self, fault: Fault) -> bool:
        """Refuse the call: the held characters and everything after them are text."""
        self.refused = self.refused or fault
        self._state = Reader._rest
        return True

    def _mention(self) -> bool:
        """Return an opening tag that no call follows as text."""
        self._release(self._begin)
        self._state = Reader._text
        return True

    # ---- states: each method reads further and returns whether it got on; False: it needs more text

    def _rest(self) -> bool:
        self._release(len(self._held))
        return False

    def _text(self) -> bool:
        mark = self._held.find(MARK, self._at)
        if mark < 0:
            self._release(len(self._held) - len(_MAY_OPEN.search(self._held)[0]))
            return False
        begin = mark - 1
        tag = next((tag for tag in (BLOCK_OPEN, INVOKE_OPEN) if mark and self._held.startswith(tag, begin)), None)
        rest = self._held[begin:] if mark else "no tag"
        if tag is None and not any(tag.startswith(rest) for tag in (BLOCK_OPEN, INVOKE_OPEN)):
            self._at = mark + 1
            return True
        gap = begin - len(self._held[:begin].rstrip("\n"))
        begins_line = gap > 0 or (begin == 0 and self._at_start)
        self._release(begin - gap)
        if tag is None:
            return False
        if tag == INVOKE_OPEN and not begins_line:
            self._at = gap + len(tag)
            return True
        self._blocks_calls, self._at, self._begin = 0, gap + len(tag), gap + len(tag)
        if tag == BLOCK_OPEN:
            self._state = Reader._block
        else:
            self._begin_call(bare=True)
        return True

    def _begin_call(self, bare: bool) -> None:
        self._name, self._bare, self._parameters, self._body = "", bare, {}, None
        self._repairs = {fault for fault, is_so in ((Fault.BARE, bare), (Fault.REASONING, self._reasoning)) if is_so}
        self._state = Reader._invoke

    def _next_tag(self, *tags: str) -> str | None:
        """The next tag, one of `tags`, consumed; "" if more text is needed to tell, None if something else is next."""
        begin = self._at + len(_BLANK.match(self._held, self._at)[0])
        for tag in tags:
            if self._held.startswith(tag, begin):
                self._at = begin + len(tag)
                return tag
        rest = self._held[begin:]
        return "" if any(tag.startswith(rest) for tag in tags) else None

    def _block(self) -> bool:
        tag = self._next_tag(INVOKE_OPEN, BLOCK_CLOSE)
        if tag == INVOKE_OPEN:
            self._begin_call(bare=False)
        elif tag == "":
            return False
        elif self._blocks_calls:  # the block's end, or text after its calls
            self._consume(self._at if tag else 0)
            self._state = Reader._text
        else:
            return self._mention()
        return True

    def _header(self) -> str | None:
        """The attributes of a tag; "" if it has another form, None if more text is needed to tell."""
        end = self._held.find(">", self._at)
        header = self._held[self._at : end if end >= 0 else len(self._held)]
        if len(header) > LONGEST_HEADER or not _HEADER.fullmatch(header):
            return ""
        if end < 0:
            return None
        self._at = end + 1
        return header

    def _invoke(self) -> bool:
        header = self._header()
        if header is None:
            return False
        match = _INVOKE.fullmatch(header)
        if match is None:
            return self._mention() if self._bare else self._refuse(Fault.TAG)
        self._name = match["name"]
        if match["closed"]:
            self._repairs.add(Fault.SELF_CLOSED)
            return self._commit()
        self._state = Reader._parameter
        return True

    def _parameter(self) -> bool:
        body = () if self._parameters else ("{",)
        tag = self._next_tag(PARAMETER_OPEN, INVOKE_CLOSE, *body)
        if tag == "":
            return False
        if tag == PARAMETER_OPEN:
            self._bare = False
            self._state = Reader._attributes
        elif tag == INVOKE_CLOSE:
            return self._commit()
        elif tag == "{":
            self._begin = self._at - 1
            self._state = Reader._json_body
        else:
            return self._mention() if self._bare else self._refuse(Fault.TEXT)
        return True

    def _attributes(self) -> bool:
        header = self._header()
        if header is None:
            return False
        pairs = _ATTRIBUTE.findall(header)
        attributes = dict(pairs)
        mark = {"true": True, "false": False, None: None}.get(attributes.get("string"), "other")
        if not _ATTRIBUTES.fullmatch(header) or len(attributes) < len(pairs) or mark == "other":
            return self._refuse(Fault.TAG)
        self._key, self._mark, self._begin = attributes.get("name", ""), mark, self._at
        if not self._key:
            return self._refuse(Fault.TAG)
        if self._key in self._parameters:
            return self._refuse(Fault.TWICE)
        self._state = Reader._value
        return True

    def _until(self, close: str) -> str | None:
        """The text from `_begin` to a closing tag; None if it has not come.

        Raises:
            Refused: another tag comes first.
        """
        while (mark := self._held.find(MARK, self._at)) >= 0:
            begin = mark - 2 if self._held.startswith("</", mark - 2) else mark - 1
            if begin >= self._begin and self._held[begin] == "<":
                if self._held.startswith(close, begin):
                    self._at = begin + len(close)
                    return _letters(self._held[self._begin : begin])
                if close.startswith(self._held[begin:]):
                    self._at = mark
                    return None
                raise Refused(Fault.TAG_IN_VALUE)
            self._at = mark + 1
        self._at = len(self._held)
        return None

    def _value(self) -> bool:
        try:
            value = self._until(PARAMETER_CLOSE)
        except Refused as refused:
            return self._refuse(refused.fault)
        if value is None:
            return False
        self._parameters[self._key] = value, self._mark
        self._state = Reader._parameter
        return True

    def _json_body(self) -> bool:
        try:
            self._body = self._until(INVOKE_CLOSE)
        except Refused as refused:
            return self._refuse(refused.fault)
        return self._commit() if self._body is not None else False

    def _commit(self) -> bool:
        schema = Schema(self._schemas.get(self._name))
        try:
            if self._body is not None:
                self._repairs.add(Fault.BODY)
                arguments = read_object(self._body, self._name, schema, self._repairs)
            else:
                arguments = read_parameters(self._parameters, schema, self._repairs)
            if self._repairs and not self._repair:
                raise Refused(min(self._repairs, key=list(Fault).index))
        except Refused as refused:
            return self._refuse(refused.fault)
        self.calls.append(Call(self._name, arguments, frozenset(self._repairs)))
        self._consume(self._at)
        self._blocks_calls += 1
        self._state = Reader._block
        return True


def _letters(text: str) -> str:
    return text.replace(MARK, MARKER)


_MAY_OPEN = re.compile(r"\n*<?\Z")  # the end of a text that may go on with a block
_BLANK = re.compile(f"[{BLANKS}]*")
_HEADER = re.compile(r'\s*(?:[a-z]+="[^"<>\n]*"\s*)*(?:[a-z]*|[a-z]+="?|[a-z]+="[^"<>\n]*|/)')  # or its beginning
_INVOKE = re.compile(r'\s+name="(?P<name>[^"<>\n]+)"\s*(?P<closed>/?)')
_ATTRIBUTE = re.compile(r'\s+(name|string)="([^"<>\n]*)"')
_ATTRIBUTES = re.compile(rf"(?:{_ATTRIBUTE.pattern})+\s*")
