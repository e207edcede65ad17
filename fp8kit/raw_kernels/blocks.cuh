// Blocks along the contraction: what casts by blocks and rotations share. A thread has 16 neighbours along
// the contraction, a line; eight lanes in a row have 128 of them, and everything that more than 16 share (an
// amax, a rotation) goes through shuffles among these eight.
#pragma once
#include "philox.cuh"
#include "rows.cuh"

constexpr int LINE = 16, LINES = 8, SPAN = LINE * LINES;

// How a matrix is rotated along its contraction.
struct Rotation {
  i32 n;       // values that are rotated together: 16 to 128; 0: it is not rotated
  i32 random;  // whether signs are drawn; else they repeat every 16, as
  i32 flips;   // says: bit k is set where the sign of index k is minus
  float root;  // 1 / sqrt(n)
};

// Bit i is set where the sign of index `from` + i along the contraction is minus, i < 16; from % 16 is 0.
DEVICE u32 flips_of(const Rotation& how, const i64* rng, i64 from) {
  if (!how.n || !how.random) return (u32)how.flips;
  const u32 word = philox_word(load_rng(rng), (1ull << 63) + (u64)(from >> 5));
  return word >> (from & 16) & 0xFFFFu;
}

// v rotated, the thread's line of n / 16. `whole`: whether all n exist; else they stay as they are. `place`:
// number of the line among the eight.
DEVICE void rotate_line(const Rotation& how, u32 flips, bool whole, u32 place, float (&v)[LINE]) {
  if (!how.n) return;
  if (whole) {
    if (flips) {
#pragma unroll
      for (int i = 0; i < LINE; ++i)
        v[i] = __uint_as_float(__float_as_uint(v[i]) ^ (flips << (31 - i) & 0x80000000u));
    }
#pragma unroll
    for (int d = 1; d < LINE; d *= 2) {
#pragma unroll
      for (int i = 0; i < LINE; ++i) {
        if (i & d) continue;
        const float low = v[i], high = v[i + d];
        v[i] = low + high;
        v[i + d] = low - high;
      }
    }
  }
#pragma unroll 1
  for (u32 d = 1; LINE * d < how.n; d *= 2) {
    const u32 minus = place & d ? 0x80000000u : 0u;
#pragma unroll
    for (int i = 0; i < LINE; ++i) {
      const float other = __shfl_xor_sync(~0u, v[i], d);
      const float own = __uint_as_float(__float_as_uint(v[i]) ^ minus);
      v[i] = whole ? other + own : v[i];
    }
  }
  if (whole) {
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] *= how.root;
  }
}

// Whether all values that are rotated with those from `from` on lie before `end`.
DEVICE bool whole_group(const Rotation& how, i64 from, i64 end) {
  return how.n && (from & ~(i64)(how.n - 1)) + how.n <= end;
}

DEVICE float max_nan(float a, float b) {  // NaN where one is
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

// --- panels ------------------------------------------------------------------------------------------------
// 128 rows of 64 columns in shared memory, for lines that lie down the columns: a thread takes 16 rows of a
// pair of columns, so that a warp has eight lines of four pairs. The 16-byte chunks of row r lie at places
// ^ (r / 16), which gives the lanes of a warp 32 banks.

constexpr int PANEL = 64, PAIRS = PANEL / 2;

// The lane's line among eight, and its pair of columns.
DEVICE u32 line_place() { return threadIdx.x % LINES; }
DEVICE u32 line_pair() { return threadIdx.x / 32 * 4 + threadIdx.x % 32 / LINES; }

template <typename E> struct Panel {
  static constexpr int CHUNKS = PANEL * sizeof(E) / 16, PER_EIGHT = 8 * sizeof(E) / 16;
  static constexpr int PER_CHUNK = 16 / (2 * sizeof(E));  // pairs
  uint4 chunks[SPAN][CHUNKS];

  __device__ __forceinline__ void put(u32 row, u32 eight, const Eight<E>& values) {
#pragma unroll
    for (int k = 0; k < PER_EIGHT; ++k)
      chunks[row][(eight * PER_EIGHT + k) ^ (row / LINE)] =
          make_uint4(values.words[4 * k], values.words[4 * k + 1], values.words[4 * k + 2],
                     values.words[4 * k + 3]);
  }
  __device__ __forceinline__ Eight<E> get(u32 row, u32 eight) const {
    Eight<E> values;
#pragma unroll
    for (int k = 0; k < PER_EIGHT; ++k) {
      const uint4 chunk = chunks[row][(eight * PER_EIGHT + k) ^ (row / LINE)];
      values.words[4 * k] = chunk.x, values.words[4 * k + 1] = chunk.y, values.words[4 * k + 2] = chunk.z,
      values.words[4 * k + 3] = chunk.w;
    }
    return values;
  }
  __device__ __forceinline__ E* at(u32 row, u32 pair) {
    uint4* chunk = &chunks[row][(pair / PER_CHUNK) ^ (row / LINE)];
    return reinterpret_cast<E*>(chunk) + pair % PER_CHUNK * 2;
  }
};

// The panel whose first element is row `top`, column `left` of x; what lies outside of x is 0. Starts and
// ends with a barrier.
template <typename E>
DEVICE void read_panel(Panel<E>& panel, const T* x, i64 rows, i64 columns, i64 top, i64 left) {
  constexpr int turns = SPAN * PANEL / 8 / 256;
  const bool wide = rows_aligned<16>(x, columns);
  Eight<T> in[turns];
#pragma unroll
  for (int k = 0; k < turns; ++k) {
    const u32 at = threadIdx.x + 256 * k;
    const i64 row = top + at / 8, column = left + at % 8 * 8;
    in[k] = read8(x + row * columns + column, row < rows ? columns_left(column, columns) : 0, wide);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < turns; ++k) {
    const u32 at = threadIdx.x + 256 * k;
    Eight<E> values;
    if constexpr (sizeof(E) == sizeof(T)) {
#pragma unroll
      for (int w = 0; w < 2 * sizeof(E); ++w) values.words[w] = in[k].words[w];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) values.words[i] = __float_as_uint(value(in[k], i));
    }
    panel.put(at / 8, at % 8, values);
  }
  __syncthreads();
}

// The panel to memory, rounded to an X. Starts with a barrier.
template <typename E, typename X>
DEVICE void write_panel(const Panel<E>& panel, X* out, i64 rows, i64 columns, i64 top, i64 left) {
  const bool wide = rows_aligned<16>(out, columns);
  __syncthreads();
#pragma unroll 2
  for (u32 at = threadIdx.x; at < SPAN * PANEL / 8; at += 256) {
    const i64 row = top + at / 8, column = left + at % 8 * 8;
    if (row >= rows) continue;
    const Eight<E> values = panel.get(at / 8, at % 8);
    Eight<X> rounded;
    if constexpr (sizeof(E) == sizeof(X)) {
#pragma unroll
      for (int w = 0; w < 2 * sizeof(E); ++w) rounded.words[w] = values.words[w];
    } else {
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = value(values, i);
      rounded = rounded8<X>(eight);
    }
    write8(out + row * columns + column, columns_left(column, columns), wide, rounded);
  }
}
