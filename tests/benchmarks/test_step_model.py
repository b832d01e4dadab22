"""The model of time: its terms against hand counts, its result file, and the errors that the document promises."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed: the model reads the kernels' plans")

import model_step
from lib.experts_inputs import Model
from step_model import attention, blackwell, experts, index, launch, measured, products, rows, step, what_if
from step_model.hardware import B200, H200, Fitted, Gpu
from step_model.launch import Launch, bound_by, parts_us, time_us

from dsv4_kernels.hyper_connection.plan import Plan
from dsv4_kernels.linear import fp8_tcgen05_plan, gpu
from dsv4_kernels.moe.sm90.plan import NARROW, WIDE
from dsv4_kernels.moe.sm100.plan import Product

ROUND = Fitted(
    gap_us=1.0, dram_us=2.0, memory_share=0.5, l2_clock_bytes=10.0, issue_clocks=2.0, peer_us=3.0, link_share=0.25
)
GPU = Gpu("H200", 100, 1000.0, 2000.0, 4e6, 1e6, 4096, ROUND)
"""Round numbers: a thousand clocks a microsecond if half of the multiprocessors work, otherwise two thousand."""


@pytest.fixture(scope="module")
def document() -> dict:
    return model_step.document()


@pytest.mark.parametrize(
    ("launch", "term", "us"),
    [
        (Launch("", ctas=100, memory=8e6), "memory", 4.0),  # half of 4 TB/s
        (Launch("", ctas=100, memory=8e6, waves=4), "memory", 8e6 / (0.88 * 4e6)),  # balanced: a copy's share
        (Launch("", ctas=100, l2=3e6), "l2", 3.0),  # 10 bytes x 1,000 clocks x 100 multiprocessors a microsecond
        (Launch("", ctas=100, busiest=50_000), "busiest", 5.0),
        (Launch("", ctas=10, busiest=50_000), "busiest", 2.5),  # the highest clock
        (Launch("", ctas=100, busiest=50_000, in_flight=10_000), "in flight", 3.0),  # five times 0.6 us
        (Launch("", ctas=100, clocks={"port": 7000.0}), "port", 7.0),
        (Launch("", ctas=10, clocks={"port": 7000.0}), "port", 3.5),
        (Launch("", ctas=100, link=1e6), "link", 4.0),  # a quarter of 1 TB/s
        (Launch("", ctas=100, chain=1000, instructions=500), "chain", 2.0),
        (Launch("", ctas=100, from_memory=2, from_l2=1, crossings=1), "latency", 2 * 2.0 + 0.263 + 3.0),
    ],
)
def test_each_term(launch: Launch, term: str, us: float) -> None:
    assert parts_us(launch, GPU, early=False)[term] == pytest.approx(us)


def test_terms_of_the_stream_overlap_and_the_others_add_up() -> None:
    launch = Launch("", ctas=100, memory=8e6, clocks={"port": 6000.0}, chain=500)
    assert time_us(launch, GPU, early=False) == pytest.approx(1.0 + 2.0 + 0.5 + 6.0)
    assert bound_by(launch, GPU, early=False) == "port"
    assert time_us(replace(launch, link=1e6), GPU) == pytest.approx(time_us(launch, GPU))
    assert time_us(replace(launch, link=1e6, waits_for_link=True), GPU) == pytest.approx(time_us(launch, GPU) + 4.0)


def test_a_launch_that_loads_ahead_hides_its_first_load_and_as_much_as_fits_into_idle_time() -> None:
    launch = Launch("", ctas=100, memory=8e6, ahead=0.5)
    assert time_us(launch, GPU, early=False, idle_us=9.0) == pytest.approx(1.0 + 2.0 + 4.0)
    assert time_us(launch, GPU, early=True) == pytest.approx(1.0 + 4.0)
    assert time_us(launch, GPU, early=True, idle_us=1.5) == pytest.approx(1.0 + 2.5)
    assert time_us(launch, GPU, early=True, idle_us=9.0) == pytest.approx(1.0 + 2.0)
    products_wait = replace(launch, clocks={"port": 3000.0})  # for what the launch before writes
    assert time_us(products_wait, GPU, early=True, idle_us=9.0) == pytest.approx(1.0 + 3.0)


def test_an_fp8_product_of_one_token() -> None:
    """4,096 rows of 8,192 channels: 128 tiles of 32 rows, 16 stages of four blocks."""
    launch = products.fp8_hopper("wo_b", 1, 4096, 8192, H200)
    assert launch.ctas == 128 and launch.memory == 4096 * 8192 + 8192 + 2 * 4096
    assert launch.busiest == 33 * 8192 and launch.l2 == 128 * 33 * 8192 + 2 * 4096
    assert launch.clocks == {"consumer": 16 * (200 + 4 * 80), "tokens": 16 * (200 + 100)}
    assert launch.ahead == 0.25  # 64 KB of weights of 256 are on their way


def test_an_fp8_product_on_blackwell_has_the_tiles_of_its_plan() -> None:
    """wqkv_a: 48 tiles of rows, twice 32 tokens; five stages of four blocks. The instruction reads 128 rows."""
    launch = products.fp8_by_tcgen05("wqkv_a", 64, 1536, 4096, B200)
    assert launch.ctas == 96 and launch.busiest == (32 + 32) * 4096 and launch.in_flight == 5 * 4 * 64 * 128
    assert launch.clocks["port"] == 32 * (32 + 32 + 128 + 32 + 16) and bound_by(launch, B200) == "port"
    assert launch.clocks["scales"] == pytest.approx(8 * (1.0 * (33 + 4 * 24) + 2 * 30 + 2 * 33))
    assert launch.ahead == 20 / 32 * 32 / 64  # the weights of five stages; no tokens
    whole = products.fp8_by_tcgen05("wqkv_a", 64, 1536, 4096, B200, fp8_tcgen05_plan.Plan(64))
    assert whole.ctas == 12 and whole.busiest == (128 + 64) * 4096
    assert whole.clocks["tensor"] == 32 * 2 * 128 * 64 * 128 / 16384
    shared = products.fp8_by_tcgen05("wqkv_a", 64, 1536, 4096, B200, sharing=2)
    assert shared.busiest == (32 + 16) * 4096 and shared.memory == launch.memory
    assert step.floor_us(whole, B200) == step.floor_us(launch, B200) == launch.memory / B200.memory_bytes_us


def test_fp8_products_on_blackwell_have_nearly_the_best_tiles() -> None:
    """The choice by bytes of a tile, against every plan, for every product of a layer."""
    for tokens in (1, 16, 32, 64, 96, 128, 256, 1024, 8192):
        for model, ranks in ((step.FLASH, 1), (step.FLASH, 8), (step.PRO, 1), (step.PRO, 4), (step.PRO, 8)):
            for name, shape in what_if.products_of(model, ranks).items():

                def us(plan: object, case: tuple = (name, tokens, *shape, B200)) -> float:
                    return time_us(products.fp8_by_tcgen05(*case, plan), B200)

                assert us(None) <= 1.06 * min(map(us, fp8_tcgen05_plan.plans())), (model.name, ranks, name, tokens)


@pytest.mark.parametrize(("rows", "slots"), [(256, "96 slots, pair"), (384, "96 slots")])
def test_experts_on_blackwell_have_pairs_for_an_even_number_of_tiles_of_rows(rows: int, slots: str) -> None:
    found = blackwell._product(Product.GATE_UP, 296, rows, 4096, 96, 1.0, B200)
    static = blackwell._static("experts_sm100_static.json")[f"MXFP8_MXFP4, GATE_UP, {slots}"]
    assert found.clocks["port"] == static["port"] * 2 * rows // 128  # 148 multiprocessors


def test_a_product_in_fp32_of_few_tokens_shares_multiprocessors() -> None:
    """256 rows in tiles of 16: 16 CTAs, each with all of K."""
    launch = products.in_fp32("gate", 1, 256, H200)
    assert launch.ctas == 16 and launch.busiest == 17 * 4096 * 2 and launch.clocks["chunks"] == 16 * (4 * 33 + 33 + 30)


def test_work_tiles_of_experts_go_round_the_ctas() -> None:
    """Three experts with 8, 8 and 16 slots, 128 row tiles each, on 132 multiprocessors with two CTAs: 384 tiles, and
    the first 120 CTAs have two."""
    model = Model(4, 16384, 256)
    listed = [[8], [8], [16]]
    launch = experts.product("down", listed, 128, 2, NARROW, 1e6, H200)
    convert, multiply = 2 * 88 * 2.0, 150
    alone = 2 * 2 * (convert + multiply + 60)
    assert launch.clocks["step by step"] == pytest.approx(alone)
    assert launch.waves == 384 / 264 and launch.ctas == 132
    beside = 88 * 2 * (2.0 + 2.9 * multiply / (multiply + convert))
    shared = 2 * (3 * beside + (8 + 8 + 16) * 1.25)  # three tiles on some multiprocessors
    assert launch.clocks["issue"] == pytest.approx(shared, rel=1e-6)
    wide = experts.product("down", [[224]], 1, 1, WIDE, 1e6, H200)
    assert wide.clocks["step by step"] == pytest.approx(2 * 88 * 4.9 + 5 * 224)
    assert [launch.name for launch in experts.calls(model, (8, 8, 16, 0), 4, H200)] == [
        "work list", "quantise", "gate and up", "quantise h", "down", "sum of experts",
    ]  # fmt: skip


def test_a_step_of_attention() -> None:
    """128 keys: 4,096 clocks of products; keys written and read twice, Q twice, P five times: 4,864 of the port."""
    assert attention.step_clocks(fp8=False) == {"tensor": 4096 + 1312, "port": 3 * 1024 + 1024 + 640}
    assert attention.step_clocks(fp8=True)["port"] == 4736 + 584 + 1312
    assert attention.keys_of("csa512", 1024) == (128, 256) and attention.keys_of("hca", 4096) == (128, 32)


def test_attention_of_one_token_is_a_cluster_and_of_many_a_cta_each() -> None:
    one = attention.many_heads("one", "csa512", 32_768, 1, 64, H200)
    assert one.ctas == 4 * 5 and not one.clocks  # four splits of the channels, five steps
    many = attention.many_heads("many", "csa512", 32_768, 256, 64, H200)
    assert many.ctas == 132 and many.memory > 256 * 640 * 608
    q = 2 * 64 * 1024 / H200.fitted.l2_clock_bytes
    assert many.clocks["tensor"] == pytest.approx(2 * (5 * (4096 + 1312) + q))


def test_few_heads_merge_their_leaves_one_after_the_other() -> None:
    """640 keys are ten tiles, of which eight CTAs have at most two; each reads an eighth of ten results of 32 KB, seven
    of eight from other CTAs. With sixteen tokens and the kernel for few tokens each tile has a CTA."""
    launch = attention.few_heads("few", "csa512", 32_768, 1, 16, H200, by_tiles=False)
    assert launch.ctas == 8 and launch.clocks["tiles"] == 2 * 4455
    assert launch.chain == pytest.approx(2 * 180 + 10 * (260 + 7 / 8 * 32_768 / 8 / 10))
    assert attention.few_heads("few", "csa512", 32_768, 1, 16, H200).clocks["tiles"] == 4455
    some, many = (attention.few_heads("few", "csa512", 32_768, tokens, 16, H200) for tokens in (64, 256))
    assert some.ctas == 128 and some.clocks["tiles"] == 5 * 4455  # two CTAs a token
    assert many.ctas == 132 and many.clocks["tiles"] == 10 * 4455 and many.chain == 1500


def test_a_boundary_reads_fn_once_for_each_round_of_clusters() -> None:
    fn = 24 * 4 * 4096 * 4
    few, many = (rows.boundary("", tokens, 4096, H200) for tokens in (1, 64))
    assert few.memory == many.memory == fn and few.ctas == 8
    assert few.l2 - fn == 4096 * 21 and many.l2 - 16 * fn == 64 * 4096 * 21
    assert many.busiest - 2 * fn / 8 == pytest.approx(64 * 4096 * 21 / 120)  # the sixteenth cluster is a second round
    assert (few.chain, many.chain) == (4086 + 180 + 3515, 4845 + 180 + 3515)  # two CTAs a multiprocessor with 64 tokens
    alone = rows.boundary("", 64, 4096, H200, Plan(4, 4096, 24, True, one_cta=True))
    assert alone.chain == 2 * many.chain + 263 and many.ahead == pytest.approx(fn / 16 / many.busiest)


def test_a_boundary_of_many_tokens_is_one_group_after_the_other() -> None:
    """1,024 groups are 35 rounds of 15 clusters with two teams. Their rows, 21 bytes a channel, come from memory, those
    of 256 tokens from L2."""
    large, small = (rows.boundary("", tokens, 4096, GPU) for tokens in (8192, 256))
    of_group = 7200 + 2 * 180 + 1500
    assert large.clocks["groups"] == 35 * (of_group + 3 * 2000) and small.clocks["groups"] == 2 * (of_group + 3 * 263)
    assert large.memory - small.memory == 8192 * 4096 * 21 and small.memory == 24 * 4 * 4096 * 4
    assert large.chain == small.chain == 0


def test_a_boundary_of_parts_loads_fn_while_parts_travel() -> None:
    """A store arrives after 3 us, and 64 tokens in bf16 for three ranks take 6.3 us, in which 9.3 of the 9.8 us of fn's
    first half hide. In the kernel before, a thread with two runs of channels waited for L2 three times more."""
    launch = rows.boundary_of_parts("", 64, 4096, 4, GPU)
    alone = rows.boundary("", 64, 4096, GPU)
    assert launch.link == 3 * 64 * 8192
    assert time_us(launch, GPU) == pytest.approx(time_us(alone, GPU))
    later = time_us(replace(launch, crossings=2), GPU) - time_us(alone, GPU)
    assert later == pytest.approx(launch.link / 0.25e6 + 2 * 3.0 - 24 * 4 * 4096 * 4 / 16 / 10_000)
    in_turn = rows.boundary_of_parts("", 64, 4096, 4, GPU, in_turn=True)
    assert time_us(in_turn, GPU) - time_us(launch, GPU) == pytest.approx(3 * 0.263)


def test_a_boundary_on_blackwell_has_one_round_of_clusters() -> None:
    """64 tokens: eight groups of eight if 15 clusters run at once, sixteen of four if 16 do; its products are
    interleaved. V4-Pro's are not."""
    fn, row = 24 * 4 * 4096 * 4, 4096 * 21
    large, small = (rows.boundary("", 64, 4096, B200, at_once=n) for n in (15, 16))
    assert (large.ctas, small.ctas) == (64, 128)
    assert [x.busiest - fn / 8 for x in (large, small)] == pytest.approx([row, row / 2])
    assert (large.chain, small.chain) == (4110 + 180 + 3515, 3356 + 180 + 3515)
    assert [x.ahead * x.busiest for x in (large, small)] == pytest.approx([fn / 8, fn / 8])  # all of fn
    assert rows.boundary("", 64, 7168, B200).chain == 7389 + 180 + 3515


