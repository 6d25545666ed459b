"""A small draft model with its own KV cache, run through the same code as the target.

After Leviathan et al. (2023) and Chen et al. (2023). Shapes: B rows, W paths, R read draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig

from decode import Sampling, Step, Target, Tree
from decode.devices.user_cache import print_notice
from decode.requests.numbers import check_switches
from decode.trees.noise import DRAFT, inverse_cdf, to_uniforms
from decode.trees.sampling import for_groups
from proposers.calibration import Calibration
from proposers.draft_budget import ChainAcceptance
from proposers.draft_models.retokenized import retokenize
from proposers.draft_models.texts import ModelDrafter, ReadTexts
from proposers.draft_models.vocabulary import VocabularyMap
from proposers.search import Draft, ScoredDrafter, find_noise
from proposers.tree_proposer import Inputs, Start, TreeProposer

DRAFT_LENGTH = 16  # tokens ahead, at most, unless `depth` is given
WELL_SHARED = 0.9  # of the target's tokens; with fewer of them a notice says so


class DraftProposer(TreeProposer):
    """Drafts with a smaller model.

    draft: the small model. With another tokenizer than the target's, it drafts in its own tokens, whose text is cut
    into the target's (`retokenize`); sampled chains, `MergedProposer` and logits processors draft tokens that both have
    (`VocabularyMap`). That needs `Target(model, tokenizer)` for both. Outputs may be padded to different sizes.
    depth: tokens ahead, at most.
    width: 1 drafts a chain; more a tree, in which so many paths are followed at each level and get as many next tokens.
    nodes: see `TreeProposer`.
    sampled: sample a chain at the run's temperature, top-k and top-p. A sampling target accepts more of it, and a seed
    gives another text than without a proposer.
    calibration: corrects the model's probabilities, as `draftless calibrate` measures them.
    Logits processors of transformers apply to the draft's logits too; a user's own see the text alone, as they may have
    state.

    Raises ValueError for sizes below 1, for a tree if it is sampled, and, in its first step, for a tree if the draft
    has a recurrent state and for a vocabulary whose tokens are not known.
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
        calibration: Calibration | None = None,
    ) -> None:
        depth = DRAFT_LENGTH if depth is None else depth
        super().__init__(depth=depth, width=width, ranks=width, nodes=nodes, calibration=calibration)
        check_switches(sampled=sampled)
        if sampled and width > 1:
            raise ValueError("a sampled draft is a chain; give width 1 or sampled=False")
        self.draft_model, self.sampled = draft, sampled
        self._texts = ReadTexts(draft)
        self._mapped: tuple[Any, Any] | None = None  # the tokenizers that the map was made for
        self._map: VocabularyMap | None = None  # None: they are the same
        self._acceptance = ChainAcceptance()  # of chains whose length is chosen before their tokens

    def renew(self) -> Self:
        fresh = super().renew()
        fresh._texts, fresh._acceptance = ReadTexts(self.draft_model), ChainAcceptance()
        return fresh

    def begin(self, target: Target) -> None:
        """Find the tokens that draft and target share. Raises ValueError if that cannot be told, or for a tree."""
        draft = self.draft_model
        if draft.is_recurrent and self.width > 1:
            raise ValueError(f"{draft.config.model_type} keeps a recurrent state, so it drafts chains; give width 1")
        ours, theirs = draft.tokenizer, target.tokenizer
        if None in (ours, theirs) and draft.vocabulary != target.vocabulary:
            raise ValueError(
                f"the draft model has a vocabulary of {draft.vocabulary} tokens, the target one of "
                f"{target.vocabulary}, and not both have a tokenizer, which tells what their tokens are; give both: "
                "Target(model, tokenizer)"
            )
        if self._mapped != (ours, theirs):
            self._mapped, self._map = (ours, theirs), find_map(draft, target)
            self._texts = ReadTexts(draft)
        self._texts.vocabulary = self._map
        shared = min(draft.vocabulary, target.vocabulary) if self._map is None else len(self._map.target_ids)
        if self.width > shared:
            raise ValueError(f"width is {self.width}, more than the {shared} tokens that draft and target share")
        self.draft_budget.usual_level_time = count_weights(draft.config) / count_weights(target.config)

    def observe(self, step: Step) -> None:
        """Bring the draft model's cache to the accepted tokens."""
        self._texts.observe(step)
        self._acceptance.observe(step)

    def find_device(self, target: Target) -> torch.device:
        return self.draft_model.device

    @property
    def token_map(self) -> Tensor | None:
        return self._texts.tokens

    def read_step(self, step: Step) -> Inputs:
        return {"logits": self._texts.start(step)}

    def start_drafter(self, inputs: Mapping[str, Tensor], target: Target) -> ModelDrafter:
        return self._texts.start_drafter(inputs["logits"])

    def draft(self, step: Step, levels: int, most: int) -> Tree:
        return self._sample(step, levels) if self.sampled else super().draft(step, levels, most)

    def _search(self, step: Step, levels: int, most: int, start: Start | None = None) -> Draft:
        """Another vocabulary is drafted from as it is, and the text is cut into the target's tokens then.

        Logits processors need the target's tokens, and get those that both have. So does a model with a part of its
        outputs.
        """
        is_part = self.draft_model.output_tokens is not None
        if self._map is None or is_part or any(sampling.processors for sampling in step.samplings):
            return super()._search(step, levels, most, start)
        draft = super()._search(step, levels, most, self._start_own)
        return retokenize(draft, step, self._texts, most)

    def _start_own(self, inputs: Mapping[str, Tensor], target: Target, samplings: Sequence[Sampling]) -> ScoredDrafter:
        """A drafter of the draft model's own tokens. Each gets the noise of the first target token of its text."""
        assert self._map is not None
        keys = inputs.get("keys")
        tokens = None if keys is None else self._map.place("first_tokens", inputs["roots"].device)
        inner = self._texts.start_drafter(inputs["logits"], is_own=True)
        return ScoredDrafter(inner, samplings=samplings, keys=keys, noise_tokens=tokens)

    def _choose_levels(self, most: int) -> int:
        """As many as should yield most tokens per second, if each is as likely as before."""
        levels = self.draft_budget.choose_levels(self._acceptance.expect(most)) if self.adaptive else most
        self._acceptance.draft(levels)
        return levels

    def _sample(self, step: Step, levels: int) -> Tree:
        """A chain sampled from the draft model, with its distributions for the verifier.

        Its length yields most tokens per second. It must not depend on the tokens.
        """
        levels = self._choose_levels(levels)
        roots, drafter = self.find_roots(step), self._texts.start_drafter(self._texts.start(step))
        texts = [torch.tensor(sequence, device=roots.device) for sequence in step.sequences]
        # The keys have the draft's start, too: acceptance depends on draft tokens that it then rejects.
        noise = to_uniforms(find_noise(step, levels, DRAFT).to(roots.device))
        tokens, qs = roots[:, None], list[Tensor]()
        for level in range(levels):
            if level:
                drafter.extend(torch.zeros_like(tokens[:, -1:]), tokens[:, -1:])
            prefixes = [torch.cat([text, drafted]) for text, drafted in zip(texts, tokens[:, 1:], strict=True)]
            logits = self._texts.spread(self._texts.fit(drafter.read_logits[:, 0]))
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


