// functions: convert (copy)
// variants: T=f32,bf16,f16,f64
//
// Copies between strided arrays, from T to another type: float64 goes through float32, each step
// rounded to nearest even.

#include "layout.cuh"
#include "rows.cuh"

template <typename Y, typename X> DEVICE void convert_to(const X* x, void* y, const Offsets& at, i64 unit) {
  Y* to = static_cast<Y*>(y) + at.to;
  if constexpr (sizeof(X) < 8) {
    if (unit == 8) {
      float v[8];
      floats8<X>(x + at.from, 8, true, v);
      write8(to, 8, true, rounded8<Y>(v));
      return;
    }
  }
  *to = from_float<Y>(to_float(x[at.from]));
}

// y's type: 0 float32, 1 bfloat16, 2 float16. unit: 8 where both sides are aligned to 16 bytes and rows are
// multiples of 8 (and T is no float64), else 1.
extern "C" __global__ void __launch_bounds__(256)
convert(const T* x, void* y, i64 units, i64 type, const __grid_constant__ Layout layout) {
  for (i64 i = first(); i < units; i += step()) {
    const Offsets at = offsets_of(layout, (u64)i);
    if (type == 0)
      convert_to<f32>(x, y, at, layout.unit);
    else if (type == 1)
      convert_to<bf16>(x, y, at, layout.unit);
    else
      convert_to<f16>(x, y, at, layout.unit);
  }
}
