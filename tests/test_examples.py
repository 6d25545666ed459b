"""The programs in examples/ run with a tiny model, and each is short."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> str:
    return str(save_model())


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_examples_are_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60


def test_generate_dropin(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("examples.generate_dropin").main(model)
    assert capsys.readouterr().out.endswith("the same tokens as plain decoding: True\n")


def test_streaming_chat(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nwhy?\n\nnot asked\n"))
    import_module("examples.streaming_chat").main(model)
    assert capsys.readouterr().out.count("[tau ") == 2


def test_own_proposer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("examples.own_proposer").main(model)
    assert capsys.readouterr().out.count("the same tokens as plain decoding: True") == 2


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the number format of a process's first training; other tests train in another one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_train_tiny_head(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_module("examples.train_tiny_head").main(model, str(tmp_path))
    assert {"config.json", "model.safetensors", "calibration.json"} <= {
        path.name for path in (tmp_path / "my-head").iterdir()
    }
    assert "tau" in capsys.readouterr().err
