"""Faults in a head's folder: each one raises an error of one line that names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import load_head
from tests.heads.test_head_folders import PREFIX, made
from tests.heads.test_head_layouts import PUBLISHED, made_hydra, made_medusa, name_all, name_hydra, write
from tests.heads.test_heads import HIDDEN, drawn
from tests.support.models import VOCABULARY


def spoil(tensors: dict[str, Tensor], **changed: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}


CONFIG = {"vocab_size": VOCABULARY, "truncated_vocab_size": 7, "draftless": {"prefix": {"head_dim": 4}}}
BLOCKS = {f"{i}.0.linear.weight": None for i in range(1, 5)}
MEDUSA = name_all(made_medusa())
HYDRA_HEAD = name_hydra(made_hydra(), True)
MAPPED = dict(made("medusa", draft_size=7).state_dict())
OWN_HYDRA = dict(made("hydra", prefix=PREFIX).state_dict())


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        (spoil(MEDUSA, **{"3.1.weight": None}), "missing: 3.1.weight$"),
        (spoil(MEDUSA, **{"0.0.linear.weight": None}), "missing: 0.0.linear.weight$"),
        (spoil(MEDUSA, **BLOCKS), "missing: 1.0.linear.weight, 2.0.linear.weight"),
        (spoil(MEDUSA, **dict.fromkeys([*MEDUSA][2:9])), r"missing: 1.*, 1.*, 2.*, 2.* and 3 more$"),
        (spoil(MEDUSA, **{"0.1.bias": drawn(VOCABULARY)}), "unexpected: 0.1.bias$"),
        (spoil(MEDUSA, **{"lm_head.weight": drawn(2, 2)}), "unexpected: lm_head.weight$"),
        (spoil(MEDUSA, **{"2.1.weight": drawn(7, HIDDEN)}), r"wrong: 2.1.weight is \[7, 8\], not \[96, 8\]$"),
        (spoil(MEDUSA, **{"2.0.linear.bias": drawn(1, HIDDEN)}), r"wrong: 2.0.linear.bias is \[1, 8\], not \[8\]$"),
        (spoil(MEDUSA, **{"0.0.linear.weight": drawn()}), r"0.0.linear.weight is \[\], not"),
        (spoil(MEDUSA, **{"2.1.weight": torch.ones(96, 8, dtype=torch.int8)}), "2.1.weight is of torch.int8"),
        (spoil(HYDRA_HEAD, **{"hydra_mlp.2.3.linear.bias": None}), "missing: hydra_mlp.2.3.linear.bias$"),
        (spoil(HYDRA_HEAD, **{"hydra_mlp.0.1.linear.weight": None}), "missing: hydra_mlp.0.1.linear.weight$"),
        (spoil(HYDRA_HEAD, **{"hydra_mlp.2.1.linear.weight": drawn(8, 8)}), r"is \[8, 8\], not \[8, 32\]$"),
        (spoil(HYDRA_HEAD, **{"prefix_embeding_layer.norm.weight": drawn(8)}), "missing: prefix_embeding_layer.layers"),
        (spoil(HYDRA_HEAD, hydra_what=drawn(8)), "unexpected: hydra_what$"),
        (spoil(OWN_HYDRA, **{"prefix.layer.mlp.up_proj.weight": drawn(9, 8)}), r"\[9, 8\], not \[10, 8\]$"),
        (spoil(OWN_HYDRA, **{"prefix.layer.self_attn.k_proj.weight": drawn(9, 8)}), "24 and 9 rows, .* head_dim 4;"),
        ({f"hydra_mlp.{i}.1.linear.weight": drawn(8, 8) for i in range(4)}, "grounded_heads: false"),
        (spoil(MAPPED, token_map=torch.arange(7) * 20), "token_map must be a list of different tokens, each below 96"),
        (spoil(MAPPED, token_map=torch.zeros(7, dtype=torch.long)), "token_map must be"),
        (spoil(MAPPED, token_map=torch.arange(7) - 1), "token_map must be"),
        (spoil(MAPPED, token_map=drawn(7)), "token_map must be"),
        (spoil(MAPPED, token_map=None), "missing: token_map, which must list its 7 of 96 tokens"),
        ({"fc.weight": drawn(8, 16), "layers.0.mlp.up_proj.weight": drawn(8, 8)}, "seems to be an EAGLE head"),
        ({"fc.weight": drawn(8, 24), "midlayer.hidden_norm.weight": drawn(8)}, "seems to be an EAGLE head"),
        ({"model.layers.0.mlp.up_proj.weight": drawn(8, 8)}, "seems to be a whole model without heads"),
        ({"bert.pooler.weight": drawn(8, 8)}, "of no known head: bert.pooler.weight$"),
        ({}, "of no known head"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_faulty_file_is_named(tmp_path, name, tensors, fault):
    write(tmp_path, name, tensors, CONFIG)
    with pytest.raises(ValueError, match=fault) as error:
        load_head(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(params=["medusa_lm_head.safetensors", "medusa_lm_head.pt", "old.pt"])
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An intact file of each format, including that of PyTorch before 1.6."""
    path = tmp_path / request.param.replace("old", "medusa_lm_head")
    write(tmp_path, path.name, MEDUSA, PUBLISHED)
    if request.param == "old.pt":
        torch.save(MEDUSA, path, _use_new_zipfile_serialization=False)
    return path


