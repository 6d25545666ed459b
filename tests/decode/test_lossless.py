"""No proposer changes the text: deterministic drafts give equal tokens, sampled drafts the same distribution."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from decode import Answer, Engine, Proposer, Sampling, Step, Target, Tree, generate, speculate
from heads import KINDS as HEAD_KINDS
from heads.checkpoint import load_head, save_head
from proposers import (
    AnswerStore,
    DFlashProposer,
    DraftProposer,
    EagleProposer,
    FlashMapProposer,
    HydraProposer,
    JumpProposer,
    MedusaProposer,
    MergedProposer,
    MultiTokenProposer,
    NGramProposer,
    PEagleProposer,
    TreeProposer,
    load_proposer,
)
from proposers.options import OPTIONS
from proposers.sources import Continuation, Place, RecyclingSource, Source, SuffixSource
from tests.support.drafting import Known, make_head, texts, tree_of_rows
from tests.support.enumeration import compare_third_tokens
from tests.support.models import VOCABULARY, tiny

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10, 11, 7, 8], [3], [4, 4, 20, 21, 22, 4, 4, 20]]
HEADS = [("medusa", False), ("hydra", False), ("hydra", True)]
KINDS: dict[str, dict[str, Any]] = {  # small models, and what makes them smaller still
    "llama": {"num_hidden_layers": 1},
    "mistral window": {"num_hidden_layers": 1},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
}


@cache
def make_target(kind: str = "llama") -> Target:
    return Target(tiny(kind, **KINDS[kind]))


@cache
def make_draft() -> Target:
    """A model with similar probabilities."""
    return Target(tiny("llama", num_hidden_layers=1, rms_norm_eps=0.1))


@pytest.fixture
def llama() -> Target:
    return make_target()


DFLASH2 = {"candidates": 6, "taps": 2, "group": 4, "from_anchor": False}
# All ways to draft deterministically. With the target as its own draft model everything is accepted.
UNTRAINED = [name for name, options in OPTIONS.items() if not {"head", "draft_model"} & {*options}]
DETERMINISTIC: dict[str, Callable[[Target], Proposer]] = {
    **{name: partial(load_proposer, name) for name in UNTRAINED},
    "ngram": lambda target: NGramProposer(),
    "ngram fixed": lambda target: NGramProposer(max_size=2, length=10, first=True),
    "suffix": lambda target: MergedProposer([SuffixSource()], store=AnswerStore(1000)),
    "recycling": lambda target: MergedProposer([RecyclingSource()], nodes=9),
    "merged": lambda target: MergedProposer(),
    "merged hydra": lambda target: merge(HydraProposer(make_head("hydra", target)), nodes=16),
    "merged eagle3": lambda target: merge(EagleProposer(make_head("eagle3", target, draft_size=40), depth=3, width=4)),
    "merged medusa": lambda target: merge(MedusaProposer(make_head("medusa", target, output="target")), nodes=12),
    "draft": lambda target: DraftProposer(make_draft()),
    "merged draft": lambda target: merge(DraftProposer(make_draft(), width=2), nodes=12),
    "draft tree": lambda target: DraftProposer(make_draft(), width=3, depth=3, nodes=10),
    "itself": lambda target: DraftProposer(target, depth=4, nodes=5),
    "itself as a tree": lambda target: DraftProposer(target, width=2),
    "medusa": lambda target: MedusaProposer(make_head("medusa", target, output="target")),
    "medusa large": lambda target: MedusaProposer(make_head("medusa", target, draft_size=40), nodes=64),
    "hydra": lambda target: HydraProposer(make_head("hydra", target, output="target"), nodes=16),
    "hydra small": lambda target: HydraProposer(make_head("hydra", target), nodes=9),
    "hydra++": lambda target: HydraProposer(make_head("hydra", target, prefix=True, output="target")),
    "eagle chain": lambda target: EagleProposer(make_head("eagle", target), depth=3, width=1, nodes=4),
    "eagle small": lambda target: EagleProposer(make_head("eagle", target, draft_size=40), nodes=9),
    "eagle": lambda target: EagleProposer(make_head("eagle", target), depth=3, width=4, nodes=12),
    "eagle3 chain": lambda target: EagleProposer(make_head("eagle3", target, draft_size=40), depth=3, width=1, nodes=4),
    "eagle3 large": lambda target: EagleProposer(make_head("eagle3", target, layers=2), depth=3, nodes=20),
    "eagle3": lambda target: EagleProposer(make_head("eagle3", target), depth=3),
    "peagle": lambda target: PEagleProposer(make_head("peagle", target), nodes=12),
    "jump": lambda target: JumpProposer(make_head("jump", target), depth=3, width=4, nodes=12),
    "merged jump": lambda target: merge(JumpProposer(make_head("jump", target, draft_size=40)), nodes=12),
    "multi-token": lambda target: MultiTokenProposer(make_head("multi-token", target), nodes=12),
    "mtp": lambda target: EagleProposer(make_head("mtp", target), depth=3, width=4, nodes=12),
    "merged mtp": lambda target: merge(EagleProposer(make_head("mtp", target, draft_size=40)), nodes=12),
    "dflash": lambda target: DFlashProposer(make_head("dflash", target, draft_size=40)),
    "dflash chain": lambda target: DFlashProposer(make_head("dflash", target), width=1, nodes=4),
    "dflash of marginals": lambda target: DFlashProposer(make_head("dflash", target, pair_rank=0), nodes=20),
    "dflash2": lambda target: DFlashProposer(make_head("dflash", target, **DFLASH2), nodes=12),
    "merged dflash": lambda target: merge(DFlashProposer(make_head("dflash", target)), nodes=16),
    "flashmap": lambda target: FlashMapProposer(make_head("flashmap", target, draft_size=40)),
    "flashmap chain": lambda target: FlashMapProposer(make_head("flashmap", target), width=1, nodes=4),
    "merged flashmap": lambda target: merge(FlashMapProposer(make_head("flashmap", target)), nodes=16),
    "merged peagle": lambda target: merge(PEagleProposer(make_head("peagle", target, layers=3)), nodes=12),
}
SAMPLED: dict[str, Callable[[Target], Proposer]] = {
    "draft": lambda target: DraftProposer(make_draft(), sampled=True),
    "itself": lambda target: DraftProposer(target, sampled=True, depth=4, nodes=5),
}


def merge(drafter: TreeProposer, nodes: int | None = None) -> MergedProposer:
    """All sources at once, with the head."""
    return MergedProposer(drafter=drafter, store=AnswerStore(1000), nodes=nodes)


class Grammar(LogitsProcessor):
    """Allows the tokens whose sum with the last token and the prefix length is divisible by 3."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = torch.arange(scores.shape[-1])
        return scores.masked_fill((token + input_ids[:, -1:] + input_ids.shape[1]) % 3 != 0, -torch.inf)


