// functions: adamw, sgd, scale, loss_scale, count, l2norm_parts (l2norm), l2norm_total (l2norm), clip
// variants: T=f32,bf16,f16
//
// Kernels over lists of tensors. A launch takes a table of tensors by value; each is cut into pieces of PIECE
// elements, one block a piece; tensor t's pieces are blocks first[t] ... first[t + 1] - 1. The host splits
// longer lists (optim.py: the tables' layouts are mirrored there).

#include "optim.cuh"

// --- optimisers --------------------------------------------------------------------------------------------

constexpr int STEP_TENSORS = 64;

struct AdamwTable {
  T* param[STEP_TENSORS];
  const void* grad[STEP_TENSORS];
  float* m[STEP_TENSORS];
  float* v[STEP_TENSORS];
  float* master[STEP_TENSORS];  // null: the parameter is its own master
  i64 size[STEP_TENSORS];
  u32 first[STEP_TENSORS];
  float decay[STEP_TENSORS];
};

// Loshchilov & Hutter 2019, algorithm 2. add1 = 1 - beta1, add2 = 1 - beta2, correction1 = 1 - beta1**step,
// correction2 = 1 - beta2**step: worked out by the host in float64; with step_at (int64) by the first two
// threads here. lr_at (null: lr) is read on the device.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw(f64 lr, f64 beta1, f64 add1, f64 beta2, f64 add2, f64 epsilon, f64 correction1, f64 correction2,
      const float* lr_at, const i64* step_at, const float* inv_scale, const float* found_inf,
      i64 grad_type, i64 count, const __grid_constant__ AdamwTable table) {
  __shared__ float corrections[2];
  if (skipped(found_inf)) return;
  if (threadIdx.x < 2) {
    const f64 beta = threadIdx.x ? beta2 : beta1, given = threadIdx.x ? correction2 : correction1;
    corrections[threadIdx.x] = step_at != nullptr ? correction(beta, *step_at) : (float)given;
  }
  __syncthreads();
  const float first = corrections[0], second = corrections[1],
              factor = inv_scale != nullptr ? *inv_scale : 1.0f;
  const int t = tensor_of(table.first, count);
  T* param = table.param[t];
  float *m = table.m[t], *v = table.v[t], *master = table.master[t];
  const void* grad = table.grad[t];
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  const float decay = table.decay[t], rate = lr_at != nullptr ? *lr_at : (float)lr;
  const bool wide_p = rows_aligned<16>(param, 0), wide_m = rows_aligned<16>(m, 0),
             wide_v = rows_aligned<16>(v, 0);
  const bool wide_w = rows_aligned<16>(master, 0);
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const int valid = columns_left(at, size);
    if (valid == 0) return;
    float g[8], mean[8], square[8], w[8];
    grads8(grad, grad_type, at, valid, factor, g);
    floats8(m + at, valid, wide_m, mean);
    floats8(v + at, valid, wide_v, square);
    if (master != nullptr)
      floats8(master + at, valid, wide_w, w);
    else
      floats8(param + at, valid, wide_p, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      mean[j] = (float)beta1 * mean[j] + (float)add1 * g[j];
      square[j] = (float)beta2 * square[j] + (float)add2 * (g[j] * g[j]);
      const float direction = (mean[j] / first) / (sqrtf(square[j] / second) + (float)epsilon);
      w[j] -= rate * (direction + decay * w[j]);
    }
    write8(m + at, valid, wide_m, rounded8<f32>(mean));
    write8(v + at, valid, wide_v, rounded8<f32>(square));
    if (master != nullptr) write8(master + at, valid, wide_w, rounded8<f32>(w));
    write8(param + at, valid, wide_p, rounded8<T>(w));
  }
}

struct SgdTable {
  T* param[STEP_TENSORS];
  const void* grad[STEP_TENSORS];
  float* buffer[STEP_TENSORS];  // null: no momentum
  float* master[STEP_TENSORS];
  i64 size[STEP_TENSORS];
  u32 first[STEP_TENSORS];
  float decay[STEP_TENSORS];
};

