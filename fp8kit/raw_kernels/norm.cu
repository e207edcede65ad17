// functions: norm_fwd, norm_bwd, norm_bwd_two, norm_bwd_any
// variants: T=f32,bf16,f16
//
// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019): y = (x - mean) * rstd * g + bias, written as T, as FP8 codes in either
// orientation, or both; and the gradients. RMSNorm is the case mean = 0. g = weight + gain: gain is 1 for a zero-centred weight, else 0. A
// null weight is 0 throughout: L2 normalisation, x / sqrt(sum x^2 + epsilon), comes as epsilon / N for epsilon and gain = 1 / sqrt(N).

#include "rows.cuh"

constexpr int MAX_ROWS = 16;
constexpr int BWD_BLOCKS = sizeof(T) == 2 ? 3 : 2;  // blocks of norm_bwd that shall fit a multiprocessor

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Eight elements from global to shared memory, both 16-byte aligned, without passing through registers; complete after copies_done().
DEVICE void copy8_async(T* to, const T* from) {
#pragma unroll
  for (int i = 0; i < 8 * sizeof(T); i += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i), "l"(reinterpret_cast<const u8*>(from) + i)
                 : "memory");
}

DEVICE void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Sum of f(x) over a row, by one warp: lane l takes columns 8 l ... 8 l + 7, then those 256 further on. Every lane gets it.
template <typename Term> DEVICE float row_sum(const T* row, i64 N, bool wide, Term term) {
  float sum = 0.0f;
#pragma unroll 4
  for (i64 c = threadIdx.x % 32 * 8; c < N; c += 256) {
    const int valid = columns_left(c, N);
    const Eight<T> x = read8(row + c, valid, wide);
    if (valid == 8) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += term(value(x, j));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += j < valid ? term(value(x, j)) : 0.0f;
    }
  }
  return warp_sum(sum);
}

// A block takes `rows` rows (4, 8 or 16), and keeps them in dynamic shared memory, `pitch` elements a row, unless pitch is 0 (then they are
// read again, from L2 mostly). First a warp a row: mean, then the mean squared deviation. Then a thread takes 4 rows x 8 columns, so
// that it has 4 neighbouring codes of 8 rows of q_t; neighbouring threads complete those.
extern "C" __global__ void __launch_bounds__(512, 1)
norm_fwd(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, i64 M, i64 N, i64 columns, i64 rows, i64 pitch,
         f64 epsilon, f64 gain, Cast cast) {
  extern __shared__ uint4 dynamic[];
  __shared__ float means[MAX_ROWS], rstds[MAX_ROWS], shared[32];
  T* kept = reinterpret_cast<T*>(dynamic);
  const i64 row0 = (i64)blockIdx.x * rows;
  const bool wide = rows_aligned<16>(x, N);

  for (int r = threadIdx.x / 32; r < rows && row0 + r < M; r += blockDim.x / 32) {
    const T* row = x + (row0 + r) * N;
    if (pitch) {
      T* copy = kept + r * pitch;
#pragma unroll 4
      for (i64 c = threadIdx.x % 32 * 8; c < N; c += 256) {
        const int valid = columns_left(c, N);
        if (wide && valid == 8)
          copy8_async(copy + c, row + c);
        else
          write8(copy + c, 8, true, read8(row + c, valid, false));
      }
      copies_done();  // a lane reads below what it copied itself
      row = copy;
    }
    const bool easy = wide || pitch;
    const float m = mean == nullptr ? 0.0f : row_sum(row, N, easy, [](float v) { return v; }) / (float)N;
    const float variance = row_sum(row, N, easy, [m](float v) { return (v - m) * (v - m); }) / (float)N;
    const float inverse = 1.0f / sqrtf(variance + (float)epsilon);
    if (threadIdx.x % 32 == 0) {
      means[r] = m, rstds[r] = inverse;
      if (mean != nullptr) mean[row0 + r] = m;
      rstd[row0 + r] = inverse;
    }
  }
  __syncthreads();

  const float scale = cast_scale(cast), add = (float)gain;
  const bool wide_weight = rows_aligned<16>(weight, 0), wide_bias = rows_aligned<16>(bias, 0), wide_y = rows_aligned<16>(y, N);
  const bool wide_q = rows_aligned<8>(cast.q, cast.q_stride), wide_t = rows_aligned<4>(cast.q_t, cast.t_stride);
  const u32 fours = (u32)rows / 4, places = (u32)(ceil_div(columns, 8) * fours);
  float amax = 0.0f;
  for (u32 i = threadIdx.x; i < places; i += blockDim.x) {
    const int r = (int)(i % fours) * 4;
    const i64 row = row0 + r, column = (i64)(i / fours) * 8;
    const int valid = columns_left(column, N);
    float g[8], b[8];
    floats8(weight == nullptr ? weight : weight + column, valid, wide_weight, g);
    floats8(bias == nullptr ? bias : bias + column, valid, wide_bias, b);
    Eight<T> in[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int here = row + k < M ? valid : 0;
      in[k] = pitch ? read8(kept + (r + k) * pitch + column, here ? 8 : 0, true) : read8(x + (row + k) * N + column, here, wide);
    }
    u32 codes[4][2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int here = row + k < M ? valid : 0;
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = j < here ? (value(in[k], j) - means[r + k]) * rstds[r + k] * (g[j] + add) + b[j] : 0.0f;
      const Eight<T> out = rounded8<T>(v);
      if (y != nullptr && here) write8(y + (row + k) * N + column, here, wide_y, out);
#pragma unroll
      for (int j = 0; j < 8; ++j) amax = amax_of(amax, value(out, j));
      if (cast.wanted()) encode8(cast, out, scale, codes[k]);
    }
    write_q(cast, codes, row, column, cast.q_columns, wide_q);
    if (cast.q_t != nullptr) {
      u32 turned[8];
      transpose_codes(codes, turned);
      const int left = (int)min64(cast.t_columns - row, 4);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (column + j < cast.t_rows) write_codes<4>(cast.q_t + (column + j) * cast.t_stride + row, left, wide_t, {turned[j]});
    }
  }
  block_amax(cast.amax, amax, shared);
}

