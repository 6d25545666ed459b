"""The texts of a stream as far as a draft model has read them, and the drafter that reads drafts level by level.

Shapes: B rows, W paths, R read draft tokens, D the draft model's outputs, V the target's vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from decode import Session, Step, Target, Tree
from decode.devices.transfer import read
from decode.prefill import SHORTEST, count_common, read_texts
from decode.trees.sampling import upcast_half
from proposers.draft_models.vocabulary import Children, DraftText, VocabularyMap


class ReadTexts:
    """The texts of one stream in a draft model's KV cache. Tokens are not read before a draft needs them.

    vocabulary: how the target's tokens are read; None: as they are.
    """

    def __init__(self, draft: Target) -> None:
        self.draft = draft
        self.vocabulary: VocabularyMap | None = None
        self._session: Any = None  # a `Session`, from the first step on
        self._step: Step
        self._texts: dict[int, DraftText] = {}  # by request id, with a vocabulary of its own
        self._drafter: ModelDrafter | None = None  # of the last step, if it drafted
        self.columns: Tensor | None = None  # [S] the outputs of tokens that are drafted; None: all, as far as V
        self.tokens: Tensor | None = None  # [S] the target's tokens for these

    def observe(self, step: Step) -> None:
        """Follow the batch, and keep what was read of the accepted tokens."""
        if step.is_first:
            self._begin(step)
            return
        stayed, drafter, self._drafter, self._step = step.stayed, self._drafter, None, step
        self._follow_texts(step, drafter)
        lengths = self._session.lengths
        paths: list[list[int]] = [[] for _ in lengths]
        if drafter is not None:
            paths = drafter.find_read({place: self.text(row, lengths[place]) for row, place in enumerate(stayed)})
        self._session.keep(paths)
        if len(stayed) < len(lengths):
            self._session.select(stayed)
        if step.joined:
            self._session.add_rows(len(step.joined))

    def _begin(self, step: Step) -> None:
        """Start with new texts. What they have in common with the last ones at their beginnings is not read again."""
        old = self._session
        # Where an error ended the last stream, its cache may have more rows than its last step.
        lengths = [] if old is None else old.lengths[: len(self._step.sequences)]
        known = [self.text(row)[:length] for row, length in enumerate(lengths)]
        self._drafter, self._step = None, step
        self._follow_texts(step, None)
        self._session = Session(self.draft, len(step.request_ids))
        for row in range(len(step.request_ids)):
            text = self.text(row)[:-1]
            found = [old.find_beginning(place, count_common(each, text)) for place, each in enumerate(known)]
            if (length := max(found, default=0)) >= SHORTEST:
                self._session.copy_from(old, row, found.index(length), length)

    def _follow_texts(self, step: Step, drafter: ModelDrafter | None) -> None:
        """Write what is new in each row's text in the draft's tokens, if they are others than the target's."""
        if self.vocabulary is None:
            return
        known = {} if step.is_first else self._texts
        drafted = {} if drafter is None else dict(zip(step.request_ids, drafter.list_own(step.stayed), strict=False))
        self._texts = {each: known.get(each) or DraftText(self.vocabulary) for each in step.request_ids}
        for (each, text), sequence in zip(self._texts.items(), step.sequences, strict=True):
            text.follow(sequence, drafted.get(each))

    def text(self, row: int, begin: int = 0) -> list[int]:
        """A row's text from a place on, in the draft's tokens. Another one stands for those that it does not have."""
        if self.vocabulary is not None:
            return self._texts[self._step.request_ids[row]].ids[begin:]
        last = self.draft.vocabulary - 1
        return [min(token, last) for token in self._step.sequences[row][begin:]]

    def find_unread(self, row: int) -> bytes:
        """The bytes at the end of a row's text that the draft has not read: a part of a character."""
        return self._texts[self._step.request_ids[row]].partial

    def start(self, step: Step) -> Tensor:
        """Read the texts to their ends, the roots. Returns the draft model's logits [B, D] after them."""
        rows = range(len(step.sequences))
        new = [row for row, length in enumerate(self._session.lengths) if length == 0 and len(self.text(row)) > 1]
        if 0 < len(new) < len(rows):  # whole texts apart, so that the others need not be padded
            part = self._session.open(len(new))
            read_texts(part, [self.text(row)[:-1] for row in new])
            self._session.replace(new, part, range(len(new)))
        unread = [self.text(row, length) for row, length in zip(rows, self._session.lengths, strict=True)]
        for row in rows:
            if not unread[row]:  # the root is a part of a character, which has no token yet
                self._session.rewind(row, self._session.lengths[row] - 1)
                unread[row] = self.text(row, self._session.lengths[row])
        logits, _ = read_texts(self._session, unread)
        if self.tokens is None:
            self._find_drafted(logits.device)
        return logits

    def start_drafter(self, logits: Tensor, is_own: bool = False) -> ModelDrafter:
        """Draft after the texts that were read, by the logits [B, D] after them. is_own: in the draft's own tokens."""
        self._drafter = ModelDrafter(self, self._step, logits, is_own)
        return self._drafter

    def verify(self, tree: Tree, begin: int) -> Tensor:
        """Read a draft's nodes, in its own tokens, from `begin` on. Returns the logits [B, W, D] after them."""
        return self._session.verify(tree, start=begin).logits

    def translate(self, tokens: Tensor) -> Tensor:
        """The draft's tokens for the target's that were drafted."""
        if self.vocabulary is None:
            return tokens.clamp(max=self.draft.vocabulary - 1)
        ours, theirs = (self.vocabulary.place(name, tokens.device) for name in ("draft_ids", "target_ids"))
        return ours[torch.searchsorted(theirs, tokens).clamp(max=len(theirs) - 1)]

    def _find_drafted(self, device: torch.device) -> None:
        """Find which outputs are drafted, and the target's tokens for them.

        A model that was trained to draft has a list of its tokens, and `load_draft_model` leaves out other outputs.
        """
        listed = getattr(self.draft.config, "draft_tokens", None)
        if self.vocabulary is not None:
            columns, tokens = self.vocabulary.draft_ids, self.vocabulary.target_ids
        elif listed is not None:
            columns = tokens = torch.tensor(listed)
        else:
            return
        if listed is not None:
            known = torch.isin(columns, torch.tensor(listed))
            columns, tokens = columns[known], tokens[known]
        if (outputs := self.draft.output_tokens) is not None:
            columns = torch.searchsorted(outputs, columns)
        self.columns, self.tokens = columns.to(device), tokens.to(device)

    def fit(self, logits: Tensor) -> Tensor:
        """The logits [..., S] of the tokens that are drafted."""
        return logits[..., : self._step.target.vocabulary] if self.columns is None else logits[..., self.columns]

    def spread(self, logits: Tensor) -> Tensor:
        """Fitted logits as those of the target's vocabulary [..., V]. Tokens that are not drafted are impossible."""
        size = self._step.target.vocabulary
        if self.tokens is None:
            return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
        spread = logits.new_full((*logits.shape[:-1], size), -torch.inf)
        spread[..., self.tokens] = logits
        return spread


