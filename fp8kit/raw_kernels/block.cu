// Current scaling by blocks of 128: a matrix and its transpose, each cast with its own scales, in one pass.
//
// functions: block_quantize (block_quantize, fp8_gemm_lines), block_quantize_stack, block_quantize_groups
// variants: T=f32,bf16,f16; FORMAT=e4m3,e5m2
#include "block.cuh"

constexpr bool E5M2 = FORMAT::MAX == e5m2::MAX;

// A matrix as it lies, in which rows that are not live count as zeros.
struct Plain {
  const T* x;
  i64 columns;
  Live live;

  __device__ __forceinline__ void operator()(i64 row, i64 column, T (&raw)[E][E]) const {
    // all loads first, so that they are under way together
    const bool wide = rows_aligned<16>(x, columns) && column + E <= columns;
#pragma unroll
    for (int r = 0; r < E; ++r) {
      const T* from = x + (row + r) * columns + column;
      if (wide && live(row + r)) {
        load_bytes<E * sizeof(T)>(from, raw[r]);
      } else {
#pragma unroll
        for (int c = 0; c < E; ++c)
          raw[r][c] = live(row + r) && column + c < columns ? from[c] : from_float<T>(0.0f);
      }
    }
  }
};

// The square of number ``tile``, squares across first.
DEVICE void cast_plain(i64 tile, const Plain& load, const Blocks& to) {
  __shared__ Shared shared;
  const i64 across = ceil_div(to.columns, B);
  cast_square(shared, tile / across, tile % across, load, to, E5M2);
}

// A one-dimensional grid, a block a square.
extern "C" __global__ void __launch_bounds__(256)
block_quantize(const T* x, u8* q, float* scale_inv, u8* q_t, float* scale_inv_t, i64 rows, i64 columns,
               i64 q_rows, i64 qt_rows, i64 square, f64 fp8_max, f64 epsilon, f64 value_for_inf,
               i64 power_2) {
  const Blocks to{q,       scale_inv, q_t,    scale_inv_t, rows,    columns,
                  q_rows,  qt_rows,   square, fp8_max,     epsilon, value_for_inf, power_2};
  cast_plain(blockIdx.x, Plain{x, columns, Live{rows}}, to);
}

// Matrices one after the other, in x and in all that is written: a matrix has `scales` scales for q and
// `scales_t` for q_t. A one-dimensional grid, a block a square, those of a matrix one after the other.
extern "C" __global__ void __launch_bounds__(256)
block_quantize_stack(const T* x, u8* q, float* scale_inv, u8* q_t, float* scale_inv_t, i64 rows, i64 columns,
                     i64 q_rows, i64 qt_rows, i64 scales, i64 scales_t, i64 square, f64 fp8_max, f64 epsilon,
                     f64 value_for_inf, i64 power_2) {
  const i64 across = ceil_div(columns, B), down = ceil_div(rows, B);
  const u32 squares = (u32)(across * down), matrix = blockIdx.x / squares;
  if (q != nullptr) q += matrix * q_rows * across * B, scale_inv += matrix * scales;
  if (q_t != nullptr) q_t += matrix * qt_rows * down * B, scale_inv_t += matrix * scales_t;
  const Blocks to{q,       scale_inv, q_t,    scale_inv_t, rows,    columns,
                  q_rows,  qt_rows,   square, fp8_max,     epsilon, value_for_inf, power_2};
  cast_plain(blockIdx.x % squares, Plain{x + matrix * rows * columns, columns, Live{rows}}, to);
}

// `block_quantize`, in which rows of no group count as zeros.
extern "C" __global__ void __launch_bounds__(256)
block_quantize_groups(const T* x, u8* q, float* scale_inv, u8* q_t, float* scale_inv_t, i64 rows, i64 columns,
                      i64 q_rows, i64 qt_rows, i64 square, f64 fp8_max, f64 epsilon, f64 value_for_inf,
                      i64 power_2, const i32* sizes, i64 groups, i64 slots) {
  const Live live = live_rows(sizes, groups, rows, slots);
  const Blocks to{q,       scale_inv, q_t,    scale_inv_t, rows,    columns,
                  q_rows,  qt_rows,   square, fp8_max,     epsilon, value_for_inf, power_2};
  cast_plain(blockIdx.x, Plain{x, columns, live}, to);
}
