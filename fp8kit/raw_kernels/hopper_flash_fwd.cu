// Attention forward on Hopper, for rows that see a band of columns (causal masks, windows) and no more. The
// method is flash_fwd.cu's, which takes everything else; how it is spread over the chip follows
// FlashAttention-3 (Shah et al., 2024).
//
// functions: hopper_flash_fwd (attention_fwd)
// variants: T=bf16,f16; D=64; DV=64; KIND=0
// variants: T=bf16,f16; D=128; DV=128; KIND=0
//
// A block takes one tile of rows of q after another (a persistent grid: as many blocks as multiprocessors).
// Its warpgroups have two roles:
//
//   the first, the loader: one thread of it copies tiles of k and v into a ring of PLACES places in shared
//   memory, in the order in which they are used: k 0, k 1, v 0, k 2, v 1, ...; and tiles of q into a ring of
//   two. It runs ahead, into the next tile of rows too.
//   the others, the multipliers: each has 64 of the rows. While the tensor cores add p v of one tile of keys
//   it makes the weights p of the next: q k^T of that was begun before. They take turns at beginning
//   products, so that one's exponentials run beside another's products.
#include "hopper_flash.cuh"

struct alignas(64) Job {
  TensorMap q, k, v;
  Array o;
  float* lse;
  i64 repeat;  // query heads to a key head
  Grid grid;
  Scores scores;
};

#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // no other chip has wgmma
extern "C" __global__ void hopper_flash_fwd(const __grid_constant__ Job job) { __trap(); }
#else

constexpr int GROUPS = D == 64 ? 3 : 2;  // multipliers
constexpr int ROWS = 64 * GROUPS, KEYS = 128;
constexpr int Q_BYTES = ROWS * D * 2, TILE_BYTES = KEYS * D * 2;
constexpr int FITTING = (SHARED - 2 * Q_BYTES) / TILE_BYTES, PLACES = FITTING < 8 ? FITTING : 8;
typedef RingPlace<PLACES> Place;
typedef RowsOf<ROWS, KEYS> Rows;
typedef RingPlace<2> Queries;

// Shared memory, from a multiple of 1024 bytes on.
struct Memory {
  u32 base;
  __device__ __forceinline__ u32 q(u32 place) const { return base + place * Q_BYTES; }
  __device__ __forceinline__ u32 tile(u32 place) const { return q(2) + place * TILE_BYTES; }
  __device__ __forceinline__ u32 full(u32 place) const { return tile(PLACES) + 8 * place; }
  __device__ __forceinline__ u32 empty(u32 place) const { return full(PLACES + place); }
  __device__ __forceinline__ u32 q_full(u32 place) const { return full(2 * PLACES + place); }
  __device__ __forceinline__ u32 q_empty(u32 place) const { return q_full(2 + place); }
};

// --- the loader --------------------------------------------------------------------------------------------

DEVICE void load(const Job& job, const Memory& memory) {
  Place place;
  Queries queries;
  Walk walk;
  for (Work work; walk.next(job.grid, work);) {
    const Rows rows(job.grid, job.scores.span, work);
    if (rows.tiles.low >= rows.tiles.high) continue;
    auto copy = [&](const TensorMap& map, int tile) {
      const u32 full = memory.full(place.stage);
      barrier_wait(memory.empty(place.stage), place.parity ^ 1);
      barrier_expect(full, TILE_BYTES);
      const i32 head = work.head / (i32)job.repeat;
      copy_rows<KEYS>(memory.tile(place.stage), map, tile * KEYS, head, work.batch, full);
      place.next();
    };
    const u32 q_full = memory.q_full(queries.stage);
    barrier_wait(memory.q_empty(queries.stage), queries.parity ^ 1);
    barrier_expect(q_full, Q_BYTES);
    copy_rows<ROWS>(memory.q(queries.stage), job.q, rows.row, work.head, work.batch, q_full);
    queries.next();
    copy(job.k, rows.tiles.low);
    for (int tile = rows.tiles.low; tile < rows.tiles.high; ++tile) {
      if (tile + 1 < rows.tiles.high) copy(job.k, tile + 1);
      copy(job.v, tile);
    }
  }
}

// --- the multipliers ---------------------------------------------------------------------------------------

// Turns at beginning products: group after group, by barriers of two groups' threads each.
DEVICE void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory");
}
DEVICE void end_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(group + 1 == GROUPS ? 1 : group + 2) : "memory");
}

// The softmax of rows lane / 4 and lane / 4 + 8 of a warp's 16 as far as it was seen; a lane has its own
// columns' sum.
struct Softmax {
  float greatest[2] = {-INF, -INF}, sum[2] = {0.0f, 0.0f};