def has_other_tokens(draft: Target, target: Target) -> bool:
    """Whether two models are known to have different tokenizers."""
    ours: Any = draft.tokenizer
    theirs: Any = target.tokenizer
    return not (ours is None or theirs is None or ours is theirs or ours.get_vocab() == theirs.get_vocab())


def find_map(draft: Target, target: Target) -> VocabularyMap | None:
    """How the tokens of two models correspond; None if their tokenizers are the same."""
    if not has_other_tokens(draft, target):
        return None
    found = VocabularyMap(draft.tokenizer, target.tokenizer, draft.vocabulary, target.vocabulary)
    advice = "" if found.overlap >= WELL_SHARED else "; one of the same family may do better"
    print_notice(f"the draft model has another tokenizer, with {found.overlap:.0%} of the target's tokens{advice}")
    return found


def count_weights(config: PretrainedConfig) -> int:
    """About how many weights a pass reads, by the sizes in a config: packed layers do not show theirs.

    Attention, an MLP (gated if its size is given) and the output matrix; of a mixture, one expert. Of an output matrix,
    the rows of tokens that a model was trained to draft.
    """
    shape = config.to_dict()  # reading attributes that differ from layer to layer raises
    hidden, heads = config.hidden_size, shape.get("num_attention_heads") or 1
    shared = shape.get("num_key_value_heads") or heads
    size = shape.get("head_dim") or hidden // heads
    inner = shape.get("intermediate_size")
    mlp = 3 * hidden * inner if isinstance(inner, int) else 8 * hidden**2
    layer = 2 * hidden * size * (heads + shared) + mlp
    outputs = len(getattr(config, "draft_tokens", None) or ()) or config.vocab_size
    return config.num_hidden_layers * layer + outputs * hidden
