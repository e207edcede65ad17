// FP8 products on Hopper: out = (a scales) (b scales)^T + bias + addend, a (m, k), b (n, k), rows of k codes.
//
// functions: hopper_gemm (fp8_gemm, block_gemm, grouped_fp8_gemm, fp8_gemm_act, fp8_gemm_act_bwd,
//   fp8_gemm_cast, fp8_gemm_lines, grouped_gemm)
// spills: 20 bytes on sm_90a
// variants: LEFT RIGHT=e4m3 e4m3,e4m3 e5m2,e5m2 e4m3; T=f32,bf16,f16; LAYOUT=nt; GROUPS=none; EPILOGUE=bare;
//   ACT=identity; BM BN=128 128,128 64,128 32,64 64,64 32; PROMOTE SCALES=0 whole,128 whole,128 lines_squares
// variants: LEFT RIGHT=e4m3 e4m3,e4m3 e5m2,e5m2 e4m3; T=f32,bf16,f16; LAYOUT=nt; GROUPS=none; EPILOGUE=bare;
//   ACT=identity; BM BN PROMOTE SCALES=128 256 0 whole,128 96 0 whole,128 96 128 whole,64 224 0 whole,
//   64 96 0 whole,64 96 128 whole,256 128 128 whole,256 128 128 lines_squares,256 128 128 squares_lines,
//   256 128 128 lines_lines
// variants: LEFT RIGHT=e4m3 e4m3,e4m3 e5m2,e5m2 e4m3; T=f32,bf16,f16; LAYOUT=nt; EPILOGUE=bare; ACT=identity;
//   GROUPS SCALES=rows whole,terms whole; BM BN PROMOTE=128 256 0,128 128 0,256 128 128,128 128 128
// variants: LEFT RIGHT=e4m3 e4m3,e4m3 e5m2,e5m2 e4m3; T=f32,bf16,f16; LAYOUT=nt; EPILOGUE=bare; ACT=identity;
//   GROUPS SCALES=rows lines_squares,terms lines_lines; BM BN PROMOTE=256 128 128,128 128 128
// variants: LEFT RIGHT T=bf16 bf16 bf16,f16 f16 f16; GROUPS LAYOUT=rows nt,rows nn,terms tn; SCALES=whole;
//   BM BN PROMOTE=128 256 0,128 128 0; EPILOGUE=bare; ACT=identity
// variants: LEFT=e4m3; RIGHT=e4m3; T=f32,bf16,f16; LAYOUT=nt; GROUPS=none; SCALES=whole;
//   BM BN PROMOTE=128 128 0,256 128 128,128 128 128; EPILOGUE=forward; ACT=identity,gelu,relu,swiglu
// variants: LEFT=e5m2,e4m3; RIGHT=e4m3; T=f32,bf16,f16; LAYOUT=nt; GROUPS=none; SCALES=whole;
//   BM BN PROMOTE=128 128 0,128 128 128; EPILOGUE=backward; ACT=gelu,relu,swiglu
// variants: LEFT=e4m3; RIGHT=e4m3; T=f32,bf16,f16; LAYOUT=nt; GROUPS=none; EPILOGUE=lines; ACT=identity;
//   BM BN PROMOTE SCALES=128 128 0 whole,256 128 128 whole,128 128 128 whole,256 128 128 lines_squares,
//   128 128 128 lines_squares
//
// A block makes one BM x BN tile of the result after another (a persistent grid: as many blocks as
// multiprocessors). Its 12 or 16 warps have two or three roles:
//
//   warps 0 to 3, the loader: one thread of them copies tiles of a and b, 128 codes of the contraction at a
//   time, and their blocks' scales, into a ring of STAGES places in shared memory, and runs ahead of the
//   products, into the next tile too. It waits at a place's `empty` barrier before it fills it. With GROUPS
//   terms warps 1 to 3 clear what a place holds of other groups (`clear`).
//   warps 4 to 7 and 8 to 11, the multipliers: each warpgroup waits at a place's `full` barrier, multiplies
//   its half of the tile's rows with all columns by wgmma, 64 rows at a time, arrives at `empty`, and in the
//   end each warp writes its rows: from registers or by shared memory (`write_rows`).
//   The loader gives them its registers. TURNS: each makes whole tiles; one writes, the other multiplies.
//   warps 12 to 15, the finishers, with EPILOGUE backward alone: they carry it out (`finish`), on what the
//   multipliers have written to shared memory, while these multiply the next tile.
//
// LEFT and RIGHT of 16 bits: products without scales, of groups. LAYOUT: the contraction runs along the rows
// of both (nt), down b's (nn), down both (tn).
//
// Sums: Hopper adds FP8 products with 13 fraction bits (docs/numerics.md). PROMOTE: after how many codes such
// a sum is added to a float32 one; 0: never ("fast accumulation"). With SCALES of blocks it is at most 128,
// and the partial sum is scaled first. Order: fk.Accumulation's "hopper_fast" and "hopper_split".
//
// GROUPS rows: the rows of a are groups, each times a b of its own. GROUPS terms: the terms of the
// contraction are groups, each makes a result of its own. `sizes` says on the device how large groups are:
// every role walks past them tile by tile (`Walk`), and nobody else need know. Tiles of rows cost what rows
// they have: a loader takes the next one when it is ready for it, and notes its number for the multipliers.
// EPILOGUE, with ACT: what is done to the result before it is written (hopper_epilogue.cuh).
#include "fp8.cuh"
#include "hopper_epilogue.cuh"

