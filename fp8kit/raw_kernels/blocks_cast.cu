// Casts by blocks of any rule along either dimension, rotated before that where wanted: one pass, and for
// square blocks a second one over what the first has brought into the caches.
//
// functions: cast_lines (cast_blocks), cast_columns (cast_blocks)
// variants: T=f32,bf16,f16; ROUTE=e4m3,e5m2,e2m1,steps,any,four,levers
#include "blocks_cast.cuh"

constexpr int ROWS = 256 / LINES, TURNS = SPAN / ROWS;
constexpr int PEAKS = SPAN / LINE * SPAN / LINE;  // square blocks of a block's region, at most

// Blocks that a multiprocessor should hold at least: as many as leave registers enough.
constexpr int LINES_BLOCKS = LEVERS ? 1 : KNOWS_ROWS || sizeof(T) == 4 ? 2 : __CUDA_ARCH__ == 900 ? 4 : 3;
constexpr int COLUMNS_BLOCKS = LEVERS ? 1 : KNOWS_ROWS ? 2 : 3;

DEVICE void clear_peaks(u32* peaks) {
  if (threadIdx.x < PEAKS) peaks[threadIdx.x] = 0;
  __syncthreads();
}

// The larger of both, as bits: those of NaN are the largest.
DEVICE void add_peak(u32* peak, float amax) { atomicMax(peak, __float_as_uint(amax)); }

// The amax of a block from those of its lines; the lanes of up to eight lines call.
DEVICE float shared_amax(const BlockCast& how, float amax) {
#pragma unroll 1
  for (u32 d = 1; LINE * d < how.tile; d *= 2) amax = max_nan(amax, __shfl_xor_sync(~0u, amax, d));
  return amax;
}

DEVICE void write_scale(const Scale& scale, i64 at, float* scale_inv, u8* scale_codes) {
  if (scale_inv != nullptr) scale_inv[at] = scale.inverse;
  if (scale_codes != nullptr) scale_codes[at] = (u8)scale.code;
}

DEVICE void write_tensor_scale(const BlockCast& how, TensorScale tensor, float* tensor_scale_inv) {
  if (KNOWS_ROWS && how.by_row) return;  // each with its line
  const float inverse = LEVERS ? __fmul_rn(tensor.inverse, how.inverse_factor) : tensor.inverse;
  if (tensor_scale_inv != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *tensor_scale_inv = inverse;
}

// --- the contraction is the last dimension -----------------------------------------------------------------

struct Pair {
  Eight<T> halves[2];
};

DEVICE Pair read_line(const T* x, i64 row, i64 rows, i64 column, i64 columns, bool wide) {
  Pair in;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 at = column + 8 * half;
    in.halves[half] = read8(x + row * columns + at, row < rows ? columns_left(at, columns) : 0, wide);
  }
  return in;
}

DEVICE void to_line(const Pair& in, float (&v)[LINE]) {
#pragma unroll
  for (int i = 0; i < LINE; ++i) v[i] = value(in.halves[i / 8], i % 8);
}

// Codes of neighbours, element `index` and on of the matrix, by their words.
DEVICE void random_codes(const BlockCast& how, const i64* rng, u64 index, const float (&v)[LINE],
                         u32 (&words)[LINE / 4]) {
  const Rng key = rng_of(how, rng);
  const Steps steps = steps_of(how);
  const u32 skip = (u32)index & 3u;  // words of the first group that belong to elements before
  float rest[LINE];
#pragma unroll
  for (int i = 0; i < LINE; ++i) rest[i] = v[i];
  uint4 group = philox(key, index >> 2);
#pragma unroll 1
  for (int turn = 0; turn < LINE / 4; ++turn) {
    u32 eight[8] = {group.x, group.y, group.z, group.w};
    if (turn + 1 < LINE / 4 || skip) group = philox(key, (index >> 2) + turn + 1);
    eight[4] = group.x, eight[5] = group.y, eight[6] = group.z, eight[7] = group.w;
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 low = skip & 1 ? eight[i + 1] : eight[i], high = skip & 1 ? eight[i + 3] : eight[i + 2];
      codes |= random_code(how, steps, rest[i], skip & 2 ? high : low) << (8 * i);
    }
#pragma unroll
    for (int k = 0; k + 4 < LINE; ++k) rest[k] = rest[k + 4];
#pragma unroll
    for (int w = 0; w + 1 < LINE / 4; ++w) words[w] = words[w + 1];
    words[LINE / 4 - 1] = codes;
  }
}

