"""MTP modules of checkpoints: read in every layout, equal to the target's own layer, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, modeling_layers

from decode import Sampling, Target
from decode.prefill import read_texts
from heads import checkpoint, load_head, save_head
from heads.formats import mtp
from proposers import EagleProposer, load_draft_head, load_proposer
from tests.support.drafting import texts
from tests.support.models import tiny
from tests.support.mtp_checkpoints import CHECKPOINTS, LAYOUTS, Change, make_checkpoint, nest, unchanged
from training.data import Example
from training.factory import make_head

PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9, 10], [1, 2, 3], [4, 4, 20, 21, 22, 4, 4, 20]]
TEXT = torch.tensor([[5, 9, 5, 9, 5, 7, 8]])


@cache
def build_target(kind: str, folder: Path) -> Target:
    make_checkpoint(kind, folder)
    settings = {"dtype": torch.float64, "experts_implementation": "eager"}
    return Target(AutoModelForCausalLM.from_pretrained(folder, **settings).eval())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def make_norm(model: Any, weight: Tensor) -> nn.Module:
    norm: Any = deepcopy(model.model.norm)
    norm.weight.data = weight
    return norm


def compute(model: Any, parts: Mapping[str, Tensor], embedded: Tensor, states: Tensor, reverse: bool) -> Tensor:
    """The module's states [B, N, H] before its last norm, by the target's own layer over whole texts."""

    def norm(name: str, inputs: Tensor) -> Tensor:
        return make_norm(model, parts[name])(inputs)

    inputs = [norm("enorm", embedded), norm("hnorm", states)]
    joined = nn.functional.linear(torch.cat(inputs[::-1] if reverse else inputs, dim=-1), parts["eh_proj"])
    count = joined.shape[1]
    positions = torch.arange(count)[None]
    sections = positions.expand(3, 1, -1) if "qwen3_5" in model.config.model_type else positions
    table = model.model.rotary_emb(joined, sections)
    mask = torch.full((1, 1, count, count), -1e30, dtype=torch.float64).triu(1)
    output = model.model.layers[-1](joined, position_embeddings=table, attention_mask=mask, position_ids=positions)
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("kind", CHECKPOINTS)
@torch.no_grad()
def test_a_module_computes_what_the_targets_own_layer_does(kind: str, tmp_path: Path) -> None:
    model, parts = make_checkpoint(kind, tmp_path)
    head = load_head(tmp_path)
    assert head.config.states_first == (CHECKPOINTS[kind] == "mimo")
    assert head.config.normed_feedback == (CHECKPOINTS[kind] != "deepseek")
    embedded, states = torch.randn(2, 1, 9, model.config.hidden_size, dtype=torch.float64)
    expected = compute(model, parts, embedded, states, head.config.states_first)
    found = head(embedded, states, torch.arange(9)[None])
    norm = make_norm(model, parts["norm"])
    if head.config.normed_feedback:
        torch.testing.assert_close(found, norm(expected), rtol=0, atol=1e-6)  # norms are computed in float32
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(head.normalise(found), norm(expected), rtol=0, atol=1e-6)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="its MTP takes other arguments")
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_a_module_drafts_the_first_token_of_transformers_mtp(kind: str, folders: Path) -> None:
    target = build_target(kind, folders / kind)
    target.model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # it knows the published models' number
    theirs: Any = modeling_layers.MtpModel.from_pretrained(target.model).double()
    theirs.set_attn_implementation("eager")
    theirs.set_experts_implementation("eager")
    found, states = draft(load_proposer("mtp", target), target)
    _, expected, *_ = theirs(TEXT[:, 1:], states, None, torch.arange(1, TEXT.shape[1])[None], None)
    torch.testing.assert_close(found[:, -1], expected[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_module_of_the_targets_checkpoint_changes_no_text(kind: str, temperature: float, folders: Path) -> None:
    """Rows of different lengths, in trees, or chains where the model has a recurrent state."""
    target = build_target(kind, folders / kind)
    settings: dict[str, Any] = {"sampling": Sampling(temperature=temperature, seed=2), "stop_ids": []}
    plain = texts(target, PROMPTS, None, max_new_tokens=10, **settings)
    proposer = load_proposer("mtp", target, nodes=12)
    merged: Any = load_proposer("merged", target, head="mtp")
    assert isinstance(proposer, EagleProposer) and isinstance(merged.drafter, EagleProposer)
    assert texts(target, PROMPTS, proposer, max_new_tokens=10, **settings) == plain


def test_a_module_is_saved_and_loaded_without_the_checkpoint(tmp_path: Path) -> None:
    make_checkpoint("qwen3_5_moe_text", tmp_path / "checkpoint")
    head = load_head(tmp_path / "checkpoint", torch.float32)
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert loaded.config == head.config
    torch.testing.assert_close(loaded.state_dict(), head.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="it holds something else"):
        save_head(head, tmp_path / "checkpoint")


def test_the_kind_is_found_without_reading_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting experts takes minutes in a large checkpoint."""
    make_checkpoint("qwen3_next", tmp_path)
    monkeypatch.setattr(mtp, "_convert", lambda *given: pytest.fail("the module was read"))
    assert checkpoint.find_kind(tmp_path) == "mtp"


