// functions: softmax_fwd, softmax_bwd
// variants: T=f32,bf16,f16
//
// Softmax over rows of N elements, and its gradient. One block a row, whose passes after the first read the
// row from the cache. Results may lie where the operands do: in the last pass a thread reads only what it
// writes.

#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(512) softmax_fwd(const T* x, T* y, i64 N) {
  __shared__ float shared[32];
  const T* row = x + (i64)blockIdx.x * N;
  T* out = y + (i64)blockIdx.x * N;
  float top = -INF, sum = 0.0f;
  for (i64 c = threadIdx.x; c < N; c += blockDim.x) top = fmaxf(top, to_float(row[c]));
  top = block_max(top, shared);  // NaN, which it drops, comes back by the sum
  for (i64 c = threadIdx.x; c < N; c += blockDim.x) sum += expf(to_float(row[c]) - top);
  sum = block_sum(sum, shared);
  for (i64 c = threadIdx.x; c < N; c += blockDim.x)
    out[c] = from_float<T>(__fdiv_rn(expf(to_float(row[c]) - top), sum));
}

extern "C" __global__ void __launch_bounds__(512) softmax_bwd(const T* y, const T* dy, T* dx, i64 N) {
  __shared__ float shared[32];
  const i64 start = (i64)blockIdx.x * N;
  float sum = 0.0f;
  for (i64 c = threadIdx.x; c < N; c += blockDim.x) sum += to_float(y[start + c]) * to_float(dy[start + c]);
  sum = block_sum(sum, shared);
  for (i64 c = threadIdx.x; c < N; c += blockDim.x)
    dx[start + c] = from_float<T>(to_float(y[start + c]) * (to_float(dy[start + c]) - sum));
}
