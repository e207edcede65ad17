// Casts between high precision and FP8: plain, by tiles, and the layers' cast to both orientations, of one matrix or of many.
//
// functions: quantize_fp8, dequantize_fp8, quantize_transpose, quantize_transpose_many
// variants: T=f32,bf16,f16; FORMAT=e4m3,e5m2
#include "fp8.cuh"

constexpr int V = 16;  // elements a thread takes at a time in the flat kernels: one 16-byte access of codes

// --- the plain cast --------------------------------------------------------------------------------------------------------

// Place of a tile in the arrays of scales. Per tensor everything is tile 0; else tiles are 16 columns wide or a multiple.
DEVICE i64 tile_of(i64 index, i64 columns, i64 tile_rows, i64 tile_columns, i64 across) {
  return index / columns / tile_rows * across + index % columns / tile_columns;
}

// q = encode(x * scale), saturating, nearest even, over rows * columns elements; amax (per tensor only) may be null. With more than one tile,
// columns and tile_columns are multiples of 16.
extern "C" __global__ void __launch_bounds__(256) quantize_fp8(const T* x, u8* q, const float* scale, float* scale_inv, float* amax,
                                                               i64 n, i64 columns, i64 tile_rows, i64 tile_columns, i64 tiles) {
  __shared__ float shared[32];
  const i64 across = tiles == 1 ? 1 : columns / tile_columns + (columns % tile_columns != 0);
  const bool wide = reinterpret_cast<u64>(x) % 16 == 0 && reinterpret_cast<u64>(q) % 16 == 0;
  float top = 0.0f;
  for (i64 i = first() * V; i < n; i += step() * V) {
    const float s = scale[tiles == 1 ? 0 : tile_of(i, columns, tile_rows, tile_columns, across)];
    const i64 valid = min64(V, n - i);
    float v[V];
    if (wide && valid == V) load<V>(x + i, v);
    else load_some<V>(x + i, valid, v);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      top = amax_of(top, v[j]);
      v[j] *= s;
    }
    u32 words[V / 4];
    encode_words<FORMAT>(v, words);
    if (wide && valid == V) store_codes<V>(q + i, words);
    else store_codes_some<V>(q + i, valid, words);
  }
  for (i64 i = first(); i < tiles; i += step()) scale_inv[i] = __fdiv_rn(1.0f, scale[i]);
  block_amax(amax, top, shared);
}

constexpr int DECODED = 8, AHEAD = 4;  // codes a thread decodes at a time: 16 bytes of bfloat16; and how many times ahead it reads them

// x = decode(q) * scale_inv; tiles as above.
extern "C" __global__ void __launch_bounds__(256) dequantize_fp8(const u8* q, T* x, const float* scale_inv, i64 n, i64 columns,
                                                                 i64 tile_rows, i64 tile_columns, i64 tiles) {
  const i64 across = tiles == 1 ? 1 : columns / tile_columns + (columns % tile_columns != 0), stride = step() * DECODED;
  const bool wide = reinterpret_cast<u64>(x) % 16 == 0 && reinterpret_cast<u64>(q) % DECODED == 0;
  for (i64 top = first() * DECODED; top < n; top += stride * AHEAD) {
    u32 words[AHEAD][DECODED / 4] = {};
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (wide && top + k * stride + DECODED <= n) load_codes<DECODED>(q + top + k * stride, words[k]);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const i64 i = top + k * stride;
      if (i >= n) continue;
      const float s = scale_inv[tiles == 1 ? 0 : tile_of(i, columns, tile_rows, tile_columns, across)];
      if (wide && i + DECODED <= n) {
        float v[DECODED];
#pragma unroll
        for (int j = 0; j < DECODED / 4; ++j) {
          float four[4];
          decode4<FORMAT>(words[k][j], four);
#pragma unroll
          for (int c = 0; c < 4; ++c) v[4 * j + c] = four[c] * s;
        }
        store<DECODED>(x + i, v);
      } else {
        for (i64 j = i; j < min64(i + DECODED, n); ++j) x[j] = from_float<T>(decode<FORMAT>(q[j]) * s);
      }
    }
  }
}

// --- the layers' cast ------------------------------------------------------------------------------------------------------

constexpr int ROWS = 128, COLUMNS = 64;  // a block's tile; a thread takes 4 rows of 8 columns

