// FP8 and its narrower relatives: encoding and decoding.
// E4M3 and E5M2 use the hardware's conversion (PTX cvt.rn.satfinite.e4m3x2.f32, sm_89 and later), or give the
// same codes: nearest even, |v| beyond the largest finite value and Inf become it, NaN 0x7F. Other formats,
// stochastic rounding and non-saturating casts go through exact integer arithmetic on the float's bits.
#pragma once
#include "common.cuh"

// The two formats as types, so that -DFORMAT=e4m3 chooses one. In the PTX instruction the first
// source fills the upper byte. Older chips have no such instruction, and compute the same codes: so does
// -DBY_BITS, by which a newer one shows that they are the same.
#if __CUDA_ARCH__ >= 890 && !defined(BY_BITS)
struct e4m3 {
  static constexpr float MAX = 448.0f;
  static __device__ __forceinline__ u16 pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
  }
  static __device__ __forceinline__ u32 halves(u16 codes) {  // two codes as two float16, exactly
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
    return pair;
  }
};

struct e5m2 {
  static constexpr float MAX = 57344.0f;
  static __device__ __forceinline__ u16 pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
  }
  static __device__ __forceinline__ u32 halves(u16 codes) {
    u32 pair;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(codes));
    return pair;
  }
};
#else
// The code of x: |x| in steps of its binade, of which the subnormals share the lowest normal one's, counted
// from 0. A code beyond the largest finite one becomes that.
template <int MANTISSA_BITS, int LOWEST, u32 MAX_CODE> DEVICE u32 code_of(float x) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7F;
  const int exponent = max((int)(magnitude >> 23) - 127, LOWEST);
  const float steps_of_one = __uint_as_float((u32)(127 + MANTISSA_BITS - exponent) << 23);
  const u32 steps = (u32)__float2int_rn(__uint_as_float(magnitude) * steps_of_one);
  const u32 code = steps + ((u32)(exponent - LOWEST) << MANTISSA_BITS);
  return min(code, MAX_CODE) | (bits >> 24 & 0x80);
}

// Two codes become the upper bytes of two halves of a word, and both halves are computed at once.
DEVICE u32 upper_bytes(u16 codes) { return __byte_perm(codes, 0, 0x1404); }

// Two float16 times 256, exactly where that is finite.
DEVICE u32 times_256(u32 pair) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(0x5C005C00));
  return product;
}

// Float16 without signs get those of `both`; where `nan` has a half's upper bit, that becomes 0x7FFF.
DEVICE u32 with_signs(u32 pair, u32 both, u32 nan) {
  return pair | (both & 0x80008000 & ~nan) | (nan - (nan >> 15));
}

struct e4m3 {
  static constexpr float MAX = 448.0f;
  static __device__ __forceinline__ u16 pair(float low, float high) {
    return (u16)(code_of<3, -6, 0x7E>(low) | code_of<3, -6, 0x7E>(high) << 8);
  }
  static __device__ __forceinline__ u32 halves(u16 codes) {
    const u32 both = upper_bytes(codes), magnitude = both & 0x7F007F00;
    // as float16 their exponents are 8 too small: also those of subnormals, which are none in float16
    return with_signs(times_256(magnitude >> 1), both, (magnitude + 0x01000100) & 0x80008000);
  }
};

struct e5m2 {
  static constexpr float MAX = 57344.0f;
  static __device__ __forceinline__ u16 pair(float low, float high) {
    return (u16)(code_of<2, -14, 0x7B>(low) | code_of<2, -14, 0x7B>(high) << 8);
  }
  static __device__ __forceinline__ u32 halves(u16 codes) {
    const u32 both = upper_bytes(codes), magnitude = both & 0x7F007F00;
    return with_signs(magnitude, both, (magnitude + 0x03000300) & 0x80008000);
  }
};
#endif

template <typename F> DEVICE u8 encode(float x) { return (u8)F::pair(x, 0.0f); }