PENALTY = [RepetitionPenaltyLogitsProcessor(1.5)]
SAMPLINGS = {
    "temperature 0.7": Sampling(temperature=0.7, top_p=0.9, seed=11),
    "temperature 1": Sampling(temperature=1.0, top_p=0.9, seed=11),
    "greedy penalty": Sampling(top_k=20, processors=PENALTY, seed=5),
    "sampled penalty": Sampling(temperature=0.8, top_k=20, processors=PENALTY, seed=5),
    "greedy grammar": Sampling(top_k=20, processors=[Grammar()], seed=5),
    "sampled grammar": Sampling(temperature=0.8, top_k=20, processors=[Grammar()], seed=5),
}
NEW = 12


@cache
def plain_texts(name: str) -> list:
    return texts(make_target(), PROMPTS, None, sampling=SAMPLINGS[name], max_new_tokens=NEW)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_drafts_do_not_change_the_text(llama: Target, name: str, sampling: str) -> None:
    """The noise depends on the seed alone, and processors see each node's own prefix."""
    for batch_size in (1, 2, 4) if sampling.startswith("temperature") else (1, 4):
        proposer, settings = DETERMINISTIC[name](llama), {"sampling": SAMPLINGS[sampling], "max_new_tokens": NEW}
        assert texts(llama, PROMPTS, proposer, batch_size=batch_size, **settings) == plain_texts(sampling), batch_size


