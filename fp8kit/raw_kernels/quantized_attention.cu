// functions: quantized_softmax (quantized_attention_fwd), scale_rows (quantized_attention_fwd)
// functions: quantized_softmax_bwd (quantized_attention_bwd)
// functions: clear_padding
// variants: T=f32
// variants: T=f32; CAP=1
//
// What stands between the matrix products of attention over quantised operands, all float32. Tiles of scores
// are those of attention.cu: one block does one row.

#include "attention.cuh"
#include "fp8.cuh"

// What the host packs (backends/cuda/quantized_attention.py): rules, and how probabilities and the scores'
// gradients are rounded. The latter's scale lies in memory. `rng`: what is rounded stochastically draws from
// it, by the numbers of the casts; null where nothing is.
struct QuantizedRules {
  Rules rules;
  Narrow p;
  float scale, inverse;
  Narrow ds;
  const i64* rng;
  u64 p_draw, ds_draw;  // where the words of a cast begin
};

DEVICE float round_to(const Narrow& format, float x, float scale, float inverse, u32 word) {
  return decode(format, encode(format, x * scale, word)) * inverse;
}

// The words of columns j ... j + 3 of a row for a cast whose words begin at `draw`.
DEVICE void cast_words(const QuantizedRules& how, const Narrow& format, u64 draw, const Row& row, i64 j,
                       u32 (&words)[4]) {
  if (!format.random_bits) return;
  philox_words<4>(load_rng(how.rng), draw + (u64)(row.stats * how.rules.s_kv + j), words);
}

DEVICE Row tile_row(const Rules& rules, i64 batch, i64 head0, i64 head_step, i64 row0) {
  return make_row(rules, batch, head0 + blockIdx.y * head_step, row0 + blockIdx.x);
}

// From the products q k^T, in place: dropout(rounded exp(score - largest)) over what the row sees, else 0;
// inverse = 1 / (the sum of the unrounded ones and the further score's), 0 for a row with neither; lse.
extern "C" __global__ void quantized_softmax(float* scores, float* inverse, float* lse, i64 batch, i64 head0,
                                             i64 head_step, i64 row0, QuantizedRules how) {
  __shared__ float shared[32];
  const Rules& rules = how.rules;
  const Row row = tile_row(rules, batch, head0, head_step, row0);
  const i64 place = (i64)blockIdx.y * gridDim.x + blockIdx.x, start = place * rules.s_kv, s_kv = rules.s_kv;

  float top = -INF;
  for (i64 j = row.first + threadIdx.x; j < row.last; j += blockDim.x)
    top = fmaxf(top, score(rules, row, j, scores[start + j]));
  top = fmaxf(block_max(top, shared), row.sink);
  const float shift = top == -INF ? 0.0f : top;
  float sum = 0.0f;
  for (i64 j = row.first + threadIdx.x; j < row.last; j += blockDim.x)
    sum += expf(score(rules, row, j, scores[start + j]) - shift);
  sum = block_sum(sum, shared) + expf(row.sink - shift);
  if (threadIdx.x == 0) {
    inverse[place] = sum > 0.0f ? 1.0f / sum : (sum == 0.0f ? 0.0f : sum);
    lse[row.stats] = shift + logf(sum);
  }

  for (i64 j = 4 * (i64)threadIdx.x; j < s_kv; j += 4 * blockDim.x) {
    float keep[4];
    dropout_factors(rules, row, j, keep);
    u32 words[4] = {};
    cast_words(how, how.p, how.p_draw, row, j, words);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (j + n >= s_kv) break;
      float x = 0.0f;
      if (sees(row, j + n)) {
        x = expf(score(rules, row, j + n, scores[start + j + n]) - shift);
        x = round_to(how.p, x, how.scale, how.inverse, words[n]) * keep[n];
      }
      scores[start + j + n] = x;
    }
  }
}