// Strides in elements; addend's are out's. a_scale, b_scale: of tensors (step 0), rows (step 1), or squares,
// a_step and b_step apart down. tall, wide: tiles, or clusters; band: rows of tiles that are made together,
// for the L2 cache. Of groups: how many, the rows of each (`slots`, or 0), how far a group's scales of b lie
// apart, `terms` of all (without groups: CLUSTER). m: rows of all groups, with GROUPS terms of one result.
// counter: of tiles of GROUPS rows that blocks have taken beside each one's first, 0 at the begin.
struct alignas(64) Job {
  TensorMap a, b, a_lines, b_lines, parts, a_last;  // parts: the result's; a_last: of a tile with fewer rows
  const float *a_scale, *b_scale;
  const T *bias, *addend;
  T* out;
  const i32* sizes;
  i32* counter;
  i64 m, n, out_stride, depths, a_step, b_step, tall, wide, band, groups, slots, b_group, terms;
  Further<EPILOGUE> further;
};

#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // no other chip has wgmma
extern "C" __global__ void hopper_gemm(const __grid_constant__ Job job) { __trap(); }
#else
constexpr int DEPTH = 128, STEPS = DEPTH / 32;  // bytes of a tile's row, as the swizzle's; wgmma's along it
constexpr int WIDTH = sizeof(LEFT), TERMS = DEPTH / WIDTH;  // bytes of a term, terms of a tile
constexpr int MULTIPLIERS = 256;  // threads
enum Groups { none, rows, terms }; enum Layout { nt, nn, tn };
// a scale for a tensor or for each row; for lines of 1 x 128 codes, squares of 128 x 128
enum Scales { whole, lines_squares, squares_lines, lines_lines };
constexpr bool A_LINES = SCALES == lines_squares || SCALES == lines_lines;
constexpr bool B_LINES = SCALES == squares_lines || SCALES == lines_lines;
constexpr bool A_DOWN = LAYOUT == tn, B_DOWN = LAYOUT != nt;  // terms run down the rows: boxes of 64 across
constexpr int A_STEP = A_DOWN ? 128 : 2, B_STEP = B_DOWN ? 128 : 2;  // of a descriptor, for a wgmma's terms
constexpr bool BY_ROWS = GROUPS == rows, BY_TERMS = GROUPS == terms, GROUPED = BY_ROWS || BY_TERMS;
constexpr bool FINISHERS = EPILOGUE == backward;
constexpr bool TURNS = !PROMOTE && BM == 128 && BN == 128 && !GROUPED && !FINISHERS;
constexpr int WAVES = TURNS ? BM / 64 : BM > 128 ? BM / 128 : 1;  // 64 rows at a time, of a multiplier
constexpr int A_BYTES = BM * DEPTH, B_BYTES = BN * DEPTH;
constexpr int A_SCALE_BYTES = A_LINES ? 4 * BM : 0, B_SCALE_BYTES = B_LINES ? 4 * BN : 0;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES + A_SCALE_BYTES + B_SCALE_BYTES;
constexpr int SHARED = 227 * 1024 - 2048;  // of a block, without what aligns it and the barriers
// Which form goes which way; the host says the same: `result_map` (STAGED), `blocks_together`, `last_rows`
// (a's rows where a tile has fewer), and of groups of rows the map brings 64 rows of a.
// STAGED: results go by shared memory, where each warp has a part of 16 rows by PART columns, from which
// copies bring them to `out` while the next tile is multiplied, and epilogues read them. With scales of
// blocks parts of half a tile leave room for a fourth stage. LATE: columns from PART on wait in registers for
// the next tile. SKEWED: the second multiplier begins a tile one partial sum later, so that one adds while
// the other multiplies. FINISHERS: a fourth warpgroup. CLUSTER: two blocks make tiles beside each other, and
// either copies half of a's to both. BM 64: the first multiplier's few rows.
constexpr bool IN_PARTS = BY_TERMS || BN == 256 || (!BY_ROWS && (BM == 256 || (SCALES != whole && BN > 32)));
constexpr bool STAGED = FUSED || (sizeof(T) == 2 && IN_PARTS);
constexpr int PART = BN < 128 ? BN : BM == 256 && !FUSED && !(BY_TERMS && SCALES == whole) ? 64 : 128;
constexpr int PART_BYTES = 16 * PART * sizeof(T), PARTS_BYTES = STAGED ? MULTIPLIERS / 32 * PART_BYTES : 0;
static_assert(!COLUMNS || PART_BYTES == PIECE_BYTES, "a warp's part is a piece of 128 columns");
constexpr bool LATE = STAGED && BN == 256, SKEWED = PROMOTE == DEPTH && WAVES == 2 && !BY_ROWS && !FUSED;
#define IS_none 1
#define IS_terms 2
#define IS_backward 3
#if (JOIN(IS_, GROUPS) == 2 && BM == 256) || \
    (JOIN(IS_, GROUPS) == 1 && !PROMOTE && BM == 128 && BN == 128) || JOIN(IS_, EPILOGUE) == 3
