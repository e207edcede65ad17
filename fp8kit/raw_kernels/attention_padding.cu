// functions: attention_zero_padding, attention_lse_padding, attention_lengths
// variants: T=f32,bf16,f16
//
// What stands round cuDNN's attention where lengths differ: cuDNN leaves what it likes in rows that see nothing.

#include "attention.cuh"

// Zeros into rows of x (b, h, s, dim; strided): query rows that see nothing; or, for `keys`, those beyond the true length and all rows of a
// batch without queries. The grid is (s, b).
extern "C" __global__ void attention_zero_padding(T* x, i64 keys, i64 heads, i64 dim, i64 x_batch, i64 x_head, i64 x_row, Rules rules) {
  const i64 i = blockIdx.x, batch = blockIdx.y;
  if (keys) {
    if (i < true_length(rules.cu_kv, batch, rules.s_kv) && true_length(rules.cu_q, batch, rules.s_q) > 0) return;
  } else {
    const Row row = make_row(rules, batch, 0, i);
    if (row.first < row.last) return;
  }
  for (i64 n = threadIdx.x; n < heads * dim; n += blockDim.x)
    x[batch * x_batch + n / dim * x_head + i * x_row + n % dim] = from_float<T>(0.0f);
}

// out = lse (b, h, s_q), and `value` in rows that see nothing. out may be lse. The grid is one-dimensional.
extern "C" __global__ void attention_lse_padding(const float* lse, float* out, f64 value, i64 batches, Rules rules) {
  for (i64 n = first(); n < batches * rules.heads * rules.s_q; n += step()) {
    const Row row = make_row(rules, n / rules.s_q / rules.heads, 0, n % rules.s_q);
    out[n] = row.first < row.last ? lse[n] : (float)value;
  }
}

// lengths[0 ... b - 1] = cu_q's, lengths[b ... 2 b - 1] = cu_kv's true lengths.
extern "C" __global__ void attention_lengths(const i32* cu_q, const i32* cu_kv, i32* lengths, i64 batches) {
  for (i64 n = first(); n < 2 * batches; n += step()) {
    const i32* cu = n < batches ? cu_q : cu_kv;
    lengths[n] = cu[n % batches + 1] - cu[n % batches];
  }
}
