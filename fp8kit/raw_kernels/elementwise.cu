// functions: add, move1 (copy), move2 (copy, gemm, fp8_gemm), move4 (copy, gemm, fp8_gemm), rng_next
// variants: T=f32,bf16,f16
//
// Small things: sums of two arrays, copies between strided arrays (`moveN`, of N-byte elements), and
// the generator's next state.

#include "layout.cuh"
#include "rows.cuh"

// out = a + b over n elements; b has `period` elements, a divisor of n, and repeats.
extern "C" __global__ void __launch_bounds__(256) add(const T* a, const T* b, T* out, i64 n, i64 period) {
  const bool wide = rows_aligned<16>(a, 0) && rows_aligned<16>(out, 0),
             wide_b = rows_aligned<16>(b, 0) && (n == period || period % 8 == 0);
  for (i64 i = first() * 8; i < n; i += step() * 8) {
    const int valid = columns_left(i, n);
    const Eight<T> left = read8(a + i, valid, wide);
    i64 j0 = n == period ? i : i % period;
    float v[8];
    if (wide_b) {
      const Eight<T> right = read8(b + j0, valid, true);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = value(left, j) + value(right, j);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = value(left, j) + (j < valid ? to_float(b[j0]) : 0.0f);
        if (++j0 == period) j0 = 0;
      }
    }
    write8(out + i, valid, wide, rounded8<T>(v));
  }
}

// --- strided copies ----------------------------------------------------------------------------------------

template <typename W> DEVICE void move(const W* x, W* y, i64 units, const Layout& layout) {
  for (i64 i = first(); i < units; i += step()) {
    const Offsets at = offsets_of(layout, (u64)i);
    if (layout.unit == 1)
      y[at.to] = x[at.from];
    else
      *reinterpret_cast<uint2*>(y + at.to) = *reinterpret_cast<const uint2*>(x + at.from);
  }
}

extern "C" __global__ void __launch_bounds__(256)
move1(const u8* x, u8* y, i64 units, const __grid_constant__ Layout layout) {
  move(x, y, units, layout);
}
extern "C" __global__ void __launch_bounds__(256)
move2(const u16* x, u16* y, i64 units, const __grid_constant__ Layout layout) {
  move(x, y, units, layout);
}
extern "C" __global__ void __launch_bounds__(256)
move4(const u32* x, u32* y, i64 units, const __grid_constant__ Layout layout) {
  move(x, y, units, layout);
}

// functions: turn1 (copy)
// y = x transposed, of bytes: y (rows, columns) and x (columns, rows), whose rows begin every y_step and
// x_step bytes; all four are multiples of 4, as are the addresses. A block turns 64 x 64 bytes, each thread
// 4 x 4 of them in registers, so that both sides are read and written in whole words.
extern "C" __global__ void __launch_bounds__(256)
turn1(const u8* x, u8* y, i64 rows, i64 columns, i64 x_step, i64 y_step) {
  __shared__ u32 transposed[64][17];
  const i64 across = (columns + 63) / 64, row0 = blockIdx.x / across * 64, column0 = blockIdx.x % across * 64;
  const int inner = threadIdx.x & 15, outer = threadIdx.x >> 4;
  if (row0 + 4 * inner < rows && column0 + 4 * outer < columns) {
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = *reinterpret_cast<const u32*>(x + (column0 + 4 * outer + i) * x_step + row0 + 4 * inner);
    const u32 low01 = __byte_perm(w[0], w[1], 0x5140), high01 = __byte_perm(w[0], w[1], 0x7362),
              low23 = __byte_perm(w[2], w[3], 0x5140), high23 = __byte_perm(w[2], w[3], 0x7362);
    transposed[4 * inner][outer] = __byte_perm(low01, low23, 0x5410);
    transposed[4 * inner + 1][outer] = __byte_perm(low01, low23, 0x7632);
    transposed[4 * inner + 2][outer] = __byte_perm(high01, high23, 0x5410);
    transposed[4 * inner + 3][outer] = __byte_perm(high01, high23, 0x7632);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i += 16) {
    const i64 row = row0 + outer + i, column = column0 + 4 * inner;
    if (row < rows && column < columns)
      *reinterpret_cast<u32*>(y + row * y_step + column) = transposed[outer + i][inner];
  }
}

// out = state; state[1] += 1. One thread.
extern "C" __global__ void rng_next(i64* state, i64* out) {
  const i64 seed = state[0], offset = state[1];
  out[0] = seed;
  out[1] = offset;
  state[1] = offset + 1;
}
