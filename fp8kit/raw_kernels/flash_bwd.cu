// Gradients of attention without its scores in memory (Dao et al., FlashAttention, 2022, appendix B). P is
// made anew from q, k and the log-sum-exp:
//
//   dv = P'^T do        ds = P * (dropout(do v^T) - sum(do * o)) * scale       dk = ds^T q        dq = ds k
//
// P' is P after dropout; a cap on the scores makes its derivative a factor of ds. One kernel takes keys past
// all rows that see them, for dk and dv; another takes rows past all their keys, for dq. Nothing is added to
// memory, so the same input gives the same bits.
//
// functions: flash_bwd_dot (attention_bwd, packed_attention_bwd)
// functions: flash_bwd_keys (attention_bwd, packed_attention_bwd)
// functions: flash_bwd_queries (attention_bwd, packed_attention_bwd)
// variants: T=bf16,f16; D=64; DV=64; KIND=0,1,2
// variants: T=bf16,f16; D=128; DV=128; KIND=0,1,2
// variants: T=bf16,f16; D=192; DV=128; KIND=0,1,2
// variants: T=bf16,f16; D=256; DV=256; KIND=0,1,2
// variants: T=bf16,f16; D=64; DV=64; KIND=0,2; CAP=1
// variants: T=bf16,f16; D=128; DV=128; KIND=0,2; CAP=1
// variants: T=bf16,f16; D=192; DV=128; KIND=0,2; CAP=1
// variants: T=bf16,f16; D=256; DV=256; KIND=0,2; CAP=1
// spills: 48 bytes, of what is read once a tile: accumulators fill the registers
#include "flash.cuh"

constexpr bool WIDE = D > 128;
constexpr int KEYS = 64, QUERIES = 64;     // of a block of the kernel for them
constexpr int STEP = WIDE || GENERAL ? 32 : 64;  // rows, or keys, that such a block visits at a time
constexpr int STAGES = WIDE ? 1 : 2;       // tiles of them in shared memory
// one group of warps makes dv and the other dk where no warp has registers for both
constexpr int GROUPS = WIDE ? 2 : 1;

struct Backward {
  Array d_o, q, k, v, o, dq, dk, dv;
  const float* lse;
  float* dot;  // (b, h, s_q): sum(do * o)
  i64 batches, repeat, dim, dim_v, tiles;  // query heads to a key head; true features; blocks to a head
  Rules rules;
};

// dot = sum(do * o) of each row; 0 beyond the true length. A warp does a row.
extern "C" __global__ void flash_bwd_dot(Backward job) {
  const Rules& rules = job.rules;
  const i64 count = job.batches * rules.heads * rules.s_q;
  for (i64 n = first() / 32; n < count; n += step() / 32) {
    const i64 i = n % rules.s_q, head = n / rules.s_q % rules.heads, batch = n / rules.s_q / rules.heads;
    float sum = 0.0f;
    if (i < query_length(rules, batch)) {
      const int row = query_lines(rules, batch).start + i;
      const T *o = job.o.rows(batch, head, row), *d_o = job.d_o.rows(batch, head, row);
      for (int f = 8 * lane(); f < job.dim_v; f += 256) {
        float x[8], y[8];
        load<8>(o + f, x);
        load<8>(d_o + f, y);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
      }
    }
    sum = warp_sum(sum);
    if (lane() == 0) job.dot[n] = sum;
  }
}

// P' and ds of one element in place of its score and do v^T; `kept`: dropout's factor. `lse` is in units of
// log 2. With CAP `score` is a part of the cap, and `beside` what it is short of the score.
DEVICE void weight_and_slope(float& score, float unit, float lse, float dot, float kept, float scale,
                             float& dp, float beside = 0.0f) {
  const float weight = exp2_fast(score * unit + beside - lse);
  dp = scale * weight * (kept * dp - dot) * (CAP ? cap_slope(score) : 1.0f);
  score = weight * kept;
}

// How backward makes scores, and what it multiplies them by for units of log 2.
template <bool TRANSPOSED, int N>
DEVICE void remake_scores(Sums<1, N>& p, const Rules& rules, const Span& span, int batch, int head, int row0,
                          int column0) {
  if constexpr (CAP) make_parts<TRANSPOSED>(p, rules, span, batch, head, row0, column0);
  else make_scores<TRANSPOSED>(p, rules, span, batch, head, row0, column0);
}
DEVICE float remade_unit(const Rules& rules) {
  return CAP ? (float)rules.softcap * LOG2E : unit_of(rules);
}

