"""From answers to training: what `draftless train` reads is what the model wrote, token for token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from decode import Answer
from scripts import distill
from scripts.distillation.jobs import Job
from training.data import load_dataset
from training.rendering import Renderer


def write_template(content: str = "{{ one.content }}", begin: str = "", after: str = "a:") -> str:
    """A chat template with the content of each message as given, `begin`, and `after` before an answer."""
    end = "{% if one.role == 'assistant' %}</s>{% endif %} {% endfor %}{% if add_generation_prompt %}"
    return begin + "{% for one in messages %}{{ one.role[0] }}:" + content + end + after + "{% endif %}"


TEMPLATES = {
    "plain": write_template(),
    # An empty thought is put before an answer without one.
    "thinking": write_template("{% if one.role == 'assistant' %}(){% endif %}{{ one.content }}"),
    # Thoughts, up to an "e", are stripped from earlier answers; the prompt opens a thought.
    "reasoning": write_template("{{ one.content.split('e')[-1] }}", after="a:("),
    "tools": write_template("{{ one.content | trim }}", "{% if tools %}{{ tools[0].name }} {% endif %}"),
}
TALK = [("user", "a"), ("assistant", " b "), ("user", "c")]
ROWS: list[dict[str, Any]] = [
    *({"prompt": f"question {number}"} for number in range(8)),
    *({"turns": [f"{number}", "and?", "why?"]} for number in range(8)),
    {"messages": [{"role": role, "content": content} for role, content in TALK]},
]


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Path]) -> Path:
    """A model that often ends its answers, and writes special tokens in them."""
    folder = save_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["x", "y", "[", "]"]})  # as of tool calls
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", ["0", "1.2"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_answers_are_trained_as_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, temperature: str
) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    written: list[tuple[list[int], list[int]]] = []
    real = Job.take

    def take(job: Job, answer: Answer, renderer: Renderer) -> Any:
        if answer.finish != "criterion":
            written.append((answer.prompt, answer.tokens))
        return real(job, answer, renderer)

    monkeypatch.setattr(Job, "take", take)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [row | {"tools": [{"name": "f"}]} for row in ROWS] if name == "tools" else ROWS
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--dtype", "float64", "--max-new-tokens", "24", "--batch-size", "8", "--temperature", temperature]
    distill.main([str(prompts), "--out", str(out), "--model", str(folder), *options])
    monkeypatch.setattr("training.data.MIN_PROMPTS", 100)
    monkeypatch.setattr("training.data.VALIDATION_SHARE", 1 << 40)
    dataset = load_dataset([out], Renderer(AutoTokenizer.from_pretrained(folder)), 256, 9)
    trained = [
        (list(one.tokens[:begin]), list(one.tokens[begin:end])) for one in dataset.examples for begin, end in one.spans
    ]
    assert sorted(trained) == sorted(written) and len(written) > len(ROWS) and not dataset.bad
    counted = re.findall(r'"response_tokens":(\d+)', out.read_text())
    assert sum(map(int, counted)) == dataset.answer_tokens
