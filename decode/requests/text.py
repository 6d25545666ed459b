"""Prompts to tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.requests.numbers import as_items, as_whole, as_whole_numbers, describe

Tokenizer: TypeAlias = PreTrainedTokenizerBase
Prompt: TypeAlias = str | Sequence[int] | Tensor | Sequence[Mapping[str, Any]] | Mapping[str, Any]

FORMS = "text, a list of chat messages, token ids, or a tokenizer's output with input_ids"
DERIVED = ("length", "offset_mapping", "special_tokens_mask")  # of a tokenizer's output: they repeat what its ids say


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts, each as text, a list of chat messages, or a list of token ids without padding.

    Each row of a tensor, of an array or of a tokenizer's output is a prompt. Raises TypeError or ValueError for
    anything that is no prompt (`FORMS`) and no list of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return _read_prompt(prompts, "the prompt")
    items = as_items(prompts, f"a prompt is {FORMS}")
    first = items[0] if items else ()
    if not items or as_whole(first) is not None or (isinstance(first, Mapping) and "input_ids" not in first):
        return _read_prompt(items, "the prompt")
    return [each for place, item in enumerate(items) for each in _read_prompt(item, f"prompt {place}")]


def encode(prompt: Prompt, tokenizer: Tokenizer | None, chat: bool | None) -> list[int]:
    """The tokens of one prompt in any form of `as_list`.

    chat: whether to wrap text in the tokenizer's chat template; None does so if there is one. Warns of text that seems
    to be wrapped already. Raises TypeError or ValueError for an empty prompt, another kind of prompt, messages that the
    template cannot render, or text without a tokenizer.
    """
    prompts = as_list(prompt)
    if len(prompts) != 1:
        raise ValueError(f"one prompt is expected, and {len(prompts)} are given")
    prompt = prompts[0]
    if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):  # type: ignore[index]
        return prompt  # type: ignore[return-value]
    if tokenizer is None:
        raise ValueError("this target has no tokenizer; give prompts as token ids, or Target(model, tokenizer)")
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not isinstance(prompt, str) or chat:
        ids = _apply_template(prompt, tokenizer)
    else:
        ids = tokenizer(prompt)["input_ids"]
        if ids[:2] == [tokenizer.bos_token_id] * 2:
            begin = tokenizer.bos_token
            warnings.warn(f"the prompt begins with {begin!r}, which the tokenizer adds too; leave it out", stacklevel=2)
    if not ids:
        raise ValueError("the prompt has no tokens; it needs at least one")
    return [int(token) for token in ids]


def _apply_template(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    """The tokens of chat messages, or of text as a user's message, in the chat template."""
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template; give plain text and chat=False")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False) if isinstance(prompt, str) else ""
    except Exception as error:  # a template can raise anything
        raise ValueError(f"the chat template cannot render these messages: {error}") from error
    if isinstance(prompt, str):
        _warn_of_rendered(prompt, rendered, tokenizer)
    return ids


def _warn_of_rendered(prompt: str, rendered: str, tokenizer: Tokenizer) -> None:
    """Warn of text that begins with a special token, or as the chat template's own text begins."""
    begins = [rendered.partition(prompt)[0].strip(), *find_special_tokens(tokenizer)]
    found = next((begin for begin in begins if begin and prompt.lstrip().startswith(begin)), None)
    if found is not None:
        warnings.warn(
            f"the prompt begins with {found!r}, as if the chat template had been applied to it; it is applied again. "
            "Pass chat=False (--no-chat) to keep the text as it is, or give messages or token ids",
            stacklevel=2,
        )


def _read_prompt(prompt: Any, name: str) -> list[Prompt]:
    """One prompt, checked, in a list; the rows of a tensor, an array or a tokenizer's output are several."""
    if isinstance(prompt, Mapping):
        return _read_encoding(prompt, name)  # type: ignore[return-value]
    if isinstance(prompt, str):
        prompt.encode()  # a tokenizer's own error for half a character is hard to understand
        items = [*prompt]
    else:
        items = as_items(prompt, f"{name} is {FORMS}")
    if not items:
        raise ValueError(f"{name} is empty; it needs at least one token")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(items[0], Mapping):
        return [[_read_message(message, f"message {place} of {name}") for place, message in enumerate(items)]]
    if isinstance(items[0], list) and getattr(prompt, "ndim", 1) == 2:  # a tensor's or an array's rows
        return [as_whole_numbers(row, f"the tokens of {name}") for row in _refuse_empty(items, name)]
    return [as_whole_numbers(items, f"the tokens of {name}")]


def _read_message(message: Any, name: str) -> dict[str, Any]:
    """A chat message with its content as text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f'{name} is a dict with "role" and "content", not {describe(message)}')
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return {**message}
    parts = as_items(content, f"the content of {name} is text, or a list of parts of type text")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'a part of {name} is {{"type": "text", "text": ...}}, not {describe(part)}')
    return {**message, "content": "".join(part["text"] for part in parts)}


def _read_encoding(encoding: Mapping[str, Any], name: str) -> list[list[int]]:
    """The rows of a tokenizer's output, without padding."""
    if "input_ids" not in encoding:
        raise ValueError(f"{name} is {FORMS}, not a dict with {', '.join(map(repr, encoding)) or 'nothing'}")
    ids = _read_rows(encoding["input_ids"], f"input_ids of {name}")
    others = {key: value for key, value in encoding.items() if value is not None and key not in ("input_ids", *DERIVED)}
    mask = _read_rows(others.pop("attention_mask", [[1] * len(row) for row in ids]), f"attention_mask of {name}")
    if not any(map(any, _read_rows(others.get("token_type_ids", []), f"token_type_ids of {name}"))):
        others.pop("token_type_ids", None)
    if others:
        raise ValueError(f"{', '.join(others)} of {name} would be ignored; leave it out")
    if [*map(len, mask)] != [*map(len, ids)]:
        raise ValueError(f"attention_mask of {name} has another shape than its input_ids")
    for row in mask:
        if not all(each in (0, 1) for each in row):
            raise ValueError(f"attention_mask of {name} has values other than 0 and 1")
        if "0" in "".join(str(int(each)) for each in row).strip("0"):
            raise ValueError(f"attention_mask of {name} hides tokens inside a row; it can hide those at its ends only")
    kept = [[token for token, is_real in zip(*rows, strict=True) if is_real] for rows in zip(ids, mask, strict=True)]
    return [as_whole_numbers(row, f"input_ids of {name}") for row in _refuse_empty(kept, name)]


def _read_rows(values: Any, name: str) -> list[list[Any]]:
    """One row or a list of rows, as lists."""
    expected = f"{name} are rows of whole numbers"
    items = as_items(values, expected)
    is_row = bool(items) and getattr(items[0], "ndim", int(isinstance(items[0], Sequence))) == 0
    return [items] if is_row else [as_items(row, expected) for row in items]


def _refuse_empty(rows: list[list[Any]], name: str) -> list[list[Any]]:
    if not rows or not all(rows):
        raise ValueError(f"{name} is empty; it needs at least one token")
    return rows


def find_special_tokens(tokenizer: Tokenizer | None) -> dict[str, int]:
    """The ids of special tokens by their text."""
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not isinstance(added, Mapping):  # those of mistral-common have none
        return {}
    return {str(token): token_id for token_id, token in added.items() if token.special}
