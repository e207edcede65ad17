// Casts between high precision and FP8: plain, by tiles, and the layers' cast to both orientations.
//
// functions: quantize_fp8 (quantize, fp8_attention_bwd)
// functions: quantize_transpose (quantize_transpose, fp8_gemm_cast)
// functions: quantize_stack
// functions: dequantize_fp8 (dequantize, fp8_attention_fwd, fp8_attention_bwd)
// variants: T=f32,bf16,f16; FORMAT=e4m3,e5m2
#include "rows.cuh"

constexpr int V = 16;  // elements a thread takes at a time in the flat kernels: one 16-byte access of codes

// --- the plain cast ----------------------------------------------------------------------------------------

// Place of a tile in the arrays of scales. Per tensor everything is tile 0; else tiles are 16
// columns wide or a multiple.
DEVICE i64 tile_of(i64 index, i64 columns, i64 tile_rows, i64 tile_columns, i64 across) {
  return index / columns / tile_rows * across + index % columns / tile_columns;
}

// q = encode(x * scale), saturating, nearest even, over rows * columns elements; amax (per tensor only) may
// be null. With more than one tile, columns and tile_columns are multiples of 16.
extern "C" __global__ void __launch_bounds__(256)
quantize_fp8(const T* x, u8* q, const float* scale, float* scale_inv, float* amax, i64 n, i64 columns,
             i64 tile_rows, i64 tile_columns, i64 tiles) {
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

// codes a thread decodes at a time: 16 bytes of bfloat16; and how many times ahead it reads them
constexpr int DECODED = 8, AHEAD = 4;

// x = decode(q) * scale_inv; tiles as above.
extern "C" __global__ void __launch_bounds__(256)
dequantize_fp8(const u8* q, T* x, const float* scale_inv, i64 n, i64 columns, i64 tile_rows,
               i64 tile_columns, i64 tiles) {
  const i64 across = tiles == 1 ? 1 : columns / tile_columns + (columns % tile_columns != 0),
            stride = step() * DECODED;
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

// --- the layers' cast --------------------------------------------------------------------------------------

constexpr int ROWS = 128, COLUMNS = 64;  // a block's tile; a thread takes 4 rows of 8 columns

// x (rows, columns) into q (padded_rows, padded_columns; rows q_stride apart) and q_t (padded_columns,
// padded_rows; rows qt_stride apart), either may be null; zero codes beyond x. amax may be null. partials:
// null, or float [tiles down][columns], written with each tile's column sums.
struct Job {
  const T* x;
  u8 *q, *q_t;
  const float* scale;
  float *scale_inv, *amax, *partials;
  i64 rows, columns, padded_rows, padded_columns, q_stride, qt_stride;
  const float* known_amax;  // where the scale is to be made of it by the rule of current scaling, with these
  f64 epsilon;
  i64 power_2;

  __device__ __forceinline__ float scale_now() const {
    return scale_of_cast(scale, known_amax, FORMAT::MAX, epsilon, power_2);
  }
};

struct Shared {
  // q_t's tile, 16 rows of x an entry, entries of column c at place ^ (c / 8)
  uint4 transposed[COLUMNS][ROWS / 16];
  float sums[8][COLUMNS];
  float maxima[32];
};

// The tile whose first element is (top_row, left), by a block of 256 threads. WHOLE: all of it is there, in
// x, q and q_t, and aligned.
template <bool WHOLE> DEVICE void cast_tile(const Job& job, i64 top_row, i64 left, Shared& shared) {
  const u32 warp = threadIdx.x / 32, group = threadIdx.x % 8, quad = threadIdx.x / 8;
  const i64 row = top_row + 4 * quad, column = left + 8 * group;
  const int valid = WHOLE ? 8 : columns_left(column, job.columns);
  const bool wide = WHOLE || rows_aligned<16>(job.x, job.columns);

  Eight<T> in[4];  // all loads first, so that they are under way together
#pragma unroll
  for (int r = 0; r < 4; ++r)
    in[r] = read8(job.x + (row + r) * job.columns + column, WHOLE || row + r < job.rows ? valid : 0, wide);
  const float scale = job.scale_now();

  Peak<T> peak;
  float total[8] = {};
  u32 words[4][2];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float v[8];
    peak.add(in[r]);
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = value(in[r], c);
    if (job.partials != nullptr) {
#pragma unroll
      for (int c = 0; c < 8; ++c) total[c] += v[c];
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = WHOLE || (row + r < job.rows && c < valid) ? v[c] * scale : 0.0f;
    encode_words<FORMAT>(v, words[r]);
  }
  const bool wide_q = rows_aligned<8>(job.q, job.q_stride);
  if (job.q != nullptr)
    write_q<WHOLE>(job.q, job.q_stride, words, row, column, job.padded_rows, job.padded_columns, wide_q);

  if (job.q_t != nullptr) {
    u32* place = reinterpret_cast<u32*>(shared.transposed);
    u32 lines[8];
    transpose_codes(words, lines);
#pragma unroll
    for (int c = 0; c < 8; ++c)
      place[(8 * group + c) * (ROWS / 4) + (((quad / 4) ^ group) * 4 + quad % 4)] = lines[c];
    __syncthreads();
    const u32 entry = threadIdx.x % (ROWS / 16);
    const i64 to_column = top_row + 16 * entry;
    const int left_over = WHOLE ? 16 : (int)max64(0, min64(job.padded_rows - to_column, 16));
    const bool wide_t = WHOLE || rows_aligned<16>(job.q_t, job.qt_stride);
#pragma unroll
    for (int turn = 0; turn < COLUMNS * (ROWS / 16) / 256; ++turn) {
      const u32 line = threadIdx.x / (ROWS / 16) + 256 / (ROWS / 16) * turn;
      const uint4 codes = shared.transposed[line][entry ^ (line / 8)];
      if (WHOLE || left + line < job.padded_columns)
        write_codes<16>(job.q_t + (left + line) * job.qt_stride + to_column, left_over, wide_t,
                        {codes.x, codes.y, codes.z, codes.w});
    }
  }

  if (job.partials != nullptr) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      total[c] += __shfl_xor_sync(~0u, total[c], 8);
      total[c] += __shfl_xor_sync(~0u, total[c], 16);
      if (threadIdx.x % 32 < 8) shared.sums[warp][8 * group + c] = total[c];
    }
    __syncthreads();
    if (threadIdx.x < COLUMNS && left + threadIdx.x < job.columns && top_row < job.rows) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < 8; ++w) sum += shared.sums[w][threadIdx.x];
      job.partials[top_row / ROWS * job.columns + left + threadIdx.x] = sum;
    }
  }
  block_amax(job.amax, peak.amax(), shared.maxima);
}

