// What a kernel for Hopper (sm_90a) is made of: barriers in shared memory, tiles copied by the tensor memory
// accelerator (TMA), and products by warpgroups (wgmma). Names and rules: PTX ISA,
// chapters "mbarrier", "cp.async.bulk.tensor" and "wgmma". Addresses in shared memory are u32.
#pragma once
#include "common.cuh"

#define METHOD __device__ __forceinline__  // before a structure's function

// --- barriers ----------------------------------------------------------------------------------------------
// A barrier counts arrivals and, where it is told, bytes that are on their way. When all are there its phase
// ends, and the next one (of the other parity) begins.

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers that were just set up known to the copies.
DEVICE void barriers_are_set() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and says how many bytes copies will bring in this phase.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of that parity has ended. A fresh barrier's phase before the first counts as ended:
// it has parity 1.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// What this thread wrote to shared memory is what its warpgroup's products read, once all threads are here.
DEVICE void writes_before_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// What this thread read from shared memory it has got: a copy that is begun behind a barrier may write there.
// Without it the arrival overtakes loads that are under way.
DEVICE void reads_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Waits until THREADS threads of the block are at a barrier of the hardware, number 1 to 15.
template <int THREADS> DEVICE void wait_for_threads(u32 number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}
// Counts as being there, and does not wait.
template <int THREADS> DEVICE void arrive_of_threads(u32 number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// The word of both, each expanded first.
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

// --- clusters ----------------------------------------------------------------------------------------------
// Blocks of a cluster run at once, and reach each other's shared memory; what lies there lies at the same
// address in each.

// Waits until all threads of the cluster are here.
DEVICE void wait_for_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at a barrier of the cluster's block number `rank`. What is ordered by it are reads of shared memory
// that have ended, so it is no release for the cluster, which would wait for all of the thread's stores.
DEVICE void barrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];}" ::"r"(barrier), "r"(rank)
      : "memory");
}

// --- rings -------------------------------------------------------------------------------------------------

// A place of a ring of STAGES places in shared memory, and the parity of its barriers' phase.
template <u32 STAGES> struct RingPlace {
  u32 stage = 0, parity = 0;
  METHOD void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  // The place n further on.
  METHOD void skip(u32 n) {
    const u32 rounds = (stage + n) / STAGES;
    stage += n - rounds * STAGES, parity ^= rounds & 1;
  }
};

// --- one thread --------------------------------------------------------------------------------------------

// True in one lane of the warp, the same each time; all lanes call it. After `lane() == 0` the compiler
// cannot tell that only one lane is left, and makes a loop over lanes around each copy.
DEVICE bool elected() {
  u32 chosen;
  asm volatile("{.reg .pred one; .reg .b32 lane; elect.sync lane|one, 0xffffffff; selp.u32 %0, 1, 0, one;}"
               : "=r"(chosen));
  return chosen;
}

// --- copies ------------------------------------------------------------------------------------------------

// Where a matrix lies, and how large the tiles are that are copied of it. The driver makes it
// (cuTensorMapEncodeTiled); a tile's part beyond the matrix reads as zeros.
struct alignas(64) TensorMap { u64 words[16]; };

DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One thread copies the tile whose first element is (row, column) to shared memory; its bytes count at
// `barrier`.
DEVICE void copy_tile(u32 to, const TensorMap& map, i32 column, i32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same to both blocks of a cluster of two; bytes count at the barrier of each.
DEVICE void copy_tile_to_both(u32 to, const TensorMap& map, i32 column, i32 row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)3)
      : "memory");
}

// `copy_tile` of an array of three dimensions, and of four: a tile has rows of the first along the second.
DEVICE void copy_tile(u32 to, const TensorMap& map, i32 column, i32 row, i32 third, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(third), "r"(barrier)
      : "memory");
}
DEVICE void copy_tile(u32 to, const TensorMap& map, i32 column, i32 row, i32 third, i32 fourth, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(third), "r"(fourth), "r"(barrier)
      : "memory");
}

// A tile of ROWS rows of 128 bytes from (row, term) on, of a group's matrix; DOWN: terms run down the map's
// rows, of which a copy brings 64 elements across.
template <bool DOWN, int ROWS, typename... More>
DEVICE void copy_operand(u32 to, const TensorMap& map, i32 term, i32 row, More... more) {
  if constexpr (!DOWN) copy_tile(to, map, term, row, more...);
#pragma unroll 1
  for (int box = 0; DOWN && box < ROWS / 64; ++box)
    copy_tile(to + box * 64 * 128, map, row + 64 * box, term, more...);
}

// One thread copies a tile of three dimensions, which writes_before_products() made known, from shared
// memory; what lies beyond the array is not written.
DEVICE void copy_tile_out(const TensorMap& map, u32 from, i32 column, i32 row, i32 third) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
               "cp.async.bulk.commit_group;"
               ::"l"(&map), "r"(column), "r"(row), "r"(third), "r"(from)
               : "memory");
}

// Waits until this warp's copies of tiles have read shared memory.
DEVICE void copies_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  __syncwarp();
}

// --- numbers in shared memory ------------------------------------------------------------------------------