def test_a_sum_over_ranks_stores_its_part_into_every_other_gpu() -> None:
    ours, large = (rows.sum_over_ranks("", tokens, 4096, 4, H200) for tokens in (512, 513))
    assert ours.link == 3 * 512 * 8192 and ours.crossings == 1
    assert large.link == 1.5 * 513 * 8192 and large.crossings == 6


def test_scores_of_few_tokens_are_divided_among_all_ctas() -> None:
    few = index.scores("", 1, 1152, 32_768, H200)
    many = index.scores("", 1, 1152, 32_768, H200, of_few=False)
    assert few.ctas == 18 and few.clocks["issue"] == 861 and few.chain == 0
    assert many.ctas == 3 and many.clocks["issue"] == 8 * 861


def test_integer_instructions_take_longer_beside_products() -> None:
    """Alone they keep their clocks. Beside products all of the time they take 2.45 times as many: 98 for 40."""
    assert index.alu_beside_products(40.0, 0.0) == 40.0
    assert index.alu_beside_products(40.0, 98.0) == pytest.approx(98.0)
    chunk = index.scores_of_chunk("", 132e6, H200)
    assert chunk.clocks["tensor"] == 4e6 and 6e6 < chunk.clocks["alu"] < 3.51e6 * 2.45


def test_attention_on_blackwell_is_linear_in_key_tiles() -> None:
    cycles = blackwell._static("sparse_attention_sm100_static.json")
    launch = blackwell.attention("", "csa512", 32_768, 1, 64, B200)
    assert launch.clocks["port"] == pytest.approx(cycles["CSA 512"]["port"], rel=0.01)
    pair = blackwell.attention("", "csa1024", 32_768, 1, 128, B200)
    assert pair.ctas == 2 and pair.clocks["port"] == pytest.approx(cycles["CSA 1024, 128 heads"]["port"], rel=0.01)


