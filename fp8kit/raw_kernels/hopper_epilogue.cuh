// What the FP8 product for Hopper does with its result while that is in registers. EPILOGUE, one of
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
// A warp works on 16 rows by 32 columns at a time. Of these a lane has rows `row` and `row + 8`, where row is
// lane / 4 of the 16, and values[h][2 q + c] is column 8 q + 2 (lane % 4) + c of row h. All lanes take part
// in every step, also those whose rows do not exist, with zeros.
//
// A gated ACT has two halves of columns, F apart: x, and in forward the product, whose tile is BN / 2 columns
// of the first half beside the same ones of the second (`load`). So a thread has both of an element.
#pragma once
#include "activation.cuh"
#include "hopper.cuh"
#include "rows.cuh"

enum Epilogue { bare, forward, backward, lines };
constexpr bool FUSED = EPILOGUE != bare;
constexpr int PARTS = ACT::gated ? 2 : 1;                 // halves of x
constexpr int HALVES = EPILOGUE == forward ? PARTS : 1;   // of the product's tile
constexpr int RESULTS = EPILOGUE == backward ? PARTS : 1;  // of what is made
// bytes of shared memory: column sums of four warps, for either multiplier, of two steps in turn
constexpr int SUM_BYTES = EPILOGUE == backward ? 2 * 2 * 4 * 32 * 4 : 0;

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

// What a multiplier's thread keeps from tile to tile: the cast's scale, that of sums (of both tensors), the
// largest |y| so far, which half of the shared sums is next.
struct Running {
  float scale = 1.0f, of_sums = 1.0f, most = 0.0f;
  u32 turn = 0;
};

// Whether rows of what it reads and writes besides can be read 16 bytes at a time.
template <Epilogue E> DEVICE bool further_aligned(const Further<E>& to) {
  const i64 halves = PARTS * to.features;
  return rows_aligned<16>(to.x, halves) && rows_aligned<16>(to.y, RESULTS * to.features) &&
         rows_aligned<16>(to.x, to.features) && rows_aligned<2 * sizeof(T)>(to.bias, to.features);
}

// --- codes -------------------------------------------------------------------------------------------------

// Codes of 16 rows by 32 columns, from lanes which have them as this file's head says, to q, eight neighbours
// a lane, and to q_t, sixteen: column 8 (lane % 4) + lane / 4. Columns from q_end and t_end on are not
// written. Sizes and strides are multiples of 8 in q, of 16 in q_t, or 0.
DEVICE void write_codes(const Cast& cast, const float (&v)[2][8], const float (&scale)[2], i64 row,
                        i64 column, i64 q_end, i64 t_end) {
  const int t = lane() % 4, g = lane() / 4;
  u32 words[4], codes[2][2];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const float a = v[0][2 * q] * scale[0], b = v[0][2 * q + 1] * scale[0];
    const float c = v[1][2 * q] * scale[1], d = v[1][2 * q + 1] * scale[1];
    words[q] = cast.is_e5m2 ? encode4<e5m2>(a, b, c, d) : encode4<e4m3>(a, b, c, d);
  }
  transpose_quad(words);
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    codes[0][w] = __byte_perm(words[2 * w], words[2 * w + 1], 0x5410);
    codes[1][w] = __byte_perm(words[2 * w], words[2 * w + 1], 0x7632);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (cast.q != nullptr && row + 8 * h < cast.q_rows && column + 8 * t < q_end)
      store_codes<8>(cast.q + (row + 8 * h) * cast.q_stride + column + 8 * t, codes[h]);
  if (cast.q_t == nullptr) return;
  transpose_octet(codes[0]), transpose_octet(codes[1]);
  const i64 to_row = column + 8 * t + g, to_column = row - g;
  if (to_row < t_end && to_column < cast.t_columns)
    store_words(cast.q_t + to_row * cast.t_stride + to_column,
                {codes[0][0], codes[0][1], codes[1][0], codes[1][1]});
}

// --- sums and maxima ---------------------------------------------------------------------------------------

