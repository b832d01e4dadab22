"""The third-party programs of the suite: all known to be right on a B200, those for sm_90a on an H200."""

from ptx_emulator.foreign import gemm_cases
from ptx_emulator.foreign.case import CUTE, DSL, Case

PRIMITIVES = f"{DSL}/experimental/primitives"
TASKS = f"{DSL}/experimental/task_scheduling/blackwell/tutorial"


def _attention() -> list[Case]:
    folder = f"{CUTE}/kernel/attention"
    fmha, mla = f"{folder}/fmha/fmha.py", f"{folder}/mla"
    mixed = f"{folder}/mixed_input_fmha"
    cases = []
    for head_dim in (64, 128):
        for causal in (False, True):
            cases.append(
                Case(
                    f"fmha d{head_dim}{' causal' if causal else ''} ragged",
                    fmha,
                    f"--q_shape 1,300,2,{head_dim} --k_shape 1,520,1,{head_dim}" + (" --is_causal" if causal else ""),
                )
            )
    return [
        *cases,
        Case(
            "fmha d128 persistent causal",
            fmha,
            "--q_shape 1,512,2,128 --k_shape 1,512,2,128 --is_causal --is_persistent",
        ),
        Case(
            "fmha d128 fp8",
            fmha,
            "--q_shape 1,256,1,128 --k_shape 1,256,1,128 --in_dtype Float8E4M3FN --out_dtype Float16",
        ),
        Case("fmha d32", fmha, "--q_shape 1,256,2,32 --k_shape 1,256,2,32"),
        Case("fmha d128 window", fmha, "--q_shape 1,256,2,128 --k_shape 1,384,1,128 --window_size 64,0"),
        Case("fmha d128 variable lengths", fmha, "--q_shape 2,(100,200),2,128 --k_shape 2,(150,300),1,128"),
        Case(
            "fmha d128 sink, log-sum-exp, emulated exponentials",
            fmha,
            "--q_shape 1,256,2,128 --k_shape 1,384,1,128 --enable_sink --lse_calculation --enable_ex2_emulation "
            "--enable_skip_correction",
        ),
        Case(
            "fmha d128 skipped softmax",
            fmha,
            "--q_shape 1,256,2,128 --k_shape 1,384,1,128 --skip_softmax_threshold 0.5",
        ),
        Case("fmha_bwd", f"{folder}/fmha/fmha_bwd.py", ""),
        Case("mla_decode_fp16", f"{mla}/mla_decode_fp16.py", ""),
        Case("mla_decode_fp8", f"{mla}/mla_decode_fp8.py", ""),
        Case("mixed_input_fmha_prefill_d256", f"{mixed}/mixed_input_fmha_prefill_d256.py"),
        Case("mixed_input_fmha_prefill_d512", f"{mixed}/mixed_input_fmha_prefill_d512.py", forgiven=("race",)),
        Case(
            "mixed_input_fmha_decode",
            f"{mixed}/mixed_input_fmha_decode.py",
            forgiven=("race", "uninitialised_smem"),
        ),
        Case("mamba2_ssd", f"{folder}/mamba2_ssd/mamba2_ssd.py", "--gbehcdln 1,2,1,2,4,64,128,128"),
    ]


def _without_tensor_memory() -> list[Case]:
    """Normalisation, copies, and kernels of the sm_80 style compiled for sm_100a."""
    ampere = f"{DSL}/cute/ampere/kernel"
    return [
        Case("rmsnorm", f"{CUTE}/kernel/rmsnorm/rmsnorm.py"),
        *[
            Case(f"tutorial {n}", f"{CUTE}/tutorial/tutorial_tma/{n}.py", "--M 256 --N 128")
            for n in ("tma_v0", "tma_v1")
        ],
        Case("tutorial tma_v2", f"{CUTE}/tutorial/tutorial_tma/tma_v2.py", "--M 256 --N 128"),
        Case("tensorop_gemm", f"{ampere}/dense_gemm/tensorop_gemm.py", "--mnkl 256,256,64,1"),
        Case(
            "flash_attention_v2",
            f"{ampere}/attention/flash_attention_v2.py",
            "--batch_size 1 --seqlen_q 256 --seqlen_k 256 --num_head 2",
        ),
        Case(
            "geforce dense_gemm",
            f"{DSL}/cute/blackwell_geforce/kernel/dense_gemm/dense_gemm.py",
            "--mnkl 256,256,128,1",
        ),
        Case("cta_norm", f"{DSL}/cute/hopper/kernel/cta_norm/cta_norm.py"),
        Case("programmatic_dependent_launch", f"{DSL}/dsl_tutorials/programmatic_dependent_launch.py"),
        Case("inline_ptx", f"{DSL}/dsl_tutorials/inline_ptx.py"),
    ]


