// functions: permute_rows, unpermute_rows, permute_probs
// functions: zero_probs (unpermute_probs), row_probs (unpermute_probs)
// functions: count_expert (expert_rows), expert_rows
// variants: T=f32,bf16,f16; P=f32,bf16,f16
//
// Rows of tokens to places of their own, and back, by a map of (token, slot) for each permuted row. Sums run
// in the order of the rows, without floating-point atomics.

#include "rows.cuh"

struct Place { i64 token, slot; };

// Token and slot of row r; token -1 where the row is empty. A negative S: any slot will do.
DEVICE Place place_of(const i32* map, i64 r, i64 tokens, i64 S) {
  const i64 token = map[2 * r], slot = map[2 * r + 1];
  const bool known = token >= 0 && token < tokens && (S < 0 || (slot >= 0 && slot < S));
  return {known ? token : -1, slot};
}

// out[r] = x[token] * probs[token, slot], or x[token]; 0 for an empty row. Block (32, rows): a warp a row.
extern "C" __global__ void __launch_bounds__(256)
permute_rows(const T* x, const i32* map, const P* probs, T* out, i64 R, i64 N, i64 tokens, i64 S) {
  start_early();
  const i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  if (r >= R) return;
  const Place place = place_of(map, r, tokens, S);
  const bool wide = rows_aligned<16>(x, N) && rows_aligned<16>(out, N), scaled = probs != nullptr;
  const float factor = scaled && place.token >= 0 ? to_float(probs[place.token * S + place.slot]) : 1.0f;
#pragma unroll 4
  for (i64 c = threadIdx.x * 8; c < N; c += 256) {
    const int valid = columns_left(c, N);
    Eight<T> eight{};
    if (place.token >= 0) eight = read8(x + place.token * N + c, valid, wide);
    if (scaled && place.token >= 0) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(value(eight, j), factor);
      round8(v, eight);
    }
    write8(out + r * N + c, valid, wide, eight);
  }
}

constexpr int ROWS = 1024, PIECES = 4;  // of the map at a time; of eight columns a lane

// out[t] = the sum of the token's rows, each times its probability where there are such. A warp owns a token
// and 1024 columns, `across` of which make a row; a block brings the map's tokens, ROWS at a time.
extern "C" __global__ void __launch_bounds__(256, 2)
unpermute_rows(const T* x, const i32* map, const P* probs, T* out, i64 R, i64 N, i64 tokens, i64 S,
               i64 across) {
  start_early();
  __shared__ i32 token_of[ROWS];
  const i64 t = blockIdx.x / across * 8 + threadIdx.y, c0 = blockIdx.x % across * 1024 + threadIdx.x * 8;
  const int thread = threadIdx.y * 32 + threadIdx.x;
  const bool wide = rows_aligned<16>(x, N), wide_out = rows_aligned<16>(out, N);
  float sums[PIECES][8] = {};
  for (i64 r0 = 0; r0 < R; r0 += ROWS) {
    __syncthreads();
    for (int i = thread; i < ROWS; i += 256)
      token_of[i] = r0 + i < R ? (i32)place_of(map, r0 + i, tokens, S).token : -1;
    __syncthreads();
    if (t >= tokens) continue;
    for (int i = 0; i < ROWS && r0 + i < R; i += 32) {
      u32 votes = __ballot_sync(~0u, token_of[i + threadIdx.x] == t);
      while (votes) {
        const i64 r = r0 + i + __ffs(votes) - 1;
        votes &= votes - 1;
        const float factor = probs == nullptr ? 1.0f : to_float(probs[t * S + map[2 * r + 1]]);
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
          const Eight<T> eight = read8(x + r * N + c0 + 256 * p, columns_left(c0 + 256 * p, N), wide);
#pragma unroll
          for (int j = 0; j < 8; ++j)
            sums[p][j] = __fadd_rn(sums[p][j], __fmul_rn(value(eight, j), factor));
        }
      }
    }
  }
  if (t >= tokens) return;
#pragma unroll
  for (int p = 0; p < PIECES; ++p)
    write8(out + t * N + c0 + 256 * p, columns_left(c0 + 256 * p, N), wide_out, rounded8<T>(sums[p]));
}

// out[r] = probs[token, slot]; 0 for an empty row.
extern "C" __global__ void __launch_bounds__(256)
permute_probs(const T* probs, const i32* map, T* out, i64 R, i64 tokens, i64 S) {
  start_early();
  for (i64 r = first(); r < R; r += step()) {
    const Place place = place_of(map, r, tokens, S);
    out[r] = place.token >= 0 ? probs[place.token * S + place.slot] : from_float<T>(0.0f);
  }
}

