// functions: norm_bwd
// variants: T=f32,bf16,f16
//
// Gradients of a normalisation (norm.cuh). With xhat = (x - mean) * rstd and d = dy * g:
// dx = rstd * (d - mean(d) - xhat * mean(d * xhat)) + residual over each row, without mean(d) for RMSNorm;
// dweight = sum of dy * xhat and dbias = sum of dy over the rows.
//
// A thread keeps one chunk of columns, and their sums over all rows it meets. Rows on their way lie in shared
// memory, `stages` deep, where a thread reads only what it copied itself. Rows are whole chunks that start at
// multiples of 16 bytes; norm_any.cu takes the others.

#include "norm.cuh"

constexpr int THREADS = 1024, MOST_STAGES = 4;

// The blocks walk the rows from the last one on, blockDim.y at a time; N <= 8 blockDim.x. partial: float32
// (blocks, 1 or 2, N), each block's sums. dx may be dy or residual: a thread has its elements of a row
// before it writes them. Dynamic shared memory: `stages` (2 to 4) times three chunks a thread, and at
// least 64 bytes a thread.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
norm_bwd(const T* dy, const T* x, const T* weight, const float* mean, const float* rstd,
         const T* residual, T* dx, float* partial, i64 M, i64 N, i64 stages, f64 gain, i64 with_bias) {
  start_early();
  extern __shared__ uint4 dynamic[];
  __shared__ float shared[MOST_STAGES][32][2];
  const u32 threads = block_threads(), rank = thread_rank(), column = threadIdx.x * 8;
  const bool inside = column < N;
  const float share = 1.0f / (float)N;
  const u32 rows = (u32)M, step = gridDim.x * blockDim.y;
  T* own = reinterpret_cast<T*>(dynamic) + rank * 8;  // one chunk a thread and input, three inputs a stage
  const u32 input_pitch = threads * 8, stage_pitch = 3 * input_pitch;

  const auto fetch = [&](u32 row, u32 stage) {
    if (inside && row < rows) {
      T* to = own + stage * stage_pitch;
      const i64 at = (i64)(rows - 1 - row) * N + column;
      copy8_async(to, dy + at);
      copy8_async(to + input_pitch, x + at);
      if (residual != nullptr) copy8_async(to + 2 * input_pitch, residual + at);
    }
    end_of_copies();
  };

  const u32 last = (u32)stages - 1, lead = last * step;
  u32 row = blockIdx.x * blockDim.y + threadIdx.y;
  for (u32 stage = 0; stage < last; ++stage) fetch(row + stage * step, stage);
  Stats next = row < rows ? stats_of(mean, rstd, rows - 1 - row) : Stats{0.0f, 0.0f};
  float factor[8], dw[8] = {}, db[8] = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) factor[j] = inside ? gain_at(weight, (float)gain, column + j) : 0.0f;

  for (u32 stage = 0; row - threadIdx.y < rows; row += step, stage = stage == last ? 0 : stage + 1) {
    fetch(row + lead, stage ? stage - 1 : last);
    const Stats s = next;
    if (row + step < rows) next = stats_of(mean, rstd, rows - 1 - (row + step));
    wait_for_copies(last);
    const bool there = inside && row < rows;
    const T* kept = own + stage * stage_pitch;
    Eight<T> up = read8(kept, there ? 8 : 0, true), in = read8(kept + input_pitch, there ? 8 : 0, true);
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float g = value(up, j), d = g * factor[j], xhat = (value(in, j) - s.mean) * s.rstd;
      dw[j] += g * xhat;
      db[j] += g;
      sums[0] += d * xhat;
      sums[1] += d;
    }
    row_totals(sums, shared[stage]);
    const float along = sums[0] * share, level = mean == nullptr ? 0.0f : sums[1] * share;
    // read again: the registers are wanted elsewhere while the row's threads wait for each other
    asm volatile("" ::: "memory");
    up = read8(kept, there ? 8 : 0, true), in = read8(kept + input_pitch, there ? 8 : 0, true);
    const Eight<T> stream = read8(kept + 2 * input_pitch, there && residual != nullptr ? 8 : 0, true);
    float out[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float d = value(up, j) * factor[j], xhat = (value(in, j) - s.mean) * s.rstd;
      out[j] = s.rstd * (d - level - xhat * along) + value(stream, j);
    }
    if (there) write8(dx + (i64)(rows - 1 - row) * N + column, 8, true, rounded8<T>(out));
  }

  // the sums of the block's rows of threads, one after the other
  const u32 width = 8 * blockDim.x;
  float* all = reinterpret_cast<float*>(dynamic);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    all[threadIdx.y * 2 * width + column + j] = dw[j];
    all[(threadIdx.y * 2 + 1) * width + column + j] = db[j];
  }
  __syncthreads();
  for (u32 kind = 0; kind <= (u32)with_bias; ++kind) {
    for (u32 c = rank; c < N; c += threads) {
      float sum = 0.0f;
      for (u32 y = 0; y < blockDim.y; ++y) sum += all[(y * 2 + kind) * width + c];
      partial[((i64)blockIdx.x * (1 + with_bias) + kind) * N + c] = sum;
    }
  }
}
