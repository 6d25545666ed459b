"""For every architecture: the greedy tokens of transformers' `generate`, or a refusal with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

import decode.session
from decode import Proposer, Sampling, Step, Target, Tree, generate
from decode.models.facts import find_context
from decode.trees.masks import tree_masks
from proposers import HEAD_PROPOSERS, DraftProposer, EagleProposer, HydraProposer, NGramProposer
from tests.support.drafting import make_head, tree_of_paths
from tests.support.models import CONTEXT, VOCABULARY, WINDOW, InDouble, tiny

NEW_TOKENS = 16
ARCHITECTURES = {
    "dense": """apertus, arcee, bitnet, codegen, cohere, diffllama, ernie4_5, falcon, gemma, glm, glm4, gpt_neox, gptj,
        granite, helium, hunyuan_v1_dense, llama, llama eager, nanochat, nemotron, olmo, olmo2, persimmon, phi, phi3,
        qwen2, qwen3, seed_oss, smollm3, stablelm, starcoder2""",
    "learned positions": "bert decoder, biogpt, gpt2, gpt_bigcode, opt",
    "experts": "glm4_moe, granitemoe, jetmoe, mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe",
    "latent attention": "deepseek_v2, deepseek_v3",
    "one window for all layers": """ministral3, mistral window, mistral window eager, phi3 longrope, phi3 window,
        qwen2 all windows, starcoder2 window""",
    # Also soft caps (gemma2), sinks (gpt_oss) and shared keys (gemma3n, gemma4).
    "layers with and without a window": """cohere2, exaone4, gemma2, gemma3_text, gemma3_text eager, gemma3n_text,
        gemma4_text, gpt_oss, ministral, modernbert-decoder, olmo3, qwen2 windows, qwen3 windows""",
    "layers that see their own chunk": "llama4_text",
    "recurrent": """bailing_hybrid, bamba, falcon_h1, granitemoehybrid, kimi_linear, lara_mini, lfm2, lfm2_moe, lfm3,
        mamba2, nemotron_h unbounded, olmo_hybrid, qwen3_5_moe_text, qwen3_5_text, qwen3_next, zamba2 unbounded,
        zaya""",
}
if Version(transformers.__version__) < Version("5.24"):  # older ones were not tried
    del ARCHITECTURES["recurrent"]
ACCEPTED = [" ".join(name.split()) for names in ARCHITECTURES.values() for name in names.split(",")]
SEVERAL_STATES = ["gemma3n_text"]  # of each token, in all layers but the last


class OracleTree:
    """Drafts random trees: wrong branches, and paths that follow the known answer for a random while.

    Steps accept paths of different lengths and shapes, scattered over the cache.
    """

    layers: Sequence[int] = ()

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = answers  # prompt and answer of each row
        self.random = random.Random(0)

    def propose(self, step: Step, budget: int) -> Tree:
        paths = []
        for number, sequence in zip(step.request_ids, step.sequences, strict=True):
            future = self.answers[number][len(sequence) :]
            paths.append([self._draw_path(future) for _ in range(self.random.randint(0, 4))])
            while sum(map(len, paths[-1])) > budget - 1:
                paths[-1].pop()
        return tree_of_paths(step.bonus, paths)

    def _draw_path(self, future: list[int]) -> list[int]:
        right, wrong = self.random.randint(0, 4), self.random.randint(0, 2)
        return future[:right] + [self.random.randrange(VOCABULARY) for _ in range(wrong)]


@dataclass(frozen=True)
class Case:
    """An architecture with prompts longer and shorter than its window, and transformers' answers."""

    name: str
    target: Target
    prompts: list[list[int]]
    answers: list[list[int]]  # prompt included


PROPOSERS: dict[str, Callable[[Case], Proposer | None]] = {
    "plain": lambda case: None,
    "oracle": lambda case: OracleTree(case.answers),
    "ngram": lambda case: NGramProposer(length=4),
    "draft": lambda case: DraftProposer(Target(tiny(case.name, seed=1))),
    "itself": lambda case: DraftProposer(case.target, width=1 if case.target.is_recurrent else 2, depth=3, nodes=7),
    "hydra": lambda case: HydraProposer(make_head("hydra", case.target, prefix=True), nodes=9),
    "eagle3": lambda case: EagleProposer(
        make_head("eagle" if case.name in SEVERAL_STATES else "eagle3", case.target), depth=3, width=2, nodes=9
    ),
}