#define __in_clusters__() __cluster_dims__(2, 1, 1)
#else
#define __in_clusters__()  // clusters of one block would cost up to a third of the speed
#endif
constexpr int CLUSTER = TURNS || FINISHERS || (BY_TERMS && WAVES == 2) ? 2 : 1;
constexpr bool TIGHT = LATE || FUSED || (B_LINES && WAVES == 2 && CLUSTER == 1);  // of registers
constexpr int FITTING = (SHARED - PARTS_BYTES) / (STAGE_BYTES + B_SCALE_BYTES);
constexpr int STAGES = FITTING < 16 ? FITTING : 16;
static_assert(BM % 64 == 0 && (STAGED ? BN % 64 : BN % 32) == 0, "64 rows, 32 columns, or 64 by parts");
static_assert(!FUSED || (BN == 128 && !GROUPED), "epilogues have tiles of 128 columns");
static_assert(!FINISHERS || BM == 128, "finishers: a part of shared memory for each 16 rows");
constexpr int THREADS = FINISHERS ? 512 : 384;  // all together have 64 Ki registers, each one:
constexpr int OF_LOADER = TIGHT ? 24 : 40, OF_FINISHER = 136;
constexpr int OF_MULTIPLIER = FINISHERS ? 176 : TIGHT ? 240 : 232;
static_assert(BN / 2 * (WAVES + (PROMOTE > 0)) <= 192, "no registers: with PROMOTE at most 256 x 128");
static_assert(PROMOTE <= DEPTH || WAVES == 1, "PROMOTE beyond 128: BM at most 128");
static_assert(WIDTH == 1 ? LAYOUT == nt : !PROMOTE && GROUPED && SCALES == whole, "16 bits: groups alone");
static_assert(PROMOTE % 32 == 0 && (PROMOTE % DEPTH == 0 || DEPTH % PROMOTE == 0), "PROMOTE: 32, 64, 128 n");
static_assert(SCALES == whole || (PROMOTE && PROMOTE <= DEPTH && 128 % BN == 0), "a scale for 128 codes");
typedef RingPlace<STAGES> Place;

// What the warp's first lane has.
DEVICE i32 first_lane(i32 x) { return GROUPED || PROMOTE ? __shfl_sync(~0u, x, 0) : x; }

// A tile of the result: its first row and column, how many times 128 terms it is the sum of, its group.
// GROUPS rows: those before `top` and from `cover` on are another group's, those from `end` on are 0. terms:
// the first is `from`, the first `before` are another group's, and so those from `last` on of the last 128.
struct Tile {
  i32 row, column, depths, group, top, end, cover, from, before, last;

  // By shuffles the compiler knows it to be the same in a warp.
  METHOD void make_uniform() {
    row = first_lane(row), column = first_lane(column);
    depths = first_lane(depths), group = first_lane(group);
    if constexpr (BY_ROWS) top = first_lane(top), end = first_lane(end), cover = first_lane(cover);
  }

  // Whether a row of the result is this tile's to write, and whether it is 0.
  METHOD bool has(const Job& job, i64 i) const { return BY_ROWS ? i >= top && i < cover : i < job.m; }
  METHOD bool is_zero(i64 i) const { return BY_ROWS ? i >= end : depths == 0; }
};

// Tile number `tile` of `tall` x `job.wide`: bands of rows, in them column after column.
DEVICE void place_tile(const Job& job, i32 tile, i32 tall, Tile& to) {
  const i32 wide = (i32)job.wide, band = tile / ((i32)job.band * wide) * (i32)job.band;
  const i32 height = min((i32)job.band, tall - band), local = tile - band * wide;
  to.row = (band + local % height) * BM;
  to.column = (local / height * CLUSTER + blockIdx.x % CLUSTER) * (BN / HALVES);
}

// A copy begins at a multiple of 16 bytes of a map's row. So tiles whose rows have scales in lines begin at
// a multiple of four of them, sums at a multiple of 16 terms, or of 128, where blocks of these have scales.
constexpr i32 ROW_STEP = BY_ROWS && A_LINES ? 4 : 1, TERM_STEP = A_DOWN ? 1 : SCALES == whole ? 16 : DEPTH;

// A role's way along the list of tiles, forwards only: a group, its first row or term, its first tile.
struct Walk {
  i32 group = 0, start = 0, first = 0;

  // Rows or terms that the group takes up, `size` its own. What is left behind the last one is one more.
  METHOD i32 cover(const Job& job, i32& size) const {
    const i32 left = (i32)(BY_ROWS ? job.m : job.terms) - start;
    const i32 asked = group < (i32)job.groups ? max(job.sizes[group], 0) : 0;
    const i32 found = group == (i32)job.groups ? left : min(job.slots ? (i32)job.slots : asked, left);
    size = min(asked, found);
    return found;
  }

  // Tile number `tile`, which is none before the last one asked for; false where there is none.
  METHOD bool at(const Job& job, i32 tile, Tile& to) {
    i32 size;
    if constexpr (BY_ROWS) {
      for (;; ++group) {
        const i32 rows = cover(job, size), tall = rows ? (start % ROW_STEP + rows + BM - 1) / BM : 0;
        const i32 tiles = tall * (i32)job.wide;
        if (tile < first + tiles) {
          place_tile(job, tile - first, tall, to);
          to.row += start / ROW_STEP * ROW_STEP, to.from = 0;
          to.top = start, to.end = start + size, to.cover = start + rows;
          to.depths = size && to.row < to.end ? (i32)job.depths : 0;
          break;
        }
        if (group == (i32)job.groups) return false;
        first += tiles, start += rows;
      }
    } else {
      const i32 tiles = (i32)(job.tall * job.wide), there = tile / tiles;
      if (there >= (BY_TERMS ? (i32)job.groups : 1)) return false;
      place_tile(job, tile - there * tiles, (i32)job.tall, to);
      to.from = 0, to.depths = (i32)job.depths;
      if constexpr (BY_TERMS) {
        for (; group < there; ++group) start += cover(job, size);
        cover(job, size);
        to.before = start % TERM_STEP, to.from = start - to.before;
        to.depths = size ? (to.before + size + TERMS - 1) / TERMS : 0;
        to.last = to.before + size - TERMS * (to.depths - 1);
      }
    }
    to.group = group;
    return true;
  }
};

