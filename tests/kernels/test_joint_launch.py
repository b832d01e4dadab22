"""Joint launches of a layer's kernels, emulated: the bits of separate launches, in one launch.

Regimes: every joint launch of `dsv4_kernels.joint_launches`, at 1, 7 and 13 tokens (clusters of one CTA and of two, and
of eight in HCA layers), on few multiprocessors and on many, under three schedules; verify steps of three tokens; parts
whose CTAs are no whole clusters.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops.early_launches import early_flags
from ops.joint_cases import FLASH_TP4, NAMES, PRODUCTS, SMALL, assert_same, case_of, emulated_joint
from ops.number_formats import same_bits
from ops.row_kernels import poisoned

from dsv4_kernels import joint_launches, registry
from dsv4_kernels.device import dependent_launch
from dsv4_kernels.host import joint_launch
from dsv4_kernels.kv_layout import RowFormat
from dsv4_kernels.model_shapes import AttentionShapes, ModelShapes
from dsv4_kernels.moe import swiglu_fp8
from dsv4_kernels.quant import fp8_quantise
from dsv4_kernels.router import route_hash_logits, route_topk_logits

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def by_name(compiled_here: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Ops use the kernel that is named, on a CPU too; memory for results is filled with NaN. Not in tests on a GPU."""
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(
        registry, "chosen", lambda op, device, dtype, impl=None: registry._implementation(op, impl or "ref")
    )
    monkeypatch.setattr(registry, "_resolved", {})
    monkeypatch.setattr(torch, "empty", poisoned)


def check(name: str, kernel: str, tokens: int, multiprocessors: int = 132, schedule: str = "random") -> None:
    case = case_of(name, SMALL, tokens, kernel, CPU)
    with dependent_launch.switched(True), emulated_joint(kernel, case, multiprocessors) as device:
        expected = case.separately()
    assert len(device.reports) == len(case.calls) > 1
    case = case_of(name, SMALL, tokens, kernel, CPU)
    with (
        dependent_launch.switched(True),
        early_flags() as early,
        emulated_joint(kernel, case, multiprocessors, schedule) as device,
    ):
        found = case.jointly()
    assert len(device.reports) == 1 and early == [True]
    assert_same(found, expected)


def test_two_parts_are_one_launch() -> None:
    check("choice", "sm90", 5)


def listed_choice(
    tokens: int, experts: int, device: torch.device, kernel: str, joined: bool, hashed: bool = False
) -> tuple:
    """The choice of experts, the list of their work, and the shared expert's SwiGLU; see `check_list`."""
    from dsv4_kernels.moe.sm90 import launch
    from dsv4_kernels.moe.sm90.plan import NARROW

    generator = torch.Generator().manual_seed(tokens)
    logits, gate_up = (torch.randn(tokens, n, generator=generator).to(device) for n in (experts, 512))
    gate_up, bias = gate_up.bfloat16(), torch.zeros(experts, device=device)
    with joint_launch.joined() if joined else contextlib.nullcontext():
        with joint_launch.chained():
            if hashed:
                ids = torch.arange(tokens, device=device)
                table = torch.randint(0, experts, (tokens, 6), generator=generator, dtype=torch.int32).to(device)
                weights, chosen = route_hash_logits(logits, table, ids, 1.5, impl=kernel)
            else:
                weights, chosen = route_topk_logits(logits, bias, 6, 1.5, impl=kernel)
            listed = launch.list_work(weights, chosen, experts // 2, 5, NARROW)
        codes, scales = swiglu_fp8(gate_up, 10.0, True, impl=kernel)
    return weights, chosen, codes, scales, listed


def check_list(found: tuple, expected: tuple) -> None:
    """A pair's slot in its expert depends on timing: all else is equal, and a slot has its pair's numbers."""
    assert_same(found[:4], expected[:4])
    (weights, chosen, *_, listed), other = found, expected[-1]
    tiles, groups = listed.totals.tolist()
    assert same_bits(listed.totals, other.totals)
    assert same_bits(listed.tiles[:tiles, :5], other.tiles[:tiles, :5])
    assert same_bits(listed.group_tile[:groups], other.group_tile[:groups])
    slots, tokens = listed.slot_of_pair.flatten().long(), torch.arange(len(chosen)).repeat_interleave(6)
    assert torch.equal(slots < 0, other.slot_of_pair.flatten() < 0) and 0 < (slots >= 0).sum() < len(slots)
    kept = slots >= 0
    assert len(set(slots[kept].tolist())) == kept.sum()
    assert torch.equal(listed.source.long().cpu()[slots[kept].cpu()], tokens[kept.cpu()])
    assert same_bits(listed.routing[slots[kept]], weights.flatten()[kept])
    empty = torch.ones(8 * groups, dtype=torch.bool)
    empty[slots[kept].cpu()] = False
    assert (listed.source[: 8 * groups].cpu()[empty] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["late", "random", "random_warps"])
@pytest.mark.parametrize(("tokens", "hashed"), [(1, False), (16, False), (16, True)])
def test_a_chain_is_a_part(tokens: int, hashed: bool, schedule: str) -> None:
    """The list reads what the router has written in the same launch."""
    check_chain(tokens, hashed, schedule)


@pytest.mark.parametrize(("tokens", "hashed"), [(64, False), (33, True)])
def test_a_warp_of_a_chain_routes_several_tokens(tokens: int, hashed: bool) -> None:
    """A chain has 32 warps, and Blackwell's joint launches up to 64 tokens."""
    check_chain(tokens, hashed, "random")


def check_chain(tokens: int, hashed: bool, schedule: str) -> None:
    from ptx_emulator import Checks, emulated

    made, options = [], {"schedule": schedule, "checks": Checks.strict()}
    for joined in (False, True):
        with dependent_launch.switched(True), emulated(arch="sm_90a", **options) as device:
            made.append(listed_choice(tokens, 40, CPU, "sm90", joined, hashed))
        assert len(device.reports) == (1 if joined else 3)
        assert not [warning for report in device.reports for warning in report.warnings]
    check_list(made[1], made[0])


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 7, 13])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "choice"])
def test_every_joint_launch_on_hopper(name: str, tokens: int) -> None:
    check(name, "sm90", tokens)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [7, 64])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in PRODUCTS])
