"""Other programs for `draftless bench --methods`: each class loads one and answers with it, in the same run and table.

    pip install --no-deps economize
    draftless bench --methods none,hf,hf-compiled,merged,docs/measure/peers.py:Economize

A class has the members of `OwnMethod` in scripts/benchmark/peers.py. vLLM cannot be one: vllm 0.33 needs
transformers < 5.21, other than Draftless in the same process, and loads weights itself instead of taking a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel


class Economize:
    """economize (https://pypi.org/project/economize, Apache-2.0): prompt lookup, up to 7 draft tokens, latest match.

    Its own `decode` is asked: on transformers 5.24 its `generate` refuses every call.
    """

    version = "economize"

    def load(self, model: PreTrainedModel, tokenizer: Any) -> None:
        import economize
        from economize.techniques.lookup import LookupConfig

        self.version = f"economize {economize.__version__}"
        if model.generation_config.do_sample:
            raise ValueError("it is asked greedily only, give --temperature 0")
        self.stops = model.generation_config.eos_token_id
        decoding = economize.DecodeConfig(cycle_length=8)  # the last token of a cycle is the model's
        self.model = economize.apply(model, LookupConfig(max_ngram=3, match="latest"), decoding=decoding)

    def answer(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[list[int]]]:
        device = next(self.model.parameters()).device
        rows = [torch.tensor(prompt, device=device) for prompt in prompts]
        return [split(row) for row in self.model.decode_batch(rows, max_new_tokens, stop=self.stops)]


def split(answer: Any) -> list[list[int]]:
    """The tokens of a `DecodeResult`, by the passes of the model. A pass begins at the position of its first token."""
    tokens = answer.tokens.view(-1).tolist()
    begins = [event.position - answer.prompt_length + 1 for event in answer.cost.events if event.kind == "exact"]
    return [tokens[begin:end] for begin, end in pairwise([0, *begins[1:], len(tokens)])]