def drop(name: str) -> Change:
    return lambda tensors, config: [tensors.pop(each) for each in list(tensors) if each.endswith(name)] and None


def shorten(name: str) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    return change


def put(added: Mapping[str, Tensor] = MappingProxyType({}), **settings: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors |= added
        config |= settings

    return change


def give(kind: str, embeddings: float | None = None, output: float | None = None, then: Change = unchanged) -> Change:
    """Give the module matrices of its own: the target's plus noise of these sizes. None: as they are."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        outer = LAYOUTS[CHECKPOINTS[kind]][4].format(config["num_hidden_layers"])
        head = "shared_head.head" if CHECKPOINTS[kind] == "deepseek" else "lm_head"
        for name, given, added in (("embed_tokens", "model.embed_tokens", embeddings), (head, "lm_head", output)):
            if added is not None:
                weight = tensors[f"{given}.weight"]
                noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
                tensors[f"{outer}{name}.weight"] = weight + added * noise
        then(tensors, config)

    return change


def keep_module(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """As a file of the module alone."""
    for name in [*tensors]:
        if not name.startswith("model.layers.2."):
            del tensors[name]


def draft(proposer: Any, target: Target) -> tuple[Tensor, Tensor]:
    """A head's logits after a text, as a proposer computes them, and the features that it read."""
    _, states = read_texts(target.open(1, proposer.head.features), [TEXT[0, :-1].tolist()])
    assert states is not None
    found = proposer.head(proposer.embedding(target)(TEXT[:, 1:]), states, torch.arange(TEXT.shape[1] - 1)[None])
    return proposer.head.logits(found), states


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "qwen3_5_text", "qwen2"])
@pytest.mark.parametrize(("embeddings", "output"), [(1.0, 1.0), (1.0, 0.0), (0.0, 0.03), (0.0, 0.0)])
@torch.no_grad()
def test_a_modules_own_matrices_are_used(kind: str, embeddings: float, output: float, tmp_path: Path) -> None:
    model, parts = make_checkpoint(kind, tmp_path, give(kind, embeddings, output))
    target = Target(model.eval())
    target.model.config.name_or_path = target.model.name_or_path = str(tmp_path)
    proposer: Any = load_proposer("mtp", target, nodes=9)
    head, tensors = proposer.head, load_file(tmp_path / "model.safetensors")
    assert (head.config.embedding, head.config.output) == (embeddings > 0, "shared" if output else "target")

    outer = LAYOUTS[CHECKPOINTS[kind]][4].format(model.config.num_hidden_layers)
    name = "shared_head.head" if CHECKPOINTS[kind] == "deepseek" else "lm_head"
    found, states = draft(proposer, target)
    embedded = tensors[f"{outer}embed_tokens.weight"][TEXT[:, 1:]]
    expected = compute(model, parts, embedded, states, head.config.states_first)
    expected = make_norm(model, parts["norm"])(expected) @ tensors[f"{outer}{name}.weight"].T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    plain, drafted = (texts(target, PROMPTS, each, max_new_tokens=8, stop_ids=[]) for each in (None, proposer))
    assert drafted == plain


COPIED = [f"model.layers.2.{name}" for name in ("embed_tokens", "shared_head.head")]


