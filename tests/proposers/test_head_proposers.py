"""Drafts of heads, compared with drafts computed path by path without a cache or a tree mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Engine, Sampling, Target, generate
from decode.cpu import backend
from decode.cpu.native_ops import list_forms
from decode.cpu.packed_linear import PackedLinear
from decode.devices.cost_curve import CostCurve
from decode.prefill import read_texts
from decode.trees.noise import TEXT, row_keys
from heads import LayerCache
from heads.layer_cache import attend
from heads.layers import DecoderLayer
from proposers import HEAD_PROPOSERS, HeadProposer, eagle, feature_history
from proposers.dflash import DFlashDrafter
from proposers.draft_budget import DraftBudget
from proposers.search import add_noise
from tests.decode.test_lossless import PROMPTS
from tests.support.drafting import LAYER, Paths, Recorder, fix_cost, make_head, texts
from tests.support.models import needs_compiler, tiny
from training.factory import make_objective

VOCABULARY = 24  # so small that random heads are sometimes right
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {"output": "own", "draft_size": 13}),
    "medusa, shared output": ("medusa", {"output": "shared"}),
    "medusa, target's output": ("medusa", {"output": "target", "draft_size": 13}),
    "multi-token": ("multi-token", {"output": "own", "draft_size": 13}),
    "multi-token with a window": ("multi-token", {"layer": replace(LAYER, window=6)}),
    "hydra": ("hydra", {"output": "own", "draft_size": 13}),
    "hydra, shared output": ("hydra", {"output": "shared"}),
    "hydra, target's output": ("hydra", {"output": "target", "draft_size": 13}),
    "hydra++": ("hydra", {"prefix": True, "output": "target"}),
    "eagle": ("eagle", {}),
    "eagle of few tokens": ("eagle", {"draft_size": 7, "bias": True}),
    "eagle3": ("eagle3", {}),
    "eagle3 of few tokens": ("eagle3", {"draft_size": 13}),
    "eagle3 with all else": (
        "eagle3",
        {"embedding": True, "norm_before_fc": True, "norm_before_residual": True, "normed_feedback": True},
    ),
    "peagle": ("peagle", {}),
    "eagle with a window": ("eagle", {"layer": replace(LAYER, input_norm=False, window=6)}),
    "eagle3 with a window": ("eagle3", {"layer": replace(LAYER, window=6)}),
    "peagle with a window": ("peagle", {"layer": replace(LAYER, window=6)}),
    "dflash with a window": ("dflash", {"layer": replace(LAYER, qk_norm=True, window=6), "causal": True}),
    "eagle3 of 2 layers": ("eagle3", {"layers": 2}),
    "peagle of 3 layers": ("peagle", {"layers": 3, "norm_before_residual": True}),
    "dflash with a window in some layers": (
        "dflash",
        {"layer": replace(LAYER, qk_norm=True, window=6), "causal": True, "layers": 3, "full_layers": (0, 2)},
    ),
    "dflash2": (
        "dflash",
        {"candidates": 6, "taps": 2, "group": 4, "from_anchor": False, "layer": replace(LAYER, qk_norm=True)},
    ),
    "peagle of few tokens": ("peagle", {"draft_size": 13, "fc_norm": True}),
    "jump": ("jump", {}),
    "jump of few tokens with a window": ("jump", {"draft_size": 13, "layer": replace(LAYER, window=6, qk_norm=True)}),
    "mtp": ("mtp", {}),
    "mtp of few tokens": ("mtp", {"draft_size": 13, "normed_feedback": True, "states_first": True}),
    "dflash": ("dflash", {}),
    "dflash of few tokens": ("dflash", {"draft_size": 19, "layers": 1}),
    "flashmap": ("flashmap", {}),
    "flashmap of few tokens": ("flashmap", {"draft_size": 13}),
    "dflash as published": ("dflash", {"pair_rank": 0, "from_anchor": False, "output": "shared"}),
}
MAIN = ["medusa", "hydra", "multi-token", "hydra++", "eagle", "eagle3", "peagle", "jump", "mtp", "dflash", "flashmap"]
READ_ALL = MAIN[2:]  # features of a text
EAGLES = [kind for kind in KINDS if kind.startswith(("eagle", "jump", "mtp"))]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", vocab_size=VOCABULARY))


def make(kind: str, target: Target, head: dict[str, Any] | None = None, **settings: Any) -> HeadProposer:
    name, shape = KINDS[kind]
    return HEAD_PROPOSERS[name](make_head(name, target, **{**shape, **(head or {})}), **settings)


def record(proposer: Any, target: Target, prompts: Sequence[list[int]] = PROMPTS, **settings: Any) -> Recorder:
    recorder = Recorder(proposer)
    generate(target, prompts, recorder, **{"max_new_tokens": 16, **settings})
    return recorder


class Written:
    """A head's probabilities after one text: each path is computed from the true features of all committed tokens.

    most: `head_window`, which holds in all layers.
    """

    def __init__(
        self, target: Target, head: Any, text: Sequence[int], noise: Any = None, most: int | None = None
    ) -> None:
        _, features = read_texts(target.open(1, head.features), [text[:-1]])
        assert features is not None
        self.head, self.text, self.noise, self.most = head, text, noise, most
        self.embed = getattr(head, "embed_tokens", None) or target.model.get_input_embeddings()
        if head.kind == "hydra":
            self.true = head.contextualize(features)
        else:
            self.true = head.fuse(features)

    def probabilities(self, path: Sequence[int]) -> Tensor:
        """The log-probabilities over the draft vocabulary after a path."""
        level, features = len(path), self.true
        if self.head.kind == "dflash":
            return self._adjust(self._score_pairs(self.read_block()[level], [self.text[-1], *path][-1]), level)
        if self.head.kind == "flashmap":
            states = self.read_slots()[level]
        elif self.head.kind == "medusa":
            states = self.head(features[0, -1])[level]
        elif self.head.kind == "multi-token":
            states = self.head(features, torch.arange(features.shape[1])[None], self.attend)[0, -1, level]
        elif self.head.kind == "hydra":
            states = self.head(features[0, -1], self.embed(torch.tensor([self.text[-1], *path])), level)
        elif self.head.kind == "jump":
            states = self.read_jump([self.text[-1], *path])
        elif self.head.kind == "peagle":
            tokens = torch.tensor([[*self.text[1:], *[self.head.config.mask_token] * level]])
            inputs = torch.cat([features, self.head.unknown(level)[1][None]], dim=1)
            states = self.head(self.embed(tokens), inputs, torch.arange(tokens.shape[1])[None], self.attend)[0, -1]
        else:
            for end in range(level + 1):
                tokens = torch.tensor([[*self.text[1:], *path[:end]]])
                grown = self.head(self.embed(tokens), features, torch.arange(tokens.shape[1])[None], self.attend)
                features = torch.cat([features, grown[:, -1:]], dim=1)
            states = features[0, -1]
        return self._adjust(self.head.logits(states, level), level)

    def read_jump(self, tokens: Sequence[int]) -> Tensor:
        """The state [H] of a jump head after draft tokens. Each sees the whole text and the draft tokens before it."""
        head, count = self.head, self.true.shape[1]
        text = head.read(self.true, torch.arange(count)[None])

        def attend_to_both(queries: Tensor, *own: Tensor) -> Tensor:
            parts = (torch.cat(pair, dim=2) for pair in zip(text, own, strict=True))
            return attend(queries, *parts, self.mask(count + queries.shape[2])[count:].double()[None, None])

        states = head.above(self.true[:, -1:])
        for size in range(1, len(tokens) + 1):
            positions, embedded = count + torch.arange(size)[None], self.embed(torch.tensor([tokens[:size]]))
            states = torch.cat([states, head(embedded, states, positions, attend_to_both)[:, -1:]], dim=1)
        return states[0, -1]

    def read_block(self) -> Tensor:
        """A block head's last states [L, H], from whole texts."""
        head, count = self.head, self.true.shape[1]
        keys, values = head.read(self.true, torch.arange(count)[None])
        windowed = self.mask(count + head.rows)[count:]
        full = windowed.clone() if self.most else torch.zeros_like(windowed)
        full[:, count:] = 0
        if not head.config.causal:
            windowed = full
        block = self.embed(torch.tensor([[self.text[-1], *[head.config.mask_token] * (head.rows - 1)]]))

        def see_all(queries: Tensor, own_keys: Tensor, own_values: Tensor, layer: int) -> Tensor:
            parts = (
                torch.cat([text[:, 2 * layer : 2 * layer + 2], own], dim=2).repeat_interleave(2, dim=1)
                for text, own in ((keys, own_keys), (values, own_values))
            )
            seen, weighed = parts
            mask = full if layer in head.config.full_layers else windowed
            return (queries @ seen.transpose(2, 3) / 8**0.5 + mask).softmax(dim=-1) @ weighed

        states = head(block, count + torch.arange(block.shape[1])[None], see_all)
        return states[0, -3:]

    def read_slots(self) -> Tensor:
        """A FlashMap head's states [L, W], from the whole text and the anchor."""
        head, count = self.head, self.true.shape[1]
        anchor = head.fuse_anchor(self.embed(torch.tensor([self.text[-1:]])))
        keys, values = head.read(torch.cat([self.true, anchor], dim=1), torch.arange(count + 1)[None])

        def see_all(queries: Tensor, layer: int) -> Tensor:
            heads = slice(4 * layer, 4 * layer + 4)
            scores = queries @ keys[:, heads].transpose(2, 3) / 8**0.5
            return (scores + mask).softmax(dim=-1) @ values[:, heads]

        mask = self.mask(count + 1 + head.depth)[count + 1 :, : count + 1]
        states: Tensor = head(count + 1 + torch.arange(head.depth)[None], see_all)[0]
        return states

    def mask(self, count: int) -> Tensor:
        before = torch.arange(count)[:, None] - torch.arange(count)
        window = self.most or self.head.window or count
        return torch.full((count, count), -1e30).masked_fill_((before >= 0) & (before < window), 0)

    def attend(self, *parts: Tensor, layer: int = 0) -> Tensor:
        return attend(*parts, self.mask(parts[0].shape[2]).double()[None, None])

    def _score_pairs(self, states: Tensor, token: int) -> Tensor:
        """A block head's logits [D] by the state [H] of a row, after a token. DFlash2 drafts the likeliest few only."""
        head, logits = self.head, self.head.logits(states)
        if not head.config.pair_rank:
            return logits
        if not head.config.candidates:
            return logits + head.markov_head.markov_w2.weight @ head.markov_head.markov_w1.weight[token]
        others = logits < logits.sort(descending=True).values[head.config.candidates - 1]
        selector = head.candidate_selector
        before = selector.predecessor_codebook[token] * (selector.hidden_projection.weight @ head.norm(states))
        return (logits + selector.successor_codebook @ before).masked_fill(others, -torch.inf)

    def _adjust(self, logits: Tensor, level: int) -> Tensor:
        if self.noise is not None:
            sampling, keys = self.noise
            logits = add_noise(logits[None, None], [sampling], keys[:, level], self.head.token_map)[0, 0]
        return logits.log_softmax(dim=-1)

    def best(self, path: Sequence[int], ranks: int) -> Paths:
        log_q = self.probabilities(path)
        best = log_q.topk(min(ranks, len(log_q)))
        tokens = self.head.tokens(best.indices).tolist()
        return {(*path, token): log_p for token, log_p in zip(tokens, best.values.tolist(), strict=True)}

    def grow(self, proposer: HeadProposer, nodes: int) -> Paths:
        """EAGLE-2's tree: the best paths of each level get next tokens; of all, the most likely are taken."""
        pool, beam = Paths(), {(): 0.0}
        for _ in range(proposer.depth):
            grown = {
                path: score + log_p
                for above, score in beam.items()
                for path, log_p in self.best(above, proposer.ranks).items()
            }
            pool |= grown
            beam = dict(_most_likely(grown, proposer.width))
        return dict(_most_likely(pool, nodes - 1))