// Tile `tile`, tiles across first, of a cast by a block of 256 threads: x (rows, columns) into q (padded_rows, padded_columns; rows q_stride
// apart) and q_t (padded_columns, padded_rows; rows qt_stride apart), either may be null; zero codes beyond x. amax may be null. partials:
// null, or float [tiles down][columns], written with each tile's column sums.
DEVICE void cast_tile(u32 tile, const T* x, u8* q, u8* q_t, const float* scale, float* scale_inv, float* amax, float* partials, i64 rows,
                      i64 columns, i64 padded_rows, i64 padded_columns, i64 q_stride, i64 qt_stride) {
  __shared__ uint4 turned[COLUMNS][ROWS / 16];  // q_t's tile, 16 rows of x an entry, entries of column c at place ^ (c / 8)
  __shared__ float sums[8][COLUMNS];
  __shared__ float shared[32];
  const i64 across = padded_columns ? ceil_div(padded_columns, COLUMNS) : 1;
  const i64 top_row = tile / across * ROWS, left = tile % across * COLUMNS;
  const u32 warp = threadIdx.x / 32, group = threadIdx.x % 8, quad = threadIdx.x / 8;
  const i64 row = top_row + 4 * quad, column = left + 8 * group;
  const float s = *scale;
  if (tile == 0 && threadIdx.x == 0) *scale_inv = __fdiv_rn(1.0f, s);

  // all loads first, so that they are under way together
  const bool wide = rows_aligned<16>(x, columns) && column + 8 <= columns;
  alignas(16) T raw[4][8];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const T* from = x + (row + r) * columns + column;
    if (wide && row + r < rows) {
      load_bytes<8 * sizeof(T)>(from, raw[r]);
    } else {
#pragma unroll
      for (int c = 0; c < 8; ++c) raw[r][c] = row + r < rows && column + c < columns ? from[c] : from_float<T>(0.0f);
    }
  }

  float high = 0.0f, total[8] = {};
  u32 words[4][2];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float v[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float value = to_float(raw[r][c]);
      high = amax_of(high, value);
      total[c] += value;
      v[c] = row + r < rows && column + c < columns ? value * s : 0.0f;
    }
    encode_words<FORMAT>(v, words[r]);
    if (q != nullptr && row + r < padded_rows) {
      u8* to = q + (row + r) * q_stride + column;
      if (rows_aligned<8>(q, q_stride) && column + 8 <= padded_columns) store_codes<8>(to, words[r]);
      else store_codes_some<8>(to, padded_columns - column, words[r]);
    }
  }

  if (q_t != nullptr) {
    u32* place = reinterpret_cast<u32*>(turned);
    u32 lines[8];
    transpose_codes(words, lines);
#pragma unroll
    for (int c = 0; c < 8; ++c) place[(8 * group + c) * (ROWS / 4) + (((quad / 4) ^ group) * 4 + quad % 4)] = lines[c];
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < COLUMNS * (ROWS / 16) / 256; ++turn) {
      const u32 at = threadIdx.x + 256 * turn, line = at / (ROWS / 16), entry = at % (ROWS / 16);
      const uint4 codes = turned[line][entry ^ (line / 8)];
      const u32 sixteen[4] = {codes.x, codes.y, codes.z, codes.w};
      const i64 to_row = left + line, to_column = top_row + 16 * entry;
      if (to_row < padded_columns && to_column < padded_rows) {
        u8* to = q_t + to_row * qt_stride + to_column;
        if (rows_aligned<16>(q_t, qt_stride) && to_column + 16 <= padded_rows) store_codes<16>(to, sixteen);
        else store_codes_some<16>(to, padded_rows - to_column, sixteen);
      }
    }
  }

  if (partials != nullptr) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      total[c] += __shfl_xor_sync(~0u, total[c], 8);
      total[c] += __shfl_xor_sync(~0u, total[c], 16);
      if (threadIdx.x % 32 < 8) sums[warp][8 * group + c] = total[c];
    }
    __syncthreads();
    if (threadIdx.x < COLUMNS && left + threadIdx.x < columns && top_row < rows) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) sum += sums[w][threadIdx.x];
      partials[tile / across * columns + left + threadIdx.x] = sum;
    }
  }
  block_amax(amax, high, shared);
}

// A one-dimensional grid, a block a tile.
extern "C" __global__ void __launch_bounds__(256) quantize_transpose(const T* x, u8* q, u8* q_t, const float* scale, float* scale_inv,
                                                                     float* amax, float* partials, i64 rows, i64 columns,
                                                                     i64 padded_rows, i64 padded_columns, i64 q_stride, i64 qt_stride) {
  cast_tile(blockIdx.x, x, q, q_t, scale, scale_inv, amax, partials, rows, columns, padded_rows, padded_columns, q_stride, qt_stride);
}

constexpr int CAST_TENSORS = 48;

struct CastTable {
  const T* x[CAST_TENSORS];
  u8* q[CAST_TENSORS];
  u8* q_t[CAST_TENSORS];
  const float* scale[CAST_TENSORS];
  float* scale_inv[CAST_TENSORS];
  float* amax[CAST_TENSORS];
  u32 rows[CAST_TENSORS], columns[CAST_TENSORS], padded_rows[CAST_TENSORS], padded_columns[CAST_TENSORS];
  u32 q_stride[CAST_TENSORS], qt_stride[CAST_TENSORS], first[CAST_TENSORS];
};

// The same for a list of matrices.
extern "C" __global__ void __launch_bounds__(256) quantize_transpose_many(i64 count, const __grid_constant__ CastTable table) {
  const int t = tensor_of(table.first, count);
  cast_tile(blockIdx.x - table.first[t], table.x[t], table.q[t], table.q_t[t], table.scale[t], table.scale_inv[t], table.amax[t], nullptr,
            table.rows[t], table.columns[t], table.padded_rows[t], table.padded_columns[t], table.q_stride[t], table.qt_stride[t]);
}
