"""A small draft model with its own KV cache, run through the same code as the target.

After Leviathan et al. (2023) and Chen et al. (2023). Shapes: B rows, W paths, R read draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from decode import Sampling, Session, Step, Target, Tree
from decode.device.transfer import read
from decode.models.recurrent import open_session
from decode.models.user_cache import print_notice
from decode.noise import DRAFT, inverse_cdf, to_uniforms
from decode.sampling import for_groups, upcast_half
from proposers.tree_proposer import Inputs, TreeProposer
from proposers.trees.coupled import find_noise
from proposers.vocabulary import DraftText, VocabularyMap

LONGEST = 16
WELL_SHARED = 0.9  # of the target's tokens; with fewer of them a notice says so
MEMORY = 0.95  # weight of the acceptance before, per step


class DraftProposer(TreeProposer):
    """Drafts with a smaller model.

    draft: the small model. With another tokenizer than the target's, tokens of both are drafted (`VocabularyMap`); that
    needs `Target(model, tokenizer)` for both. Outputs may be padded to different sizes: tokens that one of the models
    lacks are never drafted.
    depth: tokens ahead, at most.
    width: 1 drafts a chain; more a tree, in which so many paths are followed at each level and get as many next tokens.
    nodes: see `TreeProposer`.
    sampled: sample a chain at the run's temperature, top-k and top-p. A sampling target accepts more of it, and a seed
    gives another text than without a proposer.
    Logits processors of transformers apply to the draft's logits too; a user's own see the text alone, as they may have
    state.

    Raises ValueError for sizes below 1, for a tree if it is sampled or the draft has a recurrent state, and, in its
    first step, for a vocabulary whose tokens are not known.
    """

    name = "draft"

    def __init__(
        self,
        draft: Target,
        *,
        depth: int | None = None,
        width: int = 1,
        nodes: int | None = None,
        sampled: bool = False,
    ) -> None:
        super().__init__(depth=LONGEST if depth is None else depth, width=width, ranks=width, nodes=nodes)
        if sampled and width > 1:
            raise ValueError("a sampled draft is a chain; give width 1 or sampled=False")
        if draft.is_recurrent and width > 1:
            raise ValueError(f"{draft.config.model_type} keeps a recurrent state, so it drafts chains; give width 1")
        self.draft_model, self.sampled = draft, sampled
        self._session = DraftSession(draft)
        self._mapped: tuple[Any, Any] | None = None  # the tokenizers that the map was made for
        self._map: VocabularyMap | None = None  # None: they are the same
        self._last_levels = 0  # of a sampled chain
        self._accepted, self._tried = 2.4, 4.0  # decayed counts of its tokens; one counts if its parent was right

    def renew(self) -> Self:
        fresh = super().renew()
        fresh._session = DraftSession(self.draft_model)
        fresh._last_levels, fresh._accepted, fresh._tried = 0, 2.4, 4.0
        return fresh

    def begin(self, target: Target) -> None:
        """Find the tokens that draft and target share. Raises ValueError if that cannot be told."""
        draft = self.draft_model
        ours, theirs = draft.tokenizer, target.tokenizer
        if ours is not None and theirs is not None:
            if self._mapped != (ours, theirs):
                self._mapped, self._map = (ours, theirs), find_map(draft, target)
        elif draft.vocabulary != target.vocabulary:
            raise ValueError(
                f"the draft model has a vocabulary of {draft.vocabulary} tokens, the target one of "
                f"{target.vocabulary}, and not both have a tokenizer, which tells what their tokens are; give both: "
                "Target(model, tokenizer)"
            )
        self._session.vocabulary = self._map
        shared = min(draft.vocabulary, target.vocabulary) if self._map is None else len(self._map.target_ids)
        if self.width > shared:
            raise ValueError(f"width is {self.width}, more than the {shared} tokens that draft and target share")
        self.draft_budget.usual_level_time = count_weights(draft.config) / count_weights(target.config)

    def observe(self, step: Step) -> None:
        """Bring the draft model's cache to the accepted tokens."""
        self._session.observe(step)
        for path in step.path[: len(step.stayed)] if self._last_levels else ():
            self._accepted = MEMORY * self._accepted + len(path) - 1
            self._tried = MEMORY * self._tried + min(len(path), self._last_levels)
        self._last_levels = 0

    def find_device(self, target: Target) -> torch.device:
        return self.draft_model.device

    def read_step(self, step: Step) -> Inputs:
        return {"logits": self._session.start(step)}

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> ModelDrafter:
        return self._session.start_drafter(inputs["logits"])

    def draft(self, step: Step, levels: int, most: int) -> Tree:
        return self._sample(step, levels) if self.sampled else super().draft(step, levels, most)

    def _sample(self, step: Step, levels: int) -> Tree:
        """A chain sampled from the draft model, with its distributions for the verifier.

        Its length yields most tokens per second (Leviathan et al., theorem 3.8) if each token is accepted with the same
        probability after an accepted one. It must not depend on the tokens.
        """
        if self.adaptive:
            rate = self._accepted / self._tried
            expected = list(accumulate(rate**level for level in range(1, levels + 1)))
            levels = self.draft_budget.choose_levels(expected)
        self._last_levels = levels
        roots, drafter = self.find_roots(step), self._session.start_drafter(self._session.start(step))
        texts = [torch.tensor(sequence, device=roots.device) for sequence in step.sequences]
        # The keys have the draft's start, too: acceptance depends on draft tokens that it then rejects.
        noise = to_uniforms(find_noise(step, levels, DRAFT).to(roots.device))
        tokens, qs = roots[:, None], list[Tensor]()
        for level in range(levels):
            if level:
                drafter.extend(torch.zeros_like(tokens[:, -1:]), tokens[:, -1:])
            prefixes = [torch.cat([text, drafted]) for text, drafted in zip(texts, tokens[:, 1:], strict=True)]
            logits = drafter.read_logits[:, 0]
            qs.append(find_q(step, logits, prefixes))
            sampled = inverse_cdf(qs[-1], noise[:, level]).clamp(max=logits.shape[1] - 1)  # all are 0 after NaN
            tokens = torch.cat([tokens, sampled[:, None]], dim=1)
        qs.append(torch.zeros_like(qs[0]))  # nothing was sampled after the last token
        return Tree.chain_of(tokens, torch.full_like(roots, levels + 1), q=torch.stack(qs, dim=1))