// A block takes 128 rows and 128 columns, 32 rows at a time; a one-dimensional grid, columns first. Of the
// outputs each may be null.
extern "C" __global__ void __launch_bounds__(256, LINES_BLOCKS)
cast_lines(const T* x, u8* q, float* scale_inv, u8* scale_codes, T* values, const float* tensor_amax,
           float* tensor_scale_inv, const i64* rng, u8* inside, i64 rows, i64 columns, i64 draw,
           BlockCast how) {
  start_early();
  __shared__ u32 peaks[PEAKS];
  __shared__ float errors[2][COMPILED == four_codes ? SPAN * LINES : 1];
  const TensorScale whole_tensor = tensor_scale(how, tensor_amax);
  write_tensor_scale(how, whole_tensor, tensor_scale_inv);
  const u32 across = (u32)ceil_div(columns, SPAN);
  if (!rows || !columns) return;
  const u32 place = line_place(), warp_row = threadIdx.x / 32 * 4, own_row = threadIdx.x / LINES;
  const i64 top = (i64)(blockIdx.x / across) * SPAN,
            column = (i64)(blockIdx.x % across) * SPAN + place * LINE;
  const bool wide = rows_aligned<16>(x, columns), wide_q = rows_aligned<16>(q, columns),
             wide_values = rows_aligned<16>(values, columns);
  const u32 flips = flips_of(how.rotation, rng, column);
  const bool whole = whole_group(how.rotation, column, columns);
  const u32 log = how.tile_log, squares = SPAN >> log, peak = place * LINE >> log;
  const i64 tiles = (columns + how.tile - 1) >> log;
  float v[LINE];
  bool nan;

  if (how.square) {
    clear_peaks(peaks);
#pragma unroll 1
    for (int turn = 0; turn < TURNS; ++turn) {
      if (top + turn * ROWS + warp_row >= rows) break;
      const u32 row = turn * ROWS + own_row;
      to_line(read_line(x, top + row, rows, column, columns, wide), v);
      rotate_line(how.rotation, flips, whole, place, v);
      add_peak(peaks + (row >> log) * squares + peak, line_amax(how, v, nan));
    }
    __syncthreads();
  }
  if (COMPILED == four_codes && how.square && how.four) {
    for (u32 i = threadIdx.x; i < SPAN * LINES; i += blockDim.x) errors[0][i] = errors[1][i] = 0.0f;
    __syncthreads();
#pragma unroll 1
    for (u32 at = 0; at < 2 * TURNS; ++at) {
      const u32 row = at / 2 * ROWS + own_row;
      if (top + row >= rows) break;
      to_line(read_line(x, top + row, rows, column, columns, wide), v);
      line_amax(how, v, nan);
      const float amax = __uint_as_float(peaks[(row >> log) * squares + peak]);
      const Scale scale = tried_scale(how, whole_tensor, amax, at % 2);
      errors[at % 2][row * LINES + place] = line_error(how, whole_tensor, scale, nan, v);
    }
    __syncthreads();
  }

  Pair next = read_line(x, top + own_row, rows, column, columns, wide);
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn) {
    if (top + turn * ROWS + warp_row >= rows) break;
    const u32 row_here = turn * ROWS + own_row;
    const i64 row = top + row_here;
    to_line(next, v);
    if (turn + 1 < TURNS) next = read_line(x, row + ROWS, rows, column, columns, wide);
    rotate_line(how.rotation, flips, whole, place, v);
    float amax = line_amax(how, v, nan);
    if (how.square) amax = __uint_as_float(peaks[(row_here >> log) * squares + peak]);
    else amax = shared_amax(how, amax);
    const TensorScale tensor = line_scale(how, whole_tensor, tensor_amax, row, rows);
    Scale scale;
    if (COMPILED == four_codes && how.four) {
      const u32 square = (row_here & ~(LINE - 1)) * LINES + place;
      if (how.square)
        scale = tried_scale(how, tensor, amax,
                            square_error(errors[1] + square) < square_error(errors[0] + square));
      else
        scale = chosen_scale(how, tensor, amax, nan, v);
    } else if (LEVERS) {
      scale = lever_scale(how, tensor, amax, nan, v, rng, ((u64)draw << 48) + (u64)(row * columns + column));
    } else {
      scale = block_scale(how, tensor, amax);
    }
    if (KNOWS_ROWS && how.by_row && tensor_scale_inv != nullptr && column == 0 && row < rows)
      tensor_scale_inv[row] = LEVERS ? __fmul_rn(tensor.inverse, how.inverse_factor) : tensor.inverse;
    if (row >= rows || column >= columns) continue;
    if (!(place * LINE & (how.tile - 1)) && (!how.square || !(row_here & (how.tile - 1))))
      write_scale(scale, (how.square ? row >> log : row) * tiles + (column >> log), scale_inv, scale_codes);
    if (q == nullptr && values == nullptr && (!LEVERS || inside == nullptr)) continue;
#pragma unroll
    for (int i = 0; i < LINE; ++i) v[i] *= scale.scale;
    u32 words[LINE / 4] = {};
    if (LEVERS && inside != nullptr) {
#pragma unroll
      for (int i = 0; i < LINE; ++i) words[i / 4] |= (u32)(fabsf(v[i]) <= how.max) << (8 * (i % 4));
      write_codes<LINE>(inside + row * columns + column, (int)min64(columns - column, LINE),
                        rows_aligned<16>(inside, columns), words);
#pragma unroll
      for (int w = 0; w < LINE / 4; ++w) words[w] = 0;
    }
    if (ANY && how.format.random_bits)
      random_codes(how, rng, ((u64)draw << 48) + (u64)(row * columns + column), v, words);
    else
      nearest_codes(how, v, nan || scale.scale != scale.scale, words);
    const i64 at = row * columns + column;
    if (q != nullptr) write_codes<LINE>(q + at, (int)min64(columns - column, LINE), wide_q, words);
    if (values != nullptr) {
      decode_line(how, words, v);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float eight[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) eight[i] = v[8 * half + i] * scale.value;
        write8(values + at + 8 * half, columns_left(column + 8 * half, columns), wide_values,
               rounded8<T>(eight));
      }
    }
  }
}

