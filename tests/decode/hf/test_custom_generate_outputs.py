"""What `generate` returns with `speculate`: the KV cache, scores, logits, hidden states and attentions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from decode import Proposer, Target
from proposers import DraftProposer, NGramProposer
from tests.support.models import CACHE, InDouble, tiny
from tests.support.speculating import NEW, PROMPT, RAGGED, generate, mask_of

KINDS = ["llama", "mistral window", "gemma3_text", "gpt2", "gemma3n_text", "deepseek_v3", "llama4_text"]
HALF, REST = 6, 9  # new tokens of the first call and of the second
BATCHES = {"one": PROMPT, "ragged": RAGGED}


def run_both(
    model: PreTrainedModel, proposer: Proposer | None, ids: Tensor | None, **settings: Any
) -> tuple[Any, Any, Tensor]:
    """Our result, transformers', and the mask of the prompt."""
    inputs = settings.get("inputs_embeds") if ids is None else ids
    mask = settings.get("attention_mask", torch.ones(inputs.shape[:2]).long() if ids is None else mask_of(ids))
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True, **settings}
    if not bool(mask.all()):
        settings["attention_mask"] = mask
    return generate(model, ids, proposer, **settings), model.generate(ids, **settings), mask


def assert_same(model: PreTrainedModel, proposer: Proposer | None, ids: Tensor | None, **settings: Any) -> Any:
    """The same tokens, scores, logits and cache as transformers' own decoding. Returns our result."""
    got, expected, mask = run_both(model, proposer, ids, **{"output_scores": True, **settings})
    assert got.sequences.tolist() == expected.sequences.tolist() and got.sequences.dtype == expected.sequences.dtype
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert all(one.dtype == torch.float32 and not one.is_inference() for one in ours)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert_same_cache(got[CACHE], expected[CACHE], mask)
    return got


def assert_same_cache(got: Any, expected: Any, mask: Tensor) -> None:
    """Equal keys and values in all columns that are attended to. mask: of the columns of the prompt."""
    length = int(expected.get_seq_length())
    assert type(got) is type(expected) and int(got.get_seq_length()) == length
    mask = torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1)
    for one, other in zip(got.layers, expected.layers, strict=True):
        assert type(one) is type(other)
        if isinstance(getattr(other, "keys", None), Tensor):
            real = mask[:, -one.keys.shape[2] :, None].bool()[:, None]
            assert not one.keys.is_inference()  # such tensors cannot be changed outside inference mode
            for name in ("keys", "values"):
                ours, theirs = (getattr(layer, name) * real for layer in (one, other))
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# The KV cache


@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_a_returned_cache_is_continued(model: PreTrainedModel, proposer: Proposer, ids: Tensor) -> None:
    """transformers goes on with our cache, and we with transformers'."""
    settings = {"return_dict_in_generate": True}
    whole = model.generate(ids, attention_mask=mask_of(ids), max_new_tokens=HALF + REST, **settings)
    ours, theirs, mask = run_both(model, proposer, ids, max_new_tokens=HALF)
    assert_same_cache(ours[CACHE], theirs[CACHE], mask)
    settings |= {"attention_mask": nn.functional.pad(mask, (0, HALF), value=1), "max_new_tokens": REST}
    for begun, run in ((ours, model.generate), (theirs, partial(generate, model, proposer=proposer))):
        rest = run(begun.sequences, **settings, **{CACHE: begun[CACHE]})
        assert rest.sequences.tolist() == whole.sequences.tolist()
        assert rest[CACHE] is begun[CACHE]
        assert_same_cache(rest[CACHE], whole[CACHE], mask)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_caches_of_all_kinds_of_layers(kind: str, implementation: str) -> None:
    model = tiny(kind)
    proposer = DraftProposer(Target(model), width=2, depth=3, nodes=7)
    length = RAGGED.shape[1] + HALF + REST
    for ids in BATCHES.values():
        mask = mask_of(ids)
        whole = model.generate(ids, attention_mask=mask, max_new_tokens=HALF + REST)
        if implementation == "dynamic":
            assert_same(model, proposer, ids, max_new_tokens=HALF, cache_implementation=implementation)
            cache = DynamicCache(config=model.config)
        else:
            settings = {"attention_mask": mask, "return_dict_in_generate": True}
            begun = generate(model, ids, proposer, cache_implementation=implementation, **settings)
            assert type(begun[CACHE]) is StaticCache
            cache = StaticCache(model.config, length)
        sequences = ids
        for new in (HALF, REST):
            settings = {"attention_mask": nn.functional.pad(mask, (0, sequences.shape[1] - ids.shape[1]), value=1)}
            sequences = generate(model, sequences, proposer, **settings, **{CACHE: cache}, max_new_tokens=new)
        assert sequences.tolist() == whole.tolist()


@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_new_tokens_alone_follow_a_cache(model: PreTrainedModel, proposer: Proposer, ids: Tensor) -> None:
    """A mask that is longer than the tokens says that the cache holds the others, as in transformers."""
    mask, new = nn.functional.pad(mask_of(ids), (0, 3), value=1), torch.tensor([[8, 9, 5]])
    settings, made = {"attention_mask": mask, "max_new_tokens": REST}, []
    for run in (model.generate, partial(generate, model, proposer=proposer)):
        cache, positions = DynamicCache(), (mask_of(ids).cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask_of(ids), position_ids=positions, **{CACHE: cache})
        made.append(run(new.expand(len(ids), -1), **settings, **{CACHE: cache}).tolist())
        assert cache.get_seq_length() == ids.shape[1] + 3 + REST - 1
    assert made[0] == made[1]