@pytest.mark.parametrize("name", SAMPLINGS)
def test_seeds_and_processors_change_the_text_and_batches_do_not(llama: Target, name: str) -> None:
    sampling = SAMPLINGS[name]
    other = replace(sampling, processors=()) if sampling.processors else replace(sampling, seed=12)
    assert texts(llama, PROMPTS, None, sampling=other, max_new_tokens=NEW) != plain_texts(name)
    assert texts(llama, PROMPTS, None, sampling=sampling, max_new_tokens=NEW, batch_size=1) == plain_texts(name)


class Closed(LogitsProcessor):
    """Fails after a stop token."""

    def __init__(self, end: int, begin: int) -> None:
        self.end, self.begin = end, begin

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.end in input_ids[0, self.begin :]:
            raise ValueError("called after the end")
        return scores


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [*DETERMINISTIC, "sampled"])
def test_processors_are_not_called_after_a_stop_token(llama: Target, temperature: float, name: str) -> None:
    """Although drafts go on after it."""
    (prompt, *_), settings = PROMPTS, {"max_new_tokens": NEW, "batch_size": 1}
    (plain,) = texts(llama, [prompt], None, sampling=Sampling(temperature, seed=2), stop_ids=[], **settings)
    end = plain[8]
    sampling = Sampling(temperature, processors=[Closed(end, len(prompt))], seed=2)
    make = DETERMINISTIC.get(name, lambda target: DraftProposer(target, depth=4, sampled=True, nodes=5))
    (answer,) = generate(llama, [prompt], make(llama), sampling=sampling, stop_ids=[end], **settings)
    assert answer.finish == "eos" or name == "sampled"


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_drafts_keep_a_grammar(llama: Target, name: str) -> None:
    sampling = Sampling(temperature=1.0, processors=[Grammar()], seed=1)
    for answer in generate(llama, PROMPTS, SAMPLED[name](llama), sampling=sampling, max_new_tokens=24):
        sequence = answer.prompt + answer.tokens
        for position in range(len(answer.prompt), len(sequence)):
            assert (sequence[position] + sequence[position - 1] + position) % 3 == 0


@cache
def make_narrow_target() -> Target:
    return Target(tiny("llama", vocab_size=12, num_hidden_layers=1))


@cache
def sample_plainly() -> list[Answer]:
    settings = {"sampling": Sampling(temperature=1.0, seed=2), "max_new_tokens": 3, "stop_ids": []}
    return generate(make_narrow_target(), [[3, 4]] * 2400, None, batch_size=400, **settings)


@pytest.mark.parametrize(("batch_size", "runs"), [(1, 400), (40, 2400)])
def test_sampled_drafts_keep_the_distribution(batch_size: int, runs: int) -> None:
    """Against plain sampling with another seed."""
    draft = Target(tiny("llama", vocab_size=12, num_hidden_layers=1, seed=1))
    proposer, sampling = DraftProposer(draft, sampled=True, depth=3, nodes=4), Sampling(temperature=1.0, seed=1)
    settings = {"sampling": sampling, "max_new_tokens": 3, "stop_ids": [], "batch_size": batch_size}
    answers = generate(make_narrow_target(), [[3, 4]] * runs, proposer, **settings)
    assert sum(answer.stats.nodes for answer in answers) > runs / 2
    assert compare_third_tokens(answers, sample_plainly()[:runs]) < 31.3  # 11 degrees of freedom, p = 0.001


