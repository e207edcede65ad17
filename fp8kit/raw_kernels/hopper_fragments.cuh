// What a warp has of a product by wgmma, 16 rows by 32 columns at a time: its lanes exchange it, and write it
// to memory and to shared memory, as numbers and as FP8 codes.
//
// Of the 16 rows a lane has `row` and `row + 8`, where row is lane / 4, and values[h][2 q + c] is column
// 8 q + 2 (lane % 4) + c of row h. All lanes take part in every step.
#pragma once
#include "hopper.cuh"
#include "rows.cuh"

// --- between lanes -----------------------------------------------------------------------------------------

// Lane t of four has the words x[s][0 ... 3]; afterwards it has word t of each. S of them at once, so that a
// lane begins an exchange before it has the one before.
template <int S> DEVICE void transpose_quads(u32 (&x)[S][4]) {
  const bool odd = lane() & 1, high = lane() & 2;
#pragma unroll
  for (int k = 0; k < 2 * S; ++k) {
    const int s = k / 2, i = k % 2 * 2;
    const u32 other = __shfl_xor_sync(~0u, odd ? x[s][i] : x[s][i + 1], 1);
    (odd ? x[s][i] : x[s][i + 1]) = other;
  }
#pragma unroll
  for (int k = 0; k < 2 * S; ++k) {
    const int s = k / 2, i = k % 2;
    const u32 other = __shfl_xor_sync(~0u, high ? x[s][i] : x[s][i + 2], 2);
    (high ? x[s][i] : x[s][i + 2]) = other;
  }
}

// Lane g of eight, four lanes apart, has eight bytes, x[n]; afterwards byte g of each of them, in order.
template <int N> DEVICE void transpose_octets(u32 (&x)[N][2]) {
  const bool odd = lane() & 4, second = lane() & 8, high = lane() & 16;
#pragma unroll
  for (int k = 0; k < 2 * N; ++k) {
    u32& word = x[k / 2][k % 2];
    word = __byte_perm(word, __shfl_xor_sync(~0u, word, 4), odd ? 0x3715 : 0x6240);
  }
#pragma unroll
  for (int k = 0; k < 2 * N; ++k) {
    u32& word = x[k / 2][k % 2];
    word = __byte_perm(word, __shfl_xor_sync(~0u, word, 8), second ? 0x3276 : 0x5410);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const u32 other = __shfl_xor_sync(~0u, high ? x[n][0] : x[n][1], 16);
    (high ? x[n][0] : x[n][1]) = other;
  }
}

