// functions: attention_softmax (attention_fwd, packed_attention_fwd, paged_attention_fwd)
// functions: attention_softmax_bwd (attention_bwd, packed_attention_bwd)
// functions: attention_dbias (attention_bwd, packed_attention_bwd, quantized_attention_bwd)
// functions: attention_doffset_partial (attention_bwd, packed_attention_bwd, quantized_attention_bwd)
// functions: attention_doffset (attention_bwd, packed_attention_bwd, quantized_attention_bwd)
// functions: attention_store (attention_bwd, packed_attention_bwd, quantized_attention_bwd)
// variants: T=f32,bf16,f16
// variants: T=f32,bf16,f16; CAP=1
//
// What stands between the matrix products of the unfused attention. T is the dtype of q, k, v, o.
//
// The score kernels work on a tile of scores: `gridDim.x` consecutive rows (from `row0` on) of `gridDim.y`
// query heads (`head0`, `head0 + head_step`, ...) of batch `batch`; tile element (y, x, j) lies at
// (y * gridDim.x + x) * s_kv + j. One block does one row.
// Source of the formulas: Dao et al., FlashAttention, 2022, appendix B.

#include "attention.cuh"

DEVICE Row this_row(const Rules& rules, i64 batch, i64 head0, i64 head_step, i64 row0) {
  return make_row(rules, batch, head0 + blockIdx.y * head_step, row0 + blockIdx.x);
}

// The row's first element in the tile.
DEVICE i64 in_tile(const Rules& rules) { return ((i64)blockIdx.y * gridDim.x + blockIdx.x) * rules.s_kv; }

// p = dropout(softmax(scores)) from the products q k^T, and lse = log(sum(exp(score))), over what the row
// sees and its further score; -Inf and a row of zeros where there is neither. p may be the products' memory
// (T = f32): an element is read and written by the same thread.
extern "C" __global__ void attention_softmax(const float* products, T* p, float* lse, i64 batch, i64 head0,
                                             i64 head_step, i64 row0, Rules rules) {
  __shared__ float shared[32];
  const Row row = this_row(rules, batch, head0, head_step, row0);
  const i64 start = in_tile(rules), s_kv = rules.s_kv;

  float top = -INF;
  for (i64 j = row.first + threadIdx.x; j < row.last; j += blockDim.x)
    top = fmaxf(top, score(rules, row, j, products[start + j]));
  top = fmaxf(block_max(top, shared), row.sink);
  const float shift = top == -INF ? 0.0f : top;
  float sum = 0.0f;
  for (i64 j = row.first + threadIdx.x; j < row.last; j += blockDim.x)
    sum += expf(score(rules, row, j, products[start + j]) - shift);
  sum = block_sum(sum, shared) + expf(row.sink - shift);
  // nothing seen: zeros; NaN stays NaN
  const float inverse = sum > 0.0f ? 1.0f / sum : (sum == 0.0f ? 0.0f : sum);
  if (threadIdx.x == 0) lse[row.stats] = shift + logf(sum);

  for (i64 j = 4 * (i64)threadIdx.x; j < s_kv; j += 4 * blockDim.x) {
    float keep[4];
    dropout_factors(rules, row, j, keep);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (j + n >= s_kv) break;
      const float x =
          sees(row, j + n)
              ? expf(score(rules, row, j + n, products[start + j + n]) - shift) * inverse * keep[n]
              : 0.0f;
      p[start + j + n] = from_float<T>(x);
    }
  }
}

// From the products q k^T and dp = do v^T: p as forward had it (dropped), and
// ds = scale * P * (dropout(dp) - sum(do * o)), P undropped, times the cap's derivative. p may be the
// products' memory and ds dp's (T = f32); `wide`, null or dp's memory, gets ds unrounded, and for a bias that
// is not capped without that derivative: it must not be ds then. o and d_o have rows of `dim` elements,
// strides in elements.
extern "C" __global__ void attention_softmax_bwd(const float* products, const float* dp, T* p, T* ds,
                                                 float* wide, const float* lse, const T* o, const T* d_o,
                                                 i64 o_batch, i64 o_head, i64 o_row, i64 do_batch,
                                                 i64 do_head, i64 do_row, i64 dim, i64 batch, i64 head0,
                                                 i64 head_step, i64 row0, Rules rules) {
  __shared__ float shared[32];
  const Row row = this_row(rules, batch, head0, head_step, row0);
  const i64 start = in_tile(rules), s_kv = rules.s_kv;
  const float factor = (float)rules.scale;
  const float shift = lse[row.stats] == -INF ? 0.0f : lse[row.stats];
  const T* o_at = o + batch * o_batch + row.head * o_head + row.i * o_row;
  const T* do_at = d_o + batch * do_batch + row.head * do_head + row.i * do_row;
  float dot = 0.0f;
  for (i64 f = threadIdx.x; f < dim; f += blockDim.x) dot += to_float(do_at[f]) * to_float(o_at[f]);
  dot = block_sum(dot, shared);

  for (i64 j = 4 * (i64)threadIdx.x; j < s_kv; j += 4 * blockDim.x) {
    float keep[4];
    dropout_factors(rules, row, j, keep);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (j + n >= s_kv) break;
      const i64 at = start + j + n;
      const bool seen = sees(row, j + n);
      const float weight = seen ? expf(score(rules, row, j + n, products[at]) - shift) : 0.0f;
      const float slope = seen ? factor * weight * (keep[n] * dp[at] - dot) : 0.0f;
      float inner = slope;
      if (CAP && seen) inner *= cap_slope(part_of_cap(rules, row, j + n, products[at]));
      p[at] = from_float<T>(weight * keep[n]);
      if (wide != nullptr) wide[at] = rules.bias_capped ? inner : slope;
      ds[at] = from_float<T>(inner);
    }
  }
}