def _most_likely(paths: Paths, count: int) -> list[Any]:
    return sorted(paths.items(), key=lambda item: -item[1])[:count]


def agree(drafted: Paths, expected: Paths) -> bool:
    return drafted.keys() == expected.keys() and all(
        score == pytest.approx(expected[path], rel=1e-5, abs=1e-5) for path, score in drafted.items()
    )


def request_of(text: tuple[int, ...]) -> int:
    return next(row for row, prompt in enumerate(PROMPTS) if [*text[: len(prompt)]] == prompt)


def has_room(text: tuple[int, ...]) -> bool:
    """Whether an answer of 30 tokens has room for 4 levels. Towards its end a row may get a larger tree for the sake of
    another one."""
    return len(text) - len(PROMPTS[request_of(text)]) <= 30 - 5


# ---- what is drafted ----


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_draft_is_the_tree_without_cache_and_mask(target: Target, kind: str) -> None:
    """Rows of a batch that accept differently, many steps on, end at different times."""
    shape = {"depth": 3, "width": 4} if kind in EAGLES else {}
    proposer = make(kind, target, nodes=14, **shape)
    sampling = Sampling(temperature=0.8, seed=1)
    recorder = record(proposer, target, sampling=sampling, stop_ids=[3, 9], max_new_tokens=30)
    found = [text for text, paths in recorder.drafted.items() if len(paths) == 13 and has_room(text)]
    assert len(found) > 20 and len({tree.batch for tree in recorder.trees}) > 1
    assert any(len({*accepted}) > 1 for accepted in recorder.accepted)
    for text in [*found[:4], *found[4::7]]:
        noise = sampling, row_keys(1, [request_of(text)], [len(text)], proposer.depth, TEXT)
        assert agree(recorder.drafted[text], Written(target, proposer.head, text, noise).grow(proposer, 14)), text


