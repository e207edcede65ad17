// Finding a token's sequence among sequences that lie one after the other. Running sums come from the
// caller's device memory, where nobody has looked at them: whatever they hold, what is computed from them
// here is used only after it was compared with the arrays' sizes.
#pragma once
#include "common.cuh"

// The last of `batches` sequences that starts at or before `token`, where starts never fall and starts[0] is
// at most `token`; else some sequence. `batches` is at least 1.
DEVICE i64 sequence_of(const i32* starts, i64 batches, i64 token) {
  i64 low = 0, high = batches;  // starts[low] <= token < starts[high], as if starts[batches] were infinite
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (starts[middle] <= token) low = middle; else high = middle;
  }
  return low;
}

// Length of a sequence by running sums, at least 0.
DEVICE i64 length_of(const i32* sums, i64 batch) { return max64(0, (i64)sums[batch + 1] - sums[batch]); }