// Sums of 32 columns over the 64 rows of a multiplier's four warps, to `to`, of which `left` exist, in an
// order that is always the same. `shared`: of this multiplier, number `group`, and this turn.
DEVICE void sum_columns(const float (&v)[2][8], u32 shared, int group, float* to, i32 left) {
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = v[0][i] + v[1][i];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane() < 4) store_shared(shared + 4 * (32 * warp + 8 * (i / 2) + 2 * lane() + i % 2), sum);
  }
  // the next turn's sums lie elsewhere, and those of the turn after come behind the next turn's barrier
  wait_for_threads<128>(2 + group);
  if (warp || lane() >= left) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 4; ++w) sum += load_shared(shared + 4 * (32 * w + lane()));
  to[lane()] = sum;
}

// The cast's scale, where one is known. Every thread of the grid calls.
template <Epilogue E> DEVICE float scale_of_results(const Further<E>& to) {
  if constexpr (E == forward || E == backward)
    return cast_scale(to.cast);
  else
    return 1.0f;
}

// The largest |y| of all tiles of a warp to the cast's amax.
template <Epilogue E> DEVICE void end_of_tiles(const Further<E>& to, float most) {
  if constexpr (E == forward || E == backward) {
    const u32 bits = __reduce_max_sync(~0u, __float_as_uint(most));
    if (to.cast.amax != nullptr && lane() == 0) atomic_amax(to.cast.amax, __uint_as_float(bits));
  }
}

// --- what is made of the product ---------------------------------------------------------------------------

// y of an input a, and of its other half where ACT is gated.
DEVICE float activated(float a, float second, const Params& p) {
  const float y = ACT::value(a, p);
  return ACT::gated ? y * ACT::factor(second, p) : y;
}

// The gradients of both, from y's.
DEVICE float2 gradients(float g, float a, float second, const Params& p) {
  if (!ACT::gated) return {ACT::gradient(a, g, p), 0.0f};
  const float of_second = ACT::passes(second, p) ? g * ACT::value(a, p) : 0.0f;
  return {ACT::gradient(a, g * ACT::factor(second, p), p), of_second};
}

// What `forward` and `backward` read for 16 rows by 32 columns from `column` of F on. `rows`: M. INSIDE: rows
// and columns exist, and are aligned.
struct Inputs { Columns<T> bias[PARTS], x[PARTS][2]; };
constexpr bool EARLY = sizeof(T) == 2 && RESULTS == 1;  // more would not fit into the registers
template <bool INSIDE, Epilogue E>
DEVICE void read_columns(const Further<E>& to, i64 rows, i64 row, i64 column, Inputs& in) {
  const i32 left = (i32)(to.features - column);
#pragma unroll
  for (int p = 0; p < PARTS; ++p) {
    const i64 at = p * to.features + column;
    in.bias[p].template load<INSIDE>(to.bias + at, to.bias == nullptr ? 0 : left);
#pragma unroll
    for (int h = 0; h < 2 && EPILOGUE == backward; ++h)
      in.x[p][h].template load<INSIDE>(to.x + (row + 8 * h) * PARTS * to.features + at,
                                       INSIDE || row + 8 * h < rows ? left : 0);
  }
}

// Both, of the product as T's values. EARLY: what the next 32 columns need is read meanwhile.
template <bool INSIDE, Epilogue E>
DEVICE void finish_columns(const Further<E>& to, Running& own, const float (&product)[HALVES][2][8],
                           Inputs& in, i64 rows, i64 row, i64 column, u32 shared, int group) {
  const Params params{(float)to.limit, (float)to.alpha, (float)to.offset};
  const i32 left = (i32)(to.features - column), t = 2 * (lane() % 4);
  const i64 width = RESULTS * to.features;  // of y, and in `backward` of x
  float made[RESULTS][2][8];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool exists = INSIDE || row + 8 * h < rows;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      constexpr int LAST = PARTS - 1;
      const float bias = in.bias[0].at(i), second = in.bias[LAST].at(i);
      float2 both;
      if constexpr (EPILOGUE == forward)
        both.x = activated(product[0][h][i] + bias, product[HALVES - 1][h][i] + second, params);
      else
        both = gradients(product[0][h][i], in.x[0][h].at(i) + bias, in.x[LAST][h].at(i) + second, params);
      const bool there = INSIDE || (exists && 8 * (i / 2) + t + i % 2 < left);
#pragma unroll
      for (int p = 0; p < RESULTS; ++p) {
        made[p][h][i] = there ? rounded<T>(p ? both.y : both.x) : 0.0f;
        own.most = amax_of(own.most, made[p][h][i]);
      }
    }
