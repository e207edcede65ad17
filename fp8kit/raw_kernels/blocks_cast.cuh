// Scales of blocks, and codes of a line of 16 neighbours: what casts by blocks of any rule are made of.
#pragma once
#include "blocks.cuh"

enum Kind { MX, NVFP4, FLOATS, MOSS };
// What makes codes to nearest even, and values of codes: the hardware, steps of equal width (below), or
// fp8.cuh's general functions.
enum Route { E4M3, E5M2, STEPS, GENERAL };

// The define ROUTE names what is compiled: one of the first three to nearest even, with E2M1's steps by
// themselves, and again with a choice between two scales, `four`; or `any` route, rounding and sign. The last
// two know scales of rows, too. `levers` is any, and what few casts ask for: two-level scales in E8M0, scales
// by the deviation or corrected ones, ties toward zero, a factor, and which elements were not clipped.
enum Compiled { e4m3_codes, e5m2_codes, steps_codes, e2m1_codes, any_codes, four_codes, levers_codes };
enum Four { ALWAYS_SIX, BY_MAE, BY_MSE };
#define JOINED_(a, b) a##b
#define JOINED(a, b) JOINED_(a, b)
constexpr Compiled COMPILED = JOINED(ROUTE, _codes);
constexpr bool E2M1_STEPS = COMPILED == e2m1_codes || COMPILED == four_codes;
constexpr bool LEVERS = COMPILED == levers_codes, ANY = COMPILED == any_codes || LEVERS;
constexpr bool KNOWS_ROWS = ANY || COMPILED == four_codes;

// How a matrix is cast (fp8kit.quantization.Quantizer), as the host passes it by value.
struct BlockCast {
  Narrow format;  // its random_bits: 0 is to nearest even
  Rotation rotation;
  i32 route;
  i32 kind;
  i32 tile;       // length of a block along the contraction, 16 to 128 ...
  i32 tile_log;   // ... is two to the power of this
  i32 square;     // whether it is as long across
  i32 by_max;     // E8M0: whether the scale follows from amax / max, else from amax's exponent ...
  i32 addend;     // ... after this was added to its bits ...
  i32 up;         // ... one more where a mantissa is left ...
  i32 exponent;   // ... less this
  i32 inf_byte;   // what Inf makes
  i32 power_2;    // float32 scales: whether they are powers of two
  i32 by_row;     // NVFP4: whether each line along the contraction has what a tensor has
  i32 four;       // NVFP4: how one of two scales is chosen
  i32 ties_down;  // to nearest, ties toward zero: as with random words of a half
  i32 gauss;      // MX: whether scales follow from deviations
  i32 eden;       // NVFP4: whether scales are corrected
  float max, inverse_max;  // of the format
  float epsilon;           // the least amax
  float for_inf;           // a float32 scale that overflows
  float tensor_max;        // NVFP4: the largest scale of a block times the format's largest value
  float factor, inverse_factor;  // what x * scale is multiplied by, and 1 / that
  float gauss_most, gauss_least; // a scale is the first times the deviation plus the second
};

// A block's: before the cast, its reciprocal, what codes are times to give values, and the scale's code.
struct Scale {
  float scale, inverse, value;
  u32 code;
};

// E8M0 bytes as floats, 2^(byte - 127).
DEVICE float power(u32 byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23);
}

DEVICE Scale mx_scale(const BlockCast& how, float amax) {
  const u32 bits = __float_as_uint(amax);
  i32 byte;
  if (bits > 0x7F800000u) {
    byte = 255;
  } else if (bits == 0x7F800000u) {
    byte = how.inf_byte;
  } else {
    if (how.by_max) {
      const u32 v = __float_as_uint(amax * how.inverse_max);
      byte = (i32)(v >> 23) + ((v & 0x7FFFFFu) > (v >> 23 ? 0u : 0x400000u));
    } else {
      const u32 v = bits + (u32)how.addend;
      byte = (i32)(v >> 23) + (how.up && (v & 0x7FFFFFu)) - how.exponent;
    }
    byte = byte < 0 ? 0 : byte > 254 ? 254 : byte;
  }
  const float inverse = power((u32)byte);
  return Scale{power(byte == 255 ? 255u : 254u - (u32)byte), inverse, inverse, (u32)byte};
}

// The scale of a tensor whose blocks have scales in E4M3, its reciprocal, and the tensor's amax; of FLOATS
// the least amax of a block alone.
struct TensorScale {
  float scale, inverse, amax;
};