// A one-dimensional grid, a block a tile, tiles across first.
extern "C" __global__ void __launch_bounds__(256)
quantize_transpose(const T* x, u8* q, u8* q_t, const float* scale, float* scale_inv, float* amax,
                   float* partials, i64 rows, i64 columns, i64 padded_rows, i64 padded_columns,
                   i64 q_stride, i64 qt_stride, const float* known_amax, f64 epsilon, i64 power_2) {
  start_early();
  __shared__ Shared shared;
  const Job job = {x,       q,           q_t,            scale,    scale_inv, amax,       partials, rows,
                   columns, padded_rows, padded_columns, q_stride, qt_stride, known_amax, epsilon,  power_2};
  const u32 across = padded_columns ? (u32)ceil_div(padded_columns, COLUMNS) : 1;
  const i64 top_row = (i64)(blockIdx.x / across) * ROWS, left = (i64)(blockIdx.x % across) * COLUMNS;
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = __fdiv_rn(1.0f, job.scale_now());
  const bool whole = top_row + ROWS <= rows && left + COLUMNS <= columns && rows_aligned<16>(x, columns) &&
                     rows_aligned<8>(q, q_stride) && rows_aligned<16>(q_t, qt_stride);
  if (whole)
    cast_tile<true>(job, top_row, left, shared);
  else
    cast_tile<false>(job, top_row, left, shared);
}

// Matrices one after the other in x, q and q_t, each cast by the scale of its own amax. A one-dimensional
// grid, a block a tile, the tiles of a matrix one after the other, those across first.
extern "C" __global__ void __launch_bounds__(256)
quantize_stack(const T* x, u8* q, u8* q_t, const float* amax, float* scale_inv, i64 rows, i64 columns,
               i64 padded_rows, i64 padded_columns, f64 epsilon, i64 power_2) {
  __shared__ Shared shared;
  const u32 across = padded_columns ? (u32)ceil_div(padded_columns, COLUMNS) : 1,
            down = padded_rows ? (u32)ceil_div(padded_rows, ROWS) : 1;
  const u32 matrix = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
  const i64 codes = matrix * padded_rows * padded_columns;
  x += matrix * rows * columns;
  q = q == nullptr ? nullptr : q + codes;
  q_t = q_t == nullptr ? nullptr : q_t + codes;
  const Job job = {x,           q,              q_t,            nullptr,     scale_inv,     nullptr,
                   nullptr,     rows,           columns,        padded_rows, padded_columns, padded_columns,
                   padded_rows, amax + matrix, epsilon, power_2};
  const i64 top_row = (i64)(tile / across) * ROWS, left = (i64)(tile % across) * COLUMNS;
  if (tile == 0 && threadIdx.x == 0) scale_inv[matrix] = __fdiv_rn(1.0f, job.scale_now());
  const bool whole = top_row + ROWS <= rows && left + COLUMNS <= columns && rows_aligned<16>(x, columns) &&
                     rows_aligned<8>(q, padded_columns) && rows_aligned<16>(q_t, padded_rows);
  if (whole)
    cast_tile<true>(job, top_row, left, shared);
  else
    cast_tile<false>(job, top_row, left, shared);
}
