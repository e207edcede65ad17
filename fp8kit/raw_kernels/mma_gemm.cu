// FP8 products on any chip with 16-bit tensor cores (mma.sync, compute capability 8.0 and later):
// out = (a scales) (b scales)^T + bias + addend, a (m, k), b (n, k), rows of k codes.
//
// functions: mma_gemm (fp8_gemm, block_gemm)
// variants: LEFT=e4m3; RIGHT=e4m3,e5m2; T=f32,bf16,f16; BM=128,32; SCALES=whole; PROMOTE=0,128
// variants: LEFT=e4m3; RIGHT=e4m3,e5m2; T=f32,bf16,f16; BM=128,32;
//   SCALES=lines_squares,squares_lines,lines_lines; PROMOTE=128
// variants: LEFT=e5m2; RIGHT=e4m3; T=f32,bf16,f16; BM=128,32; SCALES=whole; PROMOTE=0,128
// variants: LEFT=e5m2; RIGHT=e4m3; T=f32,bf16,f16; BM=128,32;
//   SCALES=lines_squares,squares_lines,lines_lines; PROMOTE=128
// spills: 112 bytes on sm_90a, sm_100a, where mma.sync decodes codes in registers first
// spills: 16 bytes on sm_80, sm_120a
//
// A block makes one BM x 128 tile of the result. Its eight warps copy tiles of 128 codes of the contraction
// into a ring of three places in shared memory, two ahead of the products, and each warp multiplies its part
// of the rows with its part of the columns. Simpler than hopper_gemm.cu, and slower on a Hopper GPU.
//
// Sums: those of the chip's FP8 instruction; before 8.9, which has none, of its float16 one. PROMOTE: after
// how many codes such a sum is added to a float32 one; 0: never. With SCALES of blocks the sum of 128 codes
// is scaled before it is added.
#include "fp8.cuh"
#include "tiles.cuh"

constexpr int BN = 128, DEPTH = 128, STAGES = 3, THREADS = 256;
constexpr int WARP_ROWS = BM / 2, WARP_COLUMNS = BN / 4;  // of the tile, a warp's: two warps by four
constexpr int M = WARP_ROWS / 16, N = WARP_COLUMNS / 8;
// a scale for a tensor or for each row; for lines of 1 x 128 codes, squares of 128 x 128
enum Scales { whole, lines_squares, squares_lines, lines_lines };
constexpr bool A_LINES = SCALES == lines_squares || SCALES == lines_lines;
constexpr bool B_LINES = SCALES == squares_lines || SCALES == lines_lines;
static_assert(BM % 32 == 0, "BM, rows of a tile, is a multiple of 32: two warps share them");
static_assert(PROMOTE == 0 || PROMOTE == DEPTH, "PROMOTE, codes of a sum that is promoted, is 0 or 128");
static_assert(SCALES == whole || PROMOTE, "SCALES of blocks are those of 128 codes: PROMOTE is 128");
typedef Tile<BM, DEPTH / 2> Left;  // two codes are one element
typedef Tile<BN, DEPTH / 2> Right;
constexpr int STAGE = Left::bytes + Right::bytes;

// Strides in elements; addend's are out's. Scales of row r at depth d, in blocks of 128: of a tensor [0], of
// a row [r], of lines [d step + r], of squares [r / 128 step + d]. `step` is 1 for rows, 0 for tensors.
struct Job {
  const u8 *a, *b;
  const float *a_scale, *b_scale;
  const T *bias, *addend;
  T* out;
  i64 m, n, k, a_stride, b_stride, out_stride, a_step, b_step;
};

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
struct Codes {};  // in the place of an element type

// 32 codes of the contraction. Fragments of codes lie as those of 16-bit elements, two to an element.
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Codes) {
#if __CUDA_ARCH__ >= 890 && !defined(BY_BITS)
  asm("mma.sync.aligned.m16n8k32.row.col.f32." TEXT(LEFT) "." TEXT(RIGHT) ".f32 {%0,%1,%2,%3}, "
      "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else  // no FP8 instruction: codes become float16, exactly, and 16 are multiplied at once; a lane's first
       // halves of 4 codes are the first 8 of 16, its second halves the others, in a and b alike
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const u32 upper = a[2 * part], lower = a[2 * part + 1], b = part ? b1 : b0;
    const u32 rows[4] = {LEFT::halves((u16)upper), LEFT::halves((u16)lower), LEFT::halves((u16)(upper >> 16)),
                         LEFT::halves((u16)(lower >> 16))};
    multiply(c, rows, RIGHT::halves((u16)b), RIGHT::halves((u16)(b >> 16)), f16());
  }
#endif
}

// --- scales of blocks --------------------------------------------------------------------------------------

// Of lines, those of one block of the contraction for this lane's rows (APART 8) or columns (APART 1): pairs,
// that far apart, from `first` on, of which `count` exist. Of squares the one that they all lie in.
template <bool LINES, int APART, int PAIRS>
DEVICE void read_scales(const float* scales, i64 step, i64 depth, i64 first, i64 count,
                        float (&to)[PAIRS][2]) {
  const float square = LINES ? 1.0f : scales[min64(first, count - 1) / DEPTH * step + depth];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 at = min64(first + (APART == 8 ? 16 : 8) * i + APART * h, count - 1);
      to[i][h] = LINES ? scales[depth * step + at] : square;
    }
}

