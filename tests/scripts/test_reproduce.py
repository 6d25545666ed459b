"""`draftless reproduce`: its list, its verdicts, and a run with a tiny copy of every published folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from decode import Target
from draftless_commands import reproduce
from draftless_commands.benchmark.published import PUBLISHED
from draftless_commands.benchmark.rows import estimate_tau
from draftless_commands.reproduce import compare
from tests.support.commands import Call, write_rows
from tests.support.drafting import LAYER, make_head
from tests.support.models import VOCABULARY
from tests.support.mtp_checkpoints import make_checkpoint, nest
from tests.support.published_heads import (
    EAGLE,
    MEDUSA,
    PEAGLE,
    READ,
    SPECULATORS,
    VICUNA,
    ZLAB,
    Tensors,
    name_eagle3,
    name_medusa,
    write,
)

LAYERS, HIDDEN = 12, 32
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["abcabcabc"], "reference": ["x"]},
    {"question_id": 1, "category": "humaneval", "turns": ["def f(x):"]},
    {"question_id": 2, "category": "gsm8k", "turns": ["1 + 1 ="]},
]
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": LAYER.intermediate_size,
    "num_attention_heads": LAYER.num_attention_heads,
    "num_key_value_heads": LAYER.num_key_value_heads,
    "head_dim": LAYER.head_dim,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": LAYER.rms_norm_eps,
}
FLAT = {name: value for name, value in EAGLE.items() if name != "rope_theta"} | SIZES | {"num_hidden_layers": 1}
OFFICIAL = FLAT | {"draft_vocab_size": 40}
SPECFORGE = OFFICIAL | {"architectures": ["LlamaForCausalLMEagle3"]}
INNER = SPECULATORS["transformer_layer_config"] | SIZES | {"num_hidden_layers": 4}
SPECULATED = PEAGLE | {"draft_vocab_size": 40, READ: [2, 6, 9], "transformer_layer_config": INNER}
PARTS = {"mask_token_id": 3, "target_layer_ids": [1, 5, 8]}
DFLASH = ZLAB | SIZES | {"block_size": 16, "num_target_layers": LAYERS, "dflash_config": PARTS}
EAGLE1 = {"layer": replace(LAYER, input_norm=False), "bias": True}
MARGINAL = {"heads": 15, "pair_rank": 0, "from_anchor": False, "features": (2, 6, 9)}
SMALL = {"draft_size": 40}


def with_embeddings(name: Callable[[Any], Tensors], target: Target, head: Any) -> Tensors:
    return {"embed_tokens.weight": target.embedding_matrix} | name(head)


def without_mask(head: Any) -> Tensors:
    """Offsets in 32 bits alone, as ModelOpt and nebius have them."""
    tensors = name_eagle3(head)
    tensors.pop("t2d")
    return tensors | {"d2t": tensors["d2t"].int()}


def list_states(head: Any) -> dict[str, Tensor]:
    return dict(head.state_dict())


# The model, the kind and settings of the head, its file, how its tensors are named, and its config. The names of MTP
# modules are those of tests/heads/test_mtp.py.
FOLDERS: dict[str, tuple[str, str, dict[str, Any], str, Any, dict[str, Any]]] = {
    "eagle3-llama-3.1-8b": (
        "llama",
        "eagle3",
        SMALL,
        "pytorch_model.bin",
        name_eagle3,
        FLAT | {"draft_vocab_size": 40},
    ),
    "eagle3-llama-3.3-70b": ("llama", "eagle3", SMALL, "model.safetensors", without_mask, SPECFORGE),
    "eagle3-qwen3-8b": ("qwen3", "eagle3", SMALL, "pytorch_model.bin", name_eagle3, SPECFORGE),
    "eagle3-qwen3-30b-a3b": ("qwen3_moe", "eagle3", SMALL, "model.safetensors", name_eagle3, SPECFORGE),
    "medusa-vicuna-7b": ("llama", "medusa", {"heads": 5, "output": "own"}, "medusa_lm_head.pt", name_medusa, MEDUSA),
    "eagle-vicuna-7b": ("llama", "eagle", EAGLE1, "pytorch_model.bin", list_states, FLAT),
    "dflash-qwen3-8b": ("qwen3", "dflash", MARGINAL, "model.safetensors", name_eagle3, DFLASH),
    "peagle-qwen3-8b": (
        *("qwen3", "peagle", SMALL | {"heads": 7, "layers": 4, "embedding": True}, "model.safetensors"),
        *(partial(name_eagle3, prefix="layers.0."), SPECULATED),
    ),
}
OWN_EMBEDDINGS = ("eagle-vicuna-7b", "peagle-qwen3-8b")  # copies of the target's
MODULES = {"mtp-qwen3.5-0.8b": ("qwen3_5_text", nest), "mtp-glm-4.5-air": ("glm4_moe", None)}
CONTEXT = 64


@pytest.fixture
def folders(save_model: Callable[..., Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path | None]]:
    """Makes the folders of a published model and its head, by their name."""

    def make(name: str) -> tuple[Path, Path | None]:
        if name in MODULES:
            model = save_model()
            kind, change = MODULES[name]
            make_checkpoint(kind, model, *([] if change is None else [change]))
            return model, None
        kind, head_kind, settings, file, named, config = FOLDERS[name]
        context = CONTEXT if PUBLISHED[name].chat_template is None else 4 * CONTEXT
        model = save_model(kind, num_hidden_layers=LAYERS, max_position_embeddings=context)
        target = Target.load(model, dtype=torch.float32, device="cpu")
        head = make_head(head_kind, target, **settings)
        if name in OWN_EMBEDDINGS:
            named = partial(with_embeddings, named, target)
        return model, write(tmp_path, file, {key: each.detach() for key, each in named(head).items()}, config)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_layout_runs_to_its_report(name: str, folders: Any, run_main: Call, tmp_path: Path) -> None:
    (model, head), published = folders(name), PUBLISHED[name]
    template = "{% for each in messages %}{{ each.content }} {% endfor %}{{ enable_thinking }}:"
    if published.chat_template is None:
        (model / "chat_template.jinja").write_text(template)
    else:  # as the published tokenizer, which has none
        (model / "chat_template.jinja").unlink()
    questions, report = write_rows(tmp_path / "tiny.jsonl", QUESTIONS), tmp_path / "report.json"
    options = ["--model", model, "--questions", questions, "--dtype", "float32", "--device", "cpu", "--json", report]
    run = run_main(reproduce.main, name, *options, *(["--head", head] if head else []))
    found = json.loads(report.read_text())
    assert run.err == "" and run.status == (published.tau is not None and " not within " in run.out), run
    tau, interval = found["measured"]["tau"], found["measured"]["interval"]
    assert tau >= 1 and interval[0] <= tau <= interval[1]
    assert f"measured tau: {tau:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]" in run.out
    row = found["rows"][-1]
    assert row["method"].startswith(published.method) and row["identical"] == 1
    most = int(published.method.partition("nodes=")[2].partition(",")[0]) - 1
    assert 1 <= row["nodes_per_step"] <= most
    prompts = [count for each in found["records"] for turn in each["turns"] for count in turn["prompt_tokens"]]
    assert min(prompts) > 150 if published.chat_template else max(prompts) < 20
    assert found["settings"]["template_options"] == dict(published.template)


def test_the_list_has_all_that_can_be_reproduced(run_main: Call) -> None:
    run = run_main(reproduce.main)
    assert run.status == 0 and all(name in run.out for name in PUBLISHED)
    shown = next(line for line in run.out.splitlines() if "medusa-vicuna-7b" in line and "2.31" in line)
    assert shown.split()[-2] == "14"  # GiB
    assert {*FOLDERS, *MODULES} == {*PUBLISHED}


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (["eagle3-llama"], ["invalid choice: 'eagle3-llama'", "mtp-glm-4.5-air"]),
        (["medusa-vicuna-7b"], ["give --questions FILE, a file with Spec-Bench, 480 questions"]),
        (["medusa-vicuna-7b", "--questions", "none.jsonl"], ["give --questions FILE"]),
        (["medusa-vicuna-7b", "--questions", __file__, "--head", "."], ["cannot load a head from"]),
    ],
)
def test_what_cannot_be_reproduced_is_refused(options: list[str], messages: list[str], run_main: Call) -> None:
    run_main(reproduce.main, *options).refused(*messages)


def test_a_head_on_the_hub_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_main: Call) -> None:
    """A module is in the model's checkpoint, which is fetched with the model."""
    fetched: list[str] = []
    monkeypatch.setattr(reproduce, "snapshot_download", lambda name, **_: fetched.append(name) or str(tmp_path))
    asked: list[Any] = []

    def stop(args: Any, *_: Any) -> None:
        asked.append(args)
        raise ValueError("stop here")

    monkeypatch.setattr(reproduce.bench, "run_bench", stop)
    for name in ("eagle-vicuna-7b", "mtp-glm-4.5-air"):
        run_main(reproduce.main, name, "--questions", __file__).refused("stop here")
    assert fetched == ["yuhuili/EAGLE-Vicuna-7B-v1.3"]
    assert [args.model for args in asked] == [VICUNA, "zai-org/GLM-4.5-Air"]
    first, second = (args.methods for args in asked)
    assert first == f"none,eagle:nodes=60,depth=6,width=10,head={tmp_path}"
    assert second == "none,mtp:nodes=4,depth=3,width=1"


