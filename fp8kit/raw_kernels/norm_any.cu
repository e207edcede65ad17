// functions: norm_fwd_any (norm_fwd), norm_bwd_any (norm_bwd)
// variants: T=f32,bf16,f16
//
// Normalisation and its gradients (norm.cuh) for rows of any length at any address, which are
// read again instead of kept.

#include "norm.cuh"

constexpr int MAX_ROWS = 16;

// A block takes `rows` rows (4 or 16). First their statistics, blockDim.y rows at a time. Then a
// thread takes 4 rows x 8 columns, so that it has 4 neighbouring codes of 8 rows of q_t;
// neighbouring threads complete those.
extern "C" __global__ void __launch_bounds__(512, 1)
norm_fwd_any(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, i64 M, i64 N,
             i64 columns, i64 rows, f64 epsilon, f64 gain, Cast cast) {
  start_early();
  __shared__ Stats of_rows[MAX_ROWS];
  __shared__ float shared[2][32][1], maxima[32];
  const i64 row0 = (i64)blockIdx.x * rows;
  const bool wide = rows_aligned<16>(x, N);

  u32 turn = 0;  // sums use the two buffers by turns
  for (u32 top = 0; top < rows; top += blockDim.y) {
    const u32 r = top + threadIdx.y;
    const i64 row = row0 + r, end = r < rows && row < M ? N : 0;
    const T* from = x + row * N;
    float sum = 0.0f, squares = 0.0f;
    Stats s{0.0f, 0.0f};
    if (mean != nullptr) {
#pragma unroll 4
      for (i64 c = threadIdx.x * 8; c < end; c += blockDim.x * 8)
        sum += chunk_sum(read8(from + c, columns_left(c, N), wide));
      s.mean = row_total(sum, shared[turn ^= 1]) / (float)N;
    }
#pragma unroll 4
    for (i64 c = threadIdx.x * 8; c < end; c += blockDim.x * 8) {
      const int valid = columns_left(c, N);
      squares += chunk_deviations(read8(from + c, valid, wide), s.mean, valid);
    }
    s.rstd = 1.0f / sqrtf(row_total(squares, shared[turn ^= 1]) / (float)N + (float)epsilon);
    if (threadIdx.x == 0 && r < rows) of_rows[r] = s;
    if (end) keep_stats(mean, rstd, row, s);
  }
  __syncthreads();

  const float scale = cast_scale(cast);
  const bool wide_weight = rows_aligned<16>(weight, 0), wide_bias = rows_aligned<16>(bias, 0),
             wide_y = rows_aligned<16>(y, N);
  const bool wide_q = rows_aligned<8>(cast.q, cast.q_stride),
             wide_t = rows_aligned<4>(cast.q_t, cast.t_stride);
  const u32 fours = (u32)rows / 4, places = (u32)(ceil_div(columns, 8) * fours);
  Peak<T> peak;
  for (u32 i = thread_rank(); i < places; i += block_threads()) {
    const int r = (int)(i % fours) * 4;
    const i64 row = row0 + r, column = (i64)(i / fours) * 8;
    const int valid = columns_left(column, N);
    float g[8], b[8];
    floats8(weight == nullptr ? weight : weight + column, valid, wide_weight, g);
    floats8(bias == nullptr ? bias : bias + column, valid, wide_bias, b);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] += (float)gain;
    u32 codes[4][2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int here = row + k < M ? valid : 0;
      Eight<T> out = normalized8(read8(x + (row + k) * N + column, here, wide), of_rows[r + k], g, b);
      if (here < 8) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = j < here ? value(out, j) : 0.0f;
        out = rounded8<T>(v);
      }
      if (y != nullptr && here) write8(y + (row + k) * N + column, here, wide_y, out);
      peak.add(out);
      if (cast.wanted()) encode8(cast, out, scale, codes[k]);
    }
    if (cast.q != nullptr)
      write_q<false>(cast.q, cast.q_stride, codes, row, column, cast.q_rows, cast.q_columns, wide_q);
    if (cast.q_t != nullptr) {
      u32 transposed[8];
      transpose_codes(codes, transposed);
      const int left = (int)min64(cast.t_columns - row, 4);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < cast.t_rows)
          write_codes<4>(cast.q_t + (column + j) * cast.t_stride + row, left, wide_t, {transposed[j]});
    }
  }
  block_amax(cast.amax, peak.amax(), maxima);
}

// As norm_bwd.cu's, a row a block: it is read twice, and the sums of the block's rows
// grow in `partial` itself.
extern "C" __global__ void __launch_bounds__(1024)
norm_bwd_any(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd,
             const T* residual, T* dx, float* partial, i64 M, i64 N, f64 gain, i64 with_bias) {
  start_early();
  __shared__ float shared[2][32][2];
  float* dw = partial + (i64)blockIdx.x * (with_bias ? 2 : 1) * N;
  int parity = 0;
  for (i64 row = blockIdx.x; row < M; row += gridDim.x, parity ^= 1) {
    const Stats s = stats_of(mean, rstd, row);
    float sums[2] = {0.0f, 0.0f};
    for (i64 c = threadIdx.x; c < N; c += blockDim.x) {
      const float xhat = (to_float(x[row * N + c]) - s.mean) * s.rstd;
      const float d = to_float(dy[row * N + c]) * gain_at(weight, (float)gain, c);
      sums[0] += d * xhat;
      sums[1] += d;
    }
    row_totals(sums, shared[parity]);
    const float along = sums[0] / (float)N, level = mean == nullptr ? 0.0f : sums[1] / (float)N;
    for (i64 c = threadIdx.x; c < N; c += blockDim.x) {
      const float xhat = (to_float(x[row * N + c]) - s.mean) * s.rstd, g = to_float(dy[row * N + c]);
      const float d = g * gain_at(weight, (float)gain, c),
                  more = residual == nullptr ? 0.0f : to_float(residual[row * N + c]);
      dx[row * N + c] = from_float<T>(s.rstd * (d - level - xhat * along) + more);
      const bool first_row = row == blockIdx.x;
      dw[c] = (first_row ? 0.0f : dw[c]) + g * xhat;
      if (with_bias) dw[N + c] = (first_row ? 0.0f : dw[N + c]) + g;
    }
  }
}
