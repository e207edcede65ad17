// Copies between two strided arrays: where an element lies on both sides.
#pragma once
#include "common.cuh"

// Shape and strides (in elements) of both sides, innermost dimension last. unit: neighbours that
// one thread copies, 8 / size of an element when both innermost strides are 1 and everything is
// aligned to 8 bytes, else 1.
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
