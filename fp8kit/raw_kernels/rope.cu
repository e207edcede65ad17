// functions: rope (rope_fwd, rope_bwd)
// variants: T=f32,bf16,f16
//
// Rotary position embedding (Su et al., RoFormer, 2021) and its transpose.

#include "sequences.cuh"

// cos and sin of an angle in radians, however large: reduced in double, where the library's slow
// path would want a stack.
DEVICE void turn(float angle, float& cosine, float& sine) {
  const f64 turns = (f64)angle * 0.15915494309189535;  // 1 / (2 pi)
  sincospif((float)(2.0 * (turns - rint(turns))), &sine, &cosine);
}

// y = the first `rotated` features of x rotated by the angles of the token's position, the others copied;
// `back` turns back. x's rows are (b, s), or (t) with the lengths' running sums and the starts of `batches`
// sequences, where tokens of no sequence become 0; `tokens` is s or t; strides in elements. y may be x: one
// thread reads and writes a pair. The grid is one-dimensional, a block a row: (pairs, heads).
extern "C" __global__ void rope(const T* x, const float* freqs, T* y, const i32* start_positions,
                                const i32* lengths, const i32* starts, i64 tokens, i64 batches, i64 positions,
                                i64 rotated, i64 heads, i64 dim, i64 x_token, i64 x_batch, i64 x_head,
                                i64 y_token, i64 y_batch, i64 y_head, i64 interleaved, i64 back) {
  const i64 rows = starts == nullptr ? batches * tokens : tokens;
  for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
    const i64 token = row % tokens,
              batch = starts == nullptr ? row / tokens : sequence_of(starts, batches, token);
    i64 position = starts == nullptr ? token : token - starts[batch];
    const bool there = starts == nullptr || (position >= 0 && position < length_of(lengths, batch));
    if (start_positions != nullptr) position += start_positions[batch];
    const bool inside = position >= 0 && position < positions;
    const T* from = x + token * x_token + (starts == nullptr ? batch * x_batch : 0);
    T* to = y + token * y_token + (starts == nullptr ? batch * y_batch : 0);

    if (!there) {
      for (i64 f = threadIdx.x; f < dim; f += blockDim.x)
        for (i64 head = threadIdx.y; head < heads; head += blockDim.y)
          to[head * y_head + f] = from_float<T>(0.0f);
      continue;
    }
    for (i64 pair = threadIdx.x; pair < rotated / 2; pair += blockDim.x) {
      const i64 low = interleaved ? 2 * pair : pair, high = interleaved ? low + 1 : low + rotated / 2;
      const float nan = __int_as_float(0x7FC00000);
      float cos0 = nan, sin0 = nan, cos1 = nan, sin1 = nan;
      if (inside) {
        turn(freqs[position * rotated + low], cos0, sin0);
        turn(freqs[position * rotated + high], cos1, sin1);
      }
      const float into_low = back ? sin1 : -sin0, into_high = back ? -sin0 : sin1;
      for (i64 head = threadIdx.y; head < heads; head += blockDim.y) {
        const float a = to_float(from[head * x_head + low]), b = to_float(from[head * x_head + high]);
        to[head * y_head + low] = from_float<T>(a * cos0 + b * into_low);
        to[head * y_head + high] = from_float<T>(b * cos1 + a * into_high);
      }
    }
    for (i64 f = rotated + threadIdx.x; f < dim; f += blockDim.x)
      for (i64 head = threadIdx.y; head < heads; head += blockDim.y)
        to[head * y_head + f] = from[head * x_head + f];
  }
}