SHORTENED = ["eagle", "eagle3 of 2 layers", "peagle", "jump", "mtp", "dflash", "flashmap"]
SHORTENED += ["dflash with a window in some layers"]


@pytest.mark.parametrize("kind", SHORTENED)
@torch.no_grad()
def test_a_head_attends_to_as_few_tokens_as_it_is_told(target: Target, kind: str) -> None:
    shape = {"depth": 3, "width": 4} if kind in EAGLES else {}
    proposer = make(kind, target, nodes=14, head_window=5, **shape)
    drafted = record(proposer.renew(), target, max_new_tokens=30).drafted
    found = [text for text, paths in drafted.items() if len(paths) == 13 and has_room(text)]
    assert len(found) > 5 and max(map(len, found)) > 20
    for text in found[::6]:
        assert agree(drafted[text], Written(target, proposer.head, text, most=5).grow(proposer, 14)), text
    longest = max(found, key=len)
    assert not agree(drafted[longest], Written(target, proposer.head, longest).grow(proposer, 14))


@pytest.mark.parametrize("kind", ["multi-token", "hydra++", "eagle3", "peagle", "jump", "dflash"])
@torch.no_grad()
def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, target: Target, kind: str) -> None:
    for module in (feature_history, eagle):
        monkeypatch.setattr(module, "READ_AT_ONCE", 8)
    prompts = [[(7 * place + row) % VOCABULARY for place in range(size)] for row, size in enumerate((30, 8, 17))]
    proposer = make(kind, target, depth=2, nodes=8)
    drafted = record(proposer, target, prompts, max_new_tokens=10).drafted
    for text in [*drafted][:3]:
        assert agree(drafted[text], Written(target, proposer.head, text).grow(proposer, 8))