def test_a_forward_has_the_launches_of_its_layers() -> None:
    """Layers without entries have no compressor and no indexer; short contexts have no scores."""
    f = step.Forward(step.FLASH, 64, 4608, 4)
    of = {ratio: {x.name for x in step.attention_sublayer(f, ratio, H200).all} for ratio in (0, 4, 128)}
    assert of[128] - of[0] == {"projections", "compress_store"}
    assert of[4] - of[128] == {"index wq_b", "index_query", "scores", "choice"}
    assert not step.index_launches(replace(f, context=2048), B200)
    csa = step.attention_sublayer(f, 4, H200)
    assert [x.name for x in csa.side[-2:]] == ["scores", "choice"] and csa.after[0].name == "attention"
    assert [x.name for x in step.boundaries(f, B200)] == ["boundary"]
    assert [x.name for x in step.boundaries(replace(f, tokens=128), B200)] == ["sum over ranks", "boundary"]


@pytest.mark.parametrize(("tokens", "products_beside", "joint"), [(16, 1, 1), (32, 1, 1), (64, 0, 1), (128, 0, 0)])
def test_launches_beside_each_other_on_blackwell(tokens: int, products_beside: int, joint: int) -> None:
    """Products on two streams up to 32 tokens, other kernels in joint launches up to 64."""
    f = step.Forward(step.FLASH, tokens, 4608, 4)
    csa, of_experts = step.attention_sublayer(f, 4, B200), step.experts_sublayer(f, B200)
    assert not csa.side and not of_experts.side
    names = {launch.name for launch in (*csa.all, *of_experts.all)}
    for joined, beside in (
        ("wqkv_a + projections", products_beside),
        ("wq_b + index wq_b", products_beside),
        ("gate + shared gate and up", products_beside),
        ("gate and up + shared down", products_beside),
        ("norm_rope_store + compress_store + index_query", joint),
        ("route_topk_logits, work list + swiglu_fp8", joint),
    ):
        assert (joined in names) == bool(beside), joined
        assert (joined.split(" + ")[0] in names) == (not beside and "," not in joined), joined


