"""A small draft model with its own KV cache, run through the same target code.

After Leviathan et al. 2023 and Chen et al. 2023. Shapes: B rows, W beam width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PretrainedConfig

from decode import Session, Step, Target, Tree
from decode.noise import DRAFT, inverse_cdf, uniforms

NODE_COST = 0.05  # of a target pass: what looking at one more guess adds
LONGEST = 16
RETRY = 8  # steps between two tries, where a guess does not pay


class DraftProposer:
    """Drafts what a smaller model would say next.

    draft: the small model; same tokenizer as the target. width 1 drafts a chain; a larger one a tree with the `width`
    likeliest paths at each depth, fewer where the budget has no room for so many. sampled: draw a chain at random from
    the draft's own law (at the run's temperature, top-k, top-p), which the target accepts more of when it samples
    itself. length: tokens ahead; None adapts it to what was accepted and to how much smaller the draft is.

    Raises ValueError where draft and target do not share a vocabulary, or `sampled` is asked of a tree.
    """

    layers: Sequence[int] = ()

    def __init__(self, draft: Target, *, width: int = 1, sampled: bool = False, length: int | None = None) -> None:
        if width < 1 or (length is not None and length < 1):
            raise ValueError(f"width {width} and length {length} must be at least 1")
        if sampled and width > 1:
            raise ValueError("a sampled draft is a chain; give width 1 or sampled=False")
        self.draft, self.width, self.sampled, self.length = draft, width, sampled, length
        self.acceptance = Acceptance()
        self._session: Session

    def check(self, target: Target) -> None:
        """Raise ValueError unless draft and target share a vocabulary."""
        if self.draft.vocabulary != target.vocabulary:
            raise ValueError(
                f"the draft model has a vocabulary of {self.draft.vocabulary} tokens, the target one of "
                f"{target.vocabulary}; a draft must share the target's tokenizer"
            )
        if self.width > target.vocabulary:
            raise ValueError(f"width is {self.width}, more than the {target.vocabulary} tokens that there are")
        ours, theirs = self.draft.tokenizer, target.tokenizer
        if ours is not None and theirs is not None and ours is not theirs and ours.get_vocab() != theirs.get_vocab():
            raise ValueError("the draft model's tokenizer is not the target's; a draft must share it")

    def _observe(self, step: Step) -> None:
        self.step = step
        if step.is_prefill:
            self.check(step.target)
            self.cost = count_weights(self.draft.config) / count_weights(step.target.config)
            self._session = self.draft.open(len(step.request_ids))
            self._drafted, self._wide = 0, self.width
            return
        if len(step.kept) < len(self._session.lengths):
            self._session.select(step.kept)
        known = (self._drafted - 1) * self._wide  # the deepest guesses never went through the draft
        self._session.keep([[node - 1 for node in path[1:] if node - 1 < known] for path in step.path])
        for path in step.path:
            self.acceptance.learn(len(path) - 1, self._drafted)

    def propose(self, step: Step, budget: int) -> Tree:
        self._observe(step)
        self._wide = min(self.width, max(budget - 1, 1))
        longest = min((budget - 1) // self._wide, max(self.step.room) - 1, self.length or LONGEST)
        self._drafted = longest if self.length else self.acceptance.best_length(longest, self.cost + NODE_COST)
        roots = Tree.chain([[root] for root in self.step.bonus]).to(self.draft.device).tokens
        if self._drafted == 0:
            return Tree.chain_of(roots, torch.ones_like(roots[:, 0]))
        # The draft's cache lacks the bonus token and what was accepted without having gone through the draft.
        pending = zip(self.step.sequences, self._session.lengths, strict=True)
        logits, _ = self._session.extend([sequence[length:] for sequence, length in pending])
        return self._sample(roots, logits) if self.sampled else self._search(roots, logits)

    def _search(self, roots: Tensor, logits: Tensor) -> Tree:
        """The likeliest paths at each depth; a beam search that keeps what it passed."""
        width, batch = self._wide, len(roots)
        tokens, parents, scores = roots[:, :0], roots[:, :0], roots[:, :0].float()
        beam, logits = torch.zeros(batch, 1, device=roots.device), logits[:, None]
        sizes = torch.ones_like(roots[:, 0])
        for level in range(self._drafted):
            best = logits.float().log_softmax(dim=-1).topk(width, dim=-1)  # [B, W, W]; [B, 1, W] at first
            beam, index = (beam[:, :, None] + best.values).flatten(1).topk(width, dim=1)
            above = index // width + (level - 1) * width if level else torch.full_like(index, -1)
            tokens = torch.cat([tokens, best.indices.flatten(1).gather(1, index)], dim=1)
            parents, scores = torch.cat([parents, above], dim=1), torch.cat([scores, beam], dim=1)
            if level + 1 < self._drafted:
                grown = Tree(tokens, parents, sizes * tokens.shape[1], height=level)
                logits = self._session.verify(grown, start=level * width).logits
        root = torch.full_like(roots, -1)
        return Tree(
            tokens=torch.cat([roots, tokens], dim=1),
            parents=torch.cat([root, parents + 1], dim=1),
            sizes=sizes * (1 + tokens.shape[1]),
            height=self._drafted,
            scores=torch.cat([torch.zeros_like(scores[:, :1]), scores], dim=1),
        )

    def _sample(self, roots: Tensor, logits: Tensor) -> Tree:
        """A chain drawn from the draft's own law, with that law for the verifier."""
        sampling = replace(self.step.sampling, processors=())  # any law will do that the draws really come from
        tokens, laws, sizes = roots, [], torch.ones_like(roots[:, 0])
        for level in range(self._drafted):
            laws.append(sampling.probabilities(logits))
            # Keyed by where the draft starts, too: the verdict on this draft depends on guesses that it then rejects.
            table = [
                [(sampling.seed, row, len(sequence), DRAFT, level)]
                for row, sequence in zip(self.step.request_ids, self.step.sequences, strict=True)
            ]
            drawn = inverse_cdf(laws[-1], uniforms(table, roots.device)[:, 0])
            tokens = torch.cat([tokens, drawn[:, None]], dim=1)
            if level + 1 < self._drafted:
                grown = Tree.chain_of(tokens[:, 1:], sizes * (level + 1))
                logits = self._session.verify(grown, start=level).logits[:, 0]
        laws.append(torch.zeros_like(laws[0]))  # nothing was drawn after the last guess
        return Tree.chain_of(tokens, sizes * tokens.shape[1], q=torch.stack(laws, dim=1))