@pytest.mark.parametrize(
    "kind", ["hydra++", "eagle", "eagle3", "eagle with a window", "eagle3 with all else", "peagle", "jump"]
)
@torch.no_grad()
def test_of_a_prompt_only_the_last_token_goes_through_the_layer(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str
) -> None:
    """Of the others, the head needs keys and values."""
    monkeypatch.setattr(feature_history, "FEW", 4)
    monkeypatch.setattr(eagle, "READ_AT_ONCE", 8)
    tokens, finish = list[int](), DecoderLayer.finish

    def count(layer: DecoderLayer, residual: Tensor, mixed: Tensor) -> Tensor:
        tokens.append(residual.shape[1])
        return finish(layer, residual, mixed)

    proposer, prompts = make(kind, target, nodes=8), [[*range(3, 24)], [*range(24), *range(11)]]
    with monkeypatch.context() as patch:
        patch.setattr(DecoderLayer, "finish", count)
        drafted = record(proposer, target, prompts, max_new_tokens=10).drafted
    assert max(tokens) < 16
    for text in [*drafted][:3]:
        assert agree(drafted[text], Written(target, proposer.head, text).grow(proposer, 8))


@pytest.mark.parametrize("kind", ["peagle", "multi-token"])
def test_a_head_runs_once_a_draft(monkeypatch: pytest.MonkeyPatch, target: Target, kind: str) -> None:
    """Over new features and what is drafted; of a prompt, multi-token heads run on the last token only."""
    proposer = make(kind, target, nodes=8)
    head, sizes = type(proposer.head), list[int]()
    forward = head.forward

    def count(*args: Any) -> Tensor:
        states: Tensor = forward(*args)
        sizes.append(states.shape[1])
        return states

    monkeypatch.setattr(head, "forward", count)
    trees = record(proposer, target, PROMPTS[:1]).trees
    assert len(sizes) == sum(tree.width > 1 for tree in trees) > 3
    if kind == "multi-token":
        assert {*sizes} == {1}
    else:
        assert sizes[0] == len(PROMPTS[0]) + 2 and max(sizes[1:]) <= 6


