"""Flags of ``sglang.launch_server`` that are refused before anything is loaded, each with the reason.

SGLang would accept them for DeepSeek-V4, but our model, pools or prefix cache can't serve them, or would leave them
without the effect that the user asked for. `docs/server_flags.toml` has the answer for every flag, and
`docs/coming_from_sglang.md` shows it; a test keeps both and this code equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang_dsv4 import env
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS
from sglang_dsv4.model_config.stages import SIZES_VARIABLE, stages
from sglang_dsv4.model_config.topology import Topology
from sglang_dsv4.seam import moe_runner
from sglang_dsv4.seam.hook_kinds import NAME

Predicate = Callable[[Any], bool]


class Refusal(NamedTuple):
    """A flag and the values of it that can't be served."""

    flag: str
    is_refused: Predicate  # called with the value of the ServerArgs field
    why: str
    field: str = ""  # of ServerArgs, where the flag has another name

    @property
    def argument(self) -> str:
        """The field of ServerArgs."""
        return self.field or self.flag.removeprefix("--").replace("-", "_")


def above(number: int) -> Predicate:
    """True for a number above this one."""
    return lambda value: value is not None and value > number


def other_than(*allowed: object) -> Predicate:
    """True for any value but these."""
    return lambda value: value not in allowed


def asks_for_other_graphs(config: Any) -> bool:  # JSON of the user, or what SGLang has made of all flags
    """True if the user's JSON has another backend than `breakable` for prefills, or than `full` for decode steps."""
    phases = config if isinstance(config, dict) else {}
    backends = {phase: phases.get(phase, {}).get("backend") for phase in ("prefill", "decode")}
    return backends["prefill"] not in PREFILL_GRAPHS or backends["decode"] not in DECODE_GRAPHS


def flags(names: str, is_refused: Predicate, why: str) -> tuple[Refusal, ...]:
    """Refusals of several flags, divided by spaces, for one reason."""
    return tuple(Refusal(name, is_refused, why) for name in names.split())


USE_TENSOR_PARALLELISM = "use tensor and expert parallelism (--tp-size, --ep-size)"
RANKS_ARE_FIXED = "an expert stays on its rank, and no rank joins or leaves; leave it out"
ONE_BATCH = "a forward runs one batch, from its first layer to its last; leave it out"
OUR_CACHE = "rings and tails live in this package's pools and prefix cache, see docs/prefix_reuse.md; leave it out"
OUR_ATTENTION = "this package's kernels compute the attention; SGLANG_DSV4_ATTENTION chooses among them"
OUR_LOADER = "weights are read from safetensors files and rearranged once; leave it out"
ON_THE_DEVICE = "the model's weights stay in the device's memory; leave it out"
NOT_REPORTED = "the model does not report it; leave it out"
PREFILL_GRAPHS = (None, "breakable", "disabled")
THE_ATTENTION_STAYS_OUT = "`breakable` graphs hold all of a prefill but its attention, for any context; leave it out"
COLLECTIVES = "the ranks' sums by it were never compared with others; leave it out"
CHOOSE_CARDS = "CUDA_VISIBLE_DEVICES chooses the GPUs, SGLANG_CPU_OMP_THREADS_BIND the cores; leave it out"
PARSERS = "the model's thoughts and calls would stay text: take deepseek-v4 and deepseekv4, or auto"
OUR_CHECKS = "its requests would not pass this package's checks; use HTTP, or the native server of --grpc-port"
OTHER_PROCESSES = "no plugin is loaded there, so requests and tool calls would not pass this package's checks"
OUR_DRAFT = "a draft has the target's caches, kernels and vocabulary, and a fixed number of steps; leave it out"
TARGET_DECIDES = "a draft is accepted by the target's probabilities alone; leave it out"

LOAD_FORMATS = ("auto", "safetensors", "dummy")
DUMPS = "a layer's result is not one tensor; SGLANG_DSV4_COMPARE_ATTENTION writes the attention's"

NO_BREAKABLE_STEPS = "SGLang's breakable graphs can't hold this model's output; leave it out"

DECODE_GRAPHS = (None, "full", "disabled")
FP8_PRODUCTS = ("auto", "deep_gemm")
BF16_PRODUCTS = ("auto", "torch")
STORAGE = (None, "file", "mooncake", "nixl", "dynamic")