def _task_scheduling() -> list[Case]:
    def case(name: str, forgiven: tuple[str, ...] = ()) -> Case:
        return Case(f"tasks {name.split('/')[1]}", f"{TASKS}/{name}.py", forgiven=forgiven)

    return [
        case("01_copy_basics_ts/01_copy_grid_stride"),
        case("01_copy_basics_ts/02_copy_tma"),
        case("02_gemm_simple_ts/01_fp16_bf16_gemm_3", ("race",)),
        case("03_persistent_scheduling_dynamic_domain_ts/01_copy_persistent_skip_tile"),
        case("03_persistent_scheduling_dynamic_domain_ts/02_copy_varlen_dynamic_domain"),
        case("06_gemm_split_k_fp16_ts/01_gemm_split_k_fp16", ("race",)),
    ]


def _flash_attention_4() -> list[Case]:
    def case(name: str, arguments: str, quick: bool = False) -> Case:
        return Case(f"FA4 {name}", "flash-attention", arguments, "flash_attention_4", quick=quick)

    return [
        case(
            "forward d128 causal GQA ragged",
            "forward --head-dim 128 --queries 200 --keys 333 --heads 4 --kv-heads 1 --causal",
        ),
        case(
            "forward d64 ragged",
            "forward --head-dim 64 --queries 200 --keys 333 --heads 2 --kv-heads 2",
        ),
        case(
            "forward d256 2-CTA",
            "forward --head-dim 256 --queries 256 --keys 256 --heads 2 --kv-heads 1 --causal",
        ),
        case(
            "backward d128 causal GQA ragged",
            "backward --head-dim 128 --queries 200 --keys 333 --heads 2 --kv-heads 1 --causal",
        ),
        case("backward d64", "backward --head-dim 64 --queries 256 --keys 256 --heads 2 --kv-heads 2"),
        case("MLA dense causal", "mla --queries 4 --keys 256"),
        case("MLA top-k 512", "mla --queries 2 --keys 1024 --topk 512", quick=True),
        case("MLA top-k 512, padded", "mla --queries 2 --keys 1024 --topk 512 --padding 100"),
        case("MLA top-k 2048", "mla --queries 1 --keys 4096 --topk 2048"),
        case("MLA top-k 512, backward", "mla --queries 2 --keys 1024 --topk 512 --backward"),
    ]


def _quack() -> list[Case]:
    def case(name: str, arguments: str, arch: str) -> Case:
        # FlashAttention-4 depends on quack; it is imported as an installed package.
        return Case(name, "flash-attention", arguments, "quack_gemm", arch=arch)

    return [
        case("QuACK gemm, gathered rows", "gathered --mnk 300,256,128", "sm_100a"),
        case("sm_90a QuACK gemm, gathered rows", "gathered --mnk 300,256,128", "sm_90a"),
        case("sm_90a QuACK gemm, more tiles than CTAs, from a counter", "dynamic --mnk 2048,1536,64", "sm_90a"),
    ]


def _stream_k() -> list[Case]:
    def case(name: str, arguments: str) -> Case:
        return Case(f"CUTLASS C++ stream-K {name}", "cutlass", arguments, "cutlass_stream_k", forgiven=("global_race",))

    return [
        case("2 tiles on 5 CTAs", "--mnk 256,128,1024 --ctas 5"),
        case("6 tiles on 4 CTAs", "--mnk 384,256,512 --ctas 4"),
    ]