DEVICE TensorScale tensor_scale(const BlockCast& how, const float* amax) {
  const bool has_one = how.kind == NVFP4 || (LEVERS && how.kind == MOSS);
  if (!has_one || amax == nullptr)
    return TensorScale{1.0f, 1.0f, how.kind == FLOATS && amax != nullptr ? *amax : 0.0f};
  float scale = __fdiv_rn(how.tensor_max, *amax);
  if (!(*amax > 0.0f && *amax < INF)) scale = 1.0f;
  if (scale > FLT_MAX) scale = FLT_MAX;
  return TensorScale{scale, __fdiv_rn(1.0f, scale), *amax};
}

// That of line `at` of `count`, where lines have their own.
DEVICE TensorScale line_scale(const BlockCast& how, TensorScale whole, const float* amax, i64 at, i64 count) {
  if (!KNOWS_ROWS || !how.by_row || amax == nullptr) return whole;
  return tensor_scale(how, amax + min64(at, count - 1));
}

DEVICE Scale e4m3_scale(TensorScale tensor, float v) {
  if (v > e4m3::MAX) v = e4m3::MAX;  // a NaN stays
  const u32 code = encode<e4m3>(v);
  const float value = decode<e4m3>((u8)code), inverse = value * tensor.inverse;
  float scale = __fdiv_rn(1.0f, inverse);
  if (scale > FLT_MAX) scale = FLT_MAX;
  return Scale{scale, inverse, value, code};
}

DEVICE Scale nvfp4_scale(const BlockCast& how, TensorScale tensor, float amax) {
  return e4m3_scale(tensor, amax * (tensor.scale * how.inverse_max));
}

// Of the two scales between which is chosen that with which the largest magnitude becomes 6, or 4.
DEVICE Scale tried_scale(const BlockCast& how, TensorScale tensor, float amax, bool four) {
  if (amax < how.epsilon) amax = how.epsilon;
  const float base = __fmul_rn(__fdiv_rn(amax, how.max), tensor.scale);
  return e4m3_scale(tensor, four ? __fmul_rn(base, 1.5f) : base);
}

// Of a block with the largest magnitude `amax`, which is NaN where NaN counts and there is one.
DEVICE Scale block_scale(const BlockCast& how, TensorScale tensor, float amax) {
  if (amax < how.epsilon) amax = how.epsilon;
  if (how.kind == MX) return mx_scale(how, amax);
  if (how.kind == NVFP4) return nvfp4_scale(how, tensor, amax);
  if (LEVERS && how.kind == MOSS) {
    const Scale own = mx_scale(how, __fmul_rn(amax, tensor.scale));
    float scale = __fmul_rn(own.scale, tensor.scale);
    if (scale > FLT_MAX) scale = FLT_MAX;
    return Scale{scale, __fmul_rn(own.inverse, tensor.inverse), own.value, own.code};
  }
  if (amax < tensor.amax) amax = tensor.amax;
  const float scale = scale_of(amax, how.max, how.epsilon, how.for_inf, how.power_2 != 0);
  const float inverse = __fdiv_rn(1.0f, scale);
  return Scale{scale, inverse, inverse, 0};
}

// The largest magnitude of a line: NaN where one is, which `nan` says, unless blocks leave NaN out.
DEVICE float line_amax(const BlockCast& how, const float (&v)[LINE], bool& nan) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < LINE; ++i) top = max_nan(top, fabsf(v[i]));
  nan = top != top;
  if (nan && how.kind == FLOATS) {
    top = 0.0f;
#pragma unroll
    for (int i = 0; i < LINE; ++i) top = amax_of(top, v[i]);
  }
  return top;
}

// --- codes -------------------------------------------------------------------------------------------------
// A format with a zero and a mantissa: in the binade of a value, which is at least that of the smallest
// normal one, codes are steps of equal width.

DEVICE i32 route_of(const BlockCast& how) {
  if (ANY) return how.route;
  return COMPILED == e4m3_codes ? E4M3 : COMPILED == e5m2_codes ? E5M2 : STEPS;
}

struct Steps {
  u32 shift;   // mantissa bits that a float has more
  u32 lowest;  // the exponent of the smallest normal value, in its place
  u32 sign;    // the sign bit
  float max;
};

DEVICE Steps steps_of(const BlockCast& how) {
  if (E2M1_STEPS) return Steps{22u, 127u << 23, 8u, 6.0f};
  return Steps{(u32)(23 - how.format.mantissa_bits), (u32)(how.format.lowest + 127) << 23,
               (u32)how.format.sign, how.max};
}

