"""A kind of head of one's own, `examples/gru_head.py`: trained, calibrated, checked and decoded without a new file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode import Target, generate
from draftless_commands import calibrate, check
from draftless_commands import generate as generate_command
from heads import KINDS, load_head
from heads.checkpoint import CONFIG, find_kind
from proposers import load_kind, load_proposer
from proposers.calibration import load_calibration
from tests.support.training_runs import train, walk

GRU = f"{Path(__file__).parents[2] / 'examples' / 'gru_head.py'}:Gru"


@pytest.fixture(scope="module")
def head(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gru")
    assert train(place, folder, "--kind", GRU, "--epochs", "6", "--lr", "1e-2") == 0
    return folder


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each command begins without the kind."""
    KINDS.pop("gru", None)
    yield
    KINDS.pop("gru", None)


def test_it_drafts_losslessly(place: Path, head: Path) -> None:
    target, prompts = Target.load(place, dtype="float64"), [walk(5, 3), walk(17, 6), [59]]
    plain, drafted = (
        generate(target, prompts, proposer, max_new_tokens=30, batch_size=2, stop_ids=())
        for proposer in (None, load_proposer(GRU, target, head=head, nodes=8))
    )
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert min(answer.stats.tau for answer in drafted) > 2
    for again in (load_proposer(head, target, depth=2), load_proposer("merged", target, head=head, nodes=8)):
        assert generate(target, prompts[:1], again, max_new_tokens=30, stop_ids=())[0].tokens == plain[0].tokens


def test_the_commands_take_it(place: Path, head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = head.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "x", "Q")))
    model = ["--model", str(place), "--device", "cpu"]
    calibrate.main(
        [*model, "--kind", GRU, "--head", str(head), "--prompt-file", str(prompts), "--max-new-tokens", "40"]
    )
    found = load_calibration(head)
    assert found is not None and len(found.acceptance) == 4 and found.acceptance[0][0] > 0.7
    forget = KINDS.pop("gru")
    check.main([str(head), *model, "--kind", GRU])
    assert "it does not serve gru heads" in capsys.readouterr().out
    assert KINDS.pop("gru") is not forget
    generate_command.main([*model, "--proposer", GRU, "--head", str(head), "--prompt", "a", "--max-new-tokens", "20"])
    assert capsys.readouterr().out


def test_code_that_a_folder_names_is_not_run(head: Path) -> None:
    section = json.loads((head / CONFIG).read_text())["draftless"]
    assert section["kind"] == "gru" and section["origin"] == GRU
    for read in (find_kind, load_head):
        with pytest.raises(ValueError, match="it is of kind 'gru', which is not one of ours: name its class, as in"):
            read(head)
    assert load_kind(GRU).name == find_kind(head) == load_head(head).kind == "gru"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("class Mine: ...", "Mine is no kind of head: it must be a subclass of heads.Kind"),
        ("class Mine(Kind): network = None", "Mine lacks network and config and proposer and objective"),
        ("class Mine(Kind):\n    network = KINDS['eagle'].network\n    config = proposer = objective = int", "'eagle'"),
    ],
)
def test_what_is_no_kind_is_refused(tmp_path: Path, row: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(f"from heads import KINDS, Kind\n\n{row}\n")
    with pytest.raises(ValueError, match=message):
        load_kind(f"{tmp_path}/mine.py:Mine")
