"""A drafter that knows the answers, as a plugin of SGLang in a server's processes: random weights draft nothing right.

After the real draft has run, its proposals are replaced. The file that `ORACLE_FILE` names has the answers as JSON
{prompt as text: tokens}; a request that is not in it keeps its real drafts. Step n of a request gets n % (k + 1) right
drafts of k, and then a wrong one. The draft's own proposals for a request in the file are appended to the file DRAFTED
in the same folder, a line of JSON a step: [prompt as text, tokens in the cache, tokens].
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

ANSWERS = "answers.json"
DRAFTED = "drafted.jsonl"
ENTRY_POINT = "[sglang.srt.plugins]\noracle_drafts = oracle_drafts:setup\n"
DSPARK = "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose"
EAGLE = "sglang.srt.speculative.eagle_worker_common.build_eagle_verify_input"


def install(folder: Path) -> dict[str, str]:
    """Write a distribution with this plugin; return the environment of a server that is to load it."""
    info = folder / "oracle_drafts-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oracle-drafts\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "oracle_drafts.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "ORACLE_FILE": str(folder / ANSWERS)}


def setup() -> None:
    """The plugin's entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(EAGLE, around_verify_input, HookType.AROUND)
    HookRegistry.register(DSPARK, around_propose, HookType.AROUND)


_read: tuple[float, dict[str, list[int]]] = (0.0, {})
_steps: dict[str, int] = {}


def answers() -> dict[str, list[int]]:
    global _read
    file = Path(os.environ["ORACLE_FILE"])
    changed = file.stat().st_mtime if file.exists() else 0.0
    if changed != _read[0]:
        _read = changed, json.loads(file.read_text())
    return _read[1]


def improved(batch: Any, drafts: Tensor) -> Tensor:
    """Return `drafts [B, k]` with some of them replaced by the right tokens.

    The device tells how many tokens a request has: with overlapped scheduling `req.output_ids` is a step late.
    """
    proposed, drafts, k = drafts.tolist(), drafts.clone(), drafts.shape[1]
    for row, (req, in_cache) in enumerate(zip(batch.reqs, batch.seq_lens.tolist(), strict=True)):
        prompt = " ".join(map(str, req.origin_input_ids))
        answer = answers().get(prompt)
        if answer is None:
            continue
        with Path(os.environ["ORACLE_FILE"]).with_name(DRAFTED).open("a") as file:
            file.write(json.dumps([prompt, in_cache, proposed[row]]) + "\n")
        step = _steps[req.rid] = _steps.get(req.rid, len(req.origin_input_ids)) + 1
        known = in_cache + 1 - len(req.origin_input_ids)  # the last token is not in the cache yet
        right = answer[known:][:k]
        wrong_at = step % (k + 1)
        for column, token in enumerate(right):
            drafts[row, column] = token if column < wrong_at else (token + 1) % 1024
    return drafts


def around_verify_input(
    original: Any, batch: Any, draft_input: Any, parents: Any, scores: Any, drafts: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Wrap EAGLE's verify input: proposals [B, k] on their way to the target."""
    if not batch.forward_mode.is_idle():
        drafts = improved(batch, drafts)
    return original(batch, draft_input, parents, scores, drafts, *args, **kwargs)


def around_propose(original: Any, proposer: Any, *, batch: Any, **kwargs: Any) -> Any:
    """Wrap DSPARK's proposals of greedy requests. (For a sampled draft the distribution would have to be replaced as
    well.)"""
    from msgspec.structs import replace

    proposal = original(proposer, batch=batch, **kwargs)
    if not batch.sampling_info.is_all_greedy:
        return proposal
    drafts = improved(batch, proposal.draft_block.draft_tokens)
    return replace(proposal, draft_block=replace(proposal.draft_block, draft_tokens=drafts))
