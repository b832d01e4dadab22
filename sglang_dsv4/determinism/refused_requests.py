"""Requests whose bits depend on other requests, under `--enable-deterministic-inference`: they get a 400."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsv4.determinism.flag import FLAG

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def reason_against(req: Req, on_gpu: bool, speculative_algorithm: str | None) -> str | None:
    """Why a request's bits would depend on the other requests, for a 400; None if they don't.

    Args:
        req: the request.
        on_gpu: whether the model is on a GPU. On a CPU nothing is refused.
        speculative_algorithm: the server's.
    """
    if not on_gpu:
        return None
    params = req.sampling_params
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    for name, value in neutral.items():
        if getattr(params, name) != value:
            return (
                f"{name} is not supported by a server with {FLAG} on a GPU: that its bits are the same in every batch "
                "was tested on a CPU only. Send none."
            )
    if speculative_algorithm is not None and params.top_k > 1:
        return (
            f"sampling is not supported by a server with {FLAG} and --speculative-algorithm on a GPU: what is drawn "
            "would depend on which drafts were accepted. Send temperature 0."
        )
    return None
