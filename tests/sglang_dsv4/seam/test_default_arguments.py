"""Defaults of a DeepSeek-V4 server, and flags that are refused, without a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving.arguments import arguments

from sglang_dsv4.seam import default_arguments as defaults
from sglang_dsv4.seam import moe_runner
from sglang_dsv4.seam.refused_flags import refuse, refuse_unsupported_arguments

FLOAT_CONFIG = SimpleNamespace(dtype="float32")


CONFIG = SimpleNamespace(dtype="bfloat16")


def test_a_cpu_user_needs_no_flags() -> None:
    assert defaults.default_arguments(arguments(), CONFIG) == {
        "enable_cache_report": True,
        "radix_cache_backend": "dsv4",
        "kv_cache_dtype": "bfloat16",
        "max_total_tokens": 65536,
        "max_running_requests": 32,
    }


@pytest.mark.parametrize("dtype", ["float32", "torch.float32"])
def test_float32_weights_stay_float32_on_a_cpu(dtype: str) -> None:
    """SGLang's `--dtype auto` is float16 for them."""
    assert defaults.default_arguments(arguments(), SimpleNamespace(dtype=dtype))["dtype"] == "float32"


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (1, [0, 1], "0,1"),
        (2, [0, 1], "0|1"),
        (2, [0, 1, 2, 3, 4], "0,1|2,3"),
        (4, [3, 7], "3|7|3|7"),
    ],
)
def test_cores_are_shared_out_among_ranks(ranks: int, cores: list[int], expected: str) -> None:
    assert defaults.cores_of_ranks(ranks, cores) == expected


def test_a_gpu_keeps_sglangs_sizes() -> None:
    assert defaults.default_arguments(arguments(device="cuda"), CONFIG) == {
        "radix_cache_backend": "dsv4",
        "enable_cache_report": True,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("max_total_tokens", 512),
        ("max_running_requests", 1),
        ("radix_cache_backend", "other"),
    ],
)
def test_what_the_user_set_is_left_alone(field: str, value: object) -> None:
    assert field not in defaults.default_arguments(arguments(**{field: value}), FLOAT_CONFIG)


@pytest.fixture(scope="module")
def resolved(checkpoint: Path) -> Callable[..., Any]:
    """SGLang's own resolution of a server's arguments, with the plugin as it is installed."""
    import sglang.srt.managers.scheduler  # noqa: F401 - plugins are loaded once a process; other tests need it before
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()

    def resolve(**fields: Any) -> Any:
        server_args = ServerArgs(model_path=str(checkpoint), device="cpu", **fields)
        server_args.resolve_once()
        return resolving_view(server_args)

    return resolve


@pytest.mark.parametrize("chunk", [-1, 256, 1 << 20])
def test_a_cpu_has_memory_whatever_the_chunk(chunk: int, resolved: Callable[..., Any]) -> None:
    """SGLang subtracts 1.5 MB for each of 16,384 tokens: with -1 the fraction was below 0 on 24 GB."""
    assert resolved(chunked_prefill_size=chunk).mem_fraction_static == defaults.CPU_MEM_FRACTION_STATIC
    assert resolved(chunked_prefill_size=chunk, mem_fraction_static=0.3).mem_fraction_static == 0.3


def test_an_unknown_word_of_a_switch_stops_the_launcher(
    resolved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSV4_TOOL_CALLS", "mend")
    with pytest.raises(ValueError, match=r"SGLANG_DSV4_TOOL_CALLS.*repair"):
        resolved()


def test_a_draft_has_the_runner_of_its_target(resolved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the word `auto` SGLang would choose for the draft anew, a runner for other experts."""
    monkeypatch.setattr(moe_runner, "serves", lambda *_: True)
    drafting = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 1, "speculative_eagle_topk": 1}
    for given in (None, "auto"):
        found = resolved(**drafting, speculative_num_draft_tokens=2, speculative_moe_runner_backend=given)
        assert found.moe_runner_backend == found.speculative_moe_runner_backend == "dsv4"


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 3),
        ({"speculative_num_steps": 2}, 2),
        ({"speculative_num_draft_tokens": 6}, 5),
        ({"speculative_eagle_topk": 1}, 3),
        ({"speculative_num_steps": 1, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 2}, 1),
    ],
    ids=["the algorithm alone", "steps", "draft tokens", "top-k", "all"],
)
def test_eagle_needs_no_further_flags(given: dict[str, int], steps: int, resolved: Callable[..., Any]) -> None:
    """SGLang stopped with "Only EAGLE speculative algorithm with topk == 1 is supported" unless all were given."""
    found = resolved(speculative_algorithm="EAGLE", **given)
    numbers = found.speculative_num_steps, found.speculative_eagle_topk, found.speculative_num_draft_tokens
    assert numbers == (steps, 1, steps + 1)


def test_a_group_of_ranks_can_share_drafts_that_nobody_chose(resolved: Callable[..., Any]) -> None:
    """Draft tokens must be a multiple of a group's ranks, and an unset number counted as one. The next check names
    what this checkpoint can't share."""
    with pytest.raises(ValueError, match=r"on 4 ranks: the shared expert's 256 channels"):
        resolved(speculative_algorithm="EAGLE", tp_size=4, attn_dp_size=2)


def test_what_eagle_cannot_do_is_refused(resolved: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"--speculative-num-draft-tokens of at least 2, got 1: .* Leave the flag out"):
        resolved(speculative_algorithm="EAGLE", speculative_num_draft_tokens=1)
    with pytest.raises(ValueError, match=r"--speculative-num-steps of at least 1, got 0: .* Leave the flag out"):
        resolved(speculative_algorithm="EAGLE", speculative_num_steps=0)
    with pytest.raises(AssertionError, match="topk == 1"):
        resolved(speculative_algorithm="EAGLE", speculative_eagle_topk=4)


@pytest.mark.parametrize("generation", [9, 10])
@pytest.mark.parametrize("runner", moe_runner.ON_BLACKWELL)
def test_runners_for_blackwell_may_be_named_there(
    runner: str, generation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    given = arguments(device="cuda", moe_runner_backend=runner)
    if generation == 10:
        refuse(given, as_given=True)
    else:
        refuse(given)  # SGLang may have chosen it
        with pytest.raises(ValueError, match=f"--moe-runner-backend {runner}: .* marlin on Hopper"):
            refuse(given, as_given=True)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)], ids=str)