REFUSALS = (
    Refusal("--device", other_than(None, "cpu", "cuda"), "this package serves on NVIDIA GPUs and on CPUs"),
    Refusal("--use-ray", bool, "start one server on each host by --nnodes and --node-rank"),
    # ---- parallelism
    *flags("--dcp-size --attn-cp-size --moe-dp-size --dwdp-size", above(1), USE_TENSOR_PARALLELISM),
    *flags("--enable-prefill-cp --enable-kv-cache-sharding", bool, USE_TENSOR_PARALLELISM),
    *flags(
        "--enable-layernorm-sp --enable-attn-tp-input-scattered",
        bool,
        "SGLANG_DSV4_SEQUENCE_PARALLEL=on divides the tokens of a prefill among the ranks",
    ),
    # ---- experts
    Refusal(
        "--moe-a2a-backend",
        other_than("none"),
        "tokens get to the experts as SGLANG_DSV4_EXPERT_ROWS says; leave it out",
    ),
    *flags("--enable-eplb --enable-elastic-expert-backup --enable-waterfill", bool, RANKS_ARE_FIXED),
    *flags("--ep-num-redundant-experts", above(0), RANKS_ARE_FIXED),
    *flags("--ep-dispatch-algorithm --max-ep-size --elastic-ep-initial-size", other_than(None), RANKS_ARE_FIXED),
    Refusal("--elastic-ep-backend", other_than(None), RANKS_ARE_FIXED),  # "none" is not None: SGLang would start it
    Refusal("--elastic-ep-join-mode", other_than(None), RANKS_ARE_FIXED, "ep_join_mode"),
    Refusal("--init-expert-location", other_than("trivial"), RANKS_ARE_FIXED),
    Refusal("--expert-distribution-recorder-mode", other_than(None), NOT_REPORTED),
    Refusal("--expert-balancedness-report-mode", other_than("off"), NOT_REPORTED),
    Refusal("--enforce-shared-experts-fusion", bool, "the shared expert is computed by itself; leave it out"),
    Refusal("--enable-fused-moe-sum-all-reduce", bool, "ranks are summed once, after the experts; leave it out"),
    Refusal("--enable-paged-experts", bool, ON_THE_DEVICE),
    Refusal("--kt-weight-path", other_than(None), ON_THE_DEVICE),
    Refusal(
        "--schedule-policy",
        lambda name: name == "priority",
        "SGLang's scheduler does not know the name; use --enable-priority-scheduling",
    ),
    # ---- forwards
    Refusal(
        "--fp8-gemm-backend",
        other_than(*FP8_PRODUCTS),
        "FP8 products are DeepGEMM's, and this package's for few tokens; leave it out",
        "fp8_gemm_runner_backend",
    ),
    Refusal(
        "--bf16-gemm-backend",
        other_than(*BF16_PRODUCTS),
        "its bits change with the number of tokens, and cuBLAS was measured; leave it out",
    ),
    Refusal("--flashinfer-mxfp4-moe-precision", other_than("default"), "it was never compared; leave it out"),
    *flags("--enable-symm-mem --enable-mscclpp --enable-torch-symm-mem", bool, COLLECTIVES),
    Refusal("--enable-nccl-nvls", bool, f"{COLLECTIVES}, or set NCCL_NVLS_ENABLE=1 yourself"),
    Refusal("--flashinfer-allreduce-fusion-backend", other_than(None, "auto"), COLLECTIVES),
    Refusal("--base-gpu-id", above(0), CHOOSE_CARDS),
    Refusal("--gpu-id-step", above(1), CHOOSE_CARDS),
    *flags("--enable-two-batch-overlap --enable-single-batch-overlap --enable-pdmux", bool, ONE_BATCH),
    Refusal("--ple-offload-embedding", bool, "the model has no n-gram embeddings"),
    *flags("--cpu-offload-gb --offload-group-size", above(0), ON_THE_DEVICE),
    *flags("--enable-nvidia-megakernel --enable-amd-monokernel", bool, "this package's kernels compute the model"),
    Refusal(
        "--cuda-graph-config",
        asks_for_other_graphs,
        "graphs are `breakable` for prefills and `full` for decode steps, or `disabled`",
    ),
    Refusal("--cuda-graph-backend-decode", other_than(*DECODE_GRAPHS), NO_BREAKABLE_STEPS),
    Refusal("--debug-cuda-graph", bool, NO_BREAKABLE_STEPS),
    Refusal("--cuda-graph-backend-prefill", other_than(*PREFILL_GRAPHS), THE_ATTENTION_STAYS_OUT),
    Refusal("--cuda-graph-prefill-max-context", other_than(None), THE_ATTENTION_STAYS_OUT),
    Refusal("--enable-torch-compile", bool, "this package's kernels are compiled ahead; leave it out"),
    *flags(
        "--prefill-attention-backend --decode-attention-backend",
        other_than(None, NAME, "compressed"),  # SGLang's older name
        OUR_ATTENTION,
    ),
    Refusal("--enable-deepseek-v4-fp4-indexer", bool, "indexer keys are FP4 in every cache of FP8 rows; leave it out"),
    Refusal("--sampling-backend", lambda name: name in ("ascend", "intel_xpu"), "it is for other hardware"),
    *flags("--dsv4-prefill-backend --dsv4-attn-backend", other_than("auto"), OUR_ATTENTION),
    Refusal("--rl-on-policy-target", other_than(None), "it changes layers of SGLang that this model does not use"),
    Refusal("--enable-tf32-matmul", bool, "the router and the compressors need fp32 products; leave it out"),
    Refusal("--dtype", other_than("auto", "bfloat16", "float32", "float"), "the model computes in bfloat16 or float32"),
    *flags("--is-embedding", bool, "the model answers with tokens"),
    Refusal("--dllm-algorithm", other_than(None), "the model does not diffuse"),
    # ---- caches
    Refusal(
        "--page-size",
        other_than(None, FULL_PAGE_TOKENS),
        f"pages hold {FULL_PAGE_TOKENS} tokens, two compression groups of the HCA layers; leave it out",
    ),
    Refusal(
        "--hicache-host-memory-mode",
        other_than("cache"),
        "host memory keeps prefixes, and the storage backend gets them from there; leave it out",
    ),
    Refusal(
        "--hicache-host-memory-fraction", other_than(None, 0.8), "give the size by --hicache-ratio or --hicache-size"
    ),
    Refusal(
        "--hicache-storage-backend",
        other_than(*STORAGE),
        "no record of this package was ever read back from it; `file` needs nothing else, and "
        "`dynamic` loads any class",
    ),
    Refusal("--enable-streaming-session", bool, "a session's rows are not kept"),
    Refusal("--radix-cache-backend", other_than(None, NAME), OUR_CACHE),
    *flags("--enable-unified-memory --enable-page-major-kv-layout --enable-hisparse", bool, OUR_CACHE),
    *flags("--enable-lmcache --enable-flexkv --enable-unified-cache-external-linker", bool, OUR_CACHE),
    Refusal("--disable-hybrid-swa-memory", bool, "window rows are in rings of the request slots; leave it out"),
    Refusal("--kv-canary", other_than("none"), OUR_CACHE),
    # ---- weights
    *flags("--load-format --speculative-draft-load-format", other_than(None, *LOAD_FORMATS), OUR_LOADER),
    Refusal("--model-impl", other_than("auto", "sglang"), OUR_LOADER),
    Refusal("--model-config-parser", other_than("auto", "hf"), "config.json describes the model; leave it out"),
    *flags("--modelopt-quant --custom-weight-loader", other_than(None), OUR_LOADER),
    *flags("--quantize-and-serve --remote-instance-weight-loader-start-seed-via-transfer-engine", bool, OUR_LOADER),
    Refusal("--startup-weight-load-mode", other_than("serial"), OUR_LOADER),
    Refusal("--weight-loader-disable-mmap", bool, "safetensors reads the experts' scales (F8_E8M0) through mmap only"),
    Refusal("--weight-cache-mode", other_than("off"), OUR_LOADER),
    *flags("--enable-lora --lora-paths --enable-lora-overlap-loading", bool, "the model has no place for adapters"),
    # ---- requests and answers
    Refusal("--tokenizer-worker-num", above(1), f"{OTHER_PROCESSES}; leave it out"),
    *flags("--smg-grpc-mode --grpc-mode", bool, OUR_CHECKS),
    Refusal("--reasoning-parser", other_than(None, "auto", "deepseek-v4"), PARSERS),
    Refusal("--tool-call-parser", other_than(None, "auto", "deepseekv4"), PARSERS),
    Refusal(
        "--enable-strict-thinking",
        bool,
        "SGLang's mask of tokens was never applied to this model; a thinking budget needs no flag",
    ),
    Refusal(
        "--enable-forward-pass-metrics",
        bool,
        "SGLang's times of forwards were never compared with this model's; --enable-metrics needs no GPU events",
    ),
    Refusal("--tool-server", other_than(None), "SGLang runs its tools for gpt-oss only; the client runs this model's"),
    Refusal("--warmups", other_than(None), "kernels are compiled before the server is ready; leave it out"),
    Refusal(
        "--grammar-backend",
        lambda name: name == "outlines",
        "it compiles in Python, which stops all other requests; take xgrammar or llguidance",
    ),
    *flags("--enable-return-aux-hidden-states --enable-return-routed-experts", bool, NOT_REPORTED),
    *flags("--enable-return-indexer-topk", bool, NOT_REPORTED),
    *flags(
        "--enable-encoder-swa-bounded-replay --enable-decoder-swa-bounded-replay",
        bool,
        "it belongs to DeepSeek-V4.1; a tail holds the window rows of a prefix",
    ),
    *flags(
        "--debug-tensor-dump-output-folder --debug-tensor-dump-input-file",
        other_than(None),
        DUMPS,
    ),
    Refusal("--msprobe-dump-config", other_than(None), DUMPS),
    # ---- disaggregation
    *flags("--enable-pd-role-switch", bool, "a server's pools are those of its role; leave it out"),
    Refusal("--decoupled-spec-role", other_than("null"), "a draft runs in its target's server; leave it out"),
    *flags("--encoder-only --language-only", bool, "the model reads text only; leave it out"),
    # ---- drafts
    *flags("--speculative-accept-threshold-single --speculative-accept-threshold-acc", other_than(1.0), TARGET_DECIDES),
    *flags("--speculative-token-map --speculative-draft-attention-backend", other_than(None), OUR_DRAFT),
    *flags("--speculative-draft-window-size --uno-lora-path", other_than(None), OUR_DRAFT),
    Refusal("--speculative-draft-kv-cache-dtype", other_than(None, "auto"), OUR_DRAFT),
    *flags("--speculative-adaptive --enable-multi-layer-eagle", bool, OUR_DRAFT),
    Refusal("--speculative-moe-a2a-backend", other_than(None, "none"), OUR_DRAFT),
)

