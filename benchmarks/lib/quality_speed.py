"""Tokens a second of answers to the training's tasks, at the acceptance that trained drafts reach."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from tokenizers import Tokenizer
from train_tiny import tasks
from train_tiny.chat import Chat, Frame
from train_tiny.corpus import frame_of

from lib.serve_load import Client, Reply, run, tokens_a_step

AT_ONCE = 16
LONGEST_ANSWER = 160
TASKS = (tasks.story, tasks.copying, tasks.arithmetic, tasks.person_question)


def questions(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return token ids of prompts that ask for stories, copies, sums with reasoning, and facts of the prompt."""
    frame, rng = Frame(**frame_of(tokenizer)), random.Random("speed")  # no seed of training
    found = []
    for number in range(count):
        task = TASKS[number % len(TASKS)]
        chat = Chat(frame, thinking=task is tasks.arithmetic)
        task(rng, chat)
        text = "".join(text for text, _ in chat.runs()[:3])  # the head, the user's turn, and how the answer begins
        found.append(tokenizer.encode(text, add_special_tokens=False).ids)
    return found


def speed(url: str, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Ask a server all questions, greedily, one after the other and then up to `AT_ONCE` at a time.

    Each round is preceded by one that is not timed. An answer ends by itself, or after `LONGEST_ANSWER` tokens.

    Returns:
        "alone": a request's tokens a second after its first token; "together": tokens a second of all requests, their
        prefills included; "tokens": of the answers; "tokens_a_step": a verify step's, on a server with drafts.
    """

    async def load(client: Client) -> dict[str, float]:
        async def ask(prompt: Sequence[int]) -> Reply:
            sampling = {"max_new_tokens": LONGEST_ANSWER, "temperature": 0.0}
            return await client.generate(prompt, LONGEST_ANSWER, fields={"sampling_params": sampling})

        async def at_once(free: asyncio.Semaphore, prompt: Sequence[int]) -> Reply:
            async with free:
                return await ask(prompt)

        async def together() -> tuple[list[Reply], float]:
            free, begin = asyncio.Semaphore(AT_ONCE), time.perf_counter()
            replies = await asyncio.gather(*(at_once(free, prompt) for prompt in prompts))
            return replies, time.perf_counter() - begin

        for prompt in prompts[: len(TASKS)]:
            await ask(prompt)
        alone = [await ask(prompt) for prompt in prompts]
        await together()
        replies, seconds = await together()
        after_first = sum(len(reply.token_times) - 1 for reply in alone)
        return {
            "alone": after_first / sum(reply.token_times[-1] - reply.token_times[0] for reply in alone),
            "together": sum(len(reply.token_times) for reply in replies) / seconds,
            "tokens": sum(len(reply.token_times) for reply in alone),
            **tokens_a_step(alone),
        }

    return run(url, load)
