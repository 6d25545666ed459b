"""Drafts in a draft model's own tokens, as trees of the target's.

A draft token need not be one token of the target. So the text of each path is cut by the target's tokenizer, as in
"string-level exact match" (Timor et al., 2025, algorithm 2). Where a text ends, its last token is uncertain: more text
may join it ("wor|ld"). So paths are cut with and without their last draft token, and with and without the text before
them. All of these are branches of one tree, and one pass verifies them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode import Step
from decode.devices.transfer import read
from proposers.draft_models.texts import ReadTexts
from proposers.draft_models.vocabulary import VocabularyMap, cut_character
from proposers.search import Draft, DraftToken

BEFORE = 8  # tokens of the text before a draft that are cut together with it


def retokenize(draft: Draft, step: Step, texts: ReadTexts, nodes: int) -> Draft:
    """The best trees of at most `nodes` nodes in the target's tokens, for a draft in the draft model's own.

    A node's score is that of the draft token with its last byte.
    """
    found = draft.largest
    assert found.scores is not None and texts.vocabulary is not None
    parts = found.tokens, found.parents, found.scores, found.sizes[:, None].expand_as(found.tokens)
    numbers = torch.stack([part.double() for part in parts])
    rows = []
    for row, (tokens, parents, scores, sizes) in enumerate(read(numbers).transpose(0, 1).tolist()):
        before, partial = step.sequences[row][-BEFORE:], texts.find_unread(row)
        drafted = [
            DraftToken(int(token), int(parent), score)
            for token, parent, score in zip(tokens, parents, scores, strict=True)
        ]
        branches = Branches(texts.vocabulary, before, partial)
        branches.add_paths(drafted[: int(sizes[0])])
        rows.append(branches.nodes)
    return Draft.of_rows(step.bonus, rows, nodes, draft)


class Branches:
    """A tree of target tokens that grows by the cuts of texts.

    before: the target's tokens before the draft. partial: the bytes at their end that the draft model has not read.
    """

    def __init__(self, vocabulary: VocabularyMap, before: Sequence[int], partial: bytes) -> None:
        self._map, self._partial = vocabulary, partial
        data = b"".join(vocabulary.bytes_of.get(token, b"") for token in before)
        self._before = data[: len(data) - len(partial)].lstrip(bytes(range(0x80, 0xC0)))  # begins with a character
        self._numbers: dict[tuple[int, int], int] = {}  # by parent's number and token
        self.nodes: list[DraftToken] = []  # parents first

    def add_paths(self, drafted: Sequence[DraftToken]) -> None:
        """Add the cuts of all paths of a draft, whose first node is the root."""
        texts: list[list[tuple[int, float]] | None] = [[]]  # by node: where each draft token ends, and its score
        data, ends = [b""], dict[int, int]()  # ends: by node, the special token that it is
        for token, parent, score in drafted[1:]:
            above, known = texts[parent], self._map.draft_bytes.get(token, b"")
            special = self._map.target_specials.get(token)
            is_text = above is not None and parent not in ends and (known or special is not None)
            if special is not None:
                ends[len(texts)] = special
            data.append(data[parent] + known)
            texts.append([*above, (len(data[-1]), score)] if is_text and above is not None else None)
        leaves = {*range(1, len(drafted))} - {node.parent for node in drafted}
        for node in sorted(leaves | {drafted[leaf].parent for leaf in leaves} - {0}):
            if (path := texts[node]) is not None:
                self._add(data[node], path, ends.get(node))

    def _add(self, data: bytes, path: Sequence[tuple[int, float]], special: int | None) -> None:
        """Add the cuts of one path, and the special token at its end."""
        if not data.startswith(self._partial[: len(data)]):
            return  # it does not go on with the character
        complete, rest = cut_character(data)
        offset = len(self._partial)
        text = complete[offset:]
        for ids in self._map.cut(text, self._before, self._partial) if text else [[]]:
            number, end = -1, offset
            for token in ids:
                end += len(self._map.bytes_of[token])
                number = self._enter(number, token, next(score for last, score in path if last >= end))
            if special is not None and not rest:
                self._enter(number, special, path[-1][1])

    def _enter(self, parent: int, token: int, score: float) -> int:
        number = self._numbers.setdefault((parent, token), len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(DraftToken(token, parent, score))
        elif self.nodes[number].score < score:
            self.nodes[number] = DraftToken(token, parent, score)
        return number