// x *= inverse of its row. x: float32 (heads, rows, dim), strided; inverse: (heads, rows). The grid is
// one-dimensional.
extern "C" __global__ void scale_rows(float* x, const float* inverse, i64 heads, i64 rows, i64 dim,
                                      i64 x_head, i64 x_row) {
  for (i64 n = first(); n < heads * rows * dim; n += step()) {
    const i64 f = n % dim, row = n / dim % rows, head = n / dim / rows;
    x[head * x_head + row * x_row + f] *= inverse[head * rows + row];
  }
}

// From the products q k^T and dp = do v^T, both in place: p = exp(score - lse), and ds = scale * p *
// (dropout(dp) - sum(do * o)), times the cap's derivative. Without a `scale_inv` p is not written, ds is not
// rounded, and its amax is taken; what is written is without that derivative for a bias that is not capped.
// With one, p becomes dropout(rounded p), and ds rounded by `ds_scale`. o and d_o have rows of `dim`
// elements, strides in elements.
extern "C" __global__ void quantized_softmax_bwd(float* scores, float* dp, const float* lse, const float* o,
                                                 const float* d_o, float* amax, const float* ds_scale,
                                                 const float* scale_inv, i64 o_batch, i64 o_head, i64 o_row,
                                                 i64 do_batch, i64 do_head, i64 do_row, i64 dim, i64 batch,
                                                 i64 head0, i64 head_step, i64 row0, QuantizedRules how) {
  __shared__ float shared[32];
  const Rules& rules = how.rules;
  const Row row = tile_row(rules, batch, head0, head_step, row0);
  const i64 start = ((i64)blockIdx.y * gridDim.x + blockIdx.x) * rules.s_kv, s_kv = rules.s_kv;
  const float factor = (float)rules.scale;
  const float shift = lse[row.stats] == -INF ? 0.0f : lse[row.stats];
  const float* o_at = o + batch * o_batch + row.head * o_head + row.i * o_row;
  const float* do_at = d_o + batch * do_batch + row.head * do_head + row.i * do_row;
  const bool rounds = scale_inv != nullptr;
  const float scale = rounds ? *ds_scale : 1.0f, inverse = rounds ? *scale_inv : 1.0f;
  float dot = 0.0f;
  for (i64 f = threadIdx.x; f < dim; f += blockDim.x) dot += do_at[f] * o_at[f];
  dot = block_sum(dot, shared);

  float most = 0.0f;
  for (i64 j = 4 * (i64)threadIdx.x; j < s_kv; j += 4 * blockDim.x) {
    float keep[4];
    dropout_factors(rules, row, j, keep);
    u32 words[4] = {}, ds_words[4] = {};
    if (rounds) {
      cast_words(how, how.p, how.p_draw, row, j, words);
      cast_words(how, how.ds, how.ds_draw, row, j, ds_words);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (j + n >= s_kv) break;
      const i64 at = start + j + n;
      const bool seen = sees(row, j + n);
      const float weight = seen ? expf(score(rules, row, j + n, scores[at]) - shift) : 0.0f;
      const float slope = seen ? factor * weight * (keep[n] * dp[at] - dot) : 0.0f;
      float inner = slope;
      if (CAP && seen) inner *= cap_slope(part_of_cap(rules, row, j + n, scores[at]));
      most = amax_of(most, inner);
      dp[at] = rounds ? round_to(how.ds, inner, scale, inverse, ds_words[n])
                      : rules.bias_capped ? inner : slope;
      if (rounds) scores[at] = round_to(how.p, weight, how.scale, how.inverse, words[n]) * keep[n];
    }
  }
  if (!rounds) {
    most = block_max(most, shared);
    if (threadIdx.x == 0) atomic_amax(amax, most);
  }
}

// x = 0 in rows from the true length of their batch on. x: float32 (batches, heads, rows, dim), contiguous.
// The grid is one-dimensional.
extern "C" __global__ void clear_padding(float* x, const i32* cu_seqlens, i64 batches, i64 heads, i64 rows,
                                         i64 dim) {
  for (i64 n = first(); n < batches * heads * rows * dim; n += step()) {
    const i64 row = n / dim % rows, batch = n / dim / rows / heads;
    if (row >= true_length(cu_seqlens, batch, rows)) x[n] = 0.0f;
  }
}