// Shared memory, from a multiple of 1024 bytes on.
struct Memory {
  u32 base;
  // Where a warp of the multipliers, 0 to 7, puts its results.
  METHOD u32 part(u32 warp) const { return base + warp * PART_BYTES; }
  METHOD u32 a(u32 stage) const { return base + PARTS_BYTES + stage * A_BYTES; }
  METHOD u32 b(u32 stage) const { return a(STAGES) + stage * B_BYTES; }
  METHOD u32 a_scales(u32 stage) const { return b(STAGES) + stage * A_SCALE_BYTES; }
  // Twice as many as stages, so that a place may be filled again before its scales of b are read.
  METHOD u32 b_scales(u32 stage, u32 parity) const {
    return a_scales(STAGES) + (stage + parity * STAGES) * B_SCALE_BYTES;
  }
  METHOD u32 full(u32 stage) const { return b_scales(0, 2) + 8 * stage; }
  METHOD u32 empty(u32 stage) const { return full(STAGES + stage); }
  METHOD u32 landed(u32 mixed) const { return full(2 * STAGES + mixed); }
  // Of a multiplier, 0 or 1: its warps' parts are filled, and have been read.
  METHOD u32 made(u32 multiplier) const { return full(3 * STAGES + multiplier); }
  METHOD u32 taken(u32 multiplier) const { return full(3 * STAGES + 2 + multiplier); }
  METHOD u32 note(u32 place) const { return full(64 + 2 * place); }
};

// --- the loader --------------------------------------------------------------------------------------------

DEVICE void load(const Job& job, const Memory& memory) {
  Place place, mixed;
  Walk walk;
  Tile at;
  const i32 step = gridDim.x / CLUSTER;
  for (i32 tile = blockIdx.x / CLUSTER;; tile = BY_ROWS ? step + atomicAdd(job.counter, 1) : tile + step) {
    const bool found = walk.at(job, tile, at);
    if constexpr (BY_ROWS) {  // in the tile's first place; one without terms, or that is none, has it alone
      barrier_wait(memory.empty(place.stage), place.parity ^ 1);
      store_shared(memory.note(place.stage), __int_as_float(tile));
      if (!found || at.depths == 0) barrier_arrive(memory.full(place.stage)), place.next();
    }
    if (!found) break;
    // Rows that there are, by eights for each block, as others take longer; of a group's by 64.
    const i32 by = BY_ROWS ? 64 : 8 * CLUSTER, all = (BY_ROWS ? at.end : (i32)job.m) - at.row;
    const i32 rows = BY_TERMS ? BM : (min(all, BM) + by - 1) / by * by, own = blockIdx.x % CLUSTER * rows / 2;
    const TensorMap& a_map = !GROUPED && rows < BM ? job.a_last : job.a;
#pragma unroll 1
    for (i32 depth = 0; depth < at.depths; ++depth, place.next()) {
      const u32 stage = place.stage;
      const i32 term = at.from + depth * TERMS;
      u32 full = memory.full(stage);
      barrier_wait(memory.empty(stage), place.parity ^ 1);
      const i32 begin = depth ? 0 : at.before, stop = depth + 1 == at.depths ? at.last : TERMS;
      if (BY_TERMS && (begin > 0 || stop < TERMS)) {  // for `clear`, which will say that it is full
        store_words_shared(memory.note(mixed.stage), {stage, (u32)begin, (u32)stop, 0});
        full = memory.landed(mixed.stage), mixed.next();
      }
      barrier_expect(full, STAGE_BYTES - (BM - rows) * DEPTH);
      if constexpr (BY_ROWS) {
#pragma unroll
        for (i32 i = 0; i < BM; i += 64)
          if (i < rows) copy_tile(memory.a(stage) + i * DEPTH, job.a, term, at.row + i, full);
        copy_operand<B_DOWN, BN>(memory.b(stage), job.b, term, at.column, at.group, full);  // its matrix
      } else {
        CLUSTER == 2 ? copy_tile_to_both(memory.a(stage) + own * DEPTH, a_map, term, at.row + own, full)
                     : copy_operand<A_DOWN, BM>(memory.a(stage), a_map, term, at.row, full);
        copy_operand<B_DOWN, BN>(memory.b(stage), job.b, term, at.column, full);
      }
      if constexpr (HALVES == 2)  // the second half of the tile's columns, behind the first
        copy_tile(memory.b(stage) + B_BYTES / 2, job.b, term, at.column + (i32)job.n / 2, full);
      if constexpr (A_LINES) copy_tile(memory.a_scales(stage), job.a_lines, at.row, term / DEPTH, full);
      if constexpr (B_LINES)
        copy_tile(memory.b_scales(stage, place.parity), job.b_lines, at.column, term / DEPTH, full);
    }
  }
  if constexpr (BY_TERMS) {  // a note that there are no more, once its place is free
    barrier_wait(memory.empty(place.stage), place.parity ^ 1);
    store_words_shared(memory.note(mixed.stage), {STAGES, 0, 0, 0});
    barrier_arrive(memory.landed(mixed.stage));
  }
}

