"""Device code of ``hopper_gemm.cu`` compiled for the host, by a C++ compiler: ``write``, ``clear``, and all
that they call, by a thread for each thread of a block. What is said in PTX is said in C++ here."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8kit.raw_kernels import manifest

COMPILER = shutil.which("g++")
_DEVICE = Path(__file__).with_name("host_device.h")
_BFLOAT16 = "const u32 b = __float_as_uint(x); return bf16{(u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16)};"
_ROUND8 = (
    "for (int i = 0; i < 4; ++i) "
    "to.words[i] = from_float<X>(x[2 * i]).bits | (u32)from_float<X>(x[2 * i + 1]).bits << 16;"
)
_PAIR_AMAX = (  # such floats are ordered as their bits are
    "u32 made = 0; for (int i = 0; i < 32; i += 16) "
    "made |= max(most >> i & 0x7FFF, x >> i & 0x7FFF) << i; most = made;"
)
# signature of a function whose body is PTX -> what that does; NaN is not among the tests' values
_BODIES = {
    "void copies_have_read()": "carry_out_copies(); __syncwarp();",
    "void copy_tile_out(const TensorMap& map, u32 from, i32 column, i32 row, i32 third)": (
        "copies.push_back(Copy{(const long long*)&map, from, column, row, third});"
    ),
    "void store_matrices(u32 to, const u32 (&words)[4])": (
        "for (int i = 0; i < 4; ++i) "
        "*(u32*)(shared_memory + __shfl_sync(~0u, to, 8 * i + lane() / 4) + 4 * (lane() % 4)) = words[i];"
    ),
    "void load_matrices(u32 from, u32 (&words)[4])": (
        "for (int i = 0; i < 4; ++i) words[i] = "
        "*(u32*)(shared_memory + __shfl_sync(~0u, from, 8 * i + lane() / 4) + 4 * (lane() % 4));"
    ),
    "void store_shared_pair(u32 address, float x, float y)": (
        "((float*)(shared_memory + address))[0] = x, ((float*)(shared_memory + address))[1] = y;"
    ),
    "float2 load_shared_pair(u32 address)": "return *(float2*)(shared_memory + address);",
    "float exp2_fast(float x)": "return exp2f(x);",
    "float reciprocal_fast(float x)": "return 1.0f / x;",
    "float max_nan(float x, float y)": "return fmaxf(x, y);",
    "float load_shared(u32 address)": "return *(float*)(shared_memory + address);",
    "void store_shared(u32 address, float x)": "*(float*)(shared_memory + address) = x;",
    "void load_words_shared(u32 from, u32 (&words)[4])": "memcpy(words, shared_memory + from, 16);",
    "void store_words_shared(u32 to, const u32 (&words)[4])": "memcpy(shared_memory + to, words, 16);",
    "void barrier_init(u32 barrier, u32 arrivals)": (
        "phases[barrier / 8].left = phases[barrier / 8].arrivals = arrivals, phases[barrier / 8].ended = 0;"
    ),
    "void barrier_arrive(u32 barrier)": (
        "Phases& own = phases[barrier / 8]; if (--own.left == 0) own.left = own.arrivals, ++own.ended;"
    ),
    "void barrier_wait(u32 barrier, u32 parity)": (
        "while (phases[barrier / 8].ended % 2 == parity) std::this_thread::yield();"
    ),
    "bool elected()": "return lane() == 0;",
    "void round8(const float (&x)[8], Eight<bf16>& to)": _ROUND8.replace("X", "bf16"),
    "void round8(const float (&x)[8], Eight<f16>& to)": _ROUND8.replace("X", "f16"),
    "void pair_amax(u32& most, u32 x, bf16)": _PAIR_AMAX,
    "void pair_amax(u32& most, u32 x, f16)": _PAIR_AMAX,
    "void wait_for_threads(u32 number)": "group_barrier[number]->arrive_and_wait();",
    "bf16 from_float<bf16>(float x)": _BFLOAT16,
    "f16 from_float<f16>(float x)": "return f16{cast_bits<u16>((_Float16)x)};",
    "float to_float(f16 x)": "return (float)cast_bits<_Float16>(x.bits);",
    "u32 times_256(u32 pair)": (
        "u32 made = 0; for (int i = 0; i < 32; i += 16) made |= "
        "(u32)cast_bits<u16>((_Float16)(cast_bits<_Float16>((u16)(pair >> i)) * 256)) << i; return made;"
    ),
}
# two codes as two float16, as chips without FP8 instructions compute them; and the multipliers' part of the
# kernel for `count` tiles, which `places` gives four numbers each: row, column, group, depths. `sums`: their
# products, BM x BN each; of groups of rows, whose tiles the job says, one matrix, all tiles' columns wide
_RUN = """
extern "C" u32 decoded(int is_e5m2, int codes) {
  return is_e5m2 ? e5m2::halves((u16)codes) : e4m3::halves((u16)codes);
}

