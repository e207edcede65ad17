// What the FP8 product for Hopper does with its result before that leaves the multiprocessor. EPILOGUE is
// one of
//
//   bare      nothing: hopper_gemm.cu stores the product
//   forward   y = ACT(h + bias), h the product rounded to T; its codes by a scale that is known, in both
//             orientations, and its amax: what `act_fwd` does. ACT=identity: codes of the product itself
//   backward  dx, the gradient of that at x, with g the product rounded to T; codes, amax, and the sums of
//             columns, the bias' gradient: what `act_bwd` does
//   lines     codes of the product with a scale for every 128 neighbours of a row: `block_quantize`
//
// ACT is one of activation.cuh. Where a pass of its own reads values from memory, they are rounded to T here,
// and what is done to them then is the same: so are the bits, but those of sums over rows.
//
// The product lies in shared memory by then, as T's values, and what does not exist of it as 0. A warp works
// on pieces of 16 rows by 32 columns: a lane has row lane() % 8 of it and the one eight further on, and of
// both the eight columns from 8 (lane() / 8) on. In forward and backward a warp's pieces lie below each
// other, so that it adds all rows of its columns. The multipliers do all this, and the finishers backward
// (hopper_gemm.cu).
//
// A gated ACT has two halves of columns, F apart: x, and in forward the product, whose tile is BN / 2 columns
// of the first half beside the same ones of the second (`load`). So a thread has both of an element.
#pragma once
#include "activation.cuh"
#include "hopper_fragments.cuh"

enum Epilogue { bare, forward, backward, lines };
constexpr bool FUSED = EPILOGUE != bare;
constexpr int PARTS = ACT::gated ? 2 : 1;                 // halves of x
constexpr int HALVES = EPILOGUE == forward ? PARTS : 1;   // of the product's tile
constexpr int RESULTS = EPILOGUE == backward ? PARTS : 1;  // of what is made
constexpr bool COLUMNS = EPILOGUE == forward || EPILOGUE == backward;
constexpr int AT_ONCE = EPILOGUE == backward && (sizeof(T) == 4 || PARTS == 2) ? 1 : 2;  // pieces
constexpr int PIECES = 4 / HALVES;  // of a warp, of a multiplier's 64 rows
constexpr u32 PIECE_BYTES = 16 * 128 * sizeof(T);  // from one to the next, in shared memory

// What the host says of it; absent arrays are null. x and bias: PARTS * F columns; y, or dx: RESULTS * F.
// sums: (ceil(M / 64), RESULTS * F). Of lines: cast's q, scale_inv and rule.
template <Epilogue> struct Further {
  Cast cast;
  const T *x, *bias;
  T* y;
  float* sums;
  i64 features;  // F
  f64 limit, alpha, offset;
};
template <> struct Further<bare> {};

// What a thread keeps from tile to tile: the cast's scale, that of sums (of both tensors), the largest |y|.
struct Running {
  float scale = 1.0f, of_sums = 1.0f;
  Peak<T> most;
};

// Whether rows of what it reads and writes besides can be read 16 bytes at a time.
template <Epilogue E> DEVICE bool further_aligned(const Further<E>& to) {
  return rows_aligned<16>(to.x, to.features) && rows_aligned<16>(to.y, to.features) &&
         rows_aligned<16>(to.bias, to.features);
}

// The cast's scale, where one is known. Every thread of the grid calls.
template <Epilogue E> DEVICE float scale_of_results(const Further<E>& to) {
  if constexpr (E == forward || E == backward)
    return cast_scale(to.cast);
  else
    return 1.0f;
}

// Where 64 rows of the product lie: in the parts of four warps; and the barriers that tell that these are
// filled, and that they are read.
struct Filled { u32 parts, made, taken, parity; };

