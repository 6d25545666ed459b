"""A batch of prompts, and transformers' `generate` with `speculate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from decode import PlainProposer, Proposer, Target, speculate
from proposers import DraftProposer, EagleProposer, HydraProposer, MedusaProposer, NGramProposer
from tests.support.drafting import make_head
from tests.support.models import VOCABULARY, tiny

NEW = 16  # tokens to make
PROMPT = torch.tensor([[5, 9, 5, 9, 5, 30, 31]])
BATCH = torch.tensor([[0, 0, 0, 5, 9, 5, 9], [7, 8, 9, 10, 11, 7, 8], [0, 4, 20, 21, 4, 20, 21]])
MASK = (BATCH != 0).long()
RAGGED = torch.cat([BATCH, torch.tensor([[0, 0, 0, 0, 0, 0, 11]])])  # 4 rows

# Every kind of proposer: one that drafts nothing, deterministic and sampled drafts, and heads.
MAKERS: dict[str, Callable[[Target], Proposer]] = {
    "none": lambda target: PlainProposer(),
    "ngram": lambda target: NGramProposer(length=5),
    "draft tree": lambda target: DraftProposer(Target(tiny("llama", num_hidden_layers=1)), width=3, depth=3, nodes=10),
    "itself": lambda target: DraftProposer(target, depth=6, nodes=7),
    "sampled": lambda target: DraftProposer(Target(tiny("llama", num_hidden_layers=1)), sampled=True, depth=3, nodes=4),
    "medusa": lambda target: MedusaProposer(make_head("medusa", target, output="target")),
    "hydra": lambda target: HydraProposer(make_head("hydra", target, prefix=True, output="target")),
    "eagle": lambda target: EagleProposer(make_head("eagle", target), depth=3, width=4, nodes=12),
    "eagle3": lambda target: EagleProposer(make_head("eagle3", target), depth=3),
}


def mask_of(ids: Tensor) -> Tensor:
    return (ids != 0).long()


def generate(model: PreTrainedModel, ids: Tensor = PROMPT, proposer: Proposer | None = None, **settings: Any) -> Any:
    settings = {"max_new_tokens": NEW, **settings}
    return model.generate(ids, custom_generate=speculate, proposer=proposer, **settings)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one character a token."""
    vocabulary = {character: index for index, character in enumerate(map(chr, range(32, 32 + VOCABULARY)))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token=" "))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)
