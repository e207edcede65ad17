// functions: act_fwd (act_fwd, fp8_gemm_act), act_bwd (act_bwd, fp8_gemm_act_bwd)
// variants: ACT=gelu,qgelu,relu,silu,srelu; T=f32,bf16,f16; TILES=mixed
// variants: ACT=geglu,glu,qgeglu,reglu,sreglu,swiglu,clamped_swiglu; T=f32,bf16,f16; TILES=mixed
// variants: ACT=gelu,qgelu,relu,silu,geglu,swiglu; T=bf16,f16; TILES=e4m3,e5m2,none
//
// y = ACT(x + bias), see fp8kit.backends.activation, and its gradient, written as T, as FP8 codes in either
// orientation, or both, with amax and column sums, in one pass.
//
// A block walks `tiles` tiles of 64 rows x 128 columns, one below the other. A thread holds 4 rows x 8
// columns of a tile: 16-byte reads, 8 neighbouring codes of q a write; the transposed codes are transposed in
// registers and pass through shared memory, so that q_t is written 64 bytes a row. Elements outside x are
// read as 0 and give 0; rows outside are masked, since bias alone would not be 0 there. TILES=e4m3, e5m2,
// none: only whole tiles of aligned arrays, wanted as codes of that format in both orientations, or for their
// amax and sums alone, not as T. Nothing is asked there of an element, and rows come through shared memory:
// where one has been used, the same row of the next tile is on its way. The gradient of a gated activation,
// whose rows do not fit, still asks for them and reads them into registers.

#include "activation.cuh"
#include "rows.cuh"

constexpr int TILE_ROWS = 64, TILE_COLUMNS = 128, THREADS = 256;

struct mixed;
struct none;
template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };
constexpr bool WHOLE = !Same<TILES, mixed>::value;

// Of tiles, in forward: i32 where T is float32, else i64, which leave enough registers; in
// backward i32 does for all.
template <int BYTES> struct IndexOf { typedef i64 type; };
template <> struct IndexOf<4> { typedef i32 type; };
typedef IndexOf<sizeof(T)>::type Index;

// What is known of a cast, told to the compiler.
DEVICE Cast known(Cast cast) {
  if (Same<TILES, none>::value) {
    cast.q = cast.q_t = nullptr;
  } else if (WHOLE) {
    __builtin_assume(cast.q != nullptr && cast.q_t != nullptr);
    cast.is_e5m2 = Same<TILES, e5m2>::value;
  }
  return cast;
}

constexpr int PARTS = ACT::gated ? 2 : 1;  // column halves of x that one column of y depends on

// Blocks that shall fit a multiprocessor: as many as the registers allow without spilling, for 4 x 8 elements
// of each array where those do not pass through shared memory. Backward in float16, and that of relu, would
// spill one or two of 80 there.
static __device__ constexpr int bwd_blocks() {
  if (sizeof(T) == 4) return 3 - PARTS;
  if (__CUDA_ARCH__ < 900) return 2;
  if (PARTS == 1) return WHOLE && (Same<T, f16>::value || Same<ACT, relu>::value) ? 2 : 3;
  return __CUDA_ARCH__ == 900 ? 2 : 1;
}
// by registers; with 100 KB of shared memory (8.9, 12.x) one less fits of those for whole tiles
constexpr int BWD_BLOCKS = bwd_blocks();
constexpr int FWD_BLOCKS = sizeof(T) == 4 || PARTS == 2 ? 2 : 4;

// The casts of both halves of a gradient's columns; first is that of all where there are no halves.
struct Halves {
  Cast first, last;
};

// Where the calling thread stands: 4 rows from `row`, 8 columns from `column` of y.
struct Place {
  i64 tile_row, tile_column, row, column;
};

DEVICE Place place(i64 row_tile, i64 column_tile) {
  Place at;
  at.tile_row = row_tile * TILE_ROWS;
  at.tile_column = column_tile * TILE_COLUMNS;
  at.row = at.tile_row + threadIdx.x / 16 * 4;
  at.column = at.tile_column + threadIdx.x % 16 * 8;
  return at;
}

