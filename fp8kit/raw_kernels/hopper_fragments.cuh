// What a warp has of a product by wgmma, 16 rows by 32 columns at a time: its lanes exchange it, and write it
// to memory and to shared memory, as numbers and as FP8 codes.
//
// As wgmma leaves it, and as `put_columns` and `store_columns` take it, a lane has of the 16 rows `row` and
// `row + 8`, where row is lane / 4, and values[h][2 q + c] is column 8 q + 2 (lane % 4) + c of row h. Behind
// shared memory (`get_eight`) it has other rows. All lanes take part in every step.
#pragma once
#include "hopper.cuh"
#include "rows.cuh"

// --- between lanes -----------------------------------------------------------------------------------------

// Lane t of four has the words x[0 ... 3]; afterwards it has word t of each.
DEVICE void transpose_quads(u32 (&x)[4]) {
  const bool odd = lane() & 1, high = lane() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = other;
  }
}

// Lane g of eight neighbours has eight bytes, x[n]; afterwards byte g of each of them, in order.
template <int N> DEVICE void transpose_octets(u32 (&x)[N][2]) {
  const bool odd = lane() & 1, second = lane() & 2, high = lane() & 4;
#pragma unroll
  for (int k = 0; k < 2 * N; ++k) {
    u32& word = x[k / 2][k % 2];
    word = __byte_perm(word, __shfl_xor_sync(~0u, word, 1), odd ? 0x3715 : 0x6240);
  }
#pragma unroll
  for (int k = 0; k < 2 * N; ++k) {
    u32& word = x[k / 2][k % 2];
    word = __byte_perm(word, __shfl_xor_sync(~0u, word, 2), second ? 0x3276 : 0x5410);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const u32 other = __shfl_xor_sync(~0u, high ? x[n][0] : x[n][1], 4);
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
// Of 16 rows by COLUMNS in boxes, which are rows `row` and following of `to`, those from `first` to before
// `last` to there.
template <int COLUMNS, typename X>
DEVICE void store_rows(u32 boxes, X* to, i64 stride, i32 row, i32 first, i32 last) {
#pragma unroll 1
  for (u32 i = lane(); i < COLUMNS * sizeof(X); i += 32) {  // of 16 bytes; eight are a box's row
    const i32 down = i / 8 % 16, column = (i / 128 * 8 + i % 8) * (16 / sizeof(X));
    u32 words[4];
    load_words_shared(boxes + i / 128 * BOX_BYTES + 128 * down + 16 * ((i ^ down) % 8), words);
    if (row + down >= first && row + down < last) store_words(to + (row + down) * stride + column, words);
  }
}
// Of what `put_columns` has put there: eight columns of row lane() % 8 + 8 h, from 8 (lane() / 8) on.
template <typename X> DEVICE Eight<X> get_eight(u32 boxes, int k, int h) {
  constexpr int QUADS = sizeof(X) / 2;  // of 16 bytes
  const u32 row = boxes + (sizeof(X) == 2 ? k / 2 : k) * BOX_BYTES + 128 * (lane() % 8 + 8 * h);
  Eight<X> eight;
#pragma unroll
  for (int j = 0; j < QUADS; ++j) {
    u32 words[4];
    const u32 place = sizeof(X) == 2 ? 4 * (k % 2) + lane() / 8 : 2 * (lane() / 8) + j;
    load_words_shared(row + 16 * (place ^ lane() % 8), words);
#pragma unroll
    for (int w = 0; w < 4; ++w) eight.words[4 * j + w] = words[w];
  }
  return eight;
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
    u32 words[4];
    pack_columns<X>(values, words);
    transpose_quads(words);  // columns 8 t ... 8 t + 7
    if (INSIDE) {
      if (left > 0) store_words(to + 8 * t, words);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (8 * t + i < left) to[8 * t + i] = X{(u16)(words[i / 2] >> 16 * (i % 2))};
    }
  }
}

// --- sums and codes ----------------------------------------------------------------------------------------

// Sums of eight columns over eight neighbouring lanes, which have other rows each: lane g gets column g's. A
// lane gives half of its columns away and adds what it gets to the others, until it has one.
DEVICE float sum_octet(float (&x)[8]) {
#pragma unroll
  for (int half = 4; half; half /= 2) {
    const bool upper = lane() & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], half);
      x[i] = (upper ? x[i + half] : x[i]) + other;
    }
  }
  return x[0];
}

// Codes of 16 rows by 32 columns, of which a lane has eight neighbours of row lane() % 8 and of the one eight
// further on. `row`, `column`: its first. To q as they are, to q_t sixteen rows of a column at once. Columns
// from q_end and t_end on are not written, nor rows that q and q_t lack; INSIDE: there are none. Sizes and
// strides are multiples of 8 in q, of 16 in q_t, or 0.
template <bool INSIDE>
DEVICE void write_piece(const Cast& cast, u32 (&codes)[2][2], i64 row, i64 column, i64 q_end, i64 t_end) {
  const int g = lane() % 8;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (cast.q != nullptr && (INSIDE || (row + 8 * h < cast.q_rows && column < q_end)))
      store_codes<8>(cast.q + (row + 8 * h) * cast.q_stride + column, codes[h]);
  if (cast.q_t == nullptr) return;
  transpose_octets(codes);
  if (INSIDE || (column + g < t_end && row - g < cast.t_columns))
    store_words(cast.q_t + (column + g) * cast.t_stride + row - g,
                {codes[0][0], codes[0][1], codes[1][0], codes[1][1]});
}
