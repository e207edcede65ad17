// functions: norm_fwd
// variants: T=f32; CHUNKS=1,2,3,4,6,8; COLUMNS=0
// variants: T=bf16,f16; CHUNKS=1,2,3,4,6,8,12,16; COLUMNS=0
// variants: T=bf16,f16; CHUNKS=6; COLUMNS=768,1536
// variants: T=bf16,f16; CHUNKS=8; COLUMNS=1024,2048
// variants: T=bf16; CHUNKS=12; COLUMNS=3072
// variants: T=bf16; CHUNKS=16; COLUMNS=4096
//
// Normalisation forward (norm.cuh), written as T, as FP8 codes in either orientation, or both. A row stays
// in registers, CHUNKS chunks a thread, and where a chunk has been used the same chunk of the thread's
// next row is fetched. Rows are whole chunks that start at multiples of 16 bytes, and so does all that is
// written (q: 8); norm_any.cu takes the others. With COLUMNS N is known, and only whole tiles are taken,
// wanted as E4M3 codes in both orientations and not as T: nothing is asked of a chunk there, nor an
// address worked out for it.

#include "norm.cuh"

// Blocks that shall fit a multiprocessor, by the registers that hold a thread's part of a row: they leave
// 40 and more for the rest.
constexpr int KEPT = CHUNKS * 2 * sizeof(T), THREADS = KEPT < 32 ? 256 : 512,
              BLOCKS = KEPT < 16 ? 4 : KEPT < 24 ? 3 : KEPT < 32 ? 2 : 1;
constexpr bool KNOWN = COLUMNS > 0;  // the columns are: whole tiles alone

// 16 rows of four columns of codes out of the tile, which has `pitch` words a row, into q_t.
DEVICE void write_transposed(const Cast& cast, const u32* tile, u32 pitch, i64 column, i64 row) {
  u32 columns[4][4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 four[4];
    const u32* at = tile + 4 * k * pitch;
    transpose4(at[0], at[pitch], at[2 * pitch], at[3 * pitch], four);
#pragma unroll
    for (int j = 0; j < 4; ++j) columns[j][k] = four[j];
  }
  if (!KNOWN && row >= cast.t_columns) return;
  u8* to = cast.q_t + column * cast.t_stride + row;
#pragma unroll
  for (int j = 0; j < 4; ++j, to += cast.t_stride)
    if (KNOWN || column + j < cast.t_rows) store_codes<16>(to, columns[j]);
}

// The blocks walk the tiles of `rows` rows (16, 32 or 64 where q_t is wanted), of which the threads take
// blockDim.y at a time. Dynamic shared memory: `chunks` chunks of gains and biases as floats, 64 bytes each,
// then where q_t is wanted the tile's codes, `chunks` chunks a row; columns from N on are zeros.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
norm_fwd(const T* x, const T* weight, const T* bias, T* y, float* mean, float* rstd, i64 M, i64 columns,
         i64 chunks, i64 rows, i64 tiles, f64 epsilon, f64 gain, Cast cast) {
  start_early();
  extern __shared__ uint4 dynamic[];
  __shared__ float shared[2][32][1], maxima[32];
  float4* gains = reinterpret_cast<float4*>(dynamic);  // halves of chunks: two of gains, two of biases
  uint2* codes_tile = reinterpret_cast<uint2*>(gains + 4 * chunks);
  u32 turn = 0;  // sums use the two buffers by turns
  const u32 N = KNOWN ? COLUMNS : (u32)columns, whole = N / 8, width = KNOWN ? whole : (u32)chunks,
            end = (u32)M, tall = (u32)rows;
  const u32 lanes = KNOWN ? COLUMNS / 8 / CHUNKS : blockDim.x;
  if (KNOWN) {
    __builtin_assume(cast.q != nullptr && cast.q_t != nullptr);
    cast.is_e5m2 = 0;
  }
  Eight<T> in[CHUNKS];
  u32 row = blockIdx.x * tall + threadIdx.y;
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    const u32 chunk = v * lanes + threadIdx.x;
    in[v] = read8(x + (i64)row * N + chunk * 8, KNOWN || (row < end && chunk < whole) ? 8 : 0, true);
  }
  const bool wide_weight = rows_aligned<16>(weight, 0), wide_bias = rows_aligned<16>(bias, 0);
