// Statistics without histograms: one reading of a matrix gives its moments, and the counts of its cast by one
// scale, for which no code is made: whether a code is 0 or the largest follows from the magnitude alone.
//
// functions: brief_parts (brief_statistics), brief_total (brief_statistics)
// variants: T=f32,bf16,f16
//
// Sums of eight neighbours are float32, everything beyond is float64. Where a sum of eight squares is not
// finite, or so small that squares may have lost bits, the eight are added in float64; NaN and Inf are found
// so, too. Each block leaves its numbers in `parts` (kind k of block b at k * gridDim.x + b), and one block
// adds them in a fixed order.
#include "statistics.cuh"

// kinds: sum (x - p), sum (x - p)^2, sum |x|, sum x^4 of the finite values; counts of NaN, Inf, -Inf, and of
// the cast's values and codes that are not 0, its saturated and its overflowed ones; and the largest -x, x
// and -|x| that is not 0
constexpr int SUMS = 11, ALL = 14;
constexpr i64 DEEP = 1, MOMENTS = 2, CODES = 4;  // what is wanted
constexpr float SMALL = 0x1p-80f;  // of a sum of squares: beside it, what those below 2^-149 lost is nothing

// The least magnitude from which on `holds` does; Inf where it never does before.
template <typename F> DEVICE float least_that(F holds) {
  u32 low = 0, high = INF_BITS;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (holds(__uint_as_float(middle)))
      high = middle;
    else
      low = middle + 1;
  }
  return __uint_as_float(low);
}

// What a thread has found.
struct Found {
  f64 sums[4] = {0, 0, 0, 0};
  float low = INF, high = -INF;
  u32 least = INF_BITS;
  u32 nan = 0, inf = 0, minus_inf = 0, values = 0, codes = 0, saturated = 0, overflowed = 0;
};

// The magnitudes from which on a code is not 0, is the largest, and a value has overflowed.
struct Limits {
  float code, top, over;
  bool used;
};

DEVICE void count_clipped(Found& found, float v, const Limits& limits) {
  const float magnitude = fabsf(v);
  found.saturated += magnitude >= limits.top;
  found.overflowed += magnitude >= limits.over && magnitude < INF;
}

// One element, whatever it is.
DEVICE void add_any(Found& found, float v, float pivot, const Limits& limits, i64 wants) {
  const u32 bits = __float_as_uint(v), magnitude = bits & MAGNITUDE;
  if (wants & CODES) {
    found.values += magnitude != 0;
    if (limits.used) {
      found.codes += !(fabsf(v) < limits.code);
      count_clipped(found, v, limits);
    }
  }
  if (magnitude >= INF_BITS) {
    if (magnitude > INF_BITS)
      ++found.nan;
    else if (bits >> 31)
      ++found.minus_inf;
    else
      ++found.inf;
    return;
  }
  const f64 d = (f64)v - (f64)pivot, square = (f64)v * (f64)v;
  found.sums[0] += d;
  found.sums[1] += d * d;
  found.sums[2] += fabsf(v);
  found.sums[3] += square * square;
  found.low = fminf(found.low, v);
  found.high = fmaxf(found.high, v);
  if (magnitude) found.least = min(found.least, magnitude);
}

// Eight elements; false, and nothing has been added, where float32 does not do.
DEVICE bool add_eight(Found& found, const Eight<T>& eight, float pivot, const Limits& limits, i64 wants) {
  float first_sum = 0, second_sum = 0, total = 0, low = INF, high = -INF;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float v = value(eight, i), d = v - pivot;
    first_sum += d;
    second_sum = fmaf(d, d, second_sum);
    total += fabsf(v);
    low = fminf(low, v);
    high = fmaxf(high, v);
  }
  if (!(second_sum >= SMALL && second_sum < INF && total < INF)) return false;
  if (wants & DEEP) {
    float fourths = 0;
    u32 least = INF_BITS;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float v = value(eight, i), square = v * v;
      const u32 magnitude = __float_as_uint(v) & MAGNITUDE;
      fourths = fmaf(square, square, fourths);
      if (magnitude) least = min(least, magnitude);
    }
    if (!(fourths >= SMALL && fourths < INF)) return false;
    found.sums[3] += fourths;
    found.least = min(found.least, least);
  }
  found.sums[0] += first_sum;
  found.sums[1] += second_sum;
  found.sums[2] += total;
  found.low = fminf(found.low, low);
  found.high = fmaxf(found.high, high);
  if (wants & CODES) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float v = value(eight, i);
      found.values += v != 0.0f;
      found.codes += fabsf(v) >= limits.code;
    }
    if (fmaxf(-low, high) >= fminf(limits.top, limits.over)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) count_clipped(found, value(eight, i), limits);
    }
  }
  return true;
}

