"""The rules of check.py, on folders with one fault each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decode import Target
from heads import RopeScaling, save_head
from scripts.serving_rules.folder import read_folder
from scripts.serving_rules.report import find_faults
from scripts.serving_rules.trial import NODES, USELESS_TAU, TrialResult
from tests.heads.test_eagle_layouts import READ
from tests.heads.test_head_layouts import write
from tests.support.drafting import LAYER, make_head
from tests.support.models import CONTEXT, VOCABULARY, tiny

HIDDEN, LAYERS, DRAFTED = 32, 12, 40
WEIGHTS = "model.safetensors"
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {"draft_size": DRAFTED},
    "whole": {},  # EAGLE-3 with the target's vocabulary
    "borrowing": {"output": "target"},
    "medusa": {},
    "hydra": {},
}
GONE = object()  # in place of a value: the key or tensor is removed


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each head, as `save_head` writes it."""
    root = tmp_path_factory.mktemp("saved")
    for name, settings in HEADS.items():
        kind = name if name in ("eagle", "medusa", "hydra") else "eagle3"
        save_head(make_head(kind, target, **settings), root / name)
    return root


Spoil = Callable[..., Path]


@pytest.fixture
def spoil(saved: Path, tmp_path: Path) -> Spoil:
    """Writes a changed copy of a saved folder, without the metadata of Draftless."""

    def change(name: str, changes: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        config = json.loads((saved / name / "config.json").read_text())
        config = drop({**config, "draftless": GONE, **(changes or {})})
        return write(tmp_path, WEIGHTS, drop({**load_file(saved / name / WEIGHTS), **(tensors or {})}), config)

    return change


def drop(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not GONE}


def find(folder: Path, target: Target, kind: str | None = None) -> set[str]:
    found = find_faults(read_folder(folder), target, kind)
    assert all("\n" not in each.text and each.text for each in found)
    return {f"{each.level} {each.engine} {each.name}" for each in found}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


NOTES = {
    "eagle": {"note both two-architectures"},
    "eagle3": {"note sglang sglang-algorithm", "note sglang pruned-vocabulary-sampling"},
    "whole": {"note sglang sglang-algorithm"},
    "borrowing": {"note sglang sglang-algorithm"},
    "medusa": {"warning vllm medusa-removed", "warning sglang medusa-not-served"},
    "hydra": {"warning both hydra-not-served"},
}


@pytest.mark.parametrize("name", HEADS)
def test_saved_folders_have_no_fault(saved: Path, target: Target, name: str) -> None:
    assert find(saved / name, target) == NOTES[name]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "whole"])
def test_saved_folders_have_no_fault_without_metadata(spoil: Spoil, target: Target, name: str) -> None:
    assert find(spoil(name), target) == NOTES[name]


