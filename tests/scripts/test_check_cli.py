"""The command check.py on good and bad folders."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import Target
from heads import Eagle3Config, Eagle3Head, choose_features, load_head, save_head
from proposers.calibration import FILE, Calibration
from scripts import check
from scripts.serving_rules.trial import NODES, USELESS_TAU, TrialResult
from tests.heads.test_head_layouts import write
from tests.scripts.test_check import GONE, HIDDEN, LAYERS, WEIGHTS, Spoil, ones, saved, spoil, target
from tests.support.drafting import LAYER, make_head
from tests.support.models import VOCABULARY, tiny

__all__ = ["saved", "spoil", "target"]  # fixtures

Call = Callable[..., tuple[Any, str, str]]


@pytest.fixture(scope="module")
def model(save_model: Callable[..., Path]) -> Path:
    return save_model(num_hidden_layers=LAYERS)


@pytest.fixture
def call(model: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command in this process."""

    def run(*arguments: str | Path) -> tuple[Any, str, str]:
        capsys.readouterr()
        status: Any = 0
        try:
            check.main([*map(str, arguments), "--model", str(model), "--dtype", "float64"])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def test_a_good_folder_gets_its_commands(call: Call, saved: Path, model: Path) -> None:
    status, out, err = call(saved / "eagle3", "--no-decode")
    assert (status, err) == (0, "")
    lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
    words = shlex.split(lines["vllm"])
    place = str(saved / "eagle3")
    assert words[:4] == ["vllm", "serve", str(model), "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": place, "num_speculative_tokens": 3}
    assert lines["sglang"] == (
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {place} --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4"
    )
    assert "EAGLE and EAGLE-3 folders were\nserved in vLLM 0.32 and 0.33" in out and "tau" not in out
    out = call(saved / "eagle", "--no-decode")[1]
    assert '"method": "eagle"' in out and "--speculative-algorithm EAGLE " in out


def test_only_engines_without_an_error_get_a_command(call: Call, saved: Path, spoil: Spoil) -> None:
    folder = spoil("eagle", {"architectures": ["LlamaForCausalLM"], "bias": False})
    status, out, _ = call(folder, "--no-decode")
    assert (
        status == 1
        and "vllm: vllm serve" in out
        and "sglang: no command until the errors above are corrected (1)" in out
    )
    status, out, _ = call(folder, "--no-decode", "--engine", "vllm")
    assert status == 0 and "sglang" not in out
    assert call(folder, "--no-decode", "--engine", "sglang")[0] == 1
    status, out, _ = call(saved / "medusa", "--no-decode")
    assert status == 0 and '"num_speculative_tokens": 3' in out and "  # vllm<=0.32\n" in out
    assert "sglang: it does not serve medusa heads" in out


@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_an_exported_medusa_head_drafts_the_same_without_a_token_map(
    call: Call, tmp_path: Path, output: str, model: Path
) -> None:
    target = Target(tiny("llama", num_hidden_layers=LAYERS))
    head = make_head("medusa", target, output=output, draft_size=20)
    save_head(head, tmp_path / "narrow")
    status, out, err = call(tmp_path / "narrow", "--export", tmp_path / "wide", "--no-decode")
    assert "medusa-token-map" not in out and "error" not in out and err == ""
    assert status == 0 and "# vllm<=0.32" in out
    wide = load_head(tmp_path / "wide")
    assert wide.token_map is None and wide.draft_size == VOCABULARY
    states = head(torch.randn(50, target.config.hidden_size, dtype=torch.float64))
    for index in range(3):
        ours, theirs = head.logits(states[:, index], index), wide.logits(states[:, index], index)
        torch.testing.assert_close(theirs[:, head.token_map], ours)
        assert torch.equal(theirs.argmax(dim=-1), head.tokens(ours.argmax(dim=-1)))


def test_only_medusa_heads_are_exported(call: Call, saved: Path, tmp_path: Path) -> None:
    status, _, err = call(saved / "eagle3", "--export", tmp_path / "wide")
    assert status == 2 and "--export is for Medusa heads" in err and not (tmp_path / "wide").exists()


