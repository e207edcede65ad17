// functions: route, route_bwd, aux_partial (aux_loss), aux_total (aux_loss), aux_loss_bwd
// variants: T=f32; P=f32
// variants: T=bf16; P=bf16,f32
// variants: T=f16; P=f16,f32
//
// Routers of mixtures of experts: a warp a token. Experts are chosen one after the other: the largest key,
// the lowest index of equal ones. Sums run over the lanes in a fixed order.

#include "common.cuh"

constexpr int TOKENS = 4, MOST = 1024;  // of a block; experts, at most
enum Score { SOFTMAX, SIGMOID, SQRTSOFTPLUS };
enum State : u8 { FREE, CHOSEN, SEEN, EXCLUDED };

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float score_of(float x, i64 score) {
  return score == SIGMOID ? sigmoid(x) : sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

// d score / dx, where s is the score of x.
DEVICE float slope_of(float x, float s, i64 score) {
  if (score == SIGMOID) return s * sigmoid(-x);
  return s == 0.0f ? 0.0f : sigmoid(x) / (s + s);
}

// A number that is larger for a larger key, then for a lower index; NaN is below all numbers, 0 below NaN.
DEVICE u64 rank_of(float key, int index) {
  const u32 bits = __float_as_uint(key + 0.0f);  // -0 becomes +0
  const u32 order = key != key ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)order << 32 | (u32)~index;
}

// Mark the `count` largest keys of [from, to) among those that are FREE. Returns their sum, the largest
// first. The whole warp calls.
DEVICE float take(const float* keys, u8* states, int from, int to, int count, State mark) {
  float sum = 0.0f;
  for (int k = 0; k < count; ++k) {
    u64 best = 0;
    for (int e = from + threadIdx.x; e < to; e += 32) {
      const u64 rank = states[e] == FREE ? rank_of(keys[e], e) : 0;
      if (rank > best) best = rank;
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      const u64 other = __shfl_xor_sync(~0u, best, step);
      if (other > best) best = other;
    }
    const int index = (int)~(u32)best;
    sum = k == 0 ? keys[index] : sum + keys[index];
    __syncwarp();
    if (threadIdx.x == 0) states[index] = mark;
    __syncwarp();
  }
  return sum;
}

// Softmax's denominators over the experts that `among` says.
struct Softmax { float top, sum; };

template <typename Among> DEVICE Softmax softmax_of(const T* row, int E, Among among) {
  float top = -INF, sum = 0.0f;
  for (int e = threadIdx.x; e < E; e += 32)
    if (among(e)) top = fmaxf(top, to_float(row[e]));
  top = warp_max(top);
  for (int e = threadIdx.x; e < E; e += 32)
    if (among(e)) sum += expf(to_float(row[e]) - top);
  return {top, warp_sum(sum)};
}

// The experts of a token with the largest keys, and their probabilities.
extern "C" __global__ void __launch_bounds__(128)
route(const T* logits, const float* bias, P* probs, u8* chosen, i64 tokens, i64 experts, i64 groups,
      i64 group_topk, i64 score, i64 topk, i64 before, f64 factor, i64 dense) {
  __shared__ float all_keys[TOKENS][MOST], all_totals[TOKENS][MOST];
  __shared__ u8 all_states[TOKENS][MOST], all_kept[TOKENS][MOST];
  const i64 t = (i64)blockIdx.x * TOKENS + threadIdx.y;
  if (t >= tokens) return;
  const int E = (int)experts, lane = threadIdx.x;
  float *keys = all_keys[threadIdx.y], *totals = all_totals[threadIdx.y];
  u8 *states = all_states[threadIdx.y], *kept = all_kept[threadIdx.y];
  const T* row = logits + t * experts;
  const auto everywhere = [](int) { return true; };
  const auto is_chosen = [=](int e) { return states[e] == CHOSEN; };

  Softmax s{};
  if (score == SOFTMAX && (before || dense)) s = softmax_of(row, E, everywhere);
  for (int e = lane; e < E; e += 32) {
    float key = to_float(row[e]);
    if (score != SOFTMAX) key = score_of(key, score);
    else if (before && !dense) key = expf(key - s.top) / s.sum;
    keys[e] = bias != nullptr && !dense ? key + bias[e] : key;
    states[e] = FREE;
  }
  __syncwarp();

  if (groups > 0 && !dense) {
    const int size = E / (int)groups, count = (int)(topk / group_topk);
    for (int g = 0; g < groups; ++g) {
      const float total = take(keys, states, g * size, (g + 1) * size, count, SEEN);
      if (lane == 0) totals[g] = total, kept[g] = FREE;
    }
    __syncwarp();
    take(totals, kept, 0, (int)groups, (int)group_topk, CHOSEN);
    for (int e = lane; e < E; e += 32) states[e] = kept[e / size] == CHOSEN ? FREE : EXCLUDED;
    __syncwarp();
  }
  take(keys, states, 0, E, (int)topk, CHOSEN);

  float sum = 0.0f;
  if (score == SOFTMAX && !before && !dense) s = softmax_of(row, E, is_chosen);
  if (score != SOFTMAX) {
    for (int e = lane; e < E; e += 32)
      if (dense || is_chosen(e)) sum += score_of(to_float(row[e]), score);
    sum = warp_sum(sum) + 1e-20f;
  }
  for (int e = lane; e < E; e += 32) {
    const bool taken = is_chosen(e);
    float p = 0.0f;
    if (taken || dense) {
      const float x = to_float(row[e]);
      if (score == SOFTMAX) p = expf(x - s.top) / s.sum;
      else p = dense || topk > 1 ? score_of(x, score) / sum : score_of(x, score);
      p *= (float)factor;
    }
    probs[t * experts + e] = from_float<P>(p);
    chosen[t * experts + e] = taken;
  }
}

