// The largest magnitude of a matrix, whole and by tiles.
//
// functions: amax_tensor (amax, quantize, fp8_attention_bwd), amax_tiles (amax, quantize)
// functions: amax_groups (group_amax)
// variants: T=f32,bf16,f16,f64
#include "rows.cuh"

constexpr int AHEAD = 4;  // times eight elements that a thread has under way

// amax[0] = max(amax[0], max|x|) over n elements that lie together, from the end.
extern "C" __global__ void __launch_bounds__(256) amax_tensor(const T* x, float* amax, i64 n) {
  start_early();
  __shared__ float shared[32];
  const i64 eights = rows_aligned<16>(x, 0) ? n / 8 : 0, count = step();
  Peak<T> peak;
  for (i64 i = first(); i < eights; i += count * AHEAD) {
    Eight<T> in[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const i64 left = eights - 1 - i - k * count;
      in[k] = left >= 0 ? read8(x + left * 8, 8, true) : Eight<T>{};
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) peak.add(in[k]);
  }
  float most = peak.amax();
  for (i64 i = eights * 8 + first(); i < n; i += count) most = amax_of(most, to_float(x[i]));
  block_amax(amax, most, shared);
}

// amax[i, j] over tiles of tile_rows x tile_columns. A warp takes `chunk` rows of one tile at a time.
extern "C" __global__ void __launch_bounds__(256)
amax_tiles(const T* x, float* amax, i64 rows, i64 columns, i64 tile_rows, i64 tile_columns, i64 chunk) {
  constexpr int W = 16 / sizeof(T);
  const i64 across = ceil_div(columns, tile_columns), down = ceil_div(rows, tile_rows),
            chunks = ceil_div(tile_rows, chunk);
  const bool wide = rows_aligned<16>(x, columns) && (tile_columns % W == 0 || across == 1);
  const u32 lane = threadIdx.x % 32;
  for (i64 job = first() / 32; job < across * down * chunks; job += step() / 32) {
    const i64 tile = job / chunks, i = tile / across, j = tile % across;
    const i64 from = i * tile_rows + job % chunks * chunk;
    const i64 to = min64(min64(from + chunk, (i + 1) * tile_rows), rows);
    const i64 left = j * tile_columns, right = min64(left + tile_columns, columns);
    float top = 0.0f;
    for (i64 row = from; row < to; ++row) {
      const T* line = x + row * columns;
      i64 column = left;
      if (wide) {
        for (column += lane * W; column + W <= right; column += 32 * W) {
          float v[W];
          load<W>(line + column, v);
#pragma unroll
          for (int k = 0; k < W; ++k) top = amax_of(top, v[k]);
        }
        column = left + (right - left) / W * W;
      }
      for (column += lane; column < right; column += 32) top = amax_of(top, to_float(line[column]));
    }
    top = warp_max(top);
    if (lane == 0) atomic_amax(amax + tile, top);
  }
}

// amax over the rows of groups, of all columns into amax[0], or of each by itself. A block takes `chunk` rows
// of 8 * `across` columns, `across` threads a row: a power of two.
extern "C" __global__ void __launch_bounds__(256)
amax_groups(const T* x, float* amax, const i32* sizes, i64 groups, i64 rows, i64 columns, i64 slots,
            i64 across, i64 chunk, i64 by_column) {
  __shared__ float shared[32];
  const Live live = live_rows(sizes, groups, rows, slots);
  const i64 panels = ceil_div(columns, 8 * across), from = blockIdx.x / panels * chunk;
  const i64 column = (blockIdx.x % panels * across + threadIdx.x % across) * 8, apart = 256 / across;
  const i64 end = min64(from + chunk, live.end);
  const int valid = columns_left(column, columns);
  const bool wide = rows_aligned<16>(x, columns);
  float most[8] = {};
  for (i64 row = from + threadIdx.x / across; row < end; row += apart * AHEAD) {
    Eight<T> in[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const i64 own = row + k * apart;
      in[k] = own < end && live(own) ? read8(x + own * columns + column, valid, wide) : Eight<T>{};
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
#pragma unroll
      for (int i = 0; i < 8; ++i) most[i] = amax_of(most[i], value(in[k], i));
  }
  if (by_column) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < valid && most[i] > 0.0f) atomic_amax(amax + column + i, most[i]);
    return;
  }
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, most[i]);
  block_amax(amax, top, shared);
}
