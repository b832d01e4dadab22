"""Report the installation, the memory plan of a checkpoint, and the state of a running server.

python -m sglang_dsv4.doctor                                  the installation
python -m sglang_dsv4.doctor --versions                       versions of packages and machine, for a bug report
python -m sglang_dsv4.doctor MODEL [--tokens N] [--requests N] [--rows fp8|plain] [--hicache-ratio R | --hicache-size G]
                                                              the installation, and the memory plan of a checkpoint
python -m sglang_dsv4.doctor MODEL --gpus N [--gpu-memory GB] the same, and the KV that fits on several GPUs
python -m sglang_dsv4.doctor MODEL [--gpus N] [--draft-tokens N] [--decode-extra-slots N]
                                                              the plans with drafts, or of a decode server
python -m sglang_dsv4.doctor MODEL --stages N                 the memory plan of each stage of a pipeline instead
python -m sglang_dsv4.doctor --url http://127.0.0.1:30000     the installation, and the state of a running server
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dsv4_kernels import registry
from dsv4_kernels.host import compile_cache
from dsv4_kernels.indexer import SCRATCH_BYTES
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.moe.workspace import workspace_bytes
from dsv4_kernels.sparse_attention import unpacking
from sglang_dsv4 import env
from sglang_dsv4.cache.geometry import PoolGeometry
from sglang_dsv4.cache.tail_options import HostOptions, TailOptions
from sglang_dsv4.cpu import shims
from sglang_dsv4.model_config.config import Config
from sglang_dsv4.model_config.layer_kinds import FULL_PAGE_TOKENS
from sglang_dsv4.model_config.stages import SIZES_VARIABLE, Stage, stages
from sglang_dsv4.model_config.topology import Topology
from sglang_dsv4.seam import compat
from sglang_dsv4.weights import rank_bytes
from sglang_dsv4.weights.checkpoint_files import stated

PACKAGES = (
    "sglang-dsv4",
    "sglang",
    "sglang-kernel",
    "sgl-deep-gemm",
    "sgl-flash-mla",
    "torch",
    "triton",
    "flashinfer-python",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "nvidia-nccl-cu13",
    "transformers",
    "tokenizers",
    "xgrammar",
    "deepseek-recipe",
    "safetensors",
    "numpy",
)
"""Packages whose versions a bug report needs."""
MEMORY_SHARE = 0.88
"""The share of a GPU's memory that the plan for several GPUs gives to weights and KV."""
CONVERSATIONS = (4_096, 32_768, 131_072, 1_048_576)


