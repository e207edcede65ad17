// What cuBLASLt leaves to do: cropping a padded product, adding a bias of another dtype, products without a
// contraction, scales of whole tensors and of their lines.
//
// functions: finish (gemm, fp8_gemm, block_gemm, scale_product, fp8_gemm_act, fp8_gemm_act_bwd,
//   fp8_gemm_cast, fp8_gemm_lines)
// variants: T=f32; B=f32,bf16,f16
// variants: T=bf16; B=bf16
// variants: T=f16; B=f16
#include "common.cuh"

// out[i, j] = product[i, j] * (a_scale[i] * b_scale[j]) + bias[j] + addend[i, j], rounded once. product
// (null: zeros), the scales (1), bias and addend may be null; a scale's step is 0 where it is one number.
// Strides in elements, addend's as out's. product and addend may be out's own memory.
extern "C" __global__ void __launch_bounds__(256)
finish(const float* product, const B* bias, const T* addend, T* out, i64 rows, i64 columns,
       i64 product_stride, i64 out_stride, const float* a_scale, const float* b_scale,
       i64 a_step, i64 b_step) {
  for (i64 i = first(); i < rows * columns; i += step()) {
    const i64 row = i / columns, column = i % columns;
    const float scale =
        __fmul_rn(a_scale ? a_scale[row * a_step] : 1.0f, b_scale ? b_scale[column * b_step] : 1.0f);
    float value = product != nullptr ? product[row * product_stride + column] : 0.0f;
    value = __fmul_rn(value, scale);  // by 1 nothing changes
    if (bias != nullptr) value += to_float(bias[column]);
    if (addend != nullptr) value += to_float(addend[row * out_stride + column]);
    out[row * out_stride + column] = from_float<T>(value);
  }
}
