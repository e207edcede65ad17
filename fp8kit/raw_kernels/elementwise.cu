// functions: add, convert, move1, move2, move4, rng_next
// variants: T=f32,bf16,f16
//
// Small things: sums of two arrays, copies between strided arrays (`moveN` of N-byte elements as they are, `convert` from T to another
// type), and the generator's next state.

#include "rows.cuh"

// out = a + b over n elements; b has `period` elements, a divisor of n, and repeats.
extern "C" __global__ void __launch_bounds__(256) add(const T* a, const T* b, T* out, i64 n, i64 period) {
  const bool wide = rows_aligned<16>(a, 0) && rows_aligned<16>(out, 0), wide_b = rows_aligned<16>(b, 0) && (n == period || period % 8 == 0);
  for (i64 i = first() * 8; i < n; i += step() * 8) {
    const int valid = columns_left(i, n);
    const Eight<T> left = read8(a + i, valid, wide);
    i64 j0 = n == period ? i : i % period;
    float v[8];
    if (wide_b) {
      const Eight<T> right = read8(b + j0, valid, true);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = value(left, j) + value(right, j);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = value(left, j) + (j < valid ? to_float(b[j0]) : 0.0f);
        if (++j0 == period) j0 = 0;
      }
    }
    write8(out + i, valid, wide, rounded8<T>(v));
  }
}

// --- strided copies --------------------------------------------------------------------------------------------------------

// Shape and strides (in elements) of both sides, innermost dimension last. unit: neighbours that one thread copies, 8 / size of an element
// when both innermost strides are 1 and everything is aligned to 8 bytes, else 1.
struct Layout {
  i64 shape[5], from[5], to[5], unit;
};

struct Offsets { i64 from, to; };

// Quotient and remainder; 32-bit division where both fit, which costs a fraction.
DEVICE u64 divide(u64 a, u64 b, u64& rest) {
  if ((a | b) >> 32 == 0) {
    rest = (u32)a % (u32)b;
    return (u32)a / (u32)b;
  }
  rest = a % b;
  return a / b;
}

// Where unit i of the copy starts on both sides.
DEVICE Offsets offsets_of(const Layout& layout, u64 i) {
  u64 rest;
  i = divide(i, (u64)(layout.shape[4] / layout.unit), rest);
  rest *= layout.unit;
  Offsets at{(i64)rest * layout.from[4], (i64)rest * layout.to[4]};
#pragma unroll
  for (int d = 3; d >= 0; --d) {
    if (layout.shape[d] == 1) continue;
    i = divide(i, layout.shape[d], rest);
    at.from += (i64)rest * layout.from[d];
    at.to += (i64)rest * layout.to[d];
  }
  return at;
}

template <typename W> DEVICE void move(const W* x, W* y, i64 units, const Layout& layout) {
  for (i64 i = first(); i < units; i += step()) {
    const Offsets at = offsets_of(layout, (u64)i);
    if (layout.unit == 1)
      y[at.to] = x[at.from];
    else
      *reinterpret_cast<uint2*>(y + at.to) = *reinterpret_cast<const uint2*>(x + at.from);
  }
}

extern "C" __global__ void __launch_bounds__(256) move1(const u8* x, u8* y, i64 units, const __grid_constant__ Layout layout) {
  move(x, y, units, layout);
}
extern "C" __global__ void __launch_bounds__(256) move2(const u16* x, u16* y, i64 units, const __grid_constant__ Layout layout) {
  move(x, y, units, layout);
}
extern "C" __global__ void __launch_bounds__(256) move4(const u32* x, u32* y, i64 units, const __grid_constant__ Layout layout) {
  move(x, y, units, layout);
}

template <typename Y> DEVICE void convert_to(const T* x, void* y, const Offsets& at, i64 unit) {
  Y* to = static_cast<Y*>(y) + at.to;
  if (unit == 1) {
    *to = from_float<Y>(to_float(x[at.from]));
  } else {
    float v[8];
    floats8(x + at.from, 8, true, v);
    write8(to, 8, true, rounded8<Y>(v));
  }
}

// y's type: 0 float32, 1 bfloat16, 2 float16. unit: 8 where both sides are aligned to 16 bytes and rows are multiples of 8, else 1.
extern "C" __global__ void __launch_bounds__(256) convert(const T* x, void* y, i64 units, i64 type, const __grid_constant__ Layout layout) {
  for (i64 i = first(); i < units; i += step()) {
    const Offsets at = offsets_of(layout, (u64)i);
    if (type == 0)
      convert_to<f32>(x, y, at, layout.unit);
    else if (type == 1)
      convert_to<bf16>(x, y, at, layout.unit);
    else
      convert_to<f16>(x, y, at, layout.unit);
  }
}

// out = state; state[1] += 1. One thread.
extern "C" __global__ void rng_next(i64* state, i64* out) {
  const i64 seed = state[0], offset = state[1];
  out[0] = seed;
  out[1] = offset;
  state[1] = offset + 1;
}