// Where a group's first or last term lies within a stage: once it has `landed`, three warps make the codes of
// other groups 0, NaN too; then it is full. A thread has the same 16 bytes of every 12th row, swizzled.
DEVICE void clear(const Memory& memory) {
  const i32 chunk = threadIdx.x % 8;
  for (Place mixed;; mixed.next()) {
    u32 note[4], keep[4], words[4];
    barrier_wait(memory.landed(mixed.stage), mixed.parity);
    load_words_shared(memory.note(mixed.stage), note);
    if (note[0] == STAGES) return;
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // note[1] <= term < note[2]
      const i32 begin = WIDTH * note[1] - 16 * chunk - 4 * w, stop = WIDTH * note[2] - 16 * chunk - 4 * w;
      keep[w] = (u32)((1ull << 8 * min(max(stop, 0), 4)) - (1ull << 8 * min(max(begin, 0), 4)));
    }
    const bool all = !A_DOWN && (keep[0] & keep[1] & keep[2] & keep[3]) == ~0u;
#pragma unroll 1
    for (i32 row = threadIdx.x / 8 - 4; row < BM + BN && !all; row += 12) {
      const u32 tile = row < BM ? memory.a(note[0]) : memory.b(note[0]) - A_BYTES;
      const u32 address = tile + row * DEPTH + 16 * (chunk ^ row % 8);
      const bool own = (u32)row % 64 >= note[1] && (u32)row % 64 < note[2];  // of rows that are terms
      load_words_shared(address, words);
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] &= A_DOWN ? (own ? ~0u : 0u) : keep[w];
      store_words_shared(address, words);
    }
    writes_before_products();
    wait_for_threads<96>(1);
    if (threadIdx.x == 32) barrier_arrive(memory.full(note[0]));
  }
}

// --- the multipliers ---------------------------------------------------------------------------------------

// This warp needs a place no more; in a cluster both loaders wait for that.
DEVICE void release(const Memory& memory, u32 stage) {
  __syncwarp();
  if (lane() < CLUSTER)
    CLUSTER == 2 ? barrier_arrive_at(memory.empty(stage), lane()) : barrier_arrive(memory.empty(stage));
}

// The number of the tile that is next: with GROUPS rows what the loader noted.
DEVICE i32 tile_of(const Memory& memory, const Place& place, i32 tile) {
  if constexpr (!BY_ROWS) return tile;
  barrier_wait(memory.full(place.stage), place.parity);
  return __shfl_sync(~0u, lane() ? 0 : __float_as_int(load_shared(memory.note(place.stage))), 0);
}

// total += part, which is the sum of the products of 128 codes (or of PROMOTE), with their scales: `rows`, of
// this thread's two rows (and of b's square), and where b has lines those of its columns.
DEVICE void promote(float (&total)[BN / 2], const float (&part)[BN / 2], const float (&rows)[2],
                    u32 b_scales) {
#pragma unroll
  for (int j = 0; j < BN / 8; ++j) {
    float2 columns{1.0f, 1.0f};
    if constexpr (B_LINES) columns = load_shared_pair(b_scales + 4 * (8 * j + 2 * (lane() % 4)));
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // of two rows, two columns
      const float row = rows[c / 2], column = c % 2 ? columns.y : columns.x;
      const float x = SCALES == lines_lines ? __fmul_rn(part[4 * j + c], row) : part[4 * j + c];
      const float y = SCALES == lines_lines ? column : B_LINES ? __fmul_rn(row, column) : row;
      total[4 * j + c] = SCALES == whole ? __fadd_rn(total[4 * j + c], x) : __fmaf_rn(x, y, total[4 * j + c]);
    }
  }
}

// How far a column of the tile is from its first in the result: with two halves the second lies elsewhere.
DEVICE i32 column_of(const Job& job, i32 column) {
  return column + (HALVES == 2 && column >= BN / 2 ? (i32)job.n / 2 - BN / 2 : 0);
}

// What a warp's 16 rows have yet to write. `part`: the warp's part of shared memory. With COLUMNS the
// barriers of its multiplier's parts; `parity`: of the phase of `taken` that the next fill waits for, and
// behind `wait` of that of `made`. LATE: columns from PART on of the last tile wait in registers, from (row,
// column) of a matrix on; row is -1 where there are none. GROUPS rows: `top` and `cover` are the tile's.
struct Outgoing {
  u32 part, made, taken, parity = 1, words[LATE ? (BN - PART) / 32 : 1][2][4];
  i32 row = -1, column, matrix, top, cover;

  // Until the part may be filled.
  METHOD void wait() {
    copies_have_read();
    if constexpr (COLUMNS) barrier_wait(taken, parity), parity ^= 1;
  }

  // The part, filled, to the result.
  METHOD void send(const Job& job, i32 row, i32 column, i32 matrix) const {
    constexpr int WIDE = 128 / sizeof(T);  // a box's columns
    writes_before_products();
    __syncwarp();
    if (BY_ROWS && (row < top || row + 16 > cover))  // a copy would write other groups' rows
      return store_rows<PART>(part, job.out + column, job.out_stride, row, top, cover);
    if (!elected()) return;
    if constexpr (COLUMNS) barrier_arrive(made);
    if (FUSED && job.out == nullptr) return;
#pragma unroll
    for (int box = 0; box < PART / WIDE; ++box)
      copy_tile_out(job.parts, part + box * BOX_BYTES, column + column_of(job, WIDE * box), row, matrix);
  }
  // What waits, once copies have read the part.
  METHOD void send_late(const Job& job) {
    if (!LATE || row < 0) return;
    copies_have_read();
#pragma unroll
    for (int k = 0; k < (BN - PART) / 32; ++k) put_words(part, k, words[k]);
    send(job, row, column, matrix);
    row = -1;
  }
};

