"""compress_store: the definition against its parts; the kernels, emulated, against float64 and the definition's bytes.

Regimes: requests whose compression groups lie in the batch, in the state and in both; first groups, which have no
predecessor; open groups and padding; positions up to 2**20; chunks, and batches of one to six tokens a request, with
rings of the minimal size; all stored forms; tables, states and tails beyond 2**31 bytes. Memory that is no source is
NaN, as is memory that must not be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from ops.compressor_cases import (
    DIMS,
    NAN,
    RATIOS,
    Forward,
    Request,
    Setting,
    forward,
)
from ops.compressor_store_cases import (
    BF16,
    CHUNKS,
    FAR,
    FORMS,
    FP4,
    FP8,
    PLAIN,
    SETTINGS,
    UNIFORM,
    assert_allowed,
    assert_state,
    uniform_requests,
)
from ops.early_launches import a_missing_wait_is_noticed, launched_early
from ops.memory_layout import far_apart, use_in_place
from ops.number_formats import same_bits
from torch import Tensor

from dsv4_kernels.compressor import Compression, compress, compress_store
from dsv4_kernels.kv_layout import KVRows
from dsv4_kernels.norm import rms_norm
from dsv4_kernels.quant import fp4_qdq, fp8_qdq, hadamard
from dsv4_kernels.rope import apply_rope

ARCH = {"sm90": "sm_90a", "sm100": "sm_100a"}


# ---- the definition


def before(setting: Setting, f: Forward, which: int, dtype: torch.dtype) -> tuple[KVRows, Tensor]:
    """Table and state from the separate ops, one after the other; entries of open groups go to row 0, as zeros do."""
    c, g = f.compressions[which], f.groups
    table, state = replace(c.table, storage=c.table.storage.clone()), c.state.clone()
    score = c.score + c.ape[g.positions % g.ratio]
    entries = compress(state, c.kv, score, g.sources, g.ratio, c.head_dim)
    row = apply_rope(rms_norm(entries.to(dtype), c.norm_weight, c.eps), g.entry_positions, c.frequencies)
    if c.hadamard:
        row = hadamard(row)
    if table.format is PLAIN and c.values_of is FP4:
        row = fp4_qdq(row, 32)
    elif table.format is PLAIN and c.values_of is FP8:
        row = torch.cat((fp8_qdq(row[:, :-64], 64), row[:, -64:]), 1)
    table.scatter(g.slots, row)
    kept = (g.state_rows >= 0).nonzero().squeeze(1)
    state.index_copy_(0, g.state_rows[kept], torch.stack([c.kv, score], 1)[kept])
    return table, state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", RATIOS)
def test_the_definition_has_the_bits_of_its_parts(kind: str, form: str) -> None:
    setting = replace(SETTINGS[kind], **FORMS[form])
    f = forward(setting, CHUNKS[kind], open_groups=1)
    f.groups.slots[0] = 0
    expected = [before(setting, f, i, BF16) for i in range(len(f.compressions))]
    compress_store(f.groups, f.compressions, BF16)
    null = KVRows.allocate(1, PLAIN, 1, 0, BF16, "cpu")
    for c, (table, state) in zip(f.compressions, expected, strict=True):
        assert same_bits(c.state, state)
        rows = torch.arange(1, c.table.num_rows)
        assert null.format is PLAIN and same_bits(c.table.gather(rows), table.gather(rows))
        assert c.table.gather(torch.tensor([0])).isnan().all()  # an open group writes nothing


def test_the_definition_in_fp32() -> None:
    setting = SETTINGS["csa"]
    f = forward(setting, CHUNKS["csa"])
    c = replace(f.compressions[1], table=KVRows.allocate(200, PLAIN, 128, 64, torch.float32, "cpu", NAN))
    f.compressions[1] = c
    expected, _ = before(setting, f, 1, torch.float32)
    compress_store(f.groups, [c], torch.float32)
    assert same_bits(c.table.storage, expected.storage)


def test_what_is_refused() -> None:
    f = forward(SETTINGS["csa"], CHUNKS["csa"])
    g, (main, index) = f.groups, f.compressions

    def refused(match: str, groups: object = g, compressions: Sequence[Compression] = (main,)) -> None:
        with pytest.raises(ValueError, match=match):
            compress_store(groups, compressions, BF16)

    refused("takes 1 to 2 compressions; got 0", compressions=())
    refused(r"expected \[M, 4\] or \[M, 8\] torch.int32", replace(g, sources=g.sources.long()))
    refused(r"expected \[M, 3\] or \[M, 6\]", replace(g, ratio=3))
    refused(r"slots must be \[\d+\] torch.int64", replace(g, slots=g.slots[1:]))
    refused(r"state_rows must be \[\d+\] torch.int64; .*int32", replace(g, state_rows=g.state_rows.int()))
    refused(r"requests of 5 tokens have ceil\(5 / 4\) groups", replace(g, tokens_per_request=5))
    refused("kv must be", compressions=[replace(main, kv=main.kv[:, :512])])
    refused("score must be .* torch.float32", compressions=[replace(main, score=main.score.bfloat16())])
    refused("state must be", compressions=[replace(main, state=main.state[:, 0])])
    refused("come together", compressions=[replace(main, overlap=torch.empty(4, 2, 512))])
    refused("do not fit rows of 128", compressions=[replace(main, table=index.table)])
    refused("the states have", compressions=[main, replace(index, state=index.state[1:])])


# ---- the kernels


@pytest.fixture(params=ARCH)
def kernel(request: pytest.FixtureRequest, compiled_here: None) -> str:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    return request.param


def run(kernel: str, f: Forward, schedule: str = "late", seed: int = 0, launches: int | None = None) -> Forward:
    """Run a forward in the emulator with all its checks on; warnings fail."""
    from ptx_emulator import Checks, emulated

    from dsv4_kernels.compressor import gpu

    with emulated(checks=Checks.strict(), arch=ARCH[kernel], schedule=schedule, seed=seed) as device:
        use_in_place(device, *(x for c in f.compressions for x in (c.kv, c.score)))
        getattr(gpu, kernel)(f.groups, f.compressions, BF16)
    assert not [warning for report in device.reports for warning in report.warnings]
    assert launches is None or len(device.reports) == launches
    return f


@pytest.mark.parametrize("schedule", ["late", "random"])
@pytest.mark.parametrize("kind", RATIOS)
def test_entries_of_a_chunk(kernel: str, kind: str, schedule: str) -> None:
    setting = SETTINGS[kind]
    overlaps = {(3, 8): 5, (1, FAR + 4): 2} if kind == "csa" else None
    f, untouched = (forward(setting, CHUNKS[kind], overlaps=overlaps, open_groups=2) for _ in range(2))
    run(kernel, f, schedule, seed=1, launches=2)
    assert_allowed(setting, f)
    assert_state(setting, f, untouched)


@pytest.mark.parametrize("kind", RATIOS)
def test_it_may_begin_early(kernel: str, kind: str) -> None:
    with launched_early():
        test_entries_of_a_chunk(kernel, kind, "late")


def test_a_missing_wait_is_noticed(compiled_here: None) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    with a_missing_wait_is_noticed():
        run("sm90", forward(SETTINGS["hca"], CHUNKS["hca"]))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "plain"])
@pytest.mark.parametrize("kind", RATIOS)
def test_what_is_stored_of_the_same_rows(kernel: str, kind: str, form: str) -> None:
    """Stored forms of the kernel's own plain rows: bytes of `scatter`, values of the quantisers, bits of the Hadamard
    transform."""
    plain = run(kernel, forward(SETTINGS[kind], CHUNKS[kind]))
    setting = replace(SETTINGS[kind], **FORMS[form])
    f, expected = forward(setting, CHUNKS[kind]), forward(setting, CHUNKS[kind])
    run(kernel, f)
    for which, (c, e) in enumerate(zip(f.compressions, expected.compressions, strict=True)):
        rows = torch.stack(list(plain.entries(which).values()))
        if c.hadamard:
            rows = hadamard(rows)
        if c.table.format is PLAIN and c.values_of is FP4:
            rows = fp4_qdq(rows, 32)
        elif c.table.format is PLAIN and c.values_of is FP8:
            rows = torch.cat((fp8_qdq(rows[:, :-64], 64), rows[:, -64:]), 1)
        e.table.scatter(torch.tensor(list(f.rows.values())), rows)
        assert same_bits(c.table.storage, e.table.storage)


@pytest.mark.parametrize("first", [0, 4])
def test_bytes_of_extreme_rows(kernel: str, first: int) -> None:
    """Blocks of zeros of both signs, of numbers below the floors of the scales, subnormal in bf16, and very large."""
    sizes = torch.tensor([0.0, 1e-6, 2.0**-133, 1e-30, 1e30, 3e37, 1.0, 2.0**-120]).roll(-first).repeat_interleave(32)
    made = []
    for form in ("plain", "bytes_without_hadamard"):
        f = forward(replace(SETTINGS["csa"], **FORMS[form]), CHUNKS["csa"])
        f.compressions = [replace(c, norm_weight=sizes.repeat(2)[: c.head_dim]) for c in f.compressions]
        made.append(run(kernel, f))
    plain, f = made
    for which, c in enumerate(f.compressions):
        rows = torch.stack(list(plain.entries(which).values()))
        assert rows.isfinite().all()
        if c.head_dim == 512 or first == 0:
            assert (rows == 0).any()
        if c.head_dim == 512 or first == 4:
            assert rows.abs().max() > 1e37
        expected = KVRows.allocate(c.table.num_rows, c.table.format, c.head_dim, 64, BF16, "cpu", NAN)
        expected.scatter(torch.tensor(list(f.rows.values())), rows)
        assert same_bits(c.table.storage, expected.storage)


@pytest.mark.parametrize(("kind", "absent"), [("hca", 16), ("hca", 127), ("csa", 7)])
def test_sources_that_do_not_exist(kernel: str, kind: str, absent: int) -> None:
    """A group whose first sources are -1, a whole warp's and more: the bits that it has if the same sources exist with
    scores so low that their weight is 0."""
    request = [Request(3, 0, RATIOS[kind])]
    without, weightless = (forward(SETTINGS[kind], request) for _ in range(2))
    places = RATIOS[kind] * SETTINGS[kind].parts
    without.groups.sources[0, :absent] = -1
    first_token = places - RATIOS[kind]  # of the group: CSA's first group has no predecessor
    for c in weightless.compressions:
        c.score[: absent - first_token] = -1e30
    run(kernel, without)
    run(kernel, weightless)
    for c, expected in zip(without.compressions, weightless.compressions, strict=True):
        (row,) = without.rows.values()
        assert c.table.gather(torch.tensor([row])).isfinite().all()
        (other,) = weightless.rows.values()
        assert same_bits(c.table.storage[row], expected.table.storage[other])


@pytest.mark.parametrize("dim", [512, 128])
def test_one_compressor_alone(kernel: str, dim: int) -> None:
    """One compressor in a launch has the bits that it has in a launch with both."""
    both = run(kernel, forward(SETTINGS["csa"], CHUNKS["csa"], overlaps={(3, 8): 5}))
    setting = replace(SETTINGS["csa"], dims=(dim,))
    alone = run(kernel, forward(setting, CHUNKS["csa"], overlaps={(3, 8): 5}))
    beside = both.compressions[DIMS["csa"].index(dim)]
    for name in ("state", "overlap"):
        assert same_bits(getattr(alone.compressions[0], name), getattr(beside, name))
    assert same_bits(alone.compressions[0].table.storage, beside.table.storage)


@pytest.mark.parametrize("schedule", ["late", "random", "random_warps"])
@pytest.mark.parametrize("name", UNIFORM)
def test_a_uniform_batch_in_one_launch(kernel: str, name: str, schedule: str) -> None:
    """Entries and states are bitwise equal to those of a chunk's two launches, in any order of CTAs."""
    kind, k, ring = UNIFORM[name]
    setting = Setting(kind, ring)
    requests = uniform_requests(setting.ratio, k)
    f, untouched = (forward(setting, requests, k) for _ in range(2))
    run(kernel, f, schedule, seed=len(name), launches=1)
    assert_state(setting, f, untouched)
    if schedule == "late":
        assert_allowed(setting, f)
    chunk = forward(setting, requests, seed=1)
    assert f.rows.keys() == chunk.rows.keys()
    run(kernel, chunk, "eager")
    for which in range(len(f.compressions)):
        entries, expected = f.entries(which), chunk.entries(which)
        assert all(same_bits(row, expected[entry]) for entry, row in entries.items())