template <typename F> DEVICE u32 encode4(float a, float b, float c, float d) {
  return (u32)F::pair(a, b) | (u32)F::pair(c, d) << 16;
}

// N values (a multiple of 4) into N / 4 words, the first value in the lowest byte.
template <typename F, int N> DEVICE void encode_words(const float (&x)[N], u32 (&words)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) words[i] = encode4<F>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}

template <typename F> DEVICE void decode4(u32 word, float (&x)[4]) {
  const u32 low = F::halves((u16)word), high = F::halves((u16)(word >> 16));
  x[0] = to_float(f16{(u16)low}), x[1] = to_float(f16{(u16)(low >> 16)});
  x[2] = to_float(f16{(u16)high}), x[3] = to_float(f16{(u16)(high >> 16)});
}

template <typename F> DEVICE float decode(u8 code) { return to_float(f16{(u16)F::halves(code)}); }

// N codes (4, 8 or 16 neighbours) to or from memory; the address must be a multiple of N.
template <int N> DEVICE void load_codes(const u8* from, u32 (&words)[N / 4]) {
  alignas(16) u32 raw[N / 4];
  load_bytes<N>(reinterpret_cast<const u32*>(from), raw);
#pragma unroll
  for (int i = 0; i < N / 4; ++i) words[i] = raw[i];
}