// The code of |v|, to nearest even: a float so large that its last place is a step's width rounds the sum
// there. NaN becomes the largest.
DEVICE u32 nearest_code(Steps steps, float v) {
  const float a = fminf(fabsf(v), steps.max);
  const u32 field = __float_as_uint(a) & 0x7F800000u, binade = field > steps.lowest ? field : steps.lowest;
  const u32 magic = binade + (steps.shift << 23);
  const u32 sum = __float_as_uint(a + __uint_as_float(magic));
  return (binade >> steps.shift) + sum - magic - (steps.lowest >> steps.shift);
}

// The code with v's sign.
DEVICE u32 signed_code(const BlockCast& how, u32 code, float v) {
  if (how.format.twos) return (v < 0.0f ? 0u - code : code) & (u32)(2 * how.format.sign - 1);
  return code | (__float_as_uint(v) >> 31 ? (u32)how.format.sign : 0u);
}

// The low bytes of four words in one; `byte` 3: the high ones.
DEVICE u32 four_bytes(u32 a, u32 b, u32 c, u32 d, u32 byte) {
  const u32 pair = byte ? 0x73u : 0x40u;
  return __byte_perm(__byte_perm(a, b, pair), __byte_perm(c, d, pair), 0x5410u);
}

// Four codes with their signs, in a word.
DEVICE u32 nearest_four(const BlockCast& how, Steps steps, const float* v) {
  u32 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = nearest_code(steps, v[i]);
    if (ANY) codes[i] = signed_code(how, codes[i], v[i]);
  }
  const u32 word = four_bytes(codes[0], codes[1], codes[2], codes[3], 0);
  if (ANY) return word;
  const u32 high = four_bytes(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                              __float_as_uint(v[3]), 3);
  return word | (high >> (__clz((int)steps.sign) - 24) & steps.sign * 0x01010101u);
}

// By the first random_bits bits of a word; every step here is exact.
DEVICE u32 stochastic_code(const BlockCast& how, Steps steps, float v, u32 word) {
  const float a = fminf(fabsf(v), steps.max);
  const u32 field = __float_as_uint(a) & 0x7F800000u, binade = field > steps.lowest ? field : steps.lowest;
  const float count = a * __uint_as_float(((254u + 23u - steps.shift) << 23) - binade);
  const u32 whole = __float_as_uint(__fadd_rz(count, 8388608.0f)) - 0x4B000000u;
  const float place = (count - (float)whole) * 4294967296.0f;
  const u32 unused = 32 - (u32)how.format.random_bits;
  const bool more = unused ? (word >> unused) < (__float2uint_rz(place) >> unused)
                           : word < __float2uint_ru(place);
  return signed_code(how, (binade >> steps.shift) - (steps.lowest >> steps.shift) + whole + more, v);
}

// The bytes of those of 16 values that are NaN become the code of NaN.
DEVICE void mark_nan(const BlockCast& how, const float (&v)[LINE], u32 (&words)[LINE / 4]) {
#pragma unroll
  for (int i = 0; i < LINE; ++i) {
    const u32 mask = 0xFFu << (8 * (i % 4));
    if (v[i] != v[i]) words[i / 4] = (words[i / 4] & ~mask) | ((u32)how.format.nan_code << (8 * (i % 4)));
  }
}

// words = the codes of v, to nearest even. `nan`: whether some are NaN.
DEVICE void nearest_codes(const BlockCast& how, const float (&v)[LINE], bool nan, u32 (&words)[LINE / 4]) {
  const i32 route = route_of(how);
  if (route == E4M3) {
    encode_words<e4m3>(v, words);
  } else if (route == E5M2) {
    encode_words<e5m2>(v, words);
  } else if (route == STEPS) {
    const Steps steps = steps_of(how);
#pragma unroll
    for (int w = 0; w < LINE / 4; ++w) words[w] = nearest_four(how, steps, v + 4 * w);
    if (nan) mark_nan(how, v, words);
  } else {
    // rare: a value at a time, which the others move up to
    float rest[LINE];
#pragma unroll
    for (int i = 0; i < LINE; ++i) rest[i] = v[i];
#pragma unroll 1
    for (int i = 0; i < LINE; ++i) {
      const u32 code = encode(how.format, rest[0], 0);
#pragma unroll
      for (int k = 0; k + 1 < LINE; ++k) rest[k] = rest[k + 1];
#pragma unroll
      for (int w = 0; w < LINE / 4; ++w)
        words[w] = __funnelshift_r(words[w], w + 1 < LINE / 4 ? words[(w + 1) % (LINE / 4)] : code, 8);
    }
  }
}