def _flash_mla() -> list[Case]:
    def case(name: str, arguments: str, forgiven: tuple[str, ...] = ()) -> Case:
        return Case(f"FlashMLA {name}", "FlashMLA", arguments, "flash_mla", forgiven=forgiven)

    return [
        case("sparse prefill, 64 heads", "prefill --heads 64 --queries 2 --keys 1024 --topk 512"),
        case("sparse prefill, 128 heads", "prefill --heads 128 --queries 2 --keys 1024 --topk 512"),
        case(
            "sparse decode, 64 heads, fp8 pages",
            "decode --heads 64 --batch 2 --keys 1024 --topk 512",
            ("race",),
        ),
        case(
            "sparse decode, 64 heads, fp8 pages, split",
            "decode --heads 64 --batch 1 --keys 1024 --topk 512 --parts-per-request 2",
            ("race",),
        ),
        case(
            "sparse decode, 128 heads, fp8 pages",
            "decode --heads 128 --batch 2 --keys 1024 --topk 512",
        ),
    ]


def _primitives() -> list[Case]:
    names = {
        "tcgen05": (
            "1cta_mma_a_from_tmem 1cta_mma_basic 1cta_mma_mn_major 1cta_mma_pipeline "
            "2cta_mma_basic 2cta_mma_blockscale_m128 2cta_mma_tma_store clusterMxN_2cta_mma "
            "cp_narrow_a_to_tmem_mma mcast_clusterMxN_1cta_mma mcast_clusterMxN_2cta_mma "
            "tmem_ld_st tmem_ld_to_stmatrix_transpose"
        ),
        "tma": (
            "tma_1cta_mbarrier tma_load_store tma_load_to_ldmatrix tma_multicast "
            "tma_pipeline_count2 tma_pipeline_pingpong tma_pipeline_single_warp "
            "tma_pipeline_warpspec tma_store tma_swizzle_modes tma_tensormap_replace"
        ),
        "reduction": (
            "block_smem_reduce cluster_smem_reduce cluster_tmem_reduce thread_vector_reduce warp_vector_reduce"
        ),
        "tutorial": (
            "01_hello_world 02_naive_gemm 03_gemm_tiled_smem 04_tma_load 05_minimal_tensor_mma "
            "06_softmax 07_vectorized_array 09_tma_4d_to_2d 10_minimal_tensor_mma_fp8 "
            "gemm_M128_N128_Kany_TN_warpspec_multistage"
        ),
        ".": (
            "async_pipeline bar_warp_sync barrier_cta_red barrier_cta_sync basic_types "
            "cp_async_bulk cp_async_bulk_prefetch cp_async_mbarrier_arrive_cluster "
            "cp_async_mbarrier_arrive_cta cp_async_shared_global cp_async_shared_global_swizzled "
            "elect_sync ldmatrix_stmatrix mapa mbarrier mbarrier_lifecycle "
            "pipeline_software_fill red redux_sync shfl_sync vote_sync warp_named_barrier"
        ),
    }
    quick = {"tma_swizzle_modes", "1cta_mma_a_from_tmem"}
    arguments = {"cp_narrow_a_to_tmem_mma": "--a-dtype all"}
    forgiven = {
        "2cta_mma_blockscale_m128": ("race",),
        "mcast_clusterMxN_1cta_mma": ("exited_cta",),
        "mcast_clusterMxN_2cta_mma": ("exited_cta",),
        "cluster_tmem_reduce": ("race",),
        "05_minimal_tensor_mma": ("race",),
        "06_softmax": ("race",),
        "10_minimal_tensor_mma_fp8": ("race",),
        "gemm_M128_N128_Kany_TN_warpspec_multistage": ("race", "uninitialised_smem"),
        "mapa": ("exited_cta",),
        "tma_multicast": ("race",),
        "tma_pipeline_single_warp": ("race",),
    }
    skips = {"03_gemm_tiled_smem": "a GEMM of 1024 x 1024 x 1024 on CUDA cores takes minutes here"}
    slicek_variants = (
        "async_s32_smem a_tmem_core_matrix tma_s128_mma_s32 tma_s32_mma_s32 n_group_a_tmem_shift_wdm "
        "n_group_smem_a_reuse_wdm"
    )
    return [
        Case(
            f"primitives {name}",
            f"{PRIMITIVES}/{folder}/{name}.py",
            arguments.get(name, ""),
            quick=name in quick,
            skip=skips.get(name, ""),
            forgiven=forgiven.get(name, ()),
        )
        for folder, folder_names in names.items()
        for name in folder_names.split()
    ] + [
        Case(
            f"primitives slicek {variant}",
            f"{PRIMITIVES}/tcgen05/slicek_m32n8k128.py",
            variant,
            forgiven=("uninitialised_tmem",) if variant == "n_group_a_tmem_shift_wdm" else (),
        )
        for variant in slicek_variants.split()
    ]


