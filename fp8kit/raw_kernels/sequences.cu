// functions: unpack_sequences (unpack_sequences, packed_attention_fwd, packed_attention_bwd)
// functions: pack_sequences (pack_sequences, packed_attention_fwd, packed_attention_bwd)
// variants: W=u16,u32,u64,uint4
//
// Between sequences that lie one after the other (t, n) and a padded batch (b, s, n). A row is moved in
// `words` words of type W; among the tokens it may be in parts, heads, of `part` words each, `head` words
// apart, and tokens lie `token_step` words apart. Grids are one-dimensional, a block a row.

#include "sequences.cuh"

// A word of set bits: NaN in every float format.
DEVICE W ones() {
  W word;
  memset(&word, 0xFF, sizeof(W));
  return word;
}

// y's rows (b, s) from x's (t).
extern "C" __global__ void unpack_sequences(const W* x, W* y, const i32* lengths, const i32* starts,
                                            i64 tokens, i64 batches, i64 longest, i64 words, i64 part,
                                            i64 token_step, i64 head) {
  for (i64 row = blockIdx.x; row < batches * longest; row += gridDim.x) {
    const i64 batch = row / longest, i = row % longest, token = starts[batch] + i;
    const bool there = i < length_of(lengths, batch) && token >= 0 && token < tokens;
    const W* from = x + token * token_step;
    W* to = y + row * words;
    for (i64 n = threadIdx.x; n < words; n += blockDim.x)
      to[n] = there ? from[n / part * head + n % part] : W{};
  }
}

// y's rows (t) from x's (b, s). Rows that have no place in the batch become NaN.
extern "C" __global__ void pack_sequences(const W* x, W* y, const i32* lengths, const i32* starts, i64 tokens,
                                          i64 batches, i64 longest, i64 words, i64 part, i64 token_step,
                                          i64 head) {
  for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
    const i64 batch = sequence_of(starts, batches, token), i = token - starts[batch];
    const bool there = i >= 0 && i < length_of(lengths, batch), lost = there && i >= longest;
    const W* from = x + (batch * longest + i) * words;
    W* to = y + token * token_step;
    for (i64 n = threadIdx.x; n < words; n += blockDim.x)
      to[n / part * head + n % part] = lost ? ones() : there ? from[n] : W{};
  }
}