@pytest.mark.parametrize("kind", RATIOS)
def test_bits_do_not_depend_on_the_batch(kernel: str, kind: str) -> None:
    """A request alone, last of several, and token by token: the same entries."""
    setting = SETTINGS[kind]
    ratio = setting.ratio
    request = Request(5, 6 * ratio - 2, ratio + 3)
    runs = [[[request]], [[*CHUNKS[kind], request]]]
    steps = [request.begin + i for i in range(request.count) if kind == "csa" or i in (0, 1, 2, ratio, ratio + 1)]
    found: list[dict] = []
    for batches in runs:
        found.append({})
        for i, batch in enumerate(batches):
            f = run(kernel, forward(setting, batch, seed=i), "random", seed=i)
            found[-1] |= {(e, w): row for w in range(len(f.compressions)) for e, row in f.entries(w).items()}
    found.append({})
    for p in steps:
        others = [Request(i + 1, 17 * i + 3, 1) for i in range(p % 3)]
        f = run(kernel, forward(setting, [*others, Request(5, p, 1)], 1))
        found[-1] |= {(e, w): row for w in range(len(f.compressions)) for e, row in f.entries(w).items()}
    mine = [key for key in found[0] if key[0][0] == 5]
    assert len(mine) == 2 * len(setting.all_dims)
    for key in mine:
        assert all(same_bits(other[key], found[0][key]) for other in found[1:]), key


