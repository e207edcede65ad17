// Philox4x32-10: random words from a counter and a key, no state (Salmon, Moraes, Dror, Shaw: Parallel random
// numbers: as easy as 1, 2, 3, SC'11). The counter is the element's index, so that any thread, engine or
// device can compute any word.
#pragma once
#include "common.cuh"

struct Rng { u64 seed, offset; };

DEVICE Rng load_rng(const i64* rng) { return Rng{(u64)rng[0], (u64)rng[1]}; }

// Index of the first of n elements: of part `part[0]` of equal parts; null: of the whole.
DEVICE u64 first_index(const i64* part, i64 n) { return part == nullptr ? 0 : (u64)part[0] * (u64)n; }

// The four words of elements 4 * group ... 4 * group + 3.
DEVICE uint4 philox(Rng rng, u64 group) {
  u32 c0 = (u32)group, c1 = (u32)(group >> 32), c2 = (u32)rng.offset, c3 = (u32)(rng.offset >> 32);
  u32 k0 = (u32)rng.seed, k1 = (u32)(rng.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

// Word index % 4 of the group of `index`.
DEVICE u32 philox_word(Rng rng, u64 index) {
  const uint4 words = philox(rng, index >> 2);
  const u32 low = index & 1 ? words.y : words.x, high = index & 1 ? words.w : words.z;
  return index & 2 ? high : low;
}

// The words of N consecutive elements from `index` on, wherever in its group it lies.
template <int N> DEVICE void philox_words(Rng rng, u64 index, u32 (&words)[N]) {
  if (N % 4 == 0 && index % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint4 four = philox(rng, (index + i) >> 2);
      words[i] = four.x, words[(i + 1) % N] = four.y, words[(i + 2) % N] = four.z,
      words[(i + 3) % N] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = philox_word(rng, index + i);
  }
}
