"""Loading a proposer by name, by folder, or as the best head for a target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode import PlainProposer, Target
from decode.models.cost_curve import CostCurve
from heads.checkpoint import save_head
from proposers import LookaheadProposer, MergedProposer, NGramProposer, load, load_best, load_proposer
from proposers.calibration import FILE, Calibration, load_calibration
from scripts.shared.options import ModelOptions, ProposerOptions, make_proposer
from tests.support.drafting import make_head
from tests.support.models import tiny


def calibrate_by_hand(folder: Path, p: float) -> None:
    """As if each of 3 heads' first draft token were right with probability p, the others never."""
    acceptance = ((p, 0.0),) * 3
    Calibration(acceptance, ((0.0, 1.0, 0.0),) * 3, (100,) * 3).save(folder)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama"))


@pytest.fixture
def heads(target: Target, tmp_path: Path) -> Path:
    """Heads for this target and for others. None is calibrated; one has a damaged calibration."""
    for kind in ("medusa", "hydra", "eagle3"):
        save_head(make_head(kind, target, output="own" if kind == "medusa" else "target"), tmp_path / kind)
    for name, changes in {
        "wide": {"hidden_size": 48},
        "wordy": {"vocab_size": 200},
        "deep": {"num_hidden_layers": 3},
    }.items():
        save_head(make_head("medusa", Target(tiny("llama", **changes))), tmp_path / name)
    save_head(make_head("medusa", target), tmp_path / "damaged")
    (tmp_path / "damaged" / FILE).write_text("{}")
    return tmp_path


def test_the_best_head_is_the_one_that_should_be_fastest(
    monkeypatch: pytest.MonkeyPatch, target: Target, heads: Path
) -> None:
    seconds = dict.fromkeys(("medusa", "hydra", "eagle3"), 1.0)
    monkeypatch.setattr(load, "time_step", lambda _, proposer: seconds[proposer.head.kind])
    monkeypatch.setattr(target, "cost_curve", lambda: CostCurve([1, 64], [1.0, 2.0]))

    def best(*names: str) -> str | None:
        proposer = load_best(target, [heads / name for name in names])
        return proposer and proposer.head.kind

    calibrate_by_hand(heads / "wide", 0.9)  # the best of all, and for another target
    assert best("wide", "wordy", "deep", "nowhere") is None and best() is None
    assert best("wide", "eagle3", "hydra") == "eagle3"  # none that fits is calibrated: the first
    calibrate_by_hand(heads / "hydra", 0.1)
    assert best("wide", "eagle3", "hydra", "medusa") == "hydra"
    calibrate_by_hand(heads / "medusa", 0.3)
    assert best("hydra", "medusa") == best("medusa", "hydra") == "medusa"
    seconds["medusa"] = 1.2  # for 1.3 + 0.09 + 0.027 tokens against 1.111
    assert best("hydra", "medusa") == "medusa"
    seconds["medusa"] = 1.3
    assert best("hydra", "medusa") == "hydra" and best("medusa") == "medusa"
    with pytest.raises(ValueError, match=r"calibration.json is no calibration"):
        best("hydra", "damaged")


def test_heads_are_tried_with_as_many_nodes_as_pay(
    monkeypatch: pytest.MonkeyPatch, target: Target, heads: Path
) -> None:
    tried = []
    monkeypatch.setattr(load, "time_step", lambda _, proposer: tried.append(proposer.nodes) or 1.0)
    for rise in (0.0, 0.1, 0.5):
        monkeypatch.setattr(target, "cost_curve", lambda rise=rise: CostCurve([1, 64], [1.0, 1.0 + 63 * rise]))
        calibrate_by_hand(heads / "medusa", 0.4)
        load_best(target, [heads / "medusa", heads / "hydra"])
    assert tried == [4, 3, 1]  # a head that was not calibrated is not tried


def test_timing_a_step_leaves_the_proposer_as_it_was(target: Target, heads: Path) -> None:
    proposer = load_proposer(heads / "medusa", target)
    draft_budget = proposer.draft_budget
    calibration = Calibration(((0.4, 0.1),) * 3, ((0.0, 1.0, 0.0),) * 3, (100,) * 3)
    assert all(0 < figure < load.inf for figure in load.try_head(target, proposer, calibration))
    assert (proposer.nodes, proposer.paths) == (None, None) and proposer.draft_budget is draft_budget
    assert load.try_head(target, proposer, None) == (0, load.inf)


def test_the_best_head_comes_with_its_calibration(target: Target, heads: Path) -> None:
    calibrate_by_hand(heads / "medusa", 0.3)
    proposer: Any = load_best(target, [heads / "medusa"])
    assert proposer.calibration == load_calibration(heads / "medusa")


def head_of(proposer: Any) -> str | None:
    """The kind of a merged proposer's head."""
    assert type(proposer) is MergedProposer
    return None if proposer.head is None else proposer.head.proposer.head.kind


