// Casts to and from any format of at most 8 bits, with stochastic rounding, without saturation, by tiles of
// any size: exact, not hasty.
//
// functions: quantize_any (quantize), dequantize_any (dequantize)
// variants: T=f32,bf16,f16,f64
#include "fp8.cuh"
#include "philox.cuh"

DEVICE i64 tile_at(i64 row, i64 column, i64 columns, i64 tile_rows, i64 tile_columns) {
  return row / tile_rows * ceil_div(columns, tile_columns) + column / tile_columns;
}

// Four neighbours a thread: one Philox call serves them. rng null: nearest even, as `format` says too.
extern "C" __global__ void __launch_bounds__(256)
quantize_any(const T* x, u8* q, const float* scale, float* scale_inv, const i64* rng, i64 draw,
             i64 rows, i64 columns, i64 tile_rows, i64 tile_columns, i64 tiles, Narrow format) {
  const bool stochastic = rng != nullptr;
  const Rng key = stochastic ? load_rng(rng) : Rng{0, 0};
  const i64 n = rows * columns;
  for (i64 i = first() * 4; i < n; i += step() * 4) {
    const uint4 words = stochastic ? philox(key, ((u64)draw << 46) + ((u64)i >> 2)) : make_uint4(0, 0, 0, 0);
    const u32 word[4] = {words.x, words.y, words.z, words.w};
    i64 row = i / columns, column = i % columns;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= n) break;
      const float v =
          to_float(x[i + j]) * scale[tiles == 1 ? 0 : tile_at(row, column, columns, tile_rows, tile_columns)];
      q[i + j] = encode(format, v, word[j]);
      if (++column == columns) column = 0, ++row;
    }
  }
  for (i64 i = first(); i < tiles; i += step()) scale_inv[i] = __fdiv_rn(1.0f, scale[i]);
}

extern "C" __global__ void __launch_bounds__(256)
dequantize_any(const u8* q, T* x, const float* scale_inv, i64 rows, i64 columns, i64 tile_rows,
               i64 tile_columns, i64 tiles, Narrow format) {
  for (i64 i = first(); i < rows * columns; i += step()) {
    const i64 tile = tiles == 1 ? 0 : tile_at(i / columns, i % columns, columns, tile_rows, tile_columns);
    x[i] = from_float<T>(decode(format, q[i]) * scale_inv[tile]);
  }
}
