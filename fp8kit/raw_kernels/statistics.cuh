// What the passes of statistics share: sums of a block in float64, in a fixed order, and how a pass goes
// through a matrix.
#pragma once
#include "rows.cuh"

constexpr u32 MAGNITUDE = 0x7FFFFFFFu, INF_BITS = 0x7F800000u;
#define NOTHING __longlong_as_double(0x7FF0000000000000ll)  // the least of nothing

// --- sums of a block ---------------------------------------------------------------------------------------

DEVICE f64 sum_of(f64 x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

DEVICE f64 most_of(f64 x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const f64 other = __shfl_xor_sync(~0u, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// Of 256 threads; every one gets the result. `shared`: 8 numbers.
template <bool SUM> DEVICE f64 block_of(f64 x, f64* shared) {
  x = SUM ? sum_of(x) : most_of(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[threadIdx.x % 8];
#pragma unroll
  for (int step = 4; step; step >>= 1) {
    const f64 other = __shfl_xor_sync(~0u, x, step);
    x = SUM ? x + other : other > x ? other : x;
  }
  return x;
}

// a / b of numbers below 2^32: places along a dimension, but for a matrix that is one row.
DEVICE u32 part_of(i64 a, i64 b) { return (u32)a / (u32)b; }

// a / b, with 32 bits where both fit.
DEVICE i64 quotient(i64 a, i64 b) {
  return ((u64)a | (u64)b) >> 32 ? a / b : (i64)((u32)a / (u32)b);
}

// The rows, eight columns at a time, that a thread takes; divisions are slow, and stand before the loop.
struct Walk {
  i64 row, eight, rows_on, eights_on;
  __device__ __forceinline__ explicit Walk(i64 eights) {
    row = eights >> 32 ? 0 : part_of(first(), eights);  // grids are far below 2^32
    eight = first() - row * eights;
    rows_on = eights >> 32 ? 0 : part_of(step(), eights);
    eights_on = step() - rows_on * eights;
  }
  __device__ __forceinline__ void next(i64 eights) {
    row += rows_on;
    eight += eights_on;
    if (eight >= eights) {
      eight -= eights;
      ++row;
    }
  }
};

// The mean of 256 of the finite values, or 0: near enough to their mean that differences from it lose
// nothing. It is a multiple of a 256th of what the 256 are apart: with more bits than that the float32
// differences of all values of a binade would be rounded to the same side, and their sum with them. The same
// in every block.
DEVICE float pivot_of(const T* x, i64 rows, i64 columns, i64 stride, float* shared) {
  const i64 size = rows * columns;
  float value = 0.0f, found = 0.0f, low = INF, high = -INF;
  if (size) {
    const i64 i = size < 256 ? min64(threadIdx.x, size - 1) : size / 256 * threadIdx.x;
    const i64 row = quotient(i, columns);
    value = to_float(x[row * stride + i - row * columns]);
    found = (__float_as_uint(value) & MAGNITUDE) < INF_BITS ? 1.0f : 0.0f;
    if (found != 0.0f) low = high = value;
    value = found != 0.0f ? value * 0.00390625f : 0.0f;
  }
  const float total = block_sum(value, shared), count = block_sum(found, shared);
  const float mean = count > 0.0f ? total * (256.0f / count) : 0.0f;
  const u32 apart = __float_as_uint(block_max(high, shared) + block_max(-low, shared)) & INF_BITS;
  if (!(apart > 8 << 23) || apart >= INF_BITS) return mean;  // all are one value, or next to that, or Inf
  const float step = __uint_as_float(apart - (8 << 23));
  return rintf(mean / step) * step;
}
