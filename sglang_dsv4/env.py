"""Every environment variable that this package reads or sets: `python -m sglang_dsv4.env` prints the tables.

A module reads a switch by its name: ``env.choice("SGLANG_DSV4_QAT")``, ``env.number(...)``, ``env.text(...)``. No
other module of this package uses ``os.environ``. The kernels' own switches are in `dsv4_kernels.host.environment`.

Standard library only: :mod:`sglang_dsv4.cpu.shims` reads a switch at the start of every Python process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from dsv4_kernels.host import environment
from dsv4_kernels.host.environment import Switch

ON_WORDS = ("on", "1", "true")
OFF_WORDS = ("off", "0", "false")

SWITCHES = (
    Switch(
        "SGLANG_DSV4",
        (*ON_WORDS, *OFF_WORDS),
        "on",
        "off: SGLang's own code serves DeepSeek-V4; none of this package runs",
    ),
    Switch(
        "SGLANG_DSV4_EFFORT_TIERS",
        ("april", "later"),
        "what the checkpoint's encoder says",
        "the reasoning efforts that the checkpoint was trained with",
    ),
    Switch(
        "SGLANG_DSV4_TOOL_CALLS",
        ("repair", "refuse"),
        "repair",
        "tool calls that deviate from the format and have one reading: repaired, or left as text",
    ),
    Switch(
        "SGLANG_DSV4_GRAMMAR_SECONDS",
        (),
        "30",
        "seconds that a request's grammar may be compiled for; 0: no limit",
        form="a number",
    ),
    Switch(
        "SGLANG_DSV4_QAT",
        ("off", "kv", "full"),
        "full for a quantised checkpoint, else off",
        "fake quantisers of the forward: none, those of the caches, also those of activations",
    ),
    Switch(
        "SGLANG_DSV4_TAIL_INTERVAL",
        (),
        "2048",
        "tokens between the tails of a prefill",
        form="a multiple of 256",
    ),
    Switch(
        "SGLANG_DSV4_TAIL_SLOTS",
        (),
        "one a running request and one per 4,096 tokens of the pool",
        "tails on the device",
        form="a number",
    ),
    Switch(
        "SGLANG_DSV4_TAIL_HOST_SLOTS",
        (),
        "4 times those on the device, at most 1/32 of the host's memory",
        "tails in host memory",
        form="a number",
    ),
    Switch(
        "SGLANG_DSV4_ATTENTION",
        (),
        "the kernel for the GPU, the reference elsewhere",
        "the implementation of the attention",
        form="`ref`, `sm90`, `sm100`",
    ),
    Switch(
        "SGLANG_DSV4_SEQUENCE_PARALLEL",
        ("on", "off", "attention"),
        "off",
        "on: in a prefill of 512 tokens or more a rank computes the boundaries between sublayers, and the indexers' "
        "choice, for its share of the tokens; attention: the attention, too, with the weights of all heads",
    ),
    Switch(
        "SGLANG_DSV4_ALL_REDUCE",
        ("auto", "ours", "sglang"),
        "auto",
        "sums over ranks: our kernel, which stores parts into the other GPUs' memory (auto: SGLang's all-reduce where "
        "that memory cannot be mapped; ours: the server stops there); or SGLang's all-reduce",
    ),
    Switch(
        "SGLANG_DSV4_EXPERT_ROWS",
        ("gather", "exchange"),
        "gather",
        "gather: with attention data parallelism all ranks get all tokens for their experts, and return a part of each "
        "token's sum; exchange: tokens go to their experts' ranks, whose rows come back, with the bits of one GPU",
    ),
    Switch(
        "SGLANG_DSV4_RANK_CHOICE",
        ("prefix", "sglang"),
        "prefix",
        "prefix: with several data-parallel ranks a request goes where most of its prompt is cached, unless that rank "
        "has more to do; sglang: by --load-balance-method alone",
    ),
    Switch(
        "SGLANG_DSV4_VERIFY_EPILOGUE",
        ("on", "off"),
        "on with one rank, off with several",
        "on: DSpark's draft acceptance is captured in the verify graph",
    ),
    Switch(
        "SGLANG_DSV4_WO_A",
        ("both", "fp8", "bf16"),
        "both on Hopper and Blackwell with an FP8 checkpoint, else bf16",
        "the formats in which wo_a is kept: fp8 halves its memory, bf16 takes scales that are no powers of two",
    ),
    Switch(
        "SGLANG_DSV4_FP8_LINEAR",
        ("auto", "ours"),
        "auto",
        "ours: on Blackwell our kernel multiplies in FP8 layers; auto: it does under --enable-deterministic-inference",
    ),
    Switch(
        "SGLANG_DSV4_JOINT_LAUNCH",
        ("on", "off"),
        "on",
        "in forwards of up to 16 tokens (Blackwell: 64), kernels of a layer that do not depend on each other are one "
        "launch",
    ),
    Switch(
        "SGLANG_DSV4_COMPARE_ATTENTION",
        (),
        "none",
        "every attention is also computed by the reference, and the differences are written there; slow",
        form="a file",
    ),
    Switch(
        "SGLANG_DSV4_FIND_NOT_FINITE",
        ("on", "off"),
        "off",
        "on: the log names the first sublayer of a forward whose output is not finite; slow",
    ),
)
"""The switches of this package."""

FOREIGN = (
    Switch("SGLANG_PLUGINS", (), "all", "read: names the plugins that SGLang loads", form="names"),
    Switch("SGLANG_PLATFORM", (), "none", "read: names the platform that SGLang uses", form="a name"),
    Switch("SGLANG_USE_CPU_ENGINE", (), "0", "read: 1 leaves a CPU to SGLang's own engine", form="0 or 1"),
    Switch(
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
        (),
        "`~/.cache/sglang-dsv4/prefixes`",
        "read: where prefixes are stored, if `--file-storage-path` is not given",
        form="a folder",
    ),
    Switch(
        "SGLANG_EXTERNAL_MODEL_PACKAGE",
        (),
        "`sglang_dsv4.models`",
        "set unless the user did: where SGLang looks for model classes",
        form="a package",
    ),
    Switch(
        "SGLANG_DSV4_REASONING_EFFORT",
        (),
        "low",
        "set unless the user did: SGLang's reasoning effort of requests that name none",
        form="an effort",
    ),
    Switch(
        "SGLANG_CPU_OMP_THREADS_BIND",
        (),
        "the cores, shared out among the ranks",
        "set on a CPU unless the user did: the cores of each rank",
        form="`0,1|2,3`",
    ),
    Switch(
        "OMP_NUM_THREADS",
        (),
        "the cores, at most 4",
        "set by `make serve` unless the user did: the threads of a rank",
        form="a number",
    ),
    Switch(
        "SGLANG_HOST_IP",
        (),
        "the address of a network interface",
        "set by `make serve-pd` unless the user did: the address by which two servers find each other",
        form="an address",
    ),
    Switch(
        "OMP_WAIT_POLICY",
        (),
        "passive",
        "set by `make serve` unless the user did: threads sleep while they wait",
        form="passive or active",
    ),
    Switch(
        "TORCHDYNAMO_DISABLE",
        (),
        "1",
        "set on a CPU unless the user did: SGLang's sampling functions are not traced",
        form="0 or 1",
    ),
    Switch(
        "SGLANG_PP_LAYER_PARTITION",
        (),
        "equal numbers",
        "read: the layers of each stage of --pp-size",
        form="`22,21`",
    ),
    Switch(
        "SGLANG_SIMULATE_UNIFORM_EXPERTS",
        (),
        "0",
        "read: in benchmarks tokens get experts drawn uniformly, not those that the router chooses",
        form="0 or 1",
    ),
    Switch(
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS",
        (),
        "0",
        "read: in benchmarks experts are dealt to tokens in turn",
        form="0 or 1",
    ),
)
"""Variables of SGLang and PyTorch that this package reads or sets."""

_BY_NAME = {switch.name: switch for switch in (*SWITCHES, *FOREIGN)}


def text(name: str) -> str | None:
    """A variable's text without surrounding blanks; None if it is unset or empty."""
    return _BY_NAME[name].text()


def choice(name: str) -> str | None:
    """A switch's word, in lower case; None if it is unset or empty.

    Raises:
        ValueError: it holds a word that the switch does not accept.
    """
    return _BY_NAME[name].choice()


def number(name: str) -> int | None:
    """A switch's number; None if it is unset or empty.

    Raises:
        ValueError: it holds no number of at least 0.
    """
    return _BY_NAME[name].number()


def set_default(name: str, value: str) -> None:
    """Set a variable of :data:`FOREIGN` unless it is set."""
    os.environ.setdefault(_BY_NAME[name].name, value)


def switches() -> Iterator[Switch]:
    """The switches of this package and of its kernels."""
    yield from SWITCHES
    yield from environment.SWITCHES


def markdown() -> str:
    """Two Markdown tables: the switches, and the variables of SGLang and PyTorch."""
    return f"{environment.table(switches())}\n{environment.table(FOREIGN)}"


if __name__ == "__main__":
    print(markdown(), end="")