def test_gpus_that_have_kernels_are_served(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    refuse_unsupported_arguments(arguments(device="cuda"), CONFIG)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=str)
def test_other_gpus_are_refused_by_name(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers there computed every op by its definition in PyTorch, and said only that CUDA graphs are off."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX PRO 6000")
    number = f"{capability[0]}\\.{capability[1]}"
    with pytest.raises(ValueError, match=rf"no kernels for NVIDIA RTX PRO 6000 .*{number}.* H100, H200.* B200, B300"):
        refuse_unsupported_arguments(arguments(device="cuda"), CONFIG)
    refuse_unsupported_arguments(arguments(device="cpu"), CONFIG)


def test_gpus_of_other_makers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 is "cuda" to PyTorch, with capability 9.4."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="no kernels for AMD Instinct MI300X"):
        refuse_unsupported_arguments(arguments(device="cuda"), CONFIG)


def test_ranks_that_cannot_share_the_model_are_refused_in_the_launcher(resolved: Callable[..., Any]) -> None:
    """The checkpoint has two output groups, and 256 channels of the shared expert in two blocks."""
    resolved(tp_size=2, attn_dp_size=2)
    with pytest.raises(ValueError, match="on 4 ranks: the attention's 2 output groups can't be shared by 4"):
        resolved(tp_size=4)
    with pytest.raises(ValueError, match=r"on 4 ranks: the shared expert's 256 channels .* use a divisor of 2"):
        resolved(tp_size=4, attn_dp_size=4)


def test_an_exchange_of_rows_of_ranks_that_have_other_bits_is_refused_in_the_launcher(
    resolved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSV4_EXPERT_ROWS", "exchange")
    resolved()
    resolved(tp_size=4, attn_dp_size=4, ep_size=4)
    with pytest.raises(ValueError, match=r"on 2 ranks: SGLANG_DSV4_EXPERT_ROWS=exchange .* --ep-size 2 \(got 1\)"):
        resolved(tp_size=2, attn_dp_size=2)
    with pytest.raises(ValueError, match=r"--attn-dp-size 2 \(got 1\) and --ep-size 2 \(got 2\), or unset"):
        resolved(tp_size=2, ep_size=2)
    monkeypatch.setenv("SGLANG_DSV4_EXPERT_ROWS", "rows")
    with pytest.raises(ValueError, match="SGLANG_DSV4_EXPERT_ROWS must be 'gather' or 'exchange'"):
        resolved()


def test_groups_of_ranks_make_their_own_logits() -> None:
    assert defaults.default_arguments(arguments(tp_size=4, attn_dp_size=2), CONFIG)["enable_dp_lm_head"] is True
    assert "enable_dp_lm_head" not in defaults.default_arguments(arguments(tp_size=4), CONFIG)


@pytest.mark.parametrize("word", [None, "auto", "sglang"])
def test_flashinfer_sums_only_where_sglang_chooses(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DSV4_ALL_REDUCE", raising=False)
    if word is not None:
        monkeypatch.setenv("SGLANG_DSV4_ALL_REDUCE", word)
    name = "enforce_disable_flashinfer_allreduce_fusion"
    found = [defaults.default_arguments(arguments(device="cuda", tp_size=n), CONFIG).get(name) for n in (1, 2)]
    assert found == [None, None if word == "sglang" else True]


def test_drafts_carry_no_watermark() -> None:
    refuse_unsupported_arguments(arguments(device="cuda", enable_watermark=True), CONFIG)
    given = arguments(device="cuda", enable_watermark=True, speculative_algorithm="EAGLE")
    with pytest.raises(ValueError, match="--enable-watermark with --speculative-algorithm"):
        refuse_unsupported_arguments(given, CONFIG)


@pytest.mark.parametrize(
    "config", [{"prefill": {"backend": "full"}}, {"decode": {"backend": "breakable"}}, {"decode": {"bs": [1]}}]
)
def test_graphs_that_may_be_asked_for_in_json(config: dict[str, Any]) -> None:
    given = arguments(device="cuda", cuda_graph_config=config)
    if config.get("decode", {}).get("bs"):
        refuse(given)
    else:
        with pytest.raises(ValueError, match="--cuda-graph-config"):
            refuse(given)


def test_sglang_does_not_replace_a_page_size_silently(resolved: Callable[..., Any]) -> None:
    assert resolved().page_size == resolved(page_size=256).page_size == 256
    with pytest.raises(ValueError, match="--page-size 64: pages hold 256 tokens"):
        resolved(page_size=64)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("enable_streaming_session", True, "--enable-streaming-session"),
        ("enable_pd_role_switch", True, "--enable-pd-role-switch"),
        ("speculative_use_rejection_sampling", True, "--speculative-use-rejection-sampling on a CPU"),
        ("page_size", 64, "--page-size 64"),
    ],
)
def test_unsupported_flags_are_refused_by_name(field: str, value: object, flag: str) -> None:
    refuse_unsupported_arguments(arguments(page_size=256), CONFIG)
    with pytest.raises(ValueError, match=flag):
        refuse_unsupported_arguments(arguments(**{field: value}), CONFIG)


