// functions: encoded_adam, encoded_adam_amax (encoded_adam_), encoded_adam_scales (encoded_adam_)
// variants: T=f32,bf16,f16
//
// Adam on states that are kept in fewer bits (fp8kit.moments). A thread has eight neighbours, so that 16
// lanes hold a block of 128 and a warp one of 256. Where a tensor has one factor, encoded_adam_amax makes the
// step and keeps its amaxes, encoded_adam_scales makes factors of them, and encoded_adam makes the step
// again. Every operation is written as one rounding (__fmul_rn and so on), which the compiler does not fuse:
// the CPU engine (backends/reference/encoded_adam.py) has the same operations in the same order.

#include "optim.cuh"

constexpr int TENSORS = 32;

enum Kept { FLOAT, BFLOAT, HALF, E4M3, E5M2 };         // moments.KEPT, in its order
enum Flags { POWER_2 = 1, EXPANSION = 2 };
enum Master { FLOATS, REMAINDERS, HALVES };            // moments.MASTERS
constexpr float HALF_MAX = 65504.0f;

struct Table {
  T* param[TENSORS];
  const void* grad[TENSORS];
  void* state[3][TENSORS];     // m, v, the master (null: the parameter is its own)
  float* scales[3][TENSORS];   // beside them, null: none
  i64 size[TENSORS];
  u32 first[TENSORS];
  float decay[TENSORS];
};

// How a state is kept.
struct Form {
  i32 kept, block, flags;
  __device__ __forceinline__ bool by_tensor() const { return kept >= HALF && !block; }
  __device__ __forceinline__ float top() const {
    return kept == HALF ? HALF_MAX : kept == E4M3 ? e4m3::MAX : e5m2::MAX;
  }
};
DEVICE Form form_of(i64 kept, i64 block, i64 flags) { return {(i32)kept, (i32)block, (i32)flags}; }
DEVICE Form half_master() { return {HALF, 0, POWER_2}; }

// --- log2 and exp2 -----------------------------------------------------------------------------------------

DEVICE float then(float p, float x, float c) { return __fadd_rn(__fmul_rn(p, x), c); }

// log2 of a number above 0.
DEVICE float log2_of(float a) {
  const bool tiny = a < 1.17549435e-38f;
  const i32 bits = __float_as_int(tiny ? __fmul_rn(a, 16777216.0f) : a);
  const i32 exponent = (bits - 0x3F3504F3) >> 23;
  const float m = __int_as_float(bits - (i32)((u32)exponent << 23));
  const float s = __fdiv_rn(__fadd_rn(m, -1.0f), __fadd_rn(m, 1.0f)), z = __fmul_rn(s, s);
  float p = then((float)(2.8853900817779268 / 9), z, (float)(2.8853900817779268 / 7));
  p = then(p, z, (float)(2.8853900817779268 / 5));
  p = then(p, z, (float)(2.8853900817779268 / 3));
  p = then(p, z, (float)2.8853900817779268);
  const float whole = (float)exponent;
  return then(s, p, tiny ? __fadd_rn(whole, -24.0f) : whole);
}

// 2^t of a number up to 0; 2^-126 from -126 down.
DEVICE float exp2_of(float t) {
  t = fmaxf(t, -126.0f);
  const float n = __fadd_rn(__fadd_rn(t, 12582912.0f), -12582912.0f), f = __fadd_rn(t, -n);
  float p = then(1.5252733804059838e-05f, f, 1.5403530393381606e-04f);
  p = then(p, f, 1.3333558146428441e-03f);
  p = then(p, f, 9.618129107628477e-03f);
  p = then(p, f, 5.550410866482158e-02f);
  p = then(p, f, 2.402265069591007e-01f);
  p = then(p, f, 6.931471805599453e-01f);
  p = then(p, f, 1.0f);
  return __fmul_rn(p, __int_as_float((__float2int_rn(n) + 127) << 23));
}

// --- factors -----------------------------------------------------------------------------------------------

