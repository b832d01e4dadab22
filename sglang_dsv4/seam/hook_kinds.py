"""A row of the table of hooks, `hooks.HOOKS`: its columns, how it is installed, and in which processes.

At the end: names and reasons that rows of several subjects share.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

NAME = "dsv4"
"""The name of the attention backend, the prefix cache and the MoE runner."""


class Kind(Enum):
    """How a row is installed; :data:`KINDS` explains each."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"
    RESOLUTION = "resolution step"
    REGISTRY = "registry"
    DECORATOR = "registry (decorator)"
    NAME = "registry (name)"
    CHOICE = "choice"
    ENVIRONMENT = "environment"
    ATTRIBUTE = "attribute"
    ENTRY_POINT = "entry point"


KINDS = {
    Kind.BEFORE: "SGLang's hook registry: called with the target's arguments, which it may replace or refuse",
    Kind.AFTER: "SGLang's hook registry: called with the target's result and arguments; may return another result",
    Kind.AROUND: "SGLang's hook registry: called instead of the target, with the target and its arguments",
    Kind.REPLACE: "SGLang's hook registry: called instead of the target, which is never called",
    Kind.RESOLUTION: "`register_resolution_hook`: called with the server arguments and SGLang's own step of that name",
    Kind.REGISTRY: f'`target("{NAME}", ours)`',
    Kind.DECORATOR: f'`target("{NAME}")(ours)`',
    Kind.NAME: f'`target("{NAME}")`: makes the name known; the function named is the one that serves it',
    Kind.CHOICE: f'`target(["{NAME}"])`: makes a flag accept the name; the function named is the one that serves it',
    Kind.ENVIRONMENT: "a variable that is set unless the user set it; the processes that SGLang spawns inherit it",
    Kind.ATTRIBUTE: "an attribute of one of SGLang's objects: `owner.attribute = ours(before, owner)`",
    Kind.ENTRY_POINT: "found by SGLang or by Python before any plugin is loaded",
}


NOT_CALLED = (Kind.NAME, Kind.CHOICE, Kind.ENVIRONMENT)
"""Kinds whose function SGLang does not get from the row."""


class Process(Enum):
    """The processes of a server in which a row is installed."""

    EVERY = "every"  # the launcher, the schedulers, the detokenizer
    LAUNCHER = "launcher"  # the process that answers clients
    SCHEDULER = "scheduler"  # each process that has imported SGLang's scheduler before it loads plugins


class Hook(NamedTuple):
    """One row. Rows are installed in the table's order; of several hooks on one target the last is the outermost."""

    target: str
    kind: Kind
    process: Process
    function: str  # of ours, "module:attribute"
    why: str
    until: str  # the change to SGLang after which the row can go
    only_cpu: bool = False  # installed only where `cpu.platform` is the platform


RUNNER = "sglang.srt.model_executor"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
EAGLE_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
REQUESTS = "sglang_dsv4.requests"
REFUSED = f"{REQUESTS}.refused"

VALIDATES = "SGLang validates the value and answers 400"
SURVIVES = "SGLang's scheduler survives a handler that raises"
UPDATES = "SGLang's weight updates are all or nothing"
NOT_FINITE = "SGLang ends a request whose logits are not finite, with a reason"
ASKS_PLATFORM = "SGLang asks the platform first"
