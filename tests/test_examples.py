"""The programs in examples/ run with a tiny model, and each is short."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

EXAMPLES = Path(__file__).parent.parent / "examples"
SAME = "the same tokens as plain decoding: True\n"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_examples_are_short(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) < 60


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps the number format of a process's first training; other tests train in another one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
def test_examples_run(
    save_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(save_model())
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nwhy?\n\nnot asked\n"))
    for name, text, count in (("generate_dropin", SAME, 1), ("own_proposer", SAME, 2), ("streaming_chat", "[tau ", 2)):
        import_module(f"examples.{name}").main(model)
        assert capsys.readouterr().out.count(text) == count
    import_module("examples.train_tiny_head").main(model, str(tmp_path))
    files = {path.name for path in (tmp_path / "my-head").iterdir()}
    assert files >= {"config.json", "model.safetensors", "calibration.json"}
    assert "tau" in capsys.readouterr().err