// --- the contraction is the first dimension ----------------------------------------------------------------

// 128 rows of 64 codes on their way to memory. Pairs of row r lie at 32-bit words ^ (2 * (r / 16)), so that
// the lanes of a warp, which write 16 words at a time, meet no other in a bank.
struct Codes {
  u32 words[SPAN][PANEL / 4];

  __device__ __forceinline__ void put(u32 row, u32 pair, u32 two) {
    reinterpret_cast<u16*>(&words[row][(pair / 2) ^ (2 * (row / LINE))])[pair % 2] = (u16)two;
  }
  __device__ __forceinline__ void get(u32 row, u32 sixteen, u32 (&codes)[4]) const {
    const u32 band = row / LINE;
    const uint4 four = reinterpret_cast<const uint4*>(words[row])[sixteen ^ (band / 2)];
    const bool swapped = band & 1;
    codes[0] = swapped ? four.z : four.x, codes[1] = swapped ? four.w : four.y;
    codes[2] = swapped ? four.x : four.z, codes[3] = swapped ? four.y : four.w;
  }
};

DEVICE void column_line(Panel<T>& panel, u32 place, u32 pair, int side, float (&v)[LINE]) {
#pragma unroll
  for (int i = 0; i < LINE; ++i) v[i] = to_float(panel.at(place * LINE + i, pair)[side]);
}

