// What the flash attention kernels have in common: sizes of tiles, which tiles a block visits, and what a
// score is. D and DV are the features of a head of q and k and of v, rounded up to what is compiled. KIND is
// 0 where rows see a band of columns (causal masks, windows, true lengths) and that is all; 1 where there is
// dropout beside; 2 where there may be anything: a mask array, a bias, slopes, a further score, a scale that
// is not positive, dropout. With CAP scores are capped; dropout is KIND 2 then.
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

// Where a batch's rows lie among q's, or k's: from `start` on; `own`: how many there are up to the next
// batch's, with the padding. Tokens behind the last sequence are its padding.
struct Lines { int start, own; };

DEVICE Lines lines_of(const i32* starts, int batch, bool last, i64 tokens, i64 longest) {
  if (starts == nullptr) return Lines{0, (int)longest};
  const i64 start = max64(0, min64(starts[batch], tokens));
  const i64 end = last ? tokens : max64(start, min64(starts[batch + 1], tokens));
  return Lines{(int)start, (int)(end - start)};
}
DEVICE Lines query_lines(const Rules& rules, int batch, bool last = false) {
  return lines_of(rules.starts_q, batch, last, rules.tokens_q, rules.s_q);
}
DEVICE Lines key_lines(const Rules& rules, int batch, bool last = false) {
  return lines_of(rules.starts_kv, batch, last, rules.tokens_kv, rules.s_kv);
}

// A batch's true length, within the array.
DEVICE i64 length_within(const i32* cu, i64 batch, i64 longest, i64 room) {
  return min64(true_length(cu, batch, longest), room);
}
DEVICE i64 query_length(const Rules& rules, int batch) {
  return length_within(rules.cu_q, batch, rules.s_q, rules.tokens_q - query_lines(rules, batch).start);
}
DEVICE i64 key_length(const Rules& rules, int batch) {
  return length_within(rules.cu_kv, batch, rules.s_kv, rules.tokens_kv - key_lines(rules, batch).start);
}

// How many rows from `row` on a block of `block` rows writes of an array: its own, and where it is the
// batch's last block all that follow.
DEVICE int written(const Lines& lines, int length, int row, int block, i64 longest) {
  const int rest = max(lines.own, length) - row;
  return row + block < longest ? min(block, rest) : rest;
}

// Zeros in the rows that belong to no tile: those before the first sequence, by the block of its first rows;
// those from the end of the batch's last block on.
template <int THREADS_>
DEVICE void clear_rest(const Array& to, const Lines& lines, int batch, int head, int row, int block,
                       int count, i64 columns) {
  if (batch == 0 && row == 0) clear_rows<THREADS_>(to.rows(0, head, 0), to.row, lines.start, columns);
  if (count > block)
    clear_rows<THREADS_>(to.rows(batch, head, lines.start + row + block), to.row, count - block, columns);
}

DEVICE Span span_of(const Rules& rules, int batch) {
  const int rows = (int)query_length(rules, batch), columns = (int)key_length(rules, batch);
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
DEVICE float unit_of(const Rules& rules) {
  return GENERAL ? LOG2E : (float)(CAP ? rules.softcap : rules.scale) * LOG2E;
}

// -Inf in place of the scores that rows do not see. The accumulator's first element is of row `row0` and
// column `column0`; TRANSPOSED: its rows are columns of scores. One that is seen
// becomes score(i, j, q k^T).
template <bool TRANSPOSED, int M, int N, typename F>
DEVICE void keep_seen(Sums<M, N>& p, const Span& span, int row0, int column0, F score) {
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
          const int i = row0 + (TRANSPOSED ? along : across), j = column0 + (TRANSPOSED ? across : along);
          x = along >= seen.low && along < seen.high ? score(i, j, x) : -INF;
        }
    }
}

// The same where a score is q k^T.
template <bool TRANSPOSED, int M, int N>
DEVICE void keep_seen(Sums<M, N>& p, const Span& span, int row0, int column0) {
  constexpr int HEIGHT = TRANSPOSED ? 8 * N : 16 * M, WIDTH = TRANSPOSED ? 16 * M : 8 * N;
  if (span.whole(row0, HEIGHT, column0, WIDTH)) return;
  keep_seen<TRANSPOSED>(p, span, row0, column0, [](int, int, float product) { return product; });
}

// q k^T to scores' parts of the cap.
template <bool TRANSPOSED, int M, int N>
DEVICE void make_parts(Sums<M, N>& p, const Rules& rules, const Span& span, int batch, int head, int row0,
                       int column0) {
  const float rate = (float)(rules.scale / rules.softcap);
  keep_seen<TRANSPOSED>(p, span, row0, column0, [&](int i, int j, float product) {
    if constexpr (!GENERAL) return tanhf(product * rate);
    const Row row = row_at(rules, span, batch, head, i);
    return masked_out(rules, row, j) ? -INF : part_of_cap(rules, row, j, product);
  });
}

// What a part of the cap is short of its score: the biases, in units of log 2.
DEVICE float beside_part(const Rules& rules, const Span& span, int batch, int head, int i, int j,
                         float part) {
  if (!GENERAL || part == -INF) return 0.0f;  // not seen: there may be no bias
  return biased(rules, row_at(rules, span, batch, head, i), j, 0.0f) * LOG2E;
}

// q k^T to scores, without the scale, or the cap, unless GENERAL.
template <bool TRANSPOSED, int M, int N>
DEVICE void make_scores(Sums<M, N>& p, const Rules& rules, const Span& span, int batch, int head, int row0,
                        int column0) {
  if constexpr (CAP && !GENERAL)
    make_parts<TRANSPOSED>(p, rules, span, batch, head, row0, column0);
  else if constexpr (GENERAL)
    keep_seen<TRANSPOSED>(p, span, row0, column0, [&](int i, int j, float product) {
      return score(rules, row_at(rules, span, batch, head, i), j, product);
    });
  else
    keep_seen<TRANSPOSED>(p, span, row0, column0);
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
