"""Lookahead decoding as a proposer: its source alone, in trees of a fixed size."""

from __future__ import annotations

from proposers.merged import MergedProposer
from proposers.sources.lookahead import LookaheadSource


class LookaheadProposer(MergedProposer):
    """Drafts n-grams that the target has predicted: `LookaheadSource` alone. It needs no training.

    window, size: as in `LookaheadSource`; W and N in the paper.
    nodes: the size of every tree, root included; half of it is for the window. None is 1 + 2 x W x (N - 1): 19 by
    default, which suits a CPU. The authors take W = 7 and N = 5 for models of 7B parameters on a GPU: 57 nodes.
    The size does not adapt to the acceptance or the device: without its window a tree would learn nothing.

    Raises ValueError as `LookaheadSource` and `MergedProposer` do.
    """

    def __init__(self, window: int = 3, size: int = 4, *, nodes: int | None = None) -> None:
        source = LookaheadSource(window, size)
        super().__init__([source], nodes=1 + 2 * source.assumed if nodes is None else nodes)