@pytest.mark.parametrize(
    ("size", "layers", "named"),
    [
        (5, None, "in 5 stages: --pp-size 5: expected 1 to 4 stages"),
        (4, None, "in 4 stages: stage 0 of 4, layers 0 to 0, has no layer with compressed entries"),
        (2, "3,2", "in 2 stages: SGLANG_PP_LAYER_PARTITION=3,2: expected 2 numbers of layers"),
    ],
)
def test_stages_that_cannot_share_the_model_are_refused_in_the_launcher(
    size: int, layers: str | None, named: str, resolved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint has four layers, the first of them with a window only."""
    resolved(pp_size=2)
    if layers is not None:
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", layers)
    with pytest.raises(ValueError, match=named):
        resolved(pp_size=size)


def test_a_server_that_transfers_on_a_cpu_does_not_overlap() -> None:
    for mode in ("prefill", "decode"):
        for device, off in (("cpu", True), ("cuda", None)):
            given = arguments(disaggregation_mode=mode, device=device)
            assert defaults.default_arguments(given, CONFIG).get("disable_overlap_schedule") is off


@pytest.mark.parametrize("ranks", ["dp_size", "attn_dp_size"])
def test_a_prefill_server_chooses_its_rank_by_prefix(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang follows the room's number there, unless the user names a method."""

    def method(**given: Any) -> str | None:
        given = {"device": "cpu", "tp_size": 2, "disaggregation_mode": "prefill", ranks: 2, **given}
        return defaults.default_arguments(arguments(**given), CONFIG).get("load_balance_method")

    assert method() == "round_robin"
    assert method(**{ranks: 1}) is None and method(disaggregation_mode="decode") is None
    assert method(load_balance_method="follow_bootstrap_room") is None
    monkeypatch.setenv("SGLANG_DSV4_RANK_CHOICE", "sglang")
    assert method() is None


def test_no_draft_is_loaded_that_the_checkpoint_does_not_hold() -> None:
    """SGLang would build an MTP module for EAGLE and fill half of it from the tensors of a DSpark draft."""
    dspark = SimpleNamespace(dspark_target_layer_ids=[2, 3, 4])
    refuse_unsupported_arguments(arguments(), dspark)
    refuse_unsupported_arguments(arguments(speculative_algorithm="EAGLE"), CONFIG)
    for device in ("cpu", "cuda"):
        refuse_unsupported_arguments(arguments(speculative_algorithm="DSPARK", device=device), dspark)
    with pytest.raises(ValueError, match="EAGLE with this checkpoint: its draft is DSpark's"):
        refuse_unsupported_arguments(arguments(speculative_algorithm="EAGLE"), dspark)
    with pytest.raises(ValueError, match="DSPARK with this checkpoint: it has no DSpark draft"):
        refuse_unsupported_arguments(arguments(speculative_algorithm="DSPARK"), CONFIG)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE", "NGRAM"])
def test_other_speculation_on_a_cpu_is_refused_before_anything_is_loaded(algorithm: str) -> None:
    from sglang.srt.arg_groups.speculative_hook import _check_oot_speculative_algorithm

    _check_oot_speculative_algorithm("EAGLE", "cpu")
    with pytest.raises(ValueError, match=f"{algorithm} speculative decoding is not supported by CpuPlatform"):
        _check_oot_speculative_algorithm(algorithm, "cpu")
