// What every kernel starts from: integer names, element types, vector access, reductions, amax. No CUDA
// header is included, so that a kernel compiles in well under 0.1 s. Arithmetic is IEEE: nothing here flushes
// subnormals or approximates a division.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

typedef float f32;
typedef double f64;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#define DEVICE static __device__ __forceinline__

#define INF __int_as_float(0x7F800000)

// --- element types -----------------------------------------------------------------------------------------

DEVICE float to_float(f32 x) { return x; }
DEVICE float to_float(f64 x) { return __double2float_rn(x); }
DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DEVICE float to_float(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }

// One rounding, to nearest even; overflow becomes Inf.
template <typename X> __device__ X from_float(float x);
template <> __device__ __forceinline__ f32 from_float<f32>(float x) { return x; }
template <> __device__ __forceinline__ f64 from_float<f64>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// The value that x has once it is stored as an X.
// The largest finite value of a type.
template <typename X> struct Largest { static constexpr float value = 3.40282347e38f; };
template <> struct Largest<bf16> { static constexpr float value = 3.38953139e38f; };
template <> struct Largest<f16> { static constexpr float value = 65504.0f; };

template <typename X> DEVICE float rounded(float x) { return to_float(from_float<X>(x)); }

// --- vector access -----------------------------------------------------------------------------------------
// load<N> and store<N> move N neighbours at once, in the widest accesses that N * sizeof(X) bytes allow (at
// most 16 bytes each). The address must be a multiple of min(N * sizeof(X), 16).

template <int BYTES> struct Words;  // the built-in vector type of that many bytes
template <> struct Words<2> { typedef u16 type; };
template <> struct Words<4> { typedef u32 type; };
template <> struct Words<8> { typedef uint2 type; };
template <> struct Words<16> { typedef uint4 type; };

template <int BYTES, typename X> DEVICE void load_bytes(const X* from, X* to) {
  constexpr int step = BYTES < 16 ? BYTES : 16;
  typedef typename Words<step>::type word;
#pragma unroll
  for (int i = 0; i < BYTES / step; ++i)
    reinterpret_cast<word*>(to)[i] = reinterpret_cast<const word*>(from)[i];
}

template <int N, typename X> DEVICE void load(const X* from, float (&to)[N]) {
  alignas(16) X raw[N];
  load_bytes<N * sizeof(X)>(from, raw);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(raw[i]);
}

template <int N, typename X> DEVICE void store(X* to, const float (&from)[N]) {
  alignas(16) X raw[N];
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = from_float<X>(from[i]);
  load_bytes<N * sizeof(X)>(raw, to);
}

// The same for the end of a row or an unaligned one: only `valid` elements exist, the others read
// as 0 and are not written.
template <int N, typename X> DEVICE void load_some(const X* from, i64 valid, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = i < valid ? to_float(from[i]) : 0.0f;
}

template <int N, typename X> DEVICE void store_some(X* to, i64 valid, const float (&from)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < valid) to[i] = from_float<X>(from[i]);
}

// Whether rows that start at `base` and lie `stride` elements apart can all be read BYTES at a time.
template <int BYTES, typename X> DEVICE bool rows_aligned(const X* base, i64 stride) {
  return (reinterpret_cast<u64>(base) | (u64)(stride * (i64)sizeof(X))) % BYTES == 0;
}

// --- reductions --------------------------------------------------------------------------------------------
// All in a fixed order: the same input gives the same bits. Every thread of the warp (block) must
// call; every one gets the result. `shared` is 32 floats; two calls in a row may use the same 32, a
// barrier stands at both ends.

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// Threads numbered over all block dimensions.
DEVICE u32 thread_rank() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
DEVICE u32 block_threads() { return blockDim.x * blockDim.y * blockDim.z; }

DEVICE float block_sum(float x, float* shared) {
  const u32 rank = thread_rank(), warps = (block_threads() + 31) / 32;
  x = warp_sum(x);
  __syncthreads();
  if (rank % 32 == 0) shared[rank / 32] = x;
  __syncthreads();
  x = warp_sum(rank % 32 < warps ? shared[rank % 32] : 0.0f);
  __syncthreads();
  return x;
}