extern "C" void run_tiles(const Job* job, const float* sums, int count, ...) {
  std::vector<int> places(4 * count);
  va_list list;
  va_start(list, count);
  for (int& place : places) place = va_arg(list, int);
  va_end(list);
  for (auto& barrier : warp_barrier) barrier = std::make_unique<std::barrier<>>(32);
  for (auto& barrier : group_barrier) barrier = std::make_unique<std::barrier<>>(128);
  const Memory memory{0};
  for (u32 multiplier = 0; multiplier < 2; ++multiplier)
    barrier_init(memory.made(multiplier), 4), barrier_init(memory.taken(multiplier), 4);
  threadIdx = {0, 0, 0};
  const float scale = scale_of_results(job->further);
  std::vector<std::thread> threads;
  for (unsigned t = 384; t < THREADS; ++t) threads.emplace_back([&, t] {
    threadIdx = {t, 0, 0};
    Running own{scale};
    for (int tile = 0; tile < count; ++tile)
      for (int multiplier = 0; multiplier < 2; ++multiplier)
        finish(*job, memory, own, multiplier, tile % 2, places[4 * tile] + 64 * multiplier,
               places[4 * tile + 1]);
    end_of_tiles(job->further, own);
  });
  for (unsigned t = 128; t < 384; ++t) threads.emplace_back([&, t] {
    threadIdx = {t, 0, 0};
    const int group = t / 128 - 1;
    Running own{scale, SCALES == whole && WIDTH == 1 ? job->a_scale[0] * job->b_scale[0] : 1.0f};
    Outgoing outgoing{memory.part(t / 32 - 4), memory.made(group), memory.taken(group)};
    Walk walk;
    for (int tile = 0; tile < count; ++tile) {
      Tile at{};
      if (!BY_ROWS || !walk.at(*job, tile, at))
        at.row = places[4 * tile], at.column = places[4 * tile + 1], at.group = places[4 * tile + 2];
      if (!BY_ROWS || at.depths) at.depths = places[4 * tile + 3];
      if constexpr (LATE)
        if (at.depths > 2) outgoing.send_late(*job);  // as `multiply` does
      if (TURNS ? tile % 2 != group : BM == 64 && group) continue;
      const i64 wide = BY_ROWS ? job->wide * BN : BN;
      const float* own_sums = sums + (BY_ROWS ? at.row * wide + at.column : (i64)tile * BM * BN);
      for (int w = 0; w < WAVES; ++w) {
        float total[BN / 2];
        const int first = 64 * ((TURNS ? 0 : WAVES * group) + w);
        if (BY_ROWS && at.row + first >= at.cover) continue;
        const int own_row = first + t / 32 % 4 * 16 + lane() / 4;
        for (int i = 0; i < BN / 2; ++i)
          total[i] = own_sums[(own_row + i / 2 % 2 * 8) * wide + i / 4 * 8 + 2 * (lane() % 4) + i % 2];
        write(*job, memory, total, at, at.row + first, group, own, outgoing);
      }
    }
    if (!FINISHERS) end_of_tiles(job->further, own);
    if constexpr (LATE) outgoing.send_late(*job);
    if constexpr (STAGED) copies_have_read();
  });
  for (auto& thread : threads) thread.join();
}