def pad(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name in COPIED:
        tensors[f"{name}.weight"] = torch.cat([tensors[f"{name}.weight"], tensors[f"{name}.weight"][:5]])


def round_copies(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    for name in COPIED:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].bfloat16()


def quantize_output(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    name = COPIED[1]
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)


def tie(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = True
    tensors["model.layers.2.shared_head.head.weight"] = tensors["model.embed_tokens.weight"].clone()
    del tensors["lm_head.weight"]


@pytest.mark.parametrize("change", [unchanged, pad, round_copies, tie])
def test_copies_of_the_targets_matrices_are_not_kept(change: Change, tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path, change)
    head = load_head(tmp_path)
    assert (head.config.embedding, head.config.output) == (False, "target")
    assert head.embed_tokens is None and not hasattr(head, "lm_head")


@pytest.mark.parametrize("change", [unchanged, pad, round_copies])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [None, 1.0])
def test_a_file_of_the_module_alone_is_compared_with_the_target(
    change: Change, dtype: torch.dtype, added: float | None, tmp_path: Path
) -> None:

    def all_changes(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        give("deepseek_v3", added, added, change)(tensors, config)
        keep_module(tensors, config)

    model, _ = make_checkpoint("deepseek_v3", tmp_path, all_changes)
    apart = load_head(tmp_path)
    assert apart.config.embedding and apart.config.output == "shared"
    head: Any = load_draft_head(tmp_path, Target(model.to(dtype).eval()))
    assert (head.config.embedding, head.config.output) == ((False, "target") if added is None else (True, "shared"))
    save_head(head, tmp_path / "saved")
    torch.testing.assert_close(load_head(tmp_path / "saved").state_dict(), head.state_dict(), rtol=0, atol=0)


def move(number: int) -> Change:

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [*tensors]:
            for before in ("model.layers.2.", "model.mtp_layers.0.", "mtp.layers.0."):
                if name.startswith(before):
                    after = ".".join([*before.split(".")[:-2], str(number), ""])
                    tensors[after + name.removeprefix(before)] = tensors.pop(name)

    return change


def remove_layer(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    parts = ("attn", "mlp", "input_layernorm", "post_attention_layernorm")
    for name in [*tensors]:
        is_inside = name.startswith(("model.layers.2.", "model.mtp_layers.0.", "mtp.layers.0."))
        if is_inside and any(part in name for part in parts):
            del tensors[name]


def test_a_module_apart_from_its_model_may_be_numbered_from_0(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        keep_module(tensors, config)
        move(0)(tensors, config)

    make_checkpoint("deepseek_v3", tmp_path / "whole")
    make_checkpoint("deepseek_v3", tmp_path / "apart", change)
    whole, apart = (load_head(tmp_path / name).state_dict() for name in ("whole", "apart"))
    assert {*apart} - {*whole} == {"embed_tokens.weight", "lm_head.weight"}
    torch.testing.assert_close({name: apart[name] for name in whole}, whole, rtol=0, atol=0)


NO_LAYER = "missing: all tensors of the layer of its MTP module, whose names begin with "
SCALE, SIDE = "mtp.layers.0.mlp.up_proj.weight_scale_inv", "mtp.layers.0.mlp.side_proj.weight"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("deepseek_v3", move(3), "its first MTP module, model.layers.2, is missing; it has model.layers.3$"),
        ("qwen2", move(1), "its first MTP module, model.mtp_layers.0, is missing"),
        ("qwen3_5_text", remove_layer, f"{NO_LAYER}mtp.layers.0$"),
        ("deepseek_v3", remove_layer, f"{NO_LAYER}model.layers.2$"),
        ("deepseek_v3", shorten("model.layers.2.embed_tokens.weight"), r"embed_tokens.weight is \[95, 32\], not"),
        ("deepseek_v3", give("deepseek_v3", 0.0, 1.0, quantize_output), r"quantized \(model.layers.2.shared_head.head"),
        ("deepseek_v3", drop("layers.2.mlp.experts.1.up_proj.weight"), "cannot be converted|missing in its MTP module"),
        ("qwen3_5_text", drop("mtp.norm.weight"), "missing: mtp.shared_head.norm or norm or final_layernorm.weight"),
        ("qwen3_5_text", drop("mtp.layers.0.self_attn.q_norm.weight"), "missing in its .*: self_attn.q_norm.weight$"),
        ("qwen3_5_text", put({SIDE: torch.ones(1)}), f"unexpected in its MTP module: {SIDE}$"),
        ("qwen3_5_text", shorten("mtp.layers.0.mlp.up_proj.weight"), "wrong in its .*: mtp.layers.0.mlp.up_proj"),
        ("qwen3_5_text", put(model_type="new_model"), "transformers' model 'new_model', which it cannot make"),
        ("qwen3_5_text", put(hidden_size="wide"), "transformers' model 'qwen3_5_text', which it cannot make"),
        ("qwen3_5_text", put({SCALE: torch.ones(1)}), r"its MTP module is quantized \(mtp.*scale_inv\)"),
        ("qwen3_5_text", drop("mtp.fc.weight"), "a whole model without heads and without an MTP module"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused(kind: str, change: Change, message: str, tmp_path: Path) -> None:
    make_checkpoint(kind, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text", "qwen2"])
def test_the_first_of_several_modules_is_read(kind: str, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        inner = LAYOUTS[CHECKPOINTS[kind]][5].format(config["num_hidden_layers"])
        number = int(inner.split(".")[-2])
        other = inner.replace(f".{number}.", f".{number + 1}.")
        tensors |= {other + name.removeprefix(inner): 0 * tensors[name] for name in tensors if name.startswith(inner)}

    make_checkpoint(kind, tmp_path / "two", repeat)
    make_checkpoint(kind, tmp_path / "one")
    one, two = (load_head(tmp_path / name) for name in ("one", "two"))
    torch.testing.assert_close(two.state_dict(), one.state_dict(), rtol=0, atol=0)


def test_the_module_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    make_checkpoint("qwen3_5_text", tmp_path / "text")
    make_checkpoint("qwen3_5_text", tmp_path / "pictures", nest)
    one, other = (load_head(tmp_path / name) for name in ("text", "pictures"))
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=0)


def test_the_module_of_a_checkpoint_in_several_files_is_read(tmp_path: Path) -> None:
    make_checkpoint("qwen3_5_text", tmp_path)
    whole = load_head(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + name.startswith('mtp')}-of-00002.safetensors" for name in tensors}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    torch.testing.assert_close(load_head(tmp_path).state_dict(), whole.state_dict(), rtol=0, atol=0)

    shard = tmp_path / "model-00002-of-00002.safetensors"
    kept = {name: tensor for name, tensor in load_file(shard).items() if name != "mtp.fc.weight"}
    save_file(kept, shard)
    with pytest.raises(ValueError, match=f"tensors that its files do not hold: mtp.fc.weight in {shard.name}$"):
        load_head(tmp_path)


def test_what_chooses_experts_stays_in_float32(tmp_path: Path) -> None:
    """A narrower format would change which experts are chosen."""
    name = "model.layers.2.mlp.gate.e_score_correction_bias"

    def halve(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for each in tensors:
            tensors[each] = tensors[each].bfloat16()
        tensors[name] = torch.tensor([9.01, 9.02, 9.03, 9.04])

    make_checkpoint("deepseek_v3", tmp_path / "checkpoint", halve)
    head = load_head(tmp_path / "checkpoint")
    assert head.eh_proj.weight.dtype == torch.bfloat16
    save_head(head, tmp_path / "head", torch.bfloat16)
    for loaded in (head, load_head(tmp_path / "head"), load_head(tmp_path / "head", torch.bfloat16)):
        bias = loaded.block.layers[0].mlp.gate.e_score_correction_bias
        assert bias.dtype == torch.float32 and bias.tolist() == pytest.approx([9.01, 9.02, 9.03, 9.04], abs=1e-6)
        states = torch.ones(1, 3, 32, dtype=torch.bfloat16)
        assert loaded(states, states, torch.arange(3)[None]).isfinite().all()


def test_a_target_without_a_checkpoint_needs_a_head() -> None:
    with pytest.raises(ValueError, match="mtp needs head, the folder of a checkpoint with an MTP module"):
        load_proposer("mtp", Target(tiny("llama")))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "it needs layers, norm and rotary_emb"),
        ("gpt_oss", "its attention has s_aux"),
        ("stablelm", "its layer does not hand arguments on"),
        ("falcon", "transformers makes no layer of it"),
    ],
)
def test_a_model_whose_layers_cannot_be_a_module_is_refused(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"an MTP module of {kind} .*: {reason}"):
        make_head("mtp", Target(tiny(kind)), [Example(tuple(range(3, 40)), ((5, 37),))], None)
