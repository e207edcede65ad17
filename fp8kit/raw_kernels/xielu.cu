// functions: xielu_fwd, xielu_bwd, xielu_sums (xielu_bwd)
// variants: T=f32,bf16,f16
//
// xIELU (Huang & Schlag 2024), an activation with two learned numbers; formula in fp8kit.backends.activation.

#include "rows.cuh"

// log(1 + exp(x)), without overflow.
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

struct Curve {
  float p, n, beta, eps;
  __device__ __forceinline__ float curved(float u) const { return expm1f(u > eps ? eps : u); }
};

DEVICE Curve curve_of(const T* alpha_p, const T* alpha_n, f64 beta, f64 eps) {
  const float least = (float)beta;
  return {softplus(to_float(*alpha_p)), least + softplus(to_float(*alpha_n)), least, (float)eps};
}

// Eight values of x + bias from element i on, in rows of N; bias may be null.
DEVICE void shifted8(const T* x, const T* bias, i64 i, int valid, bool wide, i64 N, float (&u)[8]) {
  const Eight<T> in = read8(x + i, valid, wide);
  i64 column = i % N;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    u[j] = value(in, j) + (bias != nullptr && j < valid ? to_float(bias[column]) : 0.0f);
    if (++column == N) column = 0;
  }
}

// y = xielu(x + bias) over n elements.
extern "C" __global__ void __launch_bounds__(256)
xielu_fwd(const T* x, const T* bias, const T* alpha_p, const T* alpha_n, T* y, i64 n, i64 N, f64 beta,
          f64 eps) {
  const Curve f = curve_of(alpha_p, alpha_n, beta, eps);
  const bool wide = rows_aligned<16>(x, 0) && rows_aligned<16>(y, 0);
  for (i64 i = first() * 8; i < n; i += step() * 8) {
    const int valid = columns_left(i, n);
    float u[8];
    shifted8(x, bias, i, valid, wide, N, u);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      u[j] = (u[j] > 0.0f ? f.p * u[j] * u[j] : f.n * (f.curved(u[j]) - u[j])) + f.beta * u[j];
    write8(y + i, valid, wide, rounded8<T>(u));
  }
}

// dx, and each block's sums of dy u^2 over u > 0 and of dy (expm1(min(u, eps)) - u) over the others.
extern "C" __global__ void __launch_bounds__(256)
xielu_bwd(const T* dy, const T* x, const T* bias, const T* alpha_p, const T* alpha_n, T* dx, float* partial,
          i64 n, i64 N, f64 beta, f64 eps) {
  __shared__ float shared[32];
  const Curve f = curve_of(alpha_p, alpha_n, beta, eps);
  const bool wide = rows_aligned<16>(x, 0) && rows_aligned<16>(dy, 0) && rows_aligned<16>(dx, 0);
  float above = 0.0f, below = 0.0f;
  for (i64 i = first() * 8; i < n; i += step() * 8) {
    const int valid = columns_left(i, n);
    const Eight<T> up = read8(dy + i, valid, wide);
    float u[8];
    shifted8(x, bias, i, valid, wide, N, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float g = value(up, j), curved = f.curved(u[j]);
      if (u[j] > 0.0f)
        above += g * u[j] * u[j];
      else
        below += g * (curved - u[j]);
      u[j] = g * ((u[j] > 0.0f ? 2.0f * f.p * u[j] : f.n * curved) + f.beta);
    }
    write8(dx + i, valid, wide, rounded8<T>(u));
  }
  above = block_sum(above, shared);
  below = block_sum(below, shared);
  if (threadIdx.x == 0) partial[2 * blockIdx.x] = above, partial[2 * blockIdx.x + 1] = below;
}

// The gradients of both numbers: the sums over the blocks, times the slope of softplus. One block.
extern "C" __global__ void __launch_bounds__(256)
xielu_sums(const float* partial, const T* alpha_p, const T* alpha_n, T* dalpha_p, T* dalpha_n, i64 blocks) {
  __shared__ float shared[32];
  float above = 0.0f, below = 0.0f;
  for (i64 i = threadIdx.x; i < blocks; i += blockDim.x) above += partial[2 * i], below += partial[2 * i + 1];
  above = block_sum(above, shared);
  below = block_sum(below, shared);
  if (threadIdx.x) return;
  *dalpha_p = from_float<T>(above / (1.0f + expf(-to_float(*alpha_p))));
  *dalpha_n = from_float<T>(below / (1.0f + expf(-to_float(*alpha_n))));
}