def test_truncated_files(published):
    load_head(published.parent)
    intact = published.read_bytes()
    for size in (0, 1, 7, 100, len(intact) // 2, len(intact) - 100, len(intact) - 1):
        published.write_bytes(intact[:size])
        with pytest.raises(ValueError, match=f"{published.name} is damaged") as error:
            load_head(published.parent)
        assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


def test_files_of_another_format(published):
    published.write_bytes(b"<html>404: not found</html>" * 100)
    with pytest.raises(ValueError, match=f"{published.name} is damaged"):
        load_head(published.parent)


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_in_a_pickle_is_run(tmp_path, zipped):
    harm = tmp_path / "harm"
    contents: list[Any] = [{**MEDUSA, "more": Harmful(harm)}, [*MEDUSA.values()], {"state_dict": MEDUSA}]
    for content in contents:
        torch.save(content, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"medusa_lm_head\.pt is damaged, or holds more than tensors"):
            load_head(tmp_path)
    assert not harm.exists()


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "config.json holds no JSON object"),
        ('{"vocab_size": "96"}', "vocab_size: '96'; it must be a positive number"),
        ('{"vocab_size": true}', "vocab_size: True; it must"),
        ('{"vocab_size": -1}', "vocab_size: -1; it must"),
        ('{"vocab_size": NaN}', "vocab_size: nan; it must"),
        ('{"draftless": 1}', "draftless: 1; it must be an object"),
        ("{}", "does not contain the target's vocabulary size"),
        ('{"vocab_size": 6}', "draft_size is 7; it must be from 1 to the vocabulary size, 6"),
    ],
)
def test_a_faulty_config_is_named(tmp_path, config, fault):
    write(tmp_path, "model.safetensors", MAPPED)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=fault):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ("nonsense", "model.safetensors.index.json is not JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": "b.safetensors"}}', "lists files that do not exist: b.safetensors"),
        ('{"weight_map": {"a": "../secret.bin"}}', "lists files that do not exist: ../secret.bin"),
    ],
)
def test_a_faulty_index_is_named(tmp_path, index, fault):
    (tmp_path / "secret.bin").touch()
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=fault):
        load_head(folder)


def test_folders_without_a_head(tmp_path):
    with pytest.raises(ValueError, match="/medusa-vicuna': there is no such local folder"):
        load_head("FasterDecoding/medusa-vicuna")
    with pytest.raises(ValueError, match=r"it holds none of medusa_lm_head.safetensors, .*, model.safetensors"):
        load_head(tmp_path)
