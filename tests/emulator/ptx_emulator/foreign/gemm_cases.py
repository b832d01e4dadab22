"""CUTLASS's CuTe DSL GEMMs for Blackwell."""

from ptx_emulator.foreign.case import CUTE, DSL, Case

TWO_CTA = "--use_2cta_instrs --cluster_shape_mn 2,1"


def _gemm_tutorials() -> list[Case]:
    names = ["fp16_gemm_0", "fp16_gemm_1", "fp16_gemm_2", "fp16_gemm_3", "fp16_gemm_3_1"]
    names += ["fp16_gemm_4", "fp16_gemm_5", "fp16_gemm_6"]
    return [
        Case(
            f"tutorial {name}",
            f"{CUTE}/tutorial/tutorial_gemm/{name}.py",
            "--mnk 512,512,256",
            quick=name in ("fp16_gemm_0", "fp16_gemm_6"),
            forgiven=("grid_dependency",) if name == "fp16_gemm_6" else (),
        )
        for name in names
    ]


def _dense_gemms() -> list[Case]:
    folder = f"{CUTE}/kernel/dense_gemm"
    persistent, plain = f"{folder}/dense_gemm_persistent.py", f"{folder}/dense_gemm.py"
    return [
        Case("dense_gemm_persistent", persistent, "--mnkl 512,512,256,1"),
        Case(
            "dense_gemm_persistent 2-CTA 256x128",
            persistent,
            f"--mnkl 512,256,256,1 --mma_tiler_mn 256,128 {TWO_CTA}",
        ),
        Case(
            "dense_gemm_persistent fp8",
            persistent,
            "--mnkl 256,256,256,1 --ab_dtype Float8E4M3FN --c_dtype Float16",
        ),
        Case(
            "dense_gemm_persistent tf32",
            persistent,
            "--mnkl 256,256,128,1 --ab_dtype TFloat32 --c_dtype Float32",
        ),
        Case(
            "dense_gemm M=64 MN-major bf16",
            plain,
            "--mnkl 128,128,128,1 --mma_tiler_mn 64,64 --ab_dtype BFloat16 --a_major m --b_major n",
        ),
        Case(
            "dense_gemm 2-CTA M=128",
            plain,
            f"--mnkl 128,128,128,1 --mma_tiler_mn 128,128 {TWO_CTA}",
            quick=True,
        ),
        Case(
            "dense_gemm ragged, TMA store",
            plain,
            "--mnkl 200,136,72,2 --mma_tiler_mn 128,128 --use_tma_store",
        ),
        *[
            Case(
                f"dense_gemm {m}x{n} {major}",
                plain,
                f"--mnkl 128,{n},128,1 --mma_tiler_mn {m},{n} --ab_dtype Float16 --c_dtype Float32 --b_major {major}",
            )
            for m, n, major in ((128, 64, "k"), (128, 64, "n"), (128, 128, "n"), (128, 256, "k"), (128, 256, "n"))
        ],
        Case(
            "dense_gemm s8",
            plain,
            "--mnkl 256,256,128,1 --ab_dtype Int8 --c_dtype Int32 --acc_dtype Int32",
        ),
        Case(
            "dense_gemm u8 2-CTA",
            plain,
            f"--mnkl 256,256,128,1 --ab_dtype Uint8 --c_dtype Int32 --acc_dtype Int32 --mma_tiler_mn 256,128 {TWO_CTA}",
        ),
        Case(
            "dense_gemm fp8, f16 accumulators",
            plain,
            "--mnkl 256,256,128,1 --ab_dtype Float8E4M3FN --c_dtype Float16 --acc_dtype Float16",
        ),
        Case(
            "dense_gemm tf32 MN-major",
            plain,
            "--mnkl 128,128,128,1 --ab_dtype TFloat32 --c_dtype Float32 --a_major m --b_major n --mma_tiler_mn 128,64",
        ),
        Case(
            "dense_gemm M-major C, TMA store",
            plain,
            "--mnkl 256,256,128,1 --ab_dtype Float16 --c_dtype Float16 --c_major m --use_tma_store",
        ),
        Case(
            "dense_gemm_persistent 64x32, cluster 2x2",
            persistent,
            "--mnkl 512,512,256,2 --ab_dtype Float16 --c_dtype Float16 --mma_tiler_mn 64,32 --cluster_shape_mn 2,2 "
            "--use_tma_store",
        ),
        Case(
            "dense_gemm_persistent 2-CTA 128x256, cluster 4x2",
            persistent,
            "--mnkl 512,512,256,1 --ab_dtype Float16 --c_dtype Float16 --use_2cta_instrs --mma_tiler_mn 128,256 "
            "--cluster_shape_mn 4,2",
        ),
        Case("dense_gemm_persistent_prefetch", f"{folder}/dense_gemm_persistent_prefetch.py", "--mnkl 256,256,256,1"),
        Case(
            "dense_gemm_software_pipeline e5m2 2-CTA",
            f"{folder}/dense_gemm_software_pipeline.py",
            f"--mnkl 256,256,256,1 --ab_dtype Float8E5M2 --c_dtype Float16 --mma_tiler_mn 256,128 {TWO_CTA} "
            "--use_tma_store",
        ),
        Case(
            "dense_gemm_persistent_dynamic 2-CTA",
            f"{folder}/dense_gemm_persistent_dynamic.py",
            f"--mnkl 512,256,256,1 --ab_dtype Float16 --c_dtype Float16 --mma_tiler_mn 256,128 {TWO_CTA}",
        ),
        Case(
            "dense_gemm_persistent_dynamic split-K",
            f"{folder}/dense_gemm_persistent_dynamic.py",
            "--mnkl 256,256,512,1 --ab_dtype Float16 --c_dtype Float32 --cluster_split_k 2",
        ),
        Case(
            "dense_gemm_alpha_beta_persistent",
            f"{folder}/dense_gemm_alpha_beta_persistent.py",
            "--mnkl 256,256,256,1 --alpha 2 --beta 0.5",
        ),
        *[
            Case(f"efc {name}", f"{CUTE}/efc/{name}_dense_gemm.py")
            for name in ("custom_epilogue", "synthetic_custom_epilogue", "activation_custom_epilogue")
        ],
    ]