// The shared tile of transposed codes: column 8 a + b, rows 4 ty ... 4 ty + 3 lie in word 132 a + 16 b + ty.
// 132 keeps the 16-byte alignment of reads and spreads the writes of a warp over 16 banks.
constexpr int TILE_WORDS = 16 * 132;

// The tile's codes into q and q_t. All threads call.
DEVICE void write_tile(const Cast& cast, const u32 (&codes)[4][2], const Place& at, u32* tile) {
  const bool wide_q = rows_aligned<8>(cast.q, cast.q_stride);
  if (cast.q != nullptr)
    write_q<WHOLE>(cast.q, cast.q_stride, codes, at.row, at.column, cast.q_rows, cast.q_columns, wide_q);
  if (cast.q_t == nullptr) return;
  u32 columns[8];
  transpose_codes(codes, columns);
  __syncthreads();  // the former tile has been read
#pragma unroll
  for (int j = 0; j < 8; ++j) tile[threadIdx.x % 16 * 132 + j * 16 + threadIdx.x / 16] = columns[j];
  __syncthreads();
  const int rows = threadIdx.x % 4 * 16;
  const i64 to_column = at.tile_row + rows;
  const int left = WHOLE ? 16 : (int)min64(cast.t_columns - to_column, 16);
  const bool wide = WHOLE || rows_aligned<16>(cast.q_t, cast.t_stride);
#pragma unroll
  for (int turn = 0; turn < TILE_COLUMNS * 4 / THREADS; ++turn) {
    const int column = threadIdx.x / 4 + turn * (THREADS / 4);
    const i64 to_row = at.tile_column + column;
    if (!WHOLE && to_row >= cast.t_rows) break;
    u32 words[4];
    load_codes<16>(reinterpret_cast<const u8*>(tile + column / 8 * 132 + column % 8 * 16 + rows / 4), words);
    write_codes<16>(cast.q_t + to_row * cast.t_stride + to_column, left, wide, words);
  }
}

