// What the flash attention kernels have in common: sizes of tiles, which tiles a block visits, and what a
// score is. D and DV are the features of a head of q and k and of v, rounded up to what is compiled. KIND is
// 0 where rows see a band of columns (causal masks, windows, true lengths) and that is all; 1 where there is
// dropout beside; 2 where there may be anything: a mask array, a bias, slopes, a further score, a scale that
// is not positive, dropout.
#pragma once
#include "attention.cuh"
#include "tiles.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr bool GENERAL = KIND == 2, MAY_DROP = KIND > 0;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// One of q, k, v, o, do and their gradients. Strides in elements.
struct Array {
  T* at;
  i64 batch, head, row;
  __device__ __forceinline__ T* rows(int b, int h, int i) const {
    return at + b * batch + h * head + i * row;
  }
};

// 2^x, within 2 ulp; results below 2^-126 are 0.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct Range { int low, high; };  // low ... high - 1

DEVICE int tiles_of(int length, int tile) { return (length + tile - 1) / tile; }
DEVICE int clamp(i64 x) { return (int)max64(-(1 << 29), min64(x, 1 << 29)); }

// The true lengths of a batch, and the band: row i sees columns in [i + shift - left, i + shift + right] and
// below `columns`. The host takes care that lengths are below 2^28.
struct Span {
  int rows, columns, shift, left, right;

  // Columns [first, last) that some row of [from, to) sees.
  __device__ __forceinline__ int first_column(int from) const {
    return left < 0 ? 0 : max(0, from + shift - left);
  }
  __device__ __forceinline__ int last_column(int to) const {
    return right < 0 ? columns : max(0, min(columns, to + shift + right));
  }
  // Rows [first, last) that see some column of [from, to).
  __device__ __forceinline__ int first_row(int from) const {
    return right < 0 ? 0 : max(0, from - shift - right);
  }
  __device__ __forceinline__ int last_row(int to) const {
    return left < 0 ? rows : max(0, min(rows, to - shift + left));
  }
  // Of `count` columns from j on those that row i sees, and of rows from i on those that see column j.
  __device__ __forceinline__ Range columns_of(int i, int j, int count) const {
    return range(i < rows ? first_column(i) - j : count, last_column(i + 1) - j, count);
  }
  __device__ __forceinline__ Range rows_of(int j, int i, int count) const {
    return range(j < columns ? first_row(j) - i : count, last_row(j + 1) - i, count);
  }
  // Whether all of rows [i, i + height) see all of columns [j, j + width).
  __device__ __forceinline__ bool whole(int i, int height, int j, int width) const {
    return i + height <= rows && j + width <= columns && j >= first_column(i + height - 1) &&
           j + width <= last_column(i + 1);
  }

  static __device__ __forceinline__ Range range(int low, int high, int count) {
    return Range{min(max(low, 0), count), min(max(high, 0), count)};
  }
};

DEVICE Span span_of(const Rules& rules, i64 batch) {
  const int rows = (int)true_length(rules.cu_q, batch, rules.s_q);
  const int columns = (int)true_length(rules.cu_kv, batch, rules.s_kv);
  return Span{rows, columns, rules.bottom_right ? columns - rows : 0, clamp(rules.left), clamp(rules.right)};
}

// The row as the rules of attention.cuh want it, without its range of columns.
DEVICE Row row_at(const Rules& rules, const Span& span, int batch, int head, int i) {
  Row row;
  row.batch = batch, row.head = head, row.i = i, row.place = i + span.shift;
  row.stats = ((i64)batch * rules.heads + head) * rules.s_q + i;
  return row;
}

// What a made score is multiplied by for units of log 2.
DEVICE float unit_of(const Rules& rules) { return GENERAL ? LOG2E : (float)rules.scale * LOG2E; }

// q k^T to scores, -Inf where a row does not see a column; without the scale unless GENERAL. The
// accumulator's first element is of row `row0` and column `column0`; TRANSPOSED: its rows are columns of
// scores.
template <bool TRANSPOSED, int M, int N>
DEVICE void make_scores(Sums<M, N>& p, const Rules& rules, const Span& span, int batch, int head, int row0,
                        int column0) {
  constexpr int HEIGHT = TRANSPOSED ? 8 * N : 16 * M, WIDTH = TRANSPOSED ? 16 * M : 8 * N;
  if (!GENERAL && span.whole(row0, HEIGHT, column0, WIDTH)) return;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int across = 16 * m + 8 * half + lane() / 4;
      const Range seen = TRANSPOSED ? span.rows_of(column0 + across, row0, 8 * N)
                                    : span.columns_of(row0 + across, column0, 8 * N);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int along = 8 * n + 2 * (lane() % 4) + e;
          float& x = p.at[m][n][2 * half + e];
          if constexpr (GENERAL) {
            const int i = row0 + (TRANSPOSED ? along : across), j = column0 + (TRANSPOSED ? across : along);
            x = along >= seen.low && along < seen.high
                    ? score(rules, row_at(rules, span, batch, head, i), j, x)
                    : -INF;
          } else {
            x = along >= seen.low && along < seen.high ? x : -INF;
          }
        }
    }
}

// --- dropout -----------------------------------------------------------------------------------------------
// Which elements of a tile are kept: four neighbours of a row a byte, in shared memory, since a lane's
// elements lie in the order of tensor cores and random words in that of rows.

DEVICE bool drops(const Rules& rules) { return KIND == 1 || (KIND == 2 && rules.rng != nullptr); }

template <int COLUMNS, int ROWS, int THREADS_>
DEVICE void draw_tile(u8* kept, const Rules& rules, const Span& span, int batch, int head, int i, int j) {
  for (int n = threadIdx.x; n < ROWS * COLUMNS / 4; n += THREADS_) {
    const int row = n / (COLUMNS / 4), four = n % (COLUMNS / 4);
    float factors[4];
    dropout_factors(rules, row_at(rules, span, batch, head, i + row), j + 4 * four, factors);
    u32 bits = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) bits |= (factors[e] != 0.0f) << e;
    kept[n] = (u8)bits;
  }
}

template <int COLUMNS> DEVICE bool is_kept(const u8* kept, int row, int column) {
  return kept[row * (COLUMNS / 4) + column / 4] >> (column % 4) & 1;
}