@pytest.mark.parametrize("kind", RATIOS)
def test_nothing_to_do(kernel: str, kind: str) -> None:
    """No group at all, and a batch in which every group is open and no token is kept."""
    setting = SETTINGS[kind]
    for requests, k, launches in (([Request(4, 5, 2)], None, 1), ([Request(0, 0, 1)] * 3, 1, 1)):
        f, untouched = (forward(setting, requests, k) for _ in range(2))
        run(kernel, f, launches=launches)
        assert_state(setting, f, untouched)
        assert all(c.table.storage.isnan().all() for c in f.compressions)


class Shifted(torch.Tensor):
    """A table whose first `skipped` rows are not allocated: its addresses need 64 bits."""

    skipped = 0

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *rest = super().shape
        return rows + self.skipped, *rest

    def data_ptr(self) -> int:
        return super().data_ptr() - self.skipped * self.stride(0) * self.element_size()


def shifted(x: Tensor, skipped: int) -> Tensor:
    made = x.as_subclass(Shifted)
    made.skipped = skipped
    return made


@pytest.mark.parametrize("form", ["plain", "bytes"])
@pytest.mark.parametrize("kind", RATIOS)
def test_rows_beyond_32_bits(kernel: str, kind: str, form: str) -> None:
    """Tables, states, tails and products of more than 2**32 bytes."""
    setting = replace(SETTINGS[kind], **FORMS[form])
    overlaps = {(3, 8): 5} if kind == "csa" else None
    f, near = (forward(setting, CHUNKS[kind], overlaps=overlaps) for _ in range(2))
    run(kernel, near)
    states, checkpoints, pages = 2**22, 2**22, 2**23
    unit = 64 if form == "bytes" else 1
    g = f.groups
    f.groups = replace(
        g,
        sources=torch.where(g.sources >= 0, g.sources + states, -1),
        state_rows=torch.where(g.state_rows >= 0, g.state_rows + states, -1),
        slots=g.slots + pages * unit,
        overlap_rows=None if kind == "hca" else torch.where(g.overlap_rows >= 0, g.overlap_rows + checkpoints, -1),
    )
    f.compressions = [
        replace(
            c,
            kv=far_apart(c.kv),
            score=far_apart(c.score),
            state=shifted(c.state, states),
            overlap=None if c.overlap is None else shifted(c.overlap, checkpoints),
            table=replace(c.table, storage=shifted(c.table.storage, pages)),
        )
        for c in f.compressions
    ]
    run(kernel, f)
    for far, expected in zip(f.compressions, near.compressions, strict=True):
        for of in (lambda c: c.state, lambda c: c.table.storage, lambda c: c.overlap):
            assert of(expected) is None or same_bits(of(far).as_subclass(torch.Tensor), of(expected))