// a stage, as copies leave it that have ended: a's tile and b's, in which [begin, stop) is the group's.
// Returns how often the multipliers were told that the stage is theirs
extern "C" u32 run_clear(unsigned char* stage, unsigned begin, unsigned stop) {
  const Memory memory{0};
  for (u32 place = 0; place < 2; ++place)
    barrier_init(memory.landed(place), 1), barrier_arrive(memory.landed(place));
  barrier_init(memory.full(1), 1);
  memcpy(shared_memory + memory.a(1), stage, A_BYTES);
  memcpy(shared_memory + memory.b(1), stage + A_BYTES, B_BYTES);
  store_words_shared(memory.note(0), {1, begin, stop, 0});
  store_words_shared(memory.note(1), {STAGES, 0, 0, 0});
  group_barrier[1] = std::make_unique<std::barrier<>>(96);
  std::vector<std::thread> threads;
  for (unsigned t = 32; t < 128; ++t) threads.emplace_back([=] {
    threadIdx = {t, 0, 0};
    clear(memory);
  });
  for (auto& thread : threads) thread.join();
  memcpy(stage, shared_memory + memory.a(1), A_BYTES);
  memcpy(stage + A_BYTES, shared_memory + memory.b(1), B_BYTES);
  return phases[memory.full(1) / 8].ended;
}
"""


def without_ptx(text: str) -> str:
    """The text with each ``asm`` statement replaced by nothing."""
    made, at = "", 0
    for found in re.finditer(r"\basm\s*(volatile)?\s*\(", text):
        made, at, depth, quoted = made + text[at : found.start()], found.end(), 1, False
        while depth:
            if text[at] == '"' and text[at - 1] != "\\":
                quoted = not quoted
            depth += 0 if quoted else {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        made += "(void)0"
    return made + text[at:]


def library(defines: manifest.Defines, folder: Path) -> Any:
    """A library with ``run_tiles`` of a variant of ``hopper_gemm.cu``, made in ``folder``."""
    unit = manifest.unit("hopper_gemm.cu")
    left = dict(unit.headers)

    def expanded(text: str) -> str:
        return re.sub(r'^#include "([^"]+)"', lambda m: expanded(left.pop(m[1], "")), text, flags=re.M)

    text = expanded(unit.content).replace("#pragma once", "").partition("// --- the kernel ---")[0]
    text = without_ptx(re.sub(r'^extern "C" __global__ .*__trap\(\); }$', "", text, flags=re.M))
    for signature, body in _BODIES.items():
        text, count = re.subn(re.escape(signature) + r" \{[^}]*\}", f"{signature} {{ {body} }}", text)
        assert count == 1 + ("pair_amax" in signature), signature  # of either kind of chip
    source = folder / "-".join(["tile", *(value for _, value in defines)])
    source.with_suffix(".cpp").write_text(f'#include "{_DEVICE}"\n{text}\n#endif\n{_RUN}')
    assert COMPILER is not None
    command = [COMPILER, "-std=c++20", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC"]
    command += ["-shared", "-pthread", *(f"-D{name}={value}" for name, value in defines)]
    made = source.with_suffix(".so")
    subprocess.run([*command, str(source.with_suffix(".cpp")), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@contextlib.contextmanager
def placed(job: bytes) -> Iterator[ctypes.c_void_p]:
    """A kernel's structure where its alignment wants it."""
    memory = ctypes.create_string_buffer(len(job) + 64)
    place = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    ctypes.memmove(place, bytes(job), len(job))
    yield ctypes.c_void_p(place)
