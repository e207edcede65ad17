// y = ACT(x + bias) and its gradient, each cast by blocks of 128 (block.cuh) from the values that T holds,
// and written as T beside that where it is wanted: the passes of activation.cu and block.cu in one, with the
// same bits.
//
// functions: block_act_fwd (act_fwd), block_act_bwd (act_bwd)
// variants: ACT=gelu,qgelu,relu,silu,srelu; T=f32,bf16,f16
// variants: ACT=geglu,glu,qgeglu,reglu,sreglu,swiglu,clamped_swiglu; T=f32,bf16,f16
//
// A thread block takes squares of the result one below the other, so that column sums are few. The gradient
// of a gated activation has a square in each half of its columns for the same elements of dy and x: blocks
// side by side take them, and the second reads from the L2 cache.

#include "activation.cuh"
#include "block.cuh"

constexpr int PARTS = ACT::gated ? 2 : 1;  // column halves of x that one column of y depends on

// Thread blocks that shall fit a multiprocessor; chips without FP8 instructions need more registers.
constexpr int MOST_BLOCKS = sizeof(T) == 4 || (PARTS == 2 && __CUDA_ARCH__ < 890) ? 1 : 2;

// act(x + bias). ``READS``: elements that one of the result is made of; ``AHEAD``: rows whose loads are under
// way together.
struct Forward {
  static constexpr int READS = PARTS, AHEAD = E;
  const T *x, *bias;
  T* out;  // may be null
  i64 rows, columns, F;
  Params params;

  __device__ __forceinline__ bool aligned() const {
    return F % E == 0 && rows_aligned<16>(x, F) && rows_aligned<16>(out, F) && rows_aligned<16>(bias, F);
  }
  __device__ __forceinline__ const T* source(int i, i64 row, i64 column) const {
    return x + row * PARTS * F + i * F + column;
  }
  __device__ __forceinline__ i64 bias_column(i64 column) const { return column; }
  __device__ __forceinline__ float made(const float (&in)[READS], const float (&shift)[PARTS], i64) const {
    return activated<ACT>(in[0] + shift[0], in[READS - 1] + shift[PARTS - 1], params);
  }
  __device__ __forceinline__ void add(const Eight<T>& made) const {}
};

// Its gradient. Columns are those of dx.
struct Backward {
  static constexpr int READS = 1 + PARTS, AHEAD = E / (2 * PARTS);
  const T *dy, *x, *bias;
  T* out;
  i64 rows, columns, F;
  Params params;
  float sums[E];  // of the thread's columns

  __device__ __forceinline__ bool aligned() const {
    return F % E == 0 && rows_aligned<16>(dy, F) && rows_aligned<16>(x, F) && rows_aligned<16>(out, F) &&
           rows_aligned<16>(bias, F);
  }
  __device__ __forceinline__ i64 bias_column(i64 column) const {
    return PARTS == 2 && column >= F ? column - F : column;
  }
  __device__ __forceinline__ const T* source(int i, i64 row, i64 column) const {
    const i64 from = bias_column(column);
    return i == 0 ? dy + row * F + from : x + row * PARTS * F + (i - 1) * F + from;
  }
  __device__ __forceinline__ float made(const float (&in)[READS], const float (&shift)[PARTS],
                                        i64 column) const {
    const float a = in[1] + shift[0], second = in[READS - 1] + shift[PARTS - 1];
    if (PARTS == 1 || column < F) return gradients<ACT>(in[0], a, second, params).x;
    return gradients<ACT>(in[0], a, second, params).y;
  }
  __device__ __forceinline__ void add(const Eight<T>& made) {
#pragma unroll
    for (int c = 0; c < E; ++c) sums[c] += value(made, c);
  }
};

// What ``cast_square`` loads: the results of an ``Of``, rounded to T. ``wide``: eight neighbours lie in one
// half and are read and written at once.
template <typename Of> struct Made {
  Of& of;
  bool wide;

  __device__ __forceinline__ void finish(const Eight<T>& made, i64 row, i64 column, T (&raw)[E]) const {
    if (of.out != nullptr && row < of.rows)
      write8(of.out + row * of.columns + column, columns_left(column, of.columns), wide, made);
#pragma unroll
    for (int i = 0; i < 2 * sizeof(T); ++i) reinterpret_cast<u32*>(raw)[i] = made.words[i];
    of.add(made);
  }

  __device__ __forceinline__ void operator()(i64 row, i64 column, T (&raw)[E][E]) const {
    if (wide) {
      const bool inside = column < of.columns;
      float shifts[PARTS][E];
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
        floats8(of.bias == nullptr ? of.bias : of.bias + p * of.F + of.bias_column(column), inside ? E : 0,
                true, shifts[p]);
#pragma unroll
      for (int start = 0; start < E; start += Of::AHEAD) {
        Eight<T> in[Of::AHEAD][Of::READS];
#pragma unroll
        for (int r = 0; r < Of::AHEAD; ++r)
#pragma unroll
          for (int i = 0; i < Of::READS; ++i) {
            in[r][i] = Eight<T>{};
            if (inside && row + start + r < of.rows)
              in[r][i] = read8(of.source(i, row + start + r, column), E, true);
          }
#pragma unroll
        for (int r = 0; r < Of::AHEAD; ++r) {
          const bool there = inside && row + start + r < of.rows;
          float v[E];
#pragma unroll
          for (int c = 0; c < E; ++c) {
            float read[Of::READS], shift[PARTS];
#pragma unroll
            for (int i = 0; i < Of::READS; ++i) read[i] = value(in[r][i], c);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) shift[p] = shifts[p][c];
            v[c] = of.made(read, shift, column);
          }
          finish(there ? rounded8<T>(v) : Eight<T>{}, row + start + r, column, raw[start + r]);
        }
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < E; ++r) {
      Eight<T> made{};
#pragma unroll 1
      for (int c = 0; c < E; ++c) {
        float v = 0.0f;
        if (row + r < of.rows && column + c < of.columns) {
          float read[Of::READS], shift[PARTS];
#pragma unroll
          for (int i = 0; i < Of::READS; ++i) read[i] = to_float(*of.source(i, row + r, column + c));
#pragma unroll
          for (int p = 0; p < PARTS; ++p)
            shift[p] = of.bias == nullptr ? 0.0f : to_float(of.bias[p * of.F + of.bias_column(column + c)]);
          v = of.made(read, shift, column + c);
        }
        push(made, from_float<T>(v));
      }
      finish(made, row + r, column, raw[r]);
    }
  }

  // Shift an element in from the top, which needs no registers indexed at run time.
  static __device__ __forceinline__ void push(Eight<T>& eight, T x) {
    constexpr int words = 2 * sizeof(T);
    const u32 bits = bits_of(x);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      const u32 above = w + 1 < words ? eight.words[(w + 1) % words] : bits;
      eight.words[w] = sizeof(T) == 2 ? __funnelshift_r(eight.words[w], above, 16) : above;
    }
  }
  static __device__ __forceinline__ u32 bits_of(f32 x) { return __float_as_uint(x); }
  static __device__ __forceinline__ u32 bits_of(bf16 x) { return x.bits; }
  static __device__ __forceinline__ u32 bits_of(f16 x) { return x.bits; }
};