def _hopper() -> list[Case]:
    folder = f"{DSL}/cute/hopper/kernel"
    gemms, fmha = f"{folder}/dense_gemm", f"{folder}/attention/fmha.py"

    def program(name: str, path: str, arguments: str, quick: bool = False, forgiven: tuple[str, ...] = ()) -> Case:
        return Case(f"sm_90a {name}", path, arguments, arch="sm_90a", quick=quick, forgiven=forgiven)

    def fa4(name: str, arguments: str) -> Case:
        return Case(f"sm_90a FA4 {name}", "flash-attention", arguments, "flash_attention_4", arch="sm_90a")

    return [
        program("dense_gemm", f"{gemms}/dense_gemm.py", "--mnkl 512,512,256,1", quick=True),
        program(
            "dense_gemm MN-major 128x256 cluster 2x1",
            f"{gemms}/dense_gemm.py",
            "--mnkl 512,512,128,2 --a_major m --b_major n --tile_shape_mn 128,256 --cluster_shape_mn 2,1",
        ),
        program("dense_gemm 64x64", f"{gemms}/dense_gemm.py", "--mnkl 256,192,128,1 --tile_shape_mn 64,64"),
        program(
            "dense_gemm fp8",
            f"{gemms}/dense_gemm.py",
            "--mnkl 256,256,256,1 --a_dtype Float8E4M3FN --b_dtype Float8E5M2 --c_dtype Float16",
        ),
        program("dense_gemm f16 accumulator", f"{gemms}/dense_gemm.py", "--mnkl 256,256,128,1 --acc_dtype Float16"),
        program("dense_gemm_persistent", f"{gemms}/dense_gemm_persistent.py", "--mnkl 512,512,256,1"),
        program(
            "dense_gemm_persistent cluster 1x2",
            f"{gemms}/dense_gemm_persistent.py",
            "--mnkl 512,512,256,1 --cluster_shape_mn 1,2 --tile_shape_mn 128,128",
        ),
        program("dense_gemm_fp8_2xacc", f"{gemms}/dense_gemm_fp8_2xacc.py", "", forgiven=("wgmma_fence",)),
        program("grouped_gemm", f"{folder}/grouped_gemm/grouped_gemm.py", ""),
        program("fmha d128", fmha, "--q_shape 1,256,2,128 --k_shape 1,512,2,128"),
        program(
            "fmha d64 causal persistent", fmha, "--q_shape 1,256,2,64 --k_shape 1,256,1,64 --is_causal --is_persistent"
        ),
        fa4(
            "forward d128 causal GQA ragged",
            "forward --head-dim 128 --queries 200 --keys 333 --heads 4 --kv-heads 1 --causal",
        ),
        fa4("forward d64 ragged", "forward --head-dim 64 --queries 200 --keys 333 --heads 2 --kv-heads 2"),
        fa4("forward d256", "forward --head-dim 256 --queries 130 --keys 256 --heads 1 --kv-heads 1"),
    ]


CASES: list[Case] = [
    *gemm_cases.cases(),
    *_attention(),
    *_without_tensor_memory(),
    *_task_scheduling(),
    *_flash_attention_4(),
    *_quack(),
    *_flash_mla(),
    *_stream_k(),
    *_primitives(),
    *_hopper(),
]
