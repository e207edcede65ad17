"""The contract of casts by blocks of any rule, and of rotations before them."""

from __future__ import annotations

from typing import Protocol

from fp8kit.arrays import ArrayView
from fp8kit.backends.protocol.spec import kernel
from fp8kit.quantization import Quantizer


class BlockCasts(Protocol):
    """Rotations, and casts whose blocks have scales of any rule.

    ``along`` says where a matrix's contraction lies: 1, its last dimension, 0, its first. ``signs`` of a
    rotation are "plus", "te" or "random". The random sign of index k along the contraction is bit k % 32 of
    the word of element 2**63 + k // 32 of ``rng``'s stream, 1 for minus: the same for every matrix.
    """

    @kernel(writes="out", updates="amax", exact=True)
    def rotate(
        self,
        x: ArrayView,
        out: ArrayView | None,
        amax: ArrayView | None,
        n: int,
        signs: str,
        along: int,
        rng: ArrayView | None,
        stream: int,
    ) -> None:
        """out = x rotated, ``fp8kit.blocks.hadamard`` along the contraction: n neighbours, counted from
        index 0, are rotated together, those behind the last whole n stay as they are. x: h (M, N); out: x's
        dtype or float32 (M, N), rounded once; amax: float32 [1], max|rotated| before that rounding. n: 16,
        32, 64 or 128. rng: of signs "random", else None."""

    @kernel(writes="out", exact=True)
    def rotate_back(
        self,
        x: ArrayView,
        out: ArrayView,
        inside: ArrayView | None,
        n: int,
        signs: str,
        along: int,
        rng: ArrayView | None,
        stream: int,
    ) -> None:
        """out = what ``rotate`` rotates to x, by the same arguments: x's neighbours are combined as there,
        their signs follow. x: h (M, N); out: h (M, N), rounded once; n: 16, 32, 64, 128, or 0: nothing is
        rotated. inside: uint8 (M, N) or None: an element of x counts as 0 where it is 0."""

    @kernel(writes="q scale_inv scale_codes values tensor_scale_inv inside", exact=True)
    def cast_blocks(
        self,
        x: ArrayView,
        q: ArrayView | None,
        scale_inv: ArrayView | None,
        scale_codes: ArrayView | None,
        values: ArrayView | None,
        tensor_amax: ArrayView | None,
        tensor_scale_inv: ArrayView | None,
        quantizer: Quantizer,
        along: int,
        draw: int,
        rng: ArrayView | None,
        inside: ArrayView | None,
        stream: int,
    ) -> None:
        """One orientation of x, h (M, N), cast by a quantizer of granularity mx_*, nvfp4_*, moss_* or
        block_*, any ``Format``. Its tiles lie along the contraction: (rows, columns) of ``quantizer.tile``
        with ``along`` 1, (columns, rows) with 0; those at the end may be smaller. What it says of the scale's
        source is not looked at: scales follow from the tiles themselves.

        First x is rotated, as ``rotate`` does, where ``quantizer.hadamard`` is not 0; nothing is rounded
        between that and the cast. Then, tile by tile, amax = max|tile|, at least ``quantizer.epsilon``, and

        * mx_*, rules floor, ceil, even, rceil, te: code = ``blocks.scale_bytes(amax)``, scale and scale_inv
          ``blocks.scales_of_bytes(code)``. NaN in a tile makes its code 0xFF and all its codes those of NaN;
          so does Inf, but for rule te. Rule gauss: code by ``blocks.gauss_bytes``.
        * nvfp4_*, rule exact: code, scale, scale_inv by ``blocks.nvfp4_scales``, of E4M3. tensor_amax,
          float32 [1]: the amax of the whole (rotated) matrix, read. tensor_scale_inv, float32 [1]: D. NaN in
          a tile makes its code E4M3's NaN and all its codes those of NaN. Of nvfp4_row_* both have a number
          for each line along the contraction, which takes the matrix's part.
          Rules 4over6_*: by ``blocks.four_over_six``; a square's rows are those of x, whatever ``along``.
          Rule eden: by ``blocks.eden``, with the word of a block's first element, below, and the size of the
          rotation as the group, 16 without one.
        * moss_*, rules floor, ceil, even, rceil, te: tensor_amax as of nvfp4_*; S, D by
          ``blocks.nvfp4_tensor_scale`` with the bound 1; code = ``blocks.scale_bytes(amax * S)``, scale and
          scale_inv those of mx_* times S and D, scale at most float32's largest value.
        * block_*, rules exact and power_2: ``scale_from_amax`` with value_for_inf = the largest finite value
          of x's dtype; NaN is ignored in the amax. No code. With a tensor_amax, float32 [1], every tile's
          amax is at least that, and value_for_inf float32's: with the amax that ``rotate`` gives of the whole
          matrix all tiles have the matrix's scale.

        With ``quantizer.factor`` f scale is multiplied by f, up to float32's largest value, scale_inv and
        tensor_scale_inv by r = float32(1 / f); of mx_* tensor_scale_inv, float32 [1], may be given: r.

        Then q = encode(x * scale), saturating, as ``quantize``: nearest, even or, with ``quantizer.ties``
        "down", toward zero where both codes are as near, or stochastic by
        ``quantizer.stochastic_bits`` bits of word draw * 2**48 + row * N + column of ``rng``: casts of one
        operation have numbers ``draw`` of their own, 0 to 32767.

        q: uint8 (M, N). scale_inv: float32, scale_codes: uint8, one element a tile, tiles row-major; of no
        tiles nothing is written. values: x's dtype (M, N): decode(q) * scale_inv in float32, rounded once;
        of nvfp4_*, moss_* and mx_* decode(q) * the code's value, which is exact in float32: what is left is
        to multiply a product by tensor_scale_inv. inside: uint8 (M, N): 1 where |x * scale| is at most the
        format's largest value, else 0."""