def bias_attention(prefix: str, names: str = "qkvo") -> dict[str, Any]:
    rows = {"q": HIDDEN, "k": HIDDEN // 2, "v": HIDDEN // 2, "o": HIDDEN}
    return {f"{prefix}self_attn.{name}_proj.bias": ones(rows[name]) for name in names}


# Changes of the config, changes of the tensors, and the findings in addition to those of a good folder.
EAGLE_FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({"architectures": ["LlamaForCausalLM"]}, {}, {"error sglang architectures"}),
    ({"architectures": ["LlamaForCausalLMEagle"]}, {}, {"error vllm architectures"}),
    ({"architectures": GONE}, {}, {"error vllm architectures", "error sglang architectures"}),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, {"error both other-kind"}),
    ({}, {"fc.bias": ones(HIDDEN)}, {"error vllm fc-bias-dropped"}),
    ({}, {"fc.bias": GONE}, {"error sglang fc-bias-random"}),
    ({"bias": True}, {}, {"warning both bias-word"}),
    ({}, {"layers.0.input_layernorm.weight": ones(HIDDEN)}, {"error both input-layernorm"}),
    ({}, {"norm.weight": ones(HIDDEN)}, {"error both final-norm"}),
    (
        {},
        {"lm_head.weight": ones(VOCABULARY, HIDDEN)},
        {"error vllm lm-head-present", "warning sglang lm-head-present"},
    ),
    ({"draftless": {"token_map": [3, 5]}}, {}, {"note both draft-vocabulary-unused"}),
    ({}, {"embed_tokens.weight": ones(VOCABULARY, HIDDEN)}, {"error sglang embeddings-differ"}),
    ({"attention_bias": True}, bias_attention("layers.0."), set()),
    ({"qkv_bias": True}, bias_attention("layers.0.", "qkv"), {"error sglang attention-bias"}),
]
EAGLE3_FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({"architectures": ["LlamaForCausalLM"]}, {}, {"error sglang architectures"}),
    ({"architectures": ["Strange"]}, {}, {"error vllm architectures", "error sglang architectures"}),
    ({"architectures": ["LlamaForCausalLMEagle"]}, {}, {"error both other-kind"}),
    ({"norm_before_residual": True}, {}, {"error sglang norm-before-residual"}),
    ({"norm_before_fc": True}, {}, {"error both norm-before-fc"}),
    ({}, {"input_norm.weight": ones(3 * HIDDEN)}, {"error both norm-before-fc"}),
    ({"fc_norm": True}, {}, {"error both fc-norm"}),
    ({}, {"fc_norm.0.weight": ones(HIDDEN)}, {"error both fc-norm"}),
    ({}, {"norm.weight": GONE}, {"error both missing-norm"}),
    ({"norm_output": True}, {}, {"warning both norm-output"}),
    (
        {},
        {"midlayer.self_attn.q_norm.weight": ones(8)},
        {"error sglang qk-norm", "error vllm qk-norm"},
    ),
    (
        {"num_hidden_layers": 2},
        {"layers.1.hidden_norm.weight": ones(HIDDEN)},
        {"error vllm extra-layers"},
    ),
    (
        {"num_hidden_layers": 2},
        {"layers.1.input_layernorm.weight": ones(HIDDEN)},
        {"error sglang extra-layers"},
    ),
    ({"draft_vocab_size": GONE}, {}, {"error sglang draft-vocab-size"}),
    ({"draft_vocab_size": None}, {}, {"error both draft-vocab-size"}),
    ({"draft_vocab_size": VOCABULARY}, {}, {"error both draft-vocab-size"}),
    ({}, {"lm_head.weight": GONE}, {"error both missing-lm-head"}),
    ({}, {"d2t": GONE}, {"error both missing-d2t"}),
    ({}, {"d2t": GONE, "t2d": GONE}, {"error both missing-d2t"}),
    ({}, {"d2t": torch.zeros(3, dtype=torch.int64), "t2d": GONE}, {"error both d2t-length"}),
    ({}, {"d2t": torch.full((DRAFTED,), 90)}, {"error both d2t-not-offsets"}),
    ({}, {"d2t": torch.zeros(DRAFTED, dtype=torch.int64)}, {"error both d2t-not-offsets"}),
    ({READ: GONE, "eagle_config": GONE}, {}, {"warning both aux-layer-ids-default"}),
    (
        {READ: [1, 5, 8], "eagle_config": GONE},
        {},
        {"error sglang aux-layer-ids", "warning both aux-layer-ids-convention"},
    ),
    ({READ: [3, 5, 8], "eagle_config": GONE}, {}, {"error sglang aux-layer-ids"}),
    (
        {READ: GONE, "eagle_config": {READ: [2, 6, 9]}},
        {},
        {"error vllm aux-layer-ids", "warning both aux-layer-ids-convention"},
    ),
    ({READ: GONE, "eagle_config": {READ: [0, 4, 7]}}, {}, {"error vllm aux-layer-ids"}),
    ({READ: GONE}, {}, set()),  # the other list equals the default
    ({"eagle_config": {READ: [2, 6, 9]}}, {}, {"error both aux-layer-ids"}),
    ({READ: [2, 6, 13], "eagle_config": {READ: [1, 5, 12]}}, {}, {"error both aux-layer-range"}),
    ({READ: [2, 6, 12], "eagle_config": {READ: [1, 5, 11]}}, {}, {"warning both aux-layer-last"}),
    ({READ: "all"}, {}, {"error both config-value"}),
    ({"num_aux_hidden_states": 4}, {}, {"error both num-aux-hidden-states"}),
    ({}, {"fc.bias": ones(HIDDEN)}, {"error both fc-bias-dropped"}),
    (
        {},
        {"embed_tokens.weight": ones(VOCABULARY, HIDDEN)},
        {"error sglang embeddings-differ", "warning vllm embeddings-differ"},
    ),
    (
        {},
        bias_attention("midlayer.", "q"),
        {"error vllm attention-bias", "error sglang attention-bias"},
    ),
    ({"qkv_bias": True}, bias_attention("midlayer.", "q"), {"error sglang attention-bias"}),
]
LAYER_FAULTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"model_type": GONE}, {"error both model-type"}),
    ({"num_hidden_layers": 40}, {"error both layer-count"}),
    ({"num_hidden_layers": GONE}, {"error both layer-count"}),
    ({"num_hidden_layers": "one"}, {"error both config-value"}),
    ({"num_attention_heads": 8}, {"error both layer-sizes"}),
    ({"num_key_value_heads": GONE}, {"error both layer-sizes"}),
    ({"intermediate_size": 77}, {"error both layer-sizes"}),
    ({"head_dim": GONE}, {"note both head-dim-missing"}),
    ({"head_dim": GONE, "num_attention_heads": 2}, {"error both layer-sizes"}),
    ({"vocab_size": 200}, {"error both vocabulary-size"}),
    ({"rope_parameters": GONE}, {"warning both rope-one-form"}),
    ({"rope_theta": GONE, "rope_scaling": GONE}, {"warning both rope-one-form"}),
    ({"rope_theta": 500.0}, {"note both rope-theta-differs", "error both rope-forms-differ"}),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"error both rope-forms-differ"}),
    (
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"note both rope-theta-differs"},
    ),
    ({"rope_theta": GONE, "rope_parameters": GONE}, set()),  # the target has the default, too
    ({"max_position_embeddings": CONTEXT - 1}, {"warning both max-positions"}),
    ({"tie_word_embeddings": True}, {"error both tied-embeddings"}),
    ({"attention_bias": True}, {"error both attention-bias"}),
]


