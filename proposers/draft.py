"""A small draft model with its own KV cache, run through the same code as the target.

After Leviathan et al. (2023) and Chen et al. (2023). Shapes: B rows, W paths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from decode import Sampling, Session, Step, Target, Tree
from decode.noise import DRAFT, inverse_cdf, to_uniforms
from decode.sampling import for_groups, upcast_half
from proposers.draft_budget import DraftBudget
from proposers.trees.coupled import find_coupling, find_noise

LONGEST = 16
MEMORY = 0.95  # weight of the acceptance before, per step


class DraftProposer:
    """Drafts with a smaller model.

    draft: the small model; it must share the target's tokenizer. Their outputs may be padded to different sizes: tokens
    that one of them lacks are never drafted.
    width: 1 drafts a chain; more a tree with the `width` most likely paths at each depth, as far as the budget allows.
    sampled: sample a chain at the run's temperature, top-k and top-p. A sampling target accepts more of it, and a seed
    gives another text than without a proposer.
    Logits processors of transformers apply to the draft's logits too; a user's own see the text alone, as they may have
    state.
    length: tokens ahead; None adapts it to acceptance, the size of the draft model and the target's cost curve.

    Raises ValueError for sizes below 1, for a sampled tree, and, in its first step, for another vocabulary.
    """

    layers: Sequence[int] = ()

    def __init__(self, draft: Target, *, width: int = 1, sampled: bool = False, length: int | None = None) -> None:
        if width < 1 or (length is not None and length < 1):
            raise ValueError(f"width {width} and length {length} must be at least 1")
        if sampled and width > 1:
            raise ValueError("a sampled draft is a chain; give width 1 or sampled=False")
        self.draft, self.width, self.sampled, self.length = draft, width, sampled, length
        self.adaptive = length is None  # drafts are sized by the target's cost curve
        self.draft_budget = DraftBudget()
        self._last_levels = 0
        self._accepted, self._tried = 2.4, 4.0  # decayed counts of draft tokens; a token counts if its parent was right
        self._session = DraftSession(draft)

    def begin(self, target: Target) -> None:
        """Raise ValueError unless draft and target share a vocabulary. Either may pad its output to more rows."""
        ours, theirs = self.draft.tokenizer, target.tokenizer
        if ours is not None and theirs is not None:
            if ours is not theirs and ours.get_vocab() != theirs.get_vocab():
                raise ValueError("the draft model's tokenizer is not the target's; a draft must share it")
        elif self.draft.vocabulary != target.vocabulary:
            raise ValueError(
                f"the draft model has a vocabulary of {self.draft.vocabulary} tokens, the target one of "
                f"{target.vocabulary}; a draft must share the target's tokenizer (if only the padding of their outputs "
                "differs, give both their tokenizers: Target(model, tokenizer))"
            )
        shared = min(self.draft.vocabulary, target.vocabulary)
        if self.width > shared:
            raise ValueError(f"width is {self.width}, more than the {shared} tokens of the vocabulary")
        self._level_time = count_weights(self.draft.config) / count_weights(target.config)

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        width = min(self.width, max(budget - 1, 1))
        longest = min((budget - 1) // width, max(step.room) - 1, self.length or LONGEST)
        levels = self._last_levels = self._choose_levels(longest, width) if self.adaptive else longest
        roots = torch.tensor(step.bonus, device=self.draft.device)[:, None]  # [B, 1]
        if levels == 0:
            return Tree.chain_of(roots, torch.ones_like(roots[:, 0]))
        logits = self._session.start(step)
        if self.sampled:
            return self._sample(step, roots, logits, levels)
        return self._search(step, roots, logits, levels, width)

    def _observe(self, step: Step) -> None:
        """Learn from the last draft, and bring the draft model's cache to the accepted tokens."""
        if self.adaptive:
            self.draft_budget.observe(step)
        self._session.observe(step)
        for path in step.path[: len(step.stayed)] if self._last_levels else ():
            self._accepted = MEMORY * self._accepted + len(path) - 1
            self._tried = MEMORY * self._tried + min(len(path), self._last_levels)

    def _choose_levels(self, longest: int, width: int) -> int:
        """How many levels yield most tokens per second (Leviathan et al., theorem 3.8); 0 while drafting does not pay.

        Each token counts as accepted with the same probability if its parent is.
        """
        if longest == 0 or self.draft_budget.is_backing_off():
            self.draft_budget.skip()
            return 0
        rate = self._accepted / self._tried
        expected = list(accumulate(rate**level for level in range(1, longest + 1)))
        return self.draft_budget.choose_levels(expected, width, self._level_time)

    def _search(self, step: Step, roots: Tensor, logits: Tensor, levels: int, width: int) -> Tree:
        """The most likely paths at each depth: a beam search that keeps all nodes it visited."""
        tokens, parents, scores = roots, torch.full_like(roots, -1), torch.zeros_like(roots, dtype=torch.float32)
        beam, logits, sizes = scores, logits[:, None], torch.ones_like(roots[:, 0])
        is_greedy = all(sampling.greedy for sampling in step.samplings)
        coupling = find_coupling(step.samplings, None if is_greedy else find_noise(step, levels).to(roots.device))
        tree = Tree(tokens, parents, sizes, height=0)
        for level in range(levels):
            first = tokens.shape[1] - beam.shape[1]  # node of the level before
            if any(sampling.processors for sampling in step.samplings):
                logits = _process(step, tree, logits)
            if coupling is not None:
                logits = coupling.perturb(logits, level, None)
            best = logits.float().log_softmax(dim=-1).topk(width, dim=-1)  # [B, W, W]; [B, 1, W] at first
            beam, index = (beam[:, :, None] + best.values).flatten(1).topk(width, dim=1)
            chosen = best.indices.flatten(1).gather(1, index)
            tokens = torch.cat([tokens, chosen], dim=1)
            parents = torch.cat([parents, first + index // width], dim=1)
            scores = torch.cat([scores, beam], dim=1)
            tree = Tree(tokens, parents, sizes * tokens.shape[1], height=level + 1, scores=scores)
            if level + 1 < levels:
                logits = self._session.extend(tree)
        return tree

    def _sample(self, step: Step, roots: Tensor, logits: Tensor, levels: int) -> Tree:
        """A chain sampled from the draft model, with its distributions for the verifier."""
        texts = [torch.tensor(sequence, device=roots.device) for sequence in step.sequences]
        # The keys have the draft's start, too: acceptance depends on draft tokens that it then rejects.
        noise = to_uniforms(find_noise(step, levels, DRAFT).to(roots.device))
        tokens, qs, sizes = roots, [], torch.ones_like(roots[:, 0])
        for level in range(levels):
            prefixes = [torch.cat([text, drafted]) for text, drafted in zip(texts, tokens[:, 1:], strict=True)]
            qs.append(find_q(step, logits, prefixes))
            sampled = inverse_cdf(qs[-1], noise[:, level]).clamp(max=logits.shape[1] - 1)  # all are 0 after NaN
            tokens = torch.cat([tokens, sampled[:, None]], dim=1)
            if level + 1 < levels:
                logits = self._session.extend(Tree.chain_of(tokens, sizes * tokens.shape[1]))[:, 0]
        qs.append(torch.zeros_like(qs[0]))  # nothing was sampled after the last token
        return Tree.chain_of(tokens, sizes * tokens.shape[1], q=torch.stack(qs, dim=1))


def find_q(step: Step, logits: Tensor, prefixes: Sequence[Tensor]) -> Tensor:
    """The probabilities [B, V] that draft tokens are sampled from, by logits [B, V]: q may be any distribution."""

    def find(sampling: Sampling, rows: Any) -> Tensor:
        places = range(len(prefixes))[rows] if isinstance(rows, slice) else rows
        some, ids = [prefixes[row] for row in places], [step.request_ids[row] for row in places]
        return sampling.for_drafts.probabilities(logits[rows], some, ids).nan_to_num(nan=0.0)

    return for_groups(step.samplings, find)


def _process(step: Step, tree: Tree, logits: Tensor) -> Tensor:
    """The logits [B, W, V] after the tree's last W nodes, each processed with its own prefix."""
    count = logits.shape[1]
    rows = []
    for row, sampling in enumerate(step.samplings):
        text, scores = torch.tensor(step.sequences[row][:-1], device=logits.device), upcast_half(logits[row])
        if sampling.processors:
            prefixes = [torch.cat([text, tree.tokens[row, path]]) for path in tree.ancestors[row, -count:]]
            scores = sampling.for_drafts.process(scores, prefixes, [step.request_ids[row]] * count)
        rows.append(scores)
    return torch.stack(rows)


class DraftSession:
    """A draft model's cache of the texts of one stream. Tokens are not read before a draft needs them.

    Logits have the target's vocabulary. The draft model's own output may be padded to another size.
    """

    def __init__(self, draft: Target) -> None:
        self.draft = draft
        self._session: Session
        self._read = 0  # draft tokens that were read since `start`

    def observe(self, step: Step) -> None:
        """Follow the batch, and keep what was read of the accepted tokens."""
        stayed = step.stayed
        if step.is_first:
            self._session, self._vocabulary = Session(self.draft, len(step.request_ids)), step.target.vocabulary
        else:
            paths, rows = zip(stayed, step.path, strict=False), range(len(self._session.lengths))
            # The tokens read are the first nodes of the verified tree after its root.
            accepted = {row: [node - 1 for node in path if 0 < node <= self._read] for row, path in paths}
            self._session.keep([accepted.get(row, []) for row in rows])  # before rows move
            if len(stayed) < len(rows):
                self._session.select(stayed)
            if step.joined:
                self._session.add_rows(len(step.joined))
        self._read = 0

    def start(self, step: Step) -> Tensor:
        """Read the texts to their ends, the roots. Returns the logits [B, V] after them.

        Another token stands for those that the draft model does not have.
        """
        last, lengths = self.draft.vocabulary - 1, self._session.lengths
        new = [row for row, text in enumerate(step.sequences) if lengths[row] == 0 and len(text) > 1]
        texts = [[min(token, last) for token in sequence] for sequence in step.sequences]
        if 0 < len(new) < len(texts):  # whole texts apart, so that the others need not be padded
            self._session.renew(new, [texts[row][:-1] for row in new])
        unread = [text[length:] for text, length in zip(texts, self._session.lengths, strict=True)]
        return self._fit(self._session.extend(unread)[0])

    def extend(self, tree: Tree) -> Tensor:
        """Read a draft's last level, after the levels before it. Returns the logits [B, W, V] after its tokens."""
        begin, self._read = self._read, tree.width - 1
        tokens, sizes = tree.tokens[:, 1:].clamp(max=self.draft.vocabulary - 1), tree.sizes - 1
        if tree.width == tree.height + 1:
            read = Tree.chain_of(tokens, sizes)
        else:
            read = Tree(tokens, tree.parents[:, 1:] - 1, sizes, height=tree.height - 1)
        return self._fit(self._session.verify(read, start=begin).logits)

    def _fit(self, logits: Tensor) -> Tensor:
        """The logits [..., V] of the target's vocabulary; tokens that the draft model does not have are impossible."""
        missing = self._vocabulary - logits.shape[-1]
        return logits if missing == 0 else torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


def count_weights(config: PretrainedConfig) -> int:
    """About how many weights a pass reads, by the sizes in a config: packed layers do not show theirs.

    Attention, an MLP (gated if its size is given) and the output matrix; of a mixture, one expert.
    """
    shape = config.to_dict()  # reading attributes that differ from layer to layer raises
    hidden, heads = config.hidden_size, config.num_attention_heads
    shared = shape.get("num_key_value_heads") or heads
    size = shape.get("head_dim") or hidden // heads
    inner = shape.get("intermediate_size")
    mlp = 3 * hidden * inner if isinstance(inner, int) else 8 * hidden**2
    layer = 2 * hidden * size * (heads + shared) + mlp
    return config.num_hidden_layers * layer + config.vocab_size * hidden
