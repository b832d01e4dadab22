"""One launch in place of several whose kernels do not depend on each other.

A decode step of few tokens launches many kernels that each take as long as a launch does. Inside `joined()`, a kernel
that can be a part of a joint launch is only noted; at the end of the block all noted kernels are launched as one, whose
CTAs run the code of one part each. So the bits are those of separate launches. Calls inside a block must not depend on
each other, and nothing may read their results before its end. Kernels that cannot be a part are launched at once.

Inside `chained()` kernels may depend on the ones before: they are one part, of one CTA that runs them one after the
other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4_kernels.host.launch import load_launcher

MOST_PARTS = 3
CHAIN_THREADS = 1024
MOST_TOKENS = {"sm90": 16, "sm100": 64}
"""Implementation -> tokens up to which forwards join launches. With more tokens Hopper's products fill the GPU one by
one. On Blackwell parts are no products; by the model of time (docs/step_model.md) each takes as long as a launch."""


def nothing_to_prepare(arguments: object, configuration: object) -> tuple:
    """For kernels that need nothing but their arguments."""
    return ()


@dataclass(frozen=True)
class Part:
    """A kernel that can be a part of a joint launch, in one configuration. Equal names and configurations mean equal
    code."""

    name: str
    configuration: Hashable
    """The compile-time parameters; their repr is a key on disk."""
    arguments: type
    """NamedTuple of its dynamic arguments."""
    body: Callable[..., None]
    """Device code: (arguments, configuration, prepared, cta: `joint_kernel.Cta`)."""
    threads: int
    cluster: int = 1
    ctas_per_sm: int = 1
    """CTAs of the joint launch that a multiprocessor must have registers for."""
    prepare: Callable[[Any, Any], tuple] = nothing_to_prepare
    """Host code of the launch function: (arguments, configuration) -> values for the body, such as TMA descriptors."""
    links: tuple[Part, ...] = ()
    """The kernels of a chain, which are its body's configuration."""

    @property
    def key(self) -> tuple:
        """Name and configuration."""
        return self.name, tuple(link.key for link in self.links) or self.configuration

    def __reduce_ex__(self, protocol: int) -> tuple:
        """The pickled form: of a chain its kernels, because the type of its arguments belongs to no module."""
        return (chain, (self.links,)) if self.links else super().__reduce_ex__(protocol)


class _Noted(NamedTuple):
    part: Part
    arch: str
    arguments: tuple
    ctas: int
    stream: object
    inputs: tuple
    alone: Callable[[], object]


_of_thread = threading.local()


def is_open() -> bool:
    """Whether this thread is inside `joined()`."""
    return getattr(_of_thread, "noted", None) is not None


def in_chain() -> bool:
    """Whether this thread is inside `chained()` of a block: a kernel has one CTA of CHAIN_THREADS threads there."""
    return getattr(_of_thread, "chain", False)


@contextlib.contextmanager
def chained() -> Iterator[None]:
    """Kernels called inside, within `joined()`, run one after the other in one CTA. Without a block it does nothing.

    Raises:
        RuntimeError: a kernel has more CTAs, or other threads: it was not made for a chain.
    """
    if not is_open():
        yield
        return
    outer, links = _of_thread.noted, []
    _of_thread.noted, _of_thread.chain = links, True
    try:
        yield
    finally:
        _of_thread.noted, _of_thread.chain = outer, False
    wrong = [link.part.name for link in links if (link.ctas, link.part.threads) != (1, CHAIN_THREADS)]
    if wrong:
        raise RuntimeError(f"kernels in a chain have one CTA of {CHAIN_THREADS} threads: not so {', '.join(wrong)}")
    if links:
        part = chain(tuple(link.part for link in links))
        run(
            part,
            links[0].arch,
            part.arguments(*(link.arguments for link in links)),
            1,
            links[0].stream,
            tuple(tensor for link in links for tensor in link.inputs),
            alone=lambda: [link.alone() for link in links],
        )


@functools.cache
def chain(links: tuple[Part, ...]) -> Part:
    """The part of kernels that run one after the other in one CTA."""
    from dsv4_kernels.device.joint_kernel import one_after_the_other

    return Part("chain", links, _arguments(links), one_after_the_other, threads=CHAIN_THREADS, links=links)


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Kernels that can be parts, called inside, are launched as one at the end; a single one by a launch of its own.

    Raises:
        RuntimeError: a block inside another one, or more than MOST_PARTS parts.
    """
    if is_open():
        raise RuntimeError("joint_launch.joined() inside another one: its kernels would be launched too late")
    noted: list[_Noted] = []
    _of_thread.noted = noted
    try:
        yield
    finally:
        _of_thread.noted = None
    if len(noted) > MOST_PARTS:
        names = ", ".join(one.part.name for one in noted)
        raise RuntimeError(f"a joint launch has at most {MOST_PARTS} parts; got {len(noted)}: {names}")
    if len(noted) == 1:
        noted[0].alone()
    elif noted:
        _launch(noted)


def run(
    part: Part,
    arch: str,
    arguments: tuple,
    ctas: int,
    stream: object,
    inputs: tuple,
    alone: Callable[[], object],
) -> None:
    """Launches a kernel by itself, or adds it to the block of `joined()` that is open.

    Args:
        part: the kernel.
        arch: "sm_90a".
        arguments: of the type `part.arguments`.
        ctas: of the part; whole clusters, if it has any.
        stream: of the launch.
        inputs: tensors that the kernel reads, whose memory must not be given to another tensor before the launch.
        alone: launches the kernel by itself; also called at the end of a block that has no other part.
    """
    if is_open():
        _of_thread.noted.append(_Noted(part, arch, arguments, ctas, stream, inputs, alone))
    else:
        alone()


def _launch(noted: Sequence[_Noted]) -> None:
    parts = tuple(one.part for one in noted)
    kinds = _kinds(parts)
    counts = [one.ctas for one in noted] + [0] * (MOST_PARTS - len(noted))
    assert len({(one.arch, int(one.stream)) for one in noted}) == 1, noted
    arguments = kinds.arguments(*(one.arguments for one in noted))
    compile(parts, noted[0].arch)(arguments, kinds.counts(*counts), noted[0].stream)


class _Kinds(NamedTuple):
    arguments: type
    counts: type


@functools.cache
def _kinds(parts: tuple[Part, ...]) -> _Kinds:
    """Types of a joint launch's dynamic arguments."""
    from dsv4_kernels.device.joint_kernel import Counts

    return _Kinds(_arguments(parts), Counts)


@functools.cache
def _arguments(parts: tuple[Part, ...]) -> type:
    return NamedTuple("Arguments", [(f"part_{i}", part.arguments) for i, part in enumerate(parts)])


def compile(parts: tuple[Part, ...], arch: str) -> Callable[..., None]:
    """The compiled launch function, from memory, from disk or from the compiler: (arguments, counts, stream)."""
    from dsv4_kernels.device.joint_kernel import launch

    kinds = _kinds(parts)
    config = tuple(part.key for part in parts)
    return load_launcher("joint", config, arch, launch, kinds.arguments, kinds.counts, parts)
