"""Drafts whose tokens a head draws at random, from its own law, in trees of which no shape was chosen by a token in it.

For sampling: where the head's law is close to the target's, its draws are accepted more often than its likeliest tokens
are (Leviathan et al. 2023; trees of draws without replacement: Jeon et al., "RSD", 2024). What makes any verdict of
`decode.rejection` exact is that given all that was drawn before it, each token has the law that the draft reports:
whether a node is kept must not hang on its own token. Here that holds because

 1. all paths draw for themselves, in order, without replacement;
 2. the score of the j-th draw behind a path is that path's score and the chance of the j-th likeliest token there. So
    it hangs on the tokens above the node alone, and no node has a higher one than its parent or an elder sibling;
 3. hence a draft of the n best scores, ties to the earlier candidate, is one that grew node by node, the best first,
    each drawn when its turn came: what is grown next, which paths of a level are followed included, hangs on the tokens
    of better nodes, and those are drawn. Candidates that fall behind are as good as not drawn;
 4. where n was not given, growth ends at the first node that does not pay (`Pace.grow`), which is known before it is
    drawn, and not where the whole draft turned out to be worth most;
 5. how deep to draft is decided by the first level's scores, which hang on no draw at all.

A fixed tree's first n nodes need none of 2 and 3; 4 holds for them as it stands. Nor do rows of a batch that share n
break the rule: each has its i-th node at the same time, and the next is known for all.

Shapes: B rows, W paths followed at a level, R ranks (draws behind a path), M candidates, N nodes, D draft vocabulary,
V the target's vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decode import Step, Tree
from decode.noise import DRAFT, inverse_cdf, keys, stream_uniforms
from proposers.fixed_trees import Ranks
from proposers.tree_search import Candidates, Confidence

GROUP = 256  # tokens whose mass is kept as one sum
LEAST = -80.0  # log-probability that stands for none: of an infinite one, calibrations make what is not a number


@dataclass(frozen=True)
class DrawnCandidates(Candidates):
    """Candidates that were drawn, with the laws that they were drawn from.

    Of each level, the candidates [B, W] whose next tokens were drawn there (-1: the root), and the laws [B, W, D].
    """

    drawn: Sequence[tuple[Tensor, Tensor]] = ()
    ids: Tensor | None = None  # [D] the target's ids of draft ids
    vocabulary: int = 0  # V

    def tree(self, nodes: int) -> Tree:
        """The best `nodes` nodes, root included, with their laws over the target's vocabulary."""
        numbers = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        tree = replace(self._plain(), tokens=numbers).tree(nodes)
        chosen = tree.tokens[:, 1:]  # [B, N - 1]: which candidate became a node
        tokens = torch.cat([self.roots[:, None], self.tokens.gather(1, chosen)], dim=1)
        q = self._lay_out(chosen)
        if self.levels == numbers.shape[1]:  # a node a level is a chain, and that has a better rule
            return Tree.chain_of(tokens, tree.sizes, q)
        return replace(tree, tokens=tokens, q=q)

    def _plain(self) -> Candidates:
        return Candidates(self.roots, self.tokens, self.parents, self.scores, self.levels, self.ordered)

    def _lay_out(self, chosen: Tensor) -> Tensor:
        """The law behind each node, [B, N, V]; zero behind those that no path was followed from."""
        assert self.ids is not None
        batch, width = chosen.shape[0], chosen.shape[1] + 1
        place = torch.full((batch, self.tokens.shape[1] + 1), width, device=chosen.device)  # candidate -> its node
        place.scatter_(1, chosen, torch.arange(1, width, device=chosen.device).expand_as(chosen))
        place[:, -1] = 0  # the root, which candidates call -1
        rows = torch.arange(batch, device=chosen.device)[:, None, None]
        # The last place takes the laws of what was left out.
        q = self.drawn[0][1].new_zeros(batch, width + 1, self.vocabulary)
        for owners, laws in self.drawn:
            nodes = place.gather(1, owners % place.shape[1])  # [B, W]
            q[rows, nodes[:, :, None], self.ids] = laws
        return q[:, :width]