// parts: the kinds; behind them p, and 1 / scale. The scale is given, or rule `epsilon`, `power_2` makes it
// of an amax. least_code, top_code: the least magnitudes, once scaled, whose code is not 0, is the largest.
extern "C" __global__ void __launch_bounds__(256)
brief_parts(const T* x, f64* parts, const float* scale, const float* amax, i64 rows, i64 columns, i64 stride,
            i64 wants, i64 power_2, f64 epsilon, f64 fp8_max, f64 least_code, f64 top_code) {
  __shared__ float shared[32], magnitudes[4];
  __shared__ f64 kinds[8][ALL];
  const float pivot = wants & MOMENTS ? pivot_of(x, rows, columns, stride, shared) : 0.0f;
  if (wants & CODES && threadIdx.x < 3) {
    const float s = scale_of_cast(scale, amax, (float)fp8_max, epsilon, power_2);
    const float inverse = __fdiv_rn(1.0f, s);
    const f64 limit = fp8_max * (f64)inverse;
    float from = INF;
    if (threadIdx.x == 0) magnitudes[3] = inverse;
    if (inverse != 0.0f) {
      if (threadIdx.x == 2)
        from = least_that([=](float m) { return limit > 0 && (f64)m * (1 - 0x1p-22) > limit; });
      else
        from = least_that([=](float m) { return m * s >= (float)(threadIdx.x ? top_code : least_code); });
    }
    magnitudes[threadIdx.x] = from;
  }
  __syncthreads();
  const Limits limits{magnitudes[0], magnitudes[1], magnitudes[2], magnitudes[3] != 0.0f};
  Found found;
  const bool wide = rows_aligned<16>(x, stride);
  const i64 eights = max64(ceil_div(columns, 8), 1);
  Walk at(eights);
  Eight<T> ahead{};
  if (at.row < rows)
    ahead = read8(x + at.row * stride + at.eight * 8, columns_left(at.eight * 8, columns), wide);
  while (at.row < rows) {
    const Eight<T> eight = ahead;
    const i64 column = at.eight * 8;
    const T* from = x + at.row * stride + column;
    const int valid = columns_left(column, columns);
    at.next(eights);
    if (at.row < rows)  // the next ones are on their way meanwhile
      ahead = read8(x + at.row * stride + at.eight * 8, columns_left(at.eight * 8, columns), wide);
    if (valid == 8 && add_eight(found, eight, pivot, limits, wants)) continue;
#pragma unroll 1
    for (int i = 0; i < valid; ++i) add_any(found, to_float(from[i]), pivot, limits, wants);
  }
  const u32 counts[7] = {found.nan,   found.inf,       found.minus_inf, found.values,
                         found.codes, found.saturated, found.overflowed};
  const float ends[3] = {-found.low, found.high, -__uint_as_float(found.least)};
  f64* own = kinds[threadIdx.x / 32];
#pragma unroll
  for (int k = 0; k < ALL; ++k) {
    const f64 one = k < 4       ? sum_of(found.sums[k])
                    : k < SUMS ? (f64)__reduce_add_sync(~0u, counts[k - 4])
                               : (f64)warp_max(ends[k - SUMS]);
    if (threadIdx.x % 32 == 0) own[k] = one;
  }
  __syncthreads();
  if (threadIdx.x < ALL) {
    f64 one = kinds[0][threadIdx.x];
    for (int warp = 1; warp < 8; ++warp) {
      const f64 other = kinds[warp][threadIdx.x];
      one = threadIdx.x < SUMS ? one + other : other > one ? other : one;
    }
    parts[threadIdx.x * gridDim.x + blockIdx.x] = one;
  }
  if (first() == 0) {
    parts[ALL * gridDim.x] = pivot;
    parts[ALL * gridDim.x + 1] = magnitudes[3];
  }
}

// Of 14 warps, a kind each. counts[4]: all elements, NaN, Inf, -Inf; moments[8] as tensor_total has them, the
// third Inf and the sixth 0 where nobody wants them; codes[5]: all elements, then the cast's counts;
// scale_inv[2]: its least and its largest.
extern "C" __global__ void __launch_bounds__(448)
brief_total(const f64* parts, u64* counts, f64* moments, u64* codes, f64* scale_inv, i64 blocks, i64 size,
            i64 wants) {
  __shared__ f64 kinds[ALL];
  const u32 k = threadIdx.x / 32;
  f64 found = k < SUMS ? 0.0 : -NOTHING;
  for (i64 block = threadIdx.x % 32; block < blocks; block += 32) {
    const f64 part = parts[k * blocks + block];
    found = k < SUMS ? found + part : part > found ? part : found;
  }
  found = k < SUMS ? sum_of(found) : most_of(found);
  if (threadIdx.x % 32 == 0) kinds[k] = found;
  __syncthreads();
  if (threadIdx.x) return;
  if (wants & MOMENTS) {
    const f64 count = (f64)size - kinds[4] - kinds[5] - kinds[6], off = count > 0 ? kinds[0] / count : 0.0;
    const f64 mean = count > 0 ? parts[ALL * blocks] + off : 0.0, around = kinds[1] - kinds[0] * off;
    const f64 apart = around > 0 ? around : 0.0;
    counts[0] = (u64)size;
    for (int i = 1; i < 4; ++i) counts[i] = (u64)kinds[3 + i];
    moments[0] = -kinds[11];
    moments[1] = kinds[12];
    moments[2] = wants & DEEP ? -kinds[13] : NOTHING;
    moments[3] = kinds[2];
    moments[4] = apart + count * mean * mean;
    moments[5] = wants & DEEP ? kinds[3] : 0.0;
    moments[6] = mean;
    moments[7] = apart;
  }
  if (wants & CODES) {
    codes[0] = (u64)size;
    for (int i = 1; i < 5; ++i) codes[i] = (u64)kinds[6 + i];
    scale_inv[0] = size ? parts[ALL * blocks + 1] : NOTHING;
    scale_inv[1] = size ? parts[ALL * blocks + 1] : -NOTHING;
  }
}