@pytest.mark.parametrize(("changes", "tensors", "expected"), EAGLE_FAULTS)
def test_faults_of_eagle(spoil: Spoil, target: Target, changes: Any, tensors: Any, expected: set[str]) -> None:
    assert_found(find(spoil("eagle", changes, tensors), target), "eagle", expected)


@pytest.mark.parametrize(("changes", "tensors", "expected"), EAGLE3_FAULTS)
def test_faults_of_eagle3(spoil: Spoil, target: Target, changes: Any, tensors: Any, expected: set[str]) -> None:
    assert_found(find(spoil("eagle3", changes, tensors), target), "eagle3", expected)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize(("changes", "expected"), LAYER_FAULTS)
def test_faults_of_the_decoder_layer(spoil: Spoil, target: Target, name: str, changes: Any, expected: set[str]) -> None:
    assert_found(find(spoil(name, changes), target), name, expected)


def assert_found(found: set[str], name: str, expected: set[str]) -> None:
    """The findings are the expected ones, those that follow from them, and those of a good folder."""
    more = found - expected - NOTES[name]
    follow = {"other-kind": "architectures", "config-value": "config-value"}
    allowed = {follow.get(each.split()[-1]) for each in expected}
    assert expected <= found and {each.split()[-1] for each in more} <= allowed


