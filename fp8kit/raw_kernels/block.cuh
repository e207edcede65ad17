// Scaling by blocks of 128: a square of a matrix and of its transpose, each cast with its own scales, while a
// thread holds its part of the square in registers (block.cu, block_activation.cu).
#pragma once
#include "rows.cuh"

// a block's square; a thread takes 8 rows of 8 columns, sixteen threads a row of threads
constexpr int B = 128, E = 8;

struct Shared {
  // q_t's square, 8 rows of x an entry; entry e of column c lies at place e ^ (c / 8)
  uint2 transposed[B][B / E];
  float column_amax[8][B];
  float row_scale[B], column_scale[B];
  float maxima[32];
};

// Where a (rows, columns) matrix goes: into q (q_rows, across * 128) and q_t (qt_rows, down * 128), down x
// across being the squares that cover it; either may be null, together with its scales. square: a square has
// one scale, else 128 neighbours along the contraction have one. With squares scale_inv is (ceil(q_rows /
// 128), across up to 4), else (across, q_rows); likewise for q_t.
struct Blocks {
  u8* q;
  float* scale_inv;
  u8* q_t;
  float* scale_inv_t;
  i64 rows, columns, q_rows, qt_rows, square;
  f64 fp8_max, epsilon, value_for_inf;
  i64 power_2;
};

DEVICE void encode_by(bool is_e5m2, const float (&v)[E], u32 (&words)[E / 4]) {
  if (is_e5m2)
    encode_words<e5m2>(v, words);
  else
    encode_words<e4m3>(v, words);
}

// The codes of the block's square (tile_row, tile_column). `load` gives a thread its 8 rows of 8 columns from
// (row, column) on, zeros beyond the matrix. All threads call; what is shared may be used again behind a
// barrier.
template <typename Load>
DEVICE void cast_square(Shared& shared, i64 tile_row, i64 tile_column, Load& load, const Blocks& to,
                        bool is_e5m2) {
  auto& transposed = shared.transposed;
  auto& column_amax = shared.column_amax;
  auto& row_scale = shared.row_scale;
  auto& column_scale = shared.column_scale;
  const i64 across = ceil_div(to.columns, B), down = ceil_div(to.rows, B);
  const u32 rank = threadIdx.x, warp = rank / 32, group = rank % 16, band = rank / 16;
  const i64 row = tile_row * B + E * band, column = tile_column * B + E * group;

  alignas(16) T raw[E][E];
  load(row, column, raw);

  // amaxes of the square's rows and columns, then its scales; a row of x lies in sixteen
  // lanes, a column in all warps
  float high[E] = {};
#pragma unroll
  for (int r = 0; r < E; ++r) {
    float top = 0.0f;
#pragma unroll
    for (int c = 0; c < E; ++c) {
      const float value = to_float(raw[r][c]);
      top = amax_of(top, value);
      high[c] = amax_of(high[c], value);
    }
#pragma unroll
    for (int lane = 8; lane; lane >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, lane));
    if (group == 0) row_scale[E * band + r] = top;
  }
#pragma unroll
  for (int c = 0; c < E; ++c) {
    high[c] = fmaxf(high[c], __shfl_xor_sync(~0u, high[c], 16));
    if (rank % 32 < 16) column_amax[warp][E * group + c] = high[c];
  }
  __syncthreads();
  const bool by_row = rank < B;
  const u32 line = rank % B;  // the thread's own row or column of the square
  float amax = by_row ? row_scale[line] : 0.0f;
  if (!by_row) {
#pragma unroll
    for (int w = 0; w < 8; ++w) amax = fmaxf(amax, column_amax[w][line]);
  }
  if (to.square) amax = block_max(amax, shared.maxima);
  const float own =
      scale_of(amax, (float)to.fp8_max, (float)to.epsilon, (float)to.value_for_inf, to.power_2 != 0);
  (by_row ? row_scale : column_scale)[line] = own;

  float* inverses = by_row ? to.scale_inv : to.scale_inv_t;
  const i64 lines = by_row ? to.q_rows : to.qt_rows;  // rows of q or q_t
  // along them, and along the contraction
  const i64 outer = by_row ? tile_row : tile_column, inner = by_row ? tile_column : tile_row;
  if (inverses != nullptr) {
    // padding's scale is 1, whatever epsilon says
    const bool real = to.square || outer * B + line < (by_row ? to.rows : to.columns);
    const float inverse = real ? __fdiv_rn(1.0f, own) : 1.0f;
    if (!to.square) {
      if (outer * B + line < lines) inverses[inner * lines + outer * B + line] = inverse;
    } else {
      const i64 tiles = by_row ? across : down, padded = ceil_div(tiles, 4) * 4;
      if (line == 0) inverses[outer * padded + inner] = inverse;
      else if (inner + 1 == tiles && tiles - 1 + line < padded)
        inverses[outer * padded + tiles - 1 + line] = 1.0f;
    }
  }
  __syncthreads();

  if (to.q != nullptr) {
#pragma unroll
    for (int r = 0; r < E; ++r) {
      const float s = row_scale[E * band + r];
      float v[E];
#pragma unroll
      for (int c = 0; c < E; ++c) v[c] = to_float(raw[r][c]) * s;
      u32 words[E / 4];
      encode_by(is_e5m2, v, words);
      if (row + r < to.q_rows) store_codes<E>(to.q + (row + r) * across * B + column, words);
    }
  }

  if (to.q_t != nullptr) {
#pragma unroll
    for (int c = 0; c < E; ++c) {
      const float s = column_scale[E * group + c];
      float v[E];
#pragma unroll
      for (int r = 0; r < E; ++r) v[r] = to_float(raw[r][c]) * s;
      u32 words[E / 4];
      encode_by(is_e5m2, v, words);
      transposed[E * group + c][band ^ group] = make_uint2(words[0], words[1]);
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < B * B / 16 / 256; ++turn) {
      const u32 at = rank + 256 * turn, from = at / 8, pair = at % 8, swizzle = from / E;
      const uint2 low = transposed[from][(2 * pair) ^ swizzle];
      const uint2 next = transposed[from][(2 * pair + 1) ^ swizzle];
      const u32 sixteen[4] = {low.x, low.y, next.x, next.y};
      const i64 to_row = tile_column * B + from;
      if (to_row < to.qt_rows)
        store_codes<16>(to.q_t + to_row * down * B + tile_row * B + 16 * pair, sixteen);
    }
  }
}
