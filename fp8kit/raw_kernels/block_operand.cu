// Codes of blocks of 32 or 16, as a cast left them, and the codes of their scales, laid out as cuBLASLt's
// products read them (cuBLAS, "1D Block Scaling Factors Layout").
//
// functions: block_operand
// variants: WIDTH=32,16
#include "common.cuh"

constexpr int CODES = 16 * 32 / WIDTH;  // in 16 bytes of q: those of 4 bits lie two in a byte

// codes (rows, columns) into q (q_rows, q_bytes) and the codes of scales, of tiles high x WIDTH along the
// contraction, into q_scales. along: the contraction is the last dimension, else the first, and q is the
// transpose. A thread makes 16 bytes of q, its neighbours read neighbouring bytes of codes, or a byte of
// q_scales.
extern "C" __global__ void __launch_bounds__(256)
block_operand(const u8* codes, const u8* scales, u8* q, u8* q_scales, i64 rows, i64 columns, i64 q_rows,
              i64 q_bytes, i64 scale_bytes, i64 high, i64 along) {
  start_early();
  const i64 lines = along ? rows : columns, length = along ? columns : rows;
  const i64 across = q_bytes / 16, chunks = q_rows * across, blocks = ceil_div(length, WIDTH);
  for (i64 i = first(); i < chunks + scale_bytes; i += step()) {
    if (i < chunks) {
      const i64 line = along ? i / across : i % q_rows, part = along ? i % across : i / q_rows;
      const i64 there = line < lines ? min(length - CODES * part, (i64)CODES) : 0;
      const i64 apart = along ? 1 : columns;
      const u8* from = codes + line * (along ? columns : 1) + CODES * part * apart;
      alignas(16) u8 made[16];
#pragma unroll
      for (int b = 0; b < 16; ++b) {
        if constexpr (WIDTH == 32) {
          made[b] = b < there ? from[b * apart] : 0;
        } else {
          const u8 even = 2 * b < there ? from[2 * b * apart] : 0;
          const u8 odd = 2 * b + 1 < there ? from[(2 * b + 1) * apart] : 0;
          made[b] = (even & 15) | odd << 4;
        }
      }
      load_bytes<16>(made, q + line * q_bytes + 16 * part);
    } else {
      const i64 at = i - chunks, tile = at / 512, wide = ceil_div(q_bytes / (WIDTH == 32 ? 32 : 8), 4);
      const i64 line = tile / wide * 128 + at % 16 / 4 * 32 + at % 512 / 16, block = tile % wide * 4 + at % 4;
      const bool there = line < lines && block < blocks;
      const i64 from = along ? line / high * blocks + block : block * ceil_div(columns, high) + line / high;
      q_scales[at] = there ? scales[from] : 0;
    }
  }
}