// v moves up by one, and a code into the words from their upper end.
DEVICE void next_row(float (&v)[LINE], u32 (&words)[LINE / 4], u32 code) {
#pragma unroll
  for (int k = 0; k + 1 < LINE; ++k) v[k] = v[k + 1];
#pragma unroll
  for (int w = 0; w < LINE / 4; ++w)
    words[w] = __funnelshift_r(words[w], w + 1 < LINE / 4 ? words[(w + 1) % (LINE / 4)] : code, 8);
}

// Codes of the 16 rows from `row` on of a pair of columns, the first of which is `column`, by their words;
// element (0, 0)'s is number `zero`, a multiple of 4.
// Where four neighbours of a row are a group of words, they belong to two lanes: each draws every second row
// and gives the other its half. All lanes call; `low` and `high` are used up.
DEVICE void random_pair(const BlockCast& how, const i64* rng, u64 zero, i64 row, i64 column, i64 columns,
                        float (&low)[LINE], float (&high)[LINE], u32 (&low_words)[LINE / 4],
                        u32 (&high_words)[LINE / 4]) {
  const Rng key = rng_of(how, rng);
  const Steps steps = steps_of(how);
  const bool grouped = columns % 4 == 0, second = line_pair() % 2;
#pragma unroll 1
  for (int i = 0; i < LINE; i += 2) {
    u32 words[4] = {};  // of both rows' pairs
    if (grouped) {
      const uint4 own = philox(key, (zero + (u64)((row + i + second) * columns + column)) >> 2);
      const u32 x = __shfl_xor_sync(~0u, second ? own.x : own.z, LINES);
      const u32 y = __shfl_xor_sync(~0u, second ? own.y : own.w, LINES);
      words[0] = second ? x : own.x, words[1] = second ? y : own.y;
      words[2] = second ? own.z : x, words[3] = second ? own.w : y;
    } else {
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {
        const u32 word = philox_word(key, zero + (u64)((row + i + k / 2) * columns + column + k % 2));
        words[0] = words[1], words[1] = words[2], words[2] = words[3], words[3] = word;
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      next_row(low, low_words, random_code(how, steps, low[0], words[2 * k]));
      next_row(high, high_words, random_code(how, steps, high[0], words[2 * k + 1]));
    }
  }
}

// The values of a column's codes into the panel.
DEVICE void column_values(const BlockCast& how, Panel<T>& panel, u32 place, u32 pair, int side,
                          const u32 (&words)[LINE / 4], float factor) {
  float v[LINE];
  decode_line(how, words, v);
#pragma unroll
  for (int i = 0; i < LINE; ++i)
    panel.at(place * LINE + i, pair)[side] = from_float<T>(v[i] * factor);
}

// A block takes 128 rows and 64 columns; of square blocks 128 columns, 64 at a time.
extern "C" __global__ void __launch_bounds__(256, COLUMNS_BLOCKS)
cast_columns(const T* x, u8* q, float* scale_inv, u8* scale_codes, T* values, const float* tensor_amax,
             float* tensor_scale_inv, const i64* rng, u8* inside, i64 rows, i64 columns, i64 draw,
           BlockCast how) {
  start_early();
  __shared__ Panel<T> panel;
  __shared__ Codes codes;
  __shared__ u32 peaks[PEAKS];
  const TensorScale whole_tensor = tensor_scale(how, tensor_amax);
  write_tensor_scale(how, whole_tensor, tensor_scale_inv);
  if (!rows || !columns) return;
  const u32 width = how.square ? SPAN : PANEL, across = (u32)ceil_div(columns, width);
  const i64 top = (i64)(blockIdx.x / across) * SPAN, left = (i64)(blockIdx.x % across) * width;
  const u32 place = line_place(), pair = line_pair();
  const i64 row = top + place * LINE;
  const u32 flips = flips_of(how.rotation, rng, row);
  const bool whole = whole_group(how.rotation, row, rows), wide_q = rows_aligned<16>(q, columns);
  const u32 log = how.tile_log, squares = SPAN >> log, peak = (place * LINE >> log) * squares;
  const i64 tiles = how.square ? (columns + how.tile - 1) >> log : columns;
  bool nan;

  if (how.square) {
    clear_peaks(peaks);
#pragma unroll 1
    for (u32 part = 0; part < SPAN; part += PANEL) {
      read_panel(panel, x, rows, columns, top, left + part);
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        float v[LINE];
        column_line(panel, place, pair, side, v);
        rotate_line(how.rotation, flips, whole, place, v);
        add_peak(peaks + peak + ((part + 2 * pair + side) >> log),
                 line_amax(how, v, nan));
      }
    }
    __syncthreads();
  }

#pragma unroll 1
  for (u32 part = 0; part < width; part += PANEL) {
    read_panel(panel, x, rows, columns, top, left + part);
    const bool random = ANY && how.format.random_bits;
    // of the pair's first column: codes, what values are of them, and, where both are drawn at once, v
    u32 first[LINE / 4] = {};
    float first_value = 0.0f, kept[LINE] = {};
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      const u32 column_here = part + 2 * pair + side;
      const i64 column = left + column_here;
      float v[LINE];
      column_line(panel, place, pair, side, v);
      rotate_line(how.rotation, flips, whole, place, v);
      float amax = line_amax(how, v, nan);
      if (how.square)
        amax = __uint_as_float(peaks[peak + (column_here >> log)]);
      else
        amax = shared_amax(how, amax);
      const TensorScale tensor = line_scale(how, whole_tensor, tensor_amax, column, columns);
      Scale scale;
      if (COMPILED == four_codes && how.four)
        scale = chosen_scale(how, tensor, amax, nan, v);
      else if (LEVERS)
        scale = lever_scale(how, tensor, amax, nan, v, rng,
                            ((u64)draw << 48) + (u64)(row * columns + column));
      else
        scale = block_scale(how, tensor, amax);
      if (KNOWS_ROWS && how.by_row && tensor_scale_inv != nullptr && row == 0 && column < columns)
        tensor_scale_inv[column] = LEVERS ? __fmul_rn(tensor.inverse, how.inverse_factor) : tensor.inverse;
      const bool leader =
          !(place * LINE & (how.tile - 1)) && (!how.square || !(column_here & (how.tile - 1)));
      if (leader && row < rows && column < columns)
        write_scale(scale, (row >> log) * tiles + (how.square ? column >> log : column), scale_inv,
                    scale_codes);
#pragma unroll
      for (int i = 0; i < LINE; ++i) v[i] *= scale.scale;
      if (LEVERS && inside != nullptr && column < columns) {
#pragma unroll
        for (int i = 0; i < LINE; ++i)
          if (row + i < rows) inside[(row + i) * columns + column] = (u8)(fabsf(v[i]) <= how.max);
      }
      u32 words[LINE / 4] = {};
      if (!random)
        nearest_codes(how, v, nan || scale.scale != scale.scale, words);
      else if (side)
        random_pair(how, rng, (u64)draw << 48, row, column - 1, columns, kept, v, first, words);
      if (side == 0) {
        first_value = scale.value;
#pragma unroll
        for (int w = 0; w < LINE / 4; ++w) first[w] = words[w];
        if (random) {
#pragma unroll
          for (int i = 0; i < LINE; ++i) kept[i] = v[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < LINE; ++i)
          codes.put(place * LINE + i, pair,
                    __byte_perm(first[i / 4], words[i / 4], (i % 4) | (4 + i % 4) << 4) & 0xFFFFu);
        if (values != nullptr) {
          column_values(how, panel, place, pair, 0, first, first_value);
          column_values(how, panel, place, pair, 1, words, scale.value);
        }
      }
    }
    if (values != nullptr) write_panel(panel, values, rows, columns, top, left + part);
    __syncthreads();
    if (q != nullptr) {
#pragma unroll
      for (int turn = 0; turn < SPAN * PANEL / 16 / 256; ++turn) {
        const u32 at = threadIdx.x + 256 * turn, line = at / 4, sixteen = at % 4;
        const i64 to = top + line, column = left + part + 16 * sixteen;
        if (to >= rows || column >= columns) continue;
        u32 out[4];
        codes.get(line, sixteen, out);
        write_codes<16>(q + to * columns + column, (int)min64(columns - column, 16), wide_q, out);
      }
    }
  }
}
