"""Models that are cut out of others: the layers that were chosen, with the other model's weights, which stay as they
are."""

from __future__ import annotations

import pytest
import torch

from decode import Target, generate
from tests.support.models import tiny
from training.cut_model import cut_model

# Models whose layers differ from each other have lists of their kinds in the config.
KINDS = {"llama": 4, "gpt2": 4, "gpt_neox": 4, "gemma3_text": None, "qwen3_5_text": None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_model_is_the_one_that_its_config_describes(kind: str) -> None:
    count = KINDS[kind]
    model = tiny(kind, **({} if count is None else {"num_hidden_layers": count}))
    last = model.config.num_hidden_layers - 1
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tokens = torch.arange(3, 13)[None]
    whole = model(input_ids=tokens).logits
    cut = cut_model(model, [0, last])
    rebuilt = type(cut)(cut.config).to(cut.dtype).eval()
    rebuilt.load_state_dict(cut.state_dict())
    torch.testing.assert_close(cut(input_ids=tokens).logits, rebuilt(input_ids=tokens).logits, rtol=1e-4, atol=1e-5)
    assert cut.config.num_hidden_layers == 2 and model.config.num_hidden_layers == last + 1
    shared = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in cut.parameters()} <= shared
    torch.testing.assert_close(before, model.state_dict())
    torch.testing.assert_close(model(input_ids=tokens).logits, whole, rtol=0, atol=0)


def test_a_cut_model_is_a_target() -> None:
    """Its layers have places of their own in the cache."""
    model = tiny("llama", num_hidden_layers=4)
    cut = cut_model(model, [1, 3])
    prompts = [[5, 6, 7], [9, 8]]
    (one, other) = generate(Target(cut), prompts, None, max_new_tokens=9, stop_ids=())
    for prompt, answer in zip(prompts, (one, other), strict=True):
        expected = cut.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert answer.tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("layers", [[], [4], [-1], [1, 1]])
def test_layers_that_are_not_there(layers: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot be cut out of a model with layers 0 to 3"):
        cut_model(tiny("llama", num_hidden_layers=4), layers)
