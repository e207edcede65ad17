// Gradients of attention on Hopper, for rows that see a band of columns and no more. The formulas are
// flash_bwd.cu's, which takes everything else. As there one kernel makes dk and dv and another dq, so that
// nothing is added to memory and the same input gives the same bits: q k^T and do v^T are made twice.
//
// functions: hopper_flash_bwd_dot (attention_bwd)
// functions: hopper_flash_bwd_keys (attention_bwd)
// functions: hopper_flash_bwd_queries (attention_bwd)
// variants: T=bf16,f16; D=64; DV=64; KIND=0
// variants: T=bf16,f16; D=128; DV=128; KIND=0
//
// Both are persistent, with a loader and two multipliers, as hopper_flash_fwd.cu explains. A multiplier has
// 64 keys, or 64 rows of q, whose gradients stay in its registers. It begins the scores of the next tile
// before it waits for the products of this one.
#include "hopper_flash.cuh"

struct alignas(64) Job {
  TensorMap d_o, q, k, v;
  Array o_at, d_o_at, dq, dk, dv;  // o and d_o: for their products' sums
  const float* lse;
  float* dot;   // (b, h, s_q): sum(do * o)
  i64 repeat;   // query heads to a key head
  Grid grid;
  Scores scores;
};

// dot, D / 8 threads to a row.
extern "C" __global__ void __launch_bounds__(256) hopper_flash_bwd_dot(const __grid_constant__ Job job) {
  start_early();
  constexpr u32 LANES = D / 8;
  const u32 s_q = job.scores.span.rows, heads = job.scores.heads;
  const u32 n = (u32)(first() / LANES), feature = 8 * (threadIdx.x % LANES);
  const u32 i = n % s_q, head = n / s_q % heads, batch = n / s_q / heads;
  float sum = 0.0f;
  const bool exists = batch < (u32)(job.grid.pairs / job.grid.heads);
  if (exists) {
    float x[8], y[8];
    load<8>(job.o_at.rows(batch, head, i) + feature, x);
    load<8>(job.d_o_at.rows(batch, head, i) + feature, y);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
  }
#pragma unroll
  for (int lanes = LANES / 2; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (exists && feature == 0) job.dot[n] = sum;
}

#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // no other chip has wgmma
extern "C" __global__ void hopper_flash_bwd_keys(const __grid_constant__ Job job) { __trap(); }
extern "C" __global__ void hopper_flash_bwd_queries(const __grid_constant__ Job job) { __trap(); }
#else

constexpr int GROUPS = 2, ROWS = 64 * GROUPS;  // multipliers; keys, or rows of q, of a block
constexpr int OWN_BYTES = ROWS * D * 2;
// keys' block: rows of q at a time
constexpr int STEP = D == 64 ? 128 : 64, STEP_BYTES = STEP * D * 2, STAGE_BYTES = 2 * STEP_BYTES + 8 * STEP;
constexpr int STAGES = (SHARED - 4 * OWN_BYTES) / STAGE_BYTES;
typedef RingPlace<STAGES> Stage;
typedef RingPlace<2> Own;

// What lse is in shared memory: units of log 2; nothing seen counts as 0, and its scores as -Inf.
DEVICE float in_units(float lse) { return lse == -INF ? 0.0f : lse * LOG2E; }

// --- dk and dv ---------------------------------------------------------------------------------------------

// Shared memory of a block of keys, from a multiple of 1024 bytes on: two times its k and v, and stages of
// rows of q and do.
struct KeysMemory {
  u32 base;
  __device__ __forceinline__ u32 k(u32 own) const { return base + 2 * own * OWN_BYTES; }
  __device__ __forceinline__ u32 v(u32 own) const { return k(own) + OWN_BYTES; }
  __device__ __forceinline__ u32 q(u32 stage) const { return k(2) + 2 * stage * STEP_BYTES; }
  __device__ __forceinline__ u32 d_o(u32 stage) const { return q(stage) + STEP_BYTES; }
  __device__ __forceinline__ u32 lse(u32 stage) const { return q(STAGES) + 8 * stage * STEP; }
  __device__ __forceinline__ u32 dot(u32 stage) const { return lse(stage) + 4 * STEP; }
  __device__ __forceinline__ u32 full(u32 stage) const { return lse(STAGES) + 8 * stage; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(STAGES + stage); }
  __device__ __forceinline__ u32 own_full(u32 own) const { return full(2 * STAGES + own); }
  __device__ __forceinline__ u32 own_empty(u32 own) const { return own_full(2 + own); }
};

// The keys of a piece of work, and the rows that see them, in steps: [first, last) of each query head.
struct Keys {
  int column, first, last;

  __device__ __forceinline__ Keys(const Job& job, const Work& work) : column(work.tile * ROWS) {
    const Span& span = job.scores.span;
    first = span.first_row(column) / STEP * STEP;
    last = span.last_row(min(span.columns, column + ROWS));
  }
};

DEVICE void load_keys(const Job& job, const KeysMemory& memory) {
  Stage place;
  Own own;
  Walk walk;
  for (Work work; walk.next(job.grid, work);) {
    const Keys keys(job, work);
    if (keys.first >= keys.last) continue;
    const u32 own_full = memory.own_full(own.stage);
    barrier_wait(memory.own_empty(own.stage), own.parity ^ 1);
    barrier_expect(own_full, 2 * OWN_BYTES);
    copy_rows<ROWS>(memory.k(own.stage), job.k, keys.column, work.head, work.batch, own_full);
    copy_rows<ROWS>(memory.v(own.stage), job.v, keys.column, work.head, work.batch, own_full);
    own.next();
    const i32 repeat = (i32)job.repeat;
    for (i32 head = work.head * repeat; head < (work.head + 1) * repeat; ++head)
      for (int row = keys.first; row < keys.last; row += STEP, place.next()) {
        const u32 full = memory.full(place.stage);
        barrier_wait(memory.empty(place.stage), place.parity ^ 1);
        barrier_expect(full, 2 * STEP_BYTES);
        copy_rows<STEP>(memory.q(place.stage), job.q, row, head, work.batch, full);
        copy_rows<STEP>(memory.d_o(place.stage), job.d_o, row, head, work.batch, full);
      }
  }
}

// The same for lse, in units of log 2, and dot times the scale, by a warp: their rows are not aligned.
DEVICE void load_statistics(const Job& job, const KeysMemory& memory) {
  const float scale = job.scores.scale;
  Stage place;
  Walk walk;
  for (Work work; walk.next(job.grid, work);) {
    const Keys keys(job, work);
    const i32 repeat = (i32)job.repeat;
    for (i32 head = work.head * repeat; head < (work.head + 1) * repeat; ++head)
      for (int row = keys.first + lane(); row < keys.last + lane(); row += STEP, place.next()) {
        const i64 at = job.scores.line(work.batch, head, row);
        float lse[STEP / 32], dot[STEP / 32];
#pragma unroll
        for (int i = 0; i < STEP / 32; ++i) {
          const bool exists = row + 32 * i < job.scores.span.rows;
          lse[i] = exists ? in_units(job.lse[at + 32 * i]) : 0.0f;
          dot[i] = exists ? job.dot[at + 32 * i] * scale : 0.0f;
        }
        barrier_wait(memory.empty(place.stage), place.parity ^ 1);
#pragma unroll
        for (int i = 0; i < STEP / 32; ++i) {
          store_shared(memory.lse(place.stage) + 128 * i + 4 * lane(), lse[i]);
          store_shared(memory.dot(place.stage) + 128 * i + 4 * lane(), dot[i]);
        }
        release(memory.full(place.stage));
      }
  }
}

// dk and dv of one block of keys. Scores are made transposed, keys by rows of q: P and ds then have the form
// in which dv = P^T do and dk = ds^T q take them, without a way through memory.
DEVICE void make_keys(const Job& job, const KeysMemory& memory, const Work& work, int group, Stage& place,
                      Own& own) {
  const Keys keys(job, work);
  const int column = keys.column + 64 * group + threadIdx.x / 32 % 4 * 16, t = lane() % 4;
  const float unit = job.scores.unit, scale = job.scores.scale;
  const u32 k = memory.k(own.stage) + 64 * group * 128, v = k + OWN_BYTES;
  Sums<1, D / 8> dk, dv;
  dk.clear();
  dv.clear();
  if (keys.first < keys.last) {
    barrier_wait(memory.own_full(own.stage), own.parity);
    u32 before = 0;
    int row = keys.first;
    const int tiles = tiles_of(keys.last - keys.first, STEP) * (int)job.repeat;
    for (int tile = 0; tile < tiles; ++tile, place.next()) {
      const u32 stage = place.stage;
      Sums<1, STEP / 8> p, ds;
      barrier_wait(memory.full(stage), place.parity);
      hold(flat(p));
      products_fence();
      begin_scores<ROWS>(p, k, memory.q(stage));
      products_commit();
      products_wait<1>();  // those of the tile before
      hold(flat(dk));
      hold(flat(dv));
      if (tile) release(memory.empty(before));
      before = stage;
      hold(flat(ds));
      begin_scores<ROWS>(ds, v, memory.d_o(stage));
      products_commit();
      products_wait<1>();
      hold(flat(p));
      keep_seen<true>(p, job.scores.span, row, column);
      row = row + STEP < keys.last ? row + STEP : keys.first;
#pragma unroll
      for (int m = 0; m < STEP / 8; ++m) {
        const float2 lse = load_shared_pair(memory.lse(stage) + 4 * (8 * m + 2 * t));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = p.at[0][m][e];
          x = exp2_fast(x * unit - (e % 2 ? lse.y : lse.x));
        }
      }
      products_wait<0>();
      hold(flat(ds));
      if (tile + 1 == tiles) release(memory.own_empty(own.stage));
#pragma unroll
      for (int m = 0; m < STEP / 8; ++m) {
        const float2 dot = load_shared_pair(memory.dot(stage) + 4 * (8 * m + 2 * t));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = ds.at[0][m][e];
          x = p.at[0][m][e] * (x * scale - (e % 2 ? dot.y : dot.x));
        }
      }
      u32 weights[STEP / 16][4], slopes[STEP / 16][4];
      round_sums(p, weights);
      round_sums(ds, slopes);
      hold(flat(dk));
      hold(flat(dv));
      products_fence();
      begin_sums(dv, weights, memory.d_o(stage));
      begin_sums(dk, slopes, memory.q(stage));
      products_commit();
    }
    products_wait<0>();
    hold(flat(dk));
    hold(flat(dv));
    release(memory.empty(before));
    own.next();
  }
  const int key = column + lane() / 4;
  const bool exists[2] = {key < job.scores.span.columns, key + 8 < job.scores.span.columns};
  const float one[2] = {1.0f, 1.0f};
  write_rows(dk, job.dk.rows(work.batch, work.head, column), job.dk.row, exists, one);
  write_rows(dv, job.dv.rows(work.batch, work.head, column), job.dv.row, exists, one);
}

extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
hopper_flash_bwd_keys(const __grid_constant__ Job job) {
  start_early();
  extern __shared__ u8 dynamic[];
  const KeysMemory memory{((u32)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    prefetch_map(job.q), prefetch_map(job.d_o), prefetch_map(job.k), prefetch_map(job.v);
    for (u32 stage = 0; stage < STAGES; ++stage) {
      barrier_init(memory.full(stage), 2);  // of what copies, and of the statistics' warp
      barrier_init(memory.empty(stage), 4 * GROUPS);
    }
    for (u32 own = 0; own < 2; ++own)
      barrier_init(memory.own_full(own), 1), barrier_init(memory.own_empty(own), 4 * GROUPS);
    barriers_are_set();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_down<40>();
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
    if (threadIdx.x == 0) load_keys(job, memory);
    if (warp == 1) load_statistics(job, memory);
  } else {
    registers_up<232>();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1;
    Stage place;
    Own own;
    Walk walk;
    for (Work work; walk.next(job.grid, work);) make_keys(job, memory, work, group, place, own);
  }
}

// --- dq ----------------------------------------------------------------------------------------------------

constexpr int KEYS = 128, TILE_BYTES = KEYS * D * 2;
constexpr int OWNS = D == 64 ? 2 : 1;
constexpr int FITTING = (SHARED - 2 * OWNS * OWN_BYTES) / TILE_BYTES, PLACES = FITTING < 8 ? FITTING : 8;
typedef RingPlace<PLACES> Place;
typedef RowsOf<ROWS, KEYS> Rows;
typedef RingPlace<OWNS> OwnRows;

// Shared memory of a block of rows: OWNS times its q and do, and a ring of tiles k 0, v 0, k 1, v 1, ...
struct RowsMemory {
  u32 base;
  __device__ __forceinline__ u32 q(u32 own) const { return base + 2 * own * OWN_BYTES; }
  __device__ __forceinline__ u32 tile(u32 place) const { return q(OWNS) + place * TILE_BYTES; }
  __device__ __forceinline__ u32 full(u32 place) const { return tile(PLACES) + 8 * place; }
  __device__ __forceinline__ u32 empty(u32 place) const { return full(PLACES + place); }
  __device__ __forceinline__ u32 own_full(u32 own) const { return full(2 * PLACES + own); }
  __device__ __forceinline__ u32 own_empty(u32 own) const { return own_full(OWNS + own); }
};

DEVICE void load_rows(const Job& job, const RowsMemory& memory) {
  Place place;
  OwnRows own;
  Walk walk;
  for (Work work; walk.next(job.grid, work);) {
    const Rows rows(job.grid, job.scores.span, work);
    if (rows.tiles.low >= rows.tiles.high) continue;
    const u32 own_full = memory.own_full(own.stage), q = memory.q(own.stage);
    barrier_wait(memory.own_empty(own.stage), own.parity ^ 1);
    barrier_expect(own_full, 2 * OWN_BYTES);
    copy_rows<ROWS>(q, job.q, rows.row, work.head, work.batch, own_full);
    copy_rows<ROWS>(q + OWN_BYTES, job.d_o, rows.row, work.head, work.batch, own_full);
    own.next();
    for (int n = 2 * rows.tiles.low; n < 2 * rows.tiles.high; ++n, place.next()) {
      const u32 full = memory.full(place.stage);
      barrier_wait(memory.empty(place.stage), place.parity ^ 1);
      barrier_expect(full, TILE_BYTES);
      copy_rows<KEYS>(memory.tile(place.stage), n % 2 ? job.v : job.k, n / 2 * KEYS,
                      work.head / (i32)job.repeat, work.batch, full);
    }
  }
}

// dq of one tile of rows.
DEVICE void make_rows(const Job& job, const RowsMemory& memory, const Work& work, int group, Place& place,
                      OwnRows& own) {
  const Rows rows(job.grid, job.scores.span, work);
  const int row = rows.row + 64 * group + threadIdx.x / 32 % 4 * 16;
  const float unit = job.scores.unit, scale = job.scores.scale;
  const u32 q = memory.q(own.stage) + 64 * group * 128, d_o = q + OWN_BYTES;
  float lse[2], dot[2];  // of rows lane / 4 and lane / 4 + 8
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + 8 * half + lane() / 4;
    const i64 at = job.scores.line(work.batch, work.head, i);
    const bool exists = i < job.scores.span.rows;
    lse[half] = exists ? in_units(job.lse[at]) : 0.0f;
    dot[half] = exists ? job.dot[at] * scale : 0.0f;
  }
  Sums<1, D / 8> dq;
  dq.clear();
  if (rows.tiles.low < rows.tiles.high) {
    barrier_wait(memory.own_full(own.stage), own.parity);
    u32 before = 0;
    for (int tile = rows.tiles.low; tile < rows.tiles.high; ++tile) {
      const u32 keys = place.stage;
      Sums<1, KEYS / 8> p, ds;
      barrier_wait(memory.full(keys), place.parity);
      place.next();
      hold(flat(p));
      products_fence();
      begin_scores<ROWS>(p, q, memory.tile(keys));
      products_commit();
      products_wait<1>();  // that of the tile before
      hold(flat(dq));
      if (tile > rows.tiles.low) release(memory.empty(before));
      before = keys;
      barrier_wait(memory.full(place.stage), place.parity);
      hold(flat(ds));
      begin_scores<ROWS>(ds, d_o, memory.tile(place.stage));
      products_commit();
      products_wait<1>();
      hold(flat(p));
      keep_seen<false>(p, job.scores.span, row, tile * KEYS);
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) p.at[0][n][e] = exp2_fast(p.at[0][n][e] * unit - lse[e / 2]);
      products_wait<0>();
      hold(flat(ds));
      release(memory.empty(place.stage));
      place.next();
      if (tile + 1 == rows.tiles.high) release(memory.own_empty(own.stage));
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          p.at[0][n][e] *= ds.at[0][n][e] * scale - dot[e / 2];
      u32 slopes[KEYS / 16][4];
      round_sums(p, slopes);
      hold(flat(dq));
      products_fence();
      begin_sums(dq, slopes, memory.tile(keys));
      products_commit();
    }
    products_wait<0>();
    hold(flat(dq));
    release(memory.empty(before));
    own.next();
  }
  const int i = row + lane() / 4;
  const bool exists[2] = {i < job.scores.span.rows, i + 8 < job.scores.span.rows};
  const float one[2] = {1.0f, 1.0f};
  write_rows(dq, job.dq.rows(work.batch, work.head, row), job.dq.row, exists, one);
}

extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
hopper_flash_bwd_queries(const __grid_constant__ Job job) {
  start_early();
  extern __shared__ u8 dynamic[];
  const RowsMemory memory{((u32)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    prefetch_map(job.q), prefetch_map(job.d_o), prefetch_map(job.k), prefetch_map(job.v);
    for (u32 place = 0; place < PLACES; ++place)
      barrier_init(memory.full(place), 1), barrier_init(memory.empty(place), 4 * GROUPS);
    for (u32 own = 0; own < OWNS; ++own)
      barrier_init(memory.own_full(own), 1), barrier_init(memory.own_empty(own), 4 * GROUPS);
    barriers_are_set();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_down<24>();
    if (threadIdx.x == 0) load_rows(job, memory);
  } else {
    registers_up<240>();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1;
    Place place;
    OwnRows own;
    Walk walk;
    for (Work work; walk.next(job.grid, work);) make_rows(job, memory, work, group, place, own);
  }
}
#endif
