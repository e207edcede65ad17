// functions: cache_append
// functions: cache_gather (cache_gather, paged_attention_fwd)
// variants: W=u16,u32,u64,uint4
//
// A cache of keys or values in `count` pages of `size` positions. Sequence b's position p lies at
// pages[b * width + p / size], place p % size; a position is `heads` heads of `words` words of type W. Grids
// are one-dimensional, a block a token or position.

#include "sequences.cuh"

// Where a sequence's position lies in the cache, counted in positions; -1 where its table
// names none that there is.
DEVICE i64 place_of(const i32* pages, i64 count, i64 width, i64 size, i64 batch, i64 position) {
  if (position < 0 || position >= width * size) return -1;
  const i64 page = pages[batch * width + position / size];
  return page < 0 || page >= count ? -1 : page * size + position % size;
}

// New tokens to the ends of their sequences. x has strides in words, its rows are (b, s), or (t) where
// `starts` say which of `batches` sequences a token belongs to; `tokens` is s or t.
extern "C" __global__ void cache_append(const W* x, W* cache, const i32* pages, const i32* fresh,
                                        const i32* totals, const i32* starts, i64 tokens, i64 batches,
                                        i64 count, i64 width, i64 size, i64 heads, i64 words, i64 x_token,
                                        i64 x_batch, i64 x_head) {
  const i64 rows = starts == nullptr ? batches * tokens : tokens;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const i64 token = row % tokens,
              batch = starts == nullptr ? row / tokens : sequence_of(starts, batches, token);
    const i64 i = starts == nullptr ? token : token - starts[batch], added = length_of(fresh, batch);
    if (i < 0 || i >= added) continue;
    const i64 place = place_of(pages, count, width, size, batch, length_of(totals, batch) - added + i);
    if (place < 0) continue;
    const W* from = x + token * x_token + (starts == nullptr ? batch * x_batch : 0);
    W* to = cache + place * heads * words;
    for (i64 n = threadIdx.x; n < heads * words; n += blockDim.x)
      to[n] = from[n / words * x_head + n % words];
  }
}

// Sequences as a padded batch (b, s), 0 beyond their lengths; `row` words a position; y's strides in words.
extern "C" __global__ void cache_gather(const W* cache, W* y, const i32* pages, const i32* totals,
                                        i64 longest, i64 batches, i64 count, i64 width, i64 size, i64 row,
                                        i64 y_token, i64 y_batch) {
  for (i64 at = blockIdx.x; at < batches * longest; at += gridDim.x) {
    const i64 position = at % longest, batch = at / longest;
    const i64 place =
        position < length_of(totals, batch) ? place_of(pages, count, width, size, batch, position) : -1;
    const W* from = cache + place * row;
    W* to = y + position * y_token + batch * y_batch;
    for (i64 n = threadIdx.x; n < row; n += blockDim.x) to[n] = place < 0 ? W{} : from[n];
  }
}
