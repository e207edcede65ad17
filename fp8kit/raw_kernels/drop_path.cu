// functions: drop_path
// variants: T=f32,bf16,f16
//
// Stochastic depth (Huang et al. 2016): whole samples are dropped, the others multiplied by
// `factor` = 1 / (1 - p). Nothing is stored: sample s has word s of the stream each time (philox.cuh), and is
// kept where that is at least `threshold`.

#include "philox.cuh"
#include "rows.cuh"
#include "sequences.cuh"

// Sample of a row: (row / inner) % count, or the last one that starts at the row or before it.
DEVICE i64 sample_of(i64 row, i64 inner, i64 count, const i32* starts) {
  return starts == nullptr ? row / inner % count : sequence_of(starts, count, row);
}

// y = residual + factor of the row's sample * x over n elements in rows of N; residual
// may be null, y may be x.
extern "C" __global__ void __launch_bounds__(256)
drop_path(const T* x, const T* residual, T* y, const i32* starts, const i64* rng, i64 n, i64 N, i64 inner,
          i64 count, i64 threshold, f64 factor, const i64* part) {
  const bool wide = rows_aligned<16>(x, 0) && rows_aligned<16>(y, 0) && rows_aligned<16>(residual, 0);
  const Rng state = load_rng(rng);
  for (i64 i = first() * 8; i < n; i += step() * 8) {
    const int valid = columns_left(i, n);
    const Eight<T> in = read8(x + i, valid, wide),
                   stream = read8(residual + i, residual == nullptr ? 0 : valid, wide);
    i64 row = i / N, left = N - i % N;  // elements up to the row's end
    float times = 0.0f, v[8];
    bool fresh = true;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (fresh)
        times = philox_word(state, first_index(part, count) + (u64)sample_of(row, inner, count, starts)) >=
                        (u32)threshold
                    ? (float)factor
                    : 0.0f;
      v[j] = (times == 0.0f ? 0.0f : value(in, j) * times) + value(stream, j);
      fresh = --left == 0;
      if (fresh) ++row, left = N;
    }
    write8(y + i, valid, wide, rounded8<T>(v));
  }
}