// The sums of one tile. `group`: 0 or 1, the multiplier; ACTIVE: of its waves, those that have rows. `more`:
// with TURNS the other one has a tile next, which begins once this one's places are all full.
template <int ACTIVE>
DEVICE void multiply(const Job& job, const Memory& memory, Place& place, const Tile& at, int group,
                     float (&total)[WAVES][BN / 2], Outgoing& outgoing, bool more) {
  const i32 depths = at.depths, first = TURNS ? 0 : group * 64 * WAVES;  // of the tile's rows
  if constexpr (ACTIVE == 0) {
    if constexpr (A_LINES || B_LINES) reads_before_copies();  // of the tile before
    for (i32 depth = 0; depth < depths; ++depth, place.next()) {
      barrier_wait(memory.full(place.stage), place.parity);
      release(memory, place.stage);
    }
    return;
  }
  if constexpr (PROMOTE == 0) {
    u32 before = 0;
    if (GROUPED && depths == 0) return;
    for (i32 depth = 0; depth < depths; ++depth, place.next()) {
      barrier_wait(memory.full(place.stage), place.parity);
      const u32 a_tile = memory.a(place.stage) + first * DEPTH, b_tile = memory.b(place.stage);
      const u64 a = A_DOWN ? columns_descriptor<64>(a_tile) : tile_descriptor(a_tile);
      const u64 b = B_DOWN ? columns_descriptor<64>(b_tile) : tile_descriptor(b_tile);
      hold<ACTIVE>(total);
      products_fence();
#pragma unroll
      for (int w = 0; w < ACTIVE; ++w)
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
          multiply_tiles<BN>(total[w], a + 512 * w + A_STEP * i, b + B_STEP * i, depth | i);
      products_commit();
      hold<ACTIVE>(total);
      if constexpr (LATE)
        if (depth == 2) outgoing.send_late(job);
      if (TURNS && more && depth + 1 == depths) arrive_of_threads<MULTIPLIERS>(6 - group);
      products_wait<1>();  // those before these
      if (depth) release(memory, before);
      before = place.stage;
    }
    products_wait<0>();
    hold<ACTIVE>(total);
    release(memory, before);
    return;
  }
  constexpr int PIECE = PROMOTE < DEPTH ? PROMOTE / 32 : STEPS;  // instructions of a partial sum, here
  constexpr int TILES = PROMOTE > DEPTH ? PROMOTE / DEPTH : 1;   // tiles of one
  constexpr bool OF_A = SCALES == squares_lines, SQUARES = OF_A || SCALES == lines_squares;
  const int row = first + threadIdx.x / 32 % 4 * 16 + lane() / 4;  // of the tile: this thread's first
  const i64 line = OF_A ? min64(at.row + first, job.m - 1) : min64(at.column, job.n - 1);  // of squares
  ReadAhead squares((OF_A ? job.a_scale : job.b_scale + at.group * job.b_group) +
                    line / 128 * (OF_A ? job.a_step : job.b_step), SQUARES ? depths : 0);
  float part[BN / 2], rows[2];
#pragma unroll
  for (int w = 0; w < ACTIVE; ++w)
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) total[w][i] = 0.0f;
  // Tensor cores stand still between the last sum and the next products: what these need is there before.
  place.stage = first_lane(place.stage), place.parity = first_lane(place.parity);
  if (depths) barrier_wait(memory.full(place.stage), place.parity);
  // Tiles of more depths than the ring has places: none of its arrivals is the next tile's.
  const bool skewed = SKEWED && depths > 8;
  if (skewed && group == 1) wait_for_threads<MULTIPLIERS>(4);
  const u32 a_first = opaque((u32)tile_descriptor(memory.a(0) + first * DEPTH));
  const u32 b_first = opaque((u32)tile_descriptor(memory.b(0)));
  const u64 high = tile_descriptor(0) >> 32 << 32;
#pragma unroll 1
  for (i32 depth = 0; depth < depths; ++depth) {
    const u32 stage = place.stage, b_scales = memory.b_scales(stage, place.parity);
    const u64 a = high | (a_first + stage * (A_BYTES / 16)), b = high | (b_first + stage * (B_BYTES / 16));
    float square = 1.0f;
#pragma unroll
    for (int w = 0; w < ACTIVE; ++w)
#pragma unroll
      for (int begin = 0; begin < STEPS; begin += PIECE) {
        hold(part);
        products_fence();
#pragma unroll
        for (int i = begin; i < begin + PIECE; ++i)
          multiply_tiles<BN>(part, a + 512 * w + 2 * i, b + 2 * i, i - begin + depth % TILES);
        products_commit();
        hold(part);
        // scales, while the products run
        if (SQUARES && w == 0 && begin == 0) square = squares.at(depth);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          rows[h] = square;
          const u32 line = memory.a_scales(stage) + 4 * (row + 64 * w + 8 * h);
          if constexpr (A_LINES) rows[h] = __fmul_rn(load_shared(line), square);
        }
        const bool end = w + 1 == ACTIVE && begin + PIECE == STEPS;
        if (end) place.next();
        if (end && depth + 1 < depths) barrier_wait(memory.full(place.stage), place.parity);
        if (end && (A_LINES || B_LINES)) reads_before_copies();  // of scales; `release` follows the products
        products_wait<0>();
        hold(part);
        if (skewed && group == 0 && depth == 0 && w == 0 && begin == 0) arrive_of_threads<MULTIPLIERS>(4);
        if (end) release(memory, stage);
        if (TILES == 1 || depth % TILES == TILES - 1 || depth + 1 == depths)
          promote(total[w], part, rows, b_scales);
      }
  }
}

// --- the result --------------------------------------------------------------------------------------------

// Where a thread's two rows of the result are, eight rows apart; scales that it knows before the columns'.
struct Corner {
  T* out;
  const T *addend, *bias;
  const float* b_scale;
  bool exists[2], zero[2], by_row;
  float a[2], b;
};

// What is to be done to a part of the result: its scale alone, a bias, anything; or anything at the matrix's
// edge, or where rows are not aligned. Every instruction counts here: tensor cores stand still meanwhile.
enum How { SCALED, BIASED, ANY, EDGE };