// Byte j of row k becomes byte k of column j.
DEVICE void transpose4(u32 row0, u32 row1, u32 row2, u32 row3, u32* columns) {
  const u32 low01 = __byte_perm(row0, row1, 0x5140), low23 = __byte_perm(row2, row3, 0x5140);
  const u32 high01 = __byte_perm(row0, row1, 0x7362), high23 = __byte_perm(row2, row3, 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Four rows of eight codes as eight columns of four codes.
DEVICE void transpose_codes(const u32 (&codes)[4][2], u32 (&columns)[8]) {
  transpose4(codes[0][0], codes[1][0], codes[2][0], codes[3][0], columns);
  transpose4(codes[0][1], codes[1][1], codes[2][1], codes[3][1], columns + 4);
}

template <int N> DEVICE void store_codes(u8* to, const u32 (&words)[N / 4]) {
  alignas(16) u32 raw[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; ++i) raw[i] = words[i];
  load_bytes<N>(raw, reinterpret_cast<u32*>(to));
}

// Only the first `valid` codes.
template <int N> DEVICE void store_codes_some(u8* to, i64 valid, const u32 (&words)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < valid) to[i] = (u8)(words[i / 4] >> (8 * (i % 4)));
}

// Any ExMy of at most 8 bits (fp8kit.formats.Format), as the host passes it by value, and how to round to it.
// Codes ascend with magnitude below the sign bit; negative ones are the complement's where `twos` says so.
struct Narrow {
  i32 mantissa_bits;
  i32 lowest;         // exponent of the smallest normal value
  i32 zero;           // whether exponent field 0 holds zero and the subnormals
  i32 sign;           // the sign bit, 0 for an unsigned format
  i32 magnitude;      // mask of the other bits
  i32 max_code;       // largest finite value
  i32 over_code;      // what values beyond it become: max_code when saturating, else Inf or NaN
  i32 over_signed;    // whether that keeps its sign (NaN does not)
  i32 nan_code;       // what NaN becomes
  i32 negative_code;  // what values below zero become where there is no sign
  i32 inf_from;       // magnitudes from here on are not finite ...
  i32 nan_from;       // ... and NaN from here on
  i32 twos;           // whether negative codes are two's complement
  i32 random_bits;    // 0: to nearest even; n: stochastically by n random bits
};

DEVICE u8 with_sign(const Narrow& f, i32 code, bool negative) {
  if (f.twos) return (u8)((negative ? -code : code) & (2 * f.sign - 1));
  return (u8)(negative ? code | f.sign : code);
}

DEVICE u8 overflowed(const Narrow& f, bool negative) {
  return with_sign(f, f.over_code, negative && f.over_signed);
}

// v rounded to nearest even, or, with n random bits, away from zero iff the word's top n bits are less than
// floor(fraction * 2**n) (n = 32: less than fraction * 2**32), fraction being |v|'s exact place between its
// two neighbours. Rounding comes before the decision on overflow, as if the exponent range went on.
DEVICE u8 encode(const Narrow& f, float v, u32 word) {
  const u32 magnitude = __float_as_uint(v) & 0x7FFFFFFFu;
  const bool negative = __float_as_uint(v) >> 31;
  if (magnitude > 0x7F800000u) return (u8)f.nan_code;
  if (negative && !f.sign && magnitude) return (u8)f.negative_code;
  if (magnitude == 0x7F800000u) return overflowed(f, negative);
  if (magnitude == 0u) return with_sign(f, 0, negative);

  // |v| = mantissa * 2**exponent; `shift` turns the mantissa into steps of the format's spacing in v's binade
  const bool tiny = magnitude < 0x00800000u;
  const u32 mantissa = tiny ? magnitude : (magnitude & 0x007FFFFFu) | 0x00800000u;
  const i32 exponent = tiny ? -149 : (i32)(magnitude >> 23) - 150;
  const i32 top = 31 - __clz(mantissa) + exponent;
  const i32 binade = top > f.lowest ? top : f.lowest;
  const i32 shift = binade - f.mantissa_bits - exponent;
  i32 steps = 0;
  u64 rest = 0;  // what the steps leave over, in units of 2**-62 steps (1 for anything smaller still)
  if (shift <= 0) {
    steps = (i32)(mantissa << -shift);
  } else if (shift < 32) {
    steps = (i32)(mantissa >> shift);
    rest = (u64)(mantissa & ((1u << shift) - 1u)) << (62 - shift);
  } else {
    rest = shift <= 62 ? (u64)mantissa << (62 - shift) : 1ull;
  }
  // a normal value's steps hold the leading one, which counts as one exponent field where
  // field 0 is the subnormals'
  i32 code = ((binade - f.lowest) << f.mantissa_bits) + steps - (f.zero ? 0 : 1 << f.mantissa_bits);
  const u64 half = 1ull << 61;
  if (f.random_bits) {
    // r < floor(fraction * 2**n) iff (r + 1) * 2**-n <= fraction; of 32 bits one unit of `rest` is enough
    const i32 unused = 32 - f.random_bits;
    const u64 least = unused ? 1ull << (30 + unused) : 1ull;
    code += ((u64)(word >> unused) << (30 + unused)) + least <= rest;
  } else {
    code += rest > half || (rest == half && (code & 1));
  }
  if (code < 0) code = 0;  // below the smallest value of a format without a zero
  return code > f.max_code ? overflowed(f, negative) : with_sign(f, code, negative);
}

DEVICE float decode(const Narrow& f, u8 code) {
  const bool negative = code & f.sign;
  const i32 magnitude = f.twos && negative ? -(i32)code & (2 * f.sign - 1) : code & f.magnitude;
  const u32 sign = negative ? 0x80000000u : 0u;
  if (magnitude >= f.nan_from) return __uint_as_float(0x7FC00000u);
  if (magnitude >= f.inf_from) return __uint_as_float(0x7F800000u | sign);
  const i32 field = magnitude >> f.mantissa_bits, fraction = magnitude & ((1 << f.mantissa_bits) - 1);
  const bool subnormal = f.zero && field == 0;
  const i32 mantissa = subnormal ? fraction : fraction | 1 << f.mantissa_bits;
  const i32 exponent = f.lowest + (subnormal ? 0 : field - (f.zero ? 1 : 0)) - f.mantissa_bits;
  return __uint_as_float(__float_as_uint(ldexpf((float)mantissa, exponent)) | sign);
}
