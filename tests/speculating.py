"""A batch of prompts, and transformers' `generate` with `speculate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode import Proposer, speculate

NEW = 16  # tokens to make
PROMPT = torch.tensor([[5, 9, 5, 9, 5, 30, 31]])
BATCH = torch.tensor([[0, 0, 0, 5, 9, 5, 9], [7, 8, 9, 10, 11, 7, 8], [0, 4, 20, 21, 4, 20, 21]])
MASK = (BATCH != 0).long()


def generate(model: PreTrainedModel, ids: Tensor = PROMPT, proposer: Proposer | None = None, **settings: Any) -> Any:
    settings = {"max_new_tokens": NEW, **settings}
    return model.generate(ids, custom_generate=speculate, proposer=proposer, **settings)
