// functions: dropout_add, column_sums (dropout_bwd, sum_rows)
// functions: sum_partials (quantize_transpose, norm_bwd, act_bwd, fp8_gemm_act_bwd, dropout_bwd, sum_rows)
// variants: T=f32,bf16,f16
//
// Dropout with bias and residual, its gradient, and sums over rows. The mask is never stored: Philox gives
// element i of the output the same word each time (philox.cuh); it is kept where that word is at least
// `threshold`, and multiplied by `factor` = 1 / (1 - p).

#include "philox.cuh"
#include "rows.cuh"

// Bit j: whether element index + j is kept. Not inlined, so that its registers are not the caller's.
__device__ __noinline__ u32 kept_of_8(const i64* rng, u64 index, u32 threshold) {
  u32 kept = 0;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const uint4 w = philox(load_rng(rng), (index >> 2) + k);
    kept |= ((u32)(w.x >= threshold) | (u32)(w.y >= threshold) << 1 | (u32)(w.z >= threshold) << 2 |
             (u32)(w.w >= threshold) << 3) << 4 * k;
  }
  return kept >> index % 4;
}

// x where it is kept, times factor. `index` is the first element's; rng null: unchanged.
DEVICE void drop8(float (&x)[8], const i64* rng, u64 index, u32 threshold, float factor) {
  if (rng == nullptr) return;
  if (index % 4 == 0) {
    u32 words[8];
    philox_words<8>(load_rng(rng), index, words);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = words[j] >= threshold ? x[j] * factor : 0.0f;
  } else {
    const u32 kept = kept_of_8(rng, index, threshold);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = kept >> j & 1 ? x[j] * factor : 0.0f;
  }
}

// y = residual + dropout(x + bias) over n elements in rows of N, from the end; y may be x.
extern "C" __global__ void __launch_bounds__(256)
dropout_add(const T* x, const T* bias, const T* residual, T* y, const i64* rng, i64 n, i64 N,
            i64 threshold, f64 factor, const i64* part) {
  start_early();
  const u64 base = first_index(part, n);
  const bool wide = rows_aligned<16>(x, 0) && rows_aligned<16>(y, 0) && rows_aligned<16>(residual, 0);
  const bool wide_bias = rows_aligned<16>(bias, 0) && N % 8 == 0;
  const i64 last = ceil_div(n, 8) - 1;
  for (i64 e = first(); e <= last; e += step()) {
    const i64 i = (last - e) * 8;
    const int valid = columns_left(i, n);
    const Eight<T> in = read8(x + i, valid, wide),
                   stream = read8(residual + i, residual == nullptr ? 0 : valid, wide);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = value(in, j);
    if (bias != nullptr) {
      i64 column = i % N;
      if (wide_bias) {
        const Eight<T> b = read8(bias + column, 8, true);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += value(b, j);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[j] += to_float(bias[column]);
          if (++column == N) column = 0;
        }
      }
    }
    drop8(v, rng, base + (u64)i, (u32)threshold, (float)factor);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] += value(stream, j);
    write8(y + i, valid, wide, rounded8<T>(v));
  }
}

constexpr int AHEAD = 4;  // rows of a thread of column_sums that are on their way together

// dx = dropout's gradient of dy, and the sums of its columns before rounding: partial (row blocks, N),
// float32. Either may be null. A block of 32 x 8 threads takes 256 columns of `rows` rows.
extern "C" __global__ void __launch_bounds__(256)
column_sums(const T* __restrict__ dy, T* __restrict__ dx, float* partial, const i64* rng, i64 M, i64 N,
            i64 rows, i64 column_blocks, i64 threshold, f64 factor, const i64* part) {
  __shared__ float of_warps[8][257];
  let_next_start();
  const u64 base = first_index(part, M * N);
  const i64 row_block = blockIdx.x / column_blocks, column0 = blockIdx.x % column_blocks * 256,
            column = column0 + threadIdx.x * 8;
  const int valid = columns_left(column, N);
  const bool wide = rows_aligned<16>(dy, N), wide_dx = rows_aligned<16>(dx, N);
  const i64 end = min64(M, (row_block + 1) * rows);
  float sums[8] = {};
  for (i64 top = row_block * rows + threadIdx.y; top < end; top += 8 * AHEAD) {
    Eight<T> in[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      in[k] = read8(dy + (top + 8 * k) * N + column, top + 8 * k < end ? valid : 0, wide);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      if (top + 8 * k >= end) break;
      const i64 at = (top + 8 * k) * N + column;
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = value(in[k], j);
      drop8(v, rng, base + (u64)at, (u32)threshold, (float)factor);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += v[j];
      if (dx != nullptr) write8(dx + at, valid, wide_dx, rounded8<T>(v));
    }
  }
  if (partial == nullptr) return;
#pragma unroll
  for (int j = 0; j < 8; ++j) of_warps[threadIdx.y][threadIdx.x + 32 * j] = sums[j];
  __syncthreads();
  const u32 t = thread_rank();  // column t of the block: element t % 8 of lane t / 8
  if (column0 + t < N) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += of_warps[w][t / 8 + 32 * (t % 8)];
    partial[row_block * N + column0 + t] = sum;
  }
}

// Column sums of partial (blocks, gridDim.y, N), float32, into out (and `second` from the second row of each
// pair), in a fixed order. A block of 32 x 16 threads takes 32 columns.
extern "C" __global__ void __launch_bounds__(512)
sum_partials(const float* partial, T* out, T* second, i64 blocks, i64 N) {
  start_early();
  __shared__ float sums[16][33];
  const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
  float sum = 0.0f;
  if (column < N) {
#pragma unroll 4
    for (i64 b = threadIdx.y; b < blocks; b += 16) sum += partial[(b * gridDim.y + blockIdx.y) * N + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y || column >= N) return;
  sum = 0.0f;
#pragma unroll
  for (int y = 0; y < 16; ++y) sum += sums[y][threadIdx.x];
  (blockIdx.y ? second : out)[column] = from_float<T>(sum);
}