def _block_scaled_gemms() -> list[Case]:
    folder = f"{CUTE}/kernel/blockscaled_gemm"
    persistent = f"{folder}/dense_blockscaled_gemm_persistent.py"

    def mx(name: str, a: str, b: str, options: str) -> Case:
        types = f"--a_dtype {a} --b_dtype {b} --sf_dtype Float8E8M0FNU --sf_vec_size 32 --c_dtype Float16"
        return Case(f"blockscaled {name}", persistent, f"{types} {options}")

    return [
        Case(
            "tutorial nvfp4_gemm_0",
            f"{CUTE}/tutorial/tutorial_gemm/nvfp4_gemm_0.py",
            "--mnkl 256,256,512,1",
        ),
        Case(
            "tutorial nvfp4_gemm_1",
            f"{CUTE}/tutorial/tutorial_gemm/nvfp4_gemm_1.py",
            "--mnkl 512,512,512,1",
        ),
        Case(
            "blockscaled nvfp4",
            persistent,
            "--a_dtype Float4E2M1FN --b_dtype Float4E2M1FN --sf_dtype Float8E4M3FN --sf_vec_size 16 --c_dtype Float16 "
            "--mma_tiler_mn 128,128 --cluster_shape_mn 1,1 --mnkl 256,256,256,1",
        ),
        mx(
            "mxfp4 2-CTA",
            "Float4E2M1FN",
            "Float4E2M1FN",
            "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --mnkl 256,256,256,1",
        ),
        mx("mxfp8", "Float8E4M3FN", "Float8E4M3FN", "--mma_tiler_mn 128,128 --mnkl 256,256,256,1"),
        mx(
            "mxfp8 2-CTA 256x64",
            "Float8E4M3FN",
            "Float8E4M3FN",
            "--mma_tiler_mn 256,64 --cluster_shape_mn 2,1 --mnkl 256,256,256,1",
        ),
        mx(
            "mxfp8 MN-major 128x192",
            "Float8E5M2",
            "Float8E4M3FN",
            "--mma_tiler_mn 128,192 --a_major m --b_major n --mnkl 256,192,256,1",
        ),
        mx("mxfp4 x mxfp8", "Float4E2M1FN", "Float8E4M3FN", "--mma_tiler_mn 128,128 --mnkl 256,256,256,1"),
        mx("mxfp6", "Float6E3M2FN", "Float6E2M3FN", "--mma_tiler_mn 128,128 --mnkl 256,256,256,1"),
        Case("blockscaled amax", f"{folder}/dense_blockscaled_gemm_persistent_amax.py", "--mnkl 256,256,256,1"),
        Case("blockscaled prefetch", f"{folder}/dense_blockscaled_gemm_persistent_prefetch.py", "--mnkl 256,256,256,1"),
    ]


