// Calls FlashMLA's own host functions with plain pointers, in place of its torch interface.
// The checkout's csrc folder is on the include path; KERNEL picks one kernel, to compile only that.
#define PREFILL_HEAD64 1
#define PREFILL_HEAD128 2
#define DECODE_HEAD64 3
#define DECODE_HEAD128 4

#if KERNEL == PREFILL_HEAD64
#include "sm100/prefill/sparse/fwd/head64/instantiations/phase1_k512.cu"
#elif KERNEL == PREFILL_HEAD128
#include "sm100/prefill/sparse/fwd/head128/instantiations/phase1_k512.cu"
#elif KERNEL == DECODE_HEAD64
#include "sm100/decode/head64/instantiations/model1.cu"
#elif KERNEL == DECODE_HEAD128
#include "sm100/prefill/sparse/fwd_for_small_topk/head128/instantiations/phase1_decode_k512.cu"
#endif

namespace {
constexpr int kHeadDim = 512;
constexpr float kLog2E = 1.4426950408889634f;
using bf16 = cutlass::bfloat16_t;
}  // namespace

#if KERNEL == PREFILL_HEAD64 || KERNEL == PREFILL_HEAD128
extern "C" int run(int num_queries, int num_keys, int num_heads, int topk, float scale,
                    void *q,        // [num_queries, num_heads, 512] bf16
                    void *kv,       // [num_keys, 1, 512] bf16
                    int *indices,   // [num_queries, 1, topk]
                    float *sink,    // [num_heads] or null
                    void *out,      // [num_queries, num_heads, 512] bf16
                    float *max_logits, float *lse) {  // [num_queries, num_heads]
  SparseAttnFwdParams params{};
  params.s_q = num_queries;
  params.s_kv = num_keys;
  params.h_q = num_heads;
  params.h_kv = 1;
  params.d_qk = params.d_v = kHeadDim;
  params.topk = topk;
  params.sm_scale = scale;
  params.sm_scale_div_log2 = scale * kLog2E;
  params.q = static_cast<bf16 *>(q);
  params.kv = static_cast<bf16 *>(kv);
  params.indices = indices;
  params.attn_sink = sink;
  params.stride_q_s_q = num_heads * kHeadDim;
  params.stride_q_h_q = kHeadDim;
  params.stride_kv_s_kv = params.stride_kv_h_kv = kHeadDim;
  params.stride_indices_s_q = params.stride_indices_h_kv = topk;
  params.out = static_cast<bf16 *>(out);
  params.max_logits = max_logits;
  params.lse = lse;
  params.num_sm = 148;
  try {
#if KERNEL == PREFILL_HEAD64
    sm100::fwd::head64::run_fwd_phase1_kernel<kHeadDim>(params);
#else
    sm100::fwd::head128::run_fwd_phase1_kernel<kHeadDim>(params);
#endif
  } catch (const std::exception &) {
    return 1;  // it has printed what failed
  }
  return 0;
}
#else
extern "C" int run(int batch, int num_heads, int num_pages, int page_tokens, int page_bytes,
                    int token_bytes, int topk, float scale,
                    void *q,        // [batch, 1, num_heads, 512] bf16
                    void *kv,       // [num_pages, page_bytes]: fp8 latent, bf16 rope, scales
                    int *indices,   // [batch, 1, topk]
                    float *sink,    // [num_heads] or null
                    void *out,      // [batch, 1, num_heads, 512] bf16
                    float *lse,     // [batch, 1, num_heads]
                    void *schedule,  // [num_parts] DecodingSchedMeta
                    int *num_splits,  // [batch + 1]
                    int num_parts,
                    float *lse_parts, float *out_parts) {  // [batch + num_parts, 1, num_heads(, 512)]
  SparseAttnDecodeParams params{};
  params.b = batch;
  params.s_q = 1;
  params.h_q = num_heads;
  params.h_kv = 1;
  params.d_qk = params.d_v = kHeadDim;
  params.sm_scale = scale;
  params.sm_scale_div_log2 = scale * kLog2E;
  params.num_blocks = num_pages;
  params.page_block_size = page_tokens;
  params.topk = topk;
  params.model_type = ModelType::MODEL1;
  params.q = static_cast<bf16 *>(q);
  params.kv = static_cast<bf16 *>(kv);
  params.indices = indices;
  params.attn_sink = sink;
  params.lse = lse;
  params.out = static_cast<bf16 *>(out);
  params.stride_q_b = params.stride_q_s_q = num_heads * kHeadDim;
  params.stride_q_h_q = kHeadDim;
  params.stride_kv_block = page_bytes;
  params.stride_kv_row = token_bytes;
  params.stride_indices_b = params.stride_indices_s_q = topk;
  params.stride_lse_b = params.stride_lse_s_q = num_heads;
  params.stride_o_b = params.stride_o_s_q = num_heads * kHeadDim;
  params.stride_o_h_q = kHeadDim;
  params.lse_accum = lse_parts;
  params.o_accum = out_parts;
  params.stride_lse_accum_split = params.stride_lse_accum_s_q = num_heads;
  params.stride_o_accum_split = params.stride_o_accum_s_q = num_heads * kHeadDim;
  params.stride_o_accum_h_q = kHeadDim;
  params.tile_scheduler_metadata_ptr = static_cast<DecodingSchedMeta *>(schedule);
  params.num_splits_ptr = num_splits;
  params.num_sm_parts = num_parts;
  try {
#if KERNEL == DECODE_HEAD64
    sm100::decode::head64::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::MODEL1>(params);
#else
    sm100::fwd_for_small_topk::head128::run_fwd_for_small_topk_phase1_kernel<
        SparseAttnFwdMode::DecodeWithSplitKV, kHeadDim>(params);
#endif
  } catch (const std::exception &) {
    return 1;  // it has printed what failed
  }
  return 0;
}
#endif
