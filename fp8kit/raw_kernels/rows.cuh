// Matrices walked eight columns at a time: the unit in which the memory-bound kernels read,
// round, transpose and write.
#pragma once
#include "fp8.cuh"
#include "scale.cuh"

// Which rows belong to groups: those before `end`, or, with slots, of each slot its group's first sizes[e].
struct Live {
  i64 end;
  const i32* sizes;
  i64 slots;
  __device__ __forceinline__ bool operator()(i64 row) const {
    return row < end && (slots == 0 || row % slots < sizes[row / slots]);
  }
};

// All lanes of a warp call; what sizes claim beyond the rows that there are does not count.
DEVICE Live live_rows(const i32* sizes, i64 groups, i64 rows, i64 slots) {
  if (slots) return Live{min64(rows, groups * slots), sizes, slots};
  i64 total = 0;
  for (i64 e = threadIdx.x % 32; e < groups; e += 32) total += max64(sizes[e], 0);
#pragma unroll
  for (int lane = 16; lane; lane >>= 1) total += __shfl_xor_sync(~0u, total, lane);
  return Live{min64(total, rows), sizes, 0};
}

// How many of the eight columns from `column` on lie before `end`.
DEVICE int columns_left(i64 column, i64 end) {
  return column >= end ? 0 : end - column >= 8 ? 8 : (int)(end - column);
}

// Eight neighbours of a row as they lie in memory: 4 registers where X is 16 bits wide, 8 for float32.
template <typename X> struct Eight { u32 words[2 * sizeof(X)]; };

DEVICE float value(const Eight<f32>& x, int i) { return __uint_as_float(x.words[i]); }
DEVICE float value(const Eight<bf16>& x, int i) {
  return __uint_as_float(i % 2 ? x.words[i / 2] & 0xFFFF0000u : x.words[i / 2] << 16);
}
DEVICE float value(const Eight<f16>& x, int i) {
  return to_float(f16{(u16)(i % 2 ? x.words[i / 2] >> 16 : x.words[i / 2])});
}
DEVICE float value(const Eight<f64>& x, int i) {
  return to_float(__hiloint2double((int)x.words[2 * i + 1], (int)x.words[2 * i]));
}

// Each value rounded once, to nearest even.
DEVICE void round8(const float (&x)[8], Eight<f32>& to) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to.words[i] = __float_as_uint(x[i]);
}
DEVICE void round8(const float (&x)[8], Eight<bf16>& to) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to.words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
}
DEVICE void round8(const float (&x)[8], Eight<f16>& to) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(to.words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
}
template <typename X> DEVICE Eight<X> rounded8(const float (&x)[8]) {
  Eight<X> eight;
  round8(x, eight);
  return eight;
}

// The eight elements from `from` on, of which `valid` exist (0 to 8, the others become 0). `wide`: the
// address is a multiple of 16. The loop of the rare case shifts elements in from the top, so that it needs
// neither unrolling nor registers indexed at run time.
template <typename X> DEVICE Eight<X> read8(const X* from, int valid, bool wide) {
  constexpr int words = 2 * sizeof(X);
  Eight<X> eight{};
  if (wide && valid == 8) {
    const uint4* quads = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < words / 4; ++i) {
      const uint4 quad = quads[i];
      eight.words[4 * i] = quad.x, eight.words[4 * i + 1] = quad.y, eight.words[4 * i + 2] = quad.z,
      eight.words[4 * i + 3] = quad.w;
    }
  } else if (valid > 0) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      u32 bits = 0;
      if (i < valid)
        bits = sizeof(X) == 2 ? (u32) reinterpret_cast<const u16*>(from)[i]
                              : reinterpret_cast<const u32*>(from)[i];
#pragma unroll
      for (int w = 0; w < words; ++w) {
        const u32 above = w + 1 < words ? eight.words[(w + 1) % words] : bits;
        eight.words[w] = sizeof(X) == 2 ? __funnelshift_r(eight.words[w], above, 16) : above;
      }
    }
  }
  return eight;
}

template <typename X> DEVICE void write8(X* to, int valid, bool wide, Eight<X> eight) {
  constexpr int words = 2 * sizeof(X);
  if (wide && valid == 8) {
    uint4* quads = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < words / 4; ++i)
      quads[i] = make_uint4(eight.words[4 * i], eight.words[4 * i + 1], eight.words[4 * i + 2],
                            eight.words[4 * i + 3]);
  } else {
#pragma unroll 1
    for (int i = 0; i < valid; ++i) {
      if (sizeof(X) == 2)
        reinterpret_cast<u16*>(to)[i] = (u16)eight.words[0];
      else
        reinterpret_cast<u32*>(to)[i] = eight.words[0];
#pragma unroll
      for (int w = 0; w < words; ++w) {
        const u32 above = w + 1 < words ? eight.words[(w + 1) % words] : 0u;
        eight.words[w] = sizeof(X) == 2 ? __funnelshift_r(eight.words[w], above, 16) : above;
      }
    }
  }
}

// --- rows on their way to shared memory, where a thread reads only what it copied itself -------------------

DEVICE u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Eight elements from global to shared memory, without passing through registers.
DEVICE void copy8_async(T* to, const T* from) {
#pragma unroll
  for (int i = 0; i < 8 * sizeof(T); i += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i),
                 "l"(reinterpret_cast<const u8*>(from) + i)
                 : "memory");
}

DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for the thread's copies up to the end_of_copies() before the last `under_way` (1 to 3).
DEVICE void wait_for_copies(u32 under_way) {
  if (under_way == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else if (under_way == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 3;" ::: "memory");
}

// --- amax --------------------------------------------------------------------------------------------------

// max(most, |x|) of both halves of a word, NaN dropped; the signs of `most` mean nothing.
#if __CUDA_ARCH__ >= 860
DEVICE void pair_amax(u32& most, u32 x, bf16) {
  asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(x));
}
DEVICE void pair_amax(u32& most, u32 x, f16) {
  asm("max.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(most) : "r"(x));
}
#else
DEVICE void pair_amax(u32& most, u32 x, bf16) {
  asm("max.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(x & 0x7FFF7FFF));
}
DEVICE void pair_amax(u32& most, u32 x, f16) {
  asm("max.f16x2 %0, %0, %1;" : "+r"(most) : "r"(x & 0x7FFF7FFF));
}
#endif

// The running maximum of |x|, where NaN is dropped. Of 16-bit types two values at a time.
template <typename X, bool PAIRS = sizeof(X) == 2> struct Peak {
  float most = 0.0f;
  __device__ __forceinline__ void add(const Eight<X>& eight) {
#pragma unroll
    for (int i = 0; i < 8; ++i) most = amax_of(most, value(eight, i));
  }
  __device__ __forceinline__ float amax() const { return most; }
};
template <typename X> struct Peak<X, true> {
  u32 most = 0;
  __device__ __forceinline__ void add(const Eight<X>& eight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pair_amax(most, eight.words[i], X{});
  }
  __device__ __forceinline__ float amax() const {
    const Eight<X> pair{{most}};
    return fmaxf(fabsf(value(pair, 0)), fabsf(value(pair, 1)));
  }
};

// The same as floats, 0 throughout where `from` is null.
template <typename X> DEVICE void floats8(const X* from, int valid, bool wide, float (&to)[8]) {
  const Eight<X> eight = read8(from, from == nullptr ? 0 : valid, wide);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = value(eight, i);
}

// Element i of a list of int32 (wide = 0) or int64 (wide = 1) numbers.
DEVICE i64 number_at(const void* list, i64 i, i64 wide) {
  return wide ? static_cast<const i64*>(list)[i] : (i64) static_cast<const i32*>(list)[i];
}

// --- casts (fp8kit.backends.protocol.Cast) -----------------------------------------------------------------

// Where a kernel's result goes in FP8. Absent parts are null; amax may stand alone. The host packs it field
// by field (_rows.cast_bytes).
struct Cast {
  u8* q;               // (q_rows, q_columns), rows q_stride codes apart
  u8* q_t;             // (t_rows, t_columns), rows t_stride codes apart: the transposed codes
  const float* scale;
  float* scale_inv;
  float* amax;
  i64 q_rows, q_columns, q_stride;
  i64 t_rows, t_columns, t_stride;
  i64 is_e5m2;
  const float* known_amax;  // where the scale is to be made of it by the rule of current scaling, with these
  f64 epsilon;
  i64 power_2;

  __device__ __forceinline__ bool wanted() const { return q != nullptr || q_t != nullptr; }
};

// The scale, and 1 / scale written by the grid's first thread.
DEVICE float cast_scale(const Cast& cast) {
  if (!cast.wanted()) return 1.0f;
  const float scale = scale_of_cast(cast.scale, cast.known_amax, cast.is_e5m2 ? e5m2::MAX : e4m3::MAX,
                                    cast.epsilon, cast.power_2);
  if (blockIdx.x == 0 && thread_rank() == 0) *cast.scale_inv = 1.0f / scale;
  return scale;
}

// The codes of eight values, in two words.
DEVICE void encode8(const Cast& cast, const Eight<T>& values, float scale, u32 (&codes)[2]) {
  float scaled[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scaled[j] = value(values, j) * scale;
  if (cast.is_e5m2)
    encode_words<e5m2, 8>(scaled, codes);
  else
    encode_words<e4m3, 8>(scaled, codes);
}

// N codes (8 or 16), of which `valid` are written. `wide`: the address is a multiple of N.
template <int N> DEVICE void write_codes(u8* to, int valid, bool wide, const u32 (&codes)[N / 4]) {
  if (wide && valid >= N) {
    store_codes<N>(to, codes);
  } else {
    u32 rest[N / 4];
#pragma unroll
    for (int w = 0; w < N / 4; ++w) rest[w] = codes[w];
#pragma unroll 1
    for (int i = 0; i < valid && i < N; ++i) {
      to[i] = (u8)rest[0];
#pragma unroll
      for (int w = 0; w < N / 4; ++w)
        rest[w] = __funnelshift_r(rest[w], w + 1 < N / 4 ? rest[(w + 1) % (N / 4)] : 0u, 8);
    }
  }
}

// Four rows of eight codes into q at (row, column), its rows `stride` apart; rows from `rows` and
// columns from `end` on are not written. WHOLE: all are, and the addresses are multiples of 8. Otherwise
// `wide` says whether they are.
template <bool WHOLE>
DEVICE void write_q(u8* q, i64 stride, const u32 (&codes)[4][2], i64 row, i64 column, i64 rows, i64 end,
                    bool wide) {
  u8* to = q + row * stride + column;
  const int left = WHOLE ? 8 : columns_left(column, end);
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (WHOLE || row + k < rows) write_codes<8>(to + k * stride, left, WHOLE || wide, codes[k]);
}