def test_the_page_has_what_the_command_does() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    for each in PUBLISHED.values():
        head = f"`{each.head}`" if each.head else "in the model"
        tau = "none found" if each.tau is None else f"{each.tau:.2f}"
        row = f"| `{each.name}` | `{each.model}` | {head} | {each.memory:.0f} | [{tau}]({each.source}) | "
        tolerance = " | |\n" if each.tau is None else f" | {each.tolerance:.0%} |\n".replace("%", " %")
        found = next(line for line in page.splitlines(keepends=True) if line.startswith(f"| `{each.name}` |"))
        assert found.startswith(row) and found.endswith(tolerance)


def test_vicunas_template_is_fastchats(save_model: Callable[..., Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_model())
    messages = [{"role": role, "content": text} for role, text in (("user", "A"), ("assistant", "B"), ("user", "C"))]
    settings: dict[str, Any] = {"chat_template": PUBLISHED["medusa-vicuna-7b"].chat_template, "tokenize": False}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **settings)
    assert text.endswith("polite answers to the user's questions. USER: A ASSISTANT: B</s>USER: C ASSISTANT:")


def test_verdicts() -> None:
    published = PUBLISHED["medusa-vicuna-7b"]
    near = {tau: compare(published, tau, [tau - 0.01, tau + 0.01]) for tau in (1.9, 2.0, 2.7)}
    assert [within for within, _ in near.values()] == [False, True, False]
    assert near[1.9][1].endswith("Leaderboard.md): not within the tolerance of 15%")
    for tau, interval in ((2.0, [1.8, 2.2]), (1.9, [1.8, 2.0])):
        assert compare(published, tau, interval)[1].endswith("its interval is too wide to be sure: ask more questions")
    assert compare(PUBLISHED["mtp-glm-4.5-air"], 1.0, [1.0, 1.0]) == (
        True,
        "published tau: none found, so there is nothing to compare with",
    )


def record(category: str, tokens: list[int], steps: list[int]) -> dict[str, Any]:
    return {"category": category, "turns": [{"methods": {"eagle": {"tokens": tokens, "steps": steps}}}]}


def test_tau_leaves_out_the_prompts_passes() -> None:
    records = [record("writing", [21], [5]), record("math", [11, 1], [6, 1]), record("qa", [4], [4])]
    tau, low, high = estimate_tau(records, "eagle")
    assert tau == pytest.approx(33 / 12) and 1 <= low < tau < high <= 5
    assert estimate_tau(records, "eagle", by_task=True)[0] == pytest.approx((30 / 9 + 1) / 2)
    assert estimate_tau(records[:1], "eagle") == pytest.approx((5, 5, 5))
    with pytest.raises(ValueError, match="no answer had more than one token"):
        estimate_tau([record("qa", [1], [1])], "eagle")
