// functions: act_fwd, act_bwd
// variants: ACT=gelu,qgelu,relu,silu,srelu; T=f32,bf16,f16; TILES=mixed
// variants: ACT=geglu,glu,qgeglu,reglu,sreglu,swiglu,clamped_swiglu; T=f32,bf16,f16; TILES=mixed
// variants: ACT=gelu,qgelu,relu,silu,geglu,swiglu; T=bf16,f16; TILES=e4m3,e5m2,none
//
// y = ACT(x + bias), see fp8kit.backends.activation, and its gradient, written as T, as FP8 codes in either
// orientation, or both, with amax and column sums, in one pass.
//
// A block walks `tiles` tiles of 64 rows x 128 columns, one below the other. A thread holds 4 rows x 8
// columns of a tile: 16-byte reads, 8 neighbouring codes of q a write; the transposed codes are turned in
// registers and pass through shared memory, so that q_t is written 64 bytes a row. Elements outside x are
// read as 0 and give 0; rows outside are masked, since bias alone would not be 0 there. TILES=e4m3, e5m2,
// none: only whole tiles of aligned arrays, wanted as codes of that format in both orientations, or for their
// amax and sums alone, not as T. Nothing is asked there of an element, and rows come through shared memory:
// where one has been used, the same row of the next tile is on its way. The gradient of a gated activation,
// whose rows do not fit, still asks for them and reads them into registers.

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

// 2**x within 2 ulp, 1 / x within 1 ulp. Flushing the subnormal results is harmless: here they are added to
// 1, or multiply a number of moderate size.
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// NaN passes through, unlike fmaxf and fminf.
DEVICE float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
DEVICE float clamp_nan(float x, float low, float high) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(max_nan(x, low)), "f"(high));
  return y;
}

// An activation has `value(u)`, `gradient(u, dy)` = dy * slope, and, where it is gated, what the second half
// v of the columns becomes: `factor(v)`, and whether its gradient passes there.
struct Params { float limit, alpha, offset; };
#define VALUE static __device__ __forceinline__ float value(float x, const Params& p)
#define GRADIENT static __device__ __forceinline__ float gradient(float x, float dy, const Params& p)

struct plain {
  static constexpr bool gated = false, rises = false;
  static __device__ __forceinline__ float factor(float v, const Params& p) { return v; }
  static __device__ __forceinline__ bool passes(float v, const Params& p) { return true; }
};

// The smooth activations are x * sigmoid(w(x)), with e = exp(-w): value = x / (1 + e), |error| <= 2**-21 |x|;
// -Inf gives -0 since x is held finite there. Their slope is s + s x w'(x) (1 - s), s = 1 / (1 + e) and
// 1 - s = e s, which cancels nothing, |error| <= 2**-20; for 16 bits the difference does, with an error of
// 2**-22 |x w'(x)|, and costs less. x is clamped first to where exp(-w) is finite and the slope is within
// 2**-110 of its limit 0 or 1, so Inf does not meet 0.
// They rise where x > 0, as value / x does; value(1) > 0.7, and where x < 0 the value is within 0.3 of
// 0. So values of x up to H (1 - 2**-16), H > 1, are below that of H, by more than both errors and
// before they are rounded.
constexpr float LOG2_E = 1.4426950408889634f, LEAST = -3.0e38f, MOST_W = 80.0f;

// x held between -far and far; NaN passes through.
DEVICE float within(float x, float far) {
#if __CUDA_ARCH__ >= 860
  float y;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(far));
  return y;
#else
  return x != x ? x : fminf(fmaxf(x, -far), far);
#endif
}

template <typename W> struct smooth : plain {  // w = x (LINEAR + CUBIC x**2), x clamped to FAR
  static constexpr bool rises = true;
  static __device__ __forceinline__ float exp_minus(float x) {
    if (W::CUBIC == 0.0f) return exp2_fast(-LOG2_E * W::LINEAR * x);
    return exp2_fast(x * fmaf(x * x, -LOG2_E * W::CUBIC, -LOG2_E * W::LINEAR));
  }
  VALUE { return fmaxf(x, LEAST) * reciprocal_fast(1.0f + exp_minus(x)); }
  GRADIENT {
    const float c = within(x, W::FAR), e = exp_minus(c), s = reciprocal_fast(1.0f + e);
    const float rise = c * (W::CUBIC == 0.0f ? W::LINEAR : fmaf(c * c, 3.0f * W::CUBIC, W::LINEAR));
    const float bend = sizeof(T) == 4 ? rise * (e * s) : fmaf(-rise, s, rise);
    return dy * fmaf(s, bend, s);
  }
};

struct silu_w { static constexpr float LINEAR = 1.0f, CUBIC = 0.0f, FAR = 80.0f; };
struct qgelu_w { static constexpr float LINEAR = 1.702f, CUBIC = 0.0f, FAR = 47.0f; };
// the tanh form: 0.5 (1 + tanh(u)) is sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x**3)
struct gelu_w {
  static constexpr float LINEAR = 1.5957691216057308f, CUBIC = LINEAR * 0.044715f, FAR = 10.0f;
};

struct sigmoid : plain {
  VALUE { return reciprocal_fast(1.0f + exp2_fast(-LOG2_E * x)); }
  GRADIENT {
    const float e = exp2_fast(-LOG2_E * within(x, MOST_W)), s = reciprocal_fast(1.0f + e);
    return dy * (s * (e * s));
  }
};

