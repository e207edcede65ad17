// The product that sums as another chip's tensor cores do, bit for bit, in integers.
//
// functions: model_gemm, model_gemm_exact (model_gemm), model_gemm_scaled (model_gemm)
// variants: T=f32,bf16,f16; WIDE=0,1
#include "fp8.cuh"

constexpr int TILE = 64, STEP = 32, THREADS = 256;  // outputs of a block, products staged at a time
constexpr int MANTISSA = 23, LOWEST = -126;         // of float32

// WIDE: terms and sums of more than 31 bits
#if WIDE
typedef i64 Sum;
typedef u64 Bits;
#else
typedef i32 Sum;
typedef u32 Bits;
#endif
constexpr int LAST = 8 * sizeof(Sum) - 1;

DEVICE float power_of_2(i32 exponent) { return __uint_as_float((u32)(exponent + 127) << MANTISSA); }

enum { TENSORS, ROWS, BLOCKS_OF_ROWS, BLOCKS };  // whose scales; in the latter two K is summed block by block

// Scales: one a tile, so many elements apart down and across; 0 across where there is one along K.
struct Job {
  Narrow a_format, b_format;
  const float *a_scale, *b_scale;
  const T *bias, *addend;
  i64 m, n, k, a_tile_rows, b_tile_rows, a_down, b_down, a_across, b_across, block, order;
  i64 fraction_bits, product_bits, chunk, promote, lowest_bit, group;
};

// A code as significand * 2^(exponent - mantissa_bits), the exponent of 0 so low that it is never the
// largest. NaN and Inf count as 0; returns whether the code is one.
DEVICE bool fields_of(const Narrow& f, u8 code, i32& significand, i32& exponent) {
  const float value = decode(f, code);
  const i32 field = __float_as_uint(value) >> MANTISSA & 0xFF;
  significand = 0, exponent = -(1 << 20);
  if (field == 0xFF) return true;
  if (value != 0.0f) {
    exponent = max(field - 127, f.lowest);
    significand = (i32)(value * power_of_2(f.mantissa_bits - exponent));
  }
  return false;
}

// The sum of a row's products by the rules of NaN and Inf, one of which is in it.
DEVICE float special_sum(const Job& job, const u8* a, const u8* b, i64 row, i64 column) {
  float sum = 0.0f;
  for (i64 k = 0; k < job.k; ++k)
    sum += decode(job.a_format, a[row * job.k + k]) * decode(job.b_format, b[column * job.k + k]);
  return sum;
}

DEVICE float a_scale(const Job& job, i64 row, i64 block) {
  return job.a_scale[row / job.a_tile_rows * job.a_down + block * job.a_across];
}

DEVICE float b_scale(const Job& job, i64 column, i64 block) {
  return job.b_scale[column / job.b_tile_rows * job.b_down + block * job.b_across];
}

// The result with bias and addend, rounded once. The addend may be `out`.
DEVICE void put(const Job& job, T* out, i64 row, i64 column, float result) {
  const i64 at = row * job.n + column;
  if (job.bias != nullptr) result = __fadd_rn(result, to_float(job.bias[column]));
  if (job.addend != nullptr) result = __fadd_rn(result, to_float(job.addend[at]));
  out[at] = from_float<T>(result);
}

// `total` and a block's sum with its scales, in cuBLASLt's orders.
DEVICE float scaled(const Job& job, float total, float sum, i64 row, i64 column, i64 block) {
  const float a = a_scale(job, row, block), b = b_scale(job, column, block);
  if (job.order == TENSORS) return __fmul_rn(sum, __fmul_rn(a, b));
  if (job.order == ROWS) return __fmul_rn(__fmul_rn(sum, b), a);
  if (job.order == BLOCKS_OF_ROWS) return __fmaf_rn(__fmul_rn(sum, a), b, total);
  return __fmaf_rn(sum, __fmul_rn(a, b), total);
}

struct Staged {
  i32 significand[STEP][TILE], exponent[STEP][TILE];
  bool special[TILE];  // whether a row has held NaN or Inf so far
};

// Codes [rows][k] of TILE rows from `top` on, STEP of them from `start` on; beyond `end` zeros.
DEVICE void stage(Staged& to, const u8* codes, const Narrow& format, i64 top, i64 rows, i64 k, i64 start,
                  i64 end) {
#pragma unroll
  for (int i = threadIdx.x; i < TILE * STEP; i += THREADS) {
    const int row = i / STEP, at = i % STEP;
    const bool there = top + row < rows && start + at < end;
    const u8 code = there ? codes[(top + row) * k + start + at] : 0;
    i32 significand, exponent;
    if (fields_of(format, code, significand, exponent) && there) to.special[row] = true;
    to.significand[at][row] = there ? significand : 0;
    to.exponent[at][row] = there ? exponent : -(1 << 20);
  }
}