// dk and dv of a tile of keys. Scores are made transposed, keys by rows of q: P and ds then have the form in
// which dv = P'^T do and dk = ds^T q take them, without a way through memory.
extern "C" __global__ void __launch_bounds__(THREADS* GROUPS) flash_bwd_keys(Backward job) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ float row_lse[2][STEP], row_dot[2][STEP];
  __shared__ u8 kept[MAY_DROP ? STEP * KEYS / 4 : 1];
  constexpr int ALL = THREADS * GROUPS;
  typedef Tile<KEYS, D> Keys;
  typedef Tile<KEYS, DV> Values;
  typedef Tile<STEP, D> Queries;
  typedef Tile<STEP, DV> Upstream;
  const Rules& rules = job.rules;
  const int key_tiles = (int)job.tiles, repeat = (int)job.repeat, groups = (int)rules.heads / repeat;
  const int group = blockIdx.x / key_tiles % groups, batch = blockIdx.x / key_tiles / groups;
  const int column0 = (int)blockIdx.x % key_tiles * KEYS;
  const Span span = span_of(rules, batch);
  const int start_q = query_lines(rules, batch).start, start_kv = key_lines(rules, batch).start;
  // zeros in the rows of dk and dv that are this block's, from the first on, or behind its tile
  auto clear = [&](int tile) {
    const Lines lines = key_lines(rules, batch, batch == gridDim.x / key_tiles / groups - 1);
    const int count = written(lines, span.columns, column0, KEYS, rules.s_kv);
    clear_rest<ALL>(job.dk, lines, batch, group, column0, tile, count, job.dim);
    clear_rest<ALL>(job.dv, lines, batch, group, column0, tile, count, job.dim_v);
    return count;
  };

  const int first = span.first_row(column0) / STEP;
  const int tiles = tiles_of(span.last_row(min(span.columns, column0 + KEYS)), STEP) - first;
  if (column0 >= span.columns || tiles <= 0) {  // padding, or seen by no row
    clear(0);
    return;
  }

  const Keys keys{(u32)__cvta_generic_to_shared(memory)};
  const Values values{keys.base + Keys::bytes};
  constexpr int STAGE = Queries::bytes + Upstream::bytes;
  auto queries = [&](int s) { return Queries{values.base + Values::bytes + s * STAGE}; };
  auto upstream = [&](int s) { return Upstream{queries(s).base + Queries::bytes}; };
  // the tiles of rows of one query head after the other's
  auto load_rows = [&](int n) {
    const int head = group * repeat + n / tiles, i = (first + n % tiles) * STEP;
    const int s = n % STAGES;
    const T *q = job.q.rows(batch, head, start_q + i), *d_o = job.d_o.rows(batch, head, start_q + i);
    load_tile<ALL>(queries(s), q, job.q.row, span.rows - i, job.dim);
    load_tile<ALL>(upstream(s), d_o, job.d_o.row, span.rows - i, job.dim_v);
    const i64 at = ((i64)batch * rules.heads + head) * rules.s_q + i;
    if (threadIdx.x < STEP) {
      const bool exists = i + threadIdx.x < span.rows;
      const float lse = exists ? job.lse[at + threadIdx.x] : 0.0f;
      row_lse[s][threadIdx.x] = lse == -INF ? 0.0f : lse * LOG2E;
      row_dot[s][threadIdx.x] = exists ? job.dot[at + threadIdx.x] : 0.0f;
    }
  };
  const T* k = job.k.rows(batch, group, start_kv + column0);
  const T* v = job.v.rows(batch, group, start_kv + column0);
  load_tile<ALL>(keys, k, job.k.row, span.columns - column0, job.dim);
  load_tile<ALL>(values, v, job.v.row, span.columns - column0, job.dim_v);
  if (STAGES == 2) load_rows(0);
  commit_copies();

  const int warp_key = threadIdx.x / 32 % WARPS * 16, g = lane() / 4, t = lane() % 4;
  const bool makes_k = GROUPS == 1 || threadIdx.x >= THREADS, makes_v = GROUPS == 1 || threadIdx.x < THREADS;
  const float scale = (float)rules.scale, unit = remade_unit(rules);
  // of a group that makes one of them only, `sums` is that one's
  Sums<1, (D > DV ? D : DV) / 8> sums;
  Sums<1, GROUPS == 1 ? DV / 8 : 2> more;  // dv where a warp makes both
  sums.clear();
  more.clear();

  for (int n = 0; n < tiles * repeat; ++n) {
    const int head = group * repeat + n / tiles, row0 = (first + n % tiles) * STEP;
    const int s = n % STAGES;
    if (STAGES == 1) load_rows(n);
    else if (n + 1 < tiles * repeat) load_rows(n + 1);
    commit_copies();
    if (drops(rules))
      draw_tile<KEYS, STEP, ALL>(kept, rules, span, batch, head, row0, column0);
    wait_for_copies<STAGES - 1>();
    __syncthreads();

    Sums<1, STEP / 8> p, ds;
    p.clear();
    ds.clear();
    multiply_rows(p, keys, warp_key, queries(s));
    if (makes_k) multiply_rows(ds, values, warp_key, upstream(s));
    remake_scores<true>(p, rules, span, batch, head, row0, column0 + warp_key);
#pragma unroll
    for (int m = 0; m < STEP / 8; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * m + 2 * t + e % 2, key = warp_key + 8 * (e / 2) + g;
        float factor = 1.0f;
        if (drops(rules))
          factor = is_kept<KEYS>(kept, row, key) ? (float)rules.inverse_keep : 0.0f;
        float &score = p.at[0][m][e], &slope = ds.at[0][m][e];
        const float beside =
            CAP ? beside_part(rules, span, batch, head, row0 + row, column0 + key, score) : 0.0f;
        weight_and_slope(score, unit, row_lse[s][row], row_dot[s][row], factor, scale, slope, beside);
      }
    if constexpr (GROUPS == 1) {
      multiply_sums(more, p, upstream(s));
      multiply_sums(sums, ds, queries(s));
    } else if (makes_k) {
      multiply_sums(*reinterpret_cast<Sums<1, D / 8>*>(&sums), ds, queries(s));
    } else {
      multiply_sums(*reinterpret_cast<Sums<1, DV / 8>*>(&sums), p, upstream(s));
    }
    __syncthreads();  // the tiles are free for what is loaded next
  }
  wait_for_copies<0>();
  __syncthreads();

  const int rest = clear(KEYS) - warp_key;
  T* dk = job.dk.rows(batch, group, start_kv + column0 + warp_key);
  T* dv = job.dv.rows(batch, group, start_kv + column0 + warp_key);
  if (makes_k) {
    put(*reinterpret_cast<Sums<1, D / 8>*>(&sums), keys, warp_key);
    __syncwarp();
    store_rows<16>(keys, warp_key, dk, job.dk.row, rest, job.dim);
  }
  if (makes_v) {
    if constexpr (GROUPS == 1) put(more, values, warp_key);
    else put(*reinterpret_cast<Sums<1, DV / 8>*>(&sums), values, warp_key);
    __syncwarp();
    store_rows<16>(values, warp_key, dv, job.dv.row, rest, job.dim_v);
  }
}