extern "C" __global__ void __launch_bounds__(256) zero_probs(P* out, i64 n) {
  start_early();
  for (i64 i = first(); i < n; i += step()) out[i] = from_float<P>(0.0f);
}

// out[token, slot] = the sum over columns of rows[r] * x[token], or of rows[r] where there is no x. A warp a
// row.
extern "C" __global__ void __launch_bounds__(256)
row_probs(const T* rows, const T* x, const i32* map, P* out, i64 R, i64 N, i64 tokens, i64 S) {
  start_early();
  const i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  if (r >= R) return;
  const Place place = place_of(map, r, tokens, S);
  if (place.token < 0) return;
  const bool wide = rows_aligned<16>(rows, N) && rows_aligned<16>(x, N);
  float sum = 0.0f;
#pragma unroll 4
  for (i64 c = threadIdx.x * 8; c < N; c += 256) {
    const int valid = columns_left(c, N);
    const Eight<T> a = read8(rows + r * N + c, valid, wide),
                   b = read8(x + place.token * N + c, x == nullptr ? 0 : valid, wide);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += x == nullptr ? value(a, j) : value(a, j) * value(b, j);
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) out[place.token * S + place.slot] = from_float<P>(sum);
}

// --- the map -----------------------------------------------------------------------------------------------

// What is routed, in its own order: pair i is token i / width, slot i % width of indices; of a mask the
// token i alone.
struct Routed {
  const void* routing;
  i64 tokens, width, is_mask;

  __device__ __forceinline__ i64 pairs() const { return is_mask ? tokens : tokens * width; }
  __device__ __forceinline__ bool goes_to(i64 i, i64 expert) const {
    if (i >= pairs()) return false;
    if (is_mask) return static_cast<const u8*>(routing)[i * width + expert] != 0;
    return static_cast<const i32*>(routing)[i] == expert;
  }
  __device__ __forceinline__ i64 token(i64 i) const { return is_mask ? i : i / width; }
  __device__ __forceinline__ i64 slot(i64 i, i64 expert) const { return is_mask ? expert : i % width; }
};

// counts[expert], a block each.
extern "C" __global__ void __launch_bounds__(256)
count_expert(const void* routing, i64 tokens, i64 width, i64 is_mask, i32* counts) {
  __shared__ i32 sums[8];
  const Routed routed{routing, tokens, width, is_mask};
  i32 count = 0;
  for (i64 i = threadIdx.x; i < routed.pairs(); i += 256) count += routed.goes_to(i, blockIdx.x);
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) count += sums[w];
    counts[blockIdx.x] = count;
  }
}

// The rows of an expert, a block each, in the order of the pairs; the block behind the last expert's writes
// the empty rows at the end.
extern "C" __global__ void __launch_bounds__(256)
expert_rows(const void* routing, i64 tokens, i64 width, i64 is_mask, const i32* counts, i32* map, i32* sizes,
            i64 experts, i64 rows, i64 align) {
  __shared__ i32 before[8];
  const Routed routed{routing, tokens, width, is_mask};
  const i64 expert = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  i64 start = 0;
  for (i64 e = 0; e < expert; ++e) start += ceil_div(counts[e], align) * align;
  const i64 own = expert < experts ? counts[expert] : 0;
  const i64 end = expert < experts ? min64(start + ceil_div(own, align) * align, rows) : rows;
  if (expert < experts && threadIdx.x == 0) sizes[expert] = (i32)(end - min64(start, rows));

  for (i64 r = start + own + threadIdx.x; r < end; r += 256) map[2 * r] = -1, map[2 * r + 1] = -1;
  if (expert == experts) return;
  i64 row = start;
  for (i64 i0 = 0; i0 < routed.pairs(); i0 += 256) {
    const i64 i = i0 + threadIdx.x;
    const bool here = routed.goes_to(i, expert);
    const u32 votes = __ballot_sync(~0u, here);
    if (lane == 0) before[warp] = __popc(votes);
    __syncthreads();
    i64 r = row + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < 8; ++w) {
      if (w < warp) r += before[w];
      row += before[w];
    }
    if (here && r < rows) {
      map[2 * r] = (i32)routed.token(i);
      map[2 * r + 1] = (i32)routed.slot(i, expert);
    }
    __syncthreads();
  }
}