// What one instruction knows of an accumulator: its 24 bits and their exponent.
DEVICE void split(float c, i32& fraction, i32& exponent) {
  const u32 pattern = __float_as_uint(c) & 0x7FFFFFFFu;
  const i32 field = pattern >> MANTISSA;
  fraction = (pattern & 0x7FFFFFu) | (field ? 0x800000u : 0u);
  exponent = c == 0.0f ? LOWEST : (field ? field : 1) - 127;
}

// sum * 2^(exponent - bits), cut off toward zero to min(bits, 23) bits after the leading one.
DEVICE float cut(Sum sum, i32 exponent, i32 bits) {
  Bits magnitude = sum < 0 ? -(Bits)sum : (Bits)sum;
  const int length = WIDE ? 64 - __clzll((i64)magnitude) : 32 - __clz((i32)magnitude);
  const int drop = max(length - 1 - min(bits, MANTISSA), 0);
  magnitude = magnitude >> drop << drop;
  // at most 24 bits of it are left, so the conversion is exact
  const float value = magnitude ? (float)magnitude * power_of_2(exponent - bits) : 0.0f;
  return sum < 0 ? -value : value;
}

// Likewise a sum of 64 bits.
DEVICE float cut_wide(i64 sum, i32 exponent, i32 bits) {
  u64 magnitude = sum < 0 ? -(u64)sum : (u64)sum;
  const int drop = max(63 - __clzll((i64)magnitude) - min(bits, MANTISSA), 0);
  magnitude = magnitude >> drop << drop;
  const double value = magnitude ? ldexp((double)magnitude, exponent - bits) : 0.0;
  return sum < 0 ? -(float)value : (float)value;
}

// A 64 x 64 tile of the result a block, 4 x 4 of it a thread, rows and columns 16 apart.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
model_gemm(const u8* a, const u8* b, T* out, Job job) {
  __shared__ Staged left, right;
  if (threadIdx.x < TILE) left.special[threadIdx.x] = right.special[threadIdx.x] = false;
  const i64 across = ceil_div(job.n, TILE);
  const i64 top = blockIdx.x / across * TILE, first_column = blockIdx.x % across * TILE;
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;
  const i32 bits = (i32)job.fraction_bits, f = (i32)job.product_bits;
  const int up = max(bits - f, 0), down = max(f - bits, 0);
  float total[4][4] = {}, sum[4][4] = {}, c[4][4] = {};
  const bool blocked = job.order >= BLOCKS_OF_ROWS;
  const i64 blocks = blocked ? ceil_div(job.k, job.block) : 1;

  for (i64 block = 0; block < blocks; ++block) {
    const i64 begin = block * job.block, end = min64(begin + job.block, job.k);
    for (i64 start = begin; start < end;) {
      // the products of one instruction, staged STEP at a time in two passes: exponents, then terms
      const i64 promoted = (start - begin) / job.promote * job.promote + begin + job.promote;
      const i64 stop = min64(min64(start + job.chunk, promoted), end);
      i32 most[4][4];
      Sum terms[4][4] = {};
      const bool once = stop - start <= STEP;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) most[i][j] = LOWEST;
      for (int pass = 0; pass < 2; ++pass) {
        if (pass == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              i32 fraction, exponent;
              split(c[i][j], fraction, exponent);
              most[i][j] = max(most[i][j], exponent);
              const int shift = most[i][j] - exponent + MANTISSA - bits;
              const Sum own =
                  shift >= 0 ? (Sum)((Bits)fraction >> min(shift, LAST)) : (Sum)fraction << -shift;
              terms[i][j] = c[i][j] < 0.0f ? -own : own;
            }
        }
        for (i64 part = start; part < stop; part += STEP) {
          if (pass == 0 || !once) {
            __syncthreads();
            stage(left, a, job.a_format, top, job.m, job.k, part, stop);
            stage(right, b, job.b_format, first_column, job.n, job.k, part, stop);
            __syncthreads();
          }
#pragma unroll 4
          for (int at = 0; at < STEP; ++at) {
            i32 ea[4], eb[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) ea[i] = left.exponent[at][row + 16 * i];
#pragma unroll
            for (int j = 0; j < 4; ++j) eb[j] = right.exponent[at][column + 16 * j];
            if (pass == 0) {
#pragma unroll
              for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) most[i][j] = max(most[i][j], ea[i] + eb[j]);
            } else {
              i32 sa[4], sb[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) sa[i] = left.significand[at][row + 16 * i];
#pragma unroll
              for (int j = 0; j < 4; ++j) sb[j] = right.significand[at][column + 16 * j];
#pragma unroll
              for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  const i32 p = sa[i] * sb[j];
                  const int shift = min(most[i][j] - (ea[i] + eb[j]) + down, LAST);
                  const Sum magnitude = (Sum)((Bits)(p < 0 ? -p : p) << up >> shift);
                  terms[i][j] += p < 0 ? -magnitude : magnitude;
                }
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[i][j] = cut(terms[i][j], most[i][j], bits);
          if (stop == promoted || stop == end) sum[i][j] = __fadd_rn(sum[i][j], c[i][j]), c[i][j] = 0.0f;
        }
      start = stop;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const i64 r = top + row + 16 * i, s = first_column + column + 16 * j;
        if (r >= job.m || s >= job.n) continue;
        total[i][j] = scaled(job, total[i][j], sum[i][j], r, s, block);
        sum[i][j] = 0.0f;
      }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const i64 r = top + row + 16 * i, s = first_column + column + 16 * j;
      if (r >= job.m || s >= job.n) continue;
      if (left.special[row + 16 * i] || right.special[column + 16 * j])
        total[i][j] += special_sum(job, a, b, r, s);
      put(job, out, r, s, total[i][j]);
    }
}