struct clamped : plain {  // c sigmoid(alpha c), c = min(x, limit)
  static __device__ __forceinline__ float below(float x, float limit) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
  }
  VALUE {
    const float c = max_nan(below(x, p.limit), LEAST);
    return c * reciprocal_fast(1.0f + exp2_fast(-LOG2_E * p.alpha * c));
  }
  GRADIENT {
    const float w = within(p.alpha * max_nan(below(x, p.limit), LEAST), MOST_W);
    const float e = exp2_fast(-LOG2_E * w), s = reciprocal_fast(1.0f + e);
    return x > p.limit ? 0.0f : dy * (s + w * (s * (e * s)));
  }
  static __device__ __forceinline__ float factor(float v, const Params& p) {
    return clamp_nan(v, -p.limit, p.limit) + p.offset;
  }
  static __device__ __forceinline__ bool passes(float v, const Params& p) { return !(fabsf(v) > p.limit); }
};

struct relu : plain {
  VALUE { return max_nan(x, 0.0f); }
  GRADIENT { return x > 0.0f ? dy : 0.0f; }
};

struct srelu : plain {
  VALUE { return max_nan(x, 0.0f) * max_nan(x, 0.0f); }
  GRADIENT { return x > 0.0f ? dy * (2.0f * x) : 0.0f; }
};

template <typename A> struct gate : A { static constexpr bool gated = true; };

typedef smooth<silu_w> silu;
typedef smooth<qgelu_w> qgelu;
typedef smooth<gelu_w> gelu;
typedef gate<sigmoid> glu;
typedef gate<gelu> geglu;
typedef gate<qgelu> qgeglu;
typedef gate<relu> reglu;
typedef gate<srelu> sreglu;
typedef gate<silu> swiglu;
typedef gate<clamped> clamped_swiglu;

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

// The tile's codes into q and q_t, `shift` columns to the right; columns of the output from `end` on belong
// to others. All threads call.
DEVICE void write_tile(const Cast& cast, const u32 (&codes)[4][2], const Place& at, i64 shift, i64 q_end,
                       i64 t_end, u32* tile) {
  const bool wide_q = rows_aligned<8>(cast.q + shift, cast.q_stride);
  if (cast.q != nullptr)
    write_q<WHOLE>(cast.q, cast.q_stride, codes, at.row, shift + at.column, cast.q_rows, q_end, wide_q);
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
    const i64 to_row = shift + at.tile_column + column;
    if (!WHOLE && to_row >= t_end) break;
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
      for (int j = 0; j < 8; ++j) {
        v[j] = ACT::value(value(in[0][k], j) + shifts[0][j], params);
        if (PARTS == 2) v[j] *= ACT::factor(value(in[PARTS - 1][k], j) + shifts[PARTS - 1][j], params);
      }
      fetch(k, t + 1);
      const bool there = WHOLE || at.row + k < M;
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = there ? v[j] : 0.0f;
      const Eight<T> out = rounded8<T>(v);
      if (!WHOLE && y != nullptr && there) write8(y + (at.row + k) * F + at.column, valid, wide_y, out);
      peak.add(out);
      if (cast.wanted()) encode8(cast, out, scale, codes[k]);
    }
    if (cast.wanted()) write_tile(cast, codes, at, 0, cast.q_columns, cast.t_rows, tile);
  }
  block_amax(cast.amax, peak.amax(), shared);
}

// dy: (M, F), x and dx: (M, PARTS * F). partial: float32 (row blocks, PARTS * F), the column sums of
// each block's rows, or null.
extern "C" __global__ void __launch_bounds__(THREADS, BWD_BLOCKS)
act_bwd(const T* dy, const T* x, const T* bias, T* dx, float* partial, i64 M, i64 F, i64 column_tiles,
        i64 tiles, f64 limit, f64 alpha, f64 offset, Cast given) {
  start_early();
  constexpr bool SURE = WHOLE && PARTS == 1;  // a gated one's registers do not allow it
  const Params params{(float)limit, (float)alpha, (float)offset};
  const Cast cast = known(given);
  alignas(16) __shared__ u32 tile[TILE_WORDS];
  __shared__ float shared[32];
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
  const float scale = cast_scale(cast);
  const int valid = SURE ? 8 : columns_left(place(0, column_tile).column, F);
  float shifts[PARTS][8], sums[PARTS][8];
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    floats8(bias == nullptr ? bias : bias + p * F + place(0, column_tile).column, valid,
            rows_aligned<16>(bias, p * F), shifts[p]);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[p][j] = 0.0f;
  }
  Peak<T> peak;

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
        const float g = value(up[k], j), a = value(in[0][k], j) + shifts[0][j];
        if (PARTS == 2) {
          const float second = value(in[PARTS - 1][k], j) + shifts[PARTS - 1][j];
          d[0][j] = ACT::gradient(a, g * ACT::factor(second, params), params);
          d[PARTS - 1][j] = ACT::passes(second, params) ? g * ACT::value(a, params) : 0.0f;
        } else {
          d[0][j] = ACT::gradient(a, g, params);
        }
      }
      if (SURE) fetch(k, t + 1 < end_tile);
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const bool there = SURE || at.row + k < M;
        const Eight<T> out = there ? rounded8<T>(d[p]) : Eight<T>{};
        if (!SURE && dx != nullptr && there)
          write8(dx + (at.row + k) * width + p * F + at.column, valid, wide_dx, out);
        peak.add(out);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[p][j] += value(out, j);
        if (cast.wanted()) encode8(cast, out, scale, codes[p][k]);
      }
    }
    if (cast.wanted()) {
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {  // the first half ends where the second begins
        const bool last = p == PARTS - 1;
        write_tile(cast, codes[p], at, p * F, last ? cast.q_columns : F, last ? cast.t_rows : F, tile);
      }
    }
  }
  block_amax(cast.amax, peak.amax(), shared);
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
