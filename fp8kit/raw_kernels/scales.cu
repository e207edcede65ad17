// Scaling factors: current scaling's rule and delayed scaling's update.
//
// functions: scale_from_amax (scale_from_amax, quantized_attention_bwd, fp8_attention_fwd, fp8_attention_bwd)
// functions: update_delayed
// variants: STATES=8,96
#include "scale.cuh"

// delayed scaling's least scale, 2**-126, the least number with all its bits; FLT_MAX is the
// greatest (DELAYED_SCALES)
constexpr float SMALLEST = 1.175494351e-38f;
// a row of a window that is still to come (recipe.UNFILLED), the same number
constexpr float UNFILLED = SMALLEST;

extern "C" __global__ void __launch_bounds__(256)
scale_from_amax(const float* amax, float* scale, float* scale_inv, i64 n, f64 fp8_max, f64 epsilon,
                f64 value_for_inf, i64 power_2) {
  start_early();
  for (i64 i = first(); i < n; i += step()) {
    const float s = scale_of(amax[i], (float)fp8_max, (float)epsilon, (float)value_for_inf, power_2);
    scale[i] = s;
    scale_inv[i] = __fdiv_rn(1.0f, s);
  }
}

// One module's scaling state: float [n], [n] and [length, n]; `maximum` is fp8_max * 2**-margin.
struct State {
  float* scale;
  float* scale_inv;
  float* history;
  i32 n, length;
  float maximum;
  i32 unused;
};

constexpr int ROWS = 8;  // of a history that a thread has under way

// STATES: as many as a launch of update_delayed takes at most; they travel with it, 40 bytes each
struct States { State at[STATES]; };

// Block (i, j) updates tensor j of state i. Row 0 of the history holds the amax since the last update.
// growth: of an amax in a step, where scales are made of a bound of it, else negative. by_window: scales
// change in the first window, and later where a window is full.
extern "C" __global__ void __launch_bounds__(128)
update_delayed(i64 most_recent, i64 power_2, f64 growth, i64 by_window,
               const __grid_constant__ States states) {
  start_early();
  __shared__ float shared[32];
  const State state = states.at[blockIdx.x];
  const i64 n = state.n, length = state.length, tensor = blockIdx.y;
  if (tensor >= n) return;
  float* history = state.history + tensor;
  const float newest = history[0];
  if (newest == 0.0f) return;
  const float oldest = length == 1 ? newest : history[n];
  const bool full = by_window && oldest > UNFILLED;

  // the maximum of all rows, and their roll by -1 in place: a row is read before the barrier that stands
  // ahead of its overwriting
  const bool bounds = growth >= 0.0;
  const float grown = (float)growth;
  float amax = 0.0f;
  for (i64 base = threadIdx.x; base - threadIdx.x < length; base += ROWS * blockDim.x) {
    float next[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const i64 row = base + k * blockDim.x + 1;
      next[k] = row < length ? history[row * n] : newest;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      const i64 row = base + k * blockDim.x;
      if (!bounds) amax = fmaxf(amax, next[k]);
      // row 0's amax is there too, as the last one
      else if (row < length - 1 && next[k] > 0.0f)
        amax = fmaxf(amax, __fadd_rn(next[k], __fmul_rn(grown, (float)(length - row))));
      if (row < length) history[row * n] = row == 0 ? 0.0f : full ? UNFILLED : next[k];
    }
  }
  amax = block_max(amax, shared);
  if (most_recent && !bounds) amax = newest;
  if (threadIdx.x == 0) {
    if (bounds) {
      const bool known = amax > 0.0f;
      if (length > 1 && (known || !(newest < INF))) history[(length - 1) * n] = 0.0f;
      if (!known) amax = __fadd_rn(newest, grown);
    }
    float s = state.scale[tensor];
    if (amax > 0.0f && amax < INF && (!by_window || full || oldest == 0.0f)) {
      s = fminf(fmaxf(__fdiv_rn(state.maximum, amax), SMALLEST), FLT_MAX);
      if (power_2) s = __uint_as_float(__float_as_uint(s) & 0xFF800000u);
    }
    state.scale[tensor] = s;
    state.scale_inv[tensor] = __fdiv_rn(1.0f, s);
  }
}
