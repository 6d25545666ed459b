"""Targets with a recurrent state: chains, whose rejected nodes leave no trace in the state."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decode import Engine, Sampling, Session, Target, Tree, generate, speculate
from decode.prefill import read_texts
from decode.recurrent import EVERY, MOST_GIVEN
from proposers import DraftProposer, EagleProposer, MergedProposer, NGramProposer
from tests.decode.models.test_architectures import OracleTree
from tests.support.drafting import make_head, texts
from tests.support.models import CACHE, VOCABULARY, tiny
from tests.support.speculating import PROMPT, RAGGED, mask_of

NAMES = ["qwen3_5_text", "falcon_h1", "lfm2"]  # a delta rule, a state space next to attention, a convolution
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 3], [11, 12, 13, 14, 15, 16, 11, 12, 13]]


@pytest.fixture(scope="module", params=NAMES)
def target(request: pytest.FixtureRequest) -> Target:
    return Target(tiny(request.param))


def test_random_rejections_leave_the_logits_of_one_pass(target: Target) -> None:
    """Also prompts shorter than a convolution, chains of one node, and passes that are not kept."""
    draw, text = random.Random(0), torch.randint(3, VOCABULARY, (200,)).tolist()
    plain = target.model(torch.tensor([text]), use_cache=False).logits[0]
    row, length = Session(target, 1), draw.randint(1, 6)
    row.verify(Tree.chain([text[:length]]))
    row.keep([[*range(length)]])
    while length < len(text):
        right, wrong = min(draw.randint(1, 5), len(text) - length), draw.choice([0, 0, 1, 4])
        chain = [*text[length : length + right], *(draw.randrange(3, VOCABULARY) for _ in range(wrong))]
        if draw.random() < 0.2:
            row.verify(Tree.chain([[*chain[:1], 5, 6]]))  # and is forgotten
        logits = row.verify(Tree.chain([chain])).logits[0, :right]
        assert torch.allclose(logits, plain[length : length + right], atol=1e-3)  # the delta rule computes in float32
        row.keep([[*range(right)]])
        length += right
        assert row.lengths == [length]


def test_given_tokens_survive_a_pass_that_is_not_kept(target: Target) -> None:
    """Those of rows with many are committed by a pass of their own."""
    text = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(4)).tolist()
    session = Session(target, 3)
    session.verify(Tree.chain([row[:6] for row in text]))
    session.keep([range(6)] * 3)
    ends = [9, 8, 7]
    session.verify(Tree.chain([[*row[6:end], 5, 6, 7] for row, end in zip(text, ends, strict=True)]))
    session.keep([range(end - 6) for end in ends])
    session.verify(Tree.chain([[5, 6, 7, 8]] * 3))  # and is forgotten
    logits = session.verify(Tree.chain([[30]] * 3)).logits[:, 0]
    for row, end in enumerate(ends):
        plain = target.model(torch.tensor([[*text[row][:end], 30]]), use_cache=False).logits[0, -1]
        assert torch.allclose(logits[row], plain, atol=1e-3)


def test_a_thousand_random_rejections_leave_the_text_of_plain_decoding(target: Target) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 20))] for _ in range(14)]
    plain = texts(target, prompts, max_new_tokens=220, batch_size=4)
    oracle = OracleTree([prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)])
    made = generate(target, prompts, oracle, max_new_tokens=220, batch_size=4)
    assert [answer.tokens for answer in made] == plain
    assert sum(answer.stats.steps for answer in made) > 1000


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(target: Target, temperature: float) -> None:
    """Equal prompts have states of their own."""
    prompts, sampling = [*PROMPTS, PROMPTS[0]], Sampling(temperature, seed=3)
    settings: dict[str, Any] = {"max_new_tokens": 24, "sampling": sampling}
    expected = texts(target, prompts, None, batch_size=1, **settings)
    for proposer in (None, NGramProposer(), MergedProposer(nodes=6)):
        assert texts(target, prompts, proposer, batch_size=4, **settings) == expected


def test_requests_join_and_leave(target: Target) -> None:
    alone = [generate(target, [prompt], max_new_tokens=8 + 4 * i)[0].tokens for i, prompt in enumerate(PROMPTS)]
    engine = Engine(target, NGramProposer(), rows=2)
    requests = [engine.add(PROMPTS[0], max_new_tokens=8), engine.add(PROMPTS[1], max_new_tokens=12)]
    engine.step()
    requests.append(engine.add(PROMPTS[2], max_new_tokens=16))
    list(engine)
    assert [request.answer.tokens for request in requests] == alone


@pytest.mark.parametrize("ids", [PROMPT, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("name", [*NAMES, "mamba2"])
def test_generate_of_transformers_returns_the_same(name: str, ids: Tensor) -> None:
    """Tokens, scores, hidden states and a cache, which either of both continues."""
    model, mask = tiny(name), mask_of(ids)
    settings: dict[str, Any] = {"return_dict_in_generate": True, "do_sample": False}
    more: dict[str, Any] = {"output_scores": True, "output_hidden_states": True, "attention_mask": mask}
    ours, theirs = (
        model.generate(ids, max_new_tokens=6, **settings, **more, **way) for way in ({"custom_generate": speculate}, {})
    )
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=1e-3)
    assert [state[-1].shape for state in ours.hidden_states] == [state[-1].shape for state in theirs.hidden_states]
    if name == "mamba2":  # transformers does not know how many tokens such a cache holds
        with pytest.raises(ValueError, match="does not tell how many tokens it holds"):
            model.generate(ours.sequences, custom_generate=speculate, **{CACHE: ours[CACHE]})
        return
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=14).tolist()
    settings |= {"attention_mask": nn.functional.pad(mask, (0, 6), value=1), "max_new_tokens": 8}
    for begun, way in ((ours, {}), (theirs, {"custom_generate": speculate})):
        rest = model.generate(begun.sequences, **settings, **way, **{CACHE: begun[CACHE]})
        assert rest.sequences.tolist() == whole
        assert rest[CACHE] is begun[CACHE]


def test_no_column_in_a_prompt_is_hidden(target: Target) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, 2] = 0
    with pytest.raises(ValueError, match="keeps a recurrent state, from which no column in a prompt can be hidden"):
        target.model.generate(PROMPT, attention_mask=mask, custom_generate=speculate, max_new_tokens=4)


@pytest.mark.parametrize("rows", [1, 3])
def test_it_drafts_for_another_model(target: Target, rows: int) -> None:
    """Its own state goes back and forth with each draft; in a batch, rows accept different lengths."""
    llama = Target(tiny("llama"))
    expected = texts(llama, PROMPTS, max_new_tokens=16)
    for proposer in (DraftProposer(target), DraftProposer(target, depth=2, nodes=3)):
        assert texts(llama, PROMPTS, proposer, batch_size=rows, max_new_tokens=16) == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_as_its_own_draft_all_is_accepted(target: Target, rows: int) -> None:
    proposer = DraftProposer(target, depth=3, nodes=4)
    answers = generate(target, PROMPTS, proposer, batch_size=rows, max_new_tokens=16)
    assert all(answer.stats.nodes == sum(answer.stats.accepted_by_depth) == 11 for answer in answers)


def test_it_drafts_no_trees(target: Target) -> None:
    with pytest.raises(ValueError, match="keeps a recurrent state, so it drafts chains; give width 1"):
        DraftProposer(target, width=2).begin(target)


def test_a_tree_becomes_its_first_path() -> None:
    tree = Tree.of_rows([([7, 8, 9, 10, 11], [-1, 0, 0, 1, 2]), ([4], [-1])])
    assert tree.best_chains().tokens.tolist() == [[7, 8, 10], [4, 0, 0]]
    assert tree.best_chains().sizes.tolist() == [3, 1]


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_beginnings_of_texts_are_read_once(target: Target, name: str) -> None:
    """At the end of a text, and where states were kept before it."""
    proposer = NGramProposer() if name == "ngram" else EagleProposer(make_head("eagle3", target), depth=2)
    engine, system = Engine(target, proposer, rows=2), [*range(3, 93), *range(3, 63)]
    settings: dict[str, Any] = {"max_new_tokens": 10, "stop_ids": []}
    first = engine.add([*system, 50], **settings)
    list(engine)
    same_system = [engine.add([*system, token], **settings) for token in (60, 61)]
    list(engine)
    turn = engine.add([*first.sequence, 70, 71], **settings)
    list(engine)
    assert [request.stats.reused for request in (first, *same_system)] == [0, EVERY, EVERY]
    assert turn.stats.reused == EVERY if name == "eagle3" else turn.stats.reused > len(system)
    for request in (first, *same_system, turn):
        (alone,) = generate(target, [request.prompt], **settings)
        assert request.answer.tokens == alone.tokens


def test_rows_that_are_behind_are_brought_up(target: Target) -> None:
    """By passes of their own, if no row has drafts, or if many tokens are given again."""
    session = target.open(3)
    read_texts(session, [PROMPTS[0]] * 3)
    session.verify(Tree.chain([[20, 21, 22, 23]] * 3))
    session.keep([[0, 1, 2], [0], [0, 1, 2, 3]])
    assert session.count_given() == [3, 1, 0]
    logits = session.verify(Tree.chain([[30]] * 3)).logits[:, 0]
    session.keep([[0]] * 3)
    assert session.count_given() == [0, 0, 0]
    for row, count in enumerate((3, 1, 4)):
        text = [*PROMPTS[0], *[20, 21, 22, 23][:count], 30]
        assert torch.allclose(logits[row], target.model(torch.tensor([text])).logits[0, -1], atol=1e-3)
    for _ in range(4):
        session.verify(Tree.chain([[5, 6, 7, 8], [5, 6, 7], [5]]))
        session.keep([[0, 1, 2], [0, 1], [0]])
    assert max(session.count_given()) <= MOST_GIVEN + 3


def test_a_pass_that_was_not_kept_leaves_no_trace(target: Target) -> None:
    """Also where rows without tokens join, and where a row goes back."""
    session, other = target.open(1), target.open(1)
    read_texts(session, [PROMPTS[0]])
    other.verify(Tree.chain([[5, 6]]))
    expected = session.verify(Tree.chain([[20, 21]])).logits
    session.join(other, [0])
    session.rewind(0, len(PROMPTS[0]))
    assert session.lengths == [len(PROMPTS[0]), 0]
    both = session.verify(Tree.chain([[20, 21], [9, 3]])).logits
    assert torch.allclose(both[0], expected[0], atol=1e-3)
    assert torch.allclose(both[1], target.model(torch.tensor([PROMPTS[1]])).logits[0], atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])  # transformers does not take them for falcon_h1
def test_embeddings_are_read(name: str) -> None:
    model = tiny(name)
    rows = model.get_input_embeddings()(torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])).detach()
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    mask = torch.ones(2, len(PROMPTS[0])).long()
    mask[1, :3] = 0
    expected = [model.generate(inputs_embeds=each, **settings)[0].tolist() for each in (rows[:1], rows[1:, 3:])]
    settings |= {"custom_generate": speculate, "proposer": "ngram"}
    assert model.generate(inputs_embeds=rows[:1], **settings).tolist() == expected[:1]
    assert model.generate(inputs_embeds=rows, attention_mask=mask, **settings).tolist() == expected
