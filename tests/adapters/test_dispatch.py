"""Tokens to rows by expert and back in three frontends, over the grid of their options, forward and backward,
against loops in float64."""

from __future__ import annotations

import fp8kit_jax as fj
import fp8kit_torch as ft
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import fp8kit as fk
from fp8kit import formats
from fp8kit.nn import moe
from fp8kit.testing import assert_same_bits
from fp8kit.testing.compare import assert_close, sum_slack
from tests.support.combinations import combinations

T, E, K, H = 11, 5, 2, 6
RNG = np.random.default_rng(8)
INDEX = RNG.integers(-1, E, (T, K)).astype(np.int32)  # -1 is none, and a token may choose an expert twice
MASK = RNG.random((T, E)) < 0.4
GRID = {
    "map_type": {"mask": MASK, "index": INDEX},
    "align": {"as they are": None, "aligned": 4},
    "more": {"exact": 0, "room": 5, "dropping": -4},
    "weighted": {"probs": True, "no probs": False},
    "dtype": ["float32", "bfloat16", "float16"],
}


def filled(routing, align, rows):
    """(the (row, token, slot) of each row that a token fills, the rows of each expert), of a map with so many
    rows."""
    found, sizes, start = [], [], 0
    for e in range(E):
        at = routing == e if routing is INDEX else routing & (np.arange(E) == e)
        own = np.argwhere(at).tolist()
        found += [(start + i, token, slot) for i, (token, slot) in enumerate(own) if start + i < rows]
        size = -(-len(own) // align) * align
        sizes.append(max(0, min(size, rows - start)))
        start += size
    return found, sizes


def drawn(kind, *shape):
    return RNG.standard_normal(shape).astype(formats.dtype(kind).numpy)


def native(routing, count, align, x, probs, y, merging, gradients):
    """name -> array of a call there, one back, and the gradients of both."""
    given = {"x": x, "probs": probs, "y": y, "merging": merging}
    leaf = {
        n: None if v is None else fk.tensor(v, requires_grad=True, device="cpu") for n, v in given.items()
    }
    own = routing.astype(np.uint8) if routing is MASK else routing
    more = {"num_experts": E} if routing is INDEX else {}
    rows, row_probs, row_map, none, sizes = moe.token_dispatch(
        leaf["x"], own, count, leaf["probs"], align, **more
    )
    assert none is None
    rows.backward(gradients[0], retain_graph=True)
    made = {"rows": rows, "row_map": row_map, "sizes": sizes}
    if probs is not None:
        row_probs.backward(gradients[1])
        made["row_probs"] = row_probs
    back = moe.token_combine(leaf["y"], row_map, leaf["merging"], None if merging is not None else T)
    back.backward(gradients[2])
    made |= {"back": back} | {f"d{name}": t.grad for name, t in leaf.items() if t is not None}
    return {name: value.numpy() for name, value in made.items()}


def in_torch(routing, count, align, x, probs, y, merging, gradients):
    def tensor(v):
        return torch.from_numpy(v.astype(np.float32)).to(getattr(torch, v.dtype.name))

    given = {"x": x, "probs": probs, "y": y, "merging": merging}
    leaf = {n: None if v is None else tensor(v).requires_grad_() for n, v in given.items()}
    more = {"num_experts": E} if routing is INDEX else {}
    rows, row_probs, row_map, _, sizes = ft.token_dispatch(
        leaf["x"], torch.from_numpy(routing), count, leaf["probs"], align, **more
    )
    made = {"rows": rows, "row_map": row_map, "sizes": sizes}
    rows.backward(tensor(gradients[0]), retain_graph=True)
    if probs is not None:
        row_probs.backward(tensor(gradients[1]))
        made["row_probs"] = row_probs
    kind = {"map_type": "index" if routing is INDEX else "mask", "restore_shape": (T, H)}
    back = ft.moe_unpermute(leaf["y"], row_map, leaf["merging"], **kind)
    back.backward(tensor(gradients[2]))
    made |= {"back": back} | {f"d{name}": t.grad for name, t in leaf.items() if t is not None}
    return {name: t.detach().float().numpy() for name, t in made.items()}


def in_jax(routing, count, align, x, probs, y, merging, gradients):
    more = {"num_experts": E} if routing is INDEX else {}

    @jax.jit
    def step(routing, x, probs, y, merging, gradients):
        def there(x, probs):
            rows, row_probs, row_map, _, sizes = fj.token_dispatch(x, routing, count, probs, align, **more)
            return (rows, row_probs), (row_map, sizes)

        def home(y, merging, row_map):
            return fj.token_combine(y, row_map, merging, None if merging is not None else T)

        (rows, row_probs), pull, (row_map, sizes) = jax.vjp(there, x, probs, has_aux=True)
        dx, dprobs = pull((gradients[0], None if probs is None else gradients[1]))
        back, pull = jax.vjp(lambda y, merging: home(y, merging, row_map), y, merging)
        dy, dmerging = pull(gradients[2])
        made = {"rows": rows, "row_map": row_map, "sizes": sizes, "row_probs": row_probs, "back": back}
        return made | {"dx": dx, "dprobs": dprobs, "dy": dy, "dmerging": dmerging}

    made = step(routing, x, probs, y, merging, tuple(map(jnp.asarray, gradients)))
    return {name: np.asarray(value) for name, value in made.items() if value is not None}


@combinations(GRID)
def test_grid(map_type, align, more, weighted, dtype):
    routing, slots = map_type, K if map_type is INDEX else E
    need = len(filled(routing, 1, 10**6)[0])
    count = need + more
    rows = (count + E * (align - 1)) // align * align if align else count
    pairs, sizes = filled(routing, align or 1, rows)
    x, y = drawn(dtype, T, H), drawn(dtype, rows, H)
    probs, merging = (drawn("float32", T, slots) if weighted else None for _ in range(2))
    gradients = drawn(dtype, rows, H), drawn("float32", rows), drawn(dtype, T, H)
    made = native(routing, count, align, x, probs, y, merging, gradients)

    wide = [v.astype(np.float64) for v in (x, y, *gradients)]
    x64, y64, rows_g, probs_g, back_g = wide
    row_map = np.full((rows, 2), -1)
    want = {"rows": np.zeros((rows, H)), "back": np.zeros((T, H)), "dy": np.zeros((rows, H))}
    want |= {"row_probs": np.zeros(rows), "dx": np.zeros((T, H))}
    want |= {"dprobs": np.zeros((T, slots)), "dmerging": np.zeros((T, slots))}
    size = {"back": np.zeros((T, H)), "dx": np.zeros((T, H))}
    for r, token, slot in pairs:
        row_map[r] = token, slot
        factor = merging[token, slot].astype(np.float64) if weighted else 1.0
        want["rows"][r], want["dy"][r] = x64[token], factor * back_g[token]
        want["dx"][token] += rows_g[r]
        want["back"][token] += factor * y64[r]
        size["dx"][token] += np.abs(rows_g[r])
        size["back"][token] += np.abs(factor * y64[r])
        if weighted:
            want["row_probs"][r] = probs[token, slot]
            want["dprobs"][token, slot] = probs_g[r]
            want["dmerging"][token, slot] = y64[r] @ back_g[token]
    assert_same_bits("row_map", made["row_map"], row_map.astype(np.int32))
    assert made["sizes"].tolist() == sizes
    for name, value in want.items():
        if not weighted and name in ("row_probs", "dprobs", "dmerging"):
            assert name not in made
            continue
        if name == "dmerging":
            slack = sum_slack(H * np.abs(y64).max() * np.abs(back_g).max(), H + 1)
        else:
            slack = sum_slack(size.get(name, 0.0), max(T, E) + 1) + 2.0**-24 * np.abs(value)
        assert_close(name, made[name], value, made[name].dtype.name, slack)
    for name in ("rows", "row_probs", "dprobs") if weighted else ("rows",):
        assert_same_bits(name, made[name].astype(np.float64), want[name])
    for frontend in (in_torch, in_jax):
        other = frontend(routing, count, align, x, probs, y, merging, gradients)
        assert other.keys() == made.keys()
        for name, value in made.items():
            got = other[name].astype(np.float32)
            assert_same_bits(f"{frontend.__name__}: {name}", got, value.astype(np.float32))


@pytest.mark.parametrize("dtype", GRID["dtype"])
def test_chunks_and_their_gradients(dtype):
    """Chunks put together in another order, natively, in JAX and under Transformer Engine's name."""
    sizes, order = [2, 0, 4, 3], [2, 3, 0, 1]
    x, g = (drawn(dtype, 9, H) for _ in range(2))
    rows = np.concatenate([np.split(np.arange(9), np.cumsum(sizes)[:-1])[i] for i in order])
    back = np.empty_like(g)
    back[rows] = g
    leaf = fk.tensor(x, requires_grad=True, device="cpu")
    y = moe.sort_chunks_by_index(leaf, sizes, order)
    y.backward(g)
    made = {"native": (y.numpy(), leaf.grad.numpy())}

    @jax.jit
    def step(x, g):
        y, pull = jax.vjp(lambda x: fj.sort_chunks_by_index(x, jnp.array(sizes), jnp.array(order))[0], x)
        return y, pull(g)[0]

    made["jax"] = step(x, g)
    own = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)).requires_grad_()
    y = ft.moe_sort_chunks_by_index(own, torch.tensor(sizes), torch.tensor(order))
    y.backward(torch.from_numpy(g.astype(np.float32)).to(y.dtype))
    made["torch"] = y.detach().float().numpy(), own.grad.float().numpy()
    for name, pair in made.items():
        for what, got, want in zip(("y", "dx"), pair, (x[rows], back), strict=True):
            assert_same_bits(f"{name}: {what}", np.asarray(got, np.float32), want.astype(np.float32))