def installation() -> list[str]:
    """The lines on versions, whether the plugin runs, and which implementation of each op the registry chooses here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found, tested = compat.sglang_version(), compat.TESTED_SGLANG
    verdict = "the tested version" if found == tested else f"NOT the tested version, {tested}: the server will refuse"
    lines = [
        f"sglang-dsv4 {compat.our_version()}, {'OFF (SGLANG_DSV4)' if shims.is_off() else 'on'}",
        f"SGLang {found}: {verdict}",
        f"entry points: {shims.why_sglang_does_not_load_us() or 'installed, SGLang finds this package'}",
        f"torch {torch.__version__} on {torch.cuda.get_device_name() if device.type == 'cuda' else 'a CPU'}",
        f"compiled kernels: {_kernel_folder()}",
        "implementation of each op in bf16, of those available:",
    ]
    taken = {op: registry.chosen(op, device, torch.bfloat16) for op in registry.ops()}
    op_width, name_width = max(map(len, taken)), max(len(chosen.name) for chosen in taken.values())
    for op, chosen in taken.items():
        graph = "" if chosen.graph_safe else ", not in a CUDA graph"
        lines.append(f"  {op:{op_width}} {chosen.name:{name_width}} of {', '.join(registry.available(op))}{graph}")
    return lines


def versions() -> list[str]:
    """The lines of a bug report: each of :data:`PACKAGES` with its version, Python, the system, CUDA and the GPUs."""
    rows = [(name, compat.version_of(name)) for name in PACKAGES]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows += [
        ("Python", platform.python_version()),
        ("system", platform.platform()),
        ("CUDA of torch", torch.version.cuda or "none"),
        ("GPUs", ", ".join(gpus) or "none"),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:{width}} {version}" for name, version in rows]


def _kernel_folder() -> str:
    folder = compile_cache.folder()
    if folder is None:
        return f"not kept on disk ({compile_cache.FOLDER_VARIABLE}=off)"
    return f"{len(list(folder.glob(f'{compile_cache.PREFIX}*.o')))} in {folder}"


def config_of(model: Path) -> Config:
    """The config of a checkpoint's folder.

    Raises:
        OSError, ValueError: there is no config.json, or the model can't be served.
    """
    return Config.from_hf(stated(json.loads((model / "config.json").read_text())))


def geometry_of_checkpoint(
    model: Path, *, fp8: bool, stage: Stage | None = None, draft_tokens: int = 0, transfers: bool = False
) -> PoolGeometry:
    """The pools' dimensions for a checkpoint on one rank, or for a stage of it.

    Args:
        model: the checkpoint's folder.
        fp8: FP8 rows, as on a GPU, or plain rows.
        stage: of a pipeline.
        draft_tokens: tokens of a verify step (`--speculative-num-draft-tokens`); 0 without speculation.
        transfers: whether the pools are a prefill or decode server's.

    Raises:
        OSError, ValueError: there is no config.json, the model can't be served, or it has no draft.
    """
    config = config_of(model)
    if draft_tokens and not config.num_draft_layers:
        raise ValueError(f"{model} has no draft: leave out --draft-tokens")
    layers = range(config.num_hidden_layers) if stage is None else stage.layers
    return PoolGeometry(
        ratios=tuple(config.schedule.ratios[layers.start : layers.stop]),
        first_layer=layers.start,
        row_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        index_dim=config.index_head_dim,
        window_tokens=config.sliding_window,
        draft_tokens=draft_tokens,
        draft_layers=config.num_draft_layers if draft_tokens else 0,
        transfers=transfers,
        row_format=RowFormat.FP8 if fp8 else RowFormat.PLAIN,
        index_format=RowFormat.INDEX_FP4 if fp8 and config.qat.indexer_fp4 else RowFormat.PLAIN,
    )


def _expert_workspace_bytes(model: Path, tokens: int) -> int:
    """Bytes of the workspace of a layer's routed experts on Hopper, with all experts on one rank."""
    config = config_of(model)
    return workspace_bytes(
        tokens,
        config.num_experts_per_tok,
        config.n_routed_experts,
        config.hidden_size,
        config.moe_intermediate_size,
    )