LIMITS = [("WAITING", 1), ("WAITING", 64), ("MOST_UNREAD", 0), ("MOST_UNREAD", 5000)]  # steps, and bytes


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("kind", READ_ALL)
@torch.no_grad()
def test_no_feature_is_missed_while_drafting_backs_off(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(feature_history, *limit)
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0]))
    proposer = make(kind, target, depth=2)
    backing_off = iter([False, True, True, False, True] * 20)
    monkeypatch.setattr(proposer.draft_budget, "is_backing_off", lambda: next(backing_off))
    monkeypatch.setattr(proposer.draft_budget, "is_worth_a_level", lambda right: True)
    drafted = record(proposer, target, max_new_tokens=24, nodes=13).drafted
    drafts = {text: paths for text, paths in drafted.items() if len(paths) == 12}
    assert 8 < len(drafts) < len(drafted)
    for text, paths in [*drafts.items()][::4]:
        assert agree(paths, Written(target, proposer.head, text).grow(proposer, 13))


@pytest.mark.parametrize("kind", ["hydra++", "eagle3", "dflash"])
def test_features_that_nobody_reads_do_not_pile_up(target: Target, kind: str) -> None:
    """Requests that draft nothing overlap for long, so that no batch begins."""
    proposer, waiting, longest = make(kind, target), list[int](), list[int]()
    engine = Engine(target, proposer, rows=3, kept_bytes=0)
    for step in range(600):
        if step % 10 == 0:
            engine.add([3, 4, 5, step % VOCABULARY], nodes=1, max_new_tokens=25, stop_ids=[])
        engine.step()
        unread = proposer._history._unread
        waiting.append(sum(tensor.nbytes for part, _ in unread for tensor in (part.features, part.following)))
        longest.append(len(unread))
    engine.close()
    assert max(waiting[500:]) <= max(waiting[:100]) and max(longest) <= feature_history.WAITING + 1


@pytest.mark.parametrize("limit", [("WAITING", 9), ("MOST_UNREAD", 20_000)])
def test_waiting_features_are_few_tensors_and_bytes(
    monkeypatch: pytest.MonkeyPatch, target: Target, limit: tuple[str, int]
) -> None:
    """Of a request that goes on for long, too, while others join and end."""
    monkeypatch.setattr(feature_history, *limit)
    proposer, most = make("eagle3", target), 0
    engine = Engine(target, proposer, rows=3, kept_bytes=0)
    for step in range(150):
        if step % 20 == 0:
            length = 140 if step == 0 else 15
            engine.add([3, 4, 5, step % VOCABULARY], nodes=1, max_new_tokens=length, stop_ids=[])
        engine.step()
        parts = [part for part, _ in proposer._history._unread]
        found = len(parts) if limit[0] == "WAITING" else sum(part.features.nbytes for part in parts)
        most = max(most, found)
    engine.close()
    assert limit[1] / 2 < most <= limit[1]