// --- gradients -------------------------------------------------------------------------------------------------------------
// With xhat = (x - mean) * rstd and d = dy * g: dx = rstd * (d - mean(d) - xhat * mean(d * xhat)) + residual over each row, without mean(d)
// for RMSNorm; dweight = sum of dy * xhat and dbias = sum of dy over the rows. Blocks walk rows blockIdx.x, + gridDim.x, ...; a
// thread keeps its columns, so it sums them over the block's rows by itself, into partial: float32 (blocks, 1 or 2, N).

// Both sums over the block; `sums` alternates between two buffers from row to row, so that one barrier is enough.
DEVICE float2 block_sum2(float a, float b, float2* sums) {
  a = warp_sum(a), b = warp_sum(b);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = make_float2(a, b);
  __syncthreads();
  const bool real = threadIdx.x % 32 < blockDim.x / 32;
  const float2 mine = real ? sums[threadIdx.x % 32] : make_float2(0.0f, 0.0f);
  return make_float2(warp_sum(mine.x), warp_sum(mine.y));
}

struct Stats { float mean, rstd; };

DEVICE Stats stats_of(const float* mean, const float* rstd, i64 row) { return Stats{mean == nullptr ? 0.0f : mean[row], rstd[row]}; }

DEVICE Eight<T> weights(const T* weight, int v, int valid) {
  return read8(weight + (v * blockDim.x + threadIdx.x) * 8, weight == nullptr ? 0 : valid, rows_aligned<16>(weight, 0));
}