// x: (M, PARTS * F), y: (M, F). For an amax alone of an activation that rises, eight values are worked out
// only where one x of them is above `beneath`: 2**-16 under the highest that the warp has seen, once that is
// above 1. NaN is above everything.
extern "C" __global__ void __launch_bounds__(THREADS, FWD_BLOCKS)
act_fwd(const T* x, const T* bias, T* y, i64 M, i64 F, i64 column_tiles, i64 tiles, f64 limit,
        f64 alpha, f64 offset, Cast given) {
  start_early();
  const Params params{(float)limit, (float)alpha, (float)offset};
  const Cast cast = known(given);
  constexpr bool SKIMS = Same<TILES, none>::value && PARTS == 1 && ACT::rises;
  float highest = 0.0f, beneath = -INF;
  alignas(16) __shared__ u32 tile[TILE_WORDS];
  __shared__ float shared[32];
  // the pass that took the amax went from the end
  const u32 block = given.known_amax != nullptr ? blockIdx.x : block_from_the_end();
  const Index column_tile = block % (u32)column_tiles,
              first_tile = (Index)(block / (u32)column_tiles) * (Index)tiles;
  const Index end_tile = first_tile + (Index)tiles;
  const i64 width = PARTS * F;
  const bool wide = WHOLE || (rows_aligned<16>(x, width) && rows_aligned<16>(x, F)),
             wide_y = rows_aligned<16>(y, F);
  const float scale = cast_scale(cast);
  const int valid = WHOLE ? 8 : columns_left(place(0, column_tile).column, F);
  float shifts[PARTS][8];
#pragma unroll
  for (int p = 0; p < PARTS; ++p)
    floats8(bias == nullptr ? bias : bias + p * F + place(0, column_tile).column, valid,
            rows_aligned<16>(bias, p * F), shifts[p]);
  Peak<T> peak;

  // whole tiles' rows pass through here, others' through registers
  alignas(16) __shared__ T ahead[4][PARTS][WHOLE ? THREADS * 8 : 8];
  // in eights, of which whole tiles have less than 2**32
  const u32 pitch = (u32)(width / 8), half = (u32)(F / 8);
  u32 next = (u32)place(first_tile, column_tile).row * pitch + (u32)place(first_tile, column_tile).column / 8;
  Eight<T> in[PARTS][4];  // of the tile; where a row has been used, the same row of the next tile is fetched
  const auto fetch = [&](int k, Index t) {
    if (WHOLE) {
#pragma unroll
      for (int p = 0; p < PARTS && t < end_tile; ++p)
        copy8_async(ahead[k][p] + threadIdx.x * 8, x + (u64)(next + k * pitch + p * half) * 8);
      end_of_copies();
      return;
    }
    const Place at = place(t, column_tile);
    const int here = t < end_tile && (WHOLE || at.row + k < M) ? valid : 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
      in[p][k] = read8(x + (at.row + k) * width + p * F + at.column, here, wide);
  };
  const auto arrived = [&](int k) {
    if (!WHOLE) return;
    wait_for_copies(3);
#pragma unroll
    for (int p = 0; p < PARTS; ++p) in[p][k] = read8(ahead[k][p] + threadIdx.x * 8, 8, true);
  };
  // true, which spares the compiler's remark on code that is not reached
  const auto skimmed = [&](int k, Index t) {
    if (k == 1) {
      // no number below 0 is in it
      highest = __int_as_float(__reduce_max_sync(~0u, __float_as_int(highest)));
      if (highest > 1.0f) beneath = highest * (1.0f - 0x1p-16f);
    }
    float v[8], top = beneath;
#pragma unroll
    for (int j = 0; j < 8; ++j) top = max_nan(top, v[j] = value(in[0][k], j) + shifts[0][j]);
    fetch(k, t + 1);
    if (top == beneath) return true;
    highest = fmaxf(highest, top);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = ACT::value(v[j], params);
    peak.add(rounded8<T>(v));
    return true;
  };
#pragma unroll
  for (int k = 0; k < 4; ++k) fetch(k, first_tile);
  for (Index t = first_tile; t < end_tile; ++t) {
    const Place at = place(t, column_tile);
    next += TILE_ROWS * pitch;
    u32 codes[4][2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float v[8];
      arrived(k);
      if (SKIMS && skimmed(k, t)) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        v[j] = activated<ACT>(value(in[0][k], j) + shifts[0][j],
                              value(in[PARTS - 1][k], j) + shifts[PARTS - 1][j], params);
      fetch(k, t + 1);
      const bool there = WHOLE || at.row + k < M;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = there ? v[j] : 0.0f;
      const Eight<T> out = rounded8<T>(v);
      if (!WHOLE && y != nullptr && there) write8(y + (at.row + k) * F + at.column, valid, wide_y, out);
      peak.add(out);
      if (cast.wanted()) encode8(cast, out, scale, codes[k]);
    }
    if (cast.wanted()) write_tile(cast, codes, at, tile);
  }
  block_amax(cast.amax, peak.amax(), shared);
}

// dy: (M, F), x and dx: (M, PARTS * F). partial: float32 (row blocks, PARTS * F), the column sums of
// each block's rows, or null.
extern "C" __global__ void __launch_bounds__(THREADS, BWD_BLOCKS)
act_bwd(const T* dy, const T* x, const T* bias, T* dx, float* partial, i64 M, i64 F, i64 column_tiles,
        i64 tiles, f64 limit, f64 alpha, f64 offset, Halves given) {
  start_early();
  constexpr bool SURE = WHOLE && PARTS == 1;  // a gated one's registers do not allow it
  const Params params{(float)limit, (float)alpha, (float)offset};
  const Cast casts[2] = {known(given.first), PARTS == 2 ? known(given.last) : given.last};
  alignas(16) __shared__ u32 tile[TILE_WORDS];
  __shared__ float shared[PARTS][32];
  __shared__ float sums_of_warps[THREADS / 32][TILE_COLUMNS];
  const u32 block = block_from_the_end();
  const i32 column_tile = block % (u32)column_tiles, row_block = block / (u32)column_tiles;
  const i32 first_tile = row_block * (i32)tiles, end_tile = first_tile + (i32)tiles;
  // the thread's parts of the next rows of dy and x
  alignas(16) __shared__ T ahead[4][2][SURE ? THREADS * 8 : 8];
  const i64 width = PARTS * F;
  const bool wide = SURE || (rows_aligned<16>(x, width) && rows_aligned<16>(x, F)),
             wide_dy = SURE || rows_aligned<16>(dy, F);
  const bool wide_dx = rows_aligned<16>(dx, width) && rows_aligned<16>(dx, F);
  float scales[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) scales[p] = cast_scale(casts[p]);
  const int valid = SURE ? 8 : columns_left(place(0, column_tile).column, F);
  float shifts[PARTS][8], sums[PARTS][8];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    floats8(bias == nullptr ? bias : bias + p * F + place(0, column_tile).column, valid,
            rows_aligned<16>(bias, p * F), shifts[p]);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[p][j] = 0.0f;
  }
  Peak<T> peaks[PARTS];

  const u32 pitch = (u32)(F / 8);  // in eights, of which whole tiles have less than 2**32
  u32 next = (u32)place(first_tile, column_tile).row * pitch + (u32)place(first_tile, column_tile).column / 8;
  // where a row has been used, the same row of the next tile is fetched
  const auto fetch = [&](int k, bool more) {
    if (more) {
      copy8_async(ahead[k][0] + threadIdx.x * 8, dy + (u64)(next + k * pitch) * 8);
      copy8_async(ahead[k][1] + threadIdx.x * 8, x + (u64)(next + k * pitch) * 8);
    }
    end_of_copies();
  };
  if (SURE)
