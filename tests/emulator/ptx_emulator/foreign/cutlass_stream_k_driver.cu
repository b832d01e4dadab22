// CUTLASS's stream-K GEMM, called with plain pointers. CTAs divide the iterations of all tiles among themselves; a CTA that
// shares a tile with others passes its sums through global memory. The type is that of CUTLASS's example 47, for f16 operands.
#include "cutlass/gemm/device/gemm_universal.h"

namespace {
using f16 = cutlass::half_t;
using RowMajor = cutlass::layout::RowMajor;
constexpr int kAlignment = 128 / cutlass::sizeof_bits<f16>::value;
using Gemm = cutlass::gemm::device::GemmUniversal<
    f16, RowMajor, f16, cutlass::layout::ColumnMajor, f16, RowMajor, float, cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80, cutlass::gemm::GemmShape<128, 128, 32>, cutlass::gemm::GemmShape<64, 64, 32>,
    cutlass::gemm::GemmShape<16, 8, 16>, cutlass::epilogue::thread::LinearCombination<f16, kAlignment, float, float>,
    cutlass::gemm::threadblock::ThreadblockSwizzleStreamK, /*stages*/ 4, kAlignment, kAlignment>;

Gemm::Arguments arguments(int m, int n, int k, int ctas, f16 *a, f16 *b, f16 *d) {
  auto batch = [](int rows, int columns) { return (int64_t)rows * columns; };
  return {cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k}, /*split-K*/ 1, {1.0f, 0.0f}, a, b, d, d,
          batch(m, k), batch(n, k), batch(m, n), batch(m, n), k, k, n, n, ctas};
}
}  // namespace

extern "C" size_t workspace_bytes(int m, int n, int k, int ctas) {
  return Gemm::get_workspace_size(arguments(m, n, k, ctas, nullptr, nullptr, nullptr));
}
extern "C" int run(int m, int n, int k, int ctas,
                   void *a,  // [m, k] f16
                   void *b,  // [n, k] f16
                   void *d,  // [m, n] f16
                   void *workspace) {
  Gemm gemm;
  auto call = arguments(m, n, k, ctas, static_cast<f16 *>(a), static_cast<f16 *>(b), static_cast<f16 *>(d));
  if (gemm.initialize(call, workspace) != cutlass::Status::kSuccess) return 1;
  return gemm.run() != cutlass::Status::kSuccess;
}
