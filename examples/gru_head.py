"""A kind of head of your own: a GRU that drafts level by level. No file of Draftless changes.

draftless train --kind examples/gru_head.py:Gru --data answers.jsonl --out my-gru
draftless calibrate --kind examples/gru_head.py:Gru --head my-gru --prompt-file others.jsonl
draftless check my-gru --kind examples/gru_head.py:Gru
draftless generate --proposer examples/gru_head.py:Gru --head my-gru --prompt "Why is the sky blue?"

Shapes: B rows, W paths, R anchors, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decode import Target
from heads import Kind
from heads.vocabulary import HeadConfig, Output, VocabularyHead
from proposers import HeadProposer
from training.objectives import Objective
from training.teacher import Batch

LEVELS = 4  # of a draft


@dataclass(frozen=True)
class GruConfig(HeadConfig):
    """Sizes of a GRU head. All come from the target."""

    output: Output = "target"


class GruHead(VocabularyHead):
    """A gated recurrent unit (Cho et al., 2014): its first state is the target's feature, its inputs are the tokens."""

    kind = "gru"

    def __init__(self, config: GruConfig) -> None:
        super().__init__(config, config.output)
        size = config.hidden_size
        self.gates, self.change = nn.Linear(2 * size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The states [..., H] after tokens, by their embeddings [..., H] and the states [..., H] before them."""
        keep, reset = self.gates(torch.cat([embedded, states], dim=-1)).sigmoid().chunk(2, dim=-1)
        new = self.change(torch.cat([embedded, reset * states], dim=-1))
        return keep * states + (1 - keep) * new


class GruProposer(HeadProposer):
    """Drafts with a `GruHead`: one pass over all paths a level."""

    levels, usual_width = LEVELS, 8

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> GruDrafter:
        return GruDrafter(self, target, inputs["last"], inputs["roots"])


class GruDrafter:
    """Drafts one step after roots [B], the tokens after the target's last features [B, H]."""

    def __init__(self, proposer: GruProposer, target: Target, features: Tensor, roots: Tensor) -> None:
        self.head, self.embed = proposer.head, proposer.embedding(target)
        self.states = self.head(self.embed(roots), features)[:, None]  # [B, W, H]

    def logits(self, level: int) -> Tensor:
        logits: Tensor = self.head.logits(self.states)
        return logits

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        above = self.states.gather(1, parents[..., None].expand(-1, -1, self.states.shape[2]))
        self.states = self.head(self.embed(tokens), above)


class GruObjective(Objective):
    """The loss of a `GruHead` along the text's own tokens, from each token of an answer."""

    def draft(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        row, column = batch.answers.nonzero(as_tuple=True)  # [R] of the anchors
        states, answers = batch.features[row, column], nn.functional.pad(batch.answers, (0, LEVELS + 1))
        for place in range(1, LEVELS + 1):
            inside = answers[row, column + place]
            row, column, states = row[inside], column[inside], states[inside]
            states = self.head(self.embed(batch.tokens[row, column + place]), states)
            yield states, row, column + place


class Gru(Kind):
    """What Draftless must know."""

    network, config, proposer, objective = GruHead, GruConfig, GruProposer, GruObjective
