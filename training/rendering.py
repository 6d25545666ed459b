"""Rendering: a conversation's text and tokens as the model sees them, in its chat template or without one.

Answers are joined to the rendered prompt and never rendered themselves: templates strip thoughts, put empty ones in
front, and trim blanks. `Texts` are the tokens of a conversation: each text is [prompt, answer, prompt, answer, ...],
and a new text begins where a later prompt does not go on with what was there, as with templates that strip thoughts
from earlier answers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any

from decode.models.fingerprint import fingerprint_vocabulary
from decode.requests.text import Tokenizer, encode
from training.conversations import FLAGS, TEMPLATE_KEYS, Conversation, Message, list_answers

Texts = list[list[list[int]]]

PROBE = "Certainly."
STRUCTURED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # text outside of content


def add_turn(texts: Texts, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Add a prompt and its answer: to the last text if the prompt goes on with it, or else as a new text."""
    before = list(chain(*texts[-1])) if texts else []
    if texts and list(prompt[: len(before)]) == before:
        texts[-1] += [list(prompt[len(before) :]), list(answer)]
    else:
        texts.append([list(prompt), list(answer)])


class Renderer:
    """Renders conversations for one tokenizer.

    options: arguments of the chat template for all conversations; a conversation's own come first. chat: False ignores
    the template, True needs one. ends: tokens that end an answer, in addition to the tokenizer's EOS. Raises ValueError
    for options that the template does not have.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        chat: bool | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.options, self.chat = tokenizer, dict(options or {}), chat
        self.has_template = chat is not False and tokenizer.chat_template is not None
        if chat and not self.has_template:
            raise ValueError("the model has no chat template; leave out --chat")
        self.ends = {int(token) for token in (tokenizer.eos_token_id, *ends) if token is not None}
        self._refuse_unknown(self.options, "--template-option")

    def encode(self, conversation: Conversation) -> list[int]:
        """The tokens of a conversation to be answered. Raises ValueError if the template fails."""
        options = self.options | conversation.options
        text = conversation.messages[0]["content"]
        if not options and conversation.messages == [{"role": "user", "content": text}]:
            try:
                return encode(text, self.tokenizer, self.chat)
            except ValueError as error:
                raise ValueError(f"{conversation.place}: {error}") from error
        return self._tokenize(self._render(conversation, len(conversation.messages)))

    def encode_answers(self, conversation: Conversation, finished: bool) -> Texts:
        """The tokens of a conversation with answers, each with its end token, the last one only if `finished`.

        Raises ValueError, naming the place, if the template fails, if an answer cannot be found in what it writes, or
        if an answer has no tokens.
        """
        texts: Texts = []
        answers = list_answers(conversation.messages)
        for turn in answers:
            prompt = self._render(conversation, turn)
            answer = self._write_answer(conversation, turn, prompt, finished or turn < answers[-1])
            prompt_ids, whole = self._tokenize(prompt), self._tokenize(prompt + answer)
            if whole[: len(prompt_ids)] == prompt_ids:
                answer_ids = whole[len(prompt_ids) :]
            else:  # a token reaches over the border: the model writes its answer after the prompt's own tokens
                answer_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            if not answer_ids:
                raise ValueError(f"{conversation.place}: the answer has no tokens")
            add_turn(texts, prompt_ids, answer_ids)
        return texts

    @cached_property
    def vocabulary(self) -> str:
        """The fingerprint of the tokenizer's vocabulary."""
        return fingerprint_vocabulary(self.tokenizer)

    @cached_property
    def ending(self) -> str:
        """What the model writes after an answer: up to the first end token in the template's text, or else EOS."""
        after, names = "", [str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.ends]
        if self.has_template:
            probe = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": PROBE}]
            with suppress(ValueError):
                after = self._apply(probe, self.options, answer_next=False).rpartition(PROBE)[2]
        found = [(after.index(name), name) for name in names if name in after]
        if not found:
            return str(self.tokenizer.eos_token or "")
        begin, name = min(found)
        return after[: begin + len(name)]

    def _write_answer(self, conversation: Conversation, turn: int, prompt: str, finished: bool) -> str:
        """The text of an answer with its ending. Tool calls and thoughts in keys of their own need the template."""
        message = conversation.messages[turn]
        if not any(message.get(name) for name in STRUCTURED):
            answer = str(message["content"])
            return answer + self.ending if finished and not answer.endswith(self.ending) else answer
        whole = self._render(conversation, turn + 1)
        if not whole.startswith(prompt):
            raise ValueError(
                f"{conversation.place}: the chat template changes the text before an answer with {STRUCTURED[0]} or "
                "thoughts; it cannot be masked"
            )
        answer = whole[len(prompt) :]
        end = answer.rfind(self.ending) if self.ending else -1
        return answer if end < 0 else answer[: end + len(self.ending) * finished]

    def _render(self, conversation: Conversation, end: int) -> str:
        """The text of the first `end` messages: a prompt, or a conversation whose last message is an answer."""
        messages, options = conversation.messages[:end], self.options | conversation.options
        try:
            self._refuse_unknown(options, "the row")
            for message in messages:
                self._refuse_unknown({name: 1 for name in STRUCTURED if message.get(name)}, "a message")
            if not self.has_template:
                return _join(messages)
            text = self._apply(messages, options, answer_next=messages[-1]["role"] != "assistant")
            for message in messages:
                if message["role"] in ("system", "developer") and message["content"].strip() not in text:
                    raise ValueError(f"the chat template leaves out the {message['role']} message")
        except ValueError as error:
            raise ValueError(f"{conversation.place}: {error}") from error
        return text

    def _apply(self, messages: Sequence[Message], options: Mapping[str, Any], answer_next: bool) -> str:
        shown = [{name: value for name, value in each.items() if name not in FLAGS} for each in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=answer_next, **options)
            )
        except Exception as error:  # a template is a program: it may refuse a role, or crash
            raise ValueError(f"the chat template cannot render this conversation ({error})") from error

    def _tokenize(self, text: str) -> list[int]:
        """Templates write special tokens, BOS among them; the tokenizer adds them to plain text."""
        return [*map(int, self.tokenizer(text, add_special_tokens=not self.has_template)["input_ids"])]

    def _refuse_unknown(self, options: Mapping[str, Any], giver: str) -> None:
        """Raise ValueError for an argument or key that the template never mentions: its text would be lost."""
        for name in options:
            if name in RESERVED - {*TEMPLATE_KEYS}:
                raise ValueError(f"{giver} gives {name!r}, which is no option of a chat template")
            if not self.has_template:
                raise ValueError(f"{giver} gives {name!r}, which needs a chat template, and there is none")
            if not re.search(rf"\b{re.escape(name)}\b", self._sources):
                raise ValueError(f"{giver} gives {name!r}, which this model's chat template does not take")

    @cached_property
    def _sources(self) -> str:
        template: Any = self.tokenizer.chat_template
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


RESERVED = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters)


def _join(messages: Sequence[Message]) -> str:
    """Texts without a template: an answer follows its question at once, and an empty line separates the others."""
    return "".join(
        ("" if turn == 0 or message["role"] == "assistant" else "\n\n") + message["content"]
        for turn, message in enumerate(messages)
    )
