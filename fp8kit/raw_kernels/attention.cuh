// What a row of the attention sees and what its scores are: the rule stands here once, for forward, backward
// and the padding round cuDNN. T is the dtype of q, k, v, o and of the bias. CAP is 1 where scores are
// capped.
#pragma once
#ifndef CAP
#define CAP 0
#endif
#include "philox.cuh"
#include "sequences.cuh"

// The host packs this (backends/cuda/attention_rules.py). Arrays that are absent are null;
// a stride of 0 broadcasts.
struct Rules {
  const i32 *cu_q, *cu_kv;  // running sums of true lengths (b + 1)
  const u8* mask;           // not 0: masked out
  i64 mask_batch, mask_head, mask_row;
  const T* bias;
  i64 bias_batch, bias_head, bias_row;
  f64 bias_factor;
  const float* slopes;  // ALiBi's (h), or (b, h) with slopes_batch = h
  i64 slopes_batch;
  const float* offset;  // (h) further scores
  i64 sink;             // whether there is a further score: offset's, or 0
  i64 left, right;      // of the band round the diagonal; negative: unbounded
  i64 bottom_right;
  f64 scale;
  const i64* rng;
  i64 threshold;
  f64 inverse_keep;
  // first batch, first head and heads of the attention whose words are drawn; null: this one's
  const i32* dropout_place;
  i64 heads, s_q, s_kv;
  // packed sequences: where each starts in q's and in k's tokens (b + 1); null: batches lie apart
  const i32 *starts_q, *starts_kv;
  i64 tokens_q, tokens_kv;
  f64 softcap;      // with CAP alone
  i64 bias_capped;  // whether the bias joins the product before its cap
};

// A query row: it sees columns first ... last - 1 (but for the mask array). `place`: the column on its
// diagonal. `sink`: its further score, -Inf where it has none. `stats`: its index in lse (b, h, s_q).
struct Row {
  i64 batch, head, i, place, first, last, stats;
  float sink;
};

// A batch's length, in 0 ... whole whatever `cu` holds.
DEVICE i64 true_length(const i32* cu, i64 batch, i64 whole) {
  return cu == nullptr ? whole : min64(whole, length_of(cu, batch));
}

DEVICE Row make_row(const Rules& rules, i64 batch, i64 head, i64 i) {
  Row row;
  row.batch = batch, row.head = head, row.i = i;
  row.stats = (batch * rules.heads + head) * rules.s_q + i;
  const i64 rows = true_length(rules.cu_q, batch, rules.s_q),
            columns = true_length(rules.cu_kv, batch, rules.s_kv);
  const bool exists = i < rows;
  row.place = i + (rules.bottom_right ? columns - rows : 0);
  row.first = rules.left < 0 ? 0 : max64(0, row.place - rules.left);
  row.last = !exists ? 0 : rules.right < 0 ? columns : min64(columns, row.place + rules.right + 1);
  row.sink = !exists || !rules.sink ? -INF : rules.offset == nullptr ? 0.0f : rules.offset[head];
  return row;
}

DEVICE bool sees(const Row& row, i64 j) { return j >= row.first && j < row.last; }

// Whether the mask array masks out a column in the row's range.
DEVICE bool masked_out(const Rules& rules, const Row& row, i64 j) {
  return rules.mask != nullptr && rules.mask[row.batch * rules.mask_batch + row.head * rules.mask_head +
                                             row.i * rules.mask_row + j];
}

// A score and a column's bias.
DEVICE float with_bias(const Rules& rules, const Row& row, i64 j, float s) {
  const i64 at = row.batch * rules.bias_batch + row.head * rules.bias_head + row.i * rules.bias_row + j;
  return s + (float)rules.bias_factor * to_float(rules.bias[at]);
}

// tanh(what is capped / cap), from q k^T: a score's part of the cap. Its derivative is 1 - its square.
DEVICE float part_of_cap(const Rules& rules, const Row& row, i64 j, float product) {
  float s = (float)rules.scale * product;
  if (rules.bias != nullptr && rules.bias_capped) s = with_bias(rules, row, j, s);
  return tanhf(s / (float)rules.softcap);
}
DEVICE float cap_slope(float part) { return fmaxf(1.0f - part * part, 0.0f); }

// A score from what it is before the biases that are not capped.
DEVICE float biased(const Rules& rules, const Row& row, i64 j, float s) {
  if (rules.bias != nullptr && !(CAP && rules.bias_capped)) s = with_bias(rules, row, j, s);
  if (rules.slopes != nullptr) {
    const i64 away = row.place - j;
    s -= rules.slopes[row.batch * rules.slopes_batch + row.head] * (float)(away < 0 ? -away : away);
  }
  return s;
}

// The score of a column in the row's range, from q k^T: -Inf where the mask array masks it out.
DEVICE float score(const Rules& rules, const Row& row, i64 j, float product) {
  if (masked_out(rules, row, j)) return -INF;
  if (CAP) product = (float)rules.softcap * part_of_cap(rules, row, j, product);
  else product *= (float)rules.scale;
  return biased(rules, row, j, product);
}

// Dropout's factors of columns j ... j + 3: inverse_keep where the word is at least `threshold`,
// else 0; 1 without dropout.
DEVICE void dropout_factors(const Rules& rules, const Row& row, i64 j, float (&factor)[4]) {
  if (rules.rng == nullptr) {
#pragma unroll
    for (int n = 0; n < 4; ++n) factor[n] = 1.0f;
    return;
  }
  // the row's index where words are counted: here, where the compiler keeps it out of make_row's registers
  i64 drawn = row.stats;
  if (const i32* at = rules.dropout_place)
    drawn = ((at[0] + row.batch) * at[2] + at[1] + row.head) * rules.s_q + row.i;
  u32 words[4];
  philox_words<4>(load_rng(rules.rng), (u64)(drawn * rules.s_kv + j), words);
#pragma unroll
  for (int n = 0; n < 4; ++n) factor[n] = words[n] >= (u32)rules.threshold ? (float)rules.inverse_keep : 0.0f;
}
