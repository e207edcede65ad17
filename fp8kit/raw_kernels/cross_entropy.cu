// functions: cross_entropy_fwd, cross_entropy_total (cross_entropy_fwd), cross_entropy_bwd
// variants: T=f32,bf16,f16
//
// loss = lse - (1 - s) * logits[t] - s * mean(logits), s = label smoothing. One block a row; the maximum and
// the sum of exponentials are found in one pass (Milakov & Gimelshein, Online normalizer calculation for
// softmax, 2018). Rows of an odd number of columns start anywhere: the elements before the first 16-byte
// boundary and after the last are taken one by one.

#include "rows.cuh"

// 2**x within 2 ulp; results below 2**-126 become 0.
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

constexpr float LOG2_E = 1.4426950408889634f, LOG2_E_REST = 1.92596299e-8f, LN_2 = 0.6931471805599453f;

// exp(x) with relative error at most (2 + |x|) * 2**-23: enough for a sum, where a term counts
// for exp(x) of the largest.
DEVICE float exp_fast(float x) { return exp2_fast(x * LOG2_E); }

// exp(x) for x up to 80, or NaN, within 4 ulp: what rounding x * log2(e) loses is multiplied
// back. Below -100 it is 0.
DEVICE float exp_close(float x) {
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(-100.0f));
  const float scaled = x * LOG2_E, lost = fmaf(x, LOG2_E, -scaled) + x * LOG2_E_REST, y = exp2_fast(scaled);
  return fmaf(y, lost * LN_2, y);
}

// Number of elements before the first 16-byte boundary at or after `row`, at most N.
DEVICE i64 to_boundary(const T* row, i64 N) {
  return min64(N, (16 - reinterpret_cast<u64>(row) % 16) % 16 / sizeof(T));
}

// Maximum, sum of exp(x - maximum) and sum of x of what a thread has seen; the first
// two start empty at -Inf, 0.
struct Softmax {
  float top = -INF, sum = 0.0f, plain = 0.0f;

  // What exp's arguments are taken relative to: an infinite maximum must not give Inf - Inf.
  static __device__ __forceinline__ float shift(float top) { return fabsf(top) == INF ? 0.0f : top; }

  __device__ __forceinline__ void raise(float candidate) {
    const float higher = fmaxf(top, candidate);
    if (higher > top) sum *= exp_fast(top - higher), top = higher;
  }
  __device__ __forceinline__ void take(float x) {
    raise(x);
    sum += exp_fast(x - shift(top));
    plain += x;
  }
};

extern "C" __global__ void __launch_bounds__(512)
cross_entropy_fwd(const T* logits, const void* targets, float* loss, float* lse, i64 V, f64 smoothing,
                  i64 ignore_index, i64 wide_targets) {
  __shared__ float shared[32];
  const T* row = logits + (i64)blockIdx.x * V;
  Softmax seen;
  const i64 head = to_boundary(row, V), body = (V - head) / 8 * 8;
  if (threadIdx.x < head) seen.take(to_float(row[threadIdx.x]));
#pragma unroll 2
  for (i64 c = head + threadIdx.x * 8; c < head + body; c += blockDim.x * 8) {
    const Eight<T> x = read8(row + c, 8, true);
    float top = -INF;
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, value(x, j));
    seen.raise(top);
    const float shift = Softmax::shift(seen.top);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      seen.sum += exp_fast(value(x, j) - shift);
      seen.plain += value(x, j);
    }
  }
  if (head + body + threadIdx.x < V) seen.take(to_float(row[head + body + threadIdx.x]));

  const float top = block_max(seen.top, shared);
  const float sum = block_sum(seen.sum * exp_fast(seen.top - Softmax::shift(top)), shared);
  const float plain = block_sum(seen.plain, shared);
  if (threadIdx.x) return;
  const i64 target = number_at(targets, blockIdx.x, wide_targets);
  const float s = (float)smoothing, log_sum = logf(sum) + Softmax::shift(top);
  float value = __int_as_float(0x7FC00000);
  if (target >= 0 && target < V) {
    value = log_sum - (1.0f - s) * to_float(row[target]);
    if (s != 0.0f) value -= s * (plain / (float)V);
  }
  lse[blockIdx.x] = log_sum;
  loss[blockIdx.x] = target == ignore_index ? 0.0f : value;
}

// total = (mean loss over the rows not ignored, their number); one block.
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_total(const float* loss, const void* targets, float* total, i64 M, i64 ignore_index,
                    i64 wide_targets) {
  __shared__ float shared[32];
  float sum = 0.0f, count = 0.0f;
#pragma unroll 4
  for (i64 i = threadIdx.x; i < M; i += blockDim.x) {
    sum += loss[i];
    count += number_at(targets, i, wide_targets) == ignore_index ? 0.0f : 1.0f;
  }
  sum = block_sum(sum, shared);
  count = block_sum(count, shared);
  if (threadIdx.x) return;
  total[0] = count > 0.0f ? sum / count : 0.0f;
  total[1] = count;
}

struct Gradient {
  i64 target;
  float lse, hit, base, upstream;  // hit = 1 - s at the target, base = s / V everywhere
  __device__ __forceinline__ float operator()(float x, i64 column) const {
    return (exp_close(x - lse) - (column == target ? hit : 0.0f) - base) * upstream;
  }
};

// dlogits may be logits: a thread reads its elements before it writes them.
extern "C" __global__ void __launch_bounds__(512)
cross_entropy_bwd(const T* logits, const void* targets, const float* lse, const float* dloss,
                  const float* total, T* dlogits, i64 V, f64 smoothing, i64 ignore_index,
                  i64 wide_targets) {
  const T* row = logits + (i64)blockIdx.x * V;
  T* out = dlogits + (i64)blockIdx.x * V;
  const float s = (float)smoothing;
  Gradient gradient{number_at(targets, blockIdx.x, wide_targets), lse[blockIdx.x], 1.0f - s,
                    s == 0.0f ? 0.0f : s / (float)V, 0.0f};
  gradient.upstream = total == nullptr ? dloss[blockIdx.x] : dloss[0] / total[1];
  const bool ignored = gradient.target == ignore_index;

  const bool together = reinterpret_cast<u64>(row) % 16 == reinterpret_cast<u64>(out) % 16;
  const i64 head = together ? to_boundary(row, V) : V, body = (V - head) / 8 * 8;
  for (i64 c = threadIdx.x; c < head; c += blockDim.x)
    out[c] = from_float<T>(ignored ? 0.0f : gradient(to_float(row[c]), c));
#pragma unroll 2
  for (i64 c = head + threadIdx.x * 8; c < head + body; c += blockDim.x * 8) {
    const Eight<T> x = read8(row + c, 8, true);
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = ignored ? 0.0f : gradient(value(x, j), c + j);
    write8(out + c, 8, true, rounded8<T>(v));
  }
  for (i64 c = head + body + threadIdx.x; c < V; c += blockDim.x)
    out[c] = from_float<T>(ignored ? 0.0f : gradient(to_float(row[c]), c));
}