// Squares of the result, one below the other: the thread block's ``walk``, from ``begin`` on and before
// ``end``. Thread blocks go from the last to the first; where both halves of the columns are whole squares,
// those of one place in both halves stand side by side.
struct Walk {
  i64 column, begin, end, row_block;
};

DEVICE Walk walk_of(i64 columns, i64 begin, i64 end, i64 walk, bool halves) {
  const i64 across = ceil_div(columns, B), block = block_from_the_end();
  i64 column = block % across;
  if (halves && columns % (2 * B) == 0) column = column / 2 + column % 2 * (across / 2);
  const i64 first = begin + block / across * walk;
  return Walk{column, first, min64(first + walk, end), first / walk};
}

template <typename Of>
DEVICE void cast_made(Shared& shared, Of& of, const Walk& at, const Blocks& to, bool is_e5m2) {
  Made<Of> load{of, of.aligned()};
  for (i64 tile_row = at.begin; tile_row < at.end; ++tile_row) {
    if (tile_row != at.begin) __syncthreads();
    cast_square(shared, tile_row, at.column, load, to, is_e5m2);
  }
}

// x: (M, PARTS * F), y: (M, F) or null; the rest as block_quantize's. One square a thread block.
extern "C" __global__ void __launch_bounds__(256, MOST_BLOCKS)
block_act_fwd(const T* x, const T* bias, T* y, i64 M, i64 F, f64 limit, f64 alpha, f64 offset, u8* q,
              float* scale_inv, u8* q_t, float* scale_inv_t, i64 q_rows, i64 qt_rows, i64 square,
              f64 fp8_max, f64 epsilon, f64 value_for_inf, i64 power_2, i64 is_e5m2) {
  start_early();
  __shared__ Shared shared;
  Forward of{x, bias, y, M, F, F, Params{(float)limit, (float)alpha, (float)offset}};
  const Blocks to{q,      scale_inv, q_t,    scale_inv_t, M,       F,
                  q_rows, qt_rows,   square, fp8_max,     epsilon, value_for_inf, power_2};
  cast_made(shared, of, walk_of(F, 0, ceil_div(M, B), 1, false), to, is_e5m2 != 0);
}

// dy: (M, F), x and dx: (M, PARTS * F), dx or null. Rows of squares from ``begin`` on and before ``end``,
// ``walk`` of them a thread block. partial: float32 (rows of squares / walk, rounded up; PARTS * F), the
// column sums of each block's rows, or null.
extern "C" __global__ void __launch_bounds__(256, MOST_BLOCKS)
block_act_bwd(const T* dy, const T* x, const T* bias, T* dx, float* partial, i64 M, i64 F, i64 begin, i64 end,
              i64 walk, f64 limit, f64 alpha, f64 offset, u8* q, float* scale_inv, u8* q_t,
              float* scale_inv_t, i64 q_rows, i64 qt_rows, i64 square, f64 fp8_max, f64 epsilon,
              f64 value_for_inf, i64 power_2, i64 is_e5m2) {
  start_early();
  __shared__ Shared shared;
  const i64 width = PARTS * F;
  Backward of{dy, x, bias, dx, M, width, F, Params{(float)limit, (float)alpha, (float)offset}, {}};
  const Blocks to{q,      scale_inv, q_t,    scale_inv_t, M,       width,
                  q_rows, qt_rows,   square, fp8_max,     epsilon, value_for_inf, power_2};
  const Walk at = walk_of(width, begin, end, walk, PARTS == 2);
  cast_made(shared, of, at, to, is_e5m2 != 0);
  if (partial == nullptr) return;

  // over the warp's two rows of threads, then over the warps
  float (&sums_of_warps)[8][B] = shared.column_amax;
  __syncthreads();
#pragma unroll
  for (int c = 0; c < E; ++c) {
    const float sum = of.sums[c] + __shfl_xor_sync(~0u, of.sums[c], 16);
    if (threadIdx.x % 32 < 16) sums_of_warps[threadIdx.x / 32][threadIdx.x % 16 * E + c] = sum;
  }
  __syncthreads();
  const i64 column = at.column * B + threadIdx.x;
  if (threadIdx.x < B && column < width) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += sums_of_warps[w][threadIdx.x];
    partial[at.row_block * width + column] = sum;
  }
}