def draw_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (2 * WINDOW + 5, WINDOW - 3, WINDOW, WINDOW + 3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def generate_stock(model: PreTrainedModel, prompts: list[list[int]], length: int | None = None) -> list[list[int]]:
    """The prompts and transformers' greedy tokens: `NEW_TOKENS`, or to this length."""
    end = {"max_new_tokens": NEW_TOKENS} if length is None else {"max_length": length}
    return [model.generate(torch.tensor([prompt]), do_sample=False, **end)[0].tolist() for prompt in prompts]


@cache
def build_case(name: str) -> Case:
    model, prompts = tiny(name), draw_prompts()
    return Case(name, Target(model), prompts, generate_stock(model, prompts))


RECURRENT = [" ".join(name.split()) for name in ARCHITECTURES.get("recurrent", "").split(",")]
USUAL = "oracle", "hydra"  # ways of drafting that every run tries with recurrent models, which are slow on a CPU
CASES = [
    pytest.param(name, proposer, marks=[pytest.mark.slow] if name in RECURRENT and proposer not in USUAL else [])
    for name in ACCEPTED
    for proposer in PROPOSERS
]


@pytest.mark.parametrize(("name", "proposer"), CASES)
def test_greedy_tokens_are_those_of_transformers(name: str, proposer: str) -> None:
    case = build_case(name)
    for batch_size, count in ((1, 1), (4, 4)):
        options = {"batch_size": batch_size, "max_new_tokens": NEW_TOKENS}
        made = generate(case.target, case.prompts[:count], PROPOSERS[proposer](case), **options)
        assert [answer.prompt + answer.tokens for answer in made] == case.answers[:count]
        if proposer == "oracle":
            assert all(answer.stats.tau > (1.2 if case.target.is_recurrent else 1.5) for answer in made)
    assert case.target.read_version(deep=True) == 0  # no pass looks like a change of the weights


ONE_PASS = "llama", "gpt2", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3 windows", "qwen3_5_text", "lfm2"


@pytest.mark.parametrize("kind", ["peagle", "dflash"])
@pytest.mark.parametrize("name", ONE_PASS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_heads_that_draft_in_one_pass_change_no_text(name: str, kind: str, temperature: float) -> None:
    """Rows of different lengths, in trees, or chains where the model has a recurrent state."""
    target, prompts = build_case(name).target, build_case(name).prompts
    settings: dict[str, Any] = {"sampling": Sampling(temperature=temperature, seed=2), "max_new_tokens": 8}
    plain = [answer.tokens for answer in generate(target, prompts, None, **settings)]
    for nodes in (12, None):
        proposer = HEAD_PROPOSERS[kind](make_head(kind, target), nodes=nodes)
        assert [answer.tokens for answer in generate(target, prompts, proposer, **settings)] == plain


NEW = "inkling_text", "inkling2_text", "inkling2_loop_text"  # not in older versions
REFUSED = {
    "bart": "bart takes no position_ids",
    "bert": "bert looks ahead like an encoder",
    "bloom": "bloom uses ALiBi",
    "falcon alibi": "falcon uses ALiBi",
    "gpt_neo": "gpt_neo masks its attention by cache slots",
    "openai-gpt": "openai-gpt cannot verify a tree",
    # In transformers, their passes over several tokens ignore the cached state.
    **{name: f"{name} (fails|cannot|takes|has)" for name in ("falcon_mamba", "jamba", "mamba", "zamba")},
    "minimax": "minimax cannot verify a (tree|chain)",  # it has a cache of its own
    "mpt": "mpt uses ALiBi",
    "recurrent_gemma": "recurrent_gemma (fails|cannot|keeps)",  # its states are not in the cache
    "roberta decoder": "roberta fails the tree self-test",  # its positions begin after the padding token's
    "rwkv": "rwkv keeps a recurrent state",
    "nemotron_h": "nemotron_h fails .* because transformers raises its time steps to time_step_min",
    "zamba2": "zamba2 fails .* because transformers raises its time steps to time_step_min",
    **{name: f"{name} fails .* those of the longest row" for name in NEW},
    "qwen4_exp_text": "qwen4_exp_text has sparse attention",
    "xlstm": "xlstm keeps a recurrent state that is not in transformers' cache",
    "t5": "T5ForConditionalGeneration is no decoder-only language model",
}


if Version(transformers.__version__) < Version("5.24"):
    for new in (*NEW, "qwen4_exp_text"):
        del REFUSED[new]
    REFUSED |= {name: f"{name} (fails|cannot|takes|has)" for name in ("nemotron_h", "zamba2")}


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_cannot_verify_trees_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{REFUSED[name]}"):
        Target(tiny(name))


WRONG_MASKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "boolean for eager attention": ("llama eager", lambda masks: masks == 0),
    "causal instead of a tree's": ("llama", lambda masks: torch.full_like(masks, -1e9).triu(1)),
    "everything visible": ("gpt2", torch.zeros_like),
    "full for every layer type": ("gemma3_text", lambda masks: masks["full_attention"]),
    "windowed for every layer type": ("gpt_oss", lambda masks: masks["sliding_attention"]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mistake", WRONG_MASKS)
def test_the_self_test_catches_wrong_masks(mistake: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    name, spoil = WRONG_MASKS[mistake]
    model = tiny(name, dtype=dtype)
    Target(model)
    monkeypatch.setattr(decode.session, "tree_masks", lambda *args: spoil(tree_masks(*args)))
    with pytest.raises(ValueError, match="tree"):
        Target(model)


@pytest.mark.parametrize("node", range(5))
def test_the_self_test_catches_one_wrong_bit(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node of the tree attends to another that it should not, or not to its ancestor."""

    def spoil(*args: Any) -> Tensor:
        masks = tree_masks(*args)
        if masks.shape[2] == 5:  # a tree of the self-test, after its prompt
            slot = int(args[1][0]) + (2 if node == 3 else 3)
            masks[0, 0, node, slot] = -1e9 if masks[0, 0, node, slot] == 0 else 0
        return masks

    monkeypatch.setattr(decode.session, "tree_masks", spoil)
    with pytest.raises(ValueError, match="llama fails the tree self-test"):
        Target(tiny("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_self_test_catches_ignored_positions(name: str) -> None:
    model = tiny(name)
    forward = model.forward
    model.forward = lambda *args, position_ids=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match=f"{name} fails the tree self-test"):
        Target(model)


def test_a_model_that_fails_on_a_tree_is_refused_with_its_reason() -> None:
    model = tiny("llama")

    def fail(**kwargs: Any) -> None:
        raise RuntimeError("no kernel for this mask\nand a long trace")

    model.forward = fail
    with pytest.raises(ValueError, match=r"^llama cannot verify a tree: .* no kernel for this mask$"):
        Target(model)


def test_the_context_ends_where_logits_depend_on_more_than_the_path() -> None:
    assert Target(tiny("llama")).context == CONTEXT
    assert Target(tiny("phi3 longrope")).context == 64
    assert find_context(tiny("llama4_text", max_position_embeddings=1 << 20)) < 8192


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "phi3 longrope"])
def test_answers_fill_the_context_to_its_end(name: str) -> None:
    """Trees extend past the context, in slots and in depth."""
    target = Target(tiny(name, max_position_embeddings=40, original_max_position_embeddings=40))
    prompts = [list(range(3, 3 + length)) for length in (20, 30)]
    answers = generate_stock(target.model, prompts, 40)
    made = generate(target, prompts, OracleTree([[*answer, *range(9)] for answer in answers]))
    assert [answer.prompt + answer.tokens for answer in made] == answers
    assert {answer.finish for answer in made} == {"context"}


OTHER_STATES = *SEVERAL_STATES, "mamba2"  # transformers lists other ones, or several of a token


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name not in OTHER_STATES])
def test_features_are_the_hidden_states_of_transformers(name: str) -> None:
    target = build_case(name).target
    layers = (0, 1, -1)
    session = target.open(1, layers)
    prompt, root, wrong, right, last = torch.arange(3, 3 + 2 * WINDOW).tolist(), 50, 51, 52, 53
    tree, path = tree_of_paths([root], [[[wrong], [right, last]]]), [0, 2, 3]
    if target.is_recurrent:
        tree, path = Tree.chain([[root, right, last]]), [0, 1, 2]
    ids = torch.tensor([[*prompt, root, right, last]])
    with nullcontext() if target.is_recurrent else InDouble():  # some states are in float32
        first = session.verify(Tree.chain([prompt])).features
        session.keep([list(range(len(prompt)))])
        second = session.verify(tree).features
        states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    assert first is not None and second is not None
    expected = torch.cat([states[layer] for layer in layers], dim=-1)
    atol = 1e-3 if target.is_recurrent else 1e-9  # rules of recurrent layers hold in float32
    torch.testing.assert_close(torch.cat([first, second[:, path]], dim=1), expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        *((name, 1, "works on several states at once") for name in SEVERAL_STATES),
        *(("llama", layer, "features can be read from layers 0 to 2") for layer in (3, -4)),
    ],
)
def test_features_of_other_layers_are_refused(name: str, layer: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_case(name).target.open(1, layers=(layer,)).verify(Tree.chain([[1]]))