// sums += factor * ds of a tile of `heads` heads by `rows` rows, summed over the heads and rows that share an
// element of the bias: where `sum_head` or `sum_row` is 0, in their order. The grid is (columns / 256, rows
// or 1, heads or 1), or smaller in its last two.
extern "C" __global__ void attention_dbias(const float* ds, float* sums, i64 sum_batch, i64 sum_head,
                                           i64 sum_row, f64 factor, i64 batch, i64 head0, i64 head_step,
                                           i64 row0, i64 heads, i64 rows, i64 s_kv) {
  const i64 j = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= s_kv) return;
  const i64 head_count = sum_head ? 1 : heads, row_count = sum_row ? 1 : rows;  // that are summed
  for (i64 head_from = blockIdx.z; head_from < (sum_head ? heads : 1); head_from += gridDim.z)
    for (i64 row_from = blockIdx.y; row_from < (sum_row ? rows : 1); row_from += gridDim.y) {
      float sum = 0.0f;
      for (i64 head = head_from; head < head_from + head_count; ++head)
        for (i64 row = row_from; row < row_from + row_count; ++row) sum += ds[(head * rows + row) * s_kv + j];
      sums[batch * sum_batch + (head0 + head_from * head_step) * sum_head +
           (row0 + row_from) * sum_row + j] += (float)factor * sum;
    }
}

// partial[head, chunk] = sum over a chunk of the rows (b, s_q) of exp(offset[head] - lse) * sum(do * o). The
// grid is (heads, chunks).
extern "C" __global__ void attention_doffset_partial(const float* offset, const float* lse, const T* o,
                                                     const T* d_o, float* partial, i64 o_batch, i64 o_head,
                                                     i64 o_row, i64 do_batch, i64 do_head, i64 do_row,
                                                     i64 dim, i64 batches, i64 s_q) {
  __shared__ float shared[32];
  const i64 head = blockIdx.x, rows = batches * s_q, chunk = ceil_div(rows, gridDim.y),
            lane = threadIdx.x % 32;
  const i64 end = min64(rows, (blockIdx.y + 1) * chunk);
  float sum = 0.0f;
  for (i64 n = blockIdx.y * chunk + threadIdx.x / 32; n < end; n += blockDim.x / 32) {
    const i64 batch = n / s_q, i = n % s_q;
    const float at = lse[(batch * gridDim.x + head) * s_q + i];
    if (at == -INF) continue;  // beyond the true length
    const T* o_at = o + batch * o_batch + head * o_head + i * o_row;
    const T* do_at = d_o + batch * do_batch + head * do_head + i * do_row;
    float dot = 0.0f;
    for (i64 f = lane; f < dim; f += 32) dot += to_float(do_at[f]) * to_float(o_at[f]);
    sum += expf(offset[head] - at) * dot;
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[head * gridDim.y + blockIdx.y] = sum;
}

// doffset[head] = -sum of its `chunks` partial sums. One block a head.
extern "C" __global__ void attention_doffset(const float* partial, float* doffset, i64 chunks) {
  __shared__ float shared[32];
  float sum = 0.0f;
  for (i64 n = threadIdx.x; n < chunks; n += blockDim.x) sum += partial[blockIdx.x * chunks + n];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) doffset[blockIdx.x] = -sum;
}

// y = x rounded: x float32 (heads, rows, dim) contiguous, y strided. The grid is one-dimensional.
extern "C" __global__ void attention_store(const float* x, T* y, i64 heads, i64 rows, i64 dim, i64 y_head,
                                           i64 y_row) {
  for (i64 n = first(); n < heads * rows * dim; n += step()) {
    const i64 f = n % dim, row = n / dim % rows, head = n / dim / rows;
    y[head * y_head + row * y_row + f] = from_float<T>(x[n]);
  }
}
