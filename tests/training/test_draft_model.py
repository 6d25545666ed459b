"""Draft models in training: cut out of the target, saved as transformers' own models, and used to draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode import Sampling, Target, generate
from draftless_commands import calibrate
from draftless_commands import generate as generate_command
from draftless_commands.checking.report import check_folder
from draftless_commands.checking.serving import DRAFT_MODEL
from draftless_commands.head_training.measurements import validate
from proposers import DraftProposer, NGramProposer, StagedProposer, load_proposer
from proposers.draft_models.loading import load_draft_model, read_draft_tokens
from tests.support.models import VOCABULARY, tiny
from tests.support.tokenizers import byte_level, merging
from tests.support.training_runs import assert_same, losses, save_predictable, stop_and_resume, train, walk
from training.checkpoint import read_metrics
from training.data import Example
from training.draft_model import DraftModel, DraftModelConfig, DraftModelObjective
from training.factory import make_draft_model
from training.teacher import Teacher, collate

CUT = ["--kind", "draft", "--layers", "1", "--lr", "1e-2"]


@pytest.fixture(scope="module")
def place(save_model: Callable[..., Path]) -> Path:
    return save_predictable(save_model(dtype=torch.float32, num_hidden_layers=2), rows=200, layers=2)


@pytest.fixture(scope="module")
def trained(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert train(place, folder, *CUT, "--epochs", "6", "--draft-vocab", "80") == 0
    return folder


def test_a_cut_draft_learns(place: Path, trained: Path) -> None:
    rows = read_metrics(trained)
    assert losses(trained)[-1]["agreement"][0] > 0.9 and rows[-1]["tau"] > 3


def test_it_is_a_model_of_transformers(place: Path, trained: Path) -> None:
    """Other programs draft with it as with any model: vLLM as `draft_model`, transformers as `assistant_model`."""
    model, report = AutoModelForCausalLM.from_pretrained(trained, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_hidden_layers == 1 and model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(trained).get_vocab() == AutoTokenizer.from_pretrained(place).get_vocab()
    target, prompt = AutoModelForCausalLM.from_pretrained(place).eval(), torch.tensor([walk(5, 3)])
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    plain = target.generate(prompt, **settings)
    assert target.generate(prompt, assistant_model=model.float().eval(), **settings).tolist() == plain.tolist()


@pytest.mark.parametrize("settings", [{}, {"sampling": Sampling(0.8, seed=3)}])
def test_only_tokens_that_it_was_trained_for_are_computed(place: Path, trained: Path, settings: dict[str, Any]) -> None:
    """The text is the target's; the tree is the one of all outputs, with other tokens left out."""
    target = Target.load(place, dtype="float64")
    draft = load_draft_model(trained, dtype="float64")
    whole = Target.load(trained, dtype="float64")
    listed = json.loads((trained / "config.json").read_text())["draft_tokens"]
    assert len(listed) == 80 and draft.model.get_output_embeddings().out_features == 80
    prompts = [walk(5, 3), [59], walk(12, 4)]
    limits: dict[str, Any] = {"max_new_tokens": 30, "stop_ids": (), **settings}
    plain = [answer.tokens for answer in generate(target, prompts, None, **limits)]
    taus = []
    for each in (draft, whole):
        for shape in ({"width": 2, "depth": 4, "nodes": 8}, {"depth": 3, "nodes": 4}):
            answers = generate(target, prompts, DraftProposer(each, **shape), batch_size=2, **limits)
            assert [answer.tokens for answer in answers] == plain
            taus.append([answer.stats.steps for answer in answers])
    assert taus[:2] == taus[2:] and max(map(max, taus)) < 30


def test_sampled_drafts_of_a_part_of_the_vocabulary(place: Path, trained: Path) -> None:
    target, draft = Target.load(place, dtype="float64"), load_draft_model(trained, dtype="float64")
    proposer, settings = DraftProposer(draft, sampled=True, depth=3, nodes=4), {"sampling": Sampling(0.5, seed=1)}
    answers = generate(target, [walk(5, 3)] * 2, proposer, max_new_tokens=20, stop_ids=(), **settings)
    assert all(answer.error is None and answer.stats.tau > 1.2 for answer in answers)