def test_launches_beside_each_other_add_their_bytes() -> None:
    """With more CTAs than multiprocessors also the work of the busiest one."""
    a = Launch("a", ctas=60, memory=8.0, l2=30.0, busiest=10.0, in_flight=5.0, clocks={"port": 7.0}, chain=3, waves=2)
    b = Launch("b", ctas=40, memory=9.0, l2=20.0, busiest=6.0, in_flight=1.0, clocks={"issue": 9.0}, ahead=1, waves=1)
    found = launch.together([a, b], GPU)
    assert (found.name, found.ctas, found.memory, found.l2, found.waves) == ("a + b", 100, 17.0, 50.0, 1)
    assert (found.busiest, found.busiest / found.in_flight) == (10.0, 6.0) and found.clocks == {
        "port": 7.0,
        "issue": 9.0,
    }
    assert (found.chain, found.from_memory, found.ahead) == (3, 1, 0)
    more = launch.together([a, replace(b, ctas=41, clocks={"port": 1.0})], GPU)
    assert (more.ctas, more.busiest, more.busiest / more.in_flight, more.clocks) == (100, 16.0, 8.0, {"port": 8.0})
    chained = launch.one_after_the_other(
        replace(a, instructions=5, from_l2=1), *[replace(b, instructions=7, from_l2=2)] * 2
    )
    assert (chained.name, chained.ctas, chained.instructions, chained.from_l2) == ("b, a", 1, 19, 5)


