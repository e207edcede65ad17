// functions: embedding_fwd, embedding_bwd
// variants: T=f32,bf16,f16
//
// Embedding look-up, and its gradient without floating-point atomics: a block owns some rows of the table and
// looks for the tokens that name them, so every sum runs in the order of the tokens.

#include "rows.cuh"

// out[i] = table[ids[i]], a row of NaN for an id out of range. Block (32, rows): a warp a token.
extern "C" __global__ void __launch_bounds__(256)
embedding_fwd(const void* ids, const T* table, T* out, i64 M, i64 N, i64 V, i64 wide_ids) {
  const i64 i = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  if (i >= M) return;
  const i64 id = number_at(ids, i, wide_ids);
  const bool known = id >= 0 && id < V;
  const bool wide = rows_aligned<16>(table, N) && rows_aligned<16>(out, N);
  float nan[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) nan[j] = __int_as_float(0x7FC00000);
  const Eight<T> unknown = rounded8<T>(nan);
#pragma unroll 4
  for (i64 c = threadIdx.x * 8; c < N; c += 256) {
    const int valid = columns_left(c, N);
    write8(out + i * N + c, valid, wide, known ? read8(table + id * N + c, valid, wide) : unknown);
  }
}

constexpr int THREADS = 256, ROWS = 16, COLUMNS = 2 * THREADS, IDS = 4 * THREADS, LIST = 2 * IDS;

// Two neighbouring elements as floats; `pair`: the address is a multiple of two elements.
// `valid` of them (1 or 2) exist.
DEVICE float2 read2(const T* from, int valid, bool pair) {
  if (!pair) return make_float2(to_float(from[0]), valid > 1 ? to_float(from[1]) : 0.0f);
  float two[2];
  load<2>(from, two);
  return make_float2(two[0], two[1]);
}

// Block b owns rows ROWS * (b / column_blocks) and the next ROWS - 1, and COLUMNS columns of the table, two a
// thread. It reads IDS ids at a time, lists those that are its own in their order, and adds the listed rows
// of dout to its float32 sums in shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_bwd(const void* ids, const T* dout, T* dtable, i64 M, i64 N, i64 V, i64 column_blocks,
              i64 wide_ids) {
  __shared__ float2 sums[ROWS][THREADS];
  __shared__ u32 token[LIST];
  __shared__ u8 row_of[LIST];
  __shared__ int of_warps[THREADS / 32];
  const i64 row0 = blockIdx.x / column_blocks * ROWS,
            column = blockIdx.x % column_blocks * COLUMNS + threadIdx.x * 2;
  const int valid = (int)min64(N - column, 2);
  const bool pair = valid == 2 && rows_aligned<2 * sizeof(T)>(dout, N),
             pair_out = valid == 2 && rows_aligned<2 * sizeof(T)>(dtable, N);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r][threadIdx.x] = make_float2(0.0f, 0.0f);

  int listed = 0;
  for (i64 i0 = 0; i0 < M; i0 += IDS) {
    const i64 i = i0 + threadIdx.x / 32 * 128 + threadIdx.x % 32;  // and 32, 64, 96 further on
    i64 row[4];
    u32 votes[4];
    int found = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) row[k] = i + 32 * k < M ? number_at(ids, i + 32 * k, wide_ids) - row0 : -1;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      votes[k] = __ballot_sync(~0u, row[k] >= 0 && row[k] < ROWS);
      found += __popc(votes[k]);
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
    __syncthreads();
    int at = listed;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
      if (w < threadIdx.x / 32) at += of_warps[w];
      listed += of_warps[w];
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (row[k] >= 0 && row[k] < ROWS) {
        const int here = at + __popc(votes[k] & ((1u << threadIdx.x % 32) - 1u));
        token[here] = (u32)(i + 32 * k);
        row_of[here] = (u8)row[k];
      }
      at += __popc(votes[k]);
    }
    __syncthreads();
    if (listed <= LIST - IDS && i0 + IDS < M) continue;  // room for the next round
    if (valid > 0) {
#pragma unroll 8
      for (int n = 0; n < listed; ++n) {
        const float2 x = read2(dout + (i64)token[n] * N + column, valid, pair);
        float2* sum = &sums[row_of[n]][threadIdx.x];
        *sum = make_float2(sum->x + x.x, sum->y + x.y);
      }
    }
    listed = 0;
    __syncthreads();
  }
  if (valid <= 0) return;
  for (int r = 0; r < ROWS && row0 + r < V; ++r) {
    const float2 sum = sums[r][threadIdx.x];
    T* to = dtable + (row0 + r) * N + column;
    if (pair_out) {
      const float two[2] = {sum.x, sum.y};
      store<2>(to, two);
    } else {
      to[0] = from_float<T>(sum.x);
      if (valid > 1) to[1] = from_float<T>(sum.y);
    }
  }
}