// The gradient of the probabilities of a choice that is held fixed.
extern "C" __global__ void __launch_bounds__(128)
route_bwd(const T* logits, const u8* chosen, const P* dprobs, T* dlogits, i64 tokens, i64 experts, i64 score,
          i64 topk, i64 before, f64 factor, i64 dense) {
  const i64 t = (i64)blockIdx.x * TOKENS + threadIdx.y;
  if (t >= tokens) return;
  const int E = (int)experts, lane = threadIdx.x;
  const T* row = logits + t * experts;
  const u8* taken = chosen + t * experts;
  const P* dp = dprobs + t * experts;
  const auto wanted = [=](int e) { return dense || taken[e]; };  // the probabilities that are not 0
  const auto gradient = [=](int e) { return to_float(dp[e]) * (float)factor; };
  const auto divided = [=](int e) { return before || wanted(e); };  // that softmax divides by

  float dot = 0.0f, sum = 0.0f;
  Softmax s{};
  if (score == SOFTMAX) {
    s = softmax_of(row, E, divided);
    for (int e = lane; e < E; e += 32)
      if (wanted(e)) dot += gradient(e) * (expf(to_float(row[e]) - s.top) / s.sum);
    dot = warp_sum(dot);
  } else {
    for (int e = lane; e < E; e += 32) {
      if (!wanted(e)) continue;
      const float value = score_of(to_float(row[e]), score);
      sum += value, dot += gradient(e) * value;
    }
    sum = warp_sum(sum) + 1e-20f;
    dot = warp_sum(dot) / sum;
  }
  for (int e = lane; e < E; e += 32) {
    float dx = 0.0f;
    const float x = to_float(row[e]);
    if (score == SOFTMAX) {
      if (divided(e)) dx = expf(x - s.top) / s.sum * ((wanted(e) ? gradient(e) : 0.0f) - dot);
    } else if (wanted(e)) {
      const float ds = dense || topk > 1 ? (gradient(e) - dot) / sum : gradient(e);
      dx = ds * slope_of(x, score_of(x, score), score);
    }
    dlogits[t * experts + e] = from_float<T>(dx);
  }
}

// --- the auxiliary loss ------------------------------------------------------------------------------------

enum Kind { INT32, INT64, FLOAT32 };  // of counts

DEVICE float count_at(const void* counts, i64 e, i64 kind) {
  if (kind == FLOAT32) return static_cast<const float*>(counts)[e];
  if (kind == INT64) return (float)static_cast<const i64*>(counts)[e];
  return (float)static_cast<const i32*>(counts)[e];
}

DEVICE float factor_of(f64 factor, const i64* total) {
  return (float)(total == nullptr ? factor : factor / ((f64)*total * (f64)*total));
}

// A block's sum of probs[t, e] * counts[e]. Block (32, rows): a warp a row.
extern "C" __global__ void __launch_bounds__(256)
aux_partial(const T* probs, const void* counts, float* partial, i64 tokens, i64 experts, i64 kind) {
  __shared__ float shared[32];
  float sum = 0.0f;
  for (i64 t = (i64)blockIdx.x * blockDim.y + threadIdx.y; t < tokens; t += (i64)gridDim.x * blockDim.y)
    for (i64 e = threadIdx.x; e < experts; e += 32)
      sum += to_float(probs[t * experts + e]) * count_at(counts, e, kind);
  sum = block_sum(sum, shared);
  if (thread_rank() == 0) partial[blockIdx.x] = sum;
}

// One block.
extern "C" __global__ void __launch_bounds__(256)
aux_total(const float* partial, const i64* total, T* loss, i64 blocks, f64 factor) {
  __shared__ float shared[32];
  float sum = 0.0f;
  for (i64 i = threadIdx.x; i < blocks; i += 256) sum += partial[i];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *loss = from_float<T>(sum * factor_of(factor, total));
}

extern "C" __global__ void __launch_bounds__(256)
aux_loss_bwd(const T* dloss, const void* counts, const i64* total, T* dprobs, i64 tokens, i64 experts,
             i64 kind, f64 factor) {
  const i64 t = (i64)blockIdx.x * blockDim.y + threadIdx.y;
  if (t >= tokens) return;
  const float scale = factor_of(factor, total) * to_float(*dloss);
  for (i64 e = threadIdx.x; e < experts; e += 32)
    dprobs[t * experts + e] = from_float<T>(scale * count_at(counts, e, kind));
}
