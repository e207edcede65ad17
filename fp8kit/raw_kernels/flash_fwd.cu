// Attention without its scores in memory: a block takes some rows of q past all tiles of k and v, keeping for
// each row the greatest score so far, the sum of exponentials and the output, which are corrected whenever
// a greater score comes (Dao et al., FlashAttention, 2022; FlashAttention-2, 2023).
// With PAGED k and v are caches of pages, whose places a block looks up as it loads them.
//
// functions: flash_fwd (attention_fwd, packed_attention_fwd, paged_attention_fwd)
// variants: T=bf16,f16; D=64; DV=64; KIND=0,1,2; PAGED=0
// variants: T=bf16,f16; D=128; DV=128; KIND=0,1,2; PAGED=0
// variants: T=bf16,f16; D=192; DV=128; KIND=0,1,2; PAGED=0
// variants: T=bf16,f16; D=256; DV=256; KIND=0,1,2; PAGED=0
// variants: T=bf16,f16; D=64; DV=64; KIND=0,2; PAGED=1
// variants: T=bf16,f16; D=128; DV=128; KIND=0,2; PAGED=1
// variants: T=bf16,f16; D=192; DV=128; KIND=0,2; PAGED=1
// variants: T=bf16,f16; D=256; DV=256; KIND=0,2; PAGED=1
// variants: T=bf16,f16; D=64; DV=64; KIND=0,2; PAGED=0,1; CAP=1
// variants: T=bf16,f16; D=128; DV=128; KIND=0,2; PAGED=0,1; CAP=1
// variants: T=bf16,f16; D=192; DV=128; KIND=0,2; PAGED=0,1; CAP=1
// variants: T=bf16,f16; D=256; DV=256; KIND=0,2; PAGED=0,1; CAP=1
// spills: 96 bytes, of what is read once a tile: accumulators fill the registers
#include "flash.cuh"

constexpr int M = DV <= 128 && !PAGED ? 2 : 1;  // 16-row tiles of a warp; of a cache few queries read
constexpr int BLOCK_ROWS = WARPS * 16 * M;   // queries of a block
constexpr int COLUMNS = D <= 128 && !GENERAL && !CAP ? 64 : 32;  // keys at a time
typedef Tile<BLOCK_ROWS, D> Queries;
typedef Tile<COLUMNS, D> Keys;
typedef Tile<COLUMNS, DV> Values;

// Where a sequence's positions lie in a cache of `count` pages of `size` positions: batch b's page p is
// table[b * width + p]. The batches of k and v are the pages then.
struct Pages {
  const i32* table;
  i64 count, width, size;

  // The page of a batch's position, -1 where the table names none that there is.
  __device__ __forceinline__ int of(int batch, int position) const {
    const int at = position / (int)size;
    const i64 page = at < width ? table[batch * width + at] : -1;
    return page < 0 || page >= count ? -1 : (int)page;
  }
};

struct Forward {
  Array q, k, v, o;
  float* lse;
  i64 repeat, dim, dim_v, tiles;  // query heads to a key head; true features; blocks to a head
  Rules rules;
  Pages pages;
};

// A row of a tile, by the eight threads whose it is; zeros, and nothing is read, where it does not exist.
template <typename TILE> DEVICE void load_row(TILE to, int row, const T* from, bool exists, int columns) {
#pragma unroll
  for (int panel = 0; panel < TILE::columns / 64; ++panel) {
    const int chunk = 8 * panel + threadIdx.x % 8;
    const bool there = exists && 8 * chunk < columns;
    copy_async(to.at(row, chunk), there ? from + 8 * chunk : from, there);
  }
}

