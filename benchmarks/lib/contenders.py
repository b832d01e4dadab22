"""Contenders of a comparison by name: ours or SGLang's built-in DeepSeek-V4, each with parts of its own.

    ours    ours+our_all_reduce    builtin+marlin    builtin+flashinfer_fp8+custom_all_reduce

`PARTS` has every part. Which experts make the built-in fastest differs from load to load, so a comparison has several
contenders of it, and each row of a result names its contender.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lib.servers import CONTENDERS

SEVERAL_RANKS = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
"""Flags of every contender with several ranks: sums by NCCL. FlashInfer's sums stay off, as they may use multicast."""


@dataclass(frozen=True)
class Part:
    """Flags and variables that a word in a contender's name adds to a server."""

    servers: tuple[str, ...]
    about: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Flags that the server is not given."""


_HUMMING = ("--moe-runner-backend", "humming")
_FLASHINFER = ("--moe-runner-backend", "flashinfer_mxfp4")
_BOTH, _OURS, _BUILTIN = ("ours", "builtin"), ("ours",), ("builtin",)


def _groups(count: int) -> Part:
    flags = ("--enable-dp-attention", "--dp-size", str(count))
    return Part(_BOTH, f"attention data parallelism: {count} groups with requests of their own", flags)


def _stages(ranks: int, stages: int) -> Part:
    flags = ("--tp-size", str(ranks), "--pp-size", str(stages))
    return Part(_BOTH, f"{stages} pipeline stages of {ranks} rank{'s' * (ranks > 1)}; --tp counts all GPUs", flags)


PARTS = {
    "marlin": Part(_BUILTIN, "experts by Marlin, W4A16", ("--moe-runner-backend", "marlin")),
    "flashinfer": Part(_BUILTIN, "experts by FlashInfer's CUTLASS, W4A16: SGLang's default on Hopper", _FLASHINFER),
    "flashinfer_fp8": Part(
        _BUILTIN,
        "as flashinfer, with FP8 activations in Humming's layout, W4A8",
        (*_FLASHINFER, "--flashinfer-mxfp4-moe-precision", "fp8"),
    ),
    "humming": Part(_BUILTIN, "experts by Humming, W4A16 (package humming-kernels)", _HUMMING),
    "humming_fp8": Part(
        _BUILTIN,
        "experts by Humming, W4A8",
        _HUMMING,
        {"SGLANG_HUMMING_INPUT_QUANT_CONFIG": '{"quant_method": "humming", "a_dtype": "float8e4m3"}'},
    ),
    "custom_all_reduce": Part(
        _BOTH, "sums by SGLang's CustomAllReduceV2 instead of NCCL", without=("--disable-custom-all-reduce",)
    ),
    "our_all_reduce": Part(_OURS, "sums by our kernel, or no start", env={"SGLANG_DSV4_ALL_REDUCE": "ours"}),
    "sglang_sums": Part(_OURS, "sums by NCCL", env={"SGLANG_DSV4_ALL_REDUCE": "sglang"}),
    "separate_launches": Part(_OURS, "each kernel in its own launch", env={"SGLANG_DSV4_JOINT_LAUNCH": "off"}),
    "windows": Part(
        _BUILTIN,
        "0.3 window tokens a token of the pool, where SGLang sets 0.1: more prefixes keep their window",
        ("--swa-full-tokens-ratio", "0.3"),
    ),
    "deterministic": Part(_OURS, "the same bits in every batch", ("--enable-deterministic-inference",)),
    "sequence_parallel": Part(
        _OURS, "ranks share the tokens of a prefill", env={"SGLANG_DSV4_SEQUENCE_PARALLEL": "on"}
    ),
    "own_rows": Part(
        _OURS,
        "as sequence_parallel, and a rank attends for its own tokens only",
        env={"SGLANG_DSV4_SEQUENCE_PARALLEL": "attention"},
    ),
    "dp2": _groups(2),
    "dp4": _groups(4),
    "ep2": Part(_BOTH, "whole experts on each of 2 ranks", ("--ep-size", "2")),
    "ep4": Part(_BOTH, "whole experts on each of 4 ranks", ("--ep-size", "4")),
    "exchange": Part(
        _OURS,
        "with groups and whole experts: tokens go to the ranks of their experts, and rows come back",
        env={"SGLANG_DSV4_EXPERT_ROWS": "exchange"},
    ),
    "tp1_pp2": _stages(1, 2),
    "tp2_pp2": _stages(2, 2),
    "prefill_cp": Part(
        _BUILTIN, "context parallelism of prefills", ("--enable-prefill-cp", "--cp-strategy", "interleave")
    ),
    "prefill_graphs": Part(_OURS, "prefills replay CUDA graphs", ("--cuda-graph-backend-prefill", "breakable")),
    "uniform_experts": Part(
        _BOTH,
        "experts drawn uniformly in place of the router's choice, which dummy weights may narrow to few experts",
        env={"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"},
    ),
    "gpu_time": Part(
        _BOTH, "SGLang times forwards on the GPU: gpu_step_ms", env={"SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1"}
    ),
    "verify_epilogue": Part(_OURS, "draft acceptance in the verify graph", env={"SGLANG_DSV4_VERIFY_EPILOGUE": "on"}),
}


@dataclass(frozen=True)
class Contender:
    """A server of a comparison."""

    name: str
    server: str
    flags: tuple[str, ...]
    env: Mapping[str, str]


def contender(name: str, flags: Sequence[str], ranks: int = 1, env: Mapping[str, str] | None = None) -> Contender:
    """Return the contender of a name.

    Args:
        name: a server of `servers.CONTENDERS` and parts, separated by "+".
        flags: of all contenders; a part's flags follow, so that they count.
        ranks: with several, `SEVERAL_RANKS` come first.
        env: variables of all contenders.

    Raises:
        ValueError: an unknown server or part, or a part that the server does not have.
    """
    server, *words = name.split("+")
    if server not in CONTENDERS:
        raise ValueError(f"a contender begins with {' or '.join(CONTENDERS)}, as in builtin+marlin; got {name!r}")
    known = [word for word, part in PARTS.items() if server in part.servers]
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"parts of {server} are {', '.join(known)}; got {', '.join(unknown)} in {name!r}")
    parts = [PARTS[word] for word in words]
    left_out = {flag for part in parts for flag in part.without}
    given = [*(SEVERAL_RANKS if ranks > 1 else ()), *flags, *(flag for part in parts for flag in part.flags)]
    variables = {**(env or {}), **{key: value for part in parts for key, value in part.env.items()}}
    return Contender(name, server, tuple(flag for flag in given if flag not in left_out), variables)


def table() -> str:
    """Return the parts with their servers and meanings, a line each."""
    return "\n".join(f"    {word:18} {'/'.join(part.servers):13} {part.about}" for word, part in PARTS.items())
