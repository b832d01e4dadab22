"""A limit on reasoning tokens, after which the token `</think>` closes the block, as when the model closes it.

A request asks for it by SGLang's spelling, ``custom_params: {"thinking_budget": N}``, or by `thinking.budget_tokens` of
the chat, Responses and Anthropic routes (`requests.chat.switches`), and needs no `custom_logit_processor`. SGLang
0.5.23 has such processors for other models only; they read the answer on the host, a token late under overlapped
scheduling, and don't run with EAGLE.

Here the budget is a penaliser of the batch (`penalties.BatchedThinkingBudget`): it counts the tokens since `<think>`,
and once the budget is used up it forbids every token but `</think>`. It does nothing where the prompt leaves no block
open, nor after the block's end. With a grammar and a reasoning parser the grammar begins after `</think>`, as without
a budget.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

PARAMETER = "thinking_budget"
START, END = "<think>", "</think>"
NO_LIMIT = 2**30
"""Tokens left of a request without a budget, and after the block's end: more than any answer has."""


@functools.lru_cache(maxsize=8)
def think_tokens(tokenizer: Any) -> tuple[int, int] | None:
    """The ids of `<think>` and `</think>`; None if the tokenizer lacks one."""
    vocabulary = tokenizer.get_vocab()
    start, end = vocabulary.get(START), vocabulary.get(END)
    return None if start is None or end is None else (start, end)


def budget_of(params: object) -> int | None:
    """The budget that sampling parameters name, in tokens; None for none.

    Raises:
        ValueError: it is no whole number of at least 0.
    """
    budget = (getattr(params, "custom_params", None) or {}).get(PARAMETER)
    if budget is not None and (type(budget) is not int or budget < 0):
        raise ValueError(f"{PARAMETER} must be a whole number of tokens, at least 0, got {budget!r}.")
    return budget


def left_at_start(req: Req) -> int:
    """Reasoning tokens that a request may generate: its budget without the tokens of the prompt's open block."""
    budget = budget_of(req.sampling_params)
    tokens = None if budget is None or req.tokenizer is None else think_tokens(req.tokenizer)
    if tokens is None:
        return NO_LIMIT
    start, end = tokens
    for after, token in enumerate(reversed(req.origin_input_ids)):
        if token == start:
            return max(budget - after, 0)
        if token == end:
            break
    return NO_LIMIT
