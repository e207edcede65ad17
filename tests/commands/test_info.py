"""``fp8kit info``: engines, attention, the environment."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest

from fp8kit import cache, cli
from fp8kit.backends import dispatch
from fp8kit.backends.cuda import support
from fp8kit.backends.manager import OpManager
from fp8kit.bench.report import EXTRAS, PACKAGES
from fp8kit.lru import SHAPES
from tests.support.source import ROOT


def test_info_names_every_engine_and_attention(capsys):
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "default device",
        "numpy",
        "engine reference",
        "kernels",
        "engine cuda",
        "cuBLASLt",
        "attention on cuda",
    ):
        assert word in printed
    for line in printed.splitlines():
        if "missing" in line:
            assert line.split("missing", 1)[1].strip(), f"says not what is missing: {line}"


def rows_of(printed):
    """title -> {name: rest of the row} of what info prints."""
    rows, found = {}, {}
    for line in printed.splitlines():
        if line.startswith("  "):
            name, _, rest = line.strip().partition("  ")
            rows[name] = rest.strip()
        else:
            rows = found[line] = {}
    return found


def test_info_says_once_that_there_is_no_driver(monkeypatch, capsys):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(support.ctypes, "CDLL", absent)
    assert cli.main(["info"]) == 0
    row = rows_of(capsys.readouterr().out)["engine cuda"]["driver"]
    assert row == "missing  no NVIDIA driver; install NVIDIA's driver, 580 or newer"


def test_caches_and_their_limits(capsys):
    assert cli.main(["info", "--caches"]) == 0
    disk, shapes = rows_of(capsys.readouterr().out).values()
    assert set(disk) == set(cache.FOLDERS)
    assert all("MiB" in row for row in disk.values())
    assert {"plans", "attention calls", "torch: calls of compiled models"} <= set(shapes)
    assert shapes["plans"] == f"limit {SHAPES}"


EXAMPLE = (
    "heads=32 groups=8 head_dim=128 sequence=2048 batch=4 dtype=bfloat16 mask=causal window=128,0 bias=none "
    "softmax=vanilla dropout=0.1 layout=sbhd"
)


LYING = "flash would be asked, which reads and writes the sequences where they lie"
FLASH = "flash: dtype float32: tensor cores take bfloat16 and float16"
# question -> what speaks against cuDNN before it is asked; of several paths each
QUESTIONS = {
    "softcap=50": "softcap 50.0: cuDNN is not used with it",
    EXAMPLE: None,
    "": None,
    "layout=thd mask=padding_causal sequence=100 head_dim_v=64": LYING,
    "dtype=float32": f"dtype float32: cuDNN takes bfloat16 and float16; {FLASH}",
    "bias=alibi softmax=learnable": (
        "bias 'alibi': cuDNN is not used with it; softmax_type 'learnable': cuDNN is not used with it"
    ),
    "bias=post_scale_bias mask=no_mask": "bias 'post_scale_bias': cuDNN is not used with it",
    "mask=arbitrary head_dim=20": (
        "head_dim 20: cuDNN takes multiples of 8 up to 256; mask 'arbitrary': "
        "cuDNN is not used with a mask array; "
        "flash: head_dim 20: multiples of 8 up to 256; head_dim_v 20: multiples of 8 up to 256"
    ),
    "mask=causal_bottom_right sequence=64 sequence_kv=32": (
        "a row that sees no column: cuDNN gives NaN for it"
    ),
    "mask=no_mask window=8,-1 bottom_right=false sequence=64 sequence_kv=32": (
        "a row that sees no column: cuDNN gives NaN for it"
    ),
}


@pytest.mark.parametrize("asked", QUESTIONS)
def test_info_explains_an_attention(asked, monkeypatch, capsys):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    assert cli.main(["info", "--attention", *([asked] if asked else [])]) == 0
    found = rows_of(capsys.readouterr().out)
    assert found["attention on cpu"] == {
        "forward": "runs     reference.attention_fwd",
        "backward": "runs     reference.attention_bwd",
    }
    why = QUESTIONS[asked]
    taken = "unfused" if why and "flash:" in why else "flash"
    said = "cuDNN would be asked" if why is None else f"{taken} would be asked, not cuDNN: {why}"
    said = LYING if why == LYING else said
    wanted = f"missing  no usable CUDA device; on one {said}"
    assert found["attention on cuda"] == dict.fromkeys(
        ("forward", "backward", "deterministic backward"), wanted
    )


DROPS = "cuDNN would drop other weights than the emulation does"
FP8_QUESTIONS = {
    "fp8=hybrid sequence=100": ("too small to be worth a graph",) * 2,
    "fp8=e4m3": ("no usable CUDA device",) * 2,
    "fp8=hybrid head_dim=64": ("no usable CUDA device", "head_dim 64: cuDNN's backward takes 128"),
    "fp8=hybrid softcap=30": ("softcap 30.0: cuDNN has none in FP8",) * 2,
    "fp8=hybrid dropout=0.1": (f"dropout: {DROPS}", f"dropout: {DROPS}"),
    "fp8=hybrid head_dim=40": (
        "head_dim 40: cuDNN takes multiples of 16 up to 256",
        "head_dim 40: cuDNN's backward takes 128",
    ),
    "fp8=hybrid mask=no_mask window=64,64 layout=bshd": (
        "a window: cuDNN's FP8 attention is used without, or causal",
    )
    * 2,
    "fp8=hybrid mask=causal_bottom_right sequence_kv=4096": (
        "a diagonal that ends at the last row and column: cuDNN takes it from Blackwell on",
    )
    * 2,
}


@pytest.mark.parametrize("asked", FP8_QUESTIONS)
def test_info_explains_an_attention_in_fp8(asked, monkeypatch, capsys):
    monkeypatch.setattr(cli.arrays.provider(cli.arrays.device("cuda")), "count", lambda: 0, raising=False)
    assert cli.main(["info", "--attention", asked]) == 0
    found = rows_of(capsys.readouterr().out)
    assert found["attention on cpu"] == dict.fromkeys(("forward", "backward"), "runs     emulated")
    forward, backward = (
        f"missing  emulation in float32, not cuDNN in FP8: {why}" for why in FP8_QUESTIONS[asked]
    )
    wanted = {"forward": forward, "backward": backward, "deterministic backward": backward}
    assert found["attention on cuda"] == wanted


def test_info_reads_words_together_or_apart(capsys):
    printed = []
    for words in ([EXAMPLE], EXAMPLE.split()):
        assert cli.main(["info", "--attention", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    for word in (*EXAMPLE.split(), "head_dim_v=128", "sequence_kv=2048", "bottom_right=default"):
        assert f" {word}" in printed[0].splitlines()[1]


REFUSED = {
    "heads": "'heads': got no =, expected key=value",
    "head=8": (
        "'head=8': got the key 'head', expected one of heads, groups, head_dim, head_dim_v, sequence, "
        "sequence_kv, batch, dtype, mask, window, bottom_right, bias, softmax, softcap, dropout, layout, "
        "fp8; did you mean heads?"
    ),
    "heads=8 heads=4": "heads: got two values, expected one",
    "heads=many": "heads: got 'many', expected a positive number",
    "groups=0": "groups: got '0', expected a positive number below 2^31, a divisor of heads",
    "sequence=99999999999": "sequence: got '99999999999', expected a positive number below 2^31",
    "groups=5": "groups: got 5, expected a divisor of 32 heads",
    "dtype=float64": "dtype: got 'float64', expected one of float32, bfloat16, float16",
    "mask=square": "mask: got 'square', expected one of no_mask, causal,",
    "window=3": "window: got '3', expected left,right",
    "window=3,-2": "window: got '3,-2', expected left,right",
    "window=3,4": (
        "window: got (3, 4), expected right -1 or 0: mask 'causal' sees nothing right of the diagonal"
    ),
    "bottom_right=maybe": "bottom_right: got 'maybe', expected one of default, true, false",
    "bottom_right=true": "bottom_right: got True, expected None or False with mask 'causal'",
    "bias=some": "bias: got 'some', expected one of none, no_bias,",
    "softmax=hard": "softmax: got 'hard', expected one of vanilla, off-by-one, learnable",
    "softcap=-1": "softcap: got -1.0, expected 0 for no cap, or a number in [1e-30, 1e+30)",
    "softcap=much": "softcap: got 'much', expected a number, 0 for no cap",
    "dropout=1": "dropout: got '1', expected a probability in [0, 1)",
    "layout=hsbd": "layout: got 'hsbd', expected one of sbhd, bshd, thd",
    "layout=thd": "mask: got 'causal', expected one of the padding masks, with layout 'thd'",
}


@pytest.mark.parametrize("asked", REFUSED)
def test_info_refuses_what_it_cannot_read(asked, capsys):
    assert cli.main(["info", "--attention", asked]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"fp8kit info --attention: {REFUSED[asked]}")
    assert said.err.count("\n") == 1
    assert not said.out


@pytest.mark.gpu
def test_info_explains_an_attention_on_a_gpu(capsys):
    """What the engine would do, by path: cuDNN takes the plain one, flash a small one, and nothing but the
    unfused path takes float32."""
    from fp8kit.backends.cuda.launch import capability

    (major, minor), own = capability(0), "Hopper"
    if (major, minor) != (9, 0):
        own = f"any chip (compute capability {major}.{minor}: they are for 9.0)"
    for asked, wanted in (
        (EXAMPLE.replace("window=128,0", "window=none"), "cuDNN"),
        ("sequence=64", f"flash with its kernels for {own}, not cuDNN: too small to be worth a graph"),
        ("dtype=float32", f"unfused, not cuDNN: dtype float32: cuDNN takes bfloat16 and float16; {FLASH}"),
    ):
        assert cli.main(["info", "--attention", asked]) == 0
        rows = rows_of(capsys.readouterr().out)["attention on cuda:0"]
        assert rows == dict.fromkeys(("forward", "backward", "deterministic backward"), f"runs     {wanted}")


BAD = {
    "FP8KIT_DEVICE": ("moon", "got 'moon', expected a name like cpu, cuda or cuda:1"),
    "FP8KIT_STRICT": ("maybe", "got 'maybe', expected 0 or 1"),
    "FP8KIT_LOG_LEVEL": ("loud", "got 'LOUD', expected DEBUG,"),
    "TE_FL_PREFER": ("speed", "got 'speed', expected default, vendor or reference"),
    "FP8KIT_CACHE_DIR": (
        "/proc/none",
        "got '/proc/none', expected a folder that can be written (No such file or directory)",
    ),
    "FP8KIT_PER_OP": ("a=b", "SelectionPolicy: per_op: got 'a', expected a kernel"),
}


def test_info_tells_of_bad_settings_and_prints_the_rest(monkeypatch, capsys):
    monkeypatch.setenv("FP8KIT_PLUGIN_MODULES", "")
    for name, (value, _) in BAD.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["info"]) == 1
    said = capsys.readouterr()
    rows = rows_of(said.out)
    bad = [name for name in rows["environment"] if name in BAD]
    assert said.err.splitlines()[-1] == f"fp8kit info: {', '.join(bad)}: see environment"
    for name, (_, why) in BAD.items():
        assert rows["environment"][name].startswith(f"bad      {why}")
    assert {"machine", "libraries", "engine reference", "engine cuda", "attention asked about"} <= rows.keys()


def test_info_tells_of_a_plugin_that_failed(monkeypatch, capsys):
    monkeypatch.setenv("FP8KIT_PLUGIN_MODULES", "math,a_module_that_is_not_there")
    monkeypatch.setattr(dispatch, "_MANAGER", OpManager())
    assert cli.main(["info"]) == 1
    said = capsys.readouterr()
    row = rows_of(said.out)["environment"]["FP8KIT_PLUGIN_MODULES"]
    assert row.startswith("bad      got math (fp8kit.errors.BackendError: plugin: math: got <module 'math'")
    assert (
        "a_module_that_is_not_there (ModuleNotFoundError: No module named 'a_module_that_is_not_there'), "
        "expected modules" in row
    )
    assert said.err.splitlines()[-1] == "fp8kit info: FP8KIT_PLUGIN_MODULES: see environment"


def test_info_shows_the_settings_that_are_good(monkeypatch, capsys):
    monkeypatch.setenv("FP8KIT_DEVICE", "cpu")
    assert cli.main(["info"]) == 0
    assert rows_of(capsys.readouterr().out)["environment"]["FP8KIT_DEVICE"] == "cpu"


def test_info_lists_what_every_extra_brings(monkeypatch, capsys):
    """The table is pyproject.toml's, but for what only this project's own work needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {"": project["dependencies"], **project["optional-dependencies"]}
    for ours in ("dev", "docs", "notebooks", "test", "clients"):
        del wanted[ours]
    names = {
        extra: {re.match(r"[\w-]+", each)[0] for each in own} - {"fp8kit"} for extra, own in wanted.items()
    }
    assert {extra: set(own) for extra, own in EXTRAS.items()} == names
    real = metadata.version

    def version(name):
        if name == "flax":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.main(["info"]) == 0
    rows = rows_of(capsys.readouterr().out)["libraries"]
    assert rows.keys() == {"fp8kit", *PACKAGES}
    assert rows["flax"] == "not installed: extra flax"
    assert rows["numpy"] == real("numpy")