// --- exact sums --------------------------------------------------------------------------------------------

constexpr int LIMBS = 4, LIMB = 32;  // as in the reference engine
constexpr i64 MASK = (1ll << LIMB) - 1, CARRY_AFTER = 1 << 15;

DEVICE void carry(i64 (&limbs)[LIMBS]) {
#pragma unroll
  for (int t = 0; t + 1 < LIMBS; ++t) limbs[t + 1] += limbs[t] >> LIMB, limbs[t] &= MASK;
}

// The number that the limbs hold, times 2^low, to nearest even: as a float, or `wide`, as a double.
DEVICE double nearest(i64 (&limbs)[LIMBS], i64 low, bool wide) {
  carry(limbs);
  const bool negative = limbs[LIMBS - 1] < 0;
  if (negative) {
#pragma unroll
    for (int t = 0; t < LIMBS; ++t) limbs[t] = -limbs[t];
    carry(limbs);
  }
  i64 exponent = low + LIMB * (LIMBS - 2);
#pragma unroll
  for (int t = 1; t < LIMBS; ++t)
    if (limbs[LIMBS - 1] == 0) {  // the leading limb to the last place
#pragma unroll
      for (int s = LIMBS - 1; s > 0; --s) limbs[s] = limbs[s - 1];
      limbs[0] = 0;
      exponent -= LIMB;
    }
  if (limbs[LIMBS - 1] == 0) return 0.0;
  // its highest 64 bits, the last of them 1 where anything lies below
  u64 value = (u64)limbs[LIMBS - 1] << LIMB | (u64)limbs[LIMBS - 2];
  const int gap = __clzll((i64)value);
  const u64 next = (u64)limbs[LIMBS - 3] << gap;
  value = value << gap | next >> LIMB;
  i64 rest = next & MASK;
#pragma unroll
  for (int t = 0; t < LIMBS - 3; ++t) rest |= limbs[t];
  if (rest) value |= 1;
  exponent -= gap;
  const double found = ldexp(wide ? __ull2double_rn(value) : (double)__ull2float_rn(value), (int)exponent);
  return negative ? -found : found;
}

// One element of the result a thread.
extern "C" __global__ void __launch_bounds__(THREADS)
model_gemm_exact(const u8* a, const u8* b, T* out, Job job) {
  const bool blocked = job.order >= BLOCKS_OF_ROWS;
  const i64 blocks = blocked ? ceil_div(job.k, job.block) : 1;
  for (i64 at = first(); at < job.m * job.n; at += step()) {
    const i64 row = at / job.n, column = at % job.n;
    double total = 0.0;
    float result = 0.0f;
    bool special = false;
    for (i64 block = 0; block < blocks; ++block) {
      i64 limbs[LIMBS] = {};
      const i64 begin = block * job.block, end = min64(begin + job.block, job.k);
      for (i64 k = begin; k < end; ++k) {
        i32 x, y, x_exponent, y_exponent;
        special |= fields_of(job.a_format, a[row * job.k + k], x, x_exponent);
        special |= fields_of(job.b_format, b[column * job.k + k], y, y_exponent);
        const i64 p = (i64)x * y;
        if (p != 0) {
          const i64 place = x_exponent + y_exponent - job.product_bits - job.lowest_bit;
#pragma unroll
          for (int t = 0; t < LIMBS; ++t) limbs[t] += t == place / LIMB ? p << (place % LIMB) : 0;
        }
        if ((k - begin) % CARRY_AFTER == CARRY_AFTER - 1) carry(limbs);
      }
      const double sum = nearest(limbs, job.lowest_bit, blocked);
      if (!blocked) {
        result = scaled(job, 0.0f, (float)sum, row, column, 0);
        continue;
      }
      const float factor = __fmul_rn(a_scale(job, row, block), b_scale(job, column, block));
      total = __dadd_rn(total, __dmul_rn(sum, (double)factor));
    }
    if (blocked) result = __double2float_rn(total);
    if (special) result += special_sum(job, a, b, row, column);
    put(job, out, row, column, result);
  }
}