def test_errors_are_geometric_means() -> None:
    found = measured.Errors.of({"a": 2.0, "b": 0.5, "c": 1.0})
    assert (found.mean, found.worst, found.bias) == (round(4 ** (1 / 3) - 1, 3), 1.0, 1.0)


RENEW = "after a change of a plan: benchmarks/model_step.py --write, tests/lib/documents/result_tables.py --write"


def assert_equal(found: object, recorded: object, where: str) -> None:
    """Check that documents are equal; numbers to half a percent, because fp32 sums differ from CPU to CPU."""
    if isinstance(found, dict):
        assert isinstance(recorded, dict) and found.keys() == recorded.keys(), where
        for key, value in found.items():
            assert_equal(value, recorded[key], f"{where}.{key}")
    elif isinstance(found, (list, tuple)):
        assert isinstance(recorded, list) and len(found) == len(recorded), where
        for i, value in enumerate(found):
            assert_equal(value, recorded[i], f"{where}[{i}]")
    elif isinstance(found, float):
        assert math.isclose(found, recorded, rel_tol=5e-3, abs_tol=2e-3), f"{where}: {found}, not {recorded}; {RENEW}"
    else:
        assert found == recorded, f"{where}; {RENEW}"


def test_the_file_is_what_the_command_writes(document: dict) -> None:
    assert_equal(document, json.loads(model_step.RESULT.read_text()), "step_model")


