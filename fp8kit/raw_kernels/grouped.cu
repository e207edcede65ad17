// functions: grouped_gemm (grouped_gemm, grouped_fp8_gemm)
// variants: LEFT=e4m3; RIGHT=e4m3,e5m2; T=f32,bf16,f16
// variants: LEFT=e5m2; RIGHT=e4m3; T=f32,bf16,f16
// variants: LEFT=f32; RIGHT=f32; T=f32
// variants: LEFT=bf16; RIGHT=bf16; T=bf16
// variants: LEFT=f16; RIGHT=f16; T=f16
//
// Groups of rows, each times a matrix of its own; the sizes of the groups lie on the device. One kernel for
// every chip, layout and granularity of scales: codes are decoded to float16, which is exact, and multiplied
// by mma.sync; float32 is multiplied on CUDA cores. A block makes 64 x 64 elements of the result, its four
// warps 32 x 32 each.

#include "fp8.cuh"
#include "tiles.cuh"

constexpr int TILE = 64, DEPTH = 32, PROMOTE = 128;
constexpr int PITCH = DEPTH + 8;  // of a row in shared memory: eight rows lie in different banks

// How an element lies in memory, and what it becomes in shared memory.
template <typename X> struct Element {
  typedef X stored;
  typedef X shared;
  static __device__ __forceinline__ shared read(stored x) { return x; }
};
template <typename F> struct Codes {
  typedef u8 stored;
  typedef f16 shared;
  static __device__ __forceinline__ shared read(stored x) { return f16{(u16)F::halves(x)}; }
};
template <> struct Element<e4m3> : Codes<e4m3> {};
template <> struct Element<e5m2> : Codes<e5m2> {};
typedef Element<LEFT>::shared S;

// An operand: element (i, k) of matrix e, k along the contraction; its scales by tiles, null where it
// has none.
struct Matrix {
  const void* data;
  const float* scales;
  i64 step_i, step_k, step_e;
  i64 tile_i, tile_k, scale_i, scale_k, scale_e;

  __device__ __forceinline__ float scale(i64 e, i64 i, i64 k) const {
    return scales[e * scale_e + i / tile_i * scale_i + k / tile_k * scale_k];
  }
};

struct Grouped {
  Matrix a, b;
  i64 groups, rows, columns, depth;  // rows and columns of the result's matrices; rows of a where they are
  i64 slots, by_depth;               // the contraction; whether groups lie along it
};

// Where a group lies: its rows are [start, start + size), and it takes up `cover` of them.
struct Group { i64 e, start, size, cover; };

DEVICE Group group_at(const i32* sizes, const Grouped& p, i64 e, i64 start, i64 total) {
  const i64 cover = max64(0, min64(p.slots ? p.slots : sizes[e], total - start));
  return {e, start, max64(0, min64(sizes[e], cover)), cover};
}

// Rows i0 ... of an operand, 64 of them, and 32 elements of the contraction from k0; 0 outside of [0, rows)
// and [from, to).
template <typename X>
DEVICE void read_tile(S (&to)[TILE][PITCH], const Matrix& m, i64 e, i64 i0, i64 rows, i64 k0, i64 from,
                      i64 end) {
  const typename Element<X>::stored* data = static_cast<const typename Element<X>::stored*>(m.data);
  const bool along_k = m.step_k == 1;
#pragma unroll 4
  for (int n = threadIdx.x; n < TILE * DEPTH; n += 128) {
    const int i = along_k ? n / DEPTH : n % TILE, k = along_k ? n % DEPTH : n / TILE;
    S value{};
    if (i0 + i < rows && k0 + k >= from && k0 + k < end)
      value = Element<X>::read(data[e * m.step_e + (i0 + i) * m.step_i + (k0 + k) * m.step_k]);
    to[i][k] = value;
  }
}

typedef Sums<2, 4> Part;  // of a warp: 32 rows, 32 columns

