// LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019): y = (x - mean) * rstd * g + bias, and the
// gradients. RMSNorm is the case mean = 0. g = weight + gain: gain is 1 for a zero-centred weight, else 0. A
// null weight is 0 throughout: L2 normalisation, x / sqrt(sum x^2 + epsilon), comes as epsilon / N for
// epsilon and gain = 1 / sqrt(N).
//
// A row belongs to the blockDim.x threads of one threadIdx.y: a power of two up to 32, or a multiple of 32.
// Thread l takes the chunk of eight columns 8 l ... 8 l + 7, then the one 8 blockDim.x further on, and so
// forth; sums go chunk by chunk, then over the threads. So a row's statistics have the same bits in every
// kernel that gives it as many threads.
#pragma once
#include "rows.cuh"

// Waits until all threads of the row have come. Barrier 0 is __syncthreads', so with more than a warp a row a
// block has at most 15 rows.
DEVICE void row_barrier() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

// Each sum over the row's threads, for all of them. `shared` is free again once the row's threads have met at
// another barrier. `lanes`: the row's threads, where the caller knows them.
template <int COUNT>
DEVICE void row_totals(float (&sums)[COUNT], float (&shared)[32][COUNT], u32 lanes = blockDim.x) {
#pragma unroll
  for (u32 step = 16; step; step >>= 1)
    if (step < lanes) {
#pragma unroll
      for (int k = 0; k < COUNT; ++k) sums[k] += __shfl_xor_sync(~0u, sums[k], step);
    }
  if (lanes <= 32) return;
  const u32 warps = lanes / 32, first_warp = threadIdx.y * warps, lane = threadIdx.x % 32;
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) shared[first_warp + threadIdx.x / 32][k] = sums[k];
  }
  row_barrier();
#pragma unroll
  for (int k = 0; k < COUNT; ++k) sums[k] = warp_sum(lane < warps ? shared[first_warp + lane][k] : 0.0f);
}

DEVICE float row_total(float sum, float (&shared)[32][1], u32 lanes = blockDim.x) {
  float sums[1] = {sum};
  row_totals(sums, shared, lanes);
  return sums[0];
}

// Makes the compiler forget what it has computed from these: elements unpacked anew cost less
// than registers that wait.
DEVICE void unpack_anew(Eight<T>& in) {
#pragma unroll
  for (int i = 0; i < 2 * sizeof(T); ++i) asm volatile("" : "+r"(in.words[i]));
}

DEVICE float sum8(const float (&x)[8]) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

// A chunk's part of the row's sum, and of its sum of squared deviations from m, of which
// the first `valid` count.
DEVICE float chunk_sum(const Eight<T>& in) {
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = value(in, j);
  return sum8(v);
}

DEVICE float chunk_deviations(const Eight<T>& in, float m, int valid) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float d = j < valid ? value(in, j) - m : 0.0f;
    sums[j % 2] += d * d;
  }
  return sums[0] + sums[1];
}

// A row's statistics: `mean` 0 but for LayerNorm.
struct Stats { float mean, rstd; };

DEVICE Stats stats_of(const float* mean, const float* rstd, i64 row) {
  return Stats{mean == nullptr ? 0.0f : mean[row], rstd[row]};
}

DEVICE void keep_stats(float* mean, float* rstd, i64 row, Stats s) {
  if (threadIdx.x) return;
  if (mean != nullptr) mean[row] = s.mean;
  rstd[row] = s.rstd;
}

// weight + gain and bias of a column.
DEVICE float gain_at(const T* weight, float gain, i64 column) {
  return (weight == nullptr ? 0.0f : to_float(weight[column])) + gain;
}
DEVICE float bias_at(const T* bias, i64 column) { return bias == nullptr ? 0.0f : to_float(bias[column]); }

// The result of eight elements, rounded.
DEVICE Eight<T> normalized8(const Eight<T>& in, Stats s, const float (&g)[8], const float (&b)[8]) {
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = (value(in, j) - s.mean) * s.rstd * g[j] + b[j];
  return rounded8<T>(v);
}
