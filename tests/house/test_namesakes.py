"""Files of one name in two frontends are not the same text: what they share stands in fp8kit/layers."""

from __future__ import annotations

import ast
import difflib
import itertools

import pytest

from tests.support import source

FRONTENDS = {
    "native": "fp8kit/nn",
    "torch": "adapters/fp8kit_torch",
    "jax": "adapters/fp8kit_jax",
    "flax": "adapters/fp8kit_jax/flax",
    "nnx": "adapters/fp8kit_jax/nnx",
    "torch, as Transformer Engine": "adapters/fp8kit_torch/te_compat",
    "jax, as Transformer Engine": "adapters/fp8kit_jax/te_compat",
}
MOST = 0.3  # of a file's lines
SHELL = 5  # lines: a file that says what makes it a frontend's, and no more


class _Bare(ast.NodeTransformer):
    """Without strings and imports; comments are gone with the syntax tree."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None


def lines(text):
    return [line.strip() for line in ast.unparse(_Bare().visit(ast.parse(text))).splitlines() if line.strip()]


def pairs():
    for one, other in itertools.combinations(FRONTENDS, 2):
        folders = [source.ROOT / FRONTENDS[name] for name in (one, other)]
        names = set.intersection(*({path.name for path in folder.glob("*.py")} for folder in folders))
        yield from ((one, other, name) for name in sorted(names - {"__init__.py"}))


@pytest.mark.parametrize(("one", "other", "name"), list(pairs()))
def test_namesakes_differ(one, other, name):
    a, b = (lines((source.ROOT / FRONTENDS[frontend] / name).read_text()) for frontend in (one, other))
    same = sum(block.size for block in difflib.SequenceMatcher(None, a, b, False).get_matching_blocks())
    shares = {frontend: same / len(own) for frontend, own in ((one, a), (other, b)) if len(own) > SHELL}
    assert max(shares.values(), default=0) <= MOST, shares
