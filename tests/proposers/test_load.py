"""Loading a proposer by name, from a head's folder, or from a class of one's own; the choice of `auto`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import pytest
import torch

from decode import PlainProposer, Target, generate, speculate
from decode.models.fingerprint import fingerprint_weights
from heads.checkpoint import save_head
from proposers import MergedProposer, check_options, load, load_draft_head, load_proposer
from proposers import options as names
from proposers.calibration import Calibration, load_calibration
from tests.support.drafting import make_head, texts
from tests.support.models import tiny

OWN = """
from dataclasses import dataclass, field

from decode import PlainProposer


@dataclass
class Mine(PlainProposer):
    layers: tuple[int, ...] = ()
    seen: list[int] = field(default_factory=list)


class Greedy:
    def __init__(self, length, *, width=1): ...


class Other: ...


class Blind:
    def propose(self, step, budget): ...


class Chosen:
    layers = ()

    def __init__(self):
        self.propose = PlainProposer().propose


class Wrapped:
    def __getattr__(self, name):
        return getattr(PlainProposer(), name)


def build():
    return Mine()


three, mine = 3, Mine()
"""


@pytest.fixture(scope="module")
def heads(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of each kind for this target, one for a target of another width, and one that was calibrated."""
    folder = tmp_path_factory.mktemp("heads")
    for kind in ("medusa", "hydra", "eagle3"):
        save_head(make_head(kind, target, output="own" if kind == "medusa" else "target"), folder / kind)
    save_head(make_head("medusa", Target(tiny("llama", hidden_size=48))), folder / "wide")
    Calibration(((0.3, 0.0),) * 3, ((0.0, 1.0, 0.0),) * 3, (100,) * 3).save(folder / "hydra")
    (folder / "own.py").write_text(OWN)
    (folder / "broken.py").write_text("x = 1\nx / 0\n")
    (folder / "whole").mkdir()
    (folder / "whole" / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def pretrained(monkeypatch: pytest.MonkeyPatch, heads: Path) -> None:
    for module in (load, names):
        monkeypatch.setattr(module, "PRETRAINED", heads)


def head_of(proposer: Any) -> str | None:
    assert type(proposer) is MergedProposer
    return proposer.drafter and proposer.drafter.name


# ---- from a name to a proposer ----


def test_a_name_gives_its_proposer(target: Target, heads: Path) -> None:
    assert type(load_proposer("none", target)) is PlainProposer
    assert [getattr(load_proposer("ngram", target, nodes=nodes), "length", 0) for nodes in (None, 1, 16)] == [
        None,
        0,
        15,
    ]
    for kind in ("medusa", "hydra", "eagle3"):
        proposer: Any = load_proposer(kind, target, nodes=5)
        assert (proposer.head.kind, proposer.nodes) == (kind, 5)
    eagle: Any = load_proposer("eagle3", target, head=heads / "eagle3", nodes=7)
    assert (eagle.head.kind, eagle.nodes) == ("eagle3", 7)
    hydra: Any = load_proposer(str(heads / "hydra"), target)  # a folder in the place of a name
    assert hydra.head.kind == "hydra" and hydra.calibration == load_calibration(heads / "hydra") is not None
    eagle = load_proposer(heads / "eagle3", target, depth=4, width=2)
    assert (eagle.depth, eagle.width) == (4, 2)


def test_a_merged_tree_has_the_head_that_is_named_by_folder_or_kind(target: Target, heads: Path) -> None:
    assert head_of(load_proposer("merged", target)) is None
    assert head_of(load_proposer("merged", target, head=heads / "eagle3", nodes=5)) == "eagle3"
    assert head_of(load_proposer("merged", target, head="medusa")) == "medusa"
    assert head_of(load_proposer("auto", target, head="hydra")) == "hydra"


def test_a_draft_model_is_given_or_loaded(target: Target, save_model: Callable[..., Path]) -> None:
    proposer: Any = load_proposer("draft", target, draft_model=target, depth=3, width=2)
    assert (proposer.draft_model, proposer.depth, proposer.width) == (target, 3, 2)
    loaded: Any = load_proposer("draft", target, draft_model=save_model(), sampled=True)
    assert loaded.draft_model.dtype == target.dtype and loaded.sampled
    merged: Any = load_proposer("merged", target, draft_model=target, nodes=5)
    assert head_of(merged) == "draft" and merged.drafter.draft_model is target


# ---- auto ----


def choose_fastest(monkeypatch: pytest.MonkeyPatch, fastest: dict[str, str]) -> None:
    """The pretrained heads by the weights that they are for; none is loaded yet."""
    monkeypatch.setattr(load, "FASTEST", fastest)
    monkeypatch.setattr(load, "_loaded", WeakKeyDictionary())


def test_auto_takes_the_head_of_the_same_weights(monkeypatch: pytest.MonkeyPatch, target: Target, heads: Path) -> None:
    """The other model has the sizes of the heads: only its weights tell that they are not for it."""
    assert head_of(load_proposer("auto", target)) is None
    weights = fingerprint_weights(target.model)
    choose_fastest(monkeypatch, {weights: "hydra"})
    same, other = Target(target.model, accelerate="packed"), Target(tiny("llama", seed=7))
    assert head_of(load_proposer("auto", same)) == "hydra" and head_of(load_proposer("auto", other)) is None
    choose_fastest(monkeypatch, {weights: "eagle"})  # whose folder is not there
    assert head_of(load_proposer("auto", Target(target.model))) is None


def test_the_head_of_auto_is_loaded_once_and_learns_anew(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    choose_fastest(monkeypatch, {fingerprint_weights(target.model): "hydra"})
    same = Target(target.model)
    first, second = (load_proposer("auto", same).drafter for _ in range(2))  # type: ignore[attr-defined]
    assert first is not second and first.head is second.head and first.draft_budget is not second.draft_budget
    prompts, settings = [[1, 2, 3, 1, 2], [5, 6]], {"max_new_tokens": 24}
    assert texts(same, prompts, second, **settings) == texts(same, prompts, None, **settings)


def test_speculate_loads_the_head_of_auto_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each call has a target of its own."""
    model, loaded = tiny("llama"), list[str]()
    choose_fastest(monkeypatch, {fingerprint_weights(model): "hydra"})
    real = load.load_head
    monkeypatch.setattr(load, "load_head", lambda *given: [loaded.append(given[0].name), real(*given)][1])
    settings = {"max_new_tokens": 8, "do_sample": False}
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    expected = model.generate(ids, **settings)
    for _ in range(3):
        assert model.generate(ids, custom_generate=speculate, **settings).equal(expected)
    assert loaded == ["hydra"]


def test_the_head_of_auto_goes_with_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny("llama"))
    choose_fastest(monkeypatch, {fingerprint_weights(target.model): "hydra"})
    generate(target, [[1, 2, 3, 1, 2]], load_proposer("auto", target), max_new_tokens=4)
    model = ref(target.model)
    del target
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("vocabulary", [2, 11, 96])
def test_auto_fits_every_model_without_a_warning(vocabulary: int) -> None:
    small = Target(tiny("llama", vocab_size=vocabulary))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert head_of(load_proposer("auto", small)) is None


def test_a_head_that_cannot_draft_is_refused_without_a_warning_that_it_drafts(
    target: Target, heads: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Fewer draft tokens may be accepted if the head's target had other weights: that is told of a head that works."""
    monkeypatch.setattr(target, "_fingerprint", "x")
    for kind, settings in (("medusa", {}), ("wide", {"hidden_size": 48})):
        head = make_head("medusa", Target(tiny("llama", **settings)))
        head.config = replace(head.config, target_weights="y")
        save_head(head, heads / "elsewhere" / kind)
    for load_it in (load_proposer, load_draft_head):
        with pytest.raises(ValueError, match="hidden size is 48"):
            load_it(heads / "elsewhere" / "wide", target)
    assert not recwarn.list
    for load_it in (load_proposer, load_draft_head):
        with pytest.warns(UserWarning, match="was trained for a model with other weights than this target's"):
            load_it(heads / "elsewhere" / "medusa", target)


# ---- what is refused ----

BEFORE_LOADING = [
    ("oak", {}, "proposer 'oak'; choose from none, ngram, .*, auto, a head's folder and FILE.py:CLASS"),
    ("merged", {"draft_model": "TARGET", "head": "eagle3"}, "both head and draft_model name a drafter"),
    ("none", {"nodes": 3}, "none has no option nodes; it is for ngram, suffix, recycling, merged, draft, medusa"),
    ("draft", {}, "draft needs draft_model, a smaller model"),
    ("eagle", {}, "cannot load a head from .*eagle': there is no such local folder"),
    ("HEADS/hydra", {"head": "x"}, "hydra' and head name a head; give one"),
    ("HEADS/hydra", {"store": 1}, "hydra has no option store; it is for suffix, merged, auto"),
    ("merged", {"head_window": 64}, "head_window is for a head, and merged has none here; give head"),
    ("merged", {"head": "HEADS/hydra", "head_window": 64}, "hydra has no option head_window; it is for merged"),
    ("auto", {"head_window": 64, "draft_model": "TARGET"}, "head_window is for a head, and auto has none here"),
    (
        "medusa",
        {"head_window": 64},
        "medusa has no option head_window; it is for merged, eagle, eagle3, peagle",
    ),
    ("HEADS/eagle3", {"head_window": 0}, "head_window is 0; it must be at least 1"),
    ("HEADS/none.py:Mine", {}, "none.py:Mine': there is no such file"),
    ("medusa", {"head": "HEADS/hydra"}, "hydra is of kind hydra, not medusa"),
    ("HEADS/whole", {}, "cannot load a head from .*whole': it holds none of medusa_lm_head"),
    ("merged", {"draft_model": "HEADS/whole"}, "cannot load a model from .*whole': "),
    ("draft", {"draft_model": "TARGET", "width": 0}, "width is 0; it must be at least 1"),
    ("merged", {"nodes": 5000}, "nodes is 5000; a tree has its root and at most"),
    ("merged", {"nodes": "many"}, "nodes is 'many'; it must be a whole number from 1 on"),
    ("HEADS/own.py:Nobody", {}, "own.py has no class Nobody; it has Mine, Greedy, Other, Blind, Chosen, Wrapped$"),
    ("HEADS/own.py:Greedy", {}, "Greedy in .* must be made without arguments: missing .* 'length'"),
    ("HEADS/own.py", {}, "own.py' names a file; name the class too: .*own.py:CLASS"),
    ("./my-head", {}, "^there is no folder './my-head'"),
    ("HEADS/broken.py:Mine", {}, "broken.py, line 2: ZeroDivisionError: division by zero"),
]
WHILE_LOADING = [
    ("auto", {"head_window": 64}, "head_window is for a head, and auto has none for this target; give head"),
    ("HEADS/eagle3", {"head_window": 3}, "head_window is 3; a draft of 6 tokens needs at least as many"),
    ("HEADS/wide", {}, "hidden size"),
    ("draft", {"draft_model": "SMALL"}, "vocabulary of 50 tokens, the target one of 96"),
    ("HEADS/own.py:Blind", {}, "Blind is no proposer: Blind has no layers; write"),
    ("HEADS/own.py:Other", {}, "Other is no proposer: .* which has no layers and no propose"),
]


@pytest.mark.parametrize(("name", "options", "message"), [*BEFORE_LOADING, *WHILE_LOADING])
def test_what_is_wrong_is_refused(
    target: Target, heads: Path, name: str, options: dict[str, Any], message: str
) -> None:
    is_early = (name, options, message) in BEFORE_LOADING
    values = {f"HEADS/{each}": heads / each for each in ("hydra", "whole")}
    values |= {"TARGET": target, "SMALL": Target(tiny("llama", vocab_size=50))}
    name, options = name.replace("HEADS", str(heads)), {key: values.get(each, each) for key, each in options.items()}
    with pytest.raises(ValueError, match=message):
        load_proposer(name, target, **options)
    with pytest.raises(ValueError, match=message) if is_early else nullcontext():
        check_options(name, options)


@pytest.mark.parametrize("name", ["Mine", "Chosen", "Wrapped"])
def test_a_class_of_ones_own_is_loaded_from_its_file(name: str, target: Target, heads: Path) -> None:
    """One of the classes has no `propose`: its instances get it when they are made."""
    check_options(f"{heads}/own.py:{name}", {})
    proposer: Any = load_proposer(f"{heads}/own.py:{name}", target)
    assert type(proposer).__name__ == name
    [answer] = generate(target, [[1, 2, 3]], proposer, max_new_tokens=4, stop_ids=[])
    assert len(answer.tokens) == 4


def test_options_that_are_none_or_false_are_not_given() -> None:
    check_options("none", {"head": None, "nodes": None, "sampled": False})
    check_options("hydra", {})
    with pytest.raises(ValueError, match="hydra needs head, the folder of a head that was trained for this model"):
        check_options("hydra", {}, pretrained=False)
    check_options("auto", {}, pretrained=False)


def test_a_pretrained_head_says_which_model_it_is_for() -> None:
    with pytest.raises(ValueError, match=r"is for the default model \(.*this target's is 3\); .*head=\"FOLDER\""):
        load_proposer("medusa", Target(tiny("llama", num_hidden_layers=3)))