def test_other_strides(kernel: str) -> None:
    """Pages, plain rows, states, tails and products with gaps: the same bits, and the gaps are not written."""
    setting, overlaps = replace(SETTINGS["csa"], formats=(FP8, PLAIN)), {(3, 8): 5, (1, FAR + 4): 2}
    f, expected = (forward(setting, CHUNKS["csa"], overlaps=overlaps) for _ in range(2))
    run(kernel, expected)
    wide = []
    for c in f.compressions:
        pad = torch.nn.functional.pad
        table, state = pad(c.table.storage, (0, 48), value=7), pad(c.state.flatten(1), (0, 12), value=7.0)
        product = pad(torch.cat([c.kv, c.score], 1), (4, 8), value=NAN)
        width = c.kv.shape[1]
        tail = pad(c.overlap.flatten(1), (0, 20), value=7.0)
        wide.append((table, state, tail))
        inner = state[:, : 2 * width].unflatten(1, (2, width))
        storage = table[:, : c.table.storage.shape[1]]
        kv, score = product[:, 4 : 4 + width], product[:, 4 + width : 4 + 2 * width]
        overlap = tail[:, :-20].unflatten(1, c.overlap.shape[1:])
        f.compressions[len(wide) - 1] = replace(
            c, kv=kv, score=score, state=inner, overlap=overlap, table=replace(c.table, storage=storage)
        )
    run(kernel, f)
    for c, e, (table, state, tail) in zip(f.compressions, expected.compressions, wide, strict=True):
        assert same_bits(c.table.storage, e.table.storage) and same_bits(c.state, e.state)
        assert same_bits(c.overlap, e.overlap) and not e.overlap.isnan().all()
        assert (table[:, -48:] == 7).all() and (state[:, -12:] == 7).all() and (tail[:, -20:] == 7).all()


