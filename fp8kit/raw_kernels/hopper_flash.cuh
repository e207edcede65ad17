// What the attention kernels for Hopper have in common: tiles of q, k and v by the tensor memory accelerator,
// their products by warpgroups, and the list of work that a persistent grid goes through. What a score is
// and which tiles there are to visit stands in flash.cuh; here KIND is 0, sequences are as long as their
// arrays, and D is DV.
//
// A tile lies in shared memory in panels of 64 features: a panel's row is 128 bytes, swizzled by the copy.
// A product takes it as it lies, whether its rows are the sums' columns (q k^T) or their terms (p v).
#pragma once
#include "flash.cuh"
#include "hopper_fragments.cuh"

static_assert(KIND == 0 && D == DV && D % 64 == 0, "");

constexpr int PANELS = D / 64;
constexpr int SHARED = 227 * 1024 - 1024 - 256;  // of a block, without what aligns it and the barriers

// --- work --------------------------------------------------------------------------------------------------

// `tiles` of each head of each batch; heads are gone through `bundle` at a time, so that what their blocks
// read stays in the L2 cache.
struct Grid { i64 tiles, heads, pairs, bundle; };

struct Work { i32 tile, head, batch; };

// A block's share of the list. Of a bundle tile 0 of every head comes first, which has the most to do under a
// causal mask; every other round goes through the blocks backwards, so that all get as much.
struct Walk {
  u32 round = 0;

  __device__ __forceinline__ bool next(const Grid& grid, Work& work) {
    const u32 tiles = (u32)grid.tiles, pairs = (u32)grid.pairs, heads = (u32)grid.heads;
    const u32 bundle = (u32)grid.bundle;
    const u32 n = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    ++round;
    if (n >= tiles * pairs) return false;
    const u32 first = n / (bundle * tiles) * bundle, width = min(bundle, pairs - first);
    const u32 local = n - first * tiles, pair = first + local % width;
    work = Work{(i32)(local / width), (i32)(pair % heads), (i32)(pair / heads)};
    return true;
  }
};

// What a score is: `unit` times q k^T, in units of log 2, where a row sees the column.
struct Scores {
  Span span;
  i32 heads;  // of q
  float scale, unit;

  // Where a row's log-sum-exp stands.
  __device__ __forceinline__ i64 line(i32 batch, i32 head, i32 row) const {
    return ((i64)batch * heads + head) * span.rows + row;
  }
};

// ROWS rows that are a piece of work, the last ones first, and the tiles of KEYS keys that they see.
template <int ROWS, int KEYS> struct RowsOf {
  int row;
  Range tiles;

  __device__ __forceinline__ RowsOf(const Grid& grid, const Span& span, const Work& work)
      : row(((int)grid.tiles - 1 - work.tile) * ROWS) {
    const int end = min(span.rows, row + ROWS);
    tiles = Range{span.first_column(row) / KEYS, tiles_of(span.last_column(end), KEYS)};
  }
};

// --- copies ------------------------------------------------------------------------------------------------

// ROWS rows of a head, from `row` on; beyond the sequence they are zeros.
template <int ROWS>
DEVICE void copy_rows(u32 to, const TensorMap& map, i32 row, i32 head, i32 batch, u32 barrier) {
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    copy_tile(to + panel * ROWS * 128, map, 64 * panel, row, head, batch, barrier);
}

// This warp needs a place no more.
DEVICE void release(u32 empty) {
  __syncwarp();
  if (lane() == 0) barrier_arrive(empty);
}

// --- products ----------------------------------------------------------------------------------------------

#define SUMS64 FIRST_TEN TEN(1) TEN(2) "%30,%31"
#define SUMS128 FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63"
#define WGMMA16(N, SUMS, A, B, ONTO, TRANSPOSED)                                                           \
  "{.reg .pred onto; setp.ne.b32 onto, %" #ONTO ", 0;"                                                     \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TEXT(T) "." TEXT(T) " {" SUMS "}, " A ", %" #B         \
  ", onto, 1, 1, " TRANSPOSED ";}"

// d = a b^T, onto d where `onto` is not 0: 64 rows of a by N rows of b, 16 features of each; begins it.
template <int N> DEVICE void multiply_features(float (&d)[N / 2], u64 a, u64 b, i32 onto) {
  static_assert(N == 64 || N == 128, "");
  if constexpr (N == 64)
    asm volatile(WGMMA16(64, SUMS64, "%32", 33, 34, "0, 0") : R32(0) : "l"(a), "l"(b), "r"(onto));
  else
    asm volatile(WGMMA16(128, SUMS128, "%64", 65, 66, "0, 0") : R64(0) : "l"(a), "l"(b), "r"(onto));
}

// d += a b: a, 64 rows of 16 columns from registers; 16 rows of b, N features of each; begins it.
template <int N> DEVICE void multiply_weights(float (&d)[N / 2], const u32 (&a)[4], u64 b) {
  static_assert(N == 64 || N == 128, "");
  if constexpr (N == 64)
    asm volatile(WGMMA16(64, SUMS64, "{%32,%33,%34,%35}", 36, 37, "1")
                 : R32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
  else
    asm volatile(WGMMA16(128, SUMS128, "{%64,%65,%66,%67}", 68, 69, "1")
                 : R64(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// A warpgroup's sums, 64 rows by 8 N columns, as it gives them to the tensor cores. Of its four warps each
// has 16 rows, as `Sums` lays them out.
template <int N> DEVICE float (&flat(Sums<1, N>& sums))[4 * N] {
  return reinterpret_cast<float(&)[4 * N]>(sums.at);
}

// Begins sums = a b^T over all features: 64 rows of a tile of A_ROWS rows, which begin at `a`; a tile b.
template <int A_ROWS, int N> DEVICE void begin_scores(Sums<1, N>& sums, u32 a, u32 b) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    multiply_features<8 * N>(flat(sums), tile_descriptor(a + i / 4 * A_ROWS * 128) + 2 * (i % 4),
                             tile_descriptor(b + i / 4 * N * 1024) + 2 * (i % 4), i);
}

// Begins sums += weights b: 64 rows of 16 K columns, a tile b of as many rows.
template <int K, int N> DEVICE void begin_sums(Sums<1, N>& sums, const u32 (&weights)[K][4], u32 b) {
#pragma unroll
  for (int i = 0; i < K; ++i)
    multiply_weights<8 * N>(flat(sums), weights[i], columns_descriptor<16 * K>(b) + 128 * i);
}

// Sums rounded to T, as the tensor cores take them for a factor.
template <int N> DEVICE void round_sums(const Sums<1, N>& from, u32 (&to)[N / 2][4]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float(&four)[4] = from.at[0][2 * i + e / 2];
      to[i][e] = pack(four[e % 2 * 2], four[e % 2 * 2 + 1], T{});
    }
}

// --- the result --------------------------------------------------------------------------------------------

// Rows lane / 4 and lane / 4 + 8 of a warp's 16, times `factor`, where they exist.
template <int N>
DEVICE void write_rows(const Sums<1, N>& sums, T* to, i64 stride, const bool (&exists)[2],
                       const float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int k = 0; k < N / 4; ++k) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = sums.at[0][4 * k + i / 2][2 * half + i % 2] * factor[half];
      store_columns<true>(to + (8 * half + lane() / 4) * stride + 32 * k, exists[half], values);
    }
}
