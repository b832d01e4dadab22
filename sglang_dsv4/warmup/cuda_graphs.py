"""CUDA graphs: which forwards they capture, and when they are switched off.

The graph of a decode, verify or draft step begins with `Dsv4AttentionBackend.init_forward_metadata_in_graph`, which
derives all addresses from the lengths and request slots in the buffers that SGLang's runner fills, and ends with the
logits. Work that needs the host stays outside: tails (`prefix.restore_and_save`) and sampling. Prefills are recorded by
`prefill_graphs`.

With speculation SGLang captures the target's verify step (all drafts of a request and the token before them), a DSpark
draft's block with its Markov head, an MTP draft's chain of steps, and its extend step. The work that DSpark's worker
does after a verify step can be captured at the end of that step's graph:

    SGLANG_DSV4_VERIFY_EPILOGUE    on: draft acceptance, and the context rows of accepted tokens, are computed in the
                                   verify graph, for greedy batches without penalties, biases and grammars. off: the
                                   host launches them; the bits are the same. Default: on with one rank; off with
                                   several, since their graphs would contain SGLang's broadcast of rank 0's choice,
                                   which this project has never run.

An op can be captured if it reads nothing back to the host (`graph_safe` in `dsv4_kernels.ops`). Some references do read
back, so graphs are off until every op of a decode step has a kernel.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv4_kernels.model_shapes import Option
from sglang_dsv4 import env
from sglang_dsv4.seam import compat

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.cuda_graph_config import PhaseConfig
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

logger = logging.getLogger(__name__)

VERIFY_EPILOGUE = "SGLANG_DSV4_VERIFY_EPILOGUE"

BREAKABLE, DISABLED = "breakable", "disabled"
"""Backends of SGLang's CUDA graphs; graphs of prefills are `breakable`."""
FEWEST_PREFILL_TOKENS = 256
"""Fewest tokens of a graph by default, if chunks are not shorter."""
MOST_PREFILL_TOKENS = 8192
"""Most tokens of a graph where prompts are not divided into chunks."""
_OPTIONS = frozenset({Option.FP8_WO_A, Option.FP8_LINEAR})
"""Options that are decided when the model is built, after graphs are decided: their ops must always be capturable."""