def test_a_target_with_another_rope_theta(saved: Path, spoil: Spoil) -> None:
    theirs = {"rope_type": "default", "rope_theta": 500_000.0}
    other = Target(tiny("llama", num_hidden_layers=LAYERS, rope_parameters=theirs))
    assert find(saved / "eagle", other) == {*NOTES["eagle"], "note both rope-theta-differs"}
    bare = spoil("eagle", {"rope_theta": GONE, "rope_parameters": GONE})
    assert find(bare, other) == {*NOTES["eagle"], "warning both rope-theta-default"}


def test_a_saved_rope_scaling_is_in_both_forms(target: Target, tmp_path: Path) -> None:
    head = make_head("eagle3", target)
    layer = replace(LAYER, rope_scaling=RopeScaling("llama3", 8.0, 64))
    save_head(make_like(head, layer=layer), tmp_path)
    assert find(tmp_path, target) == NOTES["whole"]


def make_like(head: Any, **changes: Any) -> Any:
    """A head of another config, with the same weights."""
    made = type(head)(replace(head.config, **changes)).double()
    made.load_state_dict(head.state_dict())
    return made


def test_default_layers_of_a_small_target_are_not_three(spoil: Spoil) -> None:
    small = Target(tiny("llama", num_hidden_layers=6))
    folder = spoil("eagle3", {READ: GONE, "eagle_config": GONE})
    assert "error both aux-layer-ids-default" in find(folder, small), "(2, 3, 3) are not three layers"


def test_a_head_that_reads_four_layers(target: Target, tmp_path: Path) -> None:
    save_head(make_head("eagle3", target, features=(1, 3, 5, 7)), tmp_path)
    assert find(tmp_path, target) == NOTES["whole"]
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, found in (
        ({"num_aux_hidden_states": GONE}, False),
        ({"eagle_config": GONE}, False),
        ({"num_aux_hidden_states": GONE, "eagle_config": GONE}, True),  # the list at the top is not counted
        ({"num_aux_hidden_states": GONE, "eagle_config": GONE, "model_type": "qwen3"}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(drop(config | changes)))
        assert ("error both num-aux-hidden-states" in find(tmp_path, target)) == found


def test_norms_of_queries_and_keys_are_for_vllm_only(spoil: Spoil, target: Target) -> None:
    norms = {f"midlayer.self_attn.{name}_norm.weight": ones(8) for name in "qk"}
    found = find(spoil("eagle3", {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}, norms), target)
    assert found == {*NOTES["eagle3"], "error sglang qk-norm", "error sglang architectures"}


VERIFIED = {"verifier": {"name_or_path": "org/model"}, "proposal_methods": [{"speculative_tokens": 3}]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),
        ({"norm_before_residual": GONE}, {"error sglang norm-before-residual"}),
        ({"turbo": True}, {"error draftless unknown-flag"}),
        ({"speculators_model_type": "dflash"}, {"error vllm speculators-type"}),
        ({"speculators_config": GONE}, {"error vllm speculators-config"}),
        ({"speculators_config": {**VERIFIED, "proposal_methods": []}}, {"error vllm speculators-config"}),
        (
            {"speculators_config": {**VERIFIED, "verifier": {"name_or_path": "./here"}}},
            {"warning vllm speculators-verifier"},
        ),
        ({"transformer_layer_config": {"model_type": "gemma"}}, {"error vllm speculators-type"}),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 13]}, {"error both aux-layer-range"}),
    ],
)
def test_faults_of_speculators(saved: Path, tmp_path: Path, target: Target, changes: Any, expected: set[str]) -> None:
    flat = json.loads((saved / "eagle3" / "config.json").read_text())
    top = {name: flat.pop(name) for name in (READ, "draft_vocab_size", "norm_before_residual")}
    layer = {name: value for name, value in flat.items() if name not in ("draftless", "eagle_config", "architectures")}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_config": VERIFIED,
        "transformer_layer_config": layer,
        **top,
    }
    inner = {**layer, **changes.get("transformer_layer_config", {})}
    tensors = {
        name.replace("midlayer", "layers.0"): each for name, each in load_file(saved / "eagle3" / WEIGHTS).items()
    }
    found = find(
        write(tmp_path, WEIGHTS, tensors, drop({**config, **changes, "transformer_layer_config": inner})), target
    )
    pruned = "note sglang pruned-vocabulary-sampling"
    assert found == {pruned, "error sglang speculators-format", *expected}


