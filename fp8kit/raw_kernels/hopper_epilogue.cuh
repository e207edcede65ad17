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
// A warp works on 16 rows by 32 columns at a time, or AT_ONCE times 32, whose lanes have of them what
// hopper_fragments.cuh says. Those whose rows do not exist take part with zeros.
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
constexpr int AT_ONCE = EPILOGUE == backward || sizeof(T) == 4 ? 1 : 2;
// bytes of shared memory: sums of 128 columns by a warp, and by four; for either multiplier, two in turn
constexpr int WARP_SUMS = 128 * 4, SUMS = 4 * WARP_SUMS;
constexpr int SUM_BYTES = EPILOGUE == backward ? 2 * 2 * RESULTS * SUMS : 0;

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

// --- sums and maxima ---------------------------------------------------------------------------------------

// Sums of 128 columns over a multiplier's 64 rows, each warp's from `shared` (`sum_rows`), to `to`. `left`
// columns exist. The order is always the same.
DEVICE void sum_columns(u32 shared, float* to, i32 left) {
  const int column = threadIdx.x % 128;
  if (column >= left) return;
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < 4; ++w) sum += load_shared(shared + w * WARP_SUMS + 4 * column);
  to[column] = sum;
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
constexpr bool EARLY = sizeof(T) == 2;  // else the registers do not hold them
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

// Both, of the product as T's values. `sums`: where this warp's go. EARLY: what comes next is read meanwhile.
template <bool INSIDE, Epilogue E>
DEVICE void finish_columns(const Further<E>& to, Running& own, const float (&product)[AT_ONCE][HALVES][2][8],
                           Inputs (&in)[AT_ONCE], i64 rows, i64 row, i64 column, u32 sums) {
  const Params params{(float)to.limit, (float)to.alpha, (float)to.offset};
  const i32 left = (i32)(to.features - column), t = 2 * (lane() % 4);
  const i64 width = RESULTS * to.features;  // of y
  float made[RESULTS][AT_ONCE][2][8];
#pragma unroll
  for (int s = 0; s < AT_ONCE; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool exists = INSIDE || row + 8 * h < rows;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        constexpr int LAST = PARTS - 1;
        const float bias = in[s].bias[0].at(i), second = in[s].bias[LAST].at(i);
        float2 both;
        if constexpr (EPILOGUE == forward)
          both.x = activated(product[s][0][h][i] + bias, product[s][HALVES - 1][h][i] + second, params);
        else
          both = gradients(product[s][0][h][i], in[s].x[0][h].at(i) + bias,
                           in[s].x[LAST][h].at(i) + second, params);
        const bool there = INSIDE || (exists && 32 * s + 8 * (i / 2) + t + i % 2 < left);
#pragma unroll
        for (int p = 0; p < RESULTS; ++p) {
          made[p][s][h][i] = there ? rounded<T>(p ? both.y : both.x) : 0.0f;
          own.most = amax_of(own.most, made[p][s][h][i]);
        }
      }
    }
#pragma unroll
  for (int n = 0; n < RESULTS * AT_ONCE * 2; ++n) {
    const int p = n / 2 / AT_ONCE, s = n / 2 % AT_ONCE, h = n % 2;
    if (to.y != nullptr)
      store_columns<INSIDE>(to.y + (row + 8 * h) * width + p * to.features + column + 32 * s,
                            INSIDE || row + 8 * h < rows ? left - 32 * s : 0, made[p][s][h]);
  }
  if (EARLY && (column + 32 * AT_ONCE) % (BN / HALVES))
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s)
      read_columns<INSIDE>(to, rows, row, column + 32 * (AT_ONCE + s), in[s]);
  const float scales[2] = {own.scale, own.scale};
#pragma unroll
  for (int p = 0; p < RESULTS; ++p) {
    const bool last = p == RESULTS - 1;  // the first half ends where the second begins
    if (EPILOGUE == backward && to.sums != nullptr)
      sum_rows(made[p][0], sums + p * SUMS + 4 * (column % 128));
    if (to.cast.wanted())
      write_codes<INSIDE>(to.cast, made[p], scales, row, p * to.features + column,
                          last ? to.cast.q_columns : to.features, last ? to.cast.t_rows : to.features);
  }
}

// `lines`: 16 rows of 128 columns, from `column` on, which are in `boxes` as T's values, 0 where the product
// ends. `rows`: M.
template <Epilogue E>
DEVICE void finish_line(const Further<E>& to, u32 boxes, i64 rows, i64 row, i64 column) {
  const Cast& cast = to.cast;
  float v[1][2][8], scale[2], top[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    get_columns<T>(boxes, k, v[0]);
#pragma unroll
    for (int i = 0; i < 16; ++i) top[i / 8] = amax_of(top[i / 8], v[0][i / 8][i % 8]);
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
    get_columns<T>(boxes, k, v[0]);
    write_codes<false>(cast, v, scale, row, column + 32 * k, cast.q_columns, 0);
  }
}

// What is made of a warp's 16 rows of the product by 128 columns, which are in `boxes`, 0 where it ends: from
// `column` of F on, and with two halves half of them each.
template <bool INSIDE, Epilogue E>
DEVICE void finish_rows(const Further<E>& to, Running& own, u32 boxes, i64 rows, i64 row, i64 column,
                        u32 shared, int group) {
  Inputs in[AT_ONCE];
  const u32 sums = shared + RESULTS * SUMS * (2 * group + own.turn);
  const u32 of_warp = sums + threadIdx.x / 32 % 4 * WARP_SUMS;
#pragma unroll
  for (int s = 0; s < AT_ONCE; ++s) read_columns<INSIDE>(to, rows, row, column + 32 * s, in[s]);
#pragma unroll 1
  for (int k = 0; k < 4 / HALVES; k += AT_ONCE) {
    float product[AT_ONCE][HALVES][2][8];
#pragma unroll
    for (int s = 0; s < AT_ONCE; ++s) {
      if (!EARLY && k) read_columns<INSIDE>(to, rows, row, column + 32 * (k + s), in[s]);
#pragma unroll
      for (int p = 0; p < HALVES; ++p) get_columns<T>(boxes, k + s + 2 * p, product[s][p]);
    }
    finish_columns<INSIDE>(to, own, product, in, rows, row, column + 32 * k, of_warp);
  }
  if (EPILOGUE != backward || to.sums == nullptr) return;
  // the next turn's sums lie elsewhere, and those of the turn after come behind the next turn's barrier
  wait_for_threads<128>(2 + group);
  own.turn ^= 1;
#pragma unroll
  for (int p = 0; p < RESULTS; ++p)
    sum_columns(sums + p * SUMS, to.sums + (row / 64 * RESULTS + p) * to.features + column,
                row / 64 * 64 < rows ? (i32)(to.features - column) : 0);
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
