"""On a CPU a token's logits are bitwise independent of the rest of its forward: other requests, the chunk boundaries of
its prompt, prefill or decode. So greedy outputs are the same alone and in a batch, and a prefix restored from a cache
can be compared bitwise with a computed one."""

from collections.abc import Callable

import pytest
import torch
from model.oracle import QUANTISABLE, REAL_ROWS
from model.served import Served
from selection.marks import with_slow_marks
from torch import Tensor

PROMPT = 290
DECODE_FROM = 281


SLOW = [pytest.param(variant, marks=pytest.mark.slow) for variant in ("float32-off", "float32-full", "bfloat16-off")]


@pytest.fixture(scope="module", params=["bfloat16-full", *SLOW])
def served(request: pytest.FixtureRequest, serve: Callable[..., Served]) -> Served:
    dtype, qat = request.param.split("-")
    return serve("flash-like", dtype=dtype, qat=qat, **QUANTISABLE)


@pytest.fixture(scope="module")
def whole(served: Served) -> list[Tensor]:
    """Logits of each prompt alone, in one chunk."""
    return [served.harness.run(tokens[:PROMPT]) for tokens in served.corpus[:5]]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(expected).all()
    different = (actual != expected).any(-1)
    assert not different.any(), (
        f"{int(different.sum())} of {len(expected)} positions differ, first {int(different.nonzero()[0])}, "
        f"by at most {(actual - expected).abs().max():.2e}"
    )


@pytest.mark.parametrize("chunk_tokens", with_slow_marks([3, 32, 64, 100, 256], quick=[32, 64, 100, 256]))
def test_chunking(served: Served, whole: list[Tensor], chunk_tokens: int | None) -> None:
    assert_same_bits(served.harness.run(served.corpus[0][:PROMPT], chunk_tokens), whole[0])


def test_one_token_at_a_time(served: Served, whole: list[Tensor]) -> None:
    """Tokens are computed in prefill chunks of one token, or by decode, past the end of the first HCA group."""
    tokens = served.corpus[0][:140]
    assert_same_bits(served.harness.run(tokens, 64, decode_from=100), whole[0][:140])
    assert_same_bits(served.harness.run(tokens[:24], 1), whole[0][:24])


def test_decode(served: Served, whole: list[Tensor]) -> None:
    assert_same_bits(served.harness.run(served.corpus[0][:PROMPT], 256, decode_from=DECODE_FROM), whole[0])


@pytest.mark.parametrize("requests", [2, 5])
def test_batch(served: Served, whole: list[Tensor], requests: int) -> None:
    """Requests of different lengths, joining and leaving, with shuffled pages: the same bits as alone."""
    served.harness.shuffle_free_pages(seed=requests)
    lengths = [PROMPT, 130, 257, 31, 200][:requests]
    prompts = [served.corpus[i][:n] for i, n in enumerate(lengths)]
    logits = served.harness.run_many(prompts, 64, [n - 7 for n in lengths], [0, 1, 0, 3, 2][:requests])
    for actual, expected in zip(logits, whole, strict=False):
        assert_same_bits(actual, expected[: len(actual)])


def test_same_prompt_in_every_slot(served: Served, whole: list[Tensor]) -> None:
    prompts = [served.corpus[1][:70]] * 5
    for actual in served.harness.run_many(prompts, 16, [66] * 5):
        assert_same_bits(actual, whole[1][:70])


@pytest.mark.parametrize(
    "dtype, rows",
    [
        pytest.param("float32", "auto", marks=pytest.mark.slow),
        pytest.param("bfloat16", "auto", marks=pytest.mark.slow),
        ("bfloat16", "fp8_e4m3"),
    ],
)
def test_rows_of_the_released_dimensions(serve: Callable[..., Served], dtype: str, rows: str) -> None:
    """512 channels, pro-like layers, plain and 584-byte rows; chunks, decode and batch at once."""
    served = serve("pro-like", dtype=dtype, qat="full", server_args=dict(kv_cache_dtype=rows), **REAL_ROWS)
    lengths = (265, 130, 20)
    prompts = [served.corpus[i][:n] for i, n in enumerate(lengths)]
    whole = [served.harness.run(prompt) for prompt in prompts]
    served.harness.shuffle_free_pages()
    for actual, expected in zip(served.harness.run_many(prompts, 70, (258, 126, 9), (0, 1, 0)), whole, strict=True):
        assert_same_bits(actual, expected)