// `forward` and `backward` of 64 rows of the product by 128 columns, from (row, column) of F on (with two
// halves half of them each), by four warps. `rows`: M. F8: the codes' format. INSIDE: all exist, and rows are
// aligned; else `wide` says whether these are.
template <bool INSIDE, typename F8, Epilogue E>
DEVICE void finish_columns(const Further<E>& to, Running& own, const Filled& from, i64 rows, i64 row,
                           i64 column, bool wide) {
  constexpr int LAST = PARTS - 1;
  const Params params{(float)to.limit, (float)to.alpha, (float)to.offset};
  const int warp = threadIdx.x / 32 % 4, chunk = warp % PIECES, begin = warp / PIECES * PIECES;
  const i64 F = to.features, top = row, i0 = row + 16 * begin + lane() % 8;
  const i64 j = column + 32 * chunk + 8 * (lane() / 8);
  const int left = INSIDE ? 8 : columns_left(j, F);
  const bool aligned = INSIDE || wide;
  Eight<T> bias[PARTS], x[AT_ONCE][PARTS][2];
  float sums[RESULTS][8] = {};
  auto read = [&](int piece) {
#pragma unroll
    for (int n = 0; EPILOGUE == backward && n < AT_ONCE * PARTS * 2; ++n) {
      const int s = n / 2 / PARTS, p = n / 2 % PARTS, h = n % 2;
      const i64 i = i0 + 16 * (piece + s) + 8 * h;
      x[s][p][h] = read8(to.x + (i * PARTS + p) * F + j, INSIDE || i < rows ? left : 0, aligned);
    }
  };
#pragma unroll
  for (int p = 0; p < PARTS; ++p) bias[p] = read8(to.bias + p * F + j, to.bias ? left : 0, aligned);
  read(0);
  barrier_wait(from.made, from.parity);
#pragma unroll 1
  for (int piece = 0; piece < PIECES; piece += AT_ONCE) {
    u32 codes[RESULTS][AT_ONCE][2][2];
#pragma unroll
    for (int n = 0; n < 2 * AT_ONCE; ++n) {
      const int s = n / 2, h = n % 2;
      const u32 boxes = from.parts + (begin + piece + s) * PIECE_BYTES;
      const i64 i = i0 + 16 * (piece + s) + 8 * h;
      const int there = INSIDE || i < rows ? left : 0;
      Eight<T> product[HALVES];
#pragma unroll
      for (int p = 0; p < HALVES; ++p) product[p] = get_eight<T>(boxes, chunk + PIECES * p, h);
      float made[2][8];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float g = value(product[0], c), first = value(bias[0], c), second = value(bias[LAST], c);
        float2 both{0.0f, 0.0f};
        if constexpr (EPILOGUE == forward)
          both.x = activated<ACT>(g + first, value(product[HALVES - 1], c) + second, params);
        else
          both = gradients<ACT>(g, value(x[s][0][h], c) + first, value(x[s][LAST][h], c) + second, params);
        made[0][c] = c < there ? both.x : 0.0f, made[1][c] = c < there ? both.y : 0.0f;
      }
#pragma unroll
      for (int p = 0; p < RESULTS; ++p) {
        const Eight<T> y = rounded8<T>(made[p]);
        float scaled[8];
        own.most.add(y);
        if (to.y != nullptr) write8(to.y + (i * RESULTS + p) * F + j, there, aligned, y);
#pragma unroll
        for (int c = 0; c < 8; ++c) sums[p][c] += value(y, c), scaled[c] = value(y, c) * own.scale;
        encode_words<F8, 8>(scaled, codes[p][s][h]);
      }
    }
    if (piece + AT_ONCE < PIECES) read(piece + AT_ONCE);
#pragma unroll
    for (int n = 0; n < RESULTS * AT_ONCE; ++n) {
      const int p = n / AT_ONCE, s = n % AT_ONCE;
      const bool last = p == RESULTS - 1;  // the first half ends where the second begins
      write_piece<INSIDE>(to.cast, codes[p][s], i0 + 16 * (piece + s), p * F + j,
                          last ? to.cast.q_columns : F, last ? to.cast.t_rows : F);
    }
  }
  __syncwarp();
  if (lane() == 0) barrier_arrive(from.taken);
#pragma unroll
  for (int p = 0; EPILOGUE == backward && p < RESULTS; ++p) {
    if (to.sums == nullptr) break;
    const float sum = sum_octet(sums[p]);
    const i64 own_column = j + lane() % 8;
    if (INSIDE || (own_column < F && top < rows)) to.sums[(top / 64 * RESULTS + p) * F + own_column] = sum;
  }
}

// The same. `there`: of F's columns and of rows all exist.
template <Epilogue E>
DEVICE void finish_columns(const Further<E>& to, Running& own, const Filled& from, i64 rows, i64 row,
                           i64 column, bool there) {
  const bool wide = further_aligned(to);
  if (!there || !wide)
    to.cast.is_e5m2 ? finish_columns<false, e5m2>(to, own, from, rows, row, column, wide)
                    : finish_columns<false, e4m3>(to, own, from, rows, row, column, wide);
  else if (to.cast.is_e5m2)
    finish_columns<true, e5m2>(to, own, from, rows, row, column, true);
  else
    finish_columns<true, e4m3>(to, own, from, rows, row, column, true);
}

// `lines`: 16 rows of 128 columns, from (row, column) on, which lie in `boxes`. `rows`: M.
template <Epilogue E>
DEVICE void finish_line(const Further<E>& to, u32 boxes, i64 rows, i64 row, i64 column) {
  const Cast& cast = to.cast;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i64 i = row + lane() % 8 + 8 * h;
    Eight<T> v[4];
    Peak<T> peak;
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = get_eight<T>(boxes, k, h), peak.add(v[k]);
    float top = peak.amax();
#pragma unroll
    for (int step = 8; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float scale = scale_of(top, cast.is_e5m2 ? e5m2::MAX : e4m3::MAX, (float)cast.epsilon,
                                 Largest<T>::value, cast.power_2);
    if (lane() < 8 && i < cast.q_rows && column < cast.q_columns)
      cast.scale_inv[column / 128 * cast.q_rows + i] = i < rows ? __fdiv_rn(1.0f, scale) : 1.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const i64 j = column + 32 * k + 8 * (lane() / 8);
      u32 codes[2];
      encode8(cast, v[k], scale, codes);
      if (i < cast.q_rows && j < cast.q_columns) store_codes<8>(cast.q + i * cast.q_stride + j, codes);
    }
  }
}

// The largest |y| of all tiles of a warp to the cast's amax.
template <Epilogue E> DEVICE void end_of_tiles(const Further<E>& to, const Running& own) {
  if constexpr (E == forward || E == backward) {
    const u32 bits = __reduce_max_sync(~0u, __float_as_uint(own.most.amax()));
    if (to.cast.amax != nullptr && lane() == 0) atomic_amax(to.cast.amax, __uint_as_float(bits));
  }
}