def find_q(step: Step, logits: Tensor, prefixes: Sequence[Tensor]) -> Tensor:
    """The probabilities [B, V] that draft tokens are sampled from, by logits [B, V]: q may be any distribution."""

    def find(sampling: Sampling, rows: Any) -> Tensor:
        places = range(len(prefixes))[rows] if isinstance(rows, slice) else rows
        some, ids = [prefixes[row] for row in places], [step.request_ids[row] for row in places]
        return sampling.for_drafts.probabilities(logits[rows], some, ids).nan_to_num(nan=0.0)

    return for_groups(step.samplings, find)


def find_map(draft: Target, target: Target) -> VocabularyMap | None:
    """How the tokens of two models correspond; None if their tokenizers are the same."""
    ours: Any = draft.tokenizer
    theirs: Any = target.tokenizer
    if ours is theirs or ours.get_vocab() == theirs.get_vocab():
        return None
    found = VocabularyMap(ours, theirs, draft.vocabulary, target.vocabulary)
    advice = "" if found.overlap >= WELL_SHARED else "; no others are drafted, so one of the same family may do better"
    print_notice(f"the draft model has another tokenizer, with {found.overlap:.0%} of the target's tokens{advice}")
    return found


class DraftSession:
    """A draft model's cache of the texts of one stream. Tokens are not read before a draft needs them.

    vocabulary: how the target's tokens are read; None: as they are. Logits have the target's vocabulary. The draft
    model's own output may be padded to another size.
    """

    def __init__(self, draft: Target) -> None:
        self.draft = draft
        self.vocabulary: VocabularyMap | None = None
        self._session: Session
        self._step: Step
        self._texts: dict[int, DraftText] = {}  # by request id, with a vocabulary of its own
        self._drafter: ModelDrafter | None = None  # of the last step, if it drafted

    def observe(self, step: Step) -> None:
        """Follow the batch, and keep what was read of the accepted tokens."""
        stayed, drafter, self._drafter, self._step = step.stayed, self._drafter, None, step
        self._follow_texts(step)
        if step.is_first:
            self._session = open_session(self.draft, len(step.request_ids))
            return
        lengths = self._session.lengths
        paths: list[list[int]] = [[] for _ in lengths]
        if drafter is not None:
            paths = drafter.find_read({place: self._text(row, lengths[place]) for row, place in enumerate(stayed)})
        self._session.keep(paths)
        if len(stayed) < len(lengths):
            self._session.select(stayed)
        if step.joined:
            self._session.add_rows(len(step.joined))

    def _follow_texts(self, step: Step) -> None:
        """Write what is new in each row's text in the draft's tokens, if they are others than the target's."""
        if self.vocabulary is None:
            return
        known = {} if step.is_first else self._texts
        self._texts = {each: known.get(each) or DraftText(self.vocabulary) for each in step.request_ids}
        for text, sequence in zip(self._texts.values(), step.sequences, strict=True):
            text.follow(sequence)

    def _text(self, row: int, begin: int = 0) -> list[int]:
        """A row's text from a place on, in the draft's tokens. Another one stands for those that it does not have."""
        if self.vocabulary is not None:
            return self._texts[self._step.request_ids[row]].ids[begin:]
        last = self.draft.vocabulary - 1
        return [min(token, last) for token in self._step.sequences[row][begin:]]

    def start(self, step: Step) -> Tensor:
        """Read the texts to their ends, the roots. Returns the logits [B, V] after them."""
        rows = range(len(step.sequences))
        new = [row for row, length in enumerate(self._session.lengths) if length == 0 and len(self._text(row)) > 1]
        if 0 < len(new) < len(rows):  # whole texts apart, so that the others need not be padded
            self._session.renew(new, [self._text(row)[:-1] for row in new])
        unread = [self._text(row, length) for row, length in zip(rows, self._session.lengths, strict=True)]
        for row in rows:
            if not unread[row]:  # the root is a part of a character, which has no token yet
                self._session.rewind(row, self._session.lengths[row] - 1)
                unread[row] = self._text(row, self._session.lengths[row])
        return self._fit(self._session.extend(unread)[0])

    def start_drafter(self, logits: Tensor) -> ModelDrafter:
        """Draft after the texts that were read, by the logits [B, V] after them."""
        self._drafter = ModelDrafter(self, self._step, logits)
        return self._drafter

    def verify(self, tree: Tree, begin: int) -> Tensor:
        """Read a draft's nodes from `begin` on. Returns the logits [B, W, V] after them."""
        known = tree.with_tensors({"tokens": self.translate(tree.tokens)})
        return self._fit(self._session.verify(known, start=begin).logits)

    def translate(self, tokens: Tensor) -> Tensor:
        """The draft's tokens for tokens that were drafted."""
        if self.vocabulary is None:
            return tokens.clamp(max=self.draft.vocabulary - 1)
        ours, theirs = self._shared(tokens.device)
        return ours[torch.searchsorted(theirs, tokens).clamp(max=len(theirs) - 1)]

    def _shared(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The shared tokens [S] as the draft's and the target's, the latter in order."""
        assert self.vocabulary is not None
        return self.vocabulary.draft_ids.to(device), self.vocabulary.target_ids.to(device)

    def _fit(self, logits: Tensor) -> Tensor:
        """The logits [..., V] of the target's vocabulary; tokens that the draft model does not have are impossible."""
        size = self._step.target.vocabulary
        if self.vocabulary is not None:
            ours, theirs = self._shared(logits.device)
            fitted = logits.new_full((*logits.shape[:-1], size), -torch.inf)
            fitted[..., theirs] = logits[..., ours]
            return fitted
        missing = size - logits.shape[-1]
        return logits if missing == 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class ModelDrafter:
    """Drafts one step with a small model, which reads each level after those before it."""

    def __init__(self, session: DraftSession, step: Step, logits: Tensor) -> None:
        self._session, self._step = session, step
        self.read_logits = logits[:, None]  # [B, W, V] after the paths
        nothing = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        self._tokens, self._parents = nothing, nothing  # [B, R] of the draft tokens that were read
        self._tree: Tree | None = None  # the same
        self._level = 0  # the levels that were read
        self._is_chain = True

    def logits(self, level: int) -> Tensor:
        """The logits [B, W, V], processed as the target's will be."""
        if not any(sampling.processors for sampling in self._step.samplings):
            return self.read_logits
        rows = []
        for row, sampling in enumerate(self._step.samplings):
            scores = upcast_half(self.read_logits[row])
            if sampling.processors:
                prefixes = self._find_prefixes(row, len(scores))
                ids = [self._step.request_ids[row]] * len(scores)
                scores = sampling.for_drafts.process(scores, prefixes, ids)
            rows.append(scores)
        return torch.stack(rows)

    def extend(self, parents: Tensor, tokens: Tensor) -> None:
        read, width = self._tokens.shape[1], self.read_logits.shape[1]
        above = parents + (read - width) if self._level else torch.full_like(parents, -1)
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._parents = torch.cat([self._parents, above], dim=1)
        sizes = torch.full_like(tokens[:, 0], read + tokens.shape[1])
        self._is_chain = self._is_chain and tokens.shape[1] == 1
        if self._is_chain:
            self._tree = Tree.chain_of(self._tokens, sizes)
        else:
            self._tree = Tree(self._tokens, self._parents, sizes, height=self._level)
        self.read_logits, self._level = self._session.verify(self._tree, read), self._level + 1

    def find_read(self, accepted: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Which of the tokens that were read are in each row's text now, in its order.

        accepted: how the text goes on, in the draft's tokens, by row.
        """
        tokens, parents = read(torch.stack([self._session.translate(self._tokens), self._parents])).tolist()
        found: list[list[int]] = []
        for row, nodes in enumerate(zip(tokens, parents, strict=True)):
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

    def _find_prefixes(self, row: int, count: int) -> list[Tensor]:
        """The texts before the next tokens of a row's paths."""
        text = torch.tensor(self._step.sequences[row], device=self._tokens.device)
        if self._tree is None:
            return [text] * count
        return [torch.cat([text, self._tokens[row, path]]) for path in self._tree.ancestors[row, -count:]]


def count_weights(config: PretrainedConfig) -> int:
    """About how many weights a pass reads, by the sizes in a config: packed layers do not show theirs.

    Attention, an MLP (gated if its size is given) and the output matrix; of a mixture, one expert.
    """
    shape = config.to_dict()  # reading attributes that differ from layer to layer raises
    hidden, heads = config.hidden_size, shape.get("num_attention_heads") or 1
    shared = shape.get("num_key_value_heads") or heads
    size = shape.get("head_dim") or hidden // heads
    inner = shape.get("intermediate_size")
    mlp = 3 * hidden * inner if isinstance(inner, int) else 8 * hidden**2
    layer = 2 * hidden * size * (heads + shared) + mlp
    return config.num_hidden_layers * layer + config.vocab_size * hidden