// Sutskever et al. 2013; add = 1 - dampening. The first step (of step_at where it is given) starts the
// buffer. Four blocks a multiprocessor: for more, ptxas would spill.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
sgd(f64 lr, f64 momentum, f64 add, i64 nesterov, i64 step, const float* lr_at, const i64* step_at,
    const float* inv_scale, const float* found_inf, i64 grad_type, i64 count,
    const __grid_constant__ SgdTable table) {
  if (skipped(found_inf)) return;
  const int t = tensor_of(table.first, count);
  T* param = table.param[t];
  float *buffer = table.buffer[t], *master = table.master[t];
  const void* grad = table.grad[t];
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  const float rate = lr_at != nullptr ? *lr_at : (float)lr, factor = inv_scale != nullptr ? *inv_scale : 1.0f;
  const bool starts = (step_at != nullptr ? *step_at : step) == 1;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const int valid = columns_left(at, size);
    if (valid == 0) return;
    float g[8], b[8], w[8];
    grads8(grad, grad_type, at, valid, factor, g);
    if (master != nullptr)
      floats8(master + at, valid, rows_aligned<16>(master, 0), w);
    else
      floats8(param + at, valid, rows_aligned<16>(param, 0), w);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] += table.decay[t] * w[j];
    if (buffer != nullptr) {
      floats8(buffer + at, valid, rows_aligned<16>(buffer, 0), b);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        b[j] = starts ? g[j] : (float)momentum * b[j] + (float)add * g[j];
        g[j] = nesterov ? g[j] + (float)momentum * b[j] : b[j];
      }
      write8(buffer + at, valid, rows_aligned<16>(buffer, 0), rounded8<f32>(b));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] -= rate * g[j];
    if (master != nullptr) write8(master + at, valid, rows_aligned<16>(master, 0), rounded8<f32>(w));
    write8(param + at, valid, rows_aligned<16>(param, 0), rounded8<T>(w));
  }
}

// counter += 1, unless the step is skipped. One thread.
extern "C" __global__ void count(i64* counter, const float* found_inf) {
  if (!skipped(found_inf)) *counter += 1;
}

// --- loss scaling ------------------------------------------------------------------------------------------

// Dynamic loss scaling's update (Micikevicius et al. 2018, section 3.2). One thread.
extern "C" __global__ void loss_scale(float* scale, float* inv_scale, i64* good_steps, float* found_inf,
                                      f64 growth, f64 backoff, i64 interval) {
  float value = *scale;
  i64 good = *good_steps + 1;
  if (*found_inf != 0.0f) {
    value *= (float)backoff;
    good = 0;
  } else if (good >= interval) {
    const float grown = value * (float)growth;
    if (isfinite(grown)) value = grown;
    good = 0;
  }
  *scale = value;
  *inv_scale = 1.0f / value;
  *good_steps = good;
  *found_inf = 0.0f;
}

// --- lists of tensors: factors, the global norm, and clipping by it ----------------------------------------

constexpr int LIST_TENSORS = 128;

struct ListTable {
  T* x[LIST_TENSORS];
  i64 size[LIST_TENSORS];
  u32 first[LIST_TENSORS];
};

// x *= factor[0] (null: as it is), and found_inf[0] = 1 where an element was Inf or NaN: every thread that
// says so writes the same.
extern "C" __global__ void __launch_bounds__(THREADS)
scale(const float* factor, float* found_inf, i64 count, const __grid_constant__ ListTable table) {
  const int t = tensor_of(table.first, count);
  T* x = table.x[t];
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  const bool wide = rows_aligned<16>(x, 0);
  const float by = factor != nullptr ? *factor : 1.0f;
  bool bad = false;
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const int valid = columns_left(at, size);
    float v[8];
    floats8(x + at, valid, wide, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      bad |= !isfinite(v[j]);
      v[j] *= by;
    }
    if (factor != nullptr && valid) write8(x + at, valid, wide, rounded8<T>(v));
  }
  if (bad && found_inf != nullptr) *found_inf = 1.0f;
}

// parts[block] = the sum of squares of the block's piece.
extern "C" __global__ void __launch_bounds__(THREADS)
l2norm_parts(float* parts, i64 count, const __grid_constant__ ListTable table) {
  __shared__ float shared[32];
  const int t = tensor_of(table.first, count);
  const T* x = table.x[t];
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  float sum = 0.0f;
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const Eight<T> eight = read8(x + at, columns_left(at, size), rows_aligned<16>(x, 0));
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += value(eight, j) * value(eight, j);
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// out[0] = sqrt(sum of parts), summed in float64: there are few. One block.
extern "C" __global__ void __launch_bounds__(THREADS) l2norm_total(const float* parts, float* out, i64 n) {
  __shared__ f64 sums[THREADS];
  f64 sum = 0.0;
  for (i64 i = threadIdx.x; i < n; i += THREADS) sum += parts[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x) return;
  sum = 0.0;
  for (int i = 0; i < THREADS; ++i) sum += sums[i];
  out[0] = (float)sqrt(sum);
}

// x *= min(1, max_norm / (norm + 1e-6)); a factor of 1 writes nothing, NaN (of the
// norm) makes everything NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
clip(const float* norm, f64 max_norm, i64 count, const __grid_constant__ ListTable table) {
  const float factor = (float)max_norm / (*norm + 1e-6f);
  if (factor >= 1.0f) return;
  const int t = tensor_of(table.first, count);
  T* x = table.x[t];
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  const bool wide = rows_aligned<16>(x, 0);
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const int valid = columns_left(at, size);
    float v[8];
    floats8(x + at, valid, wide, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] *= factor;
    if (valid) write8(x + at, valid, wide, rounded8<T>(v));
  }
}