// The code of one value, stochastically.
DEVICE u32 random_code(const BlockCast& how, Steps steps, float v, u32 word) {
  if (LEVERS && how.ties_down) word = 0x80000000u;
  if (how.route == GENERAL) return encode(how.format, v, word);
  return v != v ? (u32)how.format.nan_code : stochastic_code(how, steps, v, word);
}

// --- values ------------------------------------------------------------------------------------------------

// v = the values of codes. As a float's subnormals and binades codes are values times a power of two.
DEVICE void decode_line(const BlockCast& how, const u32 (&words)[LINE / 4], float (&v)[LINE]) {
  const i32 route = route_of(how);
#pragma unroll
  for (int w = 0; w < LINE / 4; ++w) {
    float four[4];
    if (route == E4M3) {
      decode4<e4m3>(words[w], four);
    } else if (route == E5M2) {
      decode4<e5m2>(words[w], four);
    } else if (route == STEPS) {
      const Steps steps = steps_of(how);
      const u32 sign = steps.sign, mask = E2M1_STEPS ? 7u : (u32)how.format.magnitude;
      const i32 nan_from = E2M1_STEPS ? 256 : how.format.nan_from;
      const float unit = __uint_as_float(steps.lowest + (126u << 23));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 code = words[w] >> (8 * i) & 0xFFu;
        const bool twos = ANY && how.format.twos;
        const u32 magnitude = twos && code & sign ? 2 * sign - code : code & mask;
        const float value = __uint_as_float(magnitude << steps.shift) * unit;
        four[i] = (i32)magnitude >= nan_from ? __uint_as_float(0x7FC00000u) : code & sign ? -value : value;
      }
    } else {
      u32 rest = words[w];
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const float value = decode(how.format, (u8)rest);
        rest >>= 8;
        four[0] = four[1], four[1] = four[2], four[2] = four[3], four[3] = value;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[4 * w + i] = four[i];
  }
}

// --- a choice between two scales ---------------------------------------------------------------------------

// How far a line's values are from what they are after a cast, added up from the first to the last. `nan`:
// whether some are NaN.
DEVICE float line_error(const BlockCast& how, TensorScale tensor, const Scale& scale, bool nan,
                        const float (&v)[LINE]) {
  float cast[LINE], error = 0.0f;
#pragma unroll
  for (int i = 0; i < LINE; ++i) cast[i] = v[i] * scale.scale;
  u32 words[LINE / 4] = {};
  nearest_codes(how, cast, nan || scale.scale != scale.scale, words);
  decode_line(how, words, cast);
#pragma unroll
  for (int i = 0; i < LINE; ++i) {
    const float value = __fmul_rn(__fmul_rn(cast[i], scale.value), tensor.amax);
    const float apart = __fsub_rn(__fdiv_rn(value, how.tensor_max), v[i]);
    error = __fadd_rn(error, how.four == BY_MSE ? __fmul_rn(apart, apart) : fabsf(apart));
  }
  return error;
}

// The sum of 16 rows' errors, `LINES` apart from each other, as a tree.
DEVICE float square_error(const float* errors) {
  float sums[LINE / 2];
#pragma unroll
  for (int i = 0; i < LINE / 2; ++i) sums[i] = __fadd_rn(errors[i * LINES], errors[(i + LINE / 2) * LINES]);
#pragma unroll
  for (int half = LINE / 4; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] = __fadd_rn(sums[i], sums[i + half]);
  }
  return sums[0];
}

// The scale of a line that is a block of its own.
DEVICE Scale chosen_scale(const BlockCast& how, TensorScale tensor, float amax, bool nan,
                          const float (&v)[LINE]) {
  const Scale six = tried_scale(how, tensor, amax, false), four = tried_scale(how, tensor, amax, true);
  return line_error(how, tensor, four, nan, v) < line_error(how, tensor, six, nan, v) ? four : six;
}

// --- levers ------------------------------------------------------------------------------------------------

DEVICE Rng rng_of(const BlockCast& how, const i64* rng) {
  return LEVERS && how.ties_down ? Rng{} : load_rng(rng);
}

