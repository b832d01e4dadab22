"""What runs inside a CUDA graph, and when there are none.

Of a decode, verify or draft forward a graph holds everything from
`Dsv4AttentionBackend.init_forward_metadata_in_graph`, which derives all addresses from the lengths and request slots of
the batch where SGLang's runner has filled them, to the logits. Outside stay what needs the host: tail checkpoints
(`prefix.tails`), sampling. A prefill is not captured: its sizes are the batch's.

With speculation there are graphs of the target's verify step (all drafts of a request and the token before them), of a
DSpark draft's block with its Markov head, and of an MTP draft's chain of steps and its extend step. What DSpark's
worker does behind a verify step is in that step's graph, too:

    SGLANG_DSV4_VERIFY_EPILOGUE    on: which drafts are kept, and the context rows of the tokens that are, are the end
                                   of the verify step's graph, for batches that are greedy, without penalties, biases
                                   and grammars. off: the host launches them; the same bits. Default: on with one rank,
                                   off with several, whose graphs would have SGLang's broadcast of rank 0's choice in
                                   them, which has not run here.

An op can be captured if it reads nothing back to the host; the registry knows which (`graph_safe`). References do, so
there are no graphs until every op of a decode step has a kernel.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dsv4 import env
from sglang_dsv4.seam import compat

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

logger = logging.getLogger(__name__)

VERIFY_EPILOGUE = "SGLANG_DSV4_VERIFY_EPILOGUE"

STEP_OPS = (
    "apply_rope_in_place",
    "compress_store",
    "fp8_quantise",
    "fused_swiglu",
    "grouped_linear",
    "hc_boundary",
    "hc_enter",
    "hc_finish",
    "index_query",
    "index_topk",
    "linear_fp32",
    "norm_rope_store",
    "rms_norm",
    "rms_norm_fp8",
    "route_hash_logits",
    "route_topk_logits",
    "sparse_attention",
    "step_mapping",
    "swiglu_fp8",
)
"""Ops of a decode, verify or draft step."""


def resolve_cuda_graphs(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """SGLang's resolution step of that name: no CUDA graphs while an op of the forward can't be captured."""
    from sglang_dsv4.attention import comparison

    arguments = compat.resolving_view(server_args)
    hf_config = compat.model_config_of(server_args).hf_config
    if compat.is_ours(hf_config.architectures) and arguments.device == "cuda":
        uncapturable = uncapturable_ops("cuda", hf_config.head_dim)
        if comparison.file_of_rank(0) is not None:
            uncapturable.append("the attention that is compared")
        off = {"disable_prefill_cuda_graph": True}
        if uncapturable:
            logger.warning("sglang_dsv4: CUDA graphs are off, these ops run as references: %s", ", ".join(uncapturable))
            off["disable_decode_cuda_graph"] = True
        compat.declare_resolution(server_args, "sglang_dsv4", **off)
    previous(server_args)


def uncapturable_ops(device: str, head_dim: int) -> list[str]:
    """The ops of a decode step whose implementation on ``device`` can't be captured in a CUDA graph."""
    import torch

    from dsv4_kernels import registry
    from sglang_dsv4.attention.implementation import chosen_implementation

    on = torch.device(device)
    chosen = {op: registry.chosen(op, on, torch.bfloat16) for op in STEP_OPS}
    chosen["sparse_attention"] = chosen_implementation(on, torch.bfloat16, head_dim)
    return [op for op, implementation in chosen.items() if not implementation.graph_safe]


def capture_draft_extend(worker: EagleDraftWorker) -> None:
    """Record an MTP draft's extend step, which follows every verify step, unless graphs are off or SGLang has."""
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
    """After SGLang has asked for the model type of DSpark's target: the one for which `DsparkVerifyEpilogue` ends a
    verify step's graph, if that is to be.

    Two things more follow from that type. The argmax of verify logits is by `row_argmax` of
    `sglang.kernels.ops.speculative`, with torch's ties and in less time; and requests' lengths are bounded for a
    backend that asks for it, as ours does not. The epilogue stores context rows by the draft's
    `write_target_hidden_kv`, as is done without a graph; with -1 in place of the ring rows of tokens that are not kept,
    and of all tokens where the epilogue does not serve the batch.

    Raises:
        ValueError: the switch is neither on nor off.
    """
    from sglang.srt.runtime_context import get_parallel

    if not compat.is_ours(target_worker.model_runner.model_config.hf_config.architectures):
        return model_type
    by_default = "on" if get_parallel().tp_size == 1 else "off"
    if (env.choice(VERIFY_EPILOGUE) or by_default) == "off":
        return model_type
    _say_once("sglang_dsv4: graphs of verify steps end with which of DSpark's drafts are kept")
    return "deepseek_v41"


@functools.cache
def _say_once(line: str) -> None:
    logger.info(line)
