"""The contract of routers: which experts a token goes to, with what probability, and the auxiliary loss."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel, measured, workspace_of

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
MOST_EXPERTS = 1024


class Routing(NamedTuple):
    """The rule of a router.

    * ``score``: "softmax"; "sigmoid", s = 1 / (1 + exp(-x)); "sqrtsoftplus", s = sqrt(log(1 + exp(x))).
    * ``topk``: experts of a token.
    * ``groups``, ``group_topk``: the experts lie in so many groups of equal size, of which so many are kept.
      0 and 0: no groups.
    * ``before``: softmax over all experts, then top-k; otherwise top-k of the logits, then softmax over the
      chosen ones.
    * ``factor``: of the probabilities.
    * ``dense``: the scores of all experts instead, and a plain top-k beside: what the auxiliary loss reads.
    """

    score: str
    topk: int
    groups: int = 0
    group_topk: int = 0
    before: bool = False
    factor: float = 1.0
    dense: bool = False


class Routers(Protocol):
    """Routers. Arithmetic in float32."""

    @kernel(writes="probs chosen", ordered=True)
    def route(
        self,
        logits: ArrayView,
        bias: ArrayView | None,
        probs: ArrayView,
        chosen: ArrayView,
        rule: Routing,
        stream: int,
    ) -> None:
        """chosen[t, e] = 1 for the ``topk`` experts of token t with the largest keys, else 0; of equal keys
        the lowest expert is taken first, NaN after all numbers. probs[t, e]: the chosen experts'
        probabilities, 0 elsewhere. logits: h (T, E), E <= 1024; bias: float32 (E,) or None; chosen: uint8
        (T, E); probs: (T, E), logits' type or float32.

        Keys are the logits, or with ``before`` p = softmax(logits); of the other scores s + bias. A group's
        key is the sum, from the largest down, of the ``topk / group_topk`` largest keys in it; experts of
        groups that are not among the ``group_topk`` first are not chosen.

        Probabilities, each times ``factor``: p; softmax over the chosen logits; s / (sum of the chosen s +
        1e-20), with one expert s itself. ``dense``: of all experts, softmax, or s / (sum of all s + 1e-20);
        chosen: by the logits, or s, without bias and groups."""

    @kernel(writes="dlogits", ordered=True)
    def route_bwd(
        self,
        logits: ArrayView,
        chosen: ArrayView,
        dprobs: ArrayView,
        dlogits: ArrayView,
        rule: Routing,
        stream: int,
    ) -> None:
        """The gradient of ``route``'s probs, with its choice held fixed: of what is not chosen, and not
        ``dense``, dprobs is not read. dprobs: (T, E), logits' type or float32; dlogits: like logits."""

    @kernel(writes="loss", ordered=True, workspace=measured("aux_loss_workspace", "probs"))
    def aux_loss(
        self,
        probs: ArrayView,
        counts: ArrayView,
        total: ArrayView | None,
        loss: ArrayView,
        factor: float,
        workspace: ArrayView | None,
        stream: int,
    ) -> None:
        """loss = factor / total^2 * sum over t and e of probs[t, e] * counts[e], without ``total`` factor *
        the sum. probs: h (T, E); counts: int32, int64 or float32 (E,); total: int64 (1,) or None; loss: (1,),
        of probs' type. The sum of no tokens is 0."""

    @workspace_of("aux_loss")
    def aux_loss_workspace(self, rows: int, columns: int) -> int:
        """Bytes of workspace of ``aux_loss`` for probs of (rows, columns)."""

    @kernel(writes="dprobs", ordered=True)
    def aux_loss_bwd(
        self,
        dloss: ArrayView,
        counts: ArrayView,
        total: ArrayView | None,
        dprobs: ArrayView,
        factor: float,
        stream: int,
    ) -> None:
        """dprobs[t, e] = dloss * factor / total^2 * counts[e]. dloss: (1,), of dprobs' type; the others as in
        ``aux_loss``."""
