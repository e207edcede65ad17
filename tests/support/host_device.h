// What a CUDA source finds on a host, for tests/support/host_compiled.py: a thread stands for each thread of
// a block of 512. Lanes of a warp meet at a barrier before and behind each exchange.
#include <barrier>
#include <thread>
#include <cstring>
#include <cmath>
#include <atomic>
#include <vector>
#include <memory>
#include <algorithm>
#include <cstdarg>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __CUDA_ARCH_FEAT_SM90_ALL 1
struct U3 { unsigned x, y, z; };
static thread_local U3 threadIdx{0, 0, 0};
static U3 blockIdx{0, 0, 0}, blockDim{384, 1, 1}, gridDim{1, 1, 1};
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
static inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
using std::min; using std::max;
static std::unique_ptr<std::barrier<>> warp_barrier[16], group_barrier[4];
static unsigned long long slots[16][32];
static unsigned char shared_memory[1 << 18];
// A barrier in shared memory: how many arrivals end a phase, how many are still to come, phases that ended.
struct Phases { unsigned arrivals; std::atomic<unsigned> left, ended; };
static Phases phases[1 << 15];
// Copies out of shared memory read it when they are waited for, as late as may be. A map is an address, and
// what tests/support/hopper.py::map_of says: kind, three sizes, two strides, and the box, whose rows are
// swizzled.
struct Copy {
  const long long* map;
  unsigned from;
  int column, row, matrix;
};
static thread_local std::vector<Copy> copies;
static inline void carry_out_copies() {
  for (const Copy& c : copies) {
    const long long *m = c.map, width = m[7], height = m[8], bytes = m[1] == 1 ? 4 : 2, row = 16 / bytes;
    if (c.from % 1024 || width * bytes != 128) std::abort();
    for (int i = 0; i < height; ++i)
      for (int j = 0; j < width; ++j)
        if (c.row + i < m[3] && c.column + j < m[2] && c.matrix < m[4])
          std::memcpy((char*)m[0] + bytes * (c.matrix * m[6] + (c.row + i) * m[5] + c.column + j),
                      shared_memory + c.from + 128 * i + 16 * (j / row ^ i % 8) + bytes * (j % row), bytes);
  }
  copies.clear();
}
template <typename X> static X __shfl_sync(unsigned, X x, int from) {
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  std::memcpy(&slots[w][l], &x, sizeof(X));
  warp_barrier[w]->arrive_and_wait();
  X y; std::memcpy(&y, &slots[w][from], sizeof(X));
  warp_barrier[w]->arrive_and_wait();
  return y;
}
template <typename X> static X __shfl_xor_sync(unsigned mask, X x, int step) {
  return __shfl_sync(mask, x, (int)(threadIdx.x % 32) ^ step);
}
template <typename X> static X __reduce_max_sync(unsigned mask, X x) {
  for (int step = 16; step; step >>= 1) x = max(x, __shfl_xor_sync(mask, x, step));
  return x;
}
static inline void __syncwarp() { warp_barrier[threadIdx.x / 32]->arrive_and_wait(); }
static inline void __syncthreads() { std::abort(); }
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) made |= (unsigned)(bytes >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return made;
}
template <typename A, typename B> static A cast_bits(B b) { A a; std::memcpy(&a, &b, sizeof(A)); return a; }
static inline unsigned __float_as_uint(float x) { return cast_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return cast_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return cast_bits<float>(x); }
static inline float __int_as_float(int x) { return cast_bits<float>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline float __double2float_rn(double x) { return (float)x; }
static inline unsigned long long both(unsigned high, unsigned low) {
  return (unsigned long long)high << 32 | low;
}
static inline double __hiloint2double(int high, int low) { return cast_bits<double>(both(high, low)); }
static inline unsigned __funnelshift_r(unsigned a, unsigned b, unsigned s) {
  return (unsigned)(both(b, a) >> s);
}
static inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
static std::atomic_flag number_lock = ATOMIC_FLAG_INIT;
template <typename F> static int exchanged(int* to, F made) {
  while (number_lock.test_and_set()) std::this_thread::yield();
  const int before = *to;
  *to = made(before);
  number_lock.clear();
  return before;
}
static inline int atomicMax(int* to, int x) {
  return exchanged(to, [x](int before) { return max(before, x); });
}
static inline int atomicAdd(int* to, int x) {
  return exchanged(to, [x](int before) { return before + x; });
}
