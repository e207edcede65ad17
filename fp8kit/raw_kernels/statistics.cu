// Statistics: counts and sums of a matrix, of its tiles, of it beside its codes, of it beside another.
//
// functions: tensor_parts (tensor_statistics), tensor_total (tensor_statistics)
// functions: tile_ratios (tile_statistics), cast_parts (cast_statistics), pair_parts (pair_statistics)
// functions: sums_total (cast_statistics, pair_statistics)
// variants: T=f32,bf16,f16
// spills: 16
//
// Counts are added with integer atomics. Sums are float64: each block leaves its own in `parts` (kind k of
// block b at k * gridDim.x + b), and one block adds them in a fixed order. What cast_parts keeps over its
// loop, the compiler puts 16 bytes of into memory on some architectures.
#include "statistics.cuh"

constexpr u32 BINS = 257, KINDS = 260, COPIES = 8;  // copies of the counts in shared memory, by lane
constexpr u32 ZEROS = 256, NANS = 257, INFS = 258, MINUS_INFS = 259;

// --- the matrix by itself ----------------------------------------------------------------------------------

// counts[260] += exponents, zeros, NaN, Inf, -Inf. parts: of the finite values their number, sum (x - p), sum
// (x - p)^2, sum |x|, sum x^4, largest -x, largest x, largest -|x| that is not 0; p behind them.
extern "C" __global__ void __launch_bounds__(256)
tensor_parts(const T* x, u64* counts, f64* parts, i64 rows, i64 columns, i64 stride) {
  __shared__ u32 bins[COPIES * KINDS];
  __shared__ float shared[32];
  __shared__ f64 wide_shared[8];
  for (u32 i = threadIdx.x; i < COPIES * KINDS; i += 256) bins[i] = 0;
  const float pivot = pivot_of(x, rows, columns, stride, shared);
  __syncthreads();
  u32* own = bins + threadIdx.x % COPIES * KINDS;
  f64 first_sum = 0, second_sum = 0, total = 0, fourths = 0;
  u32 count = 0;
  float low = INF, high = -INF;
  u32 least = INF_BITS;
  const bool wide = rows_aligned<16>(x, stride);
  const i64 eights = max64(ceil_div(columns, 8), 1);
  for (Walk at(eights); at.row < rows; at.next(eights)) {
    const i64 row = at.row, column = at.eight * 8;
    const int valid = columns_left(column, columns);
    const Eight<T> eight = read8(x + row * stride + column, valid, wide);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= valid) continue;
      const float v = value(eight, i);
      const u32 bits = __float_as_uint(v), magnitude = bits & MAGNITUDE;
      atomicAdd(own + (magnitude ? magnitude >> 23 : ZEROS), 1u);
      if (magnitude >= INF_BITS) {
        atomicAdd(own + (magnitude > INF_BITS ? NANS : bits >> 31 ? MINUS_INFS : INFS), 1u);
        continue;
      }
      const f64 d = (f64)v - (f64)pivot, square = (f64)v * (f64)v;
      ++count;
      first_sum += d;
      second_sum += d * d;
      total += fabsf(v);
      fourths += square * square;
      low = fminf(low, v);
      high = fmaxf(high, v);
      if (magnitude) least = min(least, magnitude);
    }
  }
  const f64 sums[8] = {(f64)count, first_sum, second_sum, total, fourths, -low, high,
                       -(f64)__uint_as_float(least)};
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const f64 found = k < 5 ? block_of<true>(sums[k], wide_shared) : block_of<false>(sums[k], wide_shared);
    if (threadIdx.x == 0) parts[k * gridDim.x + blockIdx.x] = found;
  }
  if (first() == 0) parts[8 * gridDim.x] = pivot;
  for (u32 bin = threadIdx.x; bin < KINDS; bin += 256) {
    u32 all = 0;
#pragma unroll
    for (u32 k = 0; k < COPIES; ++k) all += bins[k * KINDS + bin];
    if (all) atomicAdd(counts + bin, (u64)all);
  }
}

// Number k of all blocks.
template <bool SUM> DEVICE f64 total_of(const f64* parts, i64 blocks, i64 k, f64* shared) {
  f64 found = SUM ? 0.0 : -NOTHING;
  for (i64 block = threadIdx.x; block < blocks; block += 256) {
    const f64 part = parts[k * blocks + block];
    found = SUM ? found + part : part > found ? part : found;
  }
  return block_of<SUM>(found, shared);
}

// moments[8]: least, largest, least magnitude that is not 0, sums of |x|, x^2 and x^4, mean, sum (x -
// mean)^2.
extern "C" __global__ void __launch_bounds__(256) tensor_total(const f64* parts, f64* moments, i64 blocks) {
  __shared__ f64 shared[8];
  f64 sums[8];
#pragma unroll
  for (int k = 0; k < 8; ++k)
    sums[k] = k < 5 ? total_of<true>(parts, blocks, k, shared) : total_of<false>(parts, blocks, k, shared);
  if (threadIdx.x) return;
  const f64 count = sums[0], off = count > 0 ? sums[1] / count : 0.0;
  const f64 mean = count > 0 ? parts[8 * blocks] + off : 0.0, around = sums[2] - sums[1] * off;
  const f64 apart = around > 0 ? around : 0.0;
  moments[0] = -sums[5];
  moments[1] = sums[6];
  moments[2] = -sums[7];
  moments[3] = sums[3];
  moments[4] = apart + count * mean * mean;
  moments[5] = sums[4];
  moments[6] = mean;
  moments[7] = apart;
}

