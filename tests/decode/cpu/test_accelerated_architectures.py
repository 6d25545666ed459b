"""Acceleration gives the same tokens for every architecture. Kernels are exported but not compiled."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import decode.target
from decode import Proposer, Target
from decode.cpu.packed_linear import OneDnnLinear, PackedLinear
from decode.prefill import read_texts
from proposers import NGramProposer
from tests.decode.cpu.test_packed import use_onednn
from tests.decode.models.test_architectures import ACCEPTED, OracleTree, draw_prompts
from tests.support.drafting import texts, tree_of_rows
from tests.support.models import needs_compiler, tiny

pytestmark = needs_compiler
UNCOMPILED = {  # their layers stay packed
    *("gemma3n_text", "gemma4_text"),  # several states a token; keys that layers share in a dictionary
    *("falcon_h1", "mamba2", "zamba2 unbounded", "zaya"),  # a recurrent state in all layers
}
COMPILED_SOON = ("llama", "gemma3_text", "gemma3n_text", "gpt2")
PACKED_SOON = (*COMPILED_SOON, "qwen2", "mixtral", "deepseek_v3", "gpt_oss")
# The architectures that are not slow. oneDNN packs layers where there is no compiler.
SOON = {"compiled": COMPILED_SOON, "packed": PACKED_SOON, "oneDNN": PACKED_SOON}
CASES = [
    pytest.param(name, mode, marks=() if name in SOON[mode] else pytest.mark.slow)
    for name in ACCEPTED
    for mode in SOON
    if mode != "oneDNN" or name in PACKED_SOON
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_greedy_tokens_are_those_of_the_plain_model(
    name: str, mode: str, exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "oneDNN":
        use_onednn(monkeypatch)
    model, prompts = tiny(name, dtype=torch.float32), draw_prompts()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, fast = Target(model), Target(model, accelerate="compiled" if mode == "compiled" else "packed")
    assert fast.compiled == (mode == "compiled" and name not in UNCOMPILED)
    form = OneDnnLinear if mode == "oneDNN" else PackedLinear
    assert plain.model is model and any(isinstance(module, form) for module in fast.model.modules())
    assert torch.equal(plain.output_matrix, fast.output_matrix)
    expected = texts(plain, prompts, None, max_new_tokens=16)
    answers = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    for count in (1, 4):
        proposers: list[Proposer | None] = [None, NGramProposer(length=4), OracleTree(answers)]
        for proposer in proposers:
            assert texts(fast, prompts[:count], proposer, batch_size=count, max_new_tokens=16) == expected[:count]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "compiled"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_bfloat16_logits_are_as_exact_as_those_of_the_plain_model(
    name: str, mode: str, exported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the same weights in float64, over trees. Experts that are chosen by a hair give outliers."""
    monkeypatch.setattr(decode.target, "self_test", lambda target: 0.0)  # it would refuse such an outlier
    model, exact, plain = read_plain(name)
    fast = read_logits(Target(model, accelerate=mode))
    errors = [(logits - exact).abs().median() / exact.std() for logits in (plain, fast)]
    assert errors[1] < 1.5 * errors[0] + 0.002
    assert (plain - fast).abs().median() / exact.std() < 0.1


@cache
def read_plain(name: str) -> tuple[PreTrainedModel, Tensor, Tensor]:
    """A model, and its logits with the same weights in float64 and in bfloat16."""
    model = tiny(name, dtype=torch.bfloat16)
    return model, read_logits(Target(deepcopy(model).double())), read_logits(Target(model))


def read_logits(target: Target) -> Tensor:
    """The logits of two trees after prompts of different lengths, alone and in a batch."""
    prompts, found = draw_prompts(), []
    for rows in ([0], [0, 1, 2, 3]):
        session = target.open(len(rows))
        read_texts(session, [prompts[row] for row in rows])
        is_chain = session.target.is_recurrent
        for _ in range(2):
            trees = [([5 + row, 6, 7, 8, 9, 10, 11][: 7 - row], [-1, 0, 0, 1, 2, 4, 4][: 7 - row]) for row in rows]
            tree = tree_of_rows(trees)
            tree = tree.best_chains() if is_chain else tree
            found.append(session.verify(tree).logits[tree.real].flatten())
            session.keep([[0, 1 if is_chain else 2][: 2 - row % 2] for row in rows])
    return torch.cat(found).double()
