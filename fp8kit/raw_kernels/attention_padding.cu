// functions: attention_clean (attention_fwd, attention_bwd, packed_attention_fwd, packed_attention_bwd)
// functions: attention_zero_padding (attention_fwd, attention_bwd, packed_attention_fwd,
//   packed_attention_bwd, paged_attention_fwd, fp8_attention_fwd, fp8_attention_bwd)
// functions: attention_lse_padding (attention_fwd, attention_bwd, packed_attention_fwd,
//   packed_attention_bwd, paged_attention_fwd, fp8_attention_fwd, fp8_attention_bwd)
// functions: attention_lengths (attention_fwd, attention_bwd, packed_attention_fwd,
//   packed_attention_bwd, paged_attention_fwd, fp8_attention_fwd, fp8_attention_bwd)
// variants: T=f32,bf16,f16
//
// What stands round the matrix products and cuDNN's attention where lengths differ. A product multiplies
// padding by weights of 0, which leaves NaN and Inf as NaN; and cuDNN leaves what it likes in rows that see
// nothing. Grids are one-dimensional.

#include "attention.cuh"

// The rows of all heads in steps of N elements, zeros where they are not `there`.
template <int N>
DEVICE void clean_row(const T* x, T* y, bool there, i64 heads, i64 dim, i64 x_head, i64 y_head) {
  const i64 steps = dim / N;
  for (i64 n = threadIdx.x; n < heads * steps; n += blockDim.x) {
    const i64 head = n / steps, f = n % steps * N;
    alignas(16) T raw[N] = {};
    if (there) load_bytes<N * sizeof(T)>(x + head * x_head + f, raw);
    load_bytes<N * sizeof(T)>(raw, y + head * y_head + f);
  }
}

// y = x with zeros in the rows beyond the true lengths, of the queries or, for `keys`, of the keys.
// Both are (batches, heads, rows, dim), strided, dim by 1; they start at row `row0` of batch
// `batch0`. A block does a row.
extern "C" __global__ void attention_clean(const T* x, T* y, i64 keys, i64 batch0, i64 row0, i64 batches,
                                           i64 heads, i64 rows, i64 dim, i64 x_batch, i64 x_head, i64 x_row,
                                           i64 y_batch, i64 y_head, i64 y_row, Rules rules) {
  constexpr int WIDE = 16 / sizeof(T);
  const bool wide = dim % WIDE == 0 && rows_aligned<16>(x, x_batch) && rows_aligned<16>(x, x_head) &&
                    rows_aligned<16>(x, x_row) && rows_aligned<16>(y, y_batch) &&
                    rows_aligned<16>(y, y_head) && rows_aligned<16>(y, y_row);
  for (i64 n = blockIdx.x; n < batches * rows; n += gridDim.x) {
    const i64 batch = n / rows, i = n % rows;
    const i64 length = keys ? true_length(rules.cu_kv, batch0 + batch, rules.s_kv)
                            : true_length(rules.cu_q, batch0 + batch, rules.s_q);
    const T* from = x + batch * x_batch + i * x_row;
    T* to = y + batch * y_batch + i * y_row;
    if (wide) clean_row<WIDE>(from, to, row0 + i < length, heads, dim, x_head, y_head);
    else clean_row<1>(from, to, row0 + i < length, heads, dim, x_head, y_head);
  }
}

// Zeros into rows of x (b, h, s, dim; strided): query rows that see nothing; or, for `keys`, those beyond the
// true length and all rows of a batch without queries. A block does a row.
extern "C" __global__ void attention_zero_padding(T* x, i64 keys, i64 batches, i64 heads, i64 dim,
                                                  i64 x_batch, i64 x_head, i64 x_row, Rules rules) {
  const i64 rows = keys ? rules.s_kv : rules.s_q;
  for (i64 at = blockIdx.x; at < batches * rows; at += gridDim.x) {
    const i64 batch = at / rows, i = at % rows;
    if (keys) {
      if (i < true_length(rules.cu_kv, batch, rules.s_kv) && true_length(rules.cu_q, batch, rules.s_q) > 0)
        continue;
    } else {
      const Row row = make_row(rules, batch, 0, i);
      if (row.first < row.last) continue;
    }
    for (i64 n = threadIdx.x; n < heads * dim; n += blockDim.x)
      x[batch * x_batch + n / dim * x_head + i * x_row + n % dim] = from_float<T>(0.0f);
  }
}

// out = lse (b, h, s_q), and `value` in rows that see nothing. out may be lse.
extern "C" __global__ void attention_lse_padding(const float* lse, float* out, f64 value, i64 batches,
                                                 Rules rules) {
  for (i64 n = first(); n < batches * rules.heads * rules.s_q; n += step()) {
    const Row row = make_row(rules, n / rules.s_q / rules.heads, 0, n % rules.s_q);
    out[n] = row.first < row.last ? lse[n] : (float)value;
  }
}

// lengths[0 ... b - 1] = cu_q's, lengths[b ... 2 b - 1] = cu_kv's true lengths.
extern "C" __global__ void attention_lengths(i32* lengths, i64 batches, Rules rules) {
  for (i64 n = first(); n < 2 * batches; n += step())
    lengths[n] = (i32)(n < batches ? true_length(rules.cu_q, n, rules.s_q)
                                   : true_length(rules.cu_kv, n - batches, rules.s_kv));
}