// NaN is dropped; the maximum of nothing is -Inf.
DEVICE float block_max(float x, float* shared) {
  const u32 rank = thread_rank(), warps = (block_threads() + 31) / 32;
  x = warp_max(x);
  __syncthreads();
  if (rank % 32 == 0) shared[rank / 32] = x;
  __syncthreads();
  x = warp_max(rank % 32 < warps ? shared[rank % 32] : -INF);
  __syncthreads();
  return x;
}

// --- amax --------------------------------------------------------------------------------------------------

// max(amax, |x|), where fmaxf drops a NaN x.
DEVICE float amax_of(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// Max-accumulate a non-negative float. The bits of such floats are ordered as the floats are, and a maximum
// does not depend on the order of its arguments: allowed in deterministic mode.
DEVICE void atomic_amax(float* to, float amax) {
  if (amax > 0.0f) atomicMax(reinterpret_cast<int*>(to), __float_as_int(amax));
}

// The block's amax into *to (nothing where `to` is null), one atomic a block. The threads' numbers are
// amaxes: +0 or more, none of them NaN. `shared`: 32 floats that no thread reads any more; whoever uses them
// again puts a barrier between.
DEVICE void block_amax(float* to, float amax, float* shared) {
  if (to == nullptr) return;
  const u32 rank = thread_rank(), warps = (block_threads() + 31) / 32;
  u32 bits = __reduce_max_sync(~0u, __float_as_uint(amax));
  if (rank % 32 == 0) shared[rank / 32] = __uint_as_float(bits);
  __syncthreads();
  if (rank >= 32) return;
  bits = __reduce_max_sync(~0u, rank < warps ? __float_as_uint(shared[rank]) : 0u);
  if (rank == 0) atomic_amax(to, __uint_as_float(bits));
}

// --- small arithmetic --------------------------------------------------------------------------------------

DEVICE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
DEVICE i64 min64(i64 a, i64 b) { return a < b ? a : b; }
DEVICE i64 max64(i64 a, i64 b) { return a > b ? a : b; }

// The order in which a pass walks its arrays: one over what another pass has written begins where that one
// ended, since the L2 cache still has it. Some walk from the end, so that those behind them, which walk from
// the start, find what they wrote last.
DEVICE u32 block_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

// A kernel that begins with start_early() is launched before the one in front of it on the stream has ended,
// as soon as all blocks of that one have called let_next_start() or ended: its own blocks then stand ready
// (programmatic dependent launch, CUDA Programming Guide). Behind start_early() it sees all that was written
// before it; nothing that another kernel writes is to be read above it, nor through a __restrict__ pointer to
// const, which the compiler may do. One that begins with let_next_start() sets up what touches no memory of
// others, and then calls wait_for_former(). Before compute capability 9.0 all three do nothing.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void wait_for_former() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void start_early() { let_next_start(), wait_for_former(); }

DEVICE int lane() { return threadIdx.x % 32; }

// Index of the calling thread in a one-dimensional grid, and how many there are:
// `for (i64 i = first(); i < n; i += step())`.
DEVICE i64 first() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
DEVICE i64 step() { return (i64)gridDim.x * blockDim.x; }

// Four matrices of 8 x 8 elements of 16 bits from shared memory: lane l says where row l % 8 of matrix l / 8
// is, and gets those of row l / 4 at columns 2 (l % 4) and + 1 of each.
DEVICE void load_matrices(u32 from, u32 (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(from) : "memory");
}

// --- lists of tensors --------------------------------------------------------------------------------------
// A launch over several tensors takes a table of them by value; tensor t's blocks are
// first[t] ... first[t + 1] - 1.

// The tensor that the block belongs to: the last whose first block is not after it.
DEVICE int tensor_of(const u32* first, i64 count) {
  int low = 0, high = (int)count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle;
  }
  return low;
}
