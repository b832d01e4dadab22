"""The config.json of each released model, and both parsers of it.

Values are those of the DeepSeek-V4 specification, sections 1 and 3.2.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

COMMON = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "max_position_embeddings": 1048576,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
FLASH = COMMON | {
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "hidden_size": 4096,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "q_lora_rank": 1024,
    "routed_scaling_factor": 1.5,
}
PRO = COMMON | {
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
FLASH_0731 = FLASH | DSPARK | {"compress_ratios": FLASH["compress_ratios"] + [0, 0]}
PRO_0813 = PRO | DSPARK | {
    "compress_ratios": PRO["compress_ratios"] + [0, 0],
    "dspark_target_layer_ids": [58, 59, 60],
    "dspark_markov_rank": 512,
}  # fmt: skip
RELEASED = {"flash": FLASH, "pro": PRO, "flash-0731": FLASH_0731, "pro-0813": PRO_0813}


def as_sglang_parses(config: dict[str, Any], folder: Path) -> object:
    from sglang.srt.utils.hf_transformers_utils import get_config

    (folder / "config.json").write_text(json.dumps(config))
    return get_config(str(folder), trust_remote_code=False)


def as_transformers_parses(config: dict[str, Any]) -> object:
    from transformers import DeepseekV4Config

    config = copy.deepcopy(config)  # transformers writes into its tables
    layers = config["num_hidden_layers"]
    return DeepseekV4Config.from_dict(config | {"compress_ratios": config["compress_ratios"][:layers]})


class Fields:
    """A config object with exactly the given fields, so that a test can leave one out."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)