@pytest.mark.parametrize("limit", [("WAITING", 5), ("MOST_UNREAD", 5000)])
@pytest.mark.parametrize("kind", READ_ALL)
@torch.no_grad()
def test_a_request_drafts_the_same_after_others_wait(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str, limit: tuple[str, int]
) -> None:
    """Its features, and those of requests that joined meanwhile, are read in time."""
    monkeypatch.setattr(feature_history, *limit)
    recorder = Recorder(proposer := make(kind, target, nodes=8))
    engine = Engine(target, recorder, rows=3)
    for step in range(40):
        if step in (0, 3, 9, 17, 30):
            engine.add([3, 4, 5, step % VOCABULARY], nodes=1 if step < 30 else 8, max_new_tokens=25, stop_ids=[])
        engine.step()
    drafts = {text: paths for text, paths in recorder.drafted.items() if len(paths) == 7}
    engine.close()
    assert len({text[3] for text in drafts}) > 1
    for text, paths in [*drafts.items()][::3]:
        assert agree(paths, Written(target, proposer.head, text).grow(proposer, 8))


@pytest.mark.parametrize("kind", MAIN)
def test_prepared_heads_draft_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights are not rounded here."""
    monkeypatch.setattr(backend, "round_layers", lambda module: None)
    target = Target(tiny("llama", vocab_size=VOCABULARY, dtype=torch.float32))
    for output in ("own", "shared", "target") if kind not in (*EAGLES, "peagle", "dflash", "flashmap") else (None,):
        proposer = make(kind, target, output and {"output": output}, depth=3, nodes=12)
        stock = record(proposer, target, max_new_tokens=8).drafted
        proposer.head.borrowed = None  # it is borrowed again
        prepared = proposer.renew().prepare(target)
        assert prepared.head is not proposer.head
        drafted = record(prepared, target, max_new_tokens=8).drafted
        assert drafted.keys() == stock.keys()
        for text, paths in drafted.items():
            assert sorted(paths.values()) == pytest.approx(sorted(stock[text].values()), rel=1e-3)
        again = record(proposer.renew(), target, max_new_tokens=8).drafted  # the head itself is unchanged
        assert again.keys() == stock.keys() and all(agree(again[text], paths) for text, paths in stock.items())


@needs_compiler
@pytest.mark.parametrize("kind", MAIN)
def test_prepared_heads_have_weights_of_8_bits(kind: str) -> None:
    """Unless their inputs are no whole blocks of 32. What they draft stays nearly as likely."""
    target = Target(tiny("llama", vocab_size=VOCABULARY, dtype=torch.float32, hidden_size=64, intermediate_size=96))
    proposer = make(kind, target, depth=3, nodes=12)
    stock = record(proposer, target, max_new_tokens=8).drafted
    prepared = proposer.renew().prepare(target)
    layers = [layer for part in (prepared.head, *prepared.head.outputs) for layer in part.modules()]
    layers = [layer for layer in layers if isinstance(layer, PackedLinear)]
    assert len(layers) > 3
    for layer in layers:
        forms = {form for form, _ in list_forms(layer.packed)}
        assert forms == {"float32" if layer.in_features % 32 else "8 bits"}
    drafted = record(prepared, target, max_new_tokens=8).drafted
    # Where another draft token is accepted, the next texts differ, and the depth that other rows have room for.
    both = drafted.keys() & stock.keys()
    shared = [text for text in both if {*map(len, drafted[text])} == {*map(len, stock[text])}]
    assert len(shared) > len(stock) / 2 if kind == "jump" else len(shared) == len(stock) == len(drafted)
    for text in shared:
        assert sum(drafted[text].values()) == pytest.approx(sum(stock[text].values()), rel=0.05)


# ---- the text ----


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", [*EAGLES, "peagle", "dflash", "dflash as published"])
def test_the_text_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str, temperature: float
) -> None:
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 2.0]))
    sampling = Sampling(temperature=temperature, seed=3)
    plain = texts(target, PROMPTS, None, sampling=sampling, max_new_tokens=10)
    trees: list[dict[str, Any]] = [{"nodes": 20}, {"width": 1, "nodes": 5}, {}]
    for batch_size in (1, 2, 4):
        for settings in trees[:: 2 if batch_size == 2 else 1]:
            proposer = make(kind, target, **settings)
            limits = {"batch_size": batch_size, "max_new_tokens": 10}
            assert texts(target, PROMPTS, proposer, sampling=sampling, **limits) == plain, settings


# ---- how many nodes ----


@pytest.mark.parametrize(
    ("kind", "settings", "budget", "expected"),
    [
        *((kind, {"nodes": 5}, 64, 5) for kind in MAIN),
        *((kind, {"nodes": 64}, 9, 9) for kind in MAIN),
        *((kind, {"nodes": 64}, 1, 1) for kind in MAIN),
        *((kind, {"nodes": 7}, 2, 2) for kind in MAIN),
        *((kind, {"nodes": 200}, 64, 64) for kind in MAIN),
        ("eagle", {"nodes": 64, "depth": 4, "width": 1}, 64, 5),  # a chain
        ("eagle", {"nodes": 64, "depth": 1, "width": 4}, 64, 5),
        ("eagle3", {"nodes": 64, "depth": 2, "width": 3}, 64, 13),
        ("eagle", {"nodes": 64, "depth": 3, "width": 30}, 40, 40),
    ],
)
def test_trees_respect_nodes_depth_width_and_budget(
    target: Target, kind: str, settings: dict[str, Any], budget: int, expected: int
) -> None:
    head = {} if kind in EAGLES else {"draft_size": VOCABULARY}
    trees = record(make(kind, target, head, **settings), target, nodes=budget, max_new_tokens=9).trees
    assert trees[0].width == expected
    assert max(int(tree.depth.max()) for tree in trees) <= settings.get("depth", 6)


def test_the_device_decides_how_many_nodes(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    widths = []
    for rise in (0.0, 0.02, 0.1, 5.0):
        fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0 + 63 * rise]))
        widths.append(record(make("medusa", target), target, max_new_tokens=9).trees[0].width)
    assert widths[0] == 64 > widths[1] > widths[2] > widths[3] == 1


@pytest.mark.parametrize(
    ("kind", "deepest", "all_levels"),
    [("medusa", 3, 3), ("dflash", 3, 3), ("hydra", 1, 3), ("eagle", 1, 6), ("eagle3", 1, 5)],
)
def test_levels_that_do_not_pay_are_left_out(
    monkeypatch: pytest.MonkeyPatch, target: Target, kind: str, deepest: int, all_levels: int
) -> None:
    """Each level takes a pass of the head, but Medusa and DFlash have all levels at once."""
    fix_cost(monkeypatch, target, CostCurve([1, 64], [1.0, 1.0]))
    monkeypatch.setattr(DraftBudget, "is_worth_a_level", lambda self, right: False)
    assert max(tree.height for tree in record(make(kind, target), target, max_new_tokens=9).trees) == deepest
    asked = record(make(kind, target, nodes=40), target, nodes=40, max_new_tokens=9).trees
    assert asked[0].height == all_levels  # a requested number of nodes is drafted


@pytest.mark.parametrize("kind", MAIN[:3])
@pytest.mark.parametrize("size", [1, 3, VOCABULARY])
def test_small_draft_vocabularies(target: Target, kind: str, size: int) -> None:
    proposer = make(kind, target, {"draft_size": size}, nodes=64)
    recorder = record(proposer, target, max_new_tokens=8)
    known = set(proposer.head.tokens(torch.arange(size)).tolist())
    assert {token for paths in recorder.drafted.values() for path in paths for token in path} <= known
    assert all(1 < tree.width <= 1 + size + size**2 + size**3 for tree in recorder.trees[:1])


# ---- what a head borrows, and errors ----


def test_a_matrix_borrowed_while_decoding_can_be_used_in_training(target: Target) -> None:
    proposer = make("medusa, target's output", target, nodes=8)
    proposer.head.borrowed = None
    record(proposer, target)
    assert not proposer.head.borrowed.is_inference()  # such tensors take part in no backward pass


@pytest.mark.parametrize("prepare", [False, True])
def test_a_borrowed_matrix_comes_with_its_bias(prepare: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "round_layers", lambda module: None)
    model = tiny("phi", dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.bias)
    target = Target(model)
    proposer = make("medusa, target's output", target)
    proposer.prepare(target) if prepare else proposer.begin(target)
    states = torch.randn(3, target.config.hidden_size)
    expected = model.lm_head(states)[:, proposer.head.token_map]
    assert torch.allclose(proposer.head.logits(states, 0), expected, atol=1e-5)


def test_a_borrowed_matrix_is_that_of_the_current_target(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (Target(tiny("llama", dtype=torch.float32, seed=seed)) for seed in (0, 1))
    proposer = make("medusa", one, {"output": "target", "draft_size": None}, nodes=8)
    for target in (one, other):
        generate(target, [[5, 9, 5]], proposer, max_new_tokens=2)
        assert torch.equal(proposer.head.borrowed, target.output_matrix)
    prepared = proposer.prepare(other)
    with pytest.raises(ValueError, match="was prepared for another target"):
        generate(one, [[5, 9, 5]], prepared, max_new_tokens=2)
    generate(Target(other.model, accelerate="auto"), [[5, 9, 5]], prepared, max_new_tokens=2)
    monkeypatch.setattr(other, "device", torch.device("meta"))
    with pytest.raises(ValueError, match="prepared for cpu, not meta; load it again"):
        prepared.begin(other)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("medusa", {"nodes": 0}, "nodes is 0"),
        ("medusa", {"depth": 10}, "depth is 10; this head drafts 3 levels"),
        ("eagle", {"depth": 0}, "depth 0 and width 10 must be at least 1"),
    ],
)
def test_bad_settings_are_refused(target: Target, kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(kind, target, **settings)


@pytest.mark.parametrize("kind", MAIN)
def test_a_head_for_another_target_is_refused(target: Target, kind: str) -> None:
    with pytest.raises(ValueError, match="hidden size is 32; this target's is 16"):
        generate(Target(tiny("llama", vocab_size=VOCABULARY, hidden_size=16)), [[5]], make(kind, target))


@pytest.mark.parametrize("model", ["gemma3_text", "llama"])
def test_a_block_head_reads_raw_embeddings(model: str) -> None:
    """Gemma's embedding layer multiplies them with the root of their size, and no published head was trained so."""
    target = Target(tiny(model))
    tokens = torch.tensor([[3, 5, 8]])
    for settings, scale in (({}, 1.0), ({"embedding_scale": 2.5}, 2.5)):
        proposer = HEAD_PROPOSERS["dflash"](make_head("dflash", target, **settings))
        expected = scale * target.embedding_matrix[tokens]
        torch.testing.assert_close(proposer.embedding(target)(tokens), expected)
        objective = make_objective(proposer.head, target, "kl", 0.8)
        torch.testing.assert_close(objective.embed(tokens), expected)


