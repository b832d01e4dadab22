"""Flags that are refused beside another one, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from serving.arguments import arguments

from sglang_dsv4.seam import refused_combinations
from sglang_dsv4.seam.refused_combinations import refuse_combinations, refuse_with_groups

GROUPS = {"tp_size": 4, "attn_dp_size": 2}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attn_dp_size": 3}, r"--attn-dp-size must divide --tp-size: got 3 and 4"),
        ({"attn_dp_size": 0}, r"--attn-dp-size must divide --tp-size: got 0 and 4"),
        ({"speculative_algorithm": "DSPARK"}, r"DSPARK with --attn-dp-size 2 and --tp-size 4: .* --attn-dp-size 4"),
        (
            {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 3},
            r"--speculative-num-draft-tokens 3 .* multiple of 2",
        ),
        ({"enable_dp_attention_local_control_broadcast": True}, r"local-control-broadcast with --attn-dp-size 2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_groups_of_ranks_do_not_serve_is_refused(fields: dict[str, Any], named: str) -> None:
    refuse_with_groups(arguments(**GROUPS))
    with pytest.raises(ValueError, match=named):
        refuse_with_groups(arguments(**{**GROUPS, **fields}))
    if "attn_dp_size" not in fields:
        refuse_with_groups(arguments(**{**GROUPS, "attn_dp_size": 1}, **fields))


@pytest.mark.parametrize(
    "variable",
    [
        "SGLANG_DSV4_SEQUENCE_PARALLEL=on",
        "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION=1",
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1",
    ],
)
def test_switches_that_groups_of_ranks_do_not_serve_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = variable.split("=")
    monkeypatch.setenv(name, value)
    refuse_with_groups(arguments())
    with pytest.raises(ValueError, match=f"{name}.* with --attn-dp-size 2: .*unset it"):
        refuse_with_groups(arguments(**GROUPS))


BETWEEN_SERVERS = {
    "disaggregation_transfer_backend": "mori",
    "disaggregation_decode_allocation_policy": "prefill_complete",
    "disaggregation_decode_enable_offload_kvcache": True,
    "disaggregation_enable_kv_checksum": True,
    "disaggregation_decode_retraction_backup": "none",
    "disaggregation_decode_host_receive_threshold": 0.5,
    "optimistic_prefill_attempts": 1,
    "nnodes": 2,
    "enable_memory_saver": True,
}


@pytest.mark.parametrize("field", BETWEEN_SERVERS)
def test_what_has_no_test_between_servers_is_refused_there(field: str) -> None:
    """One server may have the flag, or has no use for it."""
    given = {"tp_size": 2, "device": "cuda", field: BETWEEN_SERVERS[field]}
    refuse_combinations(arguments(**given))
    for mode in ("prefill", "decode"):
        flag = f"--{field.replace('_', '-')}.* with --disaggregation-mode {mode}: "
        with pytest.raises(ValueError, match=flag):
            refuse_combinations(arguments(**given, disaggregation_mode=mode))


def test_every_refusal_between_servers_is_tested() -> None:
    assert {refusal.argument for refusal in refused_combinations.BETWEEN_SERVERS} == BETWEEN_SERVERS.keys()


BETWEEN_STAGES = {
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "dp_size": 2,
    "attn_dp_size": 2,
    "hicache_storage_backend": "mooncake",
    "pp_async_batch_depth": 1,
    "enable_dynamic_chunking": True,
    "enable_memory_saver": True,
    "scheduler_recv_interval": 2,
    "enable_prefill_delayer": True,
    "enable_return_hidden_states": True,
}


@pytest.mark.parametrize("field", BETWEEN_STAGES)
def test_what_stages_do_not_serve_is_refused_there(field: str) -> None:
    given = {"tp_size": 2, "device": "cuda", "disaggregation_transfer_backend": "mooncake"}
    refuse_combinations(arguments(**given, pp_size=2))
    given[field] = BETWEEN_STAGES[field]
    refuse_combinations(arguments(**given))
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')}.* with --pp-size 2: "):
        refuse_combinations(arguments(**given, pp_size=2))


def test_every_refusal_between_stages_is_tested() -> None:
    assert {refusal.argument for refusal in refused_combinations.WITH_STAGES} == BETWEEN_STAGES.keys()


def test_rooms_choose_the_rank_between_servers_only() -> None:
    """SGLang's controller asserts that each request has a room, and ends with its server."""
    given = {"load_balance_method": "follow_bootstrap_room", "disaggregation_transfer_backend": "mooncake"}
    refuse_combinations(arguments(**given))
    refuse_combinations(arguments(**given, dp_size=2, disaggregation_mode="prefill"))
    for ranks in ({"dp_size": 2}, {"tp_size": 2, "attn_dp_size": 2}):
        with pytest.raises(ValueError, match="follow_bootstrap_room without --disaggregation-mode"):
            refuse_combinations(arguments(**given, **ranks))


def test_a_decode_server_has_no_tiers() -> None:
    tiers = {"enable_hierarchical_cache": True, "disaggregation_transfer_backend": "mooncake"}
    refuse_combinations(arguments(**tiers, disaggregation_mode="prefill"))
    with pytest.raises(ValueError, match="--enable-hierarchical-cache with --disaggregation-mode decode"):
        refuse_combinations(arguments(**tiers, disaggregation_mode="decode"))