// --- its tiles ---------------------------------------------------------------------------------------------

// What there is of a tile's finite values.
struct Tile {
  float most = 0.0f, least = INF;
  u32 count = 0;
  f64 squares = 0;
  __device__ __forceinline__ void add(float v) {
    const float magnitude = fabsf(v);
    if (!(magnitude < INF)) return;
    ++count;
    most = fmaxf(most, magnitude);
    if (magnitude > 0.0f) least = fminf(least, magnitude);
    squares += (f64)v * (f64)v;
  }
  __device__ __forceinline__ void ratios(f64& crest, f64& range) const {
    if (!(most > 0.0f)) return;
    const f64 peak = (f64)most * (f64)most * (f64)count / squares, wide = (f64)most / (f64)least;
    crest = peak > crest ? peak : crest;
    range = wide > range ? wide : range;
  }
};

// ratios[2] = max of it and, over tiles, n amax^2 / sum x^2 and amax / least. A warp takes a tile; where they
// are one column wide a thread does, so that neighbours read neighbours.
extern "C" __global__ void __launch_bounds__(256)
tile_ratios(const T* x, u64* ratios, i64 rows, i64 columns, i64 stride, i64 height, i64 width) {
  __shared__ f64 shared[8];
  const i64 across = ceil_div(columns, width), tiles = across * ceil_div(rows, height);
  f64 crest = 0, range = 0;
  if (width == 1) {
    for (i64 job = first(); job < tiles; job += step()) {
      const i64 i = quotient(job, across), column = job - i * across, end = min64((i + 1) * height, rows);
      Tile tile;
      for (i64 row = i * height; row < end; ++row) tile.add(to_float(x[row * stride + column]));
      tile.ratios(crest, range);
    }
  } else {
    for (i64 job = first() / 32; job < tiles; job += step() / 32) {
      const i64 i = quotient(job, across), left = (job - i * across) * width;
      const i64 wide = min64(width, columns - left), size = min64(height, rows - i * height) * wide;
      Tile tile;
      for (i64 at = threadIdx.x % 32; at < size; at += 32) {
        const i64 row = part_of(at, wide);
        tile.add(to_float(x[(i * height + row) * stride + left + at - row * wide]));
      }
      tile.most = warp_max(tile.most);
      tile.least = -warp_max(-tile.least);
      tile.count = __reduce_add_sync(~0u, tile.count);
      tile.squares = sum_of(tile.squares);
      tile.ratios(crest, range);
    }
  }
  crest = block_of<false>(crest, shared);
  range = block_of<false>(range, shared);
  if (threadIdx.x) return;
  if (crest > 0) atomicMax(ratios, (u64)__double_as_longlong(crest));
  if (range > 0) atomicMax(ratios + 1, (u64)__double_as_longlong(range));
}

// --- it beside its codes -----------------------------------------------------------------------------------

// The value of each byte as a code, and the largest.
struct Decoded {
  float value[256], top;
};