class Acceptance:
    """The chance that a guess is accepted once the one before it was, lately."""

    def __init__(self) -> None:
        self.hits, self.trials = 2.4, 4.0
        self.paused = 0

    def learn(self, accepted: int, drafted: int) -> None:
        """One draft of `drafted` tokens of which `accepted` held."""
        if drafted:
            self.hits = 0.95 * self.hits + accepted
            self.trials = 0.95 * self.trials + min(accepted + 1, drafted)

    def best_length(self, longest: int, cost: float) -> int:
        """The length with most tokens a second when each guess costs `cost` target passes (Leviathan, theorem 3.8).

        Where even one guess does not pay, none is made, but for one now and then to see whether that has changed.
        """
        rate = self.hits / self.trials
        gains = accumulate((rate**length for length in range(1, longest + 1)), initial=1.0)
        speeds = [gain / (1 + cost * length) for length, gain in enumerate(gains)]
        best = speeds.index(max(speeds))
        self.paused = 0 if best else (self.paused + 1) % RETRY
        return best if best or self.paused else min(1, longest)


def count_weights(config: PretrainedConfig) -> int:
    """About how many weights a pass reads, from the shapes in a config: packed layers no longer show theirs.

    Attention, an MLP (a gated one where its size is given) and the output matrix; of a mixture, one expert.
    """
    shape = config.to_dict()  # attributes that differ from layer to layer raise when they are read
    hidden, heads = config.hidden_size, config.num_attention_heads
    shared = shape.get("num_key_value_heads") or heads
    size = shape.get("head_dim") or hidden // heads
    inner = shape.get("intermediate_size")
    mlp = 3 * hidden * inner if isinstance(inner, int) else 8 * hidden**2
    layer = 2 * hidden * size * (heads + shared) + mlp
    return config.num_hidden_layers * layer + config.vocab_size * hidden
