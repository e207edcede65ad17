// functions: attention_softmax, attention_softmax_bwd, attention_store, attention_zero_padding, attention_lse_padding, attention_lengths
// variants: T=f32,bf16,f16
//
// What stands between the matrix products of the unfused attention, and what pads round cuDNN's. T is the dtype of q, k, v, o.
//
// The score kernels work on a tile of scores: `gridDim.x` consecutive rows (from `row0` on) of `gridDim.y` query heads (`head0`,
// `head0 + head_step`, ...) of batch `batch`; tile element (y, x, j) lies at (y * gridDim.x + x) * s_kv + j. One block does one row.
// Source of the formulas: Dao et al., FlashAttention, 2022, appendix B.

#include "philox.cuh"

// One row of the tile: who it is and what it sees.
struct Row {
  i64 in_tile;  // first element in the tile
  i64 stats;    // index into lse (b, h, s_q)
  i64 i;        // position in the sequence
  i64 head;
  i64 visible;  // it sees columns 0 ... visible - 1
};

DEVICE Row this_row(i64 batch, i64 heads, i64 head0, i64 head_step, i64 row0, i64 s_q, i64 s_kv, i64 causal, const i32* cu_q,
                    const i32* cu_kv) {
  Row row;
  row.i = row0 + blockIdx.x;
  row.head = head0 + blockIdx.y * head_step;
  row.in_tile = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * s_kv;
  row.stats = (batch * heads + row.head) * s_q + row.i;
  row.visible = cu_kv == nullptr ? s_kv : cu_kv[batch + 1] - cu_kv[batch];
  if (causal) row.visible = min64(row.visible, row.i + 1);
  if (cu_q != nullptr && row.i >= cu_q[batch + 1] - cu_q[batch]) row.visible = 0;
  return row;
}

// Dropout's factor of elements first ... first + 3: inverse_keep where the word is at least `threshold`, else 0; 1 without dropout.
DEVICE void dropout_factors(const i64* rng, i64 first, i64 threshold, float inverse_keep, float (&factor)[4]) {
  if (rng == nullptr) {
#pragma unroll
    for (int n = 0; n < 4; ++n) factor[n] = 1.0f;
    return;
  }
  u32 words[4];
  philox_words<4>(load_rng(rng), (u64)first, words);
#pragma unroll
  for (int n = 0; n < 4; ++n) factor[n] = words[n] >= (u32)threshold ? inverse_keep : 0.0f;
}

// p = dropout(softmax(mask(scale * scores))) and lse = log(sum(exp(scale * scores))) over what the row sees; -Inf and a row of zeros
// where it sees nothing. p may be the scores' memory (T = f32): an element is read and written by the same thread.
extern "C" __global__ void attention_softmax(const float* scores, T* p, float* lse, const i32* cu_q, const i32* cu_kv, const i64* rng,
                                             i64 threshold, f64 inverse_keep, f64 scale, i64 causal, i64 batch, i64 heads,
                                             i64 head0, i64 head_step, i64 row0, i64 s_q, i64 s_kv) {
  __shared__ float shared[32];
  const Row row = this_row(batch, heads, head0, head_step, row0, s_q, s_kv, causal, cu_q, cu_kv);
  const float factor = (float)scale;
  const float* s = scores + row.in_tile;

  float top = -INF;
  for (i64 j = threadIdx.x; j < row.visible; j += blockDim.x) top = fmaxf(top, factor * s[j]);
  top = block_max(top, shared);
  const float shift = top == -INF ? 0.0f : top;
  float sum = 0.0f;
  for (i64 j = threadIdx.x; j < row.visible; j += blockDim.x) sum += expf(factor * s[j] - shift);
  sum = block_sum(sum, shared);
  const float inverse = sum > 0.0f ? 1.0f / sum : (sum == 0.0f ? 0.0f : sum);  // nothing seen: zeros; NaN stays NaN
  if (threadIdx.x == 0) lse[row.stats] = row.visible == 0 ? -INF : shift + logf(sum);

  for (i64 j = 4 * (i64)threadIdx.x; j < s_kv; j += 4 * blockDim.x) {
    float keep[4];
    dropout_factors(rng, row.stats * s_kv + j, threshold, (float)inverse_keep, keep);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (j + n >= s_kv) break;
      const float x = j + n < row.visible ? expf(factor * s[j + n] - shift) * inverse * keep[n] : 0.0f;
      p[row.in_tile + j + n] = from_float<T>(x);
    }
  }
}