@pytest.mark.parametrize(
    ("changes", "tensors", "expected"),
    [
        ({"medusa_fc_bias": GONE}, {}, "medusa-bias-dropped"),
        ({"num_heads": 2}, {}, "medusa-head-count"),
        ({"num_heads": GONE, "medusa_num_heads": 2}, {}, "medusa-head-count"),
        ({"num_hidden_layers": 2}, {}, "medusa-layer-count"),
        ({"model_type": GONE}, {}, "model-type"),
        ({"architectures": ["Foo"]}, {}, "architectures"),
        ({"hidden_size": GONE}, {}, "medusa-sizes"),
        ({}, {"medusa_head.0.0.linear.weight": ones(HIDDEN, HIDDEN)}, "medusa-unknown-keys"),
        ({"original_lm_head": False}, {}, "medusa-shared-matrix"),
        ({}, {"lm_head.weight": GONE}, "medusa-no-matrix"),
    ],
)
def test_faults_of_medusa(spoil: Spoil, target: Target, changes: Any, tensors: Any, expected: str) -> None:
    found = find(spoil("medusa", changes, tensors), target)
    assert found == {*NOTES["medusa"], f"error vllm {expected}"}


def test_medusa_heads_with_a_token_map_are_for_old_versions_of_vllm(spoil: Spoil, target: Target) -> None:
    expected = {*NOTES["medusa"], "error vllm medusa-token-map"}
    good = {"truncated_vocab_size": 5}, {"token_map": torch.arange(5)}
    assert find(spoil("medusa", *good), target) == expected
    folder = spoil("medusa", {"truncated_vocab_size": 90}, good[1])
    assert find(folder, target) == {*expected, "error vllm medusa-token-map-size"}
    text = next(each.text for each in find_faults(read_folder(folder), target) if each.name == "medusa-token-map")
    assert all(part in text for part in ("vLLM 0.21 to 0.32 refuses", "Tried with 0.32.0", "vLLM up to 0.20 loads it"))


def test_config_and_metadata_must_agree(saved: Path, tmp_path: Path, target: Target) -> None:
    """Engines read config.json; Draftless reads the metadata of the weights."""
    (tmp_path / WEIGHTS).write_bytes((saved / "eagle3" / WEIGHTS).read_bytes())
    assert "error both no-config" in find(tmp_path, target)
    config = json.loads((saved / "eagle3" / "config.json").read_text())
    config |= {READ: [3, 6, 9], "eagle_config": {READ: [2, 5, 8]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find(tmp_path, target) == {*NOTES["eagle3"], "error both config-differs"}


def test_tokens_in_place_of_offsets_are_recognised(saved: Path, spoil: Spoil, target: Target) -> None:
    tensors = load_file(saved / "eagle3" / WEIGHTS)
    tokens = tensors["t2d"].nonzero().flatten()
    found = find_faults(read_folder(spoil("eagle3", {}, {"d2t": tokens})), target)
    assert any("seems to hold the tokens themselves" in each.text for each in found)


@pytest.mark.parametrize(
    ("tau", "expected", "names"),
    [
        (USELESS_TAU - 0.01, None, ["accepts-nothing"]),
        (USELESS_TAU + 0.01, None, []),
        (1.5, 3.0, ["accepts-less-than-card"]),
        (2.2, 3.0, []),
    ],
)
def test_tau_is_compared_with_the_expected_one(tau: float, expected: float | None, names: list[str]) -> None:
    assert [each.name for each in TrialResult(tau, expected, NODES, 100).check()] == names
