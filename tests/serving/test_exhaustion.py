"""The pool runs out in SGLang's own engine: requests wait, are retracted or refused, and never read another's rows.

A pool of 5 pages and 3 request slots serves 9 requests, and SGLang retracts running ones every few steps: slots and
pages change owners in the middle of groups and windows. A request's answer must be the one that it gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving.in_process_engine import running_engine

from sglang_dsv4.cpu.random_checkpoint import PRESETS, write_checkpoint

pytestmark = pytest.mark.slow

PAGES, SLOTS = 5, 3
LONGEST = PAGES * 256 - 512  # SGLang's limits on a request, and its reserve (pool_configurator.reserve_admission_pages)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    path: Path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, PRESETS["tiny"])
    with pytest.MonkeyPatch.context() as env:
        env.setenv("OMP_NUM_THREADS", "1")
        env.setenv("SGLANG_TEST_RETRACT", "1")
        env.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
        with running_engine(
            model_path=str(path),
            max_total_tokens=PAGES * 256,
            max_running_requests=SLOTS,
            chunked_prefill_size=256,
            log_level="warning",
            sleep_on_idle=True,
        ) as engine:
            yield engine


def generate(engine: object, prompts: list[list[int]], tokens: int) -> list[dict]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=sampling)


def test_more_requests_than_slots_and_pages(engine: object) -> None:
    rng = random.Random(0)
    prompts = [[rng.randint(10, 400) for _ in range(n)] for n in (300, 3, 120, 257, 40, 500, 1, 128, 2)]
    crowded = generate(engine, prompts, 20)
    alone = [generate(engine, [prompt], 20)[0] for prompt in prompts]
    assert [a["output_ids"] for a in crowded] == [a["output_ids"] for a in alone]
    assert all(len(a["output_ids"]) == 20 for a in crowded)
    assert sum(a["meta_info"]["num_retractions"] for a in crowded) > 0


def test_longest_prompt_is_answered_and_a_longer_one_refused(engine: object) -> None:
    """Without our limit, a request that needs the pool's last pages would wait for ever, or get no token."""
    longest = LONGEST - 1 - 5 - 1
    assert len(generate(engine, [[7] * longest], 3)[0]["output_ids"]) == 3
    assert len(generate(engine, [[7] * 730], 4000)[0]["output_ids"]) == LONGEST - 1 - 730 - 1
    with pytest.raises(ValueError, match=f"exceeds the maximum allowed length \\({longest + 1} tokens\\)"):
        generate(engine, [[7] * (longest + 1)], 3)
    assert len(generate(engine, [[7] * 10], 3)[0]["output_ids"]) == 3


def test_nothing_leaks(engine: object) -> None:
    """When all requests are done every page is free again; SGLang's own check raises otherwise."""
    assert engine.get_server_info()["internal_states"][0]["memory_usage"]["kvcache"] > 0
    engine.flush_cache()
    assert len(generate(engine, [[9] * (LONGEST - 7)], 1)[0]["output_ids"]) == 1