#pragma unroll
    for (int p = 0; p < RESULTS; ++p)
      if (to.y != nullptr)
        store_columns<INSIDE>(to.y + (row + 8 * h) * width + p * to.features + column, exists ? left : 0,
                              made[p][h]);
  }
  if (EARLY && (column + 32) % (BN / HALVES)) read_columns<INSIDE>(to, rows, row, column + 32, in);
  const float scales[2] = {own.scale, own.scale};
#pragma unroll
  for (int p = 0; p < RESULTS; ++p) {
    const bool last = p == RESULTS - 1;  // the first half ends where the second begins
    const i64 first = p * to.features + column;
    if constexpr (EPILOGUE == backward) {
      const u32 place = shared + 512 * (2 * group + own.turn);
      if (to.sums != nullptr)
        sum_columns(made[p], place, group, to.sums + row / 64 * width + first,
                    row / 64 * 64 < rows ? left : 0);
      own.turn ^= 1;
    }
    if (to.cast.wanted())
      write_codes(to.cast, made[p], scales, row, first, last ? to.cast.q_columns : to.features,
                  last ? to.cast.t_rows : to.features);
  }
}

// `lines`: 16 rows of 128 columns, from `column` on, which are in `boxes` as T's values, 0 where the product
// ends. `rows`: M.
template <Epilogue E>
DEVICE void finish_line(const Further<E>& to, u32 boxes, i64 rows, i64 row, i64 column) {
  const Cast& cast = to.cast;
  float v[2][8], scale[2], top[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    get_columns<T>(boxes, k, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) top[i / 8] = amax_of(top[i / 8], v[i / 8][i % 8]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i64 i = row + 8 * h;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], step));
    scale[h] = scale_of(top[h], cast.is_e5m2 ? e5m2::MAX : e4m3::MAX, (float)cast.epsilon, Largest<T>::value,
                        cast.power_2);
    if (lane() % 4 == 0 && i < cast.q_rows && column < cast.q_columns)
      cast.scale_inv[column / 128 * cast.q_rows + i] = i < rows ? __fdiv_rn(1.0f, scale[h]) : 1.0f;
  }
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    get_columns<T>(boxes, k, v);
    write_codes(cast, v, scale, row, column + 32 * k, cast.q_columns, 0);
  }
}

// What is made of a warp's 16 rows of the product by 128 columns, which are in `boxes`, 0 where it ends: from
// `column` of F on, and with two halves half of them each.
template <bool INSIDE, Epilogue E>
DEVICE void finish_rows(const Further<E>& to, Running& own, u32 boxes, i64 rows, i64 row, i64 column,
                        u32 shared, int group) {
  Inputs in;
  read_columns<INSIDE>(to, rows, row, column, in);
#pragma unroll 1
  for (int k = 0; k < 4 / HALVES; ++k) {
    float product[HALVES][2][8];
    if (!EARLY && k) read_columns<INSIDE>(to, rows, row, column + 32 * k, in);
#pragma unroll
    for (int p = 0; p < HALVES; ++p) get_columns<T>(boxes, k + 2 * p, product[p]);
    finish_columns<INSIDE>(to, own, product, in, rows, row, column + 32 * k, shared, group);
  }
}

// The same by any epilogue. `there`: of F's columns and of rows all exist.
template <Epilogue E>
DEVICE void finish_part(const Further<E>& to, Running& own, u32 boxes, i64 rows, i64 row, i64 column,
                        bool there, u32 shared, int group) {
  if constexpr (E == lines)
    finish_line(to, boxes, rows, row, column);
  else if constexpr (E != bare)
    there && further_aligned(to) ? finish_rows<true>(to, own, boxes, rows, row, column, shared, group)
                                 : finish_rows<false>(to, own, boxes, rows, row, column, shared, group);
}