// What codes are multiplied by; 0 for an amax of 0.
DEVICE float factor_of(const Form& form, float amax) {
  if (!(amax > 0.0f)) return 0.0f;
  if (!(form.flags & POWER_2)) return __fdiv_rn(amax, form.top());
  const float scale = __int_as_float(__float_as_int(__fdiv_rn(form.top(), amax)) & 0x7F800000);
  return __fdiv_rn(1.0f, fminf(scale, 1.7014118346046923e38f));
}

// The exponent of a block's range.
DEVICE float exponent_of(float most, float least) {
  if (!(most > 0.0f && most < INF)) return 0.0f;
  const float span = __fadd_rn(log2_of(most), -log2_of(least));
  const float k = span > 0.0f ? __fmul_rn(floorf(__fdiv_rn(265.8353576660156f, span)), 0.0625f) : 16.0f;
  return fminf(fmaxf(k, 0.0625f), 16.0f);
}

// --- eight elements ----------------------------------------------------------------------------------------

DEVICE void read_codes8(const u8* from, int valid, u32 (&codes)[2]) {
  codes[0] = codes[1] = 0;
  if (valid == 8 && reinterpret_cast<u64>(from) % 8 == 0) {
    load_codes<8>(from, codes);
  } else {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const u32 code = i < valid ? from[i] : 0u;
      codes[0] = __funnelshift_r(codes[0], codes[1], 8);
      codes[1] = codes[1] >> 8 | code << 24;
    }
  }
}

template <typename F> DEVICE void decode8(const u32 (&codes)[2], float (&x)[8]) {
  float low[4], high[4];
  decode4<F>(codes[0], low);
  decode4<F>(codes[1], high);
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = low[j], x[4 + j] = high[j];
}

// The values of a state from element `at` on. `factor`: of the tensor; blocks have theirs in `scales`.
DEVICE void decode_state(const Form& form, const void* state, const float* scales, float factor, i64 at,
                         int valid, float (&x)[8]) {
  if (form.kept == FLOAT) {
    const f32* from = static_cast<const f32*>(state) + at;
    floats8(from, valid, rows_aligned<16>(from, 0), x);
    return;
  }
  if (form.kept == BFLOAT) {
    const bf16* from = static_cast<const bf16*>(state) + at;
    floats8(from, valid, rows_aligned<16>(from, 0), x);
    return;
  }
  if (form.kept == HALF) {
    const f16* from = static_cast<const f16*>(state) + at;
    floats8(from, valid, rows_aligned<16>(from, 0), x);
  } else {
    u32 codes[2];
    read_codes8(static_cast<const u8*>(state) + at, valid, codes);
    if (form.kept == E4M3)
      decode8<e4m3>(codes, x);
    else
      decode8<e5m2>(codes, x);
  }
  if (form.flags & EXPANSION) {
    const float* own = scales + at / form.block * 2;
    const float most = valid ? own[0] : 0.0f, k = valid ? own[1] : 1.0f, top = log2_of(e4m3::MAX);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = fabsf(x[j]);
      if (a > 0.0f)
        x[j] = copysignf(__fmul_rn(exp2_of(__fdiv_rn(__fadd_rn(log2_of(a), -top), k)), most), x[j]);
    }
    return;
  }
  if (form.block) factor = valid ? scales[at / form.block] : 0.0f;
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], factor);
}

// (amax, the smallest magnitude that is neither 0 nor Inf) of the lane's block, NaN ignored. All lanes call.
DEVICE float2 range_of_block(const float (&x)[8], i32 block) {
  float most = 0.0f, least = INF;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float a = fabsf(x[j]);
    most = fmaxf(most, a);
    if (a > 0.0f) least = fminf(least, a);
  }
#pragma unroll 1
  for (int step = block / 16; step; step >>= 1) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    least = fminf(least, __shfl_xor_sync(~0u, least, step));
  }
  return make_float2(most, least);
}