// Columns 32 k ... 32 k + 31 of the tile's, from `first` on: scaled, with bias and addend, not rounded.
template <How HOW>
DEVICE void finish_sums(const Job& job, const Corner& at, const float (&total)[BN / 2], int k, i32 first,
                        float (&values)[2][8]) {
  constexpr bool INSIDE = HOW != EDGE, ROWS = SCALES == whole && HOW >= ANY;
  const bool biased = HOW == BIASED || (HOW >= ANY && at.bias != nullptr);
  const bool added = HOW >= ANY && job.addend != nullptr;
  const i32 t = 2 * (lane() % 4), left = (i32)job.n - first - 32 * k;
  float columns[4][2], bias[4][2];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const i32 column = first + 32 * k + 8 * q + t, some = left - 8 * q - t;
    columns[q][0] = columns[q][1] = at.b;
    if (ROWS && at.by_row) load_pair<INSIDE>(at.b_scale + column, some, columns[q]);
    if (biased) load_pair<INSIDE>(at.bias + column, some, bias[q]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i64 offset = 8 * h * job.out_stride + 32 * k;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float addend[2] = {0.0f, 0.0f};
      if (added && at.exists[h]) load_pair<INSIDE>(at.addend + offset + 8 * q + t, left - 8 * q - t, addend);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float value = total[16 * k + 4 * q + 2 * h + c];
        if constexpr (SCALES == whole) value = __fmul_rn(value, columns[q][c]);
        if constexpr (ROWS) value = __fmul_rn(value, at.a[h]);
        if (biased) value = __fadd_rn(value, bias[q][c]);
        if (added) value = __fadd_rn(value, addend[c]);
        if (GROUPED && at.zero[h]) value = 0.0f;
        if (FUSED && HOW == EDGE && !(at.exists[h] && 8 * q + t + c < left)) value = 0.0f;
        values[h][2 * q + c] = value;
      }
    }
  }
}

// A warp's 16 rows to the result: from registers, or by shared memory, PART columns at a time, the last LATE.
template <How HOW>
DEVICE void write_rows(const Job& job, const Corner& at, const float (&total)[BN / 2], i32 row, i32 first,
                       i32 matrix, Outgoing& outgoing) {
  constexpr bool BY_PARTS = STAGED && (FUSED || HOW != EDGE);
  constexpr int EACH = PART / 32;
  if constexpr (BY_PARTS) outgoing.send_late(job), outgoing.wait();
#pragma unroll
  for (int k = 0; k < BN / 32; ++k) {
    float values[2][8];
    asm volatile("" ::: "memory");  // these columns' scales are read now, not sooner: registers are few
    finish_sums<HOW>(job, at, total, k, first + column_of(job, 32 * k) - 32 * k, values);
    if (BY_PARTS && (!LATE || k < EACH)) {
      if (k && k % EACH == 0) copies_have_read();
      put_columns<T>(outgoing.part, k % EACH, values);
      if (k % EACH == EACH - 1) outgoing.send(job, row, first + 32 * (k + 1) - PART, matrix);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (!BY_PARTS)
        store_columns<HOW != EDGE>(at.out + 8 * h * job.out_stride + 32 * k,
                                   at.exists[h] ? (i32)job.n - first - 32 * k : 0, values[h]);
      else if constexpr (LATE)
        if (k >= EACH) pack_columns<T>(values[h], outgoing.words[k - EACH][h]);
    }
  }
  if (BY_PARTS && LATE) outgoing.row = row, outgoing.column = first + PART, outgoing.matrix = matrix;
}

// The epilogue of a multiplier's 64 rows, from (row, column) on, behind which its parts may be filled again.
DEVICE void finish(const Job& job, const Memory& memory, Running& own, u32 multiplier, u32 parity, i32 row,
                   i32 column) {
  const Filled from{memory.part(4 * multiplier), memory.made(multiplier), memory.taken(multiplier), parity};
  const bool inside = row + 64 <= (i32)job.m && column + BN / HALVES <= (i32)job.n / HALVES;
  if constexpr (COLUMNS) finish_columns(job.further, own, from, job.m, row, column, inside);
}

// Sixty-four rows of the result. `multiplier`: 0 or 1.
DEVICE void write(const Job& job, const Memory& memory, float (&total)[BN / 2], const Tile& at, i32 first_row,
                  int multiplier, Running& own, Outgoing& outgoing) {
  const i64 top = first_row + threadIdx.x / 32 % 4 * 16 + lane() / 4, group = at.group;
  const i64 corner = ((BY_TERMS ? group * job.m : 0) + top) * job.out_stride + at.column;
  const bool by_row = SCALES == whole && job.a_step != 0;
  const T* bias = !GROUPED || job.bias == nullptr ? job.bias : job.bias + group * job.n;
  const float* b_scale = job.b_scale + (BY_ROWS ? group * job.b_group : 0);
  Corner to{job.out + corner, job.addend + corner, bias, b_scale,
            {at.has(job, top), at.has(job, top + 8)}, {at.is_zero(top), at.is_zero(top + 8)},
            by_row, {1.0f, 1.0f}, 1.0f};
  if (BY_ROWS && group == job.groups) to.b_scale = job.b_scale, to.bias = nullptr;  // rows of no group
  if (by_row)
    to.a[0] = job.a_scale[min64(top, job.m - 1)], to.a[1] = job.a_scale[min64(top + 8, job.m - 1)];
  else if (SCALES == whole && WIDTH == 1)  // and a is 1, which changes nothing
    to.b = BY_ROWS || FUSED ? __fmul_rn(job.a_scale[0], to.b_scale[0]) : own.of_sums;
  const bool inside =
      rows_aligned<16>(job.out, job.out_stride) && rows_aligned<16>(job.addend, job.out_stride) &&
      rows_aligned<2 * sizeof(T)>(job.bias, !GROUPED ? 0 : job.n) &&
      at.column + BN / HALVES <= (i32)job.n / HALVES && (!FUSED || first_row + 64 <= (i32)job.m);
  const i32 row = (i32)top - lane() / 4, matrix = BY_TERMS ? at.group : 0;
  if constexpr (BY_ROWS) outgoing.send_late(job), outgoing.top = at.top, outgoing.cover = at.cover;
#define WRITE_ROWS(HOW) write_rows<HOW>(job, to, total, row, at.column, matrix, outgoing)
  if (!inside) WRITE_ROWS(EDGE);
  else if (by_row || job.addend != nullptr) WRITE_ROWS(ANY);
  else if (to.bias != nullptr) WRITE_ROWS(BIASED);
  else WRITE_ROWS(SCALED);
  if constexpr (EPILOGUE == lines) finish_line(job.further, outgoing.part, job.m, row, at.column);
  if constexpr (EPILOGUE == forward)
    finish(job, memory, own, multiplier, outgoing.parity, first_row, at.column);
}