DEVICE void store_words(void* to, const u32 (&words)[4]) {
  *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Two neighbours, of which `left` exist, all if INSIDE; the others read as 0.
template <bool INSIDE, typename X> DEVICE void load_pair(const X* from, i32 left, float (&to)[2]) {
  if constexpr (INSIDE)
    load<2>(from, to);
  else
    load_some<2>(from, left, to);
}

// A lane's columns 8 q + 2 t and + 1 for q = 0 ... 3, as 16-bit elements.
template <typename X> DEVICE void pack_columns(const float (&values)[8], u32 (&words)[4]) {
#pragma unroll
  for (int q = 0; q < 4; ++q)
    words[q] = (u32)from_float<X>(values[2 * q]).bits | (u32)from_float<X>(values[2 * q + 1]).bits << 16;
}

// Boxes of shared memory, at a multiple of 1024 bytes: sixteen rows of 128 bytes, as a swizzled map's copies
// read and write them. They hold 32 columns, number `k`, of which a lane of a warp has two rows, eight apart.
constexpr int BOX_BYTES = 16 * 128;

// Of elements of 16 bits: what `store_matrices` wants, for columns 8 q ... 8 q + 15 of the 32.
DEVICE u32 matrices_at(u32 boxes, int k, u32 q) {
  const u32 row = boxes + k / 2 * BOX_BYTES + 128 * (lane() % 16);
  return row + 16 * ((4 * (k % 2) + q + lane() / 16) ^ lane() % 8);
}
// Of float32: where columns 8 q + 2 (lane % 4) and + 1 of row lane / 4 + 8 h are.
DEVICE u32 pair_at(u32 boxes, int k, int h, u32 q) {
  const u32 row = boxes + k * BOX_BYTES + 128 * (lane() / 4 + 8 * h);
  return row + 16 * ((2 * q + lane() % 4 / 2) ^ lane() / 4) + 8 * (lane() % 2);
}

// Words as `pack_columns` makes them, to their boxes.
DEVICE void put_words(u32 boxes, int k, const u32 (&words)[2][4]) {
#pragma unroll
  for (u32 q = 0; q < 4; q += 2)
    store_matrices(matrices_at(boxes, k, q), {words[0][q], words[1][q], words[0][q + 1], words[1][q + 1]});
}
// values[h][2 q + c]: column 8 q + 2 (lane % 4) + c of the lane's row h; as elements of type X.
template <typename X> DEVICE void put_columns(u32 boxes, int k, const float (&values)[2][8]) {
  if constexpr (sizeof(X) == 2) {
    u32 words[2][4];
    pack_columns<X>(values[0], words[0]), pack_columns<X>(values[1], words[1]);
    put_words(boxes, k, words);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      store_shared_pair(pair_at(boxes, k, i / 4, i % 4), values[i / 4][i % 4 * 2],
                        values[i / 4][i % 4 * 2 + 1]);
  }
}
// What `put_columns` has put there, once all lanes are past it.
template <typename X> DEVICE void get_columns(u32 boxes, int k, float (&values)[2][8]) {
  if constexpr (sizeof(X) == 2) {
#pragma unroll
    for (int q = 0; q < 4; q += 2) {
      u32 words[4];
      load_matrices(matrices_at(boxes, k, q), words);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        values[i / 2 % 2][2 * (q + i / 4) + i % 2] = to_float(X{(u16)(words[i / 2] >> 16 * (i % 2))});
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = load_shared_pair(pair_at(boxes, k, i / 4, i % 4));
      values[i / 4][i % 4 * 2] = pair.x, values[i / 4][i % 4 * 2 + 1] = pair.y;
    }
  }
}

// 32 columns of a row, of which `left` are to be written, from four lanes: lane t has columns 8 q + 2 t and
// + 1 for q = 0 ... 3, as `multiply_tiles` leaves them. INSIDE: all or none, and rows are aligned. Lanes
// exchange 16-bit elements, so that each writes eight neighbours.
template <bool INSIDE, typename X> DEVICE void store_columns(X* to, i32 left, const float (&values)[8]) {
  const int t = lane() % 4;
  if constexpr (sizeof(X) == 4) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float pair[2] = {values[2 * q], values[2 * q + 1]};
      if (!INSIDE)
        store_some<2>(to + 8 * q + 2 * t, left - 8 * q - 2 * t, pair);
      else if (left > 0)
        store<2>(to + 8 * q + 2 * t, pair);
    }
  } else {
    u32 words[1][4];
    pack_columns<X>(values, words[0]);
    transpose_quads(words);  // columns 8 t ... 8 t + 7
    if (INSIDE) {
      if (left > 0) store_words(to + 8 * t, words[0]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (8 * t + i < left) to[8 * t + i] = X{(u16)(words[0][i / 2] >> 16 * (i % 2))};
    }
  }
}