// The grid is one-dimensional: tiles of rows, the last first since causal masks leave them the most to do;
// then heads; then batches. Dynamic shared memory: a tile of q, two of k and of v, and what dropout keeps.
extern "C" __global__ void __launch_bounds__(THREADS) flash_fwd(Forward job) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ u8 kept[MAY_DROP ? BLOCK_ROWS * COLUMNS / 4 : 1];
  const Rules& rules = job.rules;
  const int tiles = (int)job.tiles, heads = (int)rules.heads;
  const int head = blockIdx.x / tiles % heads, batch = blockIdx.x / tiles / heads;
  const int row0 = (tiles - 1 - (int)blockIdx.x % tiles) * BLOCK_ROWS;
  const Span span = span_of(rules, batch);
  auto in_lse = [&] { return min(BLOCK_ROWS, (int)rules.s_q - row0); };
  // the queries' rows, and how many of o's from row0 on are this block's
  auto lines = [&] { return query_lines(rules, batch, batch == gridDim.x / tiles / heads - 1); };
  auto in_array = [&] { return written(lines(), span.rows, row0, BLOCK_ROWS, rules.s_q); };
  auto lse = [&](int row) { return job.lse + ((i64)batch * rules.heads + head) * rules.s_q + row0 + row; };

  if (row0 >= span.rows) {  // padding
    clear_rest<THREADS>(job.o, lines(), batch, head, row0, 0, in_array(), job.dim_v);
    for (int i = threadIdx.x; i < in_lse(); i += THREADS) *lse(i) = -INF;
    return;
  }

  const u32 base = (u32)__cvta_generic_to_shared(memory);
  const Queries queries{base};
  constexpr int STAGE = Keys::bytes + Values::bytes;
  auto keys = [&](int tile) { return Keys{base + Queries::bytes + tile % 2 * STAGE}; };
  auto values = [&](int tile) { return Values{keys(tile).base + Keys::bytes}; };
  const int group = head / (int)job.repeat;
  const int start = key_lines(rules, batch).start;
  const T *k = job.k.rows(batch, group, start), *v = job.v.rows(batch, group, start);

  const int first = span.first_column(row0) / COLUMNS;
  const int end = tiles_of(span.last_column(min(span.rows, row0 + BLOCK_ROWS)), COLUMNS);
  auto load_columns = [&](int tile) {
    const int j = tile * COLUMNS;
    if constexpr (PAGED) {
#pragma unroll
      for (int step = 0; step < COLUMNS; step += THREADS / 8) {
        const int row = step + threadIdx.x / 8;
        const int page = j + row < span.columns ? job.pages.of(batch, j + row) : -1;
        const int place = (j + row) % (int)job.pages.size;
        load_row(keys(tile), row, job.k.rows(max(page, 0), group, place), page >= 0, job.dim);
        load_row(values(tile), row, job.v.rows(max(page, 0), group, place), page >= 0, job.dim_v);
      }
      return;
    }
    load_tile<THREADS>(keys(tile), k + j * job.k.row, job.k.row, span.columns - j, job.dim);
    load_tile<THREADS>(values(tile), v + j * job.v.row, job.v.row, span.columns - j, job.dim_v);
  };
  const T* q = job.q.rows(batch, head, lines().start + row0);
  load_tile<THREADS>(queries, q, job.q.row, span.rows - row0, job.dim);
  if (first < end) load_columns(first);
  commit_copies();

  const int warp_row = threadIdx.x / 32 * 16 * M, g = lane() / 4, t = lane() % 4;
  const float unit = unit_of(rules);
  float sink = -INF;
  if constexpr (GENERAL)
    if (rules.sink) sink = rules.offset == nullptr ? 0.0f : rules.offset[head];
  Sums<M, DV / 8> o;
  o.clear();
  float greatest[M][2], sum[M][2];  // of rows g and g + 8; a lane has its own columns' sum
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      greatest[m][half] = sink, sum[m][half] = t == 0 && sink > -INF ? 1.0f : 0.0f;

  for (int tile = first; tile < end; ++tile) {
    const int column0 = tile * COLUMNS;
    if (tile + 1 < end) load_columns(tile + 1);
    commit_copies();
    if (drops(rules))
      draw_tile<COLUMNS, BLOCK_ROWS, THREADS>(kept, rules, span, batch, head, row0, column0);
    wait_for_copies<1>();
    __syncthreads();

    Sums<M, COLUMNS / 8> p;
    p.clear();
    multiply_rows(p, queries, warp_row, keys(tile));
    make_scores<false>(p, rules, span, batch, head, row0 + warp_row, column0);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + 16 * m + 8 * half + g;
        float top = greatest[m][half];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) top = fmaxf(top, p.at[m][n][2 * half + e]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shift = top == -INF ? 0.0f : top * unit;
        const float correction = exp2_fast(greatest[m][half] * unit - shift);
        greatest[m][half] = top;
        float more = 0.0f;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = p.at[m][n][2 * half + e];
            x = exp2_fast(x * unit - shift);
            more += x;
            if (drops(rules))
              x = is_kept<COLUMNS>(kept, row, 8 * n + 2 * t + e) ? x * (float)rules.inverse_keep : 0.0f;
          }
        sum[m][half] = sum[m][half] * correction + more;
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
          o.at[m][n][2 * half] *= correction, o.at[m][n][2 * half + 1] *= correction;
      }
    multiply_sums(o, p, values(tile));
    __syncthreads();  // the tiles are free for what is loaded next
  }
  wait_for_copies<0>();
  __syncthreads();

#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float whole_sum = sum[m][half];
      whole_sum += __shfl_xor_sync(~0u, whole_sum, 1);
      whole_sum += __shfl_xor_sync(~0u, whole_sum, 2);
      const int row = warp_row + 16 * m + 8 * half + g;
      const bool exists = row0 + row < span.rows;
      // nothing seen: zeros; NaN stays NaN
      const float inverse = !exists || whole_sum == 0.0f ? 0.0f : 1.0f / whole_sum;
      const float shift = greatest[m][half] == -INF ? 0.0f : greatest[m][half] * unit;
      if (t == 0 && row < in_lse()) *lse(row) = exists ? (shift + log2f(whole_sum)) * LN2 : -INF;
#pragma unroll
      for (int n = 0; n < DV / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = o.at[m][n][2 * half + e];
          x = exists ? x * inverse : 0.0f;
        }
    }
  // a warp's own rows of the queries' tile, which nobody else reads, take its output
  const Tile<BLOCK_ROWS, DV> out{base};
  put(o, out, warp_row);
  __syncwarp();
  T* to = job.o.rows(batch, head, lines().start + row0 + warp_row);
  store_rows<16 * M>(out, warp_row, to, job.o.row, in_array() - warp_row, job.dim_v);
  clear_rest<THREADS>(job.o, lines(), batch, head, row0, BLOCK_ROWS, in_array(), job.dim_v);
}