// The values as codes from element `at` on, with the block's new numbers. `factor`: the tensor's new one. All
// lanes of a warp call.
DEVICE void encode_state(const Form& form, void* state, float* scales, float factor, i64 at, int valid,
                         float (&x)[8]) {
  if (form.kept == FLOAT || form.kept == BFLOAT) {
    if (!valid) return;
    f32* wide = static_cast<f32*>(state) + at;
    bf16* narrow = static_cast<bf16*>(state) + at;
    if (form.kept == FLOAT)
      write8(wide, valid, rows_aligned<16>(wide, 0), rounded8<f32>(x));
    else
      write8(narrow, valid, rows_aligned<16>(narrow, 0), rounded8<bf16>(x));
    return;
  }
  if (form.block) {
    const float2 range = range_of_block(x, form.block);
    const bool writes = valid && at % form.block == 0;
    float* own = scales + at / form.block * (form.flags & EXPANSION ? 2 : 1);
    if (form.flags & EXPANSION) {
      const float most = range.x, k = exponent_of(most, range.y);
      if (writes) own[0] = most, own[1] = k;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float a = fabsf(x[j]);
        if (!(most < INF))
          x[j] = __int_as_float(0x7FC00000);
        else if (a > 0.0f)
          x[j] = copysignf(
              __fmul_rn(e4m3::MAX,
                        exp2_of(__fmul_rn(k, log2_of(fmaxf(__fdiv_rn(a, most), 1.17549435e-38f))))),
              x[j]);
      }
    } else {
      factor = factor_of(form, range.x);
      if (writes) own[0] = factor;
    }
  }
  if (!(form.flags & EXPANSION)) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      x[j] = factor > 0.0f ? __fdiv_rn(x[j], factor) : __fmul_rn(x[j], 0.0f);
  }
  if (!valid) return;
  if (form.kept == HALF) {
    f16* to = static_cast<f16*>(state) + at;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      x[j] = x[j] > HALF_MAX ? HALF_MAX : x[j] < -HALF_MAX ? -HALF_MAX : x[j];  // NaN stays
    write8(to, valid, rows_aligned<16>(to, 0), rounded8<f16>(x));
    return;
  }
  u32 codes[2];
  if (form.kept == E4M3)
    encode_words<e4m3, 8>(x, codes);
  else
    encode_words<e5m2, 8>(x, codes);
  u8* to = static_cast<u8*>(state) + at;
  write_codes<8>(to, valid, reinterpret_cast<u64>(to) % 8 == 0, codes);
}

// --- masters -----------------------------------------------------------------------------------------------

template <int N> DEVICE u32 half_word(const u32 (&words)[N], int j) {
  return words[j / 2] >> (j % 2 * 16) & 0xFFFFu;
}

DEVICE void read_weights(i32 kind, const T* param, const void* master, float factor, i64 at, int valid,
                         float (&w)[8]) {
  const T* own = param + at;
  if (master == nullptr || (kind == HALVES && !(factor > 0.0f))) {
    floats8(own, valid, rows_aligned<16>(own, 0), w);
  } else if (kind == FLOATS) {
    const f32* from = static_cast<const f32*>(master) + at;
    floats8(from, valid, rows_aligned<16>(from, 0), w);
  } else if (kind == HALVES) {
    decode_state(half_master(), master, nullptr, factor, at, valid, w);
  } else if constexpr (sizeof(T) == 2) {
    const f16* from = static_cast<const f16*>(master) + at;
    const Eight<T> upper = read8(own, valid, rows_aligned<16>(own, 0));
    const Eight<f16> rest = read8(from, valid, rows_aligned<16>(from, 0));
#pragma unroll
    for (int j = 0; j < 8; ++j)
      w[j] = __uint_as_float((half_word(upper.words, j) << 16) +
                             (u32)(i32)(short)half_word(rest.words, j));
  }
}

DEVICE void write_weights(i32 kind, T* param, void* master, float factor, i64 at, int valid, float (&w)[8]) {
  T* own = param + at;
  if (!valid) return;
  if (master != nullptr && kind == REMAINDERS) {
    if constexpr (sizeof(T) == 2) {
      f16* to = static_cast<f16*>(master) + at;
      Eight<T> above{};
      Eight<f16> rest{};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const u32 bits = w[j] == w[j] ? __float_as_uint(w[j]) : 0x7FC00000u;
        const u32 upper = (bits + 0x8000u) >> 16;
        above.words[j / 2] |= upper << (j % 2 * 16);
        rest.words[j / 2] |= (bits & 0xFFFFu) << (j % 2 * 16);
      }
      write8(own, valid, rows_aligned<16>(own, 0), above);
      write8(to, valid, rows_aligned<16>(to, 0), rest);
    }
    return;
  }
  write8(own, valid, rows_aligned<16>(own, 0), rounded8<T>(w));
  if (master == nullptr) return;
  if (kind == FLOATS) {
    f32* to = static_cast<f32*>(master) + at;
    write8(to, valid, rows_aligned<16>(to, 0), rounded8<f32>(w));
  } else {
    encode_state(half_master(), master, nullptr, factor, at, valid, w);
  }
}