#pragma unroll 2
  for (u32 c = thread_rank(); c < width; c += block_threads()) {
    float g[8], b[8];
    floats8(weight == nullptr ? weight : weight + c * 8, c < whole ? 8 : 0, wide_weight, g);
    floats8(bias == nullptr ? bias : bias + c * 8, c < whole ? 8 : 0, wide_bias, b);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] += (float)gain;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = 4 * half;
      gains[half * width + c] = make_float4(g[j], g[j + 1], g[j + 2], g[j + 3]);
      gains[(2 + half) * width + c] = make_float4(b[j], b[j + 1], b[j + 2], b[j + 3]);
    }
  }
  const float scale = cast_scale(cast);
  Peak<T> peak;
  __syncthreads();

  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (u32 r = threadIdx.y; r < tall; r += blockDim.y) {
      float sum = 0.0f, squares = 0.0f;
      Stats s{0.0f, 0.0f};
      if (mean != nullptr) {
#pragma unroll
        for (int v = 0; v < CHUNKS; ++v) sum += chunk_sum(in[v]);
        s.mean = row_total(sum, shared[turn ^= 1], lanes) / (float)N;
      }
#pragma unroll
      for (int v = 0; v < CHUNKS; ++v) {
        unpack_anew(in[v]);
        const float part = chunk_deviations(in[v], s.mean, 8);
        squares += KNOWN || v * lanes + threadIdx.x < whole ? part : 0.0f;
      }
      s.rstd = 1.0f / sqrtf(row_total(squares, shared[turn ^= 1], lanes) / (float)N + (float)epsilon);
      if (KNOWN || row < end) keep_stats(mean, rstd, row, s);

      const u32 next = r + blockDim.y < tall ? row + blockDim.y : (tile + gridDim.x) * tall + threadIdx.y;
      // behind the last row, one that is there
      const T* const from = x + (i64)(KNOWN && next >= end ? row : next) * N;
      T* const to = y + (i64)row * N;
      u8* const q = cast.q + (i64)row * cast.q_stride;
#pragma unroll
      for (int v = 0; v < CHUNKS; ++v) {
        const u32 chunk = v * lanes + threadIdx.x;
        const bool there = KNOWN || (row < end && chunk < whole), in_tile = KNOWN || chunk < width;
        const u32 place = in_tile ? chunk : 0;
        unpack_anew(in[v]);
        const float4 g0 = gains[place], g1 = gains[width + place], b0 = gains[2 * width + place],
                     b1 = gains[3 * width + place];
        const float g[8] = {g0.x, g0.y, g0.z, g0.w, g1.x, g1.y, g1.z, g1.w},
                    b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
        const Eight<T> out = normalized8(in[v], s, g, b);
        in[v] = read8(from + chunk * 8, KNOWN || (next < end && chunk < whole) ? 8 : 0, true);
        // the compiler may start two chunks at once: more would not find registers
        if (KNOWN && v % 2) __syncwarp();
        if (!KNOWN && y != nullptr && there) write8(to + chunk * 8, 8, true, out);
        if (there) peak.add(out);
        if (cast.wanted()) {
          u32 codes[2];
          encode8(cast, out, scale, codes);
#pragma unroll
          for (int k = 0; k < 2; ++k) codes[k] = there ? codes[k] : 0;
          if (KNOWN || (cast.q != nullptr && row < cast.q_rows && chunk * 8 < cast.q_columns))
            store_codes<8>(q + chunk * 8, codes);
          if (KNOWN || (cast.q_t != nullptr && in_tile))
            codes_tile[r * width + chunk] = make_uint2(codes[0], codes[1]);
        }
      }
      row = next;
    }
    if (cast.q_t != nullptr) {
      __syncthreads();
      const u32 sixteens = tall / 16, places = 2 * width * sixteens;
      // neighbouring threads complete a column's rows
      for (u32 i = thread_rank(); i < places; i += block_threads()) {
        const u32 above = i % sixteens * 16, word = i / sixteens;
        write_transposed(cast, reinterpret_cast<const u32*>(codes_tile) + above * 2 * width + word, 2 * width,
                     word * 4, (i64)tile * tall + above);
      }
      __syncthreads();
    }
  }
  block_amax(cast.amax, peak.amax(), maxima);
}
