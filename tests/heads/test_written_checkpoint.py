"""Checkpoints written with a trained or a restored MTP module: read again as they were meant, all else as before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from decode import Target
from heads import MtpHead, load_head
from heads.formats import mtp, written_checkpoint
from heads.formats.written_checkpoint import SHARD, compose_modules, read_checkpoint, write_checkpoint
from heads.mtp import describe_block
from proposers import load_proposer
from tests.support.models import VOCABULARY, tiny
from tests.support.mtp_checkpoints import CHECKPOINTS, LAYOUTS, Change, make_checkpoint, nest, unchanged

INDEX = "model.safetensors.index.json"
FIELDS = {"deepseek": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers", "mimo": "num_nextn_predict_layers"}
FAMILIES = ["glm4_moe", "qwen3_5_text", "qwen2"]  # one of each layout
TEXT = torch.tensor([[5, 9, 5, 9, 5, 7, 8]])


def save(kind: str, folder: Path, change: Change = unchanged) -> Path:
    """A checkpoint in bfloat16, in several files, whose config tells of its module."""

    def in_half(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
        config |= {FIELDS[CHECKPOINTS[kind]]: 1, "dtype": "bfloat16"}
        change(tensors, config)

    make_checkpoint(kind, folder, in_half)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + 3 * place // len(names)}-of-00003.safetensors" for place, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.pt").write_text("of the trainer")
    return folder


def lose(folder: Path, into: Path, noise: float = 0.0) -> Path:
    """The checkpoint as a fine-tuning in transformers leaves it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape).to(weight)
    model.save_pretrained(into)
    assert not read_checkpoint(into).modules
    return into


@torch.no_grad()
def train(folder: Path, **sizes: Any) -> Any:
    """A module's head, changed."""
    head = load_head(folder, torch.float32, **sizes)
    generator = torch.Generator().manual_seed(1)
    for weight in head.parameters():
        weight += 0.2 * torch.randn(weight.shape, generator=generator)
    return head