// counts[262] += exponents of the scale_invs, all elements, values and codes that are not 0, saturated and
// overflowed ones. parts: sum (x - v)^2, sum x^2, largest -scale_inv, largest scale_inv.
extern "C" __global__ void __launch_bounds__(256)
cast_parts(const T* x, const u8* q, const float* scale_inv, u64* counts, f64* parts, i64 rows, i64 columns,
           i64 stride, i64 q_stride, i64 height, i64 width, i64 scales,
           const __grid_constant__ Decoded decoded) {
  __shared__ float table[256];
  __shared__ u32 bins[BINS];
  __shared__ f64 shared[8];
  table[threadIdx.x] = decoded.value[threadIdx.x];
  for (u32 i = threadIdx.x; i < BINS; i += 256) bins[i] = 0;
  __syncthreads();
  float low = INF, high = -INF;
  for (i64 i = first(); i < scales; i += step()) {
    const float scale = scale_inv[i];
    const u32 magnitude = __float_as_uint(scale) & MAGNITUDE;
    atomicAdd(bins + (magnitude ? magnitude >> 23 : ZEROS), 1u);
    low = fminf(low, scale);  // drops NaN
    high = fmaxf(high, scale);
  }
  const float top = decoded.top;
  f64 errors = 0, squares = 0;
  u32 values = 0, codes = 0, saturated = 0, overflowed = 0;
  const bool wide = rows_aligned<16>(x, stride), wide_q = rows_aligned<8>(q, q_stride);
  const bool shares = width % 8 == 0 || width >= columns;  // whether eight neighbours have one scale
  const i64 eights = max64(ceil_div(columns, 8), 1);
  const i64 across = width >= columns ? 1 : part_of(columns + width - 1, width);
  for (Walk at(eights); at.row < rows; at.next(eights)) {
    const i64 row = at.row, column = at.eight * 8;
    const int valid = columns_left(column, columns);
    const Eight<T> eight = read8(x + row * stride + column, valid, wide);
    const float* line = scale_inv + part_of(row, height) * across;
    const u8* from = q + row * q_stride + column;
    u64 eight_codes = 0;
    if (wide_q && valid == 8) {
      eight_codes = *reinterpret_cast<const u64*>(from);
    } else {
#pragma unroll 1
      for (int i = 0; i < valid; ++i) eight_codes |= (u64)from[i] << (8 * i);
    }
    float inverse = line[across == 1 ? 0 : part_of(column, width)];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= valid) continue;
      if (!shares) inverse = line[part_of(column + i, width)];
      const float v = value(eight, i), code = table[(u8)(eight_codes >> (8 * i))];
      const f64 error = (f64)v - (f64)(code * inverse);
      errors += error * error;
      squares += (f64)v * (f64)v;
      values += v != 0.0f;
      if (inverse == 0.0f) continue;
      codes += code != 0.0f;
      saturated += fabsf(code) == top;
      const float magnitude = fabsf(v);
      if (magnitude > 0.99f * (top * inverse) && magnitude < INF)
        overflowed += (f64)magnitude * (1 - 0x1p-22) > (f64)top * (f64)inverse;
    }
  }
  const f64 sums[4] = {errors, squares, -low, high};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const f64 found = k < 2 ? block_of<true>(sums[k], shared) : block_of<false>(sums[k], shared);
    if (threadIdx.x == 0) parts[k * gridDim.x + blockIdx.x] = found;
  }
  const u32 kinds[4] = {values, codes, saturated, overflowed};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const u32 found = __reduce_add_sync(~0u, kinds[k]);
    if (threadIdx.x % 32 == 0 && found) atomicAdd(counts + BINS + 1 + k, (u64)found);
  }
  if (first() == 0) atomicAdd(counts + BINS, (u64)(rows * columns));
  for (u32 bin = threadIdx.x; bin < BINS; bin += 256)
    if (bins[bin]) atomicAdd(counts + bin, (u64)bins[bin]);
}

// --- it beside another -------------------------------------------------------------------------------------

template <typename X>
DEVICE void pair_sums(const T* x, const X* twin, i64 rows, i64 columns, i64 stride, i64 twin_stride,
                      f64 (&sums)[4]) {
  const bool wide = rows_aligned<16>(x, stride), wide_twin = rows_aligned<16>(twin, twin_stride);
  const i64 eights = max64(ceil_div(columns, 8), 1);
  for (Walk at(eights); at.row < rows; at.next(eights)) {
    const i64 row = at.row, column = at.eight * 8;
    const int valid = columns_left(column, columns);
    const Eight<T> a = read8(x + row * stride + column, valid, wide);
    const Eight<X> b = read8(twin + row * twin_stride + column, valid, wide_twin);
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // what is not there is 0
      const f64 p = value(a, i), q = value(b, i), apart = p - q;
      sums[0] += p * q;
      sums[1] += p * p;
      sums[2] += q * q;
      sums[3] += apart * apart;
    }
  }
}

// parts: sum x twin, sum x^2, sum twin^2, sum (x - twin)^2. kind: of twin's numbers, 0 f32, 1 bf16, 2 f16.
extern "C" __global__ void __launch_bounds__(256)
pair_parts(const T* x, const void* twin, f64* parts, i64 rows, i64 columns, i64 stride, i64 twin_stride,
           i64 kind) {
  __shared__ f64 shared[8];
  f64 sums[4] = {0, 0, 0, 0};
  if (kind == 0)
    pair_sums(x, static_cast<const f32*>(twin), rows, columns, stride, twin_stride, sums);
  else if (kind == 1)
    pair_sums(x, static_cast<const bf16*>(twin), rows, columns, stride, twin_stride, sums);
  else
    pair_sums(x, static_cast<const f16*>(twin), rows, columns, stride, twin_stride, sums);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const f64 found = block_of<true>(sums[k], shared);
    if (threadIdx.x == 0) parts[k * gridDim.x + blockIdx.x] = found;
  }
}

// sums[4]: of the parts of all blocks `added` are added; then come the least, whose parts have another sign,
// and the largest.
extern "C" __global__ void __launch_bounds__(256)
sums_total(const f64* parts, f64* sums, i64 blocks, i64 added) {
  __shared__ f64 shared[8];
#pragma unroll 1
  for (i64 k = 0; k < 4; ++k) {
    const f64 found =
        k < added ? total_of<true>(parts, blocks, k, shared) : total_of<false>(parts, blocks, k, shared);
    if (threadIdx.x == 0) sums[k] = k == 2 && added == 2 ? -found : found;
  }
}
