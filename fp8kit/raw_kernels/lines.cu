// functions: row_scales (line_scales), column_scales (line_scales), scale_lines
// variants: T=f32,bf16,f16
//
// Scales of lines, rows or columns of a matrix, and their application: Smooth-SwiGLU's (Fishman et al. 2024),
// and unit scaling's constants.

#include "rows.cuh"

// `most`, or 2**floor(log2 most), its exponent alone, held between 2**-100 and 2**100; 1 for 0.
DEVICE float scale_of(float most, i64 power_2) {
  const float kept = power_2 ? __uint_as_float(__float_as_uint(most) & 0x7F800000u) : most;
  return most == 0.0f ? 1.0f : fminf(fmaxf(kept, 0x1p-100f), 0x1p100f);
}

// scales[i] of row i of x (M, N), rows `pitch` elements apart; bias (N) may be null. A block a row.
extern "C" __global__ void __launch_bounds__(256)
row_scales(const T* x, const T* bias, float* scales, i64 M, i64 N, i64 pitch, i64 power_2) {
  __shared__ float shared[32];
  const T* row = x + (i64)blockIdx.x * pitch;
  const bool wide = rows_aligned<16>(x, pitch), wide_bias = rows_aligned<16>(bias, 0);
  float most = 0.0f;
  for (i64 c = (i64)threadIdx.x * 8; c < N; c += 2048) {
    const int valid = columns_left(c, N);
    const Eight<T> in = read8(row + c, valid, wide);
    float shift[8];
    floats8(bias == nullptr ? bias : bias + c, valid, wide_bias, shift);
#pragma unroll
    for (int j = 0; j < 8; ++j) most = amax_of(most, value(in, j) + shift[j]);
  }
  most = block_max(most, shared);
  if (threadIdx.x == 0) scales[blockIdx.x] = scale_of(most, power_2);
}

// scales[i] of column i. A block takes 32 columns, a warp every eighth row of them.
extern "C" __global__ void __launch_bounds__(256)
column_scales(const T* x, const T* bias, float* scales, i64 M, i64 N, i64 pitch, i64 power_2) {
  __shared__ float shared[8][32];
  const i64 column = (i64)blockIdx.x * 32 + threadIdx.x;
  float most = 0.0f;
  if (column < N) {
    const float shift = bias == nullptr ? 0.0f : to_float(bias[column]);
    for (i64 row = threadIdx.y; row < M; row += 8)
      most = amax_of(most, to_float(x[row * pitch + column]) + shift);
  }
  shared[threadIdx.y][threadIdx.x] = most;
  __syncthreads();
  if (threadIdx.y || column >= N) return;
#pragma unroll
  for (int w = 1; w < 8; ++w) most = fmaxf(most, shared[w][threadIdx.x]);
  scales[column] = scale_of(most, power_2);
}

// out = x * factor * scale, or / scale, over n elements in rows of N; the scale is the row's (axis 0) or the
// column's; scales may be null, out may be x.
extern "C" __global__ void __launch_bounds__(256)
scale_lines(const T* x, const float* scales, T* out, i64 n, i64 N, i64 axis, f64 factor, i64 divide) {
  const bool wide = rows_aligned<16>(x, 0) && rows_aligned<16>(out, 0);
  for (i64 i = first() * 8; i < n; i += step() * 8) {
    const int valid = columns_left(i, n);
    const Eight<T> in = read8(x + i, valid, wide);
    i64 row = i / N, column = i % N;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] = value(in, j) * (float)factor;
      if (scales != nullptr && j < valid) {
        const float scale = scales[axis ? column : row];
        v[j] = divide ? v[j] / scale : v[j] * scale;
      }
      if (++column == N) column = 0, ++row;
    }
    write8(out + i, valid, wide, rounded8<T>(v));
  }
}
