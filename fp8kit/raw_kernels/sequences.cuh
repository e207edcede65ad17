// Finding a token's sequence among sequences that lie one after the other.
#pragma once
#include "common.cuh"

// The last of `batches` sequences that starts at or before `token`; starts never fall, and starts[0] is 0.
DEVICE i64 sequence_of(const i32* starts, i64 batches, i64 token) {
  i64 low = 0, high = batches;  // starts[low] <= token < starts[high], as if starts[batches] were infinite
  while (high - low > 1) {
    const i64 middle = (low + high) / 2;
    if (starts[middle] <= token) low = middle; else high = middle;
  }
  return low;
}