def test_a_medusa_head_with_a_token_map_gets_the_command_of_old_versions(call: Call, spoil: Spoil) -> None:
    folder = spoil("medusa", {"truncated_vocab_size": 5}, {"token_map": torch.arange(5)})
    status, out, _ = call(folder, "--no-decode")
    assert status == 1 and "error   vllm      medusa-token-map: " in out
    command = next(line for line in out.splitlines() if line.startswith("vllm: vllm serve "))
    assert command.endswith("  # vllm<=0.20")
    assert '"method": "medusa"' in command and shlex.split(command, comments=True)[-1].endswith("}")


def test_the_trial_measures_tau(call: Call, target: Target, tmp_path: Path) -> None:
    """The head is not trained and uses the target's output matrix."""
    config = Eagle3Config(HIDDEN, VOCABULARY, LAYER, choose_features(LAYERS), output="target")
    head = Eagle3Head(config).double()
    head.borrow(target.output_matrix)
    save_head(head, tmp_path)
    report = json.loads(call(tmp_path, "--json")[1])
    tau, nodes = report["decode"]["tau"], report["decode"]["nodes"]
    assert report["kind"] == "eagle3" and nodes == NODES and report["decode"]["expected"] is None
    assert tau >= 1 and report["ok"] == (tau >= USELESS_TAU)
    assert json.loads(call(tmp_path, "--json", "--no-decode")[1])["decode"] is None
    text = "greedy, 16 nodes; calibration.json states no expected tau"
    assert TrialResult(1.5, None, NODES, 9).describe().endswith(text)


def test_tau_is_compared_with_the_calibration(call: Call, target: Target, tmp_path: Path) -> None:
    save_head(make_head("medusa", target), tmp_path)
    Calibration(((0.99,),) * 3, ((0.0, 1.0, 0.0),) * 3, (9,) * 3).save(tmp_path)
    status, out, _ = call(tmp_path)
    assert (
        status == 0
        and "calibration.json states an expected tau of 3.94" in out
        and "warning draftless accepts-less-than-card: " in out
    )
    (tmp_path / FILE).write_text("{}")
    status, out, _ = call(tmp_path)
    assert status == 1 and "does-not-draft: " in out and "calibration.json" in out


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])


def test_faults_are_reported_in_one_line(
    call: Call, saved: Path, spoil: Spoil, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wide, deep, wordy = (tmp_path_factory.mktemp(name) for name in ("wide", "deep", "wordy"))
    for folder, changes in ((wide, {"hidden_size": 48}), (deep, {"num_hidden_layers": 9}), (wordy, {"vocab_size": 99})):
        other = Target(tiny("llama", **{"num_hidden_layers": LAYERS, **changes}))
        save_head(make_head("medusa", other), folder)
    assert_named(call(wide), "other-target: this head was trained for another target, whose hidden size is 48")
    assert_named(call(deep), "other-target: this head was trained for another target, whose number of layers is 9")
    assert_named(call(wordy), "other-target: this head was trained for another target, whose vocabulary size is 99")
    assert_named(call(spoil("eagle3", {}, {"d2t": GONE, "t2d": GONE})), "missing-d2t: lm_head.weight has 40 of 96")
    given = call(saved / "eagle3", "--kind", "eagle", "--no-decode")
    assert_named(given, "other-kind: it is of kind eagle3, not eagle")
    flagged = spoil("eagle3", {"speculators_model_type": "eagle3", "transformer_layer_config": {}, "turbo": True})
    assert_named(call(flagged), "unknown-flag: config.json has turbo: true, which Draftless does not know")
    cut(flagged)
    status, out, err = call(flagged)
    assert (status, err) == (1, "") and out.count("\n") == 1
    assert out.startswith("error   both      damaged-folder: model.safetensors is damaged or cut short")
    assert json.loads(call(flagged, "--json")[1])["findings"][0]["name"] == "damaged-folder"
    status, out, err = call(flagged / "nowhere")
    assert (status, out) == (2, "") and "there is no local folder" in err and err.count("\n") == 1
    whole = write(tmp_path_factory.mktemp("whole"), WEIGHTS, {"model.layers.0.mlp.up_proj.weight": ones(2, 2)}, {})
    assert_named(call(whole), "does-not-load: cannot load a head from")


def assert_named(run: tuple[Any, str, str], text: str) -> None:
    """Exit status 1 and the fault in one line, without a trial."""
    status, out, err = run
    assert (status, err) == (1, "") and sum(text in line for line in out.splitlines()) == 1
    assert out.splitlines()[0].startswith(("error", "warning", "note")) and "tau" not in out