def test_a_cache_that_does_not_fit_is_refused(model: PreTrainedModel) -> None:
    cache = DynamicCache()
    model(PROMPT, **{CACHE: cache})
    with pytest.raises(ValueError, match="holds 7 tokens"):
        generate(model, PROMPT, **{CACHE: cache})

    class OtherLayer(DynamicLayer): ...  # as those of a quantized cache

    with pytest.raises(ValueError, match="OtherLayer"):
        generate(model, PROMPT, **{CACHE: Cache(layers=[OtherLayer(), OtherLayer()])})
    with pytest.raises(ValueError, match="holds 1 rows; the batch has 4"):
        generate(model, torch.cat([RAGGED, RAGGED], dim=1), **{CACHE: cache})


# Scores and logits


def test_the_fields_are_in_transformers_order() -> None:
    """As tuples, outputs tell them by their place."""
    model = tiny("llama", dtype=torch.float64)
    names = ("output_scores", "output_logits", "output_hidden_states", "return_dict_in_generate")
    wanted = {"max_new_tokens": 3, **dict.fromkeys(names, True)}
    expected = model.generate(PROMPT, **wanted)
    found = generate(model, **wanted)
    assert [*found] == [*expected] and len(found.to_tuple()) == len(expected.to_tuple())
    assert torch.equal(found[1][0], expected[1][0])


@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_greedy_scores_are_those_of_generate(model: PreTrainedModel, proposer: Proposer, ids: Tensor) -> None:
    for settings in ({}, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}, {"output_logits": False}):
        assert_same(model, proposer, ids, **{"output_logits": True, "max_new_tokens": 12, **settings})


@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_sampled_scores_are_those_of_generate(model: PreTrainedModel, proposer: Proposer, ids: Tensor) -> None:
    """transformers' scores of the sampled text, one token at a time."""
    settings: dict[str, Any] = {
        **{"output_scores": True, "output_logits": True, "return_dict_in_generate": True},
        **{"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3},
    }
    got = generate(model, ids, proposer, attention_mask=mask_of(ids), max_new_tokens=8, **settings)
    for index in range(8):
        mask = nn.functional.pad(mask_of(ids), (0, index), value=1)
        text = got.sequences[:, : ids.shape[1] + index]
        one = model.generate(text, attention_mask=mask, max_new_tokens=1, **settings)
        torch.testing.assert_close(got.scores[index], one.scores[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(got.logits[index], one.logits[0], rtol=0, atol=1e-5)
        assert bool((got.scores[index].gather(1, got.sequences[:, [ids.shape[1] + index]]) > -torch.inf).all())


# Hidden states and attentions


def assert_same_layers(got: Any, expected: Any, real: Tensor, name: str) -> None:
    """Equal states of each new token in each layer. The first entry also has the prompt, without its padding."""
    ours, theirs = getattr(got, name), getattr(expected, name)
    assert len(ours) == len(theirs)
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for mine, stock_states in zip(one, other, strict=True):
            assert mine.shape == stock_states.shape
            rows = real if index == 0 else torch.ones_like(real[:, :1])
            rows = rows[:, None, :, None] if name == "attentions" else rows[:, :, None]
            torch.testing.assert_close(mine * rows, stock_states * rows, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ids", BATCHES.values(), ids=BATCHES)
def test_states_and_attentions_are_those_of_generate(proposer: Proposer, ids: Tensor) -> None:
    model = tiny("llama", attn_implementation="eager")
    settings = {"output_hidden_states": True, "output_attentions": True, "max_new_tokens": 8}
    ids = ids.clamp(min=1)  # eager attention over padding alone is no number
    with InDouble():
        results = run_both(model, proposer, ids, **settings)
        assert_same_layers(*results, "hidden_states")
        assert_same_layers(*results, "attentions")
        assert results[0].scores is None
        # Without a cache transformers returns the states of all columns for each token.
        got, expected, _ = run_both(model, proposer, ids, use_cache=False, **settings)
    torch.testing.assert_close(got.attentions, expected.attentions, rtol=0, atol=1e-9)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt2", "mistral window"])
def test_states_of_other_models_and_after_a_cache(kind: str) -> None:
    model, proposer = tiny(kind), NGramProposer(length=5)
    settings = {"output_hidden_states": True, "max_new_tokens": 5, "return_dict_in_generate": True}
    embeddings = model.get_input_embeddings()(RAGGED[1:2]).detach()
    for ids, inputs in ((RAGGED, {}), (None, {"inputs_embeds": embeddings})):
        assert_same_layers(*run_both(model, proposer, ids, **inputs, **settings), "hidden_states")
    results = []
    for run in (partial(generate, model, proposer=proposer), model.generate):
        cache = DynamicCache(config=model.config)
        model(PROMPT, **{CACHE: cache})
        results.append(run(torch.cat([PROMPT, PROMPT[:, :3]], dim=1), **settings, **{CACHE: cache}))
    assert_same_layers(*results, torch.ones(1, 3), "hidden_states")