@torch.no_grad()
def test_logits_of_published_heads_can_be_scaled_and_capped(target: Target) -> None:
    drafts = []
    for settings in ({}, {"logit_factor": 3.0}, {"logit_factor": 3.0, "logit_cap": 2.0}):
        head = make_head("dflash", target, pair_rank=0, **settings)
        cache = LayerCache(1)
        cache.write(*head.read(torch.ones(1, 4, head.hidden_size, dtype=target.dtype), torch.arange(4)[None]))
        cache.keep([4])
        drafts.append(DFlashDrafter(head, torch.tensor([3]), cache, target.model.get_input_embeddings()).logits(1))
    torch.testing.assert_close(drafts[1], 3 * drafts[0])
    torch.testing.assert_close(drafts[2], 2 * (3 * drafts[0] / 2).tanh())
    with pytest.raises(ValueError, match="those with scaled or capped logits, cannot be trained here"):
        make_objective(head, target, "kl", 0.8)


def test_dflash2_drafts_no_more_tokens_than_it_chooses_among(target: Target) -> None:
    _, shape = KINDS["dflash2"]
    head = make_head("dflash", target, **shape)
    for width in (None, 12):
        recorder = record(HEAD_PROPOSERS["dflash"](head, width=width, nodes=24), target)
        for paths in recorder.drafted.values():
            assert sum(len(path) == 1 for path in paths) <= shape["candidates"]
