// functions: cache_append, cache_gather
// variants: W=u16,u32,u64,uint4
//
// A cache of keys or values in pages of `size` positions. Sequence b's position p lies at pages[b * width + p / size], place p % size;
// a position is `heads` heads of `words` words of type W.

#include "sequences.cuh"

// New tokens to the ends of their sequences. x has strides in words. The grid is (s, b), or (t, 1) where `starts` say which of `batches`
// sequences a token belongs to.
extern "C" __global__ void cache_append(const W* x, W* cache, const i32* pages, const i32* fresh, const i32* totals, const i32* starts,
                                        i64 batches, i64 width, i64 size, i64 heads, i64 words, i64 x_token, i64 x_batch, i64 x_head) {
  const i64 token = blockIdx.x;
  const i64 batch = starts == nullptr ? (i64)blockIdx.y : sequence_of(starts, batches, token);
  const i64 i = starts == nullptr ? token : token - starts[batch];
  const i64 count = fresh[batch + 1] - fresh[batch];
  if (i < 0 || i >= count) return;
  const i64 place = totals[batch + 1] - totals[batch] - count + i;
  const W* from = x + token * x_token + (starts == nullptr ? batch * x_batch : 0);
  W* to = cache + ((i64)pages[batch * width + place / size] * size + place % size) * heads * words;
  for (i64 n = threadIdx.x; n < heads * words; n += blockDim.x) to[n] = from[n / words * x_head + n % words];
}

// Sequences as a padded batch, 0 beyond their lengths; `row` words a position. The grid is (s, b); y's strides in words.
extern "C" __global__ void cache_gather(const W* cache, W* y, const i32* pages, const i32* totals, i64 width, i64 size, i64 row,
                                        i64 y_token, i64 y_batch) {
  const i64 place = blockIdx.x, batch = blockIdx.y;
  const bool there = place < totals[batch + 1] - totals[batch];
  const W* from = there ? cache + ((i64)pages[batch * width + place / size] * size + place % size) * row : cache;
  W* to = y + place * y_token + batch * y_batch;
  for (i64 n = threadIdx.x; n < row; n += blockDim.x) to[n] = there ? from[n] : W{};
}