// --- scaled groups -----------------------------------------------------------------------------------------

constexpr int SCALE_BITS = 3;  // fraction bits of a scale's significand that count

// A scale as significand * 2^(exponent - SCALE_BITS); 0 for what is not finite, which `nan` says of NaN.
DEVICE i32 scale_fields(float scale, i32& exponent, bool& nan) {
  nan |= scale != scale;
  exponent = 0;
  if (!(scale > 0.0f && scale < INF)) return 0;
  const bool tiny = scale < 1.17549435e-38f;
  const u32 pattern = __float_as_uint(tiny ? scale * 16777216.0f : scale);
  exponent = (i32)(pattern >> MANTISSA) - 127 - (tiny ? 24 : 0);
  return (i32)((pattern & 0x7FFFFFu) | 0x800000u) >> (MANTISSA - SCALE_BITS);
}

// One term of an instruction: the products from `from` on, `group` of them or up to `end`, and their scales.
// Returns it in units of 2^(exponent + unit - 2 SCALE_BITS).
DEVICE i64 scaled_term(const Job& job, const u8* a, const u8* b, i64 row, i64 column, i64 from, i64 end,
                       i32& exponent, bool& special) {
  const i64 block = from / job.block;
  const i64 last = min64(from + job.group, end);
  i32 left_exponent, right_exponent, ea = 0, eb = 0, sa, sb;
  const i32 left = scale_fields(a_scale(job, row, block), left_exponent, special),
            right = scale_fields(b_scale(job, column, block), right_exponent, special);
  i64 term = 0;
  for (i64 k = from; k < last; ++k) {
    const bool odd = fields_of(job.a_format, a[row * job.k + k], sa, ea);
    special |= fields_of(job.b_format, b[column * job.k + k], sb, eb) || odd;
    const i64 product = (i64)sa * sb;
    if (job.group == 1) term = product;
    else if (product) {
      const int up = (int)(ea + eb - job.product_bits - job.lowest_bit);
      term += product < 0 ? -(-product << up) : product << up;
    }
  }
  exponent = left_exponent + right_exponent + (job.group == 1 ? ea + eb : 0);
  return term * left * right;
}

// A thread an element. Terms and sums have 64 bits, whatever WIDE says.
extern "C" __global__ void __launch_bounds__(THREADS)
model_gemm_scaled(const u8* a, const u8* b, T* out, Job job) {
  const i32 bits = (i32)job.fraction_bits;
  const i32 unit = (i32)(job.group == 1 ? -job.product_bits : job.lowest_bit);
  for (i64 at = first(); at < job.m * job.n; at += step()) {
    const i64 row = at / job.n, column = at % job.n;
    float total = 0.0f, c = 0.0f;
    bool special = false;
    for (i64 start = 0; start < job.k;) {
      const i64 promoted = min64((start / job.promote + 1) * job.promote, job.k);
      const i64 stop = min64(start + job.chunk, promoted);
      i32 fraction, own, exponent;
      split(c, fraction, own);
      i32 most = own;
      for (i64 k = start; k < stop; k += job.group)
        if (scaled_term(job, a, b, row, column, k, stop, exponent, special)) most = max(most, exponent);
      const int shift = most - own + MANTISSA - bits;
      i64 sum = shift >= 0 ? (i64)fraction >> min(shift, 63) : (i64)fraction << -shift;
      if (c < 0.0f) sum = -sum;
      for (i64 k = start; k < stop; k += job.group) {
        const i64 term = scaled_term(job, a, b, row, column, k, stop, exponent, special);
        if (!term) continue;
        const int up = unit - 2 * SCALE_BITS + bits - (most - exponent);
        const u64 magnitude = (u64)(term < 0 ? -term : term);
        const i64 cut_off = (i64)(up >= 0 ? magnitude << up : magnitude >> min(-up, 63));
        sum += term < 0 ? -cut_off : cut_off;
      }
      c = cut_wide(sum, most, bits);
      if (stop == promoted) total = __fadd_rn(total, c), c = 0.0f;
      start = stop;
    }
    if (special) {
      bool nan = false;
      i32 unused;
      for (i64 block = 0; block * job.block < job.k; ++block) {
        scale_fields(a_scale(job, row, block), unused, nan);
        scale_fields(b_scale(job, column, block), unused, nan);
      }
      total = nan ? __uint_as_float(0x7FC00000u) : total + special_sum(job, a, b, row, column);
    }
    put(job, out, row, column, total);
  }
}