// part += a b^T of two tiles in shared memory: of 16-bit elements on tensor cores, of float32 one by one.
template <typename X>
DEVICE void multiply_tiles(Part& part, const X (&a)[TILE][PITCH], const X (&b)[TILE][PITCH], int row,
                           int column) {
  const int g = lane() / 4, t = 2 * (lane() % 4);
  if constexpr (sizeof(X) == 4) {
#pragma unroll 4
    for (int k = 0; k < DEPTH; ++k)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            part.at[m][n][c] = fmaf(a[row + 16 * m + g + c / 2 * 8][k], b[column + 8 * n + t + c % 2][k],
                                    part.at[m][n][c]);
  } else {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
      u32 left[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          left[m][r] =
              *reinterpret_cast<const u32*>(&a[row + 16 * m + g + r % 2 * 8][k + t + r / 2 * 8]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const X* right = &b[column + 8 * n + g][k + t];
        const u32 low = *reinterpret_cast<const u32*>(right),
                  high = *reinterpret_cast<const u32*>(right + 8);
#pragma unroll
        for (int m = 0; m < 2; ++m) multiply(part.at[m][n], left[m], low, high, X{});
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
grouped_gemm(const i32* sizes, const T* bias, T* out, const __grid_constant__ Grouped p) {
  __shared__ S left[TILE][PITCH], right[TILE][PITCH];
  const i64 across = ceil_div(p.columns, TILE), column0 = blockIdx.x % across * TILE;
  i64 tile = blockIdx.x / across;
  Group group{0, 0, 0, 0};
  i64 row0, rows, from, to, first_row = 0;  // this block's first row, their end; the contraction's limits
  if (p.by_depth) {
    const i64 down = ceil_div(p.rows, TILE);
    for (i64 e = 0;; ++e) {
      group = group_at(sizes, p, e, group.start + group.cover, p.depth);
      if (e == tile / down) break;
    }
    row0 = tile % down * TILE, rows = p.rows, from = group.start, to = group.start + group.size;
    first_row = group.e * p.rows;
  } else {
    i64 e = 0;
    for (; e < p.groups; ++e) {
      group = group_at(sizes, p, e, group.start + group.cover, p.rows);
      if (tile < ceil_div(group.cover, TILE)) break;
      tile -= ceil_div(group.cover, TILE);
    }
    if (e == p.groups) {  // the rows of no group
      const i64 start = group.start + group.cover;
      group = {0, start, 0, p.rows - start};
    }
    row0 = group.start + tile * TILE, rows = group.start + group.size, from = 0, to = p.depth;
    if (row0 >= group.start + group.cover) return;
    if (row0 >= rows) to = 0;
  }

  const int warp = threadIdx.x / 32, row = warp / 2 * 32, column = warp % 2 * 32;
  const int g = lane() / 4, t = 2 * (lane() % 4);
  const i64 e = p.by_depth ? 0 : group.e;  // of b; a has one matrix
  Part part, total;
  part.clear(), total.clear();
  for (i64 k0 = from / DEPTH * DEPTH; k0 < to; k0 += DEPTH) {
    read_tile<LEFT>(left, p.a, 0, row0, rows, k0, from, to);
    read_tile<RIGHT>(right, p.b, e, column0, p.columns, k0, from, to);
    __syncthreads();
    multiply_tiles(part, left, right, row, column);
    __syncthreads();
    if (p.a.scales == nullptr || ((k0 + DEPTH) % PROMOTE && k0 + DEPTH < to)) continue;
    float right_scales[4][2];  // of this lane's columns; beyond the last one that one's
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        right_scales[n][c] = p.b.scale(e, min64(column0 + column + 8 * n + t + c, p.columns - 1), k0);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float left_scale = p.a.scale(0, min64(row0 + row + 16 * m + g + 8 * h, rows - 1), k0);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            total.at[m][n][2 * h + c] = fmaf(part.at[m][n][2 * h + c], left_scale * right_scales[n][c],
                                             total.at[m][n][2 * h + c]);
      }
    part.clear();
  }

  const i64 end = p.by_depth ? rows : group.start + group.cover;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 i = row0 + row + 16 * m + g + 8 * h;
      if (i >= end) continue;
      T* to_row = out + (first_row + i) * p.columns;
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const i64 j = column0 + column + 8 * n + t + c;
          if (j >= p.columns) continue;
          float value = p.a.scales == nullptr ? part.at[m][n][2 * h + c] : total.at[m][n][2 * h + c];
          if (bias != nullptr && i < rows) value += to_float(bias[group.e * p.columns + j]);
          to_row[j] = from_float<T>(value);
        }
    }
}