def test_every_joint_launch_on_blackwell(name: str, tokens: int) -> None:
    check(name, "sm100", tokens)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["late", "eager", "random_warps"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_schedules_and_few_multiprocessors(name: str, schedule: str) -> None:
    """Persistent clusters take several tiles, beside CTAs of the other part."""
    check(name, "sm90", 13, multiprocessors=3, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("rows", [1536, 4096, 8192])
def test_two_ctas_fit_a_multiprocessor(rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts share their memory, and no register is spilled."""
    from lib.cubin import resources
    from ptx_emulator import Device

    from dsv4_kernels.linear import fp8, gpu
    from dsv4_kernels.linear.fp8_plan import SMEM_BYTES, chosen, sharing

    monkeypatch.setattr(fp8, "chosen", lambda tokens, few, resident: chosen(tokens, rows, resident))
    launch, shared = Device.launch, []

    def noted(self: Device, *arguments: object) -> object:
        shared.append(arguments[5])
        return launch(self, *arguments)

    monkeypatch.setattr(Device, "launch", noted)
    plan = sharing(chosen(tokens, rows, 132))
    assert 2 * plan.shared_bytes <= SMEM_BYTES and plan.stages >= 2
    case = case_of("latents", SMALL, tokens, "sm90", CPU)
    with emulated_joint("sm90", case):
        case.jointly()
        compiled = joint_launch.compile((fp8.part(plan), gpu.part(True)), "sm_90a")
    assert 0 < shared[0] <= SMEM_BYTES // 2 - 1024, shared  # the system takes a kilobyte a CTA
    found = resources(compiled.__cubin__)
    assert found["stack_bytes"] == 0 and found["registers"] <= 168, found


def test_every_joint_launch_of_a_step_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs for Flash on one of four ranks, with packed experts and with others, are the launches that its shapes
    make."""
    made = set()
    monkeypatch.setattr(joint_launch, "_launch", lambda noted: made.add(tuple(one.part.key for one in noted)))
    for tokens in (1, 16):
        for name in NAMES:
            if name not in ("csa_3", "hca_3"):
                case_of(name, FLASH_TP4, tokens, "sm90", CPU).jointly()
        for hashed in (False, True):
            listed_choice(tokens, 256, CPU, "sm90", joined=True, hashed=hashed)
    attention = AttentionShapes((), 16, (16,), 512, 64, 128, RowFormat.FP8, torch.bfloat16, CPU)
    model = ModelShapes(
        attention=attention,
        hidden_size=4096,
        norm_dims=(1024,),
        quantises_inputs=True,
        fewest_own_rows=0,
        entry_dims=((4, (512, 128)), (128, (512,))),
        index_heads=64,
        index_fp4=True,
        step_mappings=(),
        experts=256,
        experts_per_token=6,
        routes_by_token_id=True,
        fp8_linear_tokens=64,
        shared_channels=512,
        joins_launches=True,
    )

    def jobs(model: ModelShapes) -> set[tuple]:
        return {
            tuple(part.key for part in pickle.loads(pickle.dumps(job)).args[0])  # as a process that compiles gets it
            for job in joint_launches.compile_jobs(model, "sm_90a")
        }

    packed = replace(model, packed_experts=True)
    assert jobs(model) | jobs(packed) == made
    assert jobs(replace(packed, exchanges_rows=True)) == jobs(model), "tokens travel before their work is listed"
    assert len(joint_launches.compile_jobs(replace(model, fp8_linear_tokens=0), "sm_100a")) == 4


def test_a_block_with_one_part_is_the_ops_own_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without parts, such as one of a CPU's ops, launches nothing."""
    alone: list[str] = []
    part = joint_launch.Part("a", 1, tuple, print, threads=32)
    with joint_launch.joined():
        joint_launch.run(part, "sm_90a", (), 1, 0, (), alone=lambda: alone.append("a"))
        assert joint_launch.is_open() and not alone
    assert alone == ["a"] and not joint_launch.is_open()
    logits = torch.randn(2, 8)
    with joint_launch.joined():
        found = route_topk_logits(logits, torch.zeros(8), 2, 1.0)
    assert all(map(same_bits, found, route_topk_logits(logits, torch.zeros(8), 2, 1.0)))


def test_misuse_is_an_error_and_leaves_no_block_open() -> None:
    part = joint_launch.Part("a", 1, tuple, print, threads=32)
    with pytest.raises(RuntimeError, match=r"joined\(\) inside another one"):
        with joint_launch.joined(), joint_launch.joined():
            pass
    assert not joint_launch.is_open()
    with pytest.raises(RuntimeError, match="at most 3 parts; got 4: a, a, a, a"), joint_launch.joined():
        for _ in range(4):
            joint_launch.run(part, "sm_90a", (), 1, 0, (), alone=print)
    with pytest.raises(RuntimeError, match="one CTA of 1024 threads: not so a"), joint_launch.joined():
        with joint_launch.chained():
            joint_launch.run(part, "sm_90a", (), 1, 0, (), alone=print)
    with pytest.raises(KeyError, match="lost"), joint_launch.joined():
        joint_launch.run(part, "sm_90a", (), 1, 0, (), alone=print)
        raise KeyError("lost")  # nothing is launched
    assert not joint_launch.is_open()


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 16])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_gives_the_bits_of_separate_launches(kernel_on_gpu: Callable[[str], str], name: str, tokens: int) -> None:
    """A graph is replayed many times, where launches overlap: a kernel that reads before it waits is wrong only
    sometimes."""
    kernel, device = kernel_on_gpu("norm_rope_store"), torch.device("cuda")
    if name in PRODUCTS and kernel != "sm90":
        pytest.skip("FP8 products of few tokens are Hopper's")
    expected = case_of(name, FLASH_TP4, tokens, kernel, device).separately()
    case = case_of(name, FLASH_TP4, tokens, kernel, device)
    assert_same(case.jointly(), expected)
    torch.cuda.synchronize()
    graph, outs = torch.cuda.CUDAGraph(), []
    between = torch.randn(tokens, 4096, device=device).bfloat16()
    with torch.cuda.graph(graph):
        for _ in range(8):
            fp8_quantise(between, column_major=True)
            outs.append(case.jointly())
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    if name in PRODUCTS or name.startswith("choice"):  # the others have changed the states that they read
        for out in outs:
            assert_same(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_a_chain_on_a_gpu(kernel_on_gpu: Callable[[str], str], tokens: int) -> None:
    if kernel_on_gpu("norm_rope_store") != "sm90":
        pytest.skip("the work list is Hopper's")
    expected, found = (listed_choice(tokens, 256, torch.device("cuda"), "sm90", joined) for joined in (False, True))
    for _ in range(50):
        check_list(found, expected)
        found = listed_choice(tokens, 256, torch.device("cuda"), "sm90", True)