def test_auto_takes_pretrained_heads_for_the_default_model_only(
    monkeypatch: pytest.MonkeyPatch, target: Target, heads: Path
) -> None:
    """The model here has the sizes of the heads, so only its name tells that they are not for it."""
    monkeypatch.setattr(load, "PRETRAINED", heads)
    monkeypatch.setattr(load, "time_step", lambda *_: 1.0)
    calibrate_by_hand(heads / "hydra", 0.2)

    def choose(model: str | None, head: Path | None) -> Any:
        return make_proposer(ProposerOptions("auto", head=head and str(head)), target, ModelOptions(model))

    assert head_of(choose(None, None)) == "hydra"
    assert head_of(choose("target", None)) is None
    assert head_of(choose("target", heads / "eagle3")) == head_of(choose(None, heads / "eagle3")) == "eagle3"
    monkeypatch.setattr(load, "PRETRAINED", heads / "none yet")
    assert head_of(choose(None, None)) is None


def test_depth_and_width_are_for_eagle_heads(target: Target, heads: Path) -> None:
    proposer: Any = load_proposer(heads / "eagle3", target, depth=4, width=2)
    assert (proposer.depth, proposer.width) == (4, 2)
    with pytest.raises(ValueError, match="medusa has no option depth, width; it has head, tree, nodes, sampled"):
        load_proposer(heads / "medusa", target, depth=4, width=2)
    with pytest.raises(ValueError, match="hydra has no option width"):
        load_proposer(heads / "hydra", target, width=2)


# ---- from a name to a proposer ----


def test_a_name_gives_its_proposer(monkeypatch: pytest.MonkeyPatch, target: Target, heads: Path) -> None:
    monkeypatch.setattr(load, "DRAFT_LAYERS", 1)
    monkeypatch.setattr(load, "PRETRAINED", heads)
    assert type(load_proposer("none", target)) is PlainProposer
    assert type(load_proposer("ngram", target)) is NGramProposer
    assert type(load_proposer("lookahead", target)) is LookaheadProposer
    for kind in ("medusa", "hydra", "eagle3"):
        proposer: Any = load_proposer(kind, target, nodes=5, sampled=True)
        assert (proposer.head.kind, proposer.nodes, proposer.sampled) == (kind, 5, True)
    assert load_proposer("eagle3", target, head=heads / "eagle3", tree="static").paths is not None
    assert load_proposer(str(heads / "hydra"), target).head.kind == "hydra"  # a folder in the place of a name
    with pytest.raises(ValueError, match="hydra' and head name a head's folder; give one"):
        load_proposer(str(heads / "hydra"), target, head=heads / "eagle3")


def test_a_draft_model_is_given_loaded_or_cut_from_the_target(
    monkeypatch: pytest.MonkeyPatch, target: Target, save_model: Callable[..., Path]
) -> None:
    monkeypatch.setattr(load, "DRAFT_LAYERS", 1)
    assert load_proposer("draft", target).draft.config.num_hidden_layers == 1
    proposer: Any = load_proposer("draft", target, draft_model=target, depth=3, width=2)
    assert (proposer.draft, proposer.length, proposer.width) == (target, 3, 2)
    loaded: Any = load_proposer("draft", target, draft_model=save_model(), sampled=True)
    assert loaded.draft.dtype == target.dtype and loaded.sampled
    with pytest.raises(ValueError, match="vocabulary of 50 tokens, the target one of 96"):
        load_proposer("draft", target, draft_model=Target(tiny("llama", vocab_size=50)))
    with pytest.raises(ValueError, match="width"):
        load_proposer("draft", target, draft_model=target, width=0)


def test_auto_takes_the_best_pretrained_head_if_any_fits(
    monkeypatch: pytest.MonkeyPatch, target: Target, heads: Path
) -> None:
    monkeypatch.setattr(load, "PRETRAINED", heads)
    monkeypatch.setattr(load, "time_step", lambda *_: 1.0)
    calibrate_by_hand(heads / "hydra", 0.2)
    assert head_of(load_proposer("auto", target)) == "hydra"
    assert head_of(load_proposer("auto", target, head=heads / "eagle3")) == "eagle3"
    assert head_of(load_proposer("merged", target, head=heads / "eagle3", nodes=5)) == "eagle3"
    assert head_of(load_proposer("merged", target)) is None
    assert head_of(load_proposer("auto", Target(tiny("llama", num_hidden_layers=1)))) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "oak",
            {},
            "proposer 'oak'; choose from none, ngram, .*, draft, medusa, hydra, eagle, eagle3, auto or",
        ),
        ("none", {"nodes": 3}, "none has no option nodes; it has none"),
        ("ngram", {"head": "x", "sampled": True}, "ngram has no option head, sampled"),
        ("draft", {"tree": "static"}, "draft has no option tree; it has draft_model, sampled, depth, width"),
        ("medusa", {"width": 3}, "medusa has no option width; it has head, tree, nodes, sampled"),
        ("auto", {"nodes": 3}, "auto has no option nodes; it has head"),
        ("medusa", {}, r"is for the default model \(.*this target's is 3\); .*head=\"FOLDER\""),
    ],
)
def test_bad_names_and_options_are_refused(
    monkeypatch: pytest.MonkeyPatch, heads: Path, name: str, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(load, "PRETRAINED", heads)
    with pytest.raises(ValueError, match=message):
        load_proposer(name, Target(tiny("llama", num_hidden_layers=3)), **options)
