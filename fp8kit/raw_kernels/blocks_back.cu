// Rotations by a Hadamard matrix taken back along either dimension, of what is not masked.
//
// functions: back_lines (rotate_back), back_columns (rotate_back)
// variants: T=f32; OUT=f32,bf16,f16
// variants: T=bf16; OUT=bf16,f32
// variants: T=f16; OUT=f16,f32
#include "blocks.cuh"

constexpr int ROWS = 256 / LINES;  // rows of x that a block takes at a time, 128 columns each

// v rotated, and then the signs.
DEVICE void back(const Rotation& how, u32 flips, bool whole, u32 place, float (&v)[LINE]) {
  rotate_line(how, 0, whole, place, v);
  if (!whole || !flips) return;
#pragma unroll
  for (int i = 0; i < LINE; ++i)
    v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (flips << (31 - i) & 0x80000000u));
}

// Along the last dimension. A block takes `ROWS` rows and 128 columns; a one-dimensional grid, columns first.
// inside may be null.
extern "C" __global__ void __launch_bounds__(256)
back_lines(const T* x, OUT* out, const u8* inside, const i64* rng, i64 rows, i64 columns, Rotation how) {
  start_early();
  const u32 across = (u32)ceil_div(columns, SPAN);
  const u32 place = line_place();
  const i64 row = (i64)(blockIdx.x / across) * ROWS + threadIdx.x / LINES,
            column = (i64)(blockIdx.x % across) * SPAN + place * LINE;
  const bool wide = rows_aligned<16>(x, columns), wide_out = rows_aligned<16>(out, columns);
  float v[LINE];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 at = column + 8 * half;
    const int count = row < rows ? columns_left(at, columns) : 0;
    const Eight<T> in = read8(x + row * columns + at, count, wide);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool masked = inside != nullptr && i < count && !inside[row * columns + at + i];
      v[8 * half + i] = masked ? 0.0f : value(in, i);
    }
  }
  back(how, flips_of(how, rng, column), whole_group(how, column, columns), place, v);
  if (row >= rows) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 at = column + 8 * half;
    float eight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = v[8 * half + i];
    write8(out + row * columns + at, columns_left(at, columns), wide_out, rounded8<OUT>(eight));
  }
}

// Along the first dimension. A block takes 128 rows and 64 columns.
extern "C" __global__ void __launch_bounds__(256, 2)
back_columns(const T* x, OUT* out, const u8* inside, const i64* rng, i64 rows, i64 columns, Rotation how) {
  start_early();
  __shared__ Panel<f32> panel;
  const u32 across = (u32)ceil_div(columns, PANEL);
  const i64 top = (i64)(blockIdx.x / across) * SPAN, left = (i64)(blockIdx.x % across) * PANEL;
  const u32 place = line_place(), pair = line_pair();
  const i64 from = top + place * LINE;
  const u32 flips = flips_of(how, rng, from);
  const bool whole = whole_group(how, from, rows);
  read_panel(panel, x, rows, columns, top, left);
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    const i64 column = left + 2 * pair + side;
    float v[LINE];
#pragma unroll
    for (int i = 0; i < LINE; ++i) {
      const bool there = inside != nullptr && from + i < rows && column < columns;
      v[i] = there && !inside[(from + i) * columns + column] ? 0.0f : panel.at(place * LINE + i, pair)[side];
    }
    back(how, flips, whole, place, v);
#pragma unroll
    for (int i = 0; i < LINE; ++i) panel.at(place * LINE + i, pair)[side] = v[i];
  }
  write_panel(panel, out, rows, columns, top, left);
}
