// Tiles of 16-bit matrices in shared memory, and products of them on tensor cores by one warp (mma.sync
// m16n8k16: compute capability 8.0 and later). Start here for a fused kernel of your own. T is bf16 or f16.
// Two FP8 codes may stand for an element: they lie in memory and in fragments as one of 16 bits does.
//
// A tile is kept in panels of 64 columns. A panel's row is 128 bytes, eight chunks of 16; chunk c of row r
// lies at place c ^ (r % 8), so that the eight rows which ldmatrix reads at once lie in different banks.
//
// Which elements a lane holds of a 16 x 8 accumulator c[4], with g = lane / 4 and t = lane % 4 (PTX ISA,
// "Matrix Fragments for mma.m16n8k16"): row g, columns 2t and 2t + 1; then row g + 8, the same columns.
#pragma once
#include "common.cuh"

template <int ROWS, int COLUMNS> struct Tile {
  static_assert(COLUMNS % 64 == 0 && ROWS % 8 == 0, "panels of 64 columns");
  static constexpr int rows = ROWS, columns = COLUMNS, bytes = ROWS * COLUMNS * 2;
  u32 base;  // in shared memory, a multiple of 128

  // Address of a row's chunk of eight columns.
  __device__ __forceinline__ u32 at(int row, int chunk) const {
    return base + ((chunk >> 3) * ROWS + row) * 128 + (((chunk & 7) ^ (row & 7)) << 4);
  }
};

// --- global memory to shared memory, asynchronously --------------------------------------------------------

// Copies 16 bytes, or writes 16 zeros and reads nothing.
DEVICE void copy_async(u32 to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's committed groups are on their way.
template <int N> DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// A tile of rows that lie `stride` elements apart, by THREADS threads, eight of them to a row of a panel.
// Rows from `rows` on and columns from `columns` (a multiple of 16 bytes) on become 0 and are not read.
template <int THREADS, typename TILE, typename X>
DEVICE void load_tile(TILE to, const X* from, i64 stride, int rows, int columns) {
  constexpr int STEP = THREADS / 8, CHUNK = 16 / sizeof(X);
  static_assert(TILE::rows % STEP == 0, "");
  const int first = threadIdx.x / 8, chunk = threadIdx.x % 8, valid = min(rows, TILE::rows);
  const X* at = from + first * stride + CHUNK * chunk;
#pragma unroll
  for (int row = 0; row < TILE::rows; row += STEP, at += STEP * stride)
#pragma unroll
    for (int panel = 0; panel < TILE::columns / 64; ++panel) {
      const bool exists = first + row < valid && CHUNK * (8 * panel + chunk) < columns;
      copy_async(to.at(first, chunk) + (panel * TILE::rows + row) * 128,
                 exists ? at + 8 * CHUNK * panel : from, exists);
    }
}

// --- shared memory to registers, and products --------------------------------------------------------------

DEVICE void load_matrices_transposed(u32 address, u32 (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
               "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded to T, the first in the low half.
DEVICE u32 pack(float low, float high, bf16) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

DEVICE u32 pack(float low, float high, f16) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A warp's accumulator of 16 * M rows and 8 * N columns.
template <int M, int N> struct Sums {
  float at[M][N][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) at[m][n][e] = 0.0f;
  }
};

// c += a b^T: rows `row` ... of a by the first rows of b, both of A::columns columns. An X tells `multiply`
// which elements these are.
template <int M, int N, typename A, typename B, typename X = T>
DEVICE void multiply_rows(Sums<M, N>& c, A a, int row, B b, X elements = X{}) {
  static_assert(A::columns == B::columns && 8 * N <= B::rows && N % 2 == 0, "");
#pragma unroll
  for (int k = 0; k < A::columns / 8; k += 2) {
    u32 left[M][4], right[4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_matrices(a.at(row + 16 * m + lane() % 16, k ^ lane() / 16), left[m]);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      load_matrices(b.at(8 * n + lane() / 16 * 8 + lane() % 8, k ^ lane() / 8 % 2), right);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply(c.at[m][n], left[m], right[0], right[1], elements);
        multiply(c.at[m][n + 1], left[m], right[2], right[3], elements);
      }
    }
  }
}

// c += a b: a, an accumulator, rounded to T; the first 8 * N columns of b's rows, 8 * K of them.
template <int M, int N, int K, typename B>
DEVICE void multiply_sums(Sums<M, N>& c, const Sums<M, K>& a, B b) {
  static_assert(8 * K <= B::rows && 8 * N <= B::columns && N % 2 == 0 && K % 2 == 0, "");
#pragma unroll
  for (int k = 0; k < K; k += 2) {
    u32 left[M][4], right[4];
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const float(&from)[4] = a.at[m][k + half / 2];
        left[m][half] = pack(from[half % 2 * 2], from[half % 2 * 2 + 1], T{});
      }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      load_matrices_transposed(b.at(8 * k + lane() % 16, n ^ lane() / 16), right);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply(c.at[m][n], left[m], right[0], right[1], T{});
        multiply(c.at[m][n + 1], left[m], right[2], right[3], T{});
      }
    }
  }
}

// --- registers to global memory ----------------------------------------------------------------------------

// An accumulator, rounded to T, as rows `row` ... of a tile.
template <int M, int N, typename TILE> DEVICE void put(const Sums<M, N>& c, TILE to, int row) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 address = to.at(row + 16 * m + 8 * half + lane() / 4, n) + 4 * (lane() % 4);
        const u32 both = pack(c.at[m][n][2 * half], c.at[m][n][2 * half + 1], T{});
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(both) : "memory");
      }
}

// Rows `row` ... `row + ROWS - 1` of a tile, by one warp, to rows that lie `stride` elements apart, of which
// the first `rows` exist; `columns` is a multiple of 8.
template <int ROWS, typename TILE>
DEVICE void store_rows(TILE from, int row, T* to, i64 stride, i64 rows, i64 columns) {
  constexpr int CHUNKS = TILE::columns / 8;
#pragma unroll
  for (int start = 0; start < ROWS * CHUNKS; start += 32) {
    const int i = (start + lane()) / CHUNKS, chunk = (start + lane()) % CHUNKS;
    if (i >= rows || 8 * chunk >= columns) continue;
    uint4 word;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "r"(from.at(row + i, chunk))
                 : "memory");
    *reinterpret_cast<uint4*>(to + i * stride + 8 * chunk) = word;
  }
}

// Zeros in rows of so many columns, by THREADS threads.
template <int THREADS> DEVICE void clear_rows(T* to, i64 stride, i64 rows, i64 columns) {
  const i64 chunks = columns / 8;
  for (i64 n = threadIdx.x; n < rows * chunks; n += THREADS)
    *reinterpret_cast<uint4*>(to + n / chunks * stride + n % chunks * 8) = make_uint4(0, 0, 0, 0);
}
