"""`draftless check` on good folders and on folders with one fault each."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decode import Target
from draftless_commands import check
from draftless_commands.checking.report import USELESS_TAU, describe_speculation, judge_tau
from draftless_commands.checking.rules import find_faults
from draftless_commands.checking.serving import PROMPTS
from heads import load_head, save_head
from proposers.calibration import Calibration, load_calibration
from tests.support.commands import Call, Run
from tests.support.drafting import LAYER, make_head
from tests.support.models import CONTEXT, VOCABULARY, tiny
from tests.support.published_heads import READ, ZLAB, write

HIDDEN, LAYERS = 32, 12
WEIGHTS = "model.safetensors"
MIXED = {"layer": replace(LAYER, qk_norm=True, window=9), "causal": True, "draft_size": 40}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("eagle", "medusa", "hydra", "multi-token", "mtp")},
    **{kind: (kind, {"draft_size": 40}) for kind in ("eagle3", "peagle", "dflash")},
    "whole": ("eagle3", {}),  # with the target's vocabulary
    "borrowing": ("eagle3", {"output": "target"}),
    "windowed": ("eagle3", {"draft_size": 40, "layer": replace(LAYER, window=9)}),
    "marginal": ("dflash", {"pair_rank": 0, "from_anchor": False}),  # without a pair score
    "causal": ("dflash", MIXED),
    "mixed": ("dflash", MIXED | {"full_layers": (1,)}),
    "dflash2": ("dflash", {"candidates": 6, "taps": 2, "group": 4, "from_anchor": False}),
}
GONE = object()  # in place of a value: the key or tensor is removed
Spoil = Callable[..., Path]


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny("llama", num_hidden_layers=LAYERS))


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for name, (kind, settings) in HEADS.items():
        save_head(make_head(kind, target, **settings), root / name)
    return root


@pytest.fixture
def spoil(saved: Path, tmp_path: Path) -> Spoil:
    """Writes a changed copy of a saved folder, without the metadata of Draftless."""

    def change(name: str, changes: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        config = json.loads((saved / name / "config.json").read_text())
        config = drop({**config, "draftless": GONE, "norm_output": GONE, **(changes or {})})  # its meaning differs
        return write(tmp_path, WEIGHTS, drop({**load_file(saved / name / WEIGHTS), **(tensors or {})}), config)

    return change


@pytest.fixture
def call(model: Path, run_main: Call) -> Call:
    return lambda *arguments: run_main(check.main, *arguments, "--model", model, "--dtype", "float64")


def drop(content: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if value is not GONE}


def find(folder: Path, target: Target) -> set[str]:
    head = load_head(folder, torch.float64, target.vocabulary, target.config.num_hidden_layers)
    found = find_faults(folder, head, target)
    assert all("\n" not in each.text and each.text for each in found)
    return {f"{each.level} {each.engine} {each.name}" for each in found}


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", HEADS)
def test_saved_folders_have_no_fault(saved: Path, target: Target, name: str) -> None:
    assert find(saved / name, target) == set()


# Changes of the config, changes of the tensors, and what is found.
MAPPED = {"token_map": torch.arange(5), "lm_head.weight": ones(5, HIDDEN)}
EMBEDDING = {"embed_tokens.weight": ones(VOCABULARY, HIDDEN)}
LAYER_FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({}, {}, set()),
    ({"num_hidden_layers": 40}, {}, {"error both sizes"}),
    ({"num_hidden_layers": GONE}, {}, {"error both sizes"}),
    ({"num_attention_heads": 8}, {}, {"error both sizes"}),
    ({"num_key_value_heads": GONE}, {}, {"error both sizes"}),
    ({"intermediate_size": 77}, {}, {"error both sizes"}),
    ({"head_dim": GONE}, {}, set()),  # hidden_size / num_attention_heads
    ({"max_position_embeddings": CONTEXT - 1}, {}, {"warning both sizes"}),
    ({}, EMBEDDING, {"error sglang embeddings"}),
]
EAGLE_FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    *LAYER_FAULTS,
    ({}, {"fc.bias": ones(HIDDEN)}, {"error vllm biases"}),
    ({"bias": False}, {"fc.bias": GONE}, {"error sglang biases"}),
    ({}, {"lm_head.weight": ones(VOCABULARY, HIDDEN)}, {"error sglang output"}),
]
EAGLE3_FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    *LAYER_FAULTS,
    ({}, {"fc.bias": ones(HIDDEN)}, {"error both biases"}),
    ({"tie_word_embeddings": True}, {}, {"error sglang embeddings"}),
    ({"embed_requires_grad": True}, EMBEDDING, {"error sglang embeddings"}),
    ({"vocab_size": 200}, {}, {"error both sizes"}),  # t2d has the right one
    ({"draft_vocab_size": None}, {}, {"error both sizes"}),
    ({"draft_vocab_size": VOCABULARY}, {}, {"error both sizes"}),
    ({"norm_before_residual": True}, {}, {"error sglang norms"}),
    ({}, {f"midlayer.self_attn.{name}_norm.weight": ones(8) for name in "qk"}, {"error sglang norms"}),
    ({}, {"input_norm.weight": ones(3 * HIDDEN)}, {"error both norms"}),
    ({}, {f"fc_norm.{place}.weight": ones(HIDDEN) for place in range(3)}, {"error both norms"}),
    ({"norm_output": True}, {}, {"error both norms"}),  # SpecForge's meaning, and not the servers'
    ({"norm_output": False}, {"norm.weight": GONE}, {"error both norms"}),
    ({}, {"d2t": GONE}, {"error both d2t"}),
    ({}, {"d2t": torch.arange(3, 43), "t2d": GONE}, {"error both d2t"}),  # the tokens, not offsets
    ({READ: GONE, "eagle_config": GONE}, {}, set()),  # the engines' default
    ({READ: [1, 5, 8], "eagle_config": GONE}, {}, {"error sglang layer-ids"}),
    ({READ: GONE, "eagle_config": {READ: [2, 6, 9]}}, {}, {"error vllm layer-ids"}),
    ({"eagle_config": {READ: [2, 6, 9]}}, {}, {"error sglang layer-ids"}),  # not one less than vLLM's
]
BLOCK_FAULTS: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({}, {}, set()),
    ({"draft_vocab_size": VOCABULARY}, {}, {"error both sizes"}),
    ({}, {"d2t": torch.arange(3, 43), "t2d": GONE}, {"error both d2t"}),
    ({"block_size": 3, "sample_from_anchor": False}, {}, set()),  # it is read so here too
    (
        {},
        {f"layers.{layer}.self_attn.{name}_norm.weight": GONE for layer in range(2) for name in "qk"},
        {"error vllm norms"},
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "tensors", "expected"),
    [
        *(("eagle", *fault) for fault in EAGLE_FAULTS),
        *(("eagle3", *fault) for fault in EAGLE3_FAULTS),
        ("whole", {"draft_vocab_size": None}, {}, {"error both sizes"}),
        ("peagle", {"eagle_config": GONE}, EMBEDDING, set()),  # SGLang has no class for it
        *(("dflash", *fault) for fault in BLOCK_FAULTS),
        ("medusa", {"medusa_fc_bias": GONE}, {}, {"error vllm biases"}),
        ("medusa", {"truncated_vocab_size": 5}, MAPPED, {"error vllm medusa-token-map"}),
        ("medusa", {}, {"lm_head.weight": GONE}, {"error vllm medusa-token-map"}),
    ],
)
def test_silent_faults(spoil: Spoil, target: Target, name: str, changes: Any, tensors: Any, expected: set[str]) -> None:
    assert find(spoil(name, changes, tensors), target) == expected


def test_several_layers_are_numbered(tmp_path: Path, target: Target) -> None:
    for kind in ("eagle3", "peagle"):
        save_head(make_head(kind, target, layers=3), tmp_path / kind)
        assert find(tmp_path / kind, target) == set()
        tensors = load_file(tmp_path / kind / WEIGHTS)
        assert {name.split(".")[1] for name in tensors if name.startswith("layers.")} == {"0", "1", "2"}
        assert not any(name.startswith("midlayer.") for name in tensors)


def test_default_layers_of_a_small_target_are_not_three(tmp_path: Path) -> None:
    small = Target(tiny("llama", num_hidden_layers=6))
    save_head(make_head("eagle3", small), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(drop(config | {READ: GONE, "eagle_config": GONE})))
    assert find(tmp_path, small) == {"error vllm layer-ids", "error sglang layer-ids"}, "(2, 3, 3) are not three layers"


def test_a_folder_without_a_config(saved: Path, tmp_path: Path, target: Target) -> None:
    (tmp_path / WEIGHTS).write_bytes((saved / "eagle3" / WEIGHTS).read_bytes())
    assert "error both sizes" in find(tmp_path, target)


OTHER_LAYERS = {READ: [3, 6, 9], "eagle_config": {READ: [2, 5, 8]}, "norm_before_fc": True}
BLOCK = {"aux_hidden_state_layer_ids": [1, 5, 8], "mask_token_id": 4, "sample_from_anchor": False, "block_size": 9}
NESTED = "transformer_layer_config"


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("eagle3", OTHER_LAYERS, {"error vllm layer-ids", "error sglang layer-ids", "error both norms"}),
        *(("dflash", {name: value}, {"error vllm block"}) for name, value in BLOCK.items()),
        # vLLM takes one key of speculators for a causal mask
        ("marginal", {"sliding_window_non_causal": False}, {"error vllm block"}),
        ("windowed", {"layer_types": ["full_attention"]}, {"error both sizes"}),
        ("windowed", {"sliding_window": 8}, {"error both sizes"}),
        ("windowed", {"sliding_window": None}, {"error both sizes"}),
        ("mixed", {NESTED: {"layer_types": ["full_attention", "sliding_attention"]}}, {"error both sizes"}),
        ("mixed", {NESTED: {"use_sliding_window": False}}, {"error both sizes"}),
        ("mixed", {NESTED: {"use_sliding_window": GONE}}, {"warning both sizes"}),
    ],
)
def test_config_and_metadata_must_agree(
    saved: Path, tmp_path: Path, target: Target, name: str, changes: dict[str, Any], expected: set[str]
) -> None:
    """Servers read config.json; Draftless reads the metadata of the weights."""
    (tmp_path / WEIGHTS).write_bytes((saved / name / WEIGHTS).read_bytes())
    config = json.loads((saved / name / "config.json").read_text())
    changes = {key: drop(config[key] | value) if key == NESTED else value for key, value in changes.items()}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    assert find(tmp_path, target) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"pair_rank": 0},  # vLLM samples it from the rows after the anchor's
        {"pair_rank": 0, "from_anchor": False, "logit_cap": 20.0, "embedding_scale": 2.0},  # the format has no scales
    ],
)
def test_block_heads_that_vllm_computes_otherwise(tmp_path: Path, target: Target, settings: dict[str, Any]) -> None:
    save_head(make_head("dflash", target, **settings), tmp_path)
    assert find(tmp_path, target) == {"error vllm block"}


def test_vllm_takes_full_layers_for_causal(tmp_path: Path, target: Target) -> None:
    """Those of its DFlash, by the format that we write."""
    shape = {"layer": replace(LAYER, qk_norm=True, window=9), "full_layers": (1,), "from_anchor": False}
    for name, settings in (("dflash", {"pair_rank": 0}), ("dflash2", HEADS["dflash2"][1])):
        for causal, expected in ((True, {"error vllm block"}), (False, set())):
            folder = tmp_path / f"{name}-{causal}"
            head = make_head("dflash", target, causal=causal, **{**shape, **settings})
            save_head(head, folder)
            assert find(folder, target) == expected
            assert describe_speculation(head, str(folder))["method"] == "dflash"


def test_a_published_block_head_is_only_warned_of(tmp_path: Path, target: Target) -> None:
    head = make_head("dflash", target, pair_rank=0, from_anchor=False)
    config = head.config.layer
    flat = ZLAB | {"hidden_size": HIDDEN, "intermediate_size": config.intermediate_size, "vocab_size": VOCABULARY}
    flat |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    flat |= {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [layer - 1 for layer in head.features]}}
    write(tmp_path, WEIGHTS, head.state_dict(), flat)
    assert find(tmp_path, target) == {"warning vllm format"}


def test_speculators_folders_are_for_vllm(saved: Path, spoil: Spoil, target: Target) -> None:
    """In its format the layer's sizes are nested, and norm_before_residual is true by default."""
    flat = json.loads((saved / "eagle3" / "config.json").read_text())
    layer = {name: flat[name] for name in flat if name not in ("draftless", READ, "architectures", "draft_vocab_size")}
    top = {name: flat[name] for name in (READ, "draft_vocab_size")}
    nested = dict.fromkeys(layer, GONE) | {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    assert find(spoil("eagle3", nested | top), target) == {"error sglang norms"}


def test_a_good_folder_gets_its_commands(call: Call, saved: Path, model: Path) -> None:
    status, out, err = call(saved / "eagle3", "--no-decode")
    assert (status, err) == (0, "") and "tau" not in out
    lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
    words, place = shlex.split(lines["vllm"]), str(saved / "eagle3")
    assert words[:4] == ["vllm", "serve", str(model), "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": place, "num_speculative_tokens": 3}
    assert lines["sglang"] == (
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {place} --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4"
    )
    for name, method, more in (("dflash", "dspark", {}), ("peagle", "eagle3", {"parallel_drafting": True})):
        command = json.loads(call(saved / name, "--no-decode", "--json")[1])["commands"]
        settings = json.loads(shlex.split(command["vllm"])[4])
        assert settings == {"method": method, "model": str(saved / name), "num_speculative_tokens": 3} | more
        assert command["sglang"] is None
    commands = json.loads(call(saved / "medusa", "--no-decode", "--json")[1])["commands"]
    assert commands["vllm"].endswith("  # vllm<=0.32") and '"num_speculative_tokens": 3' in commands["vllm"]
    assert commands["sglang"] is None


def test_only_engines_without_an_error_get_a_command(call: Call, saved: Path, spoil: Spoil) -> None:
    folder = spoil("eagle", {"bias": False}, {"fc.bias": GONE})
    status, out, _ = call(folder, "--no-decode")
    assert status == 1 and "vllm: vllm serve" in out and "sglang: no command until the errors" in out
    assert "sglang: it does not serve hydra heads" in call(saved / "hydra", "--no-decode").out


@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_an_exported_head_drafts_the_same_without_a_map(
    call: Call, tmp_path: Path, output: str, target: Target
) -> None:
    head = make_head("medusa", target, output=output, draft_size=20)
    save_head(head, tmp_path / "narrow")
    status, out, err = call(tmp_path / "narrow", "--export", tmp_path / "wide", "--no-decode")
    assert status == 0 and "no findings" in out and err == ""
    wide = load_head(tmp_path / "wide")
    assert wide.token_map is None and wide.draft_size == VOCABULARY
    states = head(torch.randn(50, target.config.hidden_size, dtype=torch.float64))
    for index in range(3):
        ours, theirs = head.logits(states[:, index], index), wide.logits(states[:, index], index)
        torch.testing.assert_close(theirs[:, head.token_map], ours)
        assert torch.equal(theirs.argmax(dim=-1), head.tokens(ours.argmax(dim=-1)))


def test_an_exported_head_keeps_its_calibration(call: Call, tmp_path: Path, target: Target) -> None:
    """It drafts the same tokens, so its draft tokens are accepted as often."""
    save_head(make_head("medusa", target, draft_size=20), tmp_path / "narrow")
    calibration = Calibration(((0.5, 0.25),) * 3, ((0.1, 1.0, 0.0),) * 3, (9,) * 3)
    calibration.save(tmp_path / "narrow")
    run = call(tmp_path / "narrow", "--export", tmp_path / "wide")
    assert load_calibration(tmp_path / "wide") == calibration
    assert f"calibration.json expects {calibration.expect_tau(16)[-1]:.2f}" in run.out
    (tmp_path / "narrow" / "calibration.json").unlink()
    call(tmp_path / "narrow", "--export", tmp_path / "wide", "--no-decode")
    assert load_calibration(tmp_path / "wide") is None  # not that of the head that was there before


def test_tau_is_compared_with_the_calibration(call: Call, target: Target, tmp_path: Path) -> None:
    save_head(make_head("medusa", target), tmp_path)
    Calibration(((0.99,),) * 3, ((0.0, 1.0, 0.0),) * 3, (9,) * 3).save(tmp_path)
    report = json.loads(call(tmp_path, "--json")[1])
    names = [each["name"] for each in report["findings"]]
    assert report["tau"] >= 1 and report["expected_tau"] == pytest.approx(3.94, abs=0.01)
    assert names == ["accepts-nothing" if report["tau"] < USELESS_TAU else "accepts-less-than-card"]
    assert report["worth"]["prompts"] == len(PROMPTS) and report["tokens"] > report["worth"]["tokens"] > 0
    tau, verdict = call(tmp_path).out.splitlines()[-2:]
    low, high = report["tau_interval"]
    interval = f"95 % interval {low:.2f} to {high:.2f}"
    basis = f"({report['tokens']} tokens of 4 prompts, greedy, {interval}); calibration.json expects 3.94"
    assert tau == f"tau {report['tau']:.2f} in trees of 16 nodes {basis}"
    assert re.fullmatch(r"worth it here: (yes|no), [\d.]+x the speed without drafts .*", verdict)


@pytest.mark.parametrize(
    ("tau", "expected", "names"),
    [
        (USELESS_TAU - 0.01, None, ["accepts-nothing"]),
        (USELESS_TAU + 0.01, None, []),
        (1.5, 3.0, ["accepts-less-than-card"]),
        (2.2, 3.0, []),
    ],
)
def test_a_low_tau_is_a_finding(tau: float, expected: float | None, names: list[str]) -> None:
    assert [each.name for each in judge_tau(tau, expected)] == names


def test_what_does_not_load_is_reported_in_one_line(call: Call, spoil: Spoil, tmp_path: Path) -> None:
    save_head(make_head("medusa", Target(tiny("llama", num_hidden_layers=9))), tmp_path / "deep")
    assert_refused(call(tmp_path / "deep"), "whose number of layers is 9")
    assert_refused(call(spoil("eagle3", {}, {"d2t": torch.arange(40)})), "i + d2t[i] must be the tokens that t2d marks")
    folder = spoil("eagle3")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    assert_refused(call(folder), "model.safetensors is damaged or cut short")


def assert_refused(run: Run, text: str) -> None:
    status, out, err = run
    assert (status, err) == (1, "") and out.startswith("error   draftless does-not-load: ") and text in out
    assert out.count("\n") == 1