// total + part, the sum of the products of 128 codes, times its scales.
DEVICE float promoted(float total, float part, float row, float column) {
  if constexpr (SCALES == whole) return __fadd_rn(total, part);
  if constexpr (SCALES == lines_lines) return __fmaf_rn(__fmul_rn(part, row), column, total);
  return __fmaf_rn(part, __fmul_rn(row, column), total);
}

// --- the kernel --------------------------------------------------------------------------------------------

// This lane's elements of the result: rows `top` ... 16 apart and 8 behind, columns `left` ... 8 apart and
// 1 behind. What is to be fused with the product is done to `values` here, before they are rounded.
DEVICE void write(const Job& job, const Sums<M, N>& total, i64 top, i64 left) {
  const bool by_row = job.a_step != 0, aligned = rows_aligned<2 * sizeof(T)>(job.out, job.out_stride);
  const float scale = SCALES == whole && !by_row ? __fmul_rn(job.a_scale[0], job.b_scale[0]) : 1.0f;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const i64 row = top + 16 * m + 8 * h;
      if (row >= job.m) return;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const i64 column = left + 8 * n, some = job.n - column, at = row * job.out_stride + column;
        if (some <= 0) break;
        float values[2], bias[2], addend[2], columns[2];
        if (job.bias != nullptr) load_some<2>(job.bias + column, some, bias);
        if (job.addend != nullptr) load_some<2>(job.addend + at, some, addend);
        if (SCALES == whole && by_row) load_some<2>(job.b_scale + column, some, columns);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float value = total.at[m][n][2 * h + c];
          if (SCALES == whole && by_row)
            value = __fmul_rn(__fmul_rn(value, columns[c]), job.a_scale[row]);
          else if (SCALES == whole)
            value = __fmul_rn(value, scale);
          if (job.bias != nullptr) value = __fadd_rn(value, bias[c]);
          if (job.addend != nullptr) value = __fadd_rn(value, addend[c]);
          values[c] = value;
        }
        if (aligned && some >= 2)
          store<2>(job.out + at, values);
        else
          store_some<2>(job.out + at, some, values);
      }
    }
}

// The grid is one-dimensional: bands of eight rows of tiles, in them column after column, so that the L2
// cache serves what neighbours read.
extern "C" __global__ void __launch_bounds__(THREADS) mma_gemm(Job job) {
  start_early();
  extern __shared__ __align__(1024) u8 memory[];
  const u32 base = (u32)__cvta_generic_to_shared(memory);
  const i32 tall = (i32)ceil_div(job.m, BM), wide = (i32)ceil_div(job.n, BN), band = blockIdx.x / (8 * wide);
  const i32 rows = min(8, tall - 8 * band), local = blockIdx.x - 8 * band * wide;
  const i64 row0 = (i64)(8 * band + local % rows) * BM, column0 = (i64)(local / rows) * BN;
  const i32 depths = (i32)ceil_div(job.k, DEPTH);
  const u8 *a = job.a + row0 * job.a_stride, *b = job.b + column0 * job.b_stride;

  // begins to copy both tiles of a block of the contraction; a group of copies for each, also for none
  auto load = [&](i32 depth) {
    if (depth < depths) {
      const u32 place = base + depth % STAGES * STAGE;
      const i64 from = (i64)depth * DEPTH;
      const int codes = (int)min64(DEPTH, job.k - from);
      load_tile<THREADS>(Left{place}, a + from, job.a_stride, (int)min64(BM, job.m - row0), codes);
      load_tile<THREADS>(Right{place + Left::bytes}, b + from, job.b_stride,
                         (int)min64(BN, job.n - column0), codes);
    }
    commit_copies();
  };

  const int warp = threadIdx.x / 32, row = warp / 4 * WARP_ROWS, column = warp % 4 * WARP_COLUMNS;
  const i64 top = row0 + row + lane() / 4, left = column0 + column + 2 * (lane() % 4);
  Sums<M, N> total, part;
  total.clear();
  load(0);
  load(1);
  for (i32 depth = 0; depth < depths; ++depth) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // this place is filled, and nobody reads the one that is filled next any more
    load(depth + STAGES - 1);
    const u32 place = base + depth % STAGES * STAGE;
    const Right columns{place + Left::bytes + column * DEPTH};  // its rows from the warp's first on
    if constexpr (PROMOTE == 0) {
      multiply_rows(total, Left{place}, row, columns, Codes{});
    } else {
      part.clear();
      multiply_rows(part, Left{place}, row, columns, Codes{});
      float of_rows[M][2], of_columns[N][2];
      if constexpr (SCALES != whole) {
        read_scales<A_LINES, 8>(job.a_scale, job.a_step, depth, top, job.m, of_rows);
        read_scales<B_LINES, 1>(job.b_scale, job.b_step, depth, left, job.n, of_columns);
      }
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            total.at[m][n][e] =
                promoted(total.at[m][n][e], part.at[m][n][e], of_rows[m][e / 2], of_columns[n][e % 2]);
    }
  }
  write(job, total, top, left);
}
