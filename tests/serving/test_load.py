"""More work than the pool holds: requests wait, none is lost, no answer changes, and nothing leaks.

SGLang checks at every idle moment that free + cached tokens are the whole pool, and stops the server otherwise;
`is_alive` after each test therefore also shows that nothing leaked.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from serving.server import MAX_RUNNING, POOL_TOKENS, Server, output_logprobs

PAGE = 256


def prompt(seed: int, length: int) -> list[int]:
    return [0, *((seed * 7919 + 31 * index) % 600 + 5 for index in range(length - 1))]


def wait_until_idle(server: Server) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        load = requests.get(f"{server.url}/v1/loads", timeout=300).json()["loads"][0]
        if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
            return
        time.sleep(0.2)
    raise AssertionError(f"the server is still busy: {load}")


@pytest.mark.slow
def test_long_prompts_wait_for_room(server: Server) -> None:
    """9 prompts of 4 pages over 24 pages: at most 5 fit at a time."""
    prompts = [prompt(seed, 900 + 13 * seed) for seed in range(9)]
    assert sum(-(-len(ids) // PAGE) for ids in prompts) >= 1.5 * POOL_TOKENS / PAGE
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(server.generate, prompts))
    assert all(len(result["output_ids"]) == 16 for result in together)
    for index in (0, 8):
        alone = server.generate(prompts[index])
        assert together[index]["output_ids"] == alone["output_ids"]
        assert output_logprobs(together[index]) == output_logprobs(alone)
    assert server.is_alive()


@pytest.mark.slow
def test_growing_answers_are_retracted_and_finished(server: Server) -> None:
    """16 requests that fit when they start (a page each) and not when they have grown (two pages each)."""
    prompts = [prompt(seed + 50, 200 + seed) for seed in range(MAX_RUNNING)]
    with ThreadPoolExecutor(MAX_RUNNING) as pool:
        results = list(pool.map(lambda ids: server.generate(ids, max_new_tokens=72), prompts))
    assert all(len(result["output_ids"]) == 72 for result in results)
    alone = server.generate(prompts[3], max_new_tokens=72)
    assert results[3]["output_ids"] == alone["output_ids"]
    assert server.is_alive()


def test_more_requests_than_slots_are_queued(server: Server) -> None:
    prompts = [prompt(seed + 100, 5) for seed in range(3 * MAX_RUNNING)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(lambda ids: server.generate(ids, max_new_tokens=4), prompts))
    assert all(len(result["output_ids"]) == 4 for result in results)
    assert server.is_alive()


@pytest.mark.slow
def test_short_prompt_after_a_long_one_does_not_see_its_slot(server: Server) -> None:
    """Prompts of 1 to 5 tokens read compressor rows that a slot's last owner may have left."""
    short = [prompt(7, length) for length in range(1, 6)]
    before = [output_logprobs(server.generate(ids)) for ids in short]
    server.generate(prompt(8, 700))
    assert [output_logprobs(server.generate(ids)) for ids in short] == before


def test_abort_in_mid_stream_frees_the_request(server: Server) -> None:
    reference = server.generate(prompt(9, 300))["output_ids"]
    stream = server.chat("abort me", max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    for _, chunk in zip(range(4), stream, strict=False):
        assert chunk.choices
    stream.close()
    wait_until_idle(server)
    assert server.generate(prompt(9, 300))["output_ids"] == reference
    assert server.is_alive()


def gauge(server: Server, name: str) -> float:
    """Return the sum of a gauge's samples."""
    lines = requests.get(f"{server.url}/metrics", timeout=300).text.splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    assert found, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_gauges_are_of_the_flushed_pool(server: Server) -> None:
    """After a flush SGLang's gauges kept their values until the next batch, which looked like a leak."""
    for seed in (300, 301):  # gauges are of the last batch, when its own request still holds its pages
        server.generate(prompt(seed, 600))
    wait_until_idle(server)
    assert gauge(server, "sglang:kv_evictable_tokens") >= 2 * PAGE
    assert requests.post(f"{server.url}/flush_cache", timeout=300).status_code == 200
    assert gauge(server, "sglang:kv_evictable_tokens") == 0
    assert gauge(server, "sglang:kv_available_tokens") == POOL_TOKENS


def test_flush_cache_between_requests(server: Server) -> None:
    reference = server.generate(prompt(10, 600))
    wait_until_idle(server)
    assert requests.post(f"{server.url}/flush_cache", timeout=300).status_code == 200
    again = server.generate(prompt(10, 600))
    assert again["output_ids"] == reference["output_ids"]
    assert output_logprobs(again) == output_logprobs(reference)