def test_calibrated_drafts(place: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = trained.parent / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "x", "Q")))
    options = ["--model", str(place), "--prompt-file", str(prompts), "--max-new-tokens", "20", "--device", "cpu"]
    calibrate.main(["--draft-model", str(trained), *options])
    assert "expected tau" in capsys.readouterr().out
    target = Target.load(place)
    proposer = load_proposer("draft", target, draft_model=trained, width=2, depth=3, nodes=6)
    assert isinstance(proposer, DraftProposer) and proposer.calibration is not None
    assert proposer.calibration.acceptance[0][0] > 0.6
    (plain,), (drafted,) = (
        generate(target, [walk(5, 3)], each, max_new_tokens=20, stop_ids=()) for each in (None, proposer)
    )
    assert drafted.tokens == plain.tokens and drafted.stats.tau > 2
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "has_other_tokens", lambda *_: True)
        calibrate.main(["--draft-model", str(trained), *options])
    assert "another tokenizer, whose tokens cannot be compared" in capsys.readouterr().err
    (trained / "calibration.json").unlink()


@pytest.mark.parametrize("options", [[], ["--loss", "rkl", "--temperature", "0.8"]])
def test_stopped_and_resumed(place: Path, tmp_path: Path, options: list[str]) -> None:
    run = [*CUT, *options, "--max-steps", "9", "--validate-every", "4", "--save-every", "3"]
    assert train(place, tmp_path / "whole", *run) == 0
    stop_and_resume(5, place, tmp_path / "stopped", *run)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_a_checkpoint_to_start_from(place: Path, trained: Path, tmp_path: Path) -> None:
    """Of another kind, too; it must have the target's tokens."""
    other = tiny("gpt2", dtype=torch.float32, num_hidden_layers=1)
    other.save_pretrained(tmp_path / "gpt2")
    AutoTokenizer.from_pretrained(place).save_pretrained(tmp_path / "gpt2")
    run = ["--kind", "draft", "--max-steps", "4", "--cache", str(tmp_path / "cache")]
    assert train(place, tmp_path / "one", *run, "--init", str(tmp_path / "gpt2")) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.model_type == "gpt2"
    assert train(place, tmp_path / "more", *run, "--init", str(trained)) == 0
    assert read_metrics(tmp_path / "more")[0]["tau"] > 3  # it is better from the start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "2"], "--layers is 2; a draft of this model has 1 to 1"),
        (["--heads", "2"], "--heads is not for draft models; leave it out"),
        (["--layers", "1", "--init", "x"], "leave out --init"),
        (["--temperature", "0"], "--temperature is 0.0; it must be above 0"),
        (["--decay", "0.5"], "--decay is for heads, which have several depths"),
    ],
)
def test_bad_options(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert train(place, tmp_path / "out", "--kind", "draft", *options) == 2
    assert message in capsys.readouterr().err


def make_model(kind: str = "llama", tokens: torch.Tensor | None = None, **settings: Any) -> DraftModel:
    model = tiny(kind, dtype=torch.float64, **settings)
    return DraftModel(model, None, DraftModelConfig("tiny"), tokens)


EXAMPLES = [Example((5, 6, 7, 8, 9, 10), ((2, 6),)), Example((9, 8, 7, 5), ((1, 4),))]


def test_the_loss_is_that_of_the_logits() -> None:
    """Against the model's own logits, with padding; logits may be scaled."""
    target = Target(tiny("llama", seed=3))
    batch = collate(EXAMPLES, Teacher(target, ()).compute(EXAMPLES))
    for kind, settings in (("llama", {}), ("granite", {"logits_scaling": 3.0})):
        drafted = torch.arange(0, VOCABULARY, 2)
        head = make_model(kind, drafted, **settings)
        found = DraftModelObjective(head, "kl", None)(batch)
        expected = torch.zeros((), dtype=torch.float64)
        for row, example in enumerate(EXAMPLES):
            logits = head.model(input_ids=torch.tensor([example.tokens])).logits[0][:, drafted]
            for place in range(example.spans[0][0] - 1, len(example.tokens) - 1):
                labels, p = batch.labels[row, place], batch.probabilities[row, place].double()
                known = labels % 2 == 0
                expected -= (p[known] * logits[place].log_softmax(-1)[labels[known] // 2]).sum()
        torch.testing.assert_close(found.total.double(), expected, rtol=1e-5, atol=1e-5)
        found.total.backward()
        trained = {name for name, weight in head.named_parameters() if weight.grad is not None}
        assert trained == {name for name, weight in head.named_parameters() if ".layers." in name or ".norm." in name}


def test_capped_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="gemma2 does more to its logits than a matrix product"):
        make_model("gemma2", final_logit_softcapping=0.5)


def test_what_a_config_cannot_describe_is_refused() -> None:
    """The first layer of this model is of another kind than the others, by its number."""
    model = tiny("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)
    target = Target(tiny("llama", vocab_size=model.config.vocab_size), byte_level())
    model.config.vocab_size = target.vocabulary
    for layers, is_fine in (([0], True), ([1], False)):
        with nullcontext() if is_fine else pytest.raises(ValueError, match="a config of deepseek_v3 cannot describe"):
            make_draft_model(model, target.tokenizer, target, EXAMPLES, layers, None)
    with pytest.raises(ValueError, match="an example has 6 tokens, the draft model's context 5"):
        short = tiny("llama", max_position_embeddings=5)
        make_draft_model(short, target.tokenizer, target, EXAMPLES, None, None)


def test_recurrent_drafts_are_trained_as_chains(tmp_path: Path) -> None:
    model = tiny("lfm2", dtype=torch.float32)
    head = DraftModel(model.eval(), byte_level(), DraftModelConfig("tiny"), None)
    target = Target(tiny("llama", dtype=torch.float32))
    found = validate(target, head, [[5, 6, 7]])
    assert found.tau >= 1
    head.train()
    assert not head.model.training  # without dropout, as it is resumed
    head.tokenizer = target.tokenizer = byte_level()
    head.save(tmp_path)
    report = check_folder(tmp_path, target, "tiny", decode=False)
    assert report.kind == DRAFT_MODEL and "does-not-load" not in {each.name for each in report.findings}


def test_a_draft_vocabulary_may_be_of_a_nested_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 9, "draft_tokens": [1, 5]}}))
    assert read_draft_tokens(tmp_path) == [1, 5]


