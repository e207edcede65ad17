"""The tape alone, on plain numbers: it knows no array and no operation."""

from __future__ import annotations

import pytest

from fp8kit.autograd import tape
from fp8kit.autograd.tape import Edge, Node
from fp8kit.errors import AutogradError


class Leaf:
    def __init__(self) -> None:
        self.grad = 0.0

    def accumulate(self, cotangent: float) -> None:
        self.grad += cotangent


def add(a: float, b: float) -> float:
    return a + b


def scale(edge: Edge, factor: float, name: str = "scale", finish=None) -> Edge:
    return Edge(Node(name, 1, [edge], lambda g: [g[0] * factor], finish), 0)


def test_chain_and_fan_in() -> None:
    x = Leaf()
    start = Edge(x, 0)
    a, b = scale(start, 3.0), scale(start, 5.0)
    both = Edge(Node("add", 1, [a, b], lambda g: [g[0], g[0]]), 0)
    tape.run([(scale(both, 2.0), 1.0)], add)
    assert x.grad == 2.0 * (3.0 + 5.0)


def test_a_node_waits_for_all_its_users() -> None:
    """A value used by a young and an old node gets one cotangent: their sum."""
    x = Leaf()
    calls = []

    def backward(g: list[float]) -> list[float]:
        calls.append(g[0])
        return [g[0]]

    shared = Edge(Node("shared", 1, [Edge(x, 0)], backward), 0)
    old = scale(shared, 2.0)
    young = scale(old, 10.0)
    both = Edge(Node("add", 1, [young, shared], lambda g: [g[0], g[0]]), 0)
    tape.run([(both, 1.0)], add)
    assert calls == [21.0]
    assert x.grad == 21.0


def test_several_outputs_and_missing_cotangents() -> None:
    x = Leaf()
    seen = []

    def backward(g: list[float | None]) -> list[float]:
        seen.append(list(g))
        return [sum(v or 0.0 for v in g)]

    node = Node("split", 3, [Edge(x, 0)], backward)
    tape.run([(Edge(node, 0), 1.0), (Edge(node, 2), 4.0)], add)
    assert seen == [[1.0, None, 4.0]]
    assert x.grad == 5.0


def test_none_edges_and_none_gradients_stop() -> None:
    x = Leaf()
    first = Edge(Node("first", 1, [Edge(x, 0)], lambda g: [None]), 0)
    second = Edge(Node("second", 1, [None, first], lambda g: [g[0], g[0]]), 0)
    tape.run([(second, 1.0)], add)
    assert x.grad == 0.0


def test_graph_is_given_up_unless_retained() -> None:
    x = Leaf()
    root = scale(Edge(x, 0), 3.0, "triple")
    tape.run([(root, 1.0)], add, retain_graph=True)
    tape.run([(root, 1.0)], add)
    assert x.grad == 6.0
    with pytest.raises(AutogradError, match="triple: backward was already run"):
        tape.run([(root, 1.0)], add)


def test_finish_runs_once_after_all_with_distinct_items() -> None:
    x = Leaf()
    order = []
    item = object()

    def finish(items: list[object]) -> None:
        order.append(("finish", items, x.grad))

    first = scale(Edge(x, 0), 2.0, finish=(finish, item))
    second = scale(first, 2.0, finish=(finish, item))
    tape.run([(second, 1.0)], add)
    assert order == [("finish", [item], 4.0)]


def test_a_failed_walk_discards_and_gives_nothing() -> None:
    x = Leaf()
    told = []

    class Item:
        def discard(self) -> None:
            told.append("discard")

    def fail(g: list[float]) -> list[float]:
        raise ValueError("here")

    finish = (lambda items: told.append("finish"), Item())
    first = Edge(Node("fails", 1, [Edge(x, 0)], fail, (finish[0], Item())), 0)
    second = scale(first, 2.0, finish=finish)
    both = Edge(Node("both", 1, [second, Edge(x, 0)], lambda g: [g[0], g[0]]), 0)
    with pytest.raises(ValueError, match="here"):
        tape.run([(both, 1.0)], add)
    assert told == ["discard", "discard"]  # of the node that failed too
    assert x.grad == 0.0


def test_one_no_grad_object_may_be_entered_twice() -> None:
    block = tape.no_grad()
    with block, block:
        assert not tape.is_grad_enabled()
    assert tape.is_grad_enabled()
    assert block(tape.is_grad_enabled)() is False


def test_modes_nest_and_come_back_after_an_exception() -> None:
    assert tape.is_grad_enabled()
    with tape.no_grad():
        assert not tape.is_grad_enabled()
        with tape.set_grad_enabled(True):
            assert tape.is_grad_enabled()
        assert not tape.is_grad_enabled()
    with pytest.raises(ZeroDivisionError), tape.no_grad():
        _ = 1 / 0
    assert tape.is_grad_enabled()