// From the scores and dp = do v^T: p as forward had it (dropped), and ds = scale * P * (dropout(dp) - sum(do * o)), P undropped. p may be
// the scores' memory and ds dp's (T = f32). o and d_o have rows of `dim` elements, strides in elements.
extern "C" __global__ void attention_softmax_bwd(const float* scores, const float* dp, T* p, T* ds, const float* lse, const T* o,
                                                 const T* d_o, i64 o_batch, i64 o_head, i64 o_row, i64 do_batch, i64 do_head,
                                                 i64 do_row, i64 dim, const i32* cu_q, const i32* cu_kv, const i64* rng, i64 threshold,
                                                 f64 inverse_keep, f64 scale, i64 causal, i64 batch, i64 heads, i64 head0,
                                                 i64 head_step, i64 row0, i64 s_q, i64 s_kv) {
  __shared__ float shared[32];
  const Row row = this_row(batch, heads, head0, head_step, row0, s_q, s_kv, causal, cu_q, cu_kv);
  const float factor = (float)scale;
  const float shift = lse[row.stats] == -INF ? 0.0f : lse[row.stats];
  const T* o_at = o + batch * o_batch + row.head * o_head + row.i * o_row;
  const T* do_at = d_o + batch * do_batch + row.head * do_head + row.i * do_row;
  float dot = 0.0f;
  for (i64 f = threadIdx.x; f < dim; f += blockDim.x) dot += to_float(do_at[f]) * to_float(o_at[f]);
  dot = block_sum(dot, shared);

  for (i64 j = 4 * (i64)threadIdx.x; j < s_kv; j += 4 * blockDim.x) {
    float keep[4];
    dropout_factors(rng, row.stats * s_kv + j, threshold, (float)inverse_keep, keep);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (j + n >= s_kv) break;
      const i64 at = row.in_tile + j + n;
      const bool seen = j + n < row.visible;
      const float weight = seen ? expf(factor * scores[at] - shift) : 0.0f;
      const float slope = seen ? factor * weight * (keep[n] * dp[at] - dot) : 0.0f;
      p[at] = from_float<T>(weight * keep[n]);
      ds[at] = from_float<T>(slope);
    }
  }
}

// y = x rounded: x float32 (heads, rows, dim) contiguous, y strided. The grid is one-dimensional.
extern "C" __global__ void attention_store(const float* x, T* y, i64 heads, i64 rows, i64 dim, i64 y_head, i64 y_row) {
  for (i64 n = first(); n < heads * rows * dim; n += step()) {
    const i64 f = n % dim, row = n / dim % rows, head = n / dim / rows;
    y[head * y_head + row * y_row + f] = from_float<T>(x[n]);
  }
}

// Zeros into the rows of x (b, h, s, dim; strided) beyond cu_own's length, and into all rows of a batch whose other side has length 0.
// The grid is (s, b).
extern "C" __global__ void attention_zero_padding(T* x, const i32* cu_own, const i32* cu_other, i64 heads, i64 dim, i64 x_batch, i64 x_head,
                                                  i64 x_row) {
  const i64 row = blockIdx.x, batch = blockIdx.y;
  if (row < cu_own[batch + 1] - cu_own[batch] && cu_other[batch + 1] > cu_other[batch]) return;
  for (i64 n = threadIdx.x; n < heads * dim; n += blockDim.x)
    x[batch * x_batch + n / dim * x_head + row * x_row + n % dim] = from_float<T>(0.0f);
}

// out = lse (b, h, s), and `value` in rows that see nothing: beyond cu_q's length, or where cu_kv's is 0. out may be lse.
extern "C" __global__ void attention_lse_padding(const float* lse, float* out, const i32* cu_q, const i32* cu_kv, f64 value, i64 batches,
                                                 i64 heads, i64 s_q) {
  for (i64 n = first(); n < batches * heads * s_q; n += step()) {
    const i64 batch = n / s_q / heads;
    const bool sees = n % s_q < cu_q[batch + 1] - cu_q[batch] && cu_kv[batch + 1] > cu_kv[batch];
    out[n] = sees ? lse[n] : (float)value;
  }
}

// lengths[0 ... b - 1] = cu_q's, lengths[b ... 2 b - 1] = cu_kv's true lengths.
extern "C" __global__ void attention_lengths(const i32* cu_q, const i32* cu_kv, i32* lengths, i64 batches) {
  for (i64 n = first(); n < 2 * batches; n += step()) {
    const i32* cu = n < batches ? cu_q : cu_kv;
    lengths[n] = cu[n % batches + 1] - cu[n % batches];
  }
}