// dq of a tile of rows.
extern "C" __global__ void __launch_bounds__(THREADS) flash_bwd_queries(Backward job) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ u8 kept[MAY_DROP ? QUERIES * STEP / 4 : 1];
  typedef Tile<QUERIES, D> Queries;
  typedef Tile<QUERIES, DV> Upstream;
  typedef Tile<STEP, D> Keys;
  typedef Tile<STEP, DV> Values;
  const Rules& rules = job.rules;
  const int tiles = (int)job.tiles, heads = (int)rules.heads;
  const int head = blockIdx.x / tiles % heads, batch = blockIdx.x / tiles / heads;
  const int row0 = (tiles - 1 - (int)blockIdx.x % tiles) * QUERIES;
  const Span span = span_of(rules, batch);
  const int start_q = query_lines(rules, batch).start, start_kv = key_lines(rules, batch).start;
  // zeros in the rows of dq that are this block's, from the first on, or behind its tile
  auto clear = [&](int tile) {
    const Lines lines = query_lines(rules, batch, batch == gridDim.x / tiles / heads - 1);
    const int count = written(lines, span.rows, row0, QUERIES, rules.s_q);
    clear_rest<THREADS>(job.dq, lines, batch, head, row0, tile, count, job.dim);
    return count;
  };

  const int first = span.first_column(row0) / STEP;
  const int end = tiles_of(span.last_column(min(span.rows, row0 + QUERIES)), STEP);
  if (row0 >= span.rows || first >= end) {
    clear(0);
    return;
  }

  const Queries queries{(u32)__cvta_generic_to_shared(memory)};
  const Upstream upstream{queries.base + Queries::bytes};
  constexpr int STAGE = Keys::bytes + Values::bytes;
  auto keys = [&](int s) { return Keys{upstream.base + Upstream::bytes + s * STAGE}; };
  auto values = [&](int s) { return Values{keys(s).base + Keys::bytes}; };
  const int group = head / (int)job.repeat;
  const T *k = job.k.rows(batch, group, start_kv), *v = job.v.rows(batch, group, start_kv);
  auto load_columns = [&](int tile) {
    const int j = tile * STEP;
    const int s = tile % STAGES;
    load_tile<THREADS>(keys(s), k + j * job.k.row, job.k.row, span.columns - j, job.dim);
    load_tile<THREADS>(values(s), v + j * job.v.row, job.v.row, span.columns - j, job.dim_v);
  };
  const T *q = job.q.rows(batch, head, start_q + row0), *d_o = job.d_o.rows(batch, head, start_q + row0);
  load_tile<THREADS>(queries, q, job.q.row, span.rows - row0, job.dim);
  load_tile<THREADS>(upstream, d_o, job.d_o.row, span.rows - row0, job.dim_v);
  if (STAGES == 2) load_columns(first);
  commit_copies();

  const int warp_row = threadIdx.x / 32 * 16, g = lane() / 4, t = lane() % 4;
  const float scale = (float)rules.scale, unit = remade_unit(rules);
  float lse[2], dot[2];  // of rows g and g + 8
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row0 + warp_row + 8 * half + g;
    const i64 at = ((i64)batch * rules.heads + head) * rules.s_q + i;
    const float read = i < span.rows ? job.lse[at] : 0.0f;
    lse[half] = read == -INF ? 0.0f : read * LOG2E, dot[half] = i < span.rows ? job.dot[at] : 0.0f;
  }
  Sums<1, D / 8> sums;
  sums.clear();

  for (int tile = first; tile < end; ++tile) {
    const int column0 = tile * STEP;
    const int s = tile % STAGES;
    if (STAGES == 1) load_columns(tile);
    else if (tile + 1 < end) load_columns(tile + 1);
    commit_copies();
    if (drops(rules))
      draw_tile<STEP, QUERIES, THREADS>(kept, rules, span, batch, head, row0, column0);
    wait_for_copies<STAGES - 1>();
    __syncthreads();

    Sums<1, STEP / 8> p, ds;
    p.clear();
    ds.clear();
    multiply_rows(p, queries, warp_row, keys(s));
    multiply_rows(ds, upstream, warp_row, values(s));
    remake_scores<false>(p, rules, span, batch, head, row0 + warp_row, column0);
#pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int half = e / 2, row = warp_row + 8 * half + g, column = 8 * n + 2 * t + e % 2;
        float factor = 1.0f;
        if (drops(rules))
          factor = is_kept<STEP>(kept, row, column) ? (float)rules.inverse_keep : 0.0f;
        float &score = p.at[0][n][e], &slope = ds.at[0][n][e];
        const float beside =
            CAP ? beside_part(rules, span, batch, head, row0 + row, column0 + column, score) : 0.0f;
        weight_and_slope(score, unit, lse[half], dot[half], factor, scale, slope, beside);
      }
    multiply_sums(sums, ds, keys(s));
    __syncthreads();  // the tiles are free for what is loaded next
  }
  wait_for_copies<0>();
  __syncthreads();
  put(sums, queries, warp_row);
  __syncwarp();
  T* dq = job.dq.rows(batch, head, start_q + row0 + warp_row);
  store_rows<16>(queries, warp_row, dq, job.dq.row, clear(QUERIES) - warp_row, job.dim);
}
