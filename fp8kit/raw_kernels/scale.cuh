// Current scaling's rule: from the largest absolute value to the factor before the cast.
#pragma once
#include "common.cuh"

constexpr float FLT_MAX = 3.402823466e+38f;

// Transformer Engine's compute_scale_from_amax: 1 where the amax is 0, Inf or NaN; a power of two where
// asked for, rounded down.
DEVICE float scale_of(float amax, float fp8_max, float epsilon, float value_for_inf, bool power_2) {
  if (amax < epsilon) amax = epsilon;  // a NaN stays
  if (!(amax > 0.0f && amax < INF)) return 1.0f;
  float scale = __fdiv_rn(fp8_max, amax);
  if (scale == INF) scale = value_for_inf;
  return power_2 ? __uint_as_float(__float_as_uint(scale) & 0xFF800000u) : scale;
}

// The scale of a cast: the one that is given, or, where the tensor's amax is known instead,
// what the rule makes of it.
DEVICE float scale_of_cast(const float* scale, const float* known_amax, float fp8_max, f64 epsilon,
                           i64 power_2) {
  return known_amax == nullptr ? *scale : scale_of(*known_amax, fp8_max, (float)epsilon, FLT_MAX, power_2);
}