class ModelDrafter:
    """Drafts one step with a small model, which reads each level after those before it.

    is_own: in the draft model's own tokens, all of them; else in the target's.
    """

    def __init__(self, texts: ReadTexts, step: Step, logits: Tensor, is_own: bool) -> None:
        self._texts, self._step, self.is_own = texts, step, is_own
        self.read_logits = logits[:, None]  # [B, W, D] after the paths
        nothing = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        self._tokens, self._parents = nothing, nothing  # [B, R] of the draft tokens that were read
        self._tree: Tree | None = None  # the same
        self._level = 0  # the levels that were read
        self._is_chain = True

    def logits(self, level: int) -> Tensor:
        """The logits [B, W, S], processed as the target's will be; [B, W, D] in the draft model's own tokens."""
        if self.is_own:
            return self.read_logits
        fitted = self._texts.fit(self.read_logits)
        if not any(sampling.processors for sampling in self._step.samplings):
            return fitted
        rows, drafted = [], self._texts.tokens
        for row, sampling in enumerate(self._step.samplings):
            scores = upcast_half(self._texts.spread(fitted[row]))
            if sampling.processors:
                prefixes = self._find_prefixes(row, len(scores))
                ids = [self._step.request_ids[row]] * len(scores)
                scores = sampling.for_drafts.process(scores, prefixes, ids)
            rows.append(scores[:, : fitted.shape[-1]] if drafted is None else scores[:, drafted])
        return torch.stack(rows)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        read, width = self._tokens.shape[1], self.read_logits.shape[1]
        above = parents + (read - width) if self._level else torch.full_like(parents, -1)
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._parents = torch.cat([self._parents, above], dim=1)
        sizes = torch.full_like(tokens[:, 0], read + tokens.shape[1])
        self._is_chain = self._is_chain and tokens.shape[1] == 1
        own = self._tokens if self.is_own else self._texts.translate(self._tokens)
        if self._is_chain:
            self._tree = Tree.chain_of(own, sizes)
        else:
            self._tree = Tree(own, self._parents, sizes, height=self._level)
        self.read_logits, self._level = self._texts.verify(self._tree, read), self._level + 1

    def find_read(self, accepted: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Which of the tokens that were read are in each row's text now, in its order.

        accepted: how the text goes on, in the draft's tokens, by row.
        """
        found: list[list[int]] = []
        for row, nodes in enumerate(self._nodes):
            places = {
                (parent, token): place for place, (token, parent) in reversed([*enumerate(zip(*nodes, strict=True))])
            }
            path: list[int] = []
            for token in accepted.get(row, ()):
                place = places.get((path[-1] if path else -1, token))
                if place is None:
                    break
                path.append(place)
            found.append(path)
        return found

    def list_own(self, rows: Sequence[int]) -> list[Children]:
        """What was read after each node of these rows, in the draft's own tokens."""
        nodes, found = self._nodes, list[Children]()
        for row in rows:
            children: Children = defaultdict(list)
            for place, (token, parent) in enumerate(zip(*nodes[row], strict=True)):
                children[parent].append((token, place))
            found.append(children)
        return found

    @cached_property  # once nothing more is read
    def _nodes(self) -> list[list[list[int]]]:
        """The tokens and the parents of each row's nodes that were read, the former in the draft's own tokens."""
        if self._tree is None:
            return [[[], []]] * len(self._tokens)
        nodes: list[list[list[int]]] = read(torch.stack([self._tree.tokens, self._parents], dim=1)).tolist()
        return nodes

    def _find_prefixes(self, row: int, count: int) -> list[Tensor]:
        """The texts before the next tokens of a row's paths."""
        text = torch.tensor(self._step.sequences[row], device=self._tokens.device)
        if self._tree is None:
            return [text] * count
        return [torch.cat([text, self._tokens[row, path]]) for path in self._tree.ancestors[row, -count:]]