def test_errors_have_not_grown(document: dict) -> None:
    """The goal was 15 % in the mean and 30 % at worst. Only the mean of the held-out kernels reaches it; steps miss
    both since the whole model was measured on two GPUs."""
    assert document["held_out"]["mean"] < 0.15 and document["steps"]["mean"] < 0.16
    assert document["held_out"]["worst"] < 0.7 and document["steps"]["worst"] < 0.43
    assert not measured.FITTED.keys() & measured.HELD_OUT.keys()


@pytest.mark.parametrize(
    ("rows_of_weight", "groups"), [(256, 1), (1024, 1), (2624, 1), (1024, 8), (32_320, 1)], ids=str
)
def test_blackwell_s_tiles_are_near_the_best_by_the_model(rows_of_weight: int, groups: int) -> None:
    """The choice by bytes of a wave, against every tile, from one token to a chunk."""
    arch = "sm_100a"
    for tokens in (1, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 8192):
        shape = tokens, rows_of_weight, groups

        def us(tile: object, shape: tuple[int, int, int] = shape) -> float:
            return time_us(products.by_mma_sync("", tile, *shape, B200), B200)

        least = min(map(us, gpu.TILES))
        assert us(gpu.chosen(arch, *shape, B200.multiprocessors)) <= 1.25 * least, shape


@pytest.mark.slow
def test_the_constants_are_those_of_the_fit() -> None:
    for name, value in vars(measured.fit()).items():
        assert value == pytest.approx(getattr(H200.fitted, name), rel=0.05), name