// The sum of the lines of `length` values along the contraction, as a tree; all lanes call.
DEVICE float shared_sum(i32 length, float sum) {
#pragma unroll 1
  for (u32 d = 1; LINE * d < length; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
  return sum;
}

// E8M0 by the deviation of a block; all lanes call.
DEVICE Scale gauss_scale(const BlockCast& how, const float (&v)[LINE]) {
  float squares = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LINE; ++i)
    squares = __fadd_rn(squares, __fmul_rn(v[i], v[i])), sum = __fadd_rn(sum, v[i]);
  const float share = 1.0f / (float)how.tile;
  squares = __fmul_rn(shared_sum(how.tile, squares), share);
  const float mean = __fmul_rn(shared_sum(how.tile, sum), share);
  float variance = __fsub_rn(squares, __fmul_rn(mean, mean));
  if (variance < 0.0f) variance = 0.0f;  // a NaN stays
  const float scale = __fadd_rn(__fmul_rn(how.gauss_most, __fsqrt_rn(variance)), how.gauss_least);
  const u32 byte = scale < INF ? __float_as_uint(scale) >> 23 : 255u;
  const float inverse = power(byte);
  return Scale{power(byte == 255 ? 255u : 254u - byte), inverse, inverse, byte};
}

// E4M3 of a value that is not negative, stochastically by a word.
DEVICE u32 random_e4m3(float v, u32 word) {
  if (v != v) return 0x7Fu;
  const u32 field = __float_as_uint(v) & 0x7F800000u, lowest = 121u << 23;
  const u32 binade = field > lowest ? field : lowest;
  const float count = v * __uint_as_float(((254u + 3u) << 23) - binade);
  const u32 whole = __float_as_uint(__fadd_rz(count, 8388608.0f)) - 0x4B000000u;
  const float place = (count - (float)whole) * 4294967296.0f;
  return (binade >> 20) - (lowest >> 20) + whole + (word < __float2uint_ru(place));
}

// NVFP4's scale of a block that makes up for what rounding takes away in its group; all lanes call.
DEVICE Scale eden_scale(const BlockCast& how, TensorScale tensor, float amax, bool nan,
                        const float (&v)[LINE], u32 word) {
  if (amax < how.epsilon) amax = how.epsilon;
  float base = __fmul_rn(amax, __fmul_rn(tensor.scale, how.inverse_max));
  if (base > e4m3::MAX) base = e4m3::MAX;  // a NaN stays
  float first = decode<e4m3>((u8)encode<e4m3>(base));
  if (first == 0.0f) first = 1.0f;
  float scale = __fdiv_rn(1.0f, __fmul_rn(first, tensor.inverse));
  if (scale > FLT_MAX) scale = FLT_MAX;
  scale = __fmul_rn(scale, how.factor);
  if (scale > FLT_MAX) scale = FLT_MAX;
  float cast[LINE], squares = 0.0f, products = 0.0f;
#pragma unroll
  for (int i = 0; i < LINE; ++i) cast[i] = __fmul_rn(v[i], scale);
  u32 words[LINE / 4] = {};
  nearest_codes(how, cast, nan || scale != scale, words);
  decode_line(how, words, cast);
#pragma unroll
  for (int i = 0; i < LINE; ++i) {
    const float own = __fmul_rn(v[i], scale);
    squares = __fadd_rn(squares, __fmul_rn(own, own));
    products = __fadd_rn(products, __fmul_rn(own, cast[i]));
  }
  const i32 group = how.rotation.n;
  const float ratio = __fdiv_rn(shared_sum(group, squares), shared_sum(group, products));
  float corrected = __fmul_rn(first, ratio > 0.0f && ratio < INF ? ratio : 1.0f);
  if (corrected > e4m3::MAX) corrected = e4m3::MAX;
  const u32 code = random_e4m3(corrected, word);
  const float value = decode<e4m3>((u8)code);
  return Scale{scale, value * tensor.inverse, value, code};
}

// The scale of a line's block; `element`: the number of the line's first element. All lanes call.
DEVICE Scale lever_scale(const BlockCast& how, TensorScale tensor, float amax, bool nan,
                         const float (&v)[LINE], const i64* rng, u64 element) {
  Scale scale;
  if (how.eden) {
    scale = eden_scale(how, tensor, amax, nan, v, philox_word(load_rng(rng), element));
  } else {
    scale = how.gauss ? gauss_scale(how, v) : block_scale(how, tensor, amax);
    scale.scale = __fmul_rn(scale.scale, how.factor);
    if (how.factor != 1.0f && scale.scale > FLT_MAX) scale.scale = FLT_MAX;
  }
  scale.inverse = __fmul_rn(scale.inverse, how.inverse_factor);
  if (how.kind == FLOATS) scale.value = scale.inverse;
  return scale;
}