class Draws:
    """One step's draws: a row's hang on the seed, its number and its length, not on the rows beside it."""

    def __init__(self, step: Step) -> None:
        # Processors look at a text, and any law will do that the draws really come from.
        self.sampling, self.vocabulary = replace(step.sampling, processors=()), step.logits.shape[2]
        rows = zip(step.request_ids, step.sequences, strict=True)
        table = [[(self.sampling.seed, row, len(sequence), DRAFT)] for row, sequence in rows]
        self._seeds, self._used = keys(table, step.target.device)[:, 0], 0
        self._drawn: list[tuple[Tensor, Tensor]] = []

    def pick(self, logits: Tensor, ranks: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids [B, W, R] drawn behind candidates at `places` [B, W], and the R highest log-probabilities there.

        logits [B, W, D], or [B, 1, D] where all paths have the same.
        """
        laws = self.sampling.probabilities(logits.flatten(0, 1)).unflatten(0, logits.shape[:2])
        ranks = min(ranks, laws.shape[2])
        sure = laws.topk(ranks, dim=2).values.log().clamp(min=LEAST, max=0).float()
        laws = laws.expand(-1, places.shape[1], -1)
        self._drawn.append((places, laws))
        drawn = draw_in_turn(laws.flatten(0, 1), self._throw(places, ranks).flatten(0, 1))
        return drawn.unflatten(0, places.shape), sure

    def attach(self, candidates: Candidates, tokens: Callable[[Tensor], Tensor]) -> DrawnCandidates:
        """The candidates that were picked here, with their laws; `tokens` makes the target's ids of draft ids."""
        ids = tokens(torch.arange(self._drawn[0][1].shape[2], device=candidates.roots.device))
        return DrawnCandidates(**vars(candidates), drawn=self._drawn, ids=ids, vocabulary=self.vocabulary)

    def _throw(self, places: Tensor, ranks: int) -> Tensor:
        """Two new numbers for each draw, [B, W, R, 2]."""
        size = places.shape[1] * ranks * 2
        numbers = torch.arange(self._used, self._used + size, device=places.device)
        self._used += size
        return stream_uniforms(self._seeds, numbers).view(*places.shape, ranks, 2)


def draw_in_turn(laws: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [P, R] drawn without replacement from each of P laws, in the order drawn.

    laws [P, D], float64, at least 0 and not all 0; uniforms [P, R, 2] in [0, 1), float64. Tokens are found by groups,
    as `sample_siblings` needs noise for every token, and a running sum over all would be made for every draw. What was
    drawn is set to zero and its group summed anew: a sum less what was drawn would keep a rounding error in place of
    nothing. Once a law is used up the rest are tokens that it cannot give any more, which no rule offers.
    """
    size = laws.shape[1]
    groups = laws.new_zeros(len(laws), -(-size // GROUP), GROUP)  # [P, G, GROUP]
    groups.flatten(1)[:, :size] = laws
    masses = groups.sum(dim=2)  # [P, G]
    each, drawn = torch.arange(len(laws), device=laws.device), []
    for turn in range(uniforms.shape[1]):
        group = inverse_cdf(masses, uniforms[:, turn, 0]).clamp(max=groups.shape[1] - 1)
        inside = groups[each, group]  # [P, GROUP]
        token = inverse_cdf(inside, uniforms[:, turn, 1]).clamp(max=GROUP - 1)
        inside[each, token] = 0
        groups[each, group], masses[each, group] = inside, inside.sum(dim=1)
        drawn.append((group * GROUP + token).clamp(max=size - 1))
    return torch.stack(drawn, dim=1)


def foresee(pays: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
    """Whether one more level pays, as `pays` says, but asked with what the first level's scores make expect of each.

    As if all were as likely to be right as the first is: its scores [B, W] alone are known before anything is drawn.
    """
    asked: list[Tensor] = []

    def ask(scores: Tensor) -> bool:
        asked.append(scores.logsumexp(dim=1, keepdim=True).clamp(max=0) if not asked else asked[0])
        return pays(asked[0] * len(asked))

    return ask


def keep_order(confidence: Confidence) -> Confidence:
    """The same, but no later draw with more confidence than an earlier one: it could be kept without that."""
    return lambda level, sure, before: confidence(level, sure, before).cummin(dim=2).values


def renumber(paths: Sequence[Ranks]) -> tuple[Ranks, ...]:
    """The same tree with the children of each node numbered in the order in which they are listed.

    A tree of ranks may name the third without the second, but there is no third draw without a second.
    """
    names: dict[Ranks, Ranks] = {(): ()}
    children = Counter[Ranks]()
    for path in paths:
        above = names[path[:-1]]
        names[path] = (*above, children[above])
        children[above] += 1
    return tuple(names[path] for path in paths)