DEVICE float load_shared(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
DEVICE float2 load_shared_pair(u32 address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
DEVICE void store_shared(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
DEVICE void store_shared_pair(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
DEVICE void store_words_shared(u32 to, const u32 (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// Four matrices of 8 x 8 elements of 16 bits: lane l has those of row l / 4 at columns 2 (l % 4) and + 1 of
// each, and says where row l % 8 of matrix l / 8 goes. `load_matrices` is its inverse.
DEVICE void store_matrices(u32 to, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
DEVICE void load_words_shared(u32 from, u32 (&words)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
               : "memory");
}

// Numbers of a warp, one after another: each lane reads one, 32 ahead, so that nobody waits for them.
struct ReadAhead {
  const float* from;
  i32 count;
  float now, next;

  METHOD ReadAhead(const float* from, i32 count) : from(from), count(count), next(read(0)) {}
  METHOD float read(i32 first) const {
    return first + lane() < count ? from[first + lane()] : 0.0f;
  }
  // Number i; they are asked for in ascending order, each once.
  METHOD float at(i32 i) {
    if (i % 32 == 0) now = next, next = read(i + 32);
    return __shfl_sync(~0u, now, i % 32);
  }
};

// --- registers ---------------------------------------------------------------------------------------------

// x, which is the same in all lanes; the compiler keeps it, and makes it from nothing else again.
DEVICE u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return __shfl_sync(~0u, x, 0);
}

// From now on each thread of this warpgroup has N registers.
template <int N> DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// --- products ----------------------------------------------------------------------------------------------
// wgmma: four warps multiply 64 rows of A by N rows of B, 32 bytes of each. Of the 64 x N sums each thread
// has d[4 j + 2 h + c]: row 16 warp + lane / 4 + 8 h, column 8 j + 2 (lane % 4) + c.

// A tile in shared memory as the tensor cores find it: rows of 128 bytes, swizzled by the copy (128B mode),
// at a multiple of 1024 bytes, which eight of them fill. + 2 is 32 bytes along the row, + 512 64 rows.
DEVICE u64 tile_descriptor(u32 address) {
  return (u64)(address >> 4 & 0x3FFF) | 1ull << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// The same where the contraction runs down the tile's rows: panels of 64 elements of 16 bits across, each of
// ROWS rows, ROWS * 128 bytes apart. + 128 is 16 rows down.
template <int ROWS> DEVICE u64 columns_descriptor(u32 address) {
  return (u64)(address >> 4 & 0x3FFF) | (u64)(ROWS * 128 >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N of this warp's committed groups of products are under way.
template <int N> DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler may not move what reads or writes these registers across this line.
template <int N> DEVICE void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same of the first W of several.
template <int W, int ALL, int N> DEVICE void hold(float (&d)[ALL][N]) {
#pragma unroll
  for (int w = 0; w < W; ++w) hold(d[w]);
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define TEN(x) "%" #x "0,%" #x "1,%" #x "2,%" #x "3,%" #x "4,%" #x "5,%" #x "6,%" #x "7,%" #x "8,%" #x "9,"
#define FIRST_TEN "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define R32(i) R16(i), R16(i + 16)
#define R64(i) R32(i), R32(i + 32)
// Of operands of 16 bits: which of them have the contraction down their rows, by LAYOUT.
#define WIDTH_OF_bf16 2
#define WIDTH_OF_f16 2
#define ACROSS_nt ", 0, 0"
#define ACROSS_nn ", 0, 1"
#define ACROSS_tn ", 1, 1"
#if JOIN(WIDTH_OF_, LEFT) == 2
#define TERMS_OF_ONE "16"
#define ACROSS JOIN(ACROSS_, LAYOUT)
#else
#define TERMS_OF_ONE "32"
#define ACROSS ""
#endif
// N columns; the numbers of a's and b's descriptors and of `onto` among the operands follow the sums'
#define WGMMA(N, SUMS, A, B, ONTO, ...)                                                                    \
  asm volatile("{.reg .pred onto; setp.ne.b32 onto, %" #ONTO ", 0;"                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k" TERMS_OF_ONE ".f32." TEXT(LEFT) "." TEXT(RIGHT)  \
               " {" SUMS "}, %" #A ", %" #B ", onto, 1, 1" ACROSS ";}"                                     \
               : __VA_ARGS__                                                                               \
               : "l"(a), "l"(b), "r"(onto))

// d = a b^T, onto d where `onto` is not 0; begins it. LEFT and RIGHT: e4m3 or e5m2, or both bf16 or f16.
template <int N> DEVICE void multiply_tiles(float (&d)[N / 2], u64 a, u64 b, i32 onto) {
  if constexpr (N == 32)
    WGMMA(32, FIRST_TEN "%10,%11,%12,%13,%14,%15", 16, 17, 18, R16(0));
  else if constexpr (N == 64)
    WGMMA(64, FIRST_TEN TEN(1) TEN(2) "%30,%31", 32, 33, 34, R32(0));
  else if constexpr (N == 96)
    WGMMA(96, FIRST_TEN TEN(1) TEN(2) TEN(3) "%40,%41,%42,%43,%44,%45,%46,%47", 48, 49, 50, R32(0), R16(32));
  else if constexpr (N == 128)
    WGMMA(128, FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60,%61,%62,%63", 64, 65, 66, R64(0));
  else if constexpr (N == 192)
    WGMMA(192,
          FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) "%90,%91,%92,%93,%94,%95",
          96, 97, 98, R64(0), R32(64));
  else if constexpr (N == 224)
    WGMMA(224,
          FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) "%110,%111",
          112, 113, 114, R64(0), R32(64), R16(96));
  else
    WGMMA(256,
          FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10)
              TEN(11) "%120,%121,%122,%123,%124,%125,%126,%127",
          128, 129, 130, R64(0), R64(64));
}
