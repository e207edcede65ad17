// functions: unpack_sequences, pack_sequences
// variants: W=u16,u32,u64,uint4
//
// Between sequences that lie one after the other (t, n) and a padded batch (b, s, n). A row is moved in `words` words of type W.

#include "sequences.cuh"

// A word of set bits: NaN in every float format.
DEVICE W ones() {
  W word;
  memset(&word, 0xFF, sizeof(W));
  return word;
}

// The grid is (s, b).
extern "C" __global__ void unpack_sequences(const W* x, W* y, const i32* lengths, const i32* starts, i64 words) {
  const i64 i = blockIdx.x, batch = blockIdx.y;
  const bool there = i < lengths[batch + 1] - lengths[batch];
  const W* from = x + (starts[batch] + i) * words;
  W* to = y + (batch * gridDim.x + i) * words;
  for (i64 n = threadIdx.x; n < words; n += blockDim.x) to[n] = there ? from[n] : W{};
}

// The grid is (t). Rows that have no place in the batch become NaN.
extern "C" __global__ void pack_sequences(const W* x, W* y, const i32* lengths, const i32* starts, i64 batches, i64 longest, i64 words) {
  const i64 token = blockIdx.x, batch = sequence_of(starts, batches, token), i = token - starts[batch];
  const bool there = i < lengths[batch + 1] - lengths[batch], lost = there && i >= longest;
  const W* from = x + (batch * longest + i) * words;
  for (i64 n = threadIdx.x; n < words; n += blockDim.x) y[token * words + n] = lost ? ones() : there ? from[n] : W{};
}