class Adversary:
    """Drafts garbage: stop tokens, duplicates, the root again, the full budget or nothing, chains and wide trees."""

    layers = ()

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def propose(self, step: Step, budget: int) -> Tree:
        rows = []
        for root in step.bonus:
            size = self.random.choice([1, budget, self.random.randint(1, budget)])
            palette = self.random.choice([range(VOCABULARY), range(4), [root], [2]])
            tokens = [root, *(self.random.choice(palette) for _ in range(size - 1))]
            wide = self.random.random() < 0.5
            rows.append((tokens, [-1, *(self.random.randrange(node) if wide else node - 1 for node in range(1, size))]))
        return tree_of_rows(rows)


class Mixed(Adversary):
    """A good draft model, whose trees lose some nodes in half of the steps."""

    def __init__(self, seed: int, target: Target) -> None:
        super().__init__(seed)
        width = self.random.choice([1, 2])
        self.good = DraftProposer(target, width=width, depth=3, nodes=1 + 3 * width)

    def propose(self, step: Step, budget: int) -> Tree:
        tree = self.good.propose(step, budget)
        if self.random.random() < 0.5:
            return tree
        kept = max(1, tree.width - self.random.randint(0, 2))
        return Tree(tree.tokens[:, :kept], tree.parents[:, :kept], tree.sizes.clamp(max=kept), tree.height)