def _grouped_and_mixed_gemms() -> list[Case]:
    kernel = f"{CUTE}/kernel"
    grouped, mixed, blockwise = (f"{kernel}/{name}" for name in ("grouped_gemm", "mixed_input_gemm", "blockwise_gemm"))
    return [
        Case("grouped_gemm, tensor maps in shared memory", f"{grouped}/grouped_gemm.py"),
        Case(
            "grouped_gemm, tensor maps in global memory", f"{grouped}/grouped_gemm.py", "--tensormap_update_mode GMEM"
        ),
        Case("grouped_gemm 2-CTA", f"{grouped}/grouped_gemm.py", f"--mma_tiler_mn 256,128 {TWO_CTA}"),
        Case("grouped_blockscaled_gemm", f"{kernel}/blockscaled_grouped_gemm/grouped_blockscaled_gemm.py"),
        Case("mixed_input_gemm int4", f"{mixed}/mixed_input_gemm.py"),
        Case(
            "mixed_input_gemm int8 2-CTA",
            f"{mixed}/mixed_input_gemm.py",
            f"--a_dtype Int8 --mnkl 256,256,256,1 --mma_tiler_mnk 256,128,128 {TWO_CTA} --scale_granularity_m 0 "
            "--scale_granularity_k 0",
        ),
        Case("grouped_mixed_input_gemm", f"{mixed}/grouped_mixed_input_gemm.py"),
        Case("grouped_mixed_input_gemm_acc_scale", f"{mixed}/grouped_mixed_input_gemm_acc_scale.py"),
        Case("blockwise_gemm", f"{blockwise}/blockwise_gemm.py", "--mnkl 256,256,256,1"),
        Case("contiguous_grouped_gemm", f"{blockwise}/contiguous_grouped_gemm.py", "--mnkl 256,256,256,2"),
        Case(
            "masked_grouped_gemm",
            f"{blockwise}/masked_grouped_gemm.py",
            "--mnkl 256,256,256,2",
            forgiven=("out_of_bounds",),
            pad_vectors=True,
        ),
        Case(
            "moe torch_grouped_mm",
            f"{kernel}/moe/torch_grouped_mm.py",
            "--tokens 32 --experts 4 --top_k_select 2 --hidden 256 --intermediate 256",
        ),
        *[
            Case(
                f"cute_ext {name}",
                f"{DSL}/cute_ext/blackwell/{name}.py",
                forgiven=("global_race",) if name == "dense_gemm_ptr_array" else (),
            )
            for name in (
                "dense_gemm",
                "dense_gemm_2sm",
                "dense_gemm_cute_pipeline",
                "dense_gemm_ptr_array",
                "dense_block_scaled_gemm",
            )
        ],
    ]


def cases() -> list[Case]:
    return [*_gemm_tutorials(), *_dense_gemms(), *_block_scaled_gemms(), *_grouped_and_mixed_gemms()]