def test_what_the_kernels_refuse(kernel: str) -> None:
    from dsv4_kernels.compressor import gpu

    f = forward(SETTINGS["csa"], CHUNKS["csa"])
    main, index = f.compressions
    function = getattr(gpu, kernel)
    shifted_kv = torch.nn.functional.pad(main.kv, (1, 3))[:, 1:1025]
    for match, compressions in (
        ("entries of .* channels by ratio", [index, main]),
        ("need kv with contiguous channels", [replace(main, kv=shifted_kv)]),
        ("transform indexer keys only", [replace(main, hadamard=True)]),
        ("rotate 64 channels", [replace(main, frequencies=main.frequencies[:16])]),
        ("plain or fp8 rows", [replace(main, values_of=FP4)]),
        ("plain rows must be torch.bfloat16", [replace(main, table=replace(main.table, storage=main.kv))]),
    ):
        with pytest.raises(ValueError, match=match):
            function(f.groups, compressions, BF16)
    with pytest.raises(ValueError, match="contiguous slots"):
        function(replace(f.groups, slots=f.groups.slots.repeat_interleave(2)[::2]), [main], BF16)


def most_registers(ctas: int, threads: int) -> int:
    """The most registers of a thread with which a multiprocessor holds so many CTAs: each of its four partitions has
    16,384 registers for a quarter of the warps, and gives a thread multiples of 8."""
    warps = -(-ctas * threads // 32 // 4)
    return 65_536 // 4 // (32 * warps) // 8 * 8


MOST_REGISTERS = {"csa": most_registers(2, 160), "hca": most_registers(2, 256), "keep": most_registers(8, 160)}


def test_nothing_is_spilled(kernel: str) -> None:
    from lib.cubin import resources
    from ptx_emulator import emulated

    from dsv4_kernels.compressor import gpu

    with emulated(arch=ARCH[kernel]):
        for kind, ratio in RATIOS.items():
            for dims in gpu.DIMS[ratio]:
                for name, most in (("entries", MOST_REGISTERS[kind]), ("keep", MOST_REGISTERS["keep"])):
                    found = resources(gpu.compile(name, dims, ratio, ARCH[kernel]).__cubin__)
                    assert found["stack_bytes"] == 0 and found["registers"] <= most, (kind, dims, name, found)