// --- the step ----------------------------------------------------------------------------------------------

// What the arguments of a launch say, read once by each block.
struct Numbers {
  float lr, keep1, add1, keep2, add2, epsilon, first, second, factor;
  bool decoupled;
};

DEVICE Numbers numbers(f64 lr, f64 beta1, f64 add1, f64 beta2, f64 add2, f64 epsilon, f64 correction1,
                       f64 correction2, i64 decoupled, const float* lr_at, const i64* step_at,
                       const float* inv_scale) {
  __shared__ float corrections[2];
  if (threadIdx.x < 2) {
    const f64 beta = threadIdx.x ? beta2 : beta1, given = threadIdx.x ? correction2 : correction1;
    corrections[threadIdx.x] = step_at != nullptr ? correction(beta, *step_at) : (float)given;
  }
  __syncthreads();
  return {lr_at != nullptr ? *lr_at : (float)lr, (float)beta1, (float)add1, (float)beta2, (float)add2,
          (float)epsilon, corrections[0], corrections[1], inv_scale != nullptr ? *inv_scale : 1.0f,
          decoupled != 0};
}

DEVICE void adam8(const Numbers& by, float decay, float (&g)[8], float (&m)[8], float (&v)[8],
                  float (&w)[8]) {
  const float loose = by.decoupled ? decay : 0.0f, tied = by.decoupled ? 0.0f : decay;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (tied != 0.0f) g[j] = __fadd_rn(g[j], __fmul_rn(tied, w[j]));
    m[j] = __fadd_rn(__fmul_rn(by.keep1, m[j]), __fmul_rn(by.add1, g[j]));
    v[j] = __fadd_rn(__fmul_rn(by.keep2, v[j]), __fmul_rn(by.add2, __fmul_rn(g[j], g[j])));
    const float over = __fadd_rn(__fsqrt_rn(__fdiv_rn(v[j], by.second)), by.epsilon);
    const float direction = __fdiv_rn(__fdiv_rn(m[j], by.first), over);
    w[j] = __fsub_rn(w[j], __fmul_rn(by.lr, __fadd_rn(direction, __fmul_rn(loose, w[j]))));
  }
}

// Eight elements after the step, in float32. `old`: the tensor's factors before it.
DEVICE void step8(const Numbers& by, const Table& table, int t, const Form (&forms)[2], i32 kind,
                  i64 grad_type, const float (&old)[3], i64 at, int valid, float (&m)[8], float (&v)[8],
                  float (&w)[8]) {
  float g[8];
  read_weights(kind, table.param[t], table.state[2][t], old[2], at, valid, w);
  grads8(table.grad[t], grad_type, at, valid, by.factor, g);
  decode_state(forms[0], table.state[0][t], table.scales[0][t], old[0], at, valid, m);
  decode_state(forms[1], table.state[1][t], table.scales[1][t], old[1], at, valid, v);
  adam8(by, table.decay[t], g, m, v, w);
}

