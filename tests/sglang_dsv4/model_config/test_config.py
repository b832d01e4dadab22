"""`Config.from_hf`: both released configs in both parsers' spelling, and every refusal.

Expected values are those of the DeepSeek-V4 specification, sections 1 and 3.2, typed in here.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model.released_configs import COMMON, DSPARK, FLASH, RELEASED, Fields, as_sglang_parses, as_transformers_parses

from sglang_dsv4.model_config.config import Config, ConfigError, QuantSwitches
from sglang_dsv4.model_config.layer_kinds import LayerKind


@pytest.fixture(autouse=True)
def no_switches_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DSV4_QAT", raising=False)


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs(name: str, tmp_path: Path) -> None:
    config = Config.from_hf(as_sglang_parses(RELEASED[name], tmp_path))
    for field, value in RELEASED[name].items():
        if hasattr(config, field):
            assert getattr(config, field) == value, field
    assert config.quantised_checkpoint
    assert config.nope_head_dim == 448
    assert config.softmax_scale == 512**-0.5
    assert config.yarn is not None
    assert (config.yarn.factor, config.yarn.original_max_positions) == (16, 65536)
    assert (config.yarn.beta_fast, config.yarn.beta_slow) == (32, 1)
    draft = {f"dspark_{field}": value for field, value in vars(config.dspark).items()} if config.dspark else {}
    announced = {field: value for field, value in RELEASED[name].items() if field.startswith("dspark_")}
    assert draft == {k: tuple(v) if isinstance(v, list) else v for k, v in announced.items()}
    assert config.num_draft_layers == (3 if announced else 1)


@pytest.mark.parametrize("name", RELEASED)
def test_both_parsers_give_the_same_config(name: str, tmp_path: Path) -> None:
    assert Config.from_hf(as_transformers_parses(RELEASED[name])) == Config.from_hf(
        as_sglang_parses(RELEASED[name], tmp_path)
    )


FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)  # 43 layers, two of them window only
PRO_RATIOS = (128, 128, *(4, 128) * 29, 4)  # 61 layers


@pytest.mark.parametrize(
    ("name", "ratios"),
    [("flash", FLASH_RATIOS), ("pro", PRO_RATIOS), ("flash-0731", FLASH_RATIOS), ("pro-0813", PRO_RATIOS)],
    ids=["flash", "pro", "flash-0731", "pro-0813"],
)
def test_schedules(name: str, ratios: tuple[int, ...], tmp_path: Path) -> None:
    schedule = Config.from_hf(as_sglang_parses(RELEASED[name], tmp_path)).schedule
    assert schedule.ratios == ratios
    kinds = {0: LayerKind.SWA, 4: LayerKind.CSA, 128: LayerKind.HCA}
    assert [schedule.kind(i) for i in range(len(ratios))] == [kinds[ratio] for ratio in ratios]


def test_hash_layers_come_first() -> None:
    config = Config.from_hf(Fields(**FLASH))
    assert [config.uses_hash_routing(i) for i in range(5)] == [True, True, True, False, False]


def test_rope_of_window_layers_is_unscaled() -> None:
    rope = Config.from_hf(Fields(**FLASH)).rope(LayerKind.SWA)
    expected = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(rope.frequencies().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [LayerKind.CSA, LayerKind.HCA], ids=["csa", "hca"])
def test_rope_of_compressed_layers_has_yarn(kind: LayerKind) -> None:
    frequencies = Config.from_hf(Fields(**FLASH)).rope(kind).frequencies()
    pairs = [0, 1, 14, 15, 16, 20, 24, 25, 31]
    expected = torch.tensor(
        [
            1.0,
            6.876560450e-01,
            5.286856554e-03,
            3.635538509e-03,
            2.265624935e-03,
            2.969777852e-04,
            1.953125320e-05,
            5.372312444e-06,
            5.680528830e-07,
        ]
    )
    torch.testing.assert_close(frequencies[pairs], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "leak",
    [{"n_group": 8, "topk_group": 4}, {"v_head_dim": 128}, {"first_k_dense_replace": 3}, {"rope_interleave": False}],
    ids=lambda leak: "+".join(leak),
)
def test_defaults_of_deepseek_v3_have_no_effect(leak: dict[str, Any]) -> None:
    assert Config.from_hf(Fields(**FLASH, **leak)) == Config.from_hf(Fields(**FLASH))


@pytest.mark.parametrize("expert_dtype", [None, "fp4", "fp8"])
def test_expert_dtype_is_left_to_the_tensors(expert_dtype: str | None) -> None:
    assert Config.from_hf(Fields(**FLASH | {"expert_dtype": expert_dtype})) == Config.from_hf(Fields(**FLASH))


def test_rope_scaling_may_be_absent() -> None:
    config = Config.from_hf(Fields(**FLASH | {"rope_scaling": None}))  # null in the file
    assert config.yarn is None
    assert config.rope(LayerKind.CSA).theta == 160000


def test_ratios_without_the_mtp_entry() -> None:
    config = Config.from_hf(Fields(**FLASH | {"compress_ratios": FLASH["compress_ratios"][:-1]}))
    assert config.schedule.ratios == FLASH_RATIOS


@pytest.mark.parametrize(
    ("variable", "quantised", "expected"),
    [
        ("", True, QuantSwitches.full()),
        ("", False, QuantSwitches.off()),
        ("off", True, QuantSwitches.off()),
        ("KV ", True, QuantSwitches.kv()),
        ("full", False, QuantSwitches.full()),
    ],
)
def test_switches(variable: str, quantised: bool, expected: QuantSwitches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_QAT", variable)
    fields = FLASH if quantised else {k: v for k, v in FLASH.items() if k != "quantization_config"}
    config = Config.from_hf(Fields(**fields))
    assert config.qat == expected
    assert config.activation_block == (128 if expected.activations_fp8 else None)


def test_unknown_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_QAT", "fp4")
    with pytest.raises(ValueError, match="SGLANG_DSV4_QAT must be 'off' or 'kv' or 'full', got 'fp4'"):
        Config.from_hf(Fields(**FLASH))


# Case -> the changed fields (None removes a field), and the message: field, value, accepted values.
NVFP4 = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model-type": ({"model_type": "deepseek_v41"}, r"'model_type' is 'deepseek_v41'.*'deepseek_v4'"),
    "missing-field": ({"o_groups": None}, r"'o_groups' is None.*missing"),
    "missing-ratios": ({"compress_ratios": None}, r"'compress_ratios' is None.*44 ratios.*missing"),
    "missing-compress-theta": ({"compress_rope_theta": None}, r"'compress_rope_theta' is None.*missing"),
    "zero": ({"hidden_size": 0}, r"'hidden_size' is 0.*integer >= 1"),
    "float": ({"index_topk": 512.0}, r"'index_topk' is 512.0.*integer >= 1"),
    "string": ({"rms_norm_eps": "1e-6"}, r"'rms_norm_eps' is '1e-6'.*number > 0"),
    "ratio": ({"compress_ratios": [0, 2, *FLASH["compress_ratios"][2:]]}, r"compress_ratios\[1\]' is 2.*0.*4.*128"),
    "fractional-ratio": ({"compress_ratios": [0.0, *FLASH["compress_ratios"][1:]]}, r"compress_ratios\[0\]' is 0.0"),
    "ratios-no-list": ({"compress_ratios": 4}, r"'compress_ratios' is 4.*a list of 44"),
    "rope-theta": ({"rope_parameters": {"rope_theta": -1}}, r"'rope_theta' is -1.*number > 0"),
    "several-mtp-modules": ({"num_nextn_predict_layers": 3}, r"'num_nextn_predict_layers' is 3; accepted: 0 or 1"),
    "too-few-ratios": ({"compress_ratios": [0, 4, 0]}, r"'compress_ratios' is '3 entries'.*44 entries"),
    "ratios-of-a-draft-that-nothing-announces": (
        {"compress_ratios": [*FLASH["compress_ratios"], 0, 0]},
        r"'46 entries'.*44 entries.*dspark fields announce 1",
    ),
    "mtp-ratio": ({"compress_ratios": [*FLASH["compress_ratios"][:-1], 4]}, r"'compress_ratios' is \(4,\).*draft"),
    "dspark-without-ratios": (DSPARK, r"'44 entries'.*46 entries.*announce 3"),
    "dspark-ratio": (
        DSPARK | {"compress_ratios": [*FLASH["compress_ratios"], 0, 4]},
        r"'compress_ratios' is \(0, 0, 4\)",
    ),
    "half-a-dspark": ({"dspark_block_size": 5}, r"'dspark_target_layer_ids' is None.*rising layer ids below 43"),
    "dspark-layer": (DSPARK | {"dspark_target_layer_ids": [40, 41, 43]}, r"\[40, 41, 43\].*below 43"),
    "dspark-order": (DSPARK | {"dspark_target_layer_ids": [41, 40, 42]}, r"\[41, 40, 42\].*rising"),
    "dspark-noise": (DSPARK | {"dspark_noise_token_id": 129280}, r"129280.*below vocab_size"),
    "dspark-rank": (DSPARK | {"dspark_markov_rank": None}, r"'dspark_markov_rank' is None.*missing"),
    "kv-heads": ({"num_key_value_heads": 8}, r"'num_key_value_heads' is 8; accepted: 1"),
    "shared-experts": ({"n_shared_experts": 2}, r"'n_shared_experts' is 2; accepted: 1"),
    "activation": ({"hidden_act": "gelu"}, r"'hidden_act' is 'gelu'; accepted: 'silu'"),
    "scoring": ({"scoring_func": "sigmoid"}, r"'scoring_func' is 'sigmoid'; accepted: 'sqrtsoftplus'"),
    "topk-method": ({"topk_method": "greedy"}, r"'topk_method' is 'greedy'; accepted: 'noaux_tc'"),
    "no-renormalising": ({"norm_topk_prob": False}, r"'norm_topk_prob' is False; accepted: True"),
    "tied": ({"tie_word_embeddings": True}, r"'tie_word_embeddings' is True; accepted: False"),
    "bias": ({"attention_bias": True}, r"'attention_bias' is True; accepted: False"),
    "expert-dtype": ({"expert_dtype": "int4"}, r"'expert_dtype' is 'int4'; accepted: None or 'fp4' or 'fp8'"),
    "window": ({"sliding_window": 256}, r"'sliding_window' is 256; accepted: 128"),
    "odd-rope": ({"qk_rope_head_dim": 63}, r"'qk_rope_head_dim' is 63.*even"),
    "groups": ({"o_groups": 7}, r"'o_groups' is 7.*divisor of 64"),
    "hadamard": ({"index_head_dim": 96}, r"'index_head_dim' is 96.*power of two"),
    "experts-a-token": ({"num_experts_per_tok": 257}, r"'num_experts_per_tok' is 257.*at most n_routed_experts"),
    "hash-layers": ({"num_hash_layers": 44}, r"'num_hash_layers' is 44.*at most num_hidden_layers"),
    "kv-block": ({"head_dim": 480}, r"'head_dim' is 480.*multiple of 64"),
    "activation-block": ({"moe_intermediate_size": 2000}, r"'moe_intermediate_size' is 2000.*multiple of 128"),
    "no-longest-request": ({"max_position_embeddings": 0}, r"'max_position_embeddings' is 0.*integer >= 1"),
    "no-rope-scaling": ({"rope_scaling": None}, r"'rope_scaling' is None.*or null.*missing"),
    "rope-scaling-no-table": ({"rope_scaling": "yarn"}, r"'rope_scaling' is 'yarn'.*YaRN's table"),
    "yarn-without-its-type": ({"rope_scaling": {"factor": 16}}, r"rope_scaling\['type'\]\" is None.*'yarn'"),
    "yarn-positions": (
        {"rope_scaling": COMMON["rope_scaling"] | {"original_max_position_embeddings": 0.5}},
        r"original_max_position_embeddings'\]\" is 0.5.*integer >= 1",
    ),
    "rope-type": ({"rope_scaling": {"type": "linear", "factor": 4}}, r"rope_scaling\['type'\]\" is 'linear'.*'yarn'"),
    "yarn-field": ({"rope_scaling": {"type": "yarn", "factor": 16}}, r"original_max_position_embeddings.*None"),
    "mscale": ({"rope_scaling": COMMON["rope_scaling"] | {"mscale": 1.0}}, r"'mscale'.* is 1.0.*no amplitude"),
    "quant-method": ({"quantization_config": {"quant_method": "awq"}}, r"'quant_method'.* is 'awq'; accepted: 'fp8'"),
    "quant-block": (
        {"quantization_config": COMMON["quantization_config"] | {"weight_block_size": [32, 32]}},
        r"'weight_block_size'.* is \[32, 32\]; accepted: \[128, 128\]",
    ),
    "other-experts": (
        {"quantization_config": COMMON["quantization_config"] | {"moe_quant_algo": "MXFP8"}},
        r"'moe_quant_algo'.* is 'MXFP8'; accepted: left out or 'NVFP4'",
    ),
    "nvfp4-that-sglang-would-miss": (
        {"quantization_config": COMMON["quantization_config"] | {"moe_quant_algo": "NVFP4", "group_size": 16}},
        r"'quant_algo'.* is None; accepted: 'MIXED_PRECISION', with moe_quant_algo 'NVFP4'",
    ),
    "nvfp4-group": (
        {"quantization_config": COMMON["quantization_config"] | NVFP4 | {"group_size": 32}},
        r"'group_size'.* is 32; accepted: 16, with moe_quant_algo 'NVFP4'",
    ),
    "mixed-precision-of-what": (
        {"quantization_config": COMMON["quantization_config"] | {"quant_algo": "MIXED_PRECISION"}},
        r"'quant_algo'.* is 'MIXED_PRECISION'; accepted: left out",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(change: dict[str, Any], message: str) -> None:
    fields = {field: value for field, value in (FLASH | change).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        Config.from_hf(Fields(**fields))


NUMBERS = ["rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor", "swiglu_limit"]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), -1.0, 0, 1e-46, 1e39, 10**400, True], ids=lambda v: f"{v!r:.5}"
)
@pytest.mark.parametrize("field", [*NUMBERS, "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"])
def test_numbers_that_are_not_finite_in_fp32_are_refused(field: str, value: float) -> None:
    """Python's JSON accepts NaN and Infinity. A model with one was served, and every log-probability was null."""
    change = {field: value} if field in NUMBERS else {"rope_scaling": COMMON["rope_scaling"] | {field: value}}
    with pytest.raises(ConfigError, match=rf"{field}.* is {re.escape(str(value))}; .*number > 0, finite in fp32"):
        Config.from_hf(Fields(**FLASH | change))


def test_small_dimensions_are_legal_without_quantisers() -> None:
    small = FLASH | {"head_dim": 32, "qk_rope_head_dim": 8, "index_head_dim": 16, "hidden_size": 48, "q_lora_rank": 24}
    small.pop("quantization_config")
    config = Config.from_hf(Fields(**small))
    assert (config.nope_head_dim, config.qat) == (24, QuantSwitches.off())


def test_an_unquantised_draft_config_object_is_read_too(tmp_path: Path) -> None:
    """SGLang sets quantization_config to None on some parsed configs."""
    hf_config = as_sglang_parses(FLASH, tmp_path)
    hf_config.quantization_config = None
    assert not Config.from_hf(hf_config).quantised_checkpoint
