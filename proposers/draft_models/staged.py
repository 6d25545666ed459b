"""Staged drafts: a draft model whose own decoding is sped up by another proposer.

After Spector and Re, "Accelerating LLM Inference with Staged Speculative Decoding" (2023). The ordinary engine decodes
with the draft model until enough tokens are drafted. Beginnings of texts that it has read are not read again.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Self

import torch

from decode import Answer, Engine, Proposer, Sampling, Session, Step, Target, Tree
from decode.devices.transfer import read
from decode.prefill import Text, read_texts
from decode.request import Request
from decode.trees.noise import make_exponential
from proposers.draft_models.proposer import DraftProposer, has_other_tokens
from proposers.search import Draft, DraftToken, find_noise

SPARE = 2  # times the memory of the texts: it also holds texts that were drafted in vain
SLOTS = 256  # that a text may have in addition to its tokens


class StagedProposer(DraftProposer):
    """Drafts with a model that drafts for itself.

    draft: the model, with the target's tokenizer. inner: what drafts for it. Unless `inner` samples, the draft's text
    does not depend on it, and where the target samples, the draft knows its noise, as all drafts here do.
    depth: tokens ahead, at most. width: next tokens of each text that become nodes: its own choice and runners-up.
    nodes: the most nodes of a tree, root included. None adapts the depth to this device, down to no draft at all; trees
    then have `width` nodes a level.

    Raises ValueError for sizes below 1 and, in `begin`, for a draft model with another vocabulary.
    """

    def __init__(
        self, draft: Target, inner: Proposer, *, depth: int | None = None, width: int = 1, nodes: int | None = None
    ) -> None:
        super().__init__(draft, depth=depth, width=width, nodes=nodes)
        self.inner = inner
        self._engine: Engine | None = None
        self._bytes = 0  # of a token's keys, values and features

    def renew(self) -> Self:
        fresh = super().renew()
        fresh.inner = self.inner.renew() if hasattr(self.inner, "renew") else self.inner
        fresh._engine = None
        return fresh

    def begin(self, target: Target) -> None:
        """Raises ValueError if the draft model has another vocabulary."""
        draft, size, tokenizers = self.draft_model, target.vocabulary, (self.draft_model.tokenizer, target.tokenizer)
        if draft.vocabulary != size or (self._mapped != tokenizers and has_other_tokens(draft, target)):
            raise ValueError(
                f"a staged draft model needs the target's tokenizer and outputs; it has {draft.vocabulary} tokens, the "
                f"target {size}"
            )
        if draft.output_tokens is not None:
            raise ValueError("a staged draft model needs all its outputs: load_draft_model(name, whole=True)")
        if self.width > size:
            raise ValueError(f"width is {self.width}, more than the {size} tokens that there are")
        self._mapped = tokenizers
        if self._engine is None:
            self._engine = Engine(self.draft_model, self.inner)
            session = Session(self.draft_model, 1, self.inner.layers)
            _, features = read_texts(session, [[0]])
            self._bytes = Text((0,), session, 0, () if features is None else [features[0]]).count_bytes(slots=1)

    def observe(self, step: Step) -> None:
        self._acceptance.observe(step)

    def draft(self, step: Step, levels: int, most: int) -> Tree:
        levels, begun = self._choose_levels(levels), perf_counter()
        answers = self._decode(step, levels)
        if self.adaptive:
            self.draft_budget.take_drafting_time(perf_counter() - begun, levels)
        is_greedy = all(sampling.greedy for sampling in step.samplings)
        keys = None if is_greedy else read(find_noise(step, levels))
        rows = []
        for row, request_id in enumerate(step.request_ids):
            answer = answers[request_id].answer if request_id in answers else None
            noise = None if keys is None else keys[row]
            rows.append([] if answer is None else self._list_nodes(answer, step.samplings[row], noise))
        return Draft.of_rows(step.bonus, rows, most).largest

    def _decode(self, step: Step, levels: int) -> dict[int, Request]:
        """So many tokens of the draft model after each text, by request id; none where its context has no room."""
        assert self._engine is not None
        self._engine.scheduler.rows = max(self._engine.rows, len(step.request_ids))
        assert self._engine.prefixes is not None
        self._engine.prefixes.most = SPARE * self._bytes * sum(len(text) + levels + SLOTS for text in step.sequences)
        found = {}
        for row, (request_id, text) in enumerate(zip(step.request_ids, step.sequences, strict=True)):
            if len(text) + levels < self.draft_model.context:
                sampling, noise_id = step.samplings[row], step.requests[row].noise_id
                sampling = sampling.for_drafts if sampling.processors else sampling
                limits: dict[str, Any] = {"max_new_tokens": levels, "stop_ids": [*step.stop_ids[row]]}
                limits |= {"log_probs": self.width, "text": False}
                found[request_id] = self._engine.add(
                    [*text], request_id=request_id, noise_id=noise_id, sampling=sampling, **limits
                )
        for _ in self._engine:
            pass
        return found

    def _list_nodes(self, answer: Answer, sampling: Sampling, keys: torch.Tensor | None) -> list[DraftToken]:
        """The draft model's text and, at each of its tokens, what it would have chosen next."""
        nodes, above, score = list[DraftToken](), -1, 0.0
        for level, (token, each) in enumerate(zip(answer.tokens, answer.log_probs, strict=True)):
            likely = {**each.best, token: each.chosen}
            log_p = torch.tensor([*likely.values()])
            if not sampling.greedy and keys is not None:  # as in `search.add_noise`
                noise = make_exponential(keys[level : level + 1], torch.tensor([*likely]))[0].log().neg().float()
                log_p = (log_p + sampling.temperature * noise).log_softmax(dim=-1)
            best = len(nodes)
            nodes.append(DraftToken(token, above, score + float(log_p[[*likely].index(token)])))
            others = [(p, other) for other, p in zip(likely, log_p.tolist(), strict=True) if other != token]
            for p, other in sorted(others, reverse=True)[: self.width - 1]:
                nodes.append(DraftToken(other, above, score + p))
            above, score = best, nodes[best].score
        return nodes