def resolve_cuda_graphs(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Switch CUDA graphs off if an op of the forward can't be captured; SGLang's resolution step runs in between.

    SGLang's own runner of prefill graphs is always off. Where the user asks for `breakable` graphs of prefills, by the
    flag or by --cuda-graph-config, `cuda_graph_backend_prefill` tells `prefill_graphs`.

    Raises:
        ValueError: the user asks for graphs, which can't be captured, or for graphs of prefills beside a flag that
            excludes them or of too few tokens; names the ops, the flag or the sizes.
    """
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase

    from sglang_dsv4.seam.refused_combinations import refuse_with_recorded_prefills

    arguments = compat.resolving_view(server_args)
    hf_config = compat.model_config_of(server_args).hf_config
    if not compat.is_ours(hf_config.architectures):
        previous(server_args)
        return
    uncapturable, off = [], {"disable_prefill_cuda_graph": True}
    if arguments.device == "cuda":
        uncapturable = [*uncapturable_ops("cuda", hf_config.head_dim), *_searches()]
    if uncapturable:
        logger.warning("sglang_dsv4: CUDA graphs are off, these ops run as references: %s", ", ".join(uncapturable))
        off["disable_decode_cuda_graph"] = True
    compat.declare_resolution(server_args, "sglang_dsv4", **off)
    previous(server_args)
    graphs = compat.resolving_view(server_args).cuda_graph_config  # flags that choose a backend go before `off`
    for phase, steps in ((Phase.DECODE, "decode steps"), (Phase.PREFILL, "prefills")):
        if uncapturable and (backend := graphs[phase].backend) != DISABLED:
            raise ValueError(
                f"sglang-dsv4 does not support CUDA graphs of {steps} ({backend}) here: {', '.join(uncapturable)} "
                f"can't be captured. Leave out --cuda-graph-backend-{phase} and the backend of --cuda-graph-config."
            )
    if graphs.prefill.backend == BREAKABLE:
        refuse_with_recorded_prefills(arguments)
        prefill_sizes(graphs.prefill)  # refuses sizes that can't be recorded before the weights are loaded
        graphs = with_phase(graphs, Phase.PREFILL, backend=DISABLED)
        ours = {"cuda_graph_config": graphs, "cuda_graph_backend_prefill": BREAKABLE}
        compat.declare_resolution(server_args, "sglang_dsv4", **ours)


def default_prefill_sizes(most: int) -> list[int]:
    """The numbers of tokens that are recorded for chunks of up to `most`: two in each octave, in rising order."""
    found = {most}
    size = most
    while size // 2 >= FEWEST_PREFILL_TOKENS:
        found |= {size // 2, size // 4 * 3}
        size //= 2
    return sorted(found)


def prefill_sizes(config: PhaseConfig) -> list[int]:
    """The numbers of tokens that the user chose to record, or `default_prefill_sizes`.

    Raises:
        ValueError: a forward of so few tokens has a second stream, which can't cross a break.
    """
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes

    from sglang_dsv4.layers import concurrent

    most = config.max_bs if config.max_bs and config.max_bs > 0 else MOST_PREFILL_TOKENS
    by_default = config.bs in (None, generate_prefill_cuda_graph_batch_sizes(config.max_bs or 0))
    if not by_default and min(config.bs) <= concurrent.MOST_TOKENS:
        raise ValueError(
            f"--cuda-graph-bs-prefill must be numbers of tokens above {concurrent.MOST_TOKENS}, got {config.bs}; "
            "shorter prefills run without graphs"
        )
    return default_prefill_sizes(most) if by_default else sorted(config.bs)


def _searches() -> list[str]:
    """Searches for errors that are on and read back."""
    from sglang_dsv4.attention import comparison
    from sglang_dsv4.layers import finite

    compares = comparison.file_of_rank(0) is not None
    found = ["the attention that is compared"] if compares else []
    return found + (["the search for numbers that are not finite"] if finite.is_on() else [])


def uncapturable_ops(device: str, head_dim: int) -> list[str]:
    """Ops of a decode, verify or draft step whose implementation on this device type can't be captured."""
    import torch

    from dsv4_kernels import ops, registry
    from sglang_dsv4.attention.implementation import required_implementation

    named = {"sparse_attention": required_implementation(torch.device(device), head_dim)}
    return [
        op
        for op in ops.step_ops(device, _OPTIONS)
        if not registry.chosen(op, torch.device(device), torch.bfloat16, named.get(op)).graph_safe
    ]


def capture_draft_extend(worker: EagleDraftWorker) -> None:
    """Capture an MTP draft's extend step, which follows every verify step, unless graphs are off or it is captured."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    disabled = get_exec().graph.cuda_graph_config.decode.backend == Backend.DISABLED
    if disabled or envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get() or not current_platform.capabilities.graph_capture:
        return
    if worker.cuda_graph_runner_for_draft_extend is None:
        begin = time.perf_counter()
        worker.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(worker)
        logger.info("CUDA graphs of the draft's extend step: %.1f s", time.perf_counter() - begin)


def model_type_for_epilogue(model_type: str | None, target_worker: TpModelWorker) -> str | None:
    """The model type to report to SGLang for DSpark's target, given the type that SGLang found.

    For "deepseek_v41" SGLang ends a verify step's graph with `DsparkVerifyEpilogue`. The type has two more effects. The
    argmax of verify logits is `row_argmax` of `sglang.kernels.ops.speculative`, which breaks ties as torch does and
    takes less time; and requests' lengths are bounded for backends that ask for a bound, which ours does not. The
    epilogue stores context rows by the draft's `write_target_hidden_kv`, as SGLang does without a graph; the ring row
    is -1 for tokens that are not accepted, and for all tokens where the epilogue does not serve the batch.

    Raises:
        ValueError: the switch is neither on nor off, or on with attention data parallelism.
    """
    from sglang.srt.runtime_context import get_parallel

    if not compat.is_ours(target_worker.model_runner.model_config.hf_config.architectures):
        return model_type
    if env.choice(VERIFY_EPILOGUE) == "on" and get_parallel().attn_dp_size > 1:
        raise ValueError(f"sglang-dsv4 does not support {VERIFY_EPILOGUE}=on with --attn-dp-size above 1: unset it")
    by_default = "on" if get_parallel().tp_size == 1 else "off"
    if (env.choice(VERIFY_EPILOGUE) or by_default) == "off":
        return model_type
    _log_once("sglang_dsv4: draft acceptance is captured in the graphs of verify steps")
    return "deepseek_v41"


@functools.cache
def _log_once(line: str) -> None:
    logger.info(line)
