// Activations, as element functions: fp8kit.backends.activation has their formulas. The passes that make them
// (activation.cu) and the products that make them on the way (hopper_epilogue.cuh) take them from here, so
// that both give the same bits. T is the element type of what is stored.
#pragma once
#include "common.cuh"

// 2**x within 2 ulp, 1 / x within 1 ulp. Flushing the subnormal results is harmless: here they are added to
// 1, or multiply a number of moderate size.
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// NaN passes through, unlike fmaxf and fminf.
DEVICE float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
DEVICE float clamp_nan(float x, float low, float high) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(max_nan(x, low)), "f"(high));
  return y;
}

// An activation has `value(u)`, `gradient(u, dy)` = dy * slope, and, where it is gated, what the second half
// v of the columns becomes: `factor(v)`, and whether its gradient passes there.
struct Params { float limit, alpha, offset; };
#define VALUE static __device__ __forceinline__ float value(float x, const Params& p)
#define GRADIENT static __device__ __forceinline__ float gradient(float x, float dy, const Params& p)

struct plain {
  static constexpr bool gated = false, rises = false;
  static __device__ __forceinline__ float factor(float v, const Params& p) { return v; }
  static __device__ __forceinline__ bool passes(float v, const Params& p) { return true; }
};

// The smooth activations are x * sigmoid(w(x)), with e = exp(-w): value = x / (1 + e), |error| <= 2**-21 |x|;
// -Inf gives -0 since x is held finite there. Their slope is s + s x w'(x) (1 - s), s = 1 / (1 + e) and
// 1 - s = e s, which cancels nothing, |error| <= 2**-20; for 16 bits the difference does, with an error of
// 2**-22 |x w'(x)|, and costs less. x is clamped first to where exp(-w) is finite and the slope is within
// 2**-110 of its limit 0 or 1, so Inf does not meet 0.
// They rise where x > 0, as value / x does; value(1) > 0.7, and where x < 0 the value is within 0.3 of
// 0. So values of x up to H (1 - 2**-16), H > 1, are below that of H, by more than both errors and
// before they are rounded.
constexpr float LOG2_E = 1.4426950408889634f, LEAST = -3.0e38f, MOST_W = 80.0f;

// x held between -far and far; NaN passes through.
DEVICE float within(float x, float far) {
#if __CUDA_ARCH__ >= 860
  float y;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(far));
  return y;
#else
  return x != x ? x : fminf(fmaxf(x, -far), far);
#endif
}

template <typename W> struct smooth : plain {  // w = x (LINEAR + CUBIC x**2), x clamped to FAR
  static constexpr bool rises = true;
  static __device__ __forceinline__ float exp_minus(float x) {
    if (W::CUBIC == 0.0f) return exp2_fast(-LOG2_E * W::LINEAR * x);
    return exp2_fast(x * fmaf(x * x, -LOG2_E * W::CUBIC, -LOG2_E * W::LINEAR));
  }
  VALUE { return fmaxf(x, LEAST) * reciprocal_fast(1.0f + exp_minus(x)); }
  GRADIENT {
    const float c = within(x, W::FAR), e = exp_minus(c), s = reciprocal_fast(1.0f + e);
    const float rise = c * (W::CUBIC == 0.0f ? W::LINEAR : fmaf(c * c, 3.0f * W::CUBIC, W::LINEAR));
    const float bend = sizeof(T) == 4 ? rise * (e * s) : fmaf(-rise, s, rise);
    return dy * fmaf(s, bend, s);
  }
};

struct silu_w { static constexpr float LINEAR = 1.0f, CUBIC = 0.0f, FAR = 80.0f; };
struct qgelu_w { static constexpr float LINEAR = 1.702f, CUBIC = 0.0f, FAR = 47.0f; };
// the tanh form: 0.5 (1 + tanh(u)) is sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x**3)
struct gelu_w {
  static constexpr float LINEAR = 1.5957691216057308f, CUBIC = LINEAR * 0.044715f, FAR = 10.0f;
};

struct sigmoid : plain {
  VALUE { return reciprocal_fast(1.0f + exp2_fast(-LOG2_E * x)); }
  GRADIENT {
    const float e = exp2_fast(-LOG2_E * within(x, MOST_W)), s = reciprocal_fast(1.0f + e);
    return dy * (s * (e * s));
  }
};

struct clamped : plain {  // c sigmoid(alpha c), c = min(x, limit)
  static __device__ __forceinline__ float below(float x, float limit) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
    return y;
  }
  VALUE {
    const float c = max_nan(below(x, p.limit), LEAST);
    return c * reciprocal_fast(1.0f + exp2_fast(-LOG2_E * p.alpha * c));
  }
  GRADIENT {
    const float w = within(p.alpha * max_nan(below(x, p.limit), LEAST), MOST_W);
    const float e = exp2_fast(-LOG2_E * w), s = reciprocal_fast(1.0f + e);
    return x > p.limit ? 0.0f : dy * (s + w * (s * (e * s)));
  }
  static __device__ __forceinline__ float factor(float v, const Params& p) {
    return clamp_nan(v, -p.limit, p.limit) + p.offset;
  }
  static __device__ __forceinline__ bool passes(float v, const Params& p) { return !(fabsf(v) > p.limit); }
};

struct identity : plain {
  VALUE { return x; }
  GRADIENT { return dy; }
};

struct relu : plain {
  VALUE { return max_nan(x, 0.0f); }
  GRADIENT { return x > 0.0f ? dy : 0.0f; }
};

struct srelu : plain {
  VALUE { return max_nan(x, 0.0f) * max_nan(x, 0.0f); }
  GRADIENT { return x > 0.0f ? dy * (2.0f * x) : 0.0f; }
};

// `beside`: the value, where the gradient is computed too.
template <typename A> struct gate : A {
  static constexpr bool gated = true;
  static __device__ __forceinline__ float beside(float x, const Params& p) { return A::value(x, p); }
};
// With the gradient's e, so that it is computed once. Where x < -FAR both are 0 within 2**-108, for -Inf too.
template <typename W> struct gate<smooth<W>> : smooth<W> {
  static constexpr bool gated = true;
  static __device__ __forceinline__ float beside(float x, const Params& p) {
    return fmaxf(x, -W::FAR) * reciprocal_fast(1.0f + smooth<W>::exp_minus(within(x, W::FAR)));
  }
};

typedef smooth<silu_w> silu;
typedef smooth<qgelu_w> qgelu;
typedef smooth<gelu_w> gelu;
typedef gate<sigmoid> glu;
typedef gate<gelu> geglu;
typedef gate<qgelu> qgeglu;
typedef gate<relu> reglu;
typedef gate<srelu> sreglu;
typedef gate<silu> swiglu;
typedef gate<clamped> clamped_swiglu;

// y of an input a, and of its other half where A is gated.
template <typename A> DEVICE float activated(float a, float second, const Params& p) {
  const float y = A::value(a, p);
  return A::gated ? y * A::factor(second, p) : y;
}

// The gradients of both, from y's.
template <typename A> DEVICE float2 gradients(float g, float a, float second, const Params& p) {
  if constexpr (A::gated)
    return {A::gradient(a, g * A::factor(second, p), p), A::passes(second, p) ? g * A::beside(a, p) : 0.0f};
  else
    return {A::gradient(a, g, p), 0.0f};
}