AS_GIVEN = (
    Refusal(
        "--moe-runner-backend",
        lambda name: not moe_runner.may_be_named(name),
        "its experts were never compared with the model's here; leave it out, or take marlin on Hopper",
    ),
    Refusal(
        "--speculative-moe-runner-backend",
        other_than(None, "auto"),
        "a draft's experts run as the target's; leave it out",
    ),
    Refusal("--enable-flashinfer-allreduce-fusion", bool, "SGLang chooses how ranks are summed; leave it out"),
)
"""Values that SGLang may choose, but no user."""

ON_A_CPU = (
    Refusal("--speculative-use-rejection-sampling", bool, "drafts are accepted by the target's probabilities"),
    Refusal("--enable-memory-saver", bool, "it gives back a GPU's memory; leave it out"),
)


def refuse_unsupported_arguments(arguments: Any, hf_config: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for flags that SGLang would accept and that our pools, or the checkpoint, can't serve.

    Raises:
        ValueError: names the flag, or the GPU, and why.
    """
    from sglang.srt.environ import envs

    refuse_other_gpus(arguments)
    refuse(arguments)
    algorithm = arguments.speculative_algorithm
    has_dspark = bool(getattr(hf_config, "dspark_target_layer_ids", None))
    if algorithm == "DSPARK" and not has_dspark:
        raise ValueError(
            "sglang-dsv4 does not support --speculative-algorithm DSPARK with this checkpoint: it has no DSpark draft. "
            "Leave the flag out, or draft with its MTP module: EAGLE."
        )
    if algorithm not in (None, "DSPARK") and has_dspark:
        raise ValueError(
            f"sglang-dsv4 does not support --speculative-algorithm {algorithm} with this checkpoint: its draft is "
            "DSpark's, and it has no MTP module. Leave the flag out."
        )
    if arguments.enable_watermark and algorithm is not None:
        raise ValueError(
            "sglang-dsv4 does not support --enable-watermark with --speculative-algorithm: drafts with marks were "
            "never checked. Leave one of the two out."
        )
    if envs.SGLANG_RUST_SERVER.get():
        raise ValueError(f"sglang-dsv4 does not support SGLANG_RUST_SERVER: {OTHER_PROCESSES}; unset it.")


def refuse_other_gpus(arguments: Any) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for a GPU that no kernel serves: every op would be computed by its definition in PyTorch.

    Raises:
        ValueError: names the GPU, and GPUs that are served.
    """
    import torch

    if arguments.device != "cuda" or not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    if torch.version.hip or major not in moe_runner.KERNELS:
        raise ValueError(
            f"sglang-dsv4 has no kernels for {torch.cuda.get_device_name()} (compute capability {major}.{minor}). They "
            "are for Hopper (9.0: H100, H200) and data-centre Blackwell (10.x: B200, B300). SGLANG_DSV4=off leaves "
            "DeepSeek-V4 to SGLang's own code."
        )


def refuse_ranks(arguments: Any, config: Config) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for numbers of ranks or stages that can't share the model.

    Raises:
        ValueError: names the part of the model, and numbers that can.
    """
    exchanges = env.choice("SGLANG_DSV4_EXPERT_ROWS") == "exchange"
    problem = Topology(arguments.tp_size, arguments.attn_dp_size, arguments.ep_size, exchanges).problem(config)
    if problem is not None:
        raise ValueError(f"sglang-dsv4 can't serve this checkpoint on {arguments.tp_size} ranks: {problem}")
    try:
        for stage in stages(config.num_hidden_layers, arguments.pp_size, env.text(SIZES_VARIABLE)):
            stage.require_entries(config.schedule.ratios)
    except ValueError as error:
        raise ValueError(f"sglang-dsv4 can't serve this checkpoint in {arguments.pp_size} stages: {error}") from error


def refuse(arguments: Any, as_given: bool = False) -> None:  # ServerArgs, or SGLang's view of it
    """Raise for a flag of :data:`REFUSALS`, and on a CPU for one of :data:`ON_A_CPU`.

    Args:
        arguments: the server's.
        as_given: whether all values are the user's; then flags of :data:`AS_GIVEN` are refused, too.

    Raises:
        ValueError: names the flag, its value and why.
    """
    refuse_first(arguments, (*REFUSALS, *(AS_GIVEN if as_given else ())), "")
    if arguments.device == "cpu":
        refuse_first(arguments, ON_A_CPU, " on a CPU")


def refuse_first(arguments: Any, refusals: Sequence[Refusal], where: str) -> None:
    """Raise for the first of these refusals that holds; `where` follows the flag in the message."""
    for refusal in refusals:
        value = getattr(arguments, refusal.argument)
        if refusal.is_refused(value):
            shown = refusal.flag if value is True else f"{refusal.flag} {value}"
            raise ValueError(f"sglang-dsv4 does not support {shown}{where}: {refusal.why}")


def refuse_other_quantization(arguments: Any, hf_config: Any) -> None:  # ServerArgs as the user gave them
    """Raise for a quantisation of the weights, or of a draft's, that is not the checkpoint's own.

    SGLang's view of the arguments holds the method that SGLang found in the checkpoint, for some checkpoints under
    another name.

    Raises:
        ValueError: names the flag, its value and the checkpoint's.
    """
    own = (getattr(hf_config, "quantization_config", None) or {}).get("quant_method")
    for flag in ("--quantization", "--speculative-draft-model-quantization"):
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value not in (None, own):
            has = f"has {own}" if own else "is not quantised"
            raise ValueError(
                f"sglang-dsv4 does not support {flag} {value}: the checkpoint {has}, and weights are served as the "
                "checkpoint holds them. Leave the flag out."
            )