// N <= 8 V blockDim.x: everything of a row stays in registers, and (where they suffice) the next row is on its way while this one is
// reduced.
// dx may be dy or residual: a thread reads its elements of a row before it writes them.
template <int V>
DEVICE void norm_bwd_rows(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* residual, T* dx,
                          float* partial, i64 M, i64 N, float gain, bool with_bias) {
  __shared__ float2 sums[2][32];
  const bool wide = rows_aligned<16>(dy, N) && rows_aligned<16>(x, N) && rows_aligned<16>(dx, N) && rows_aligned<16>(residual, N);
  constexpr bool AHEAD = V * sizeof(T) <= 4;
  i64 at[V];  // the thread's elements of the row
  int valid[V];
  Eight<T> up[V], in[V];
  float dw[V][8], db[V][8];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const i64 column = ((i64)v * blockDim.x + threadIdx.x) * 8;
    valid[v] = columns_left(column, N);
    at[v] = blockIdx.x * N + column;
    if (AHEAD) up[v] = read8(dy + at[v], valid[v], wide), in[v] = read8(x + at[v], valid[v], wide);
#pragma unroll
    for (int j = 0; j < 8; ++j) dw[v][j] = db[v][j] = 0.0f;
  }
  int parity = 0;
  for (u32 row = blockIdx.x; row < (u32)M; row += gridDim.x, parity ^= 1) {
    const Stats s = stats_of(mean, rstd, row);
    Eight<T> next_up[V], next_in[V], stream[V];
    float sum_d = 0.0f, sum_dx = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!AHEAD) up[v] = read8(dy + at[v], valid[v], wide), in[v] = read8(x + at[v], valid[v], wide);
      stream[v] = read8(residual + at[v], residual == nullptr ? 0 : valid[v], wide);
      if (AHEAD) {
        const i64 next = at[v] + gridDim.x * N;
        const int there = row + gridDim.x < (u32)M ? valid[v] : 0;
        next_up[v] = read8(dy + next, there, wide), next_in[v] = read8(x + next, there, wide);
      }
      const Eight<T> w = weights(weight, v, valid[v]);  // read again from L1 below: the registers are wanted for the next row
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float g = value(up[v], j), xhat = (value(in[v], j) - s.mean) * s.rstd, d = g * (value(w, j) + gain);
        dw[v][j] += g * xhat;
        db[v][j] += g;
        sum_d += d;
        sum_dx += d * xhat;
      }
    }
    const float2 total = block_sum2(sum_d, sum_dx, sums[parity]);
    const float mean_d = mean == nullptr ? 0.0f : total.x / (float)N, mean_dx = total.y / (float)N;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const Eight<T> w = weights(weight, v, valid[v]);
      float out[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float xhat = (value(in[v], j) - s.mean) * s.rstd, d = value(up[v], j) * (value(w, j) + gain);
        out[j] = s.rstd * (d - mean_d - xhat * mean_dx) + value(stream[v], j);
      }
      write8(dx + at[v], valid[v], wide, rounded8<T>(out));
      if (AHEAD) up[v] = next_up[v], in[v] = next_in[v];
      at[v] += gridDim.x * N;
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float* to = partial + (i64)blockIdx.x * (with_bias ? 2 : 1) * N + ((i64)v * blockDim.x + threadIdx.x) * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < valid[v]) {
        to[j] = dw[v][j];
        if (with_bias) to[N + j] = db[v][j];
      }
  }
}

extern "C" __global__ void __launch_bounds__(256, BWD_BLOCKS)
norm_bwd(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* residual, T* dx, float* partial,
         i64 M, i64 N, f64 gain, i64 with_bias) {
  norm_bwd_rows<1>(dy, x, weight, mean, rstd, residual, dx, partial, M, N, (float)gain, with_bias);
}

extern "C" __global__ void __launch_bounds__(512, 1)
norm_bwd_two(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* residual, T* dx, float* partial,
             i64 M, i64 N, f64 gain, i64 with_bias) {
  norm_bwd_rows<2>(dy, x, weight, mean, rstd, residual, dx, partial, M, N, (float)gain, with_bias);
}

// Any N: a row is read twice, and the sums of a block's rows grow in `partial` itself.
extern "C" __global__ void __launch_bounds__(512)
norm_bwd_any(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd, const T* residual, T* dx, float* partial,
             i64 M, i64 N, f64 gain, i64 with_bias) {
  __shared__ float2 sums[2][32];
  float* dw = partial + (i64)blockIdx.x * (with_bias ? 2 : 1) * N;
  int parity = 0;
  for (i64 row = blockIdx.x; row < M; row += gridDim.x, parity ^= 1) {
    const Stats s = stats_of(mean, rstd, row);
    const auto factor = [=](i64 c) { return (weight == nullptr ? 0.0f : to_float(weight[c])) + (float)gain; };
    float sum_d = 0.0f, sum_dx = 0.0f;
    for (i64 c = threadIdx.x; c < N; c += blockDim.x) {
      const float xhat = (to_float(x[row * N + c]) - s.mean) * s.rstd;
      const float d = to_float(dy[row * N + c]) * factor(c);
      sum_d += d;
      sum_dx += d * xhat;
    }
    const float2 total = block_sum2(sum_d, sum_dx, sums[parity]);
    const float mean_d = mean == nullptr ? 0.0f : total.x / (float)N, mean_dx = total.y / (float)N;
    for (i64 c = threadIdx.x; c < N; c += blockDim.x) {
      const float xhat = (to_float(x[row * N + c]) - s.mean) * s.rstd, g = to_float(dy[row * N + c]);
      const float d = g * factor(c), more = residual == nullptr ? 0.0f : to_float(residual[row * N + c]);
      dx[row * N + c] = from_float<T>(s.rstd * (d - mean_d - xhat * mean_dx) + more);
      const bool first_row = row == blockIdx.x;
      dw[c] = (first_row ? 0.0f : dw[c]) + g * xhat;
      if (with_bias) dw[N + c] = (first_row ? 0.0f : dw[N + c]) + g;
    }
  }
}