class HostileSource(Source):
    """Names random tokens with random confidence, the same ones repeatedly."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def continuations(self, state: Place) -> list[Continuation]:
        choose = self.random
        return [
            Continuation(choose.randrange(VOCABULARY), choose.choice([0.0, 1e-300, choose.random(), 1.0]))
            for _ in range(choose.randrange(12))
        ]


@cache
def draft_with_heads(kind: str) -> list[Callable[[int], Proposer]]:
    """Proposers with random heads of all kinds, each made from a width."""
    target = make_target(kind)
    medusa, hydra, prefix = (make_head(kind, target, prefix=on) for kind, on in HEADS)
    eagles = [make_head(kind, target) for kind in ("eagle", "eagle3")]
    return [
        lambda width: MedusaProposer(medusa, nodes=2 * width + 1),
        lambda width: HydraProposer(hydra, nodes=2 * width),
        lambda width: HydraProposer(prefix, nodes=9),
        lambda width: MergedProposer([RecyclingSource(), HostileSource(width)], nodes=3 * width),
        lambda width: DraftProposer(target, width=width, depth=3, nodes=1 + 3 * width),
        lambda width: MergedProposer([HostileSource(width)], HydraProposer(hydra), nodes=3 * width),
        *(lambda width, head=head: EagleProposer(head, depth=2, width=width, nodes=8) for head in eagles),
    ]


@pytest.mark.parametrize("part", range(10))
def test_random_cases(part: int, request: pytest.FixtureRequest) -> None:
    """Random prompts, trees, seeds, batch sizes and limits give the same tokens as plain decoding."""
    accepted = 0
    for case in range(part, request.config.getoption("--cases"), 10):
        choose = random.Random(case)
        kind = choose.choice([*KINDS])
        target = make_target(kind)
        prompts = [
            [choose.randrange(VOCABULARY) for _ in range(choose.randint(1, 12))] for _ in range(choose.randint(1, 4))
        ]
        settings = {
            "sampling": Sampling(temperature=choose.choice([0, 0, 0.9]), top_k=choose.choice([0, 5]), seed=case),
            "max_new_tokens": choose.randint(1, 8),
            "stop_ids": choose.choice([[], [2], list(range(0, VOCABULARY, 9))]),
        }
        others = [NGramProposer(length=3), Mixed(case, target), choose.choice(draft_with_heads(kind))(1 + case % 4)]
        proposer = choose.choice([Adversary(case), Adversary(case), *others])
        nodes, batch_size = choose.choice([1, 2, 9]), choose.choice([1, 2, None])
        answers = generate(target, prompts, proposer, nodes=nodes, batch_size=batch_size, **settings)
        assert [answer.tokens for answer in answers] == texts(target, prompts, None, **settings), f"case {case}"
        accepted += sum(sum(answer.stats.accepted_by_depth) for answer in answers)
    assert accepted > 0


class RecordingKnown(Known):
    """Drafts the known answers in trees of the whole budget, and records what it was given."""

    def __init__(self, answers: list[list[int]], depth: int) -> None:
        super().__init__({request_id: [*answer, *[0] * depth] for request_id, answer in enumerate(answers)}, depth)
        self.calls: list[tuple[int, int]] = []  # the budget, and the room of the row that has most
        self.verified: list[tuple[int, int]] = []  # room and tree size of each row and step

    def propose(self, step: Step, budget: int) -> Tree:
        rooms = [self.room[row] for row in step.stayed]
        self.verified += zip(rooms, step.tree.sizes.tolist(), strict=False)
        self.room = step.room
        self.calls.append((budget, max(step.room)))
        return super().propose(step, budget)


@pytest.mark.parametrize("limit", [256, 12])
@pytest.mark.parametrize("lengths", [(20, 30, 27), (28, 29)])
def test_little_room_makes_trees_shallower_but_not_smaller(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], limit: int
) -> None:
    """Learned positions end with the context. Rows reach it, or the end of their answer, at different times."""
    context, nodes = 40, 21
    target = Target(tiny("gpt2", max_position_embeddings=context))
    prompts = [[(length + position) % VOCABULARY for position in range(length)] for length in lengths]
    plain = generate(target, prompts, None, max_new_tokens=limit)
    forward, positions = target.model.forward, list[int]()

    def watch(*, position_ids: Tensor, **settings: Any) -> Any:
        positions.append(int(position_ids.max()))
        return forward(position_ids=position_ids, **settings)

    monkeypatch.setattr(target.model, "forward", watch)
    proposer = RecordingKnown([answer.tokens for answer in plain], depth=nodes)
    answers = generate(target, prompts, proposer, nodes=nodes, max_new_tokens=limit)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert [answer.finish for answer in answers] == [answer.finish for answer in plain]
    assert max(positions) <= context - 2  # the last token of an answer is never read
    assert proposer.calls == [(nodes if room > 1 else 1, room) for _, room in proposer.calls]
    assert any(1 < room < nodes for _, room in proposer.calls)
    assert all(size == min(nodes, 2 * room - 1) for room, size in proposer.verified)
    assert all(answer.stats.steps <= 4 for answer in answers)


# torch's global generator: greedy decoding and loading leave it alone.


def count_moves(call: Any) -> bool:
    before = torch.get_rng_state()
    call()
    return not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_greedy_decoding_leaves_it_alone(target: Target, name: str) -> None:
    proposer = DETERMINISTIC[name](target)
    assert not count_moves(lambda: generate(target, [[5, 9, 5], [7]], proposer, max_new_tokens=5))


def test_so_do_requests_and_transformers_generate(target: Target) -> None:
    engine, ids = Engine(target, "merged"), torch.tensor([[5, 9, 5]])
    assert not count_moves(lambda: [engine.add([5, 9, 5], max_new_tokens=5), *engine])
    options = {"max_new_tokens": 5, "do_sample": False, "custom_generate": speculate}
    assert not count_moves(lambda: target.model.generate(ids, **options, proposer="merged"))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_so_does_a_head_that_is_loaded(target: Target, kind: str, tmp_path: Path) -> None:
    """Else the first sampled answer of a process would differ from the same one later."""
    save_head(make_head(kind, target), tmp_path / kind)
    assert not count_moves(lambda: load_head(tmp_path / kind))


def test_sampling_without_a_seed_draws_one(target: Target) -> None:
    assert not count_moves(Sampling) and not count_moves(lambda: Sampling(0.7, seed=3))
    assert count_moves(lambda: Sampling(0.7))
    torch.manual_seed(4)
    first = generate(target, [5, 9, 5], None, sampling=Sampling(1.0))[0].tokens
    torch.manual_seed(4)
    generate(target, [5, 9, 5], None)
    assert generate(target, [5, 9, 5], None, sampling=Sampling(1.0))[0].tokens == first