def assert_equal_bytes(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: each.dtype for name, each in expected.items()
    }
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_is(head: Any, trained: Any) -> None:
    """A head that was loaded is the trained one, rounded."""
    expected = {name: tensor.bfloat16().float() for name, tensor in trained.state_dict().items()}
    found = {name: tensor.bfloat16().float() for name, tensor in head.state_dict().items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def load(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    return model


@pytest.mark.parametrize("kind", CHECKPOINTS)
@torch.no_grad()
def test_a_trained_module_takes_the_place_of_the_checkpoints(kind: str, tmp_path: Path) -> None:
    place, out = save(kind, tmp_path / "model"), tmp_path / "new" / "out"
    before, head = read_checkpoint(place), train(place)
    write_checkpoint(before, before, out, head)
    after = read_checkpoint(out)
    assert_equal_bytes(after.others, before.others)
    assert {name: (each.dtype, each.shape) for name, each in after.modules.items()} == {
        name: (each.dtype, each.shape) for name, each in before.modules.items()
    }
    model = load(out)
    torch.testing.assert_close(model(TEXT).logits, load(place)(TEXT).logits, rtol=0, atol=0)
    proposer: Any = load_proposer("mtp", Target(model))
    assert_is(proposer.head, head)

    write_checkpoint(after, after, tmp_path / "back", load_head(place))
    assert_equal_bytes(read_checkpoint(tmp_path / "back").modules, before.modules)
    assert {file.name for file in (tmp_path / "back").iterdir()} == {file.name for file in out.iterdir()}


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_files_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    place = save(kind, tmp_path / "model")
    before = read_checkpoint(place)
    write_checkpoint(before, before, tmp_path / "out", train(place))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    whole = {name for name, (tensors, _) in before.files.items() if not tensors.keys() - before.modules.keys()}
    assert {*written} == {file.name for file in place.iterdir()} - {"optimizer.pt", *whole} | {SHARD}
    without = {name for name, (tensors, _) in before.files.items() if not tensors.keys() & before.modules.keys()}
    assert without
    for name in ("config.json", "generation_config.json", "tokenizer.json", *without):
        assert written[name] == (place / name).read_bytes()
    held = {name: file for file in {*index["weight_map"].values()} for name in load_file(tmp_path / "out" / file)}
    assert index["weight_map"] == held and {name for name, file in held.items() if file == SHARD} == {*before.modules}
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in {*held.values()} for tensor in load_file(tmp_path / "out" / file).values()
    )


@pytest.mark.parametrize("kind", CHECKPOINTS)
@torch.no_grad()
def test_a_fine_tuned_model_gets_its_module_back(kind: str, tmp_path: Path) -> None:
    base = save(kind, tmp_path / "base")
    tuned, out = lose(base, tmp_path / "tuned", noise=0.01), tmp_path / "out"
    config = json.loads((tuned / "config.json").read_text())
    field = FIELDS[CHECKPOINTS[kind]]
    (tuned / "config.json").write_text(json.dumps(config | {field: 0}))
    write_checkpoint(read_checkpoint(tuned), read_checkpoint(base), out)
    found = read_checkpoint(out)
    assert_equal_bytes(found.modules, read_checkpoint(base).modules)
    assert_equal_bytes(found.others, load_file(tuned / "model.safetensors"))
    assert json.loads((out / "config.json").read_text()) == config | {field: 1}
    model = load(out)
    torch.testing.assert_close(model(TEXT).logits, load(tuned)(TEXT).logits, rtol=0, atol=0)
    proposer: Any = load_proposer("mtp", Target(model))
    if CHECKPOINTS[kind] == "deepseek":  # what were copies of the base's matrices
        assert proposer.head.config.embedding and proposer.head.config.output == "shared"
    assert not {file.name for file in out.iterdir()} & {"model.safetensors", "optimizer.pt"}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_lost_module_may_be_trained_first(kind: str, tmp_path: Path) -> None:
    """From the base's, with the fine-tuned model's matrices: these are the ones that it was trained with."""
    base = save(kind, tmp_path / "base")
    tuned = lose(base, tmp_path / "tuned", noise=0.01)
    head = train(base)
    assert head.config.output == "target" and not head.config.embedding
    write_checkpoint(read_checkpoint(tuned), read_checkpoint(base), tmp_path / "out", head)
    found = load_head(tmp_path / "out")
    assert not found.config.embedding and found.config.output == "target"
    assert_is(found, head)


def own_matrices(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Of the module, with rows for tokens that the target does not have."""
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"model.layers.2.{name}.weight"] = torch.randn(VOCABULARY + 4, 32).bfloat16()


def test_a_modules_own_matrices_are_written(tmp_path: Path) -> None:
    place = save("glm4_moe", tmp_path / "model", own_matrices)
    before, head = read_checkpoint(place), train(place)
    assert head.config.embedding and head.config.output == "shared"
    write_checkpoint(before, before, tmp_path / "out", head)
    assert_is(load_head(tmp_path / "out"), head)
    for name in ("embed_tokens", "shared_head.head"):
        one, other = (
            each.modules[f"model.layers.2.{name}.weight"] for each in (before, read_checkpoint(tmp_path / "out"))
        )
        torch.testing.assert_close(other[VOCABULARY:], one[VOCABULARY:], rtol=0, atol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_further_modules_are_kept(kind: str, tmp_path: Path) -> None:
    inner = LAYOUTS[CHECKPOINTS[kind]][5].format(2)
    *begin, number, _ = inner.split(".")
    second = ".".join([*begin, str(int(number) + 1), ""])

    def repeat(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= {name.replace(inner, second): 0 * each for name, each in tensors.items() if name.startswith(inner)}

    base = save(kind, tmp_path / "base", repeat)
    tuned, before, head = lose(base, tmp_path / "tuned"), read_checkpoint(base), train(base)
    for name, model in (("one", base), ("other", tuned)):
        write_checkpoint(read_checkpoint(model), before, tmp_path / name, head)
        after = read_checkpoint(tmp_path / name)
        assert {*after.modules} == {*before.modules}
        changed = {each for each, tensor in after.modules.items() if not tensor.equal(before.modules[each])}
        assert changed and not any(each.startswith(second) for each in changed)
        assert_is(load_head(tmp_path / name), head)


def test_the_text_part_of_a_model_that_sees_gets_its_bases_module(tmp_path: Path) -> None:
    """And the other way round: the fields are set where the config describes the text model."""
    make_checkpoint("qwen3_5_text", tmp_path / "text", lambda tensors, config: config.update(mtp_num_hidden_layers=1))
    make_checkpoint("qwen3_5_text", tmp_path / "pictures", nest)
    text, pictures = read_checkpoint(tmp_path / "text"), read_checkpoint(tmp_path / "pictures")
    write_checkpoint(pictures, text, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == pictures.config | {"text_config": pictures.config["text_config"] | {"mtp_num_hidden_layers": 1}}
    write_checkpoint(text, read_checkpoint(tmp_path / "out"), tmp_path / "back")
    assert_equal_bytes(read_checkpoint(tmp_path / "back").modules, text.modules)


def forget(folder: Path) -> None:
    shutil.copytree(lose(folder, folder.parent / "lost"), folder, dirs_exist_ok=True)
    (folder / INDEX).unlink()


def quantize(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "fp8"})


def change_config(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def pickle(folder: Path) -> None:
    (folder / INDEX).unlink()
    torch.save({}, folder / "pytorch_model.bin")


FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("base", forget, "base has no MTP module"),
    ("base", quantize, "base': it is quantized, which is not supported"),
    ("base", pickle, "base': it holds none of model.safetensors, model.safetensors.index.json"),
    ("model", quantize, "model': it is quantized, which is not supported"),
    ("model", lambda folder: (folder / "config.json").unlink(), "model': it holds no config.json"),
    ("model", lambda folder: change_config(folder, hidden_size=48), "hidden_size is 32 there and 48 here"),
    ("model", lambda folder: change_config(folder, num_hidden_layers=3), "num_hidden_layers is 2 there and 3 here"),
    ("model", lambda folder: change_config(folder, model_type="llama"), "model_type is glm4_moe there and llama here"),
    (
        "model",
        lambda folder: change_config(folder, moe_intermediate_size=8),
        "model: (wrong in|its MTP module cannot be)",
    ),
    ("model", lambda folder: change_config(folder, vocab_size=VOCABULARY + 2), r"is \[96, 32\], not \[98, 32\]"),
]


@pytest.mark.parametrize(("place", "spoil", "message"), FAULTS)
def test_what_cannot_be_written_is_refused(
    place: str, spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    save("glm4_moe", tmp_path / "base")
    lose(tmp_path / "base", tmp_path / "model", noise=0.01)
    spoil(tmp_path / place)
    with pytest.raises(ValueError, match=message):
        write_checkpoint(read_checkpoint(tmp_path / "model"), read_checkpoint(tmp_path / "base"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_form_is_refused(tmp_path: Path) -> None:
    place = read_checkpoint(save("glm4_moe", tmp_path / "model"))
    config: Any = load_head(tmp_path / "model").config
    dense = MtpHead(replace(config, block=describe_block(tiny("glm4_moe").config, sparse=False)))
    for head, message in (
        (train(save("qwen3_5_text", tmp_path / "other")), "another family's module"),
        (dense, "different layers: mlp.down_proj.weight"),
        (MtpHead(replace(config, hidden_size=24)), r"eh_proj.weight is \[24, 48\], the MTP module's \[32, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            compose_modules(place, place, head)
    place = read_checkpoint(save("qwen2", tmp_path / "without"))
    config = load_head(tmp_path / "without").config
    with pytest.raises(ValueError, match="the head has its own embed_tokens, and the module has none"):
        compose_modules(place, place, MtpHead(replace(config, embedding=True)))


def test_a_module_that_would_be_read_as_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For models whose tensors transformers converts in one direction alone."""
    place = read_checkpoint(save("glm4_moe", tmp_path))
    revert = mtp.revert_weight_conversion

    def swap(*given: Any) -> dict[str, Tensor]:
        found = revert(*given)
        return {name: found[name.replace("gate_proj", "up_proj")] for name in found}

    monkeypatch.setattr(mtp, "revert_weight_conversion", swap)
    with pytest.raises(ValueError, match="gate_up_proj of the MTP module would be read as another tensor"):
        compose_modules(place, place, train(tmp_path))


def test_nothing_is_left_after_an_error_or_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, out = read_checkpoint(save("glm4_moe", tmp_path / "model")), tmp_path / "new" / "out"

    def fail(*_: Any) -> None:
        assert not out.exists() and [*out.parent.glob(".saving-out/*")]
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(written_checkpoint, "save_file", fail)
        write_checkpoint(place, place, out)
    assert [*out.parent.iterdir()] == []
    (out.parent / ".saving-out").mkdir()  # of a run that was killed
    (out.parent / ".saving-out" / "half").touch()
    out.mkdir()
    write_checkpoint(place, place, out)
    assert [*out.parent.iterdir()] == [out] and not (out / "half").exists()
    assert_equal_bytes(read_checkpoint(out).modules, place.modules)
    with pytest.raises(OSError, match="not empty"):
        write_checkpoint(place, place, out)