#pragma unroll
    for (int k = 0; k < 4; ++k) fetch(k, true);

  for (i32 t = first_tile; t < end_tile; ++t) {
    const Place at = place(t, column_tile);
    next += TILE_ROWS * pitch;
    Eight<T> in[PARTS][4], up[4];
    u32 codes[PARTS][4][2];
#pragma unroll
    for (int k = 0; k < 4 && !SURE; ++k) {
      const int here = SURE || at.row + k < M ? valid : 0;
      up[k] = read8(dy + (at.row + k) * F + at.column, here, wide_dy);
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        in[p][k] = read8(x + (at.row + k) * width + p * F + at.column, here, wide);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (SURE) {
        wait_for_copies(3);
        up[k] = read8(ahead[k][0] + threadIdx.x * 8, 8, true);
        in[0][k] = read8(ahead[k][1] + threadIdx.x * 8, 8, true);
      }
      float d[PARTS][8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float a = value(in[0][k], j) + shifts[0][j];
        const float second = value(in[PARTS - 1][k], j) + shifts[PARTS - 1][j];
        const float2 both = gradients<ACT>(value(up[k], j), a, second, params);
        d[0][j] = both.x;
        if (PARTS == 2) d[PARTS - 1][j] = both.y;
      }
      if (SURE) fetch(k, t + 1 < end_tile);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const bool there = SURE || at.row + k < M;
        const Eight<T> out = there ? rounded8<T>(d[p]) : Eight<T>{};
        if (!SURE && dx != nullptr && there)
          write8(dx + (at.row + k) * width + p * F + at.column, valid, wide_dx, out);
        peaks[p].add(out);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[p][j] += value(out, j);
        if (casts[p].wanted()) encode8(casts[p], out, scales[p], codes[p][k]);
      }
    }
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
      if (casts[p].wanted()) write_tile(casts[p], codes[p], at, tile);
  }
#pragma unroll
  for (int p = 0; p < PARTS; ++p) block_amax(casts[p].amax, peaks[p].amax(), shared[p]);
  if (partial == nullptr || (i64)first_tile * TILE_ROWS >= M) return;

#pragma unroll
  for (int p = 0; p < PARTS; ++p) {  // over the warp's two rows of threads, then over the warps
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float sum = sums[p][j] + __shfl_xor_sync(~0u, sums[p][j], 16);
      if (threadIdx.x % 32 < 16) sums_of_warps[threadIdx.x / 32][threadIdx.x % 16 * 8 + j] = sum;
    }
    __syncthreads();
    const i64 column = (i64)column_tile * TILE_COLUMNS + threadIdx.x;
    if (threadIdx.x < TILE_COLUMNS && column < F) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < THREADS / 32; ++w) sum += sums_of_warps[w][threadIdx.x];
      partial[row_block * width + p * F + column] = sum;
    }
  }
}