// parts[block] = amax of m, of v and of the weights after the step, NaN ignored.
extern "C" __global__ void __launch_bounds__(THREADS)
encoded_adam_amax(f64 lr, f64 beta1, f64 add1, f64 beta2, f64 add2, f64 epsilon, f64 correction1,
                  f64 correction2, i64 decoupled, const float* lr_at, const i64* step_at,
                  const float* inv_scale, const float* found_inf, i64 kept1, i64 block1, i64 flags1,
                  i64 kept2, i64 block2, i64 flags2, i64 master, float* parts, i64 grad_type, i64 count,
                  const __grid_constant__ Table table) {
  __shared__ float shared[32];
  if (skipped(found_inf)) return;
  const Numbers by = numbers(lr, beta1, add1, beta2, add2, epsilon, correction1, correction2, decoupled,
                             lr_at, step_at, inv_scale);
  const Form forms[2] = {form_of(kept1, block1, flags1), form_of(kept2, block2, flags2)};
  const int t = tensor_of(table.first, count);
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  float old[3], most[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int k = 0; k < 3; ++k) old[k] = table.scales[k][t] != nullptr ? *table.scales[k][t] : 0.0f;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const int valid = columns_left(at, size);
    if (valid == 0) break;
    float m[8], v[8], w[8];
    step8(by, table, t, forms, (i32)master, grad_type, old, at, valid, m, v, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= valid) continue;
      most[0] = amax_of(most[0], m[j]);
      most[1] = amax_of(most[1], v[j]);
      most[2] = amax_of(most[2], w[j]);
    }
  }
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const float amax = block_max(most[k], shared);
    if (threadIdx.x == 0) parts[3 * (i64)blockIdx.x + k] = amax;
  }
}

// Of each tensor, a block: old = the factors that all its elements share, and new ones of the parts' amaxes.
extern "C" __global__ void __launch_bounds__(THREADS)
encoded_adam_scales(const float* found_inf, i64 kept1, i64 block1, i64 flags1, i64 kept2, i64 block2,
                    i64 flags2, float* old, const float* parts, i64 blocks, i64 count,
                    const __grid_constant__ Table table) {
  __shared__ float shared[32];
  if (skipped(found_inf)) return;
  const Form forms[3] = {form_of(kept1, block1, flags1), form_of(kept2, block2, flags2), half_master()};
  const int t = (int)blockIdx.x;
  const i64 end = t + 1 < count ? (i64)table.first[t + 1] : blocks;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    float* factor = table.scales[k][t];
    if (factor == nullptr || !forms[k].by_tensor()) continue;
    float most = 0.0f;
    for (i64 i = table.first[t] + threadIdx.x; i < end; i += THREADS) most = fmaxf(most, parts[3 * i + k]);
    most = block_max(most, shared);
    if (threadIdx.x == 0) {
      old[3 * t + k] = *factor;
      *factor = factor_of(forms[k], most);
    }
  }
}

// The step, and the states encoded. `old`: see above, null where nothing has one factor for the tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
encoded_adam(f64 lr, f64 beta1, f64 add1, f64 beta2, f64 add2, f64 epsilon, f64 correction1, f64 correction2,
             i64 decoupled, const float* lr_at, const i64* step_at, const float* inv_scale,
             const float* found_inf, i64 kept1, i64 block1, i64 flags1, i64 kept2, i64 block2, i64 flags2,
             i64 master, const float* old, i64 grad_type, i64 count, const __grid_constant__ Table table) {
  if (skipped(found_inf)) return;
  const Numbers by = numbers(lr, beta1, add1, beta2, add2, epsilon, correction1, correction2, decoupled,
                             lr_at, step_at, inv_scale);
  const Form forms[2] = {form_of(kept1, block1, flags1), form_of(kept2, block2, flags2)};
  const int t = tensor_of(table.first, count);
  const i64 size = table.size[t], start = (i64)(blockIdx.x - table.first[t]) * PIECE;
  float before[3], after[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const bool shares =
        old != nullptr && table.scales[k][t] != nullptr && (k == 2 || forms[k % 2].by_tensor());
    before[k] = shares ? old[3 * t + k] : 0.0f;
    after[k] = shares ? *table.scales[k][t] : 0.0f;
  }
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    if (start + round * THREADS * 8 >= size) return;  // the whole block: lanes share blocks
    const i64 at = start + (round * THREADS + threadIdx.x) * 8;
    const int valid = columns_left(at, size);
    float m[8], v[8], w[8];
    step8(by, table, t, forms, (i32)master, grad_type, before, at, valid, m, v, w);
    // what lies beyond the end is no value of its block
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j >= valid) m[j] = v[j] = 0.0f;
    encode_state(forms[0], table.state[0][t], table.scales[0][t], after[0], at, valid, m);
    encode_state(forms[1], table.state[1][t], table.scales[1][t], after[1], at, valid, v);
    write_weights((i32)master, table.param[t], table.state[2][t], after[2], at, valid, w);
  }
}
