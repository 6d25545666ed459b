"""The pretrained heads: complete, small, and lossless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decode import Sampling, Target, generate
from heads import load_head
from proposers import load_proposer
from proposers.calibration import load_calibration
from tests.decode.test_default_text import PROMPTS

FOLDERS = sorted((Path(__file__).parents[2] / "heads" / "pretrained").glob("*/*"))
LARGEST = 24_000_000  # bytes


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_head_is_complete_and_small(folder: Path) -> None:
    assert [folder.name for folder in FOLDERS] == ["eagle", "eagle3", "hydra", "jump", "medusa"]
    head, calibration = load_head(folder), load_calibration(folder)
    assert head.kind == folder.name and calibration is not None
    assert calibration.expect_tau(16)[-1] > 1.5
    assert (folder / "model.safetensors").stat().st_size < LARGEST
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"**{part}" in card for part in ("Data", "Commands", "Tau", "Licence"))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_pretrained_heads_are_lossless(target: Target, temperature: float) -> None:
    """In float32, with one request and a ragged batch, with an automatic and a fixed draft budget."""
    settings: dict[str, Any] = {"sampling": Sampling(temperature=temperature, seed=7), "max_new_tokens": 16}
    plain = [answer.tokens for answer in generate(target, PROMPTS, None, batch_size=1, **settings)]
    for folder in FOLDERS:
        drafted = generate(target, PROMPTS, load_proposer(folder, target, nodes=16), batch_size=4, **settings)
        assert [answer.tokens for answer in drafted] == plain, folder.name
        assert sum(answer.stats.tokens for answer in drafted) > 1.2 * sum(answer.stats.steps for answer in drafted)
        alone = generate(target, PROMPTS[:1], load_proposer(folder, target), **settings)
        assert alone[0].tokens == plain[0], folder.name
