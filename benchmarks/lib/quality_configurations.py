"""The configurations whose quality `quality_table.py` measures: on a CPU, and on GPUs beside SGLang's built-in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lib.contenders import contender

COLD = "cold"
TIERS = ("device", "host", "storage")
"""Places of a prefix that a request reuses, as `meta_info["prefix_cache"]` names them."""
PREFIX_TOKENS = 512
"""Tokens of a window that are found in a cache: two pages."""
EVERY_PAGE = {"SGLANG_DSV4_TAIL_INTERVAL": "256"}
FILE_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
# Ten pages on the device and 36 in host memory: some requests evict a prefix from the device, and none from the host.
SMALL_POOL = ("--max-total-tokens", "2560", "--max-running-requests", "4", "--chunked-prefill-size", "512")
POOL = ("--max-total-tokens", "16384", "--max-running-requests", "16")
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
FILES = (*HOST, "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1")
EAGLE += ("--speculative-num-draft-tokens", "4")
DSPARK = ("--speculative-algorithm", "DSPARK")
FP8_ROWS = ("--kv-cache-dtype", "fp8_e4m3")
DETERMINISTIC = ("--enable-deterministic-inference",)
MARLIN = ("--moe-runner-backend", "marlin")
CHUNKED = ("--chunked-prefill-size", "256")
QAT = "SGLANG_DSV4_QAT"


@dataclass(frozen=True)
class Configuration:
    """A way to serve the checkpoint.

    Attributes:
        name: in the table.
        flags: of the server, beside a pool's.
        env: of the server.
        prefix: where the first `PREFIX_TOKENS` of a window are found, `COLD` or one of `TIERS`.
        checkpoint: the checkpoint's kind: "trained", or one of `train_tiny.variants`.
        qat: the quantisers, `SGLANG_DSV4_QAT`.
        dtype: of activations and plain rows.
        same_bits: whether its log-probabilities must have the bits of the first configuration.
        in_fp32: whether it is also served in fp32 without quantisers, where rounding explains next to nothing. Where
            the bits are the first configuration's, its figures count.
        contender: of `lib.contenders`, with its parts.
        ranks: GPUs that the server needs.
        pair: whether one server computes prompts and another decodes, in place of one server; on a CPU only.
    """

    name: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    prefix: str = COLD
    checkpoint: str = "trained"
    qat: str = "full"
    dtype: str = "bfloat16"
    same_bits: bool = False
    in_fp32: bool = False
    contender: str = "ours"
    ranks: int = 1
    pair: bool = False

    def server_flags(self) -> tuple[str, ...]:
        """All flags of the server."""
        given = (*(SMALL_POOL if self.prefix in TIERS[1:] else POOL), "--sleep-on-idle", "--dtype", self.dtype)
        flags = (*given, *self.flags)
        return contender(self.contender, flags, self.ranks).flags if self.contender != "ours" else flags

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables of the server; `folder` takes prefixes in files."""
        found = {**self.env}
        if self.contender.startswith("ours"):
            found[QAT] = self.qat
        if self.prefix != COLD:
            found |= {**EVERY_PAGE, FILE_FOLDER: str(folder / "prefixes")}
        return {**found, **contender(self.contender, (), self.ranks).env}

    def without_quantisers(self) -> Configuration:
        """The same in fp32 without quantisers of activations and rows."""
        return replace(self, qat="off", dtype="float32")


def _tp(ranks: int, *flags: str) -> tuple[str, ...]:
    return ("--tp-size", str(ranks), *flags)


_EXCHANGE = {"SGLANG_DSV4_EXPERT_ROWS": "exchange"}
_STAGES = {"SGLANG_PP_LAYER_PARTITION": "3,2"}

