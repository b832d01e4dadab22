"""Faults planted in the PTX of this project's own kernels, with the error that the emulator must raise for each.

A fault is an edit of the compiled PTX by pattern, so that it survives new names and files of a kernel; a pattern that
no longer matches is an error. As in planted_faults.py, `kinds` are the error kinds that may report it and `says` must
match the message. A launch that ends without an error and with other results has the kind "wrong result".
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from ptx_emulator import Checks, Options, Recording, emulated
from ptx_emulator.campaigns.planted_faults import Caught, delete, replay, substitute

SCOPE = r"scope"
SCHEDULES = ("late", "random", "random_warps")
RUNAWAY_FACTOR = 8
"""A wrong launch may execute this many times the instructions of the right one; beyond, it fails
(`instruction_limit`)."""


@dataclass(frozen=True)
class KernelFault:
    """An edit of one kernel's PTX, and the error that it must raise."""

    kernel: str  # a key of LAUNCHES
    name: str
    kinds: str  # names of error kinds, separated by blanks
    says: str
    edit: Callable[[str], str]
    quick: bool = False


# ---- one launch of each kernel


@contextlib.contextmanager
def _compiled_for_this_device() -> Iterator[None]:
    """No kernel comes from the disk cache; caches that know another emulated device are cleared before and after."""
    import sys

    from dsv4_kernels.host import compile_cache
    from dsv4_kernels.sparse_attention import scratch

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("dsv4_kernels."):
                for value in vars(module).values():
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()

    with (
        mock.patch.dict("os.environ", {compile_cache.FOLDER_VARIABLE: "off"}),
        mock.patch.object(compile_cache, "_in_memory", {}),
        mock.patch.object(scratch, "_by_stream", {}),
    ):
        forget()
        yield
        forget()


def _attention(generation: str, arch: str, multiprocessors: int, **spec: object) -> Recording:
    from ops.attention_cases import Spec, build

    from dsv4_kernels import ops, registry
    from dsv4_kernels.sparse_attention import sparse_attention

    name, op = f"emulated {generation}", "sparse_attention"
    loader = f"dsv4_kernels.sparse_attention.launch:{generation}"
    row = registry.Implementation(name, loader, ops.any_device, -1)
    options = {"arch": arch, "multiprocessors": multiprocessors, "checks": Checks.strict(), "record": True}
    with (
        mock.patch.dict(registry._table[op], {name: row}),
        mock.patch.object(registry, "_resolved", {}),
        _compiled_for_this_device(),
        emulated(**options) as device,
    ):
        sparse_attention(**build(Spec(**spec)).arguments(), impl=name)
    (recording,) = device.recordings
    return recording


