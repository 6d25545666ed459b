"""Unknown arguments of public functions: the error names the function, and the argument that was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from decode.trees.sampling import Sampling

P = ParamSpec("P")
R = TypeVar("R")

# By argument, what other libraries call it.
ALIASES = {
    "max_new_tokens": ("max_tokens", "max_length", "max_completion_tokens", "num_tokens", "n_predict"),
    "stop": ("stop_strings", "stop_sequences", "stop_words"),
    "stop_ids": ("eos_token_id", "stop_token_ids"),
    "log_probs": ("logprobs", "top_logprobs", "output_scores"),
    "grammar": ("guided_json", "json_schema", "response_format", "structured_outputs", "schema"),
    "prompts": ("prompt", "input_ids", "inputs", "messages", "text_inputs"),
    "prompt": ("prompts", "input_ids", "inputs", "messages"),
    "proposer": ("drafter", "assistant_model", "speculative_config", "method"),
    "nodes": ("num_speculative_tokens", "num_assistant_tokens", "draft_tokens", "budget"),
    "draft_model": ("assistant_model", "draft"),
    "request_ids": ("ids",),
    "rows": ("batch_size", "max_num_seqs"),
    "n": ("num_return_sequences", "best_of"),
    "chat": ("apply_chat_template", "chat_template"),
    "name": ("model", "model_name", "model_id", "path", "folder", "pretrained_model_name_or_path"),
    "dtype": ("torch_dtype",),
    "head": ("head_folder", "checkpoint"),
}
# Arguments of another call, by what takes them.
ELSEWHERE = {
    "proposer=load_proposer(name, target, {}=...)": ("head", "draft_model", "depth", "width", "store"),
    "Target.load(name, {}=...)": ("device", "device_map", "dtype", "torch_dtype", "accelerate", "deterministic"),
}


def naming_arguments(name: str, settings: Iterable[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the public function `name`, which refuses unknown arguments by a TypeError with the right ones.

    settings: the arguments that its own **settings takes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = signature(function).parameters.items()
        own = [each for each, kind in kinds if each not in ("self", "cls") and kind.kind is not kind.VAR_KEYWORD]
        names = dict.fromkeys([*own, *settings])

        @wraps(function)
        def call(*args: P.args, **given: P.kwargs) -> R:
            for each in given:
                if each not in names:
                    raise TypeError(f"{name} has no argument {each!r}; {_suggest(each, list(names))}")
            return function(*args, **given)

        return call

    return decorate


def _suggest(unknown: str, names: list[str]) -> str:
    """What to give instead of an argument, by the names that there are."""
    meant = {each: f"{each}=..." for each in names}
    for name in names:
        meant = dict.fromkeys(ALIASES.get(name, ()), f"{name}=...") | meant
    if "sampling" in names:
        meant = {"logits_processor": "sampling=Sampling(processors=...)"} | meant
        meant = {field.name: f"sampling=Sampling({field.name}=...)" for field in fields(Sampling) if field.init} | meant
    if "proposer" in names:
        meant = {name: call.format(name) for call, taken in ELSEWHERE.items() for name in taken} | meant
    close = get_close_matches(unknown.lower(), meant, 1, cutoff=0.7)
    return f"did you mean {meant[close[0]]}?" if close else f"it has {', '.join(names)}"
