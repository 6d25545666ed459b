"""Answers that fit JSON schemas: are they valid, are they the same with drafts, and how much faster are they.

    python -m docs.measure.structured --schemas FOLDER [--count N] [--transformers N]

The folder has a JSON schema in each .json file, as those of guidance-ai/jsonschemabench. Schemas that llguidance cannot
honour are counted and left out. Needs `pip install jsonschema`. Each question is answered greedily and at temperature
0.8, in turns: plain with the mask alone, and with each method. --transformers: of so many questions, also by
transformers' `generate` with llguidance's masks as a logits processor. Idle machines only.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from jsonschema.validators import validator_for
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import decode.loop
from decode import Answer, Sampling, Target, generate
from decode.grammars.grammar import make_matchers
from draftless_commands.benchmark.files import find_commit
from draftless_commands.shared.results import INTERVAL, resample
from proposers import MergedProposer, load_proposer

QUESTION = "Write a JSON document with made-up values for this schema:\n{}"
LONGEST = 2000  # characters of a schema
TEMPERATURES = 0.0, 0.8
Found = dict[str, list[tuple[int, float]]]  # by method: the tokens and seconds of each answer


class Masks(LogitsProcessor):
    """llguidance's masks for transformers' `generate`."""

    def __init__(self, target: Target, schema: Any, prompt: int) -> None:
        self.matcher = make_matchers(schema, target.tokenizer, target.vocabulary, target.stop_ids)(0)
        self.prompt = prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > self.prompt:
            self.matcher.accept(int(input_ids[0, -1]))
        return scores.masked_fill(~self.matcher.find_allowed(), -torch.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=200, help="schemas")
    parser.add_argument("--methods", default="merged,auto")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--transformers", type=int, default=0, metavar="N")
    options = parser.parse_args()
    target, counts = Target.load(), Counter[str]()
    target.warm_up()
    proposers = {"plain": None} | {name: load_proposer(name, target) for name in options.methods.split(",")}
    schemas, found = choose_schemas(options.schemas, options.count, target, counts), defaultdict[float, Found](dict)
    for number, schema in enumerate(schemas):
        for temperature in TEMPERATURES:
            settings = {"sampling": Sampling(temperature, seed=number), "max_new_tokens": options.max_new_tokens}
            answers = answer(target, schema, proposers, settings, found[temperature])
            counts["answers"] += 1
            counts["the same with all methods"] += len({tuple(each.tokens) for each in answers.values()}) == 1
            count_valid(answers["plain"], schema, counts)
            if number < options.transformers and not temperature:
                counts["by transformers"] += 1
                counts["the same by transformers"] += has_same(target, schema, answers["plain"])
        print(f"{number + 1} of {len(schemas)}: {dict(counts)}", flush=True)
    print(
        f"commit {find_commit()}: {dict(counts)}\n\n| temperature | method | tokens/s | of plain |\n|---|---|---:|---:|"
    )
    for temperature, by_method in found.items():
        for name in by_method:
            print(f"| {temperature} | {name} | {rate(by_method[name]):.1f} | {describe_ratio(by_method, name)} |")
    print(f"\nmasks take {100 * time_masks(target, schemas[:24]):.1f} % of a step with trees of 16 nodes")


def choose_schemas(folder: Path, count: int, target: Target, counts: Counter[str]) -> list[Any]:
    files, chosen = sorted(folder.rglob("*.json")), list[Any]()
    random.Random(0).shuffle(files)
    for file in files:
        if len(text := file.read_text(encoding="utf-8")) <= LONGEST and len(chosen) < count:
            try:
                schema = json.loads(text)
                make_matchers(schema, target.tokenizer, target.vocabulary, target.stop_ids)
            except (ValueError, TypeError):
                counts["refused schemas"] += 1
            else:
                chosen.append(schema)
    return chosen


def ask(schema: Any) -> str:
    return QUESTION.format(json.dumps(schema))


def answer(target: Target, schema: Any, proposers: dict[str, Any], settings: dict[str, Any], found: Found) -> dict:
    answers = {}
    for name, proposer in proposers.items():
        begun = perf_counter()
        (answers[name],) = generate(target, ask(schema), proposer, grammar=schema, text=True, **settings)
        found.setdefault(name, []).append((len(answers[name].tokens), perf_counter() - begun))
    return answers


def count_valid(answer: Answer, schema: Any, counts: Counter[str]) -> None:
    """Whether a complete answer is valid. One that is too long is not complete."""
    if answer.finish in ("grammar", "eos"):
        counts["complete"] += 1
        counts["valid"] += validator_for(schema)(schema).is_valid(json.loads(answer.text))
    else:
        counts[answer.finish] += 1


def has_same(target: Target, schema: Any, answer: Answer) -> bool:
    """Whether transformers generates the same tokens, but for the end token after a complete document."""
    prompt, end = torch.tensor([answer.prompt]), [*target.stop_ids]
    masks = LogitsProcessorList([Masks(target, schema, prompt.shape[1])])
    limits = {"max_new_tokens": len(answer.tokens) + 1, "eos_token_id": end, "pad_token_id": end[0]}
    made = target.model.generate(prompt, do_sample=False, logits_processor=masks, **limits)
    return made[0, prompt.shape[1] :][: len(answer.tokens)].tolist() == answer.tokens


def rate(found: list[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in found) / sum(seconds for _, seconds in found)


def describe_ratio(found: Found, name: str) -> str:
    """The speed of a method, of that of plain decoding, with a 95 % bootstrap interval over schemas."""
    low, high = (resample(found[name]) / resample(found["plain"])).quantile(INTERVAL).tolist()
    return f"{rate(found[name]) / rate(found['plain']):.2f} [{low:.2f}, {high:.2f}]"


def time_masks(target: Target, schemas: list[Any]) -> float:
    """The share of the time of steps that masks take, in trees of 16 nodes. One that is compiled is not counted."""
    seconds, proposer = Counter[str](), MergedProposer(nodes=16)
    kept = {name: getattr(decode.loop, name) for name in ("constrain", "forbid")}

    def timed(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begun = perf_counter()
            result = function(*arguments)
            seconds["masks"] += perf_counter() - begun
            return result

        return call

    for name, function in kept.items():
        setattr(decode.loop, name, timed(function))
    for schema in schemas:
        (answer,) = generate(target, ask(schema), proposer, grammar=schema, max_new_tokens=128)
        seconds["all"] += answer.stats.seconds.total
    for name, function in kept.items():
        setattr(decode.loop, name, function)
    return seconds["masks"] / seconds["all"]


if __name__ == "__main__":
    main()