def test_saving_again_replaces_all_files(tmp_path: Path) -> None:
    """Also of a tokenizer with several chat templates, which are in a folder of their own; and what a kill has left."""
    head = make_model()
    head.tokenizer = byte_level()
    head.tokenizer.chat_template = {"default": "a", "tools": "b"}
    (tmp_path / ".saving-left").mkdir()
    for _ in range(2):
        head.save(tmp_path)
    assert not [*tmp_path.glob(".saving-*")]
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == {"default": "a", "tools": "b"}


def test_a_trained_draft_for_another_tokenizer_or_with_a_proposer(place: Path, trained: Path) -> None:
    """With another tokenizer, a part of the outputs is drafted; a staged draft has all of them."""
    target, small = Target.load(place, dtype="float64"), load_draft_model(trained, dtype="float64")
    tokenizer: Any = small.tokenizer
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    other = Target(tiny("llama", vocab_size=300), merging(["ab", "cd"]))
    prompt = other.tokenizer("a b c d a b c d")["input_ids"]  # type: ignore[operator,misc]
    for temperature in (0.0, 0.8):
        settings: dict[str, Any] = {"sampling": Sampling(temperature, seed=1), "max_new_tokens": 12, "stop_ids": ()}
        texts = [
            generate(other, [prompt], each, **settings)[0].tokens
            for each in (None, DraftProposer(small, width=2, depth=2, nodes=5))
        ]
        assert texts[0] == texts[1]
    staged = load_proposer(trained, target, draft_proposer="ngram", depth=3, nodes=4)
    assert isinstance(staged, StagedProposer)
    (answer,) = generate(target, [walk(5, 3)], staged, max_new_tokens=24, stop_ids=())
    assert answer.stats.tau > 2.5
    with pytest.raises(ValueError, match="needs all its outputs"):
        StagedProposer(small, NGramProposer()).begin(target)


def test_drafts_of_the_command_line(place: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--model", str(place), "--prompt", "a", "--max-new-tokens", "12", "--device", "cpu", "--json"]
    drafts = [["--draft-model", str(trained)], ["--draft-model", str(trained), "--draft-proposer", "ngram"]]
    texts = []
    for options in (["none"], *(["draft", *each, "--depth", "3", "--nodes", "4"] for each in drafts), [str(trained)]):
        generate_command.main([*run, "--proposer", *options])
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts == texts[:1] * 4


@pytest.mark.parametrize("tokens", [[], [3, 3], [5, 4], ["a"], [VOCABULARY], 7])
def test_damaged_draft_tokens(trained: Path, tmp_path: Path, tokens: Any) -> None:
    config = json.loads((trained / "config.json").read_text()) | {"draft_tokens": tokens}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="draft_tokens is a list of token ids below 96, each once and in order"):
        load_draft_model(tmp_path)