def _unpacking() -> Recording:
    """A launch over two tables: pages of one row and of two, holes, and a different scale for every group of
    channels."""
    from dsv4_kernels.kv_layout import KVRows, RowFormat
    from dsv4_kernels.unpack import Pages, gpu

    generator = torch.Generator().manual_seed(0)
    parts = []
    for rows_per_page, numbers in ((1, [70, 5, 64, -1, 63, 0, 191, 128]), (2, [40, 7, -1, 8, 100, 3, 99, 98, 97, 96])):
        rows = KVRows.allocate(256, RowFormat.FP8, 512, 64, torch.bfloat16, "cpu", float("nan"))
        named = [page * rows_per_page + row for page in numbers if page >= 0 for row in range(rows_per_page)]
        values = torch.randn(len(named), 512, generator=generator) * torch.exp2(torch.arange(512) // 64 * 2.0)
        rows.scatter(torch.tensor(named), values.bfloat16())
        parts.append(Pages(rows, torch.tensor(numbers, dtype=torch.int32), rows_per_page))
    out = torch.full((sum(part.num_rows for part in parts) + 8, 512), -7.0, dtype=torch.bfloat16)
    with (
        _compiled_for_this_device(),
        emulated(arch="sm_90a", checks=Checks.strict(), record=True) as device,
    ):
        gpu.sm90(parts, out[:-8])
    return device.recordings[0]


BLACKWELL, HOPPER, CLUSTERS, UNPACKING = "Blackwell attention", "Hopper attention", "Hopper clusters", "unpacking"
LAUNCHES: dict[str, Callable[[], Recording]] = {
    # KV splits, holes, lengths that end within a tile; more work tiles than CTAs.
    BLACKWELL: lambda: _attention(
        "sm100", "sm_100a", 2, tokens=3, heads=16, entry_lengths=(200, 5, 60), split_keys=256
    ),
    # The persistent kernel: whole tokens, and tokens whose KV splits are spread over several CTAs.
    HOPPER: lambda: _attention(
        "sm90", "sm_90a", 4, tokens=8, window_lengths=(128, 3), entry_lengths=(200, 5, 700), split_keys=256
    ),
    # One CTA for every key tile of a token: clusters of three, two and one.
    CLUSTERS: lambda: _attention("sm90", "sm_90a", 18, tokens=3, heads=40, entry_lengths=(200, 5, 0)),
    UNPACKING: _unpacking,
}


@functools.cache
def launched(kernel: str) -> tuple[Recording, int]:
    """A right launch, and the instruction limit of its faulty replays."""
    recording = LAUNCHES[kernel]()
    assert (max(recording.cluster) > 1) == (kernel == CLUSTERS), "another kernel was chosen"
    most = 0
    for schedule in SCHEDULES:
        report, memory = recording.replay(Options(schedule=schedule, seed=1, checks=Checks.strict()))
        assert memory == recording.results, f"{kernel}: other results under {schedule}"
        most = max(most, report.instructions)
    return recording, RUNAWAY_FACTOR * most


def catch_in_kernel(fault: KernelFault) -> Caught | None:
    """How the fault is noticed, or None."""
    recording, limit = launched(fault.kernel)
    changed = fault.edit(recording.ptx)
    assert changed != recording.ptx
    return replay(recording, changed, recording.results, Checks.strict(), limit)


# ---- edits


def scope(instruction: str, before: str, after: str, nth: int = 0) -> Callable[[str], str]:
    """An edit that changes the scope of the nth such instruction."""
    return substitute(rf"(?<=\b{re.escape(instruction)}\.){before}\b", after, nth)


def arrivals_expected(count: int, nth: int) -> Callable[[str], str]:
    """An edit that initialises the nth mbarrier for `count` arrivals."""
    return substitute(r"(mbarrier\.init[^,;]*, )%r\d+", rf"\g<1>{count}", nth)


def no_wait(nth: int) -> Callable[[str], str]:
    """An edit that makes the nth mbarrier wait succeed at once; inline assembly may declare its predicate."""
    return substitute(r"mbarrier\.try_wait[\w.:]*\s+(%?\w+),[^;]*;", r"mov.pred \1, -1;", nth)


PEER_ARRIVAL = r"mbarrier\.arrive(?:\.release\.cluster)?\.shared::cluster"
PEER_WAIT = r"try_wait\.parity\.acquire\.cluster"
TABLE_ROW = r"(mul\.wide\.[su]32\s+%rd\d+, %r\d+, )576"


def _blackwell() -> list[KernelFault]:
    """The merge of KV splits: every CTA publishes its partial result, and the CTA that counts last merges them."""

    def fault(name: str, edit: Callable[[str], str], says: str = SCOPE) -> KernelFault:
        return KernelFault(BLACKWELL, name, "global_race", says, edit, quick=True)

    release, acquire = 0, 1
    return [
        fault("part published to the CTA only", scope("fence.acq_rel", "gpu", "cta", release)),
        fault("part published to the cluster only", scope("fence.acq_rel", "gpu", "cluster", release)),
        fault("parts of the CTA only acquired", scope("fence.acq_rel", "gpu", "cta", acquire)),
        fault("parts of the cluster only acquired", scope("fence.acq_rel", "gpu", "cluster", acquire)),
        fault("counter of parts of CTA scope", substitute(r"atom\.global\.inc", "atom.relaxed.cta.global.inc")),
        fault("part not published", delete(r"fence\.acq_rel\.gpu", release)),
        fault("parts not acquired", delete(r"fence\.acq_rel\.gpu", acquire)),
    ]


def _hopper() -> list[KernelFault]:
    def fault(name: str, kinds: str, says: str, edit: Callable[[str], str], quick: bool = False) -> KernelFault:
        return KernelFault(HOPPER, name, kinds, says, edit, quick)

    between_ctas = [
        *(
            fault(
                f"partial result released to the CTA only, {n}",
                "global_race",
                SCOPE,
                scope("red.release", "gpu", "cta", n),
                n == 0,
            )
            for n in (0, 1)
        ),
        *(
            fault(
                f"partial result not released, {n}",
                "global_race",
                SCOPE,
                substitute(r"red\.release\.gpu", "red.relaxed.gpu", n),
            )
            for n in (0, 1)
        ),
        *(
            fault(
                f"partial result acquired from the CTA only, {n}",
                "global_race",
                SCOPE,
                scope("ld.acquire", "gpu", "cta", n),
                n == 1,
            )
            for n in (0, 1)
        ),
        *(
            fault(
                f"partial result not acquired, {n}",
                "global_race",
                SCOPE,
                substitute(r"ld\.acquire\.gpu", "ld.relaxed.gpu", n),
            )
            for n in (0, 1)
        ),
        fault("end of the launch counted within the CTA", "global_race", SCOPE, scope("atom.acq_rel", "gpu", "cta")),
        fault(
            "end of the launch counted without order",
            "global_race",
            SCOPE,
            substitute(r"atom\.acq_rel\.gpu", "atom.relaxed.gpu"),
        ),
    ]
    pipeline = [
        *(
            fault(
                f"consumer does not wait for stage, {n}", "race uninitialised_smem", r"warp \d+|nothing has", no_wait(n)
            )
            for n in range(9)
        ),
        *(
            fault(f"producer does not wait for a free stage, {n}", "race", r"through wgmma", no_wait(n))
            for n in (9, 10, 11)
        ),
        # The fence 0 lies between cp.async and wgmma, where the emulator does not require it.
        *(
            fault(f"no proxy fence, {n}", "proxy_fence", r"fence\.proxy\.async", delete(r"fence\.proxy\.async", n))
            for n in range(1, 9)
        ),
        *(
            fault(f"no wgmma.wait_group, {n}", "wgmma_wait", r"wait_group", delete(r"wgmma\.wait_group", n))
            for n in range(5)
        ),
        fault("no wgmma.fence", "wgmma_fence", r"wgmma\.fence", delete(r"wgmma\.fence"), quick=True),
        fault("an mbarrier is not initialised", "mbarrier", r"no initialised mbarrier", delete(r"mbarrier\.init", 3)),
        fault("half of the arrivals expected", "mbarrier deadlock race", r"arriv|waited", arrivals_expected(1, 0)),
        fault("more arrivals expected than come", "deadlock", r"arriv", arrivals_expected(1000, 1)),
        fault("Q read before it has come", "race", r"through cp\.async", delete(r"cp\.async\.wait_group")),
        fault("no barrier after the loads of Q", "race", r"through cp\.async", delete(r"bar\.sync\s+1, 256")),
        fault(
            "barrier expects a warp too many",
            "deadlock barrier",
            r"barrier",
            substitute(r"(bar\.sync\s+1, )256", r"\g<1>288"),
        ),
        fault("O overwritten while TMA reads it", "race", r"bulk store", delete(r"cp\.async\.bulk\.wait_group\.read")),
        fault("the copies do not arrive", "deadlock", r"mbarrier", delete(r"cp\.async\.mbarrier\.arrive")),
        fault(
            "more registers than there are",
            "deadlock",
            r"nothing can run",
            substitute(r"(setmaxnreg\.inc[\w.]*\s+)\d+", r"\g<1>240"),
        ),
        fault("no barrier between a warp's lanes", "lane_race", r"bar\.warp\.sync", delete(r"bar\.warp\.sync", 3)),
        fault(
            "scores accumulate onto the last tile's",
            "wrong result",
            "",
            substitute(r"setp\.ne\.b32 p, %r\d+, 0;", "setp.ne.b32 p, 1, 0;"),
        ),
        fault("rows of 584 bytes", "misaligned", r"address", substitute(TABLE_ROW, r"\g<1>584"), quick=True),
    ]
    return between_ctas + pipeline


def _clusters() -> list[KernelFault]:
    def fault(name: str, kinds: str, says: str, edit: Callable[[str], str], quick: bool = True) -> KernelFault:
        return KernelFault(CLUSTERS, name, kinds, says, edit, quick)

    relaxed = "mbarrier.arrive.relaxed.cluster.shared::cluster"
    return [
        *(
            fault(
                f"peer told by a relaxed arrival, {n}", "race", r"through wgmma", substitute(PEER_ARRIVAL, relaxed, n)
            )
            for n in (0, 1)
        ),
        *(
            fault(
                f"peer believed after a relaxed wait, {n}",
                "race",
                r"through wgmma|TMA or bulk copy",
                substitute(PEER_WAIT, "try_wait.parity.relaxed.cluster", n),
            )
            for n in (0, 1, 2)
        ),
        *(fault(f"peer not told, {n}", "deadlock", r"mbarrier", delete(PEER_ARRIVAL, n)) for n in (0, 1)),
        fault(
            "arrival at the own CTA instead of the peer",
            "mbarrier deadlock race",
            r"arrivals|TMA or bulk copy",
            substitute(r"(mapa\.shared::cluster\.u32 %r\d+, %r\d+, )%r\d+", r"\g<1>0"),
        ),
        fault("a part of O is not sent", "deadlock", r"mbarrier", delete(r"st\.async", 1)),
        fault(
            "a part of O is sent to the place of another",
            "race",
            r"TMA or bulk copy",
            substitute(r"(st\.async[\w.:]*v4\.f32 \[%r\d+)\]", r"\1+16]"),
        ),
        fault(
            "fewer bytes of O expected than are sent",
            "race tx_count",
            r"TMA or bulk copy|expect_tx",
            substitute(r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>8192;", 8),
        ),
        fault(
            "fewer bytes of Q expected than TMA brings",
            "deadlock tx_count race",
            r"bytes|TMA or bulk copy",
            substitute(r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;", 0),
        ),
        *(
            fault(
                f"consumer does not wait for stage, {n}", "race", r"by warp \d+ of CTA rank 0", no_wait(n), n in (1, 4)
            )
            for n in range(8)
        ),
        *(fault(f"O is sent before the peer can take it, {n}", "race", r"through wgmma", no_wait(n)) for n in (8, 9)),
        fault("O is merged before it has come", "uninitialised_smem race", r"nothing has written|TMA", no_wait(10)),
        fault("no arrival at the cluster barrier", "barrier deadlock", r"barrier", delete(r"barrier\.cluster\.arrive")),
        fault(
            "peer's mbarriers used before they are there",
            "race",
            r"mbarrier\.init",
            delete(r"barrier\.cluster\.wait", 0),
        ),
        fault(
            "no fence.mbarrier_init", "mbarrier_init_fence", r"fence\.mbarrier_init", delete(r"fence\.mbarrier_init")
        ),
        *(
            fault(
                f"no proxy fence, {n}",
                "proxy_fence",
                r"fence\.proxy\.async",
                delete(r"fence\.proxy\.async", n),
                n in (0, 3),
            )
            for n in range(10)
        ),
        *(
            fault(f"no wgmma.wait_group, {n}", "wgmma_wait", r"wait_group", delete(r"wgmma\.wait_group", n))
            for n in (0, 1)
        ),
        fault("no wgmma.fence", "wgmma_fence", r"wgmma\.fence", delete(r"wgmma\.fence")),
    ]


def _unpacking() -> list[KernelFault]:
    def fault(name: str, kinds: str, says: str, edit: Callable[[str], str]) -> KernelFault:
        return KernelFault(UNPACKING, name, kinds, says, edit, quick=True)

    hole = r"(selp\.b64\s+%rd\d+, %rd\d+, )(-\d+), %p\d+;"
    is_hole = r"setp\.lt\.s64\s+(%p\d+), %rd\d+, 0;"
    wrong = "wrong result"
    return [
        fault(
            "page number beyond the list",
            "out_of_bounds",
            r"no registered tensor",
            substitute(r"setp\.gt\.s32 p, %r\d+, 0;", "setp.gt.s32 p, 1, 0;", 3),
        ),
        fault("a hole is followed", "out_of_bounds", r"no registered tensor", substitute(hole, r"\g<1>\2, -1;", 0)),
        fault("a hole is written", wrong, "", substitute(is_hole, r"mov.pred \1, 0;", 0)),
        fault(
            "a row after the last one is written",
            "global_race out_of_bounds",
            r"writes|store",
            substitute(is_hole, r"mov.pred \1, 0;", -1),
        ),
        fault("rows of 584 bytes", "misaligned", r"address", substitute(TABLE_ROW, r"\g<1>584")),
        fault("scales four bytes on", wrong, "", substitute(r"(add\.s32\s+%r\d+, %r\d+, )36864", r"\g<1>36868")),
        fault("the first scale for all", wrong, "", substitute(r"(shr\.u32\s+%r\d+, %r\d+, )%r\d+;", r"\g<1>0;")),
        fault(
            "the second part over the first one",
            "global_race",
            r"bfloat16",
            delete(r"add\.s64\s+(%rd\d+), %rd\d+, \1"),
        ),
        fault(
            "the first row of every page",
            wrong,
            "",
            substitute(r"mad\.lo\.s32\s+(%r\d+), (%r\d+), (%r\d+), (%r\d+);", r"mul.lo.s32 \1, \2, \3;"),
        ),
        fault("E5M2 for E4M3", wrong, "", substitute("e4m3x2", "e5m2x2")),
    ]


FAULTS: list[KernelFault] = [*_blackwell(), *_hopper(), *_clusters(), *_unpacking()]