  // Scores become weights; `correction` is for what was summed by the former greatest score.
  template <int N> __device__ __forceinline__ void weigh(Sums<1, N>& p, float unit, float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tops[2] = {greatest[half], -INF}, sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) tops[e] = fmaxf(tops[e], p.at[0][n][2 * half + e]);
      float top = fmaxf(tops[0], tops[1]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float shift = top == -INF ? 0.0f : top * unit;
      correction[half] = exp2_fast(greatest[half] * unit - shift);
      greatest[half] = top;
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = p.at[0][n][2 * half + e];
          x = exp2_fast(x * unit - shift);
          sums[e] += x;
        }
      sum[half] = sum[half] * correction[half] + (sums[0] + sums[1]);
    }
  }
};

// Output and log-sum-exp of this warp's rows, which begin at `row`.
DEVICE void write(const Job& job, const Work& work, int row, const Softmax& softmax,
                  const Sums<1, D / 8>& o) {
  const float unit = job.scores.unit;
  bool exists[2];
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int i = row + 8 * half + lane() / 4;
    exists[half] = i < job.scores.span.rows;
    inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;  // nothing seen: zeros; NaN stays NaN
    const float top = softmax.greatest[half], shift = top == -INF ? 0.0f : top * unit;
    if (exists[half] && lane() % 4 == 0)
      job.lse[job.scores.line(work.batch, work.head, i)] = (shift + log2f(sum)) * LN2;
  }
  write_rows(o, job.o.rows(work.batch, work.head, row), job.o.row, exists, inverse);
}

// One tile of rows; `group`: which multiplier.
DEVICE void attend(const Job& job, const Memory& memory, const Work& work, int group, Place& place,
                   Queries& queries) {
  const Rows rows(job.grid, job.scores.span, work);
  const int row = rows.row + 64 * group + threadIdx.x / 32 % 4 * 16;
  const float unit = job.scores.unit;
  const u32 q = memory.q(queries.stage) + 64 * group * 128;
  Sums<1, D / 8> o;
  Softmax softmax;
  o.clear();
  if (rows.tiles.low < rows.tiles.high) {
    Sums<1, KEYS / 8> s;
    u32 p[KEYS / 16][4];
    float correction[2];
    barrier_wait(memory.q_full(queries.stage), queries.parity);
    barrier_wait(memory.full(place.stage), place.parity);
    wait_for_turn(group);
    hold(flat(s));
    products_fence();
    begin_scores<ROWS>(s, q, memory.tile(place.stage));
    products_commit();
    end_turn(group);
    products_wait<0>();
    hold(flat(s));
    release(memory.empty(place.stage));
    place.next();
    keep_seen<false>(s, job.scores.span, row, rows.tiles.low * KEYS);
    softmax.weigh(s, unit, correction);
    round_sums(s, p);
    for (int tile = rows.tiles.low + 1; tile < rows.tiles.high; ++tile) {
      const u32 keys = place.stage;
      barrier_wait(memory.full(keys), place.parity);
      place.next();
      wait_for_turn(group);
      hold(flat(s));
      products_fence();
      begin_scores<ROWS>(s, q, memory.tile(keys));
      products_commit();
      barrier_wait(memory.full(place.stage), place.parity);
      hold(flat(o));
      begin_sums(o, p, memory.tile(place.stage));
      products_commit();
      end_turn(group);
      products_wait<1>();
      hold(flat(s));
      release(memory.empty(keys));
      keep_seen<false>(s, job.scores.span, row, tile * KEYS);
      softmax.weigh(s, unit, correction);
      products_wait<0>();
      hold(flat(o));
      release(memory.empty(place.stage));
      place.next();
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o.at[0][n][e] *= correction[e / 2];
      round_sums(s, p);
    }
    release(memory.q_empty(queries.stage));
    queries.next();
    barrier_wait(memory.full(place.stage), place.parity);
    hold(flat(o));
    products_fence();
    begin_sums(o, p, memory.tile(place.stage));
    products_commit();
    products_wait<0>();
    hold(flat(o));
    release(memory.empty(place.stage));
    place.next();
  }
  write(job, work, row, softmax, o);
}

// --- the kernel --------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(128 + 128 * GROUPS, 1)
hopper_flash_fwd(const __grid_constant__ Job job) {
  start_early();
  extern __shared__ u8 dynamic[];
  const Memory memory{((u32)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    prefetch_map(job.q), prefetch_map(job.k), prefetch_map(job.v);
    for (u32 place = 0; place < PLACES; ++place) {
      barrier_init(memory.full(place), 1);
      barrier_init(memory.empty(place), 4 * GROUPS);  // of every warp that multiplies it
    }
    for (u32 place = 0; place < 2; ++place)
      barrier_init(memory.q_full(place), 1), barrier_init(memory.q_empty(place), 4 * GROUPS);
    barriers_are_set();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    registers_down<GROUPS == 3 ? 32 : 24>();
    if (threadIdx.x == 0) load(job, memory);
  } else {
    registers_up<GROUPS == 3 ? 160 : 240>();
    // by a shuffle the compiler knows it to be the same in a warp, and so what follows from it
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1;
    if (group == GROUPS - 1) end_turn(group);
    Place place;
    Queries queries;
    Walk walk;
    for (Work work; walk.next(job.grid, work);) attend(job, memory, work, group, place, queries);
  }
}
#endif
