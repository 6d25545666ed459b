"""Prompts of every form that transformers' `generate` takes, with `speculate`: the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2DoubleHeadsModel, LogitsProcessor, PreTrainedModel

from decode import Proposer, Target
from proposers import DraftProposer, NGramProposer
from tests.decode.hf.test_custom_generate_outputs import assert_same
from tests.support.models import tiny
from tests.support.speculating import PROMPT, RAGGED, generate, mask_of

KINDS = ["llama", "mistral window", "gemma3_text", "gpt2"]
MASKS = {
    "right padding": [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1]],
    "triangle": torch.ones(4, 7).tril().long().tolist(),
    "zeros and holes": [[0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1, 0]],
}


# Masks and positions


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_every_form(model: PreTrainedModel, proposer: Proposer, name: str) -> None:
    mask = torch.tensor(MASKS[name])
    assert_same(model, proposer, RAGGED.clamp(min=1), attention_mask=mask)
    assert_same(model, proposer, RAGGED[2:3], attention_mask=mask[:1])


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_for_all_kinds_of_layers(kind: str, name: str) -> None:
    model, ids = tiny(kind), torch.cat([RAGGED.clamp(min=1), RAGGED.clamp(min=1)], dim=1)
    mask = torch.cat([torch.tensor(MASKS["holes"]), torch.tensor(MASKS[name])], dim=1)
    for make in (lambda: NGramProposer(length=5), lambda: DraftProposer(Target(model), width=2, depth=3, nodes=7)):
        assert_same(model, make(), ids, attention_mask=mask)


def test_own_positions(model: PreTrainedModel, proposer: Proposer) -> None:
    positions = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 2, 4, 6, 8, 10, 12], [6, 5, 4, 3, 2, 1, 0], [0] * 7])
    assert_same(model, proposer, RAGGED.clamp(min=1), attention_mask=torch.ones(4, 7).long(), position_ids=positions)
    assert_same(model, proposer, PROMPT, position_ids=positions[:1])


def test_a_model_that_computes_the_logits_of_all_tokens() -> None:
    """GPT-2 with two heads takes no `logits_to_keep`."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=None)
    model = GPT2DoubleHeadsModel(config).double().eval()
    assert_same(model, NGramProposer(length=5), RAGGED, attention_mask=mask_of(RAGGED), pad_token_id=0)


# Token types


@pytest.mark.parametrize("kind", ["gpt2", "gptj", "codegen"])
@pytest.mark.parametrize("name", ["left padding", "holes"])
def test_token_types(kind: str, name: str) -> None:
    model = tiny(kind)
    mask = mask_of(RAGGED) if name == "left padding" else torch.tensor(MASKS[name])
    types = torch.tensor([[0, 0, 1, 1, 2, 2, 3]]).expand(4, -1)
    for make in (lambda: NGramProposer(length=5), lambda: DraftProposer(Target(model), width=2, depth=3, nodes=7)):
        assert_same(model, make(), RAGGED, attention_mask=mask, token_type_ids=types)
    plain = generate(model, RAGGED, attention_mask=mask)
    assert generate(model, RAGGED, attention_mask=mask, token_type_ids=types).tolist() != plain.tolist()


def test_token_types_that_a_model_drops_are_ignored() -> None:
    model, types = tiny("ctrl"), torch.tensor([[0, 0, 1, 1, 2, 2, 3]])
    assert_same(model, NGramProposer(length=5), PROMPT, token_type_ids=types)


# Embeddings


class Length(LogitsProcessor):
    """Forces a token that tells how long the text is and how it begins."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        first = int(input_ids[0, 0]) if input_ids.numel() else 0
        return scores + 50.0 * torch.nn.functional.one_hot(
            torch.tensor((input_ids.shape[1] + first) % scores.shape[1]), scores.shape[1]
        )


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("mask", [mask_of(RAGGED), torch.tensor(MASKS["holes"])], ids=["left padding", "holes"])
def test_embeddings(model: PreTrainedModel, proposer: Proposer, mask: Tensor, with_ids: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(*RAGGED.shape, 32, generator=generator, dtype=torch.float64)
    embeddings, ids = model.get_input_embeddings()(RAGGED).detach() + noise / 4, RAGGED if with_ids else None
    assert_same(model, proposer, ids, inputs_embeds=embeddings, attention_mask=mask, repetition_penalty=1.4)
    settings = {"inputs_embeds": embeddings[1:2], "logits_processor": [Length()]}
    assert_same(model, proposer, RAGGED[1:2] if with_ids else None, **settings)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_embeddings_for_all_kinds_of_models(kind: str) -> None:
    model = tiny(kind)
    embeddings = model.get_input_embeddings()(RAGGED).detach()
    proposer = DraftProposer(Target(model), width=2, depth=3, nodes=7)
    assert_same(model, proposer, None, inputs_embeds=embeddings, attention_mask=mask_of(RAGGED))
