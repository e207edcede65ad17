// Rotations by a Hadamard matrix along either dimension, with the amax of what is rotated.
//
// functions: rotate_lines (rotate), rotate_columns (rotate)
// variants: T=f32; OUT=f32
// variants: T=bf16; OUT=bf16,f32
// variants: T=f16; OUT=f16,f32
#include "blocks.cuh"

constexpr int ROWS = 256 / LINES;  // rows of x that a block takes at a time, 128 columns each

// Along the last dimension. A block takes `ROWS` rows and 128 columns; a one-dimensional grid, columns first.
// out, amax: each may be null.
extern "C" __global__ void __launch_bounds__(256)
rotate_lines(const T* x, OUT* out, float* amax, const i64* rng, i64 rows, i64 columns, Rotation how) {
  start_early();
  __shared__ float shared[32];
  const u32 across = (u32)ceil_div(columns, SPAN);
  const u32 place = line_place();
  const i64 row = (i64)(blockIdx.x / across) * ROWS + threadIdx.x / LINES,
            column = (i64)(blockIdx.x % across) * SPAN + place * LINE;
  const bool wide = rows_aligned<16>(x, columns), wide_out = rows_aligned<16>(out, columns);
  float v[LINE];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 at = column + 8 * half;
    const Eight<T> in = read8(x + row * columns + at, row < rows ? columns_left(at, columns) : 0, wide);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[8 * half + i] = value(in, i);
  }
  rotate_line(how, flips_of(how, rng, column), whole_group(how, column, columns), place, v);
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < LINE; ++i) top = amax_of(top, v[i]);
  if (out != nullptr && row < rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 at = column + 8 * half;
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = v[8 * half + i];
      write8(out + row * columns + at, columns_left(at, columns), wide_out, rounded8<OUT>(eight));
    }
  }
  block_amax(amax, top, shared);
}

// Along the first dimension. A block takes 128 rows and 64 columns.
extern "C" __global__ void __launch_bounds__(256, 4)
rotate_columns(const T* x, OUT* out, float* amax, const i64* rng, i64 rows, i64 columns, Rotation how) {
  start_early();
  __shared__ Panel<f32> panel;
  __shared__ float shared[32];
  const u32 across = (u32)ceil_div(columns, PANEL);
  const i64 top = (i64)(blockIdx.x / across) * SPAN, left = (i64)(blockIdx.x % across) * PANEL;
  const u32 place = line_place(), pair = line_pair();
  const i64 from = top + place * LINE;
  const u32 flips = flips_of(how, rng, from);
  const bool whole = whole_group(how, from, rows);
  read_panel(panel, x, rows, columns, top, left);
  float most = 0.0f;
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    float v[LINE];
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] = panel.at(place * LINE + i, pair)[side];
    rotate_line(how, flips, whole, place, v);
#pragma unroll
    for (int i = 0; i < LINE; ++i) {
      most = amax_of(most, v[i]);
      panel.at(place * LINE + i, pair)[side] = v[i];
    }
  }
  if (out != nullptr) write_panel(panel, out, rows, columns, top, left);
  block_amax(amax, most, shared);
}