// --- the kernel --------------------------------------------------------------------------------------------

extern "C" __global__ void __in_clusters__() __launch_bounds__(THREADS, 1)
hopper_gemm(const __grid_constant__ Job job) {
  let_next_start();
  if (!GROUPED && job.terms != CLUSTER) __trap();  // a host that planned another form
  extern __shared__ u8 dynamic[];
  const u32 base = ((u32)__cvta_generic_to_shared(dynamic) + 1023) & ~1023u;
  const Memory memory{PROMOTE ? opaque(base) : base};
  if (threadIdx.x == 0) {
    prefetch_map(!GROUPED && job.m < BM ? job.a_last : job.a), prefetch_map(job.b);
    for (u32 stage = 0; stage < STAGES; ++stage) {
      barrier_init(memory.full(stage), 1);
      barrier_init(memory.empty(stage), CLUSTER * (TURNS ? 4 : 8));  // of every warp that multiplies it
      if constexpr (BY_TERMS) barrier_init(memory.landed(stage), 1);
    }
    for (u32 multiplier = 0; COLUMNS && multiplier < 2; ++multiplier)
      barrier_init(memory.made(multiplier), 4), barrier_init(memory.taken(multiplier), 4);
    barriers_are_set();
  }
  CLUSTER == 2 ? wait_for_cluster() : __syncthreads();
  wait_for_former();
  const float scale = scale_of_results(job.further);

  if (threadIdx.x < 128) {
    registers_down<OF_LOADER>();
    if (threadIdx.x < 32 && elected()) load(job, memory);
    if (BY_TERMS && threadIdx.x >= 32) clear(memory);
  } else if (FINISHERS && threadIdx.x >= 384) {
    registers_up<OF_FINISHER>();
    Running own{scale};
    Walk walk;
    Tile at;
    u32 parity = 0;
    for (i32 tile = blockIdx.x / CLUSTER; walk.at(job, tile, at); tile += gridDim.x / CLUSTER, parity ^= 1)
#pragma unroll 1
      for (int multiplier = 0; multiplier < 2; ++multiplier)
        finish(job, memory, own, multiplier, parity, at.row + 64 * multiplier, at.column);
    end_of_tiles(job.further, own);
  } else {
    registers_up<OF_MULTIPLIER>();
    const int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1;  // as in `make_uniform`
    Place place;
    Walk walk;
    Tile at;
    Running own{scale, SCALES == whole && WIDTH == 1 ? __fmul_rn(job.a_scale[0], job.b_scale[0]) : 1.0f};
    Outgoing outgoing{memory.part(threadIdx.x / 32 - 4), memory.made(group), memory.taken(group)};
    float total[WAVES][BN / 2];
    const i32 step = gridDim.x / CLUSTER, start = blockIdx.x / CLUSTER, tiles = (i32)(job.tall * job.wide);
    const i32 turn = TURNS ? group * step : 0;
    if (turn) place.skip((i32)job.depths);
    for (i32 tile = tile_of(memory, place, start + turn); first_lane(walk.at(job, tile, at));
         tile = tile_of(memory, place, tile + (TURNS ? 2 * step : step))) {
      at.make_uniform();
      if (BY_ROWS && at.depths == 0) release(memory, place.stage), place.next();
      const i32 first = at.row + (TURNS ? 0 : 64 * WAVES * group);
      const i32 left = BY_ROWS ? at.end - first : BM > 64 || group == 0 ? BM : 0;
      if (TURNS && tile != start) wait_for_threads<MULTIPLIERS>(5 + group);
      if (left > 64 * (WAVES - 1))
        multiply<WAVES>(job, memory, place, at, group, total, outgoing, tile + step < tiles);
      else if (WAVES == 1 || left <= 0)
        multiply<0>(job, memory, place, at, group, total, outgoing, false);
      else
        multiply<1>(job, memory, place, at, group, total, outgoing, false);
      if (TURNS) place.skip((i32)job.depths);
#pragma unroll
      for (int w = 0; w < WAVES; ++w)
        if (BY_ROWS ? first + 64 * w < at.cover : left > 0)
          write(job, memory, total[w], at, first + 64 * w, group, own, outgoing);
    }
    if constexpr (!FINISHERS) end_of_tiles(job.further, own);
    if constexpr (LATE) outgoing.send_late(job);
    if constexpr (STAGED) copies_have_read();  // shared memory is the block's until then
  }
  if constexpr (CLUSTER == 2) wait_for_cluster();  // the other block may still copy to this one's memory
}
#endif
