"""A campaign against the library: ``python -m tests.campaign`` (``make campaign``), on the CPU, seeded.

* kills: savers are killed at random moments; the file is the old one or the new one, whole, and nothing is
  left beside it (``tests.models.kill_saves``).
* damaged files: checkpoints and entries of the cache are cut, overwritten, and their bits flipped. A
  checkpoint is refused by a CheckpointError, or holds what an independent reader finds in it; a cache entry
  is not there, or is what was written. Each within two seconds of the processor; memory stays bounded.
* calls: public functions with some arguments replaced by what they cannot be, or hardly: the call works, or
  is refused by an Fp8kitError and has changed nothing. None hangs.

Exit status 1, with what was wrong, where something was.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

import fp8kit as fk
from fp8kit import cache, serialization
from fp8kit.backends.reference import kept
from fp8kit.errors import CheckpointError, Fp8kitError
from tests.models import kill_saves

_SLOWEST = 2.0  # seconds of the processor that a damaged file may take
_MEMORY = 512 << 20  # bytes that all damaged files together may add to the process
_HANGING = 300  # seconds after which a call is one that hangs; some compile, on a machine that is busy


def damage(whole: bytes, moments: random.Random) -> bytes:
    """Cut, overwritten, lengthened, or with flipped bits."""
    content, how = bytearray(whole), moments.randrange(6)
    at = moments.randrange(len(content))
    if how == 0:
        del content[at:]
    elif how == 1:
        length = moments.randint(1, 64)
        content[at : at + length] = moments.randbytes(length)
    elif how == 2:
        for _ in range(moments.randint(1, 8)):
            content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
    elif how == 3:
        content[at:at] = moments.randbytes(moments.randint(1, 64))
    elif how == 4:  # the header, where most goes wrong
        place = moments.randrange(min(len(content), 300))
        content[place] = moments.choice(b'0123456789[]{}",:\\ \0\xff')
    else:
        del content[at : at + moments.randint(1, 64)]
    return bytes(content)


def as_read(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """What a safetensors file holds, by the format's document alone."""
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def checkpoint_fault(path: Path, content: bytes) -> str:
    """What is wrong with how a damaged checkpoint is read; "" where nothing is."""
    path.write_bytes(content)
    try:
        state, _ = serialization.read(path)
    except CheckpointError as error:
        return "" if len(str(error)) < 5000 else f"a message of {len(str(error))} characters"
    wanted = as_read(content)
    found = {name: (list(array.shape), array.tobytes()) for name, array in state.items()}
    same = found == {name: (shape, data) for name, (_, shape, data) in wanted.items()}
    return "" if same else "other values than the file has"


def entry_fault(place: Path, whole: bytes, content: bytes, numba: bool) -> str:
    """The same of an entry of the cache: notes, or Numba's code."""
    if numba:
        place.write_bytes(content)
        with contextlib.suppress(OSError):
            return "" if kept._read(str(place)) == whole[kept._DIGEST :] else "damaged code is read"
        return ""
    found = cache.unseal(content)
    return "" if found is None or found == cache.unseal(whole) else "damaged notes are read"


def damaged_files(count: int, seed: int, folder: Path) -> list[str]:
    moments, faults, refused = random.Random(seed), [], 0
    generator = np.random.default_rng(seed)
    path, entry = folder / "damaged", folder / "entry"
    checkpoint = {
        f"layer.{i}.weight": generator.standard_normal((4, i)).astype(np.float32) for i in range(6)
    } | {"x._extra_state.scale": np.ones(3, np.float32), "steps": np.arange(5)}
    fk.save(path, checkpoint, {"preset": "x", "\n": "ü"})
    whole = path.read_bytes()
    notes = cache.seal({"cubin": "0" * 64, "log": "ptxas\n" * 40, "resources": {"f": {"registers": 3}}})
    kept._write(str(entry), generator.bytes(4000))
    code = entry.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        kind = moments.choice(("checkpoint", "checkpoint", "notes", "code"))
        start = time.process_time()  # not the clock's, which also counts what else runs on the machine
        try:
            if kind == "checkpoint":
                content = damage(whole, moments)
                fault = checkpoint_fault(path, content)
            else:
                source = notes if kind == "notes" else code
                fault = entry_fault(entry, source, damage(source, moments), kind == "code")
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error)[:200]}"
        taken = time.process_time() - start
        if fault or taken > _SLOWEST:
            faults.append(f"damaged file {number} ({kind}): {fault or f'{taken:.1f} s'}")
        else:
            refused += 1
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if more > _MEMORY:
        faults.append(f"damaged files: {more >> 20} MiB more memory")
    print(f"{count} damaged files, {refused} as they must be, {more >> 20} MiB more memory at the highest")
    return faults


def random_calls(count: int, seed: int) -> list[str]:
    from tests.support.calls import CALLS
    from tests.support.junk import JUNK, PYTHONS, USERS

    moments, faults, worked = random.Random(seed), [], 0
    names = list(CALLS)
    for call in CALLS.values():  # what they compile takes its time, and is no hanging
        call.run(**call.good())
    for _ in range(count):
        name = moments.choice(names)
        call = CALLS[name]
        given = call.good()
        mine = [a for a in given if a not in ("self", "t") and (name, a) not in USERS]
        # of two operands that are both Python's or NumPy's nothing is fp8kit's
        most = 1 if name in PYTHONS else min(len(mine), moments.randint(1, 3))
        ruined = {argument: moments.choice(JUNK) for argument in moments.sample(mine, min(len(mine), most))}
        given |= ruined
        before = call.state(given)
        faulthandler.dump_traceback_later(_HANGING, exit=True, file=sys.__stderr__)
        try:
            call.run(**given)
            worked += 1
        except (Fp8kitError, PYTHONS.get(name, Fp8kitError)):
            if call.state(given) != before:
                faults.append(f"{name}: {ruined!r:.300}: changed something before it was refused")
        except Exception as error:
            faults.append(f"{name}: {ruined!r:.300}: {type(error).__name__} {str(error)[:200]}")
        finally:
            faulthandler.cancel_dump_traceback_later()
    refused = count - worked - len(faults)
    print(f"{count} calls of {len(names)} names, {worked} worked, {refused} were refused")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="(%(default)s)")
    parser.add_argument("--files", type=int, default=10_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--calls", type=int, default=20_000, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    options = parser.parse_args()
    begin, faults = time.perf_counter(), []
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        folder = Path(place)
        (folder / "kills").mkdir()
        try:
            kill_saves.main(folder / "kills", options.kills, options.seed)
        except AssertionError as error:
            faults.append(f"kills: {error}")
        faults += damaged_files(options.files, options.seed, folder)
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            faults += random_calls(options.calls, options.seed)
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"{len(faults)} faults, {time.perf_counter() - begin:.0f} s on {os.cpu_count()} cores")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