def plan(
    model: Path,
    tokens: int,
    requests: int,
    rows: str,
    hicache_ratio: float = 2.0,
    hicache_size: float = 0,
    stage: Stage | None = None,
    draft_tokens: int = 0,
    extra_slots: int | None = None,
) -> list[str]:
    """The lines on the memory plan of a checkpoint, or of a stage of it, and on the prefixes that fit into it.

    `several_gpus` says what `draft_tokens` and `extra_slots` are. A decode server keeps no tails.

    Raises:
        ValueError: the config can't be served.
    """
    from sglang_dsv4.cache.pool_plan import PoolPlan, format_bytes

    fp8 = rows == "fp8"
    decodes = extra_slots is not None
    geometry = geometry_of_checkpoint(model, fp8=fp8, stage=stage, draft_tokens=draft_tokens, transfers=decodes)
    options, request_slots = TailOptions.from_environment(), requests + (extra_slots or 0) + 1
    slots = 0 if decodes else options.slots_on_device(tokens, request_slots)
    plan = PoolPlan.of(geometry, tokens // FULL_PAGE_TOKENS * FULL_PAGE_TOKENS, request_slots, slots)
    lines = [plan.table()]
    if fp8:
        chunk, step = (format_bytes(_expert_workspace_bytes(model, tokens)) for tokens in (8192, 64))
        lines += [
            f"in addition to the pools, during a prefill: up to {format_bytes(unpacking.MAX_BYTES)} of unpacked rows "
            f"and {format_bytes(SCRATCH_BYTES)} of index scores",
            f"with --moe-runner-backend dsv4 on one Hopper GPU: {chunk} for a chunk of 8,192 tokens, {step} for a "
            "decode step of 64 requests",
        ]
    if decodes:
        return lines
    host = options.slots_on_host(slots, int(plan.bytes_per_tail))
    lines += [
        "",
        f"tails: one every {options.interval_tokens:,} prefilled tokens, {slots:,} on the device, "
        f"{host:,} in host memory ({format_bytes(host * plan.bytes_per_tail)})",
    ]
    slot_bytes, token_bytes = plan.bytes_per_tail, plan.bytes_per_token
    chosen = HostOptions(hicache_ratio, hicache_size)
    pages, tails = chosen.sizes(plan.full_tokens, token_bytes, int(slot_bytes))
    host_tokens, tails = pages * FULL_PAGE_TOKENS, max(tails, host)
    flag = f"--hicache-size {hicache_size:g}" if hicache_size else f"--hicache-ratio {hicache_ratio:g}"
    lines += [
        f"with --enable-hierarchical-cache {flag}: {host_tokens:,} tokens in host memory "
        f"({format_bytes(host_tokens * token_bytes)}) and {tails:,} tails ({format_bytes(tails * slot_bytes)})",
        f"{'conversation':>14} {'kept whole':>11} {'in host memory':>15} {'tails each':>17} {'file bytes':>15}",
    ]
    for length in CONVERSATIONS:
        if length <= max(tokens, host_tokens):
            each = length // options.interval_tokens + 1
            stored = format_bytes(length * token_bytes + each * slot_bytes)
            kept, beyond = tokens // length, min(host_tokens // length, tails)
            lines.append(f"{length:>14,} {kept:>11,} {beyond:>15,} {each:>17,} {stored:>15}")
    lines.append(
        "A conversation needs one tail, at its end, to be continued. The others limit how many tokens are computed "
        "again after a divergence."
    )
    return lines


def stages_of_checkpoint(model: Path, count: int) -> tuple[Stage, ...]:
    """The stages of a checkpoint in a pipeline (`--pp-size`).

    Raises:
        ValueError: the layers can't be divided so.
    """
    config = config_of(model)
    found = stages(config.num_hidden_layers, count, env.text(SIZES_VARIABLE))
    for stage in found:
        stage.require_entries(config.schedule.ratios)
    return found


def weights_of_stage(model: Path, stage: Stage) -> str:
    """A line on a stage: its name, and the bytes of its weights in the release's formats, on one GPU a stage."""
    config = config_of(model)
    held = rank_bytes.bytes_of_a_rank(config, Topology(1), "fp8", stage)
    return f"{stage.name}: {held / 2**30:.1f} GiB of weights (wo_a in FP8), divided by --tp-size"


def several_gpus(
    model: Path,
    gpus: int,
    gigabytes: float,
    requests: int,
    rows: str,
    draft_tokens: int = 0,
    extra_slots: int | None = None,
) -> list[str]:
    """The lines on the KV that fits on several GPUs, by the number of groups of attention data parallelism.

    Args:
        model: the checkpoint's folder.
        gpus: ranks (`--tp-size`).
        gigabytes: memory of a GPU as in its name, 2**30 bytes. A driver keeps a hundredth for itself.
        requests: running requests of all groups.
        rows: "fp8" or "plain".
        draft_tokens: tokens of a verify step, with the rings and the weights of the checkpoint's draft; 0 without
            speculation.
        extra_slots: request slots of each group of a decode server for requests in transfer; None for a server that
            has the whole request.

    Raises:
        ValueError: the config can't be served, or the checkpoint has no draft.
    """
    from sglang_dsv4.cache.pool_plan import largest_plan

    config, decodes, options = config_of(model), extra_slots is not None, TailOptions.from_environment()
    geometry = geometry_of_checkpoint(model, fp8=rows == "fp8", draft_tokens=draft_tokens, transfers=decodes)
    tails = (lambda tokens, slots: 0) if decodes else options.slots_on_device
    drafts = f", {draft_tokens} tokens a verify step" if draft_tokens else ""
    extra = f", {extra_slots} slots a group for requests in transfer" if decodes else ""
    lines = [
        f"{gpus} GPUs of {gigabytes:g} GB, {MEMORY_SHARE:g} of it for weights and KV (--mem-fraction-static), "
        f"{requests} requests{extra}{drafts}; wo_a in FP8:",
        f"{'--attn-dp-size':>14} {'GPUs a group':>13} {'weights a GPU':>14} {'KV a GPU':>10} {'tokens in all':>14}",
    ]
    topologies = rank_bytes.topologies(config, gpus)
    if not topologies:
        return [f"{gpus} GPUs can't serve the model: {Topology(gpus).problem(config)}"]
    for topology in topologies:
        weights = rank_bytes.bytes_of_a_rank(config, topology, "fp8", draft=draft_tokens > 0)
        slots = -(-requests // topology.groups) + (extra_slots or 0) + 1
        left = gigabytes * 2**30 * MEMORY_SHARE - weights
        head = f"{topology.groups:>14} {topology.group_size:>13} {weights / 2**30:>10.1f} GiB"
        try:
            plan = largest_plan(geometry, int(left), lambda _, slots=slots: slots, tails)
            lines.append(f"{head} {left / 2**30:>6.1f} GiB {plan.full_tokens * topology.groups:>14,}")
        except ValueError:
            lines.append(f"{head} {left / 2**30:>6.1f} GiB {'do not fit':>14}")
    return lines


def server(url: str) -> list[str]:
    """The lines on a running server: its arguments and this package's metrics.

    Raises:
        ConnectionError: no server answers at the URL.
    """
    lines = []
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
            info = json.load(answer)
    except (urllib.error.URLError, TimeoutError) as error:
        raise ConnectionError(f"no server answers at {url}: {error}") from error
    for key in ("model_path", "radix_cache_backend", "attention_backend", "kv_cache_dtype", "max_total_num_tokens"):
        lines.append(f"{key}: {info.get(key)}")
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except urllib.error.URLError:
        return [*lines, "no metrics: the server was started without --enable-metrics"]
    return lines + sorted(line for line in text.splitlines() if line.startswith(("sglang_dsv4:", "sglang:kv_cache")))


def at_least(least: float, kind: type[int] | type[float]) -> Callable[[str], float]:
    """A converter for argparse: the number that an argument names, if it is finite and not below `least`."""

    def convert(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(least) - 1
        if not least <= number < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {what} of at least {least:g}, got {text!r}")
        return number

    return convert


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns 1 if the checkpoint or the server is missing, else 0."""
    parser = argparse.ArgumentParser(prog="python -m sglang_dsv4.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="a checkpoint's folder")
    tokens, count, size = at_least(FULL_PAGE_TOKENS, int), at_least(1, int), at_least(0, float)
    parser.add_argument("--tokens", type=tokens, default=65_536, help="tokens of the pool (--max-total-tokens)")
    parser.add_argument("--requests", type=count, default=32, help="running requests (--max-running-requests)")
    parser.add_argument("--rows", choices=("fp8", "plain"), default="fp8" if torch.cuda.is_available() else "plain")
    parser.add_argument("--hicache-ratio", type=size, default=2.0, help="tokens in host memory per token of the pool")
    parser.add_argument(
        "--hicache-size", type=size, default=0, help="GB of host memory for prefixes, instead of the ratio"
    )
    parser.add_argument("--gpus", type=count, help="ranks that share the model (--tp-size): the plan by --attn-dp-size")
    parser.add_argument("--gpu-memory", type=size, default=141, help="GB of a GPU as in its name, with --gpus")
    parser.add_argument(
        "--draft-tokens", type=at_least(2, int), default=0, help="with drafts (--speculative-num-draft-tokens)"
    )
    parser.add_argument(
        "--decode-extra-slots",
        type=at_least(0, int),
        help="the plan of a decode server, with so many slots for requests in transfer "
        "(--disaggregation-decode-extra-slots)",
    )
    parser.add_argument("--stages", type=count, default=1, help="stages of a pipeline (--pp-size): the plan of each")
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--versions", action="store_true", help="print versions alone, for a bug report")
    chosen = parser.parse_args(arguments)
    if chosen.versions:
        print("\n".join(versions()))
        return 0
    if chosen.stages > 1 and (chosen.draft_tokens or chosen.decode_extra_slots is not None):
        parser.error("--stages: neither a server that drafts nor a decode server has stages")
    print("\n".join(installation()))
    try:
        if chosen.model is not None:
            sizes = (chosen.tokens, chosen.requests, chosen.rows, chosen.hicache_ratio, chosen.hicache_size)
            further = {"draft_tokens": chosen.draft_tokens, "extra_slots": chosen.decode_extra_slots}
            if chosen.stages == 1:
                print("\n" + "\n".join(plan(chosen.model, *sizes, **further)))
            for stage in stages_of_checkpoint(chosen.model, chosen.stages) if chosen.stages > 1 else ():
                lines = [weights_of_stage(chosen.model, stage), *plan(chosen.model, *sizes, stage)]
                print("\n" + "\n".join(lines))
            if chosen.gpus is not None:
                shape = (chosen.gpus, chosen.gpu_memory, chosen.requests, chosen.rows)
                print("\n" + "\n".join(several_gpus(chosen.model, *shape, **further)))
        if chosen.url is not None:
            print("\n" + "\n".join(server(chosen.url.rstrip("/"))))
    except (OSError, ValueError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
