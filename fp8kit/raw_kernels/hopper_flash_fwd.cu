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

// Turns at beginning products: one multiplier after another, by barriers of two's threads each. The last one
// gives the first its first turn.
DEVICE void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
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

// A piece of work as a multiplier has it: its first row; the block's tiles of keys; `end`, where those that
// its own rows see end, `low` where they see none.
struct Task {
  Work work;
  int row, low, high, end;

  __device__ __forceinline__ bool take(Walk& walk, const Job& job, int group) {
    const Span& span = job.scores.span;
    if (!walk.next(job.grid, work)) return false;
    const Rows rows(job.grid, span, work);
    row = rows.row + 64 * group, low = rows.tiles.low, high = rows.tiles.high, end = low;
    if (row < span.rows)
      end = max(low, min(high, tiles_of(span.last_column(min(span.rows, row + 64)), KEYS)));
    return true;
  }
  __device__ __forceinline__ bool sees() const { return low < end; }
};

struct Multiplier {
  const Job& job;
  const Memory& memory;
  const int group;
  Place place;
  Queries queries;

  __device__ __forceinline__ u32 q() const { return memory.q(queries.stage) + 64 * group * 128; }
  __device__ __forceinline__ int row(const Task& task) const { return task.row + threadIdx.x / 32 % 4 * 16; }

  // Passes a place that only other multipliers use.
  __device__ __forceinline__ void pass() {
    barrier_wait(memory.full(place.stage), place.parity);
    release(memory.empty(place.stage));
    place.next();
  }

  // Passes the task's tiles from `end` on, with their turns; so many places of the last one.
  __device__ __forceinline__ void pass(const Task& task, int of_last) {
    for (int tile = task.end; tile < task.high; ++tile) {
      wait_for_turn(group);
      end_turn(group);
      pass();
      if (tile + 1 < task.high || of_last == 2) pass();
    }
  }

  // Waits for what was begun.
  template <int N> __device__ __forceinline__ void finish(Sums<1, N>& sums) {
    products_wait<0>();
    hold(flat(sums));
  }

  // Begins q k^T of the first tile of the task that the rings are at.
  __device__ __forceinline__ void begin(Sums<1, KEYS / 8>& s) {
    barrier_wait(memory.q_full(queries.stage), queries.parity);
    barrier_wait(memory.full(place.stage), place.parity);
    wait_for_turn(group);
    hold(flat(s));
    products_fence();
    begin_scores<ROWS>(s, q(), memory.tile(place.stage));
    products_commit();
    end_turn(group);
  }

  // A task whose first q k^T is in `s`, as far as beginning the last product.
  __device__ __forceinline__ void attend(const Task& task, Sums<1, KEYS / 8>& s, Sums<1, D / 8>& o,
                                         Softmax& softmax) {
    const float unit = job.scores.unit;
    u32 p[KEYS / 16][4];
    float correction[2];
    release(memory.empty(place.stage));
    place.next();
    keep_seen<false>(s, job.scores.span, row(task), task.low * KEYS);
    softmax.weigh(s, unit, correction);
    round_sums(s, p);
    for (int tile = task.low + 1; tile < task.end; ++tile) {
      const u32 keys = place.stage;
      barrier_wait(memory.full(keys), place.parity);
      place.next();
      wait_for_turn(group);
      hold(flat(s));
      products_fence();
      begin_scores<ROWS>(s, q(), memory.tile(keys));
      products_commit();
      barrier_wait(memory.full(place.stage), place.parity);
      hold(flat(o));
      begin_sums(o, p, memory.tile(place.stage));
      products_commit();
      end_turn(group);
      products_wait<1>();
      hold(flat(s));
      release(memory.empty(keys));
      keep_seen<false>(s, job.scores.span, row(task), tile * KEYS);
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
    if (task.end < task.high) pass();  // the next tile's keys lie before the last one's values
    barrier_wait(memory.full(place.stage), place.parity);
    hold(flat(o));
    products_fence();
    begin_sums(o, p, memory.tile(place.stage));
    products_commit();
  }

  // Output and log-sum-exp.
  __device__ __forceinline__ void write(const Task& task, const Softmax& softmax, const Sums<1, D / 8>& o) {
    const Work& work = task.work;
    bool exists[2];
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int i = row(task) + 8 * half + lane() / 4;
      exists[half] = i < job.scores.span.rows;
      inverse[half] = sum == 0.0f ? 0.0f : 1.0f / sum;  // nothing seen: zeros; NaN stays NaN
      const float top = softmax.greatest[half], shift = top == -INF ? 0.0f : top * job.scores.unit;
      if (exists[half] && lane() % 4 == 0)
        job.lse[job.scores.line(work.batch, work.head, i)] = (shift + log2f(sum)) * LN2;
    }
    write_rows(o, job.o.rows(work.batch, work.head, row(task)), job.o.row, exists, inverse);
  }

  // All of the block's work. The first product of a task is begun before the output of the one before it is
  // written, behind its last product.
  __device__ __forceinline__ void run() {
    Walk walk;
    Task task, next;
    Sums<1, KEYS / 8> s;
    bool more = task.take(walk, job, group);
    if (more && task.sees()) begin(s), finish(s);
    while (more) {
      Sums<1, D / 8> o;
      Softmax softmax;
      o.clear();
      if (task.sees()) {
        attend(task, s, o, softmax);
        const u32 last = place.stage;
        place.next();
        pass(task, 1);
        more = next.take(walk, job, group);
        if (more && next.sees()) begin(s), finish(s), finish(o);
        else finish(o);
        release(memory.empty(last));
      } else {
        if (task.low < task.high) {
          barrier_wait(memory.q_full(queries.stage), queries.parity);
          release(memory.q_empty(queries.stage));
          queries.next();
        }
        pass(task, 2);
        more = next.take(walk, job, group);
        if (more && next.sees()) begin(s), finish(s);
      }
      write(task, softmax, o);
      task = next;
    }
  }
};

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
    Multiplier{job, memory, group}.run();
  }
}
#endif