// 32 columns of a row, of which four lanes have as many as `store_columns` gives them, as they lie in memory:
// what loads them need not wait, what reads a value does.
template <typename X> struct Columns {
  u32 words[2 * sizeof(X)];

  // Of them `left` exist, the others are 0. INSIDE: all or none, and rows are aligned.
  template <bool INSIDE> METHOD void load(const X* from, i32 left) {
    constexpr int EACH = sizeof(X) / 2;  // words of two columns
    const int t = 2 * (lane() % 4);
#pragma unroll
    for (int i = 0; i < 4 * EACH; ++i) {
      const int column = 8 * (i / EACH) + t + i % EACH;
      words[i] = 0;
      if (INSIDE && left > 0) words[i] = reinterpret_cast<const u32*>(from + 8 * (i / EACH) + t)[i % EACH];
      if (!INSIDE && column < left) words[i] = word_of(from[column]);
      if (!INSIDE && sizeof(X) == 2 && column + 1 < left) words[i] |= word_of(from[column + 1]) << 16;
    }
  }
  static METHOD u32 word_of(X x) {
    if constexpr (sizeof(X) == 4)
      return __float_as_uint(x);
    else
      return x.bits;
  }
  // Number i: column 8 (i / 2) + 2 (lane % 4) + i % 2.
  METHOD float at(int i) const {
    if constexpr (sizeof(X) == 4)
      return __uint_as_float(words[i]);
    else
      return to_float(X{(u16)(words[i / 2] >> 16 * (i % 2))});
  }
};

// --- sums and codes ----------------------------------------------------------------------------------------

// Sums of 32 columns over a warp's 16 rows, to shared memory. Lanes 4, 8 and 16 apart have other rows of the
// same columns: each gives half of its columns away and adds what it gets to the others, until it has one.
DEVICE void sum_rows(const float (&v)[2][8], u32 to) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = v[0][i] + v[1][i];
  int own = 0;
#pragma unroll
  for (int half = 4, apart = 4; half; half /= 2, apart *= 2) {
    const bool upper = lane() & apart;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], apart);
      x[i] = (upper ? x[i + half] : x[i]) + other;
    }
    own += upper ? half : 0;
  }
  store_shared(to + 4 * (8 * (own / 2) + 2 * (lane() % 4) + own % 2), x[0]);
}

// Codes of 16 rows by 32 S columns to q, eight neighbours a lane, and to q_t, sixteen: column 8 (lane % 4) +
// lane / 4. Columns from q_end and t_end on are not written, nor rows that q and q_t lack; INSIDE: there are
// none. Sizes and strides are multiples of 8 in q, of 16 in q_t, or 0.
template <bool INSIDE, int S>
DEVICE void write_codes(const Cast& cast, const float (&v)[S][2][8], const float (&scale)[2], i64 row,
                        i64 column, i64 q_end, i64 t_end) {
  const int t = lane() % 4, g = lane() / 4;
  u32 words[S][4], codes[2 * S][2];
#pragma unroll
  for (int s = 0; s < S; ++s)
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float a = v[s][0][2 * q] * scale[0], b = v[s][0][2 * q + 1] * scale[0];
      const float c = v[s][1][2 * q] * scale[1], d = v[s][1][2 * q + 1] * scale[1];
      words[s][q] = cast.is_e5m2 ? encode4<e5m2>(a, b, c, d) : encode4<e4m3>(a, b, c, d);
    }
  transpose_quads(words);
#pragma unroll
  for (int s = 0; s < S; ++s) {
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      codes[2 * s][w] = __byte_perm(words[s][2 * w], words[s][2 * w + 1], 0x5410);
      codes[2 * s + 1][w] = __byte_perm(words[s][2 * w], words[s][2 * w + 1], 0x7632);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 i = row + 8 * h, j = column + 32 * s + 8 * t;
      if (cast.q != nullptr && (INSIDE || (i < cast.q_rows && j < q_end)))
        store_codes<8>(cast.q + i * cast.q_stride + j, codes[2 * s + h]);
    }
  }
  if (cast.q_t == nullptr) return;
  transpose_octets(codes);
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const i64 i = column + 32 * s + 8 * t + g, j = row - g;
    const u32 (&upper)[2] = codes[2 * s], (&lower)[2] = codes[2 * s + 1];
    if (INSIDE || (i < t_end && j < cast.t_columns))
      store_words(cast.q_t + i * cast.t_stride + j, {upper[0], upper[1], lower[0], lower[1]});
  }
}