ON_A_CPU: tuple[Configuration, ...] = (
    Configuration("plain rows", in_fp32=True),
    Configuration("FP8 rows, FP4 index keys", FP8_ROWS, same_bits=True),
    Configuration("quantisers of the caches only", qat="kv"),
    Configuration("no quantisers", qat="off"),
    Configuration("fp32", dtype="float32"),
    Configuration("NVFP4 experts", checkpoint="nvfp4", same_bits=True),
    Configuration("deterministic", DETERMINISTIC),
    Configuration("chunks of 256 tokens", CHUNKED, same_bits=True),
    Configuration("hit on the device", prefix="device", same_bits=True),
    Configuration("hit in host memory", HOST, prefix="host", same_bits=True),
    Configuration("hit in files", FILES, prefix="storage", same_bits=True),
    Configuration("hit in files, FP8 rows", (*FILES, *FP8_ROWS), prefix="storage", same_bits=True),
    Configuration("EAGLE", EAGLE, same_bits=True),
    Configuration("DSPARK", DSPARK, checkpoint="dspark", same_bits=True),
    Configuration("two ranks", _tp(2), in_fp32=True),
    Configuration("two ranks, deterministic", _tp(2, *DETERMINISTIC)),
    Configuration("two ranks, --ep-size 2", _tp(2, "--ep-size", "2"), in_fp32=True),
    Configuration("two ranks, EAGLE", _tp(2, *EAGLE)),
    Configuration("two ranks, DSPARK", _tp(2, *DSPARK), checkpoint="dspark"),
    Configuration("two ranks, sequence parallel", _tp(2), {"SGLANG_DSV4_SEQUENCE_PARALLEL": "on"}),
    Configuration("two ranks, own rows", _tp(2), {"SGLANG_DSV4_SEQUENCE_PARALLEL": "attention"}, in_fp32=True),
    Configuration("four ranks", _tp(4), checkpoint="four-ranks", in_fp32=True),
    Configuration("four ranks, --ep-size 4", _tp(4, "--ep-size", "4"), checkpoint="four-ranks"),
    Configuration("two groups of ranks", _tp(2, "--attn-dp-size", "2"), in_fp32=True),
    Configuration(
        "two groups, exchanged rows", _tp(2, "--attn-dp-size", "2", "--ep-size", "2"), _EXCHANGE, same_bits=True
    ),
    Configuration(
        "four groups, exchanged rows", _tp(4, "--attn-dp-size", "4", "--ep-size", "4"), _EXCHANGE, same_bits=True
    ),
    Configuration("two stages", ("--pp-size", "2"), _STAGES, same_bits=True),
    Configuration("two stages of two ranks", _tp(2, "--pp-size", "2"), _STAGES),
    Configuration("prefill and decode on two servers", same_bits=True, pair=True),
)
"""Every configuration that is offered on a CPU, but for `--enable-mixed-chunk`: SGLang mixes no batches of requests
that ask for log-probabilities. `trained` can be shared by at most two ranks."""

# GPU servers promise the same bits only under the flag, and have neither fp32 nor fewer quantisers. FP8 rows are the
# default there. Hopper serves NVFP4 experts by Marlin's kernels only.
ON_GPUS: tuple[Configuration, ...] = (
    Configuration("ours"),
    Configuration("ours, Marlin's experts", MARLIN),
    Configuration("ours, deterministic", DETERMINISTIC),
    Configuration("ours, NVFP4 experts", MARLIN, checkpoint="nvfp4"),
    Configuration("ours, chunks of 256 tokens", CHUNKED),
    Configuration("ours, hit on the device", prefix="device"),
    Configuration("ours, hit in host memory", HOST, prefix="host"),
    Configuration("ours, hit in files", FILES, prefix="storage"),
    Configuration("ours, EAGLE", EAGLE),
    Configuration("ours, DSPARK", DSPARK, checkpoint="dspark"),
    Configuration("ours, two ranks", _tp(2), ranks=2),
    Configuration("ours, two ranks, --ep-size 2", _tp(2, "--ep-size", "2"), ranks=2),
    Configuration("ours, four ranks", _tp(4), checkpoint="four-ranks", ranks=4),
    Configuration("built-in, Marlin's experts", contender="builtin+marlin"),
    Configuration("built-in, EAGLE", EAGLE, contender="builtin+marlin"),
    Configuration("built-in, DSPARK", DSPARK, checkpoint="dspark", contender="builtin+marlin"),
    Configuration("built-in, two ranks", _tp(2), contender="builtin+marlin", ranks=2),
)
"""Ours in every way that a GPU offers, and SGLang's built-in."""
