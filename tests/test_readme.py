"""What the README shows from Python works as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import Target, generate
from heads import save_head
from tests.drafting import make_head
from tests.models import tiny

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.S)
OWN = [code for code in CODE if "class " in code]
SHOWN = [code for code in CODE if code not in OWN]


def test_the_few_lines_from_a_model_to_text(
    monkeypatch: pytest.MonkeyPatch, save_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target.load(save_model())
    save_head(make_head("eagle", target), tmp_path)
    monkeypatch.setattr(Target, "load", lambda: target)
    ids = torch.tensor([[5, 6, 5, 6, 5]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names: dict[str, Any] = {"model": target.model, "inputs": inputs}
    assert len(SHOWN) == 3 and sum(line != "" for line in SHOWN[0].splitlines()) <= 4
    for code in SHOWN:
        exec(code.replace('"HEAD"', repr(str(tmp_path))), names)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second == generate(target, ["Why is the sky blue?"])[0].text


def test_the_proposer_of_your_own() -> None:
    target, (source,) = Target(tiny("llama")), OWN
    names: dict = {}
    exec(source, names)
    proposer = next(value for name, value in names.items() if name.endswith("Proposer") and name != "Proposer")()
    prompts = [[5, 6, 5, 6, 5], [8, 9]]
    plain = generate(target, prompts, max_new_tokens=30)
    drafted = generate(target, prompts, proposer, max_new_tokens=30)
    assert [answer.tokens for answer in drafted] == [answer.tokens for answer in plain]
    assert sum(answer.stats.nodes for answer in drafted) > 0
    assert len(source.splitlines()) <= 20
