// What steps of optimisers share: how tensors are cut into pieces, whether a step is skipped, the correction
// of moments, and gradients of any type.
#pragma once
#include "rows.cuh"

constexpr int THREADS = 256, ROUNDS = 4, PIECE = 8 * THREADS * ROUNDS;

// Whether the step is skipped: somebody found Inf or NaN.
DEVICE bool skipped(const float* found_inf) { return found_inf != nullptr && *found_inf != 0.0f; }

// 1 - beta**step by repeated squaring, in float64.
DEVICE float correction(f64 beta, i64 step) {
  f64 power = 1.0;
#pragma unroll 1
  for (; step > 0; step >>= 1, beta *= beta)
    if (step & 1) power *= beta;
  return (float)(1.0 - power);
}

template <typename G> DEVICE void grads8_of(const void* grad, i64 at, int valid, float (&g)[8]) {
  floats8(static_cast<const G*>(grad) + at, valid, reinterpret_cast<u64>(grad) % 16 == 0, g);
}

// Eight gradients times `factor`. grad_type: 0 float32, 1 bfloat16, 2 float16.
DEVICE void grads8(const void* grad, i64 grad_type, i64 at, int valid, float factor, float (&g)[8]) {
  if (grad_type == 0)
    grads8_of<f32>(grad, at, valid, g);
  else if (grad_type == 1)
    grads8_of<bf16>(grad, at, valid, g);
  else
    grads8_of<f16>(grad, at, valid, g);
#pragma unroll
  for (int j = 0; j < 8; ++j) g[j] *= factor;
}
