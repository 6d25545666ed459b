"""Rendering: a conversation's text and tokens as the model sees them, in its chat template or without one.

Answers are joined to the rendered prompt and never rendered themselves: templates strip thoughts, put empty ones in
front, and trim blanks. The prompt of an answer ends with what opens an answer in the template. `Texts` are the tokens
of a conversation: each text is [prompt, answer, prompt, answer, ...], and a new text begins where a later prompt does
not go on with what was there, as with templates that strip thoughts from earlier answers.
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
from training.conversations import (
    FLAGS,
    STRUCTURED,
    TEMPLATE_KEYS,
    THOUGHTS,
    Conversation,
    Message,
    is_blank,
    list_answers,
)

Texts = list[list[list[int]]]

ASKED: Message = {"role": "user", "content": "Hello."}
PROBE: Message = {"role": "assistant", "content": "Certainly."}
OPENED, CLOSED = "<think>", "</think>"  # around thoughts within a content
TAG = re.compile(r"<[^<>\s]+>")


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
        return self._tokenize(self._render(conversation, conversation.messages, opened=True))

    def encode_answers(self, conversation: Conversation, finished: bool) -> Texts:
        """The tokens of a conversation with answers, each with its end token, the last one only if `finished`.

        Raises ValueError, naming the place, if the template fails, if an answer cannot be found in what it writes, or
        if its text has no tokens.
        """
        texts: Texts = []
        answers = list_answers(conversation.messages)
        for turn in answers:
            prompt, opening = self._write_prompt(conversation, turn)
            answer = self._write_answer(conversation, turn, prompt, finished or turn < answers[-1])
            answer = answer if _begins_with(answer, opening) else opening + answer
            prompt_ids, whole = self._tokenize(prompt), self._tokenize(prompt + answer)
            if whole[: len(prompt_ids)] == prompt_ids:
                answer_ids = whole[len(prompt_ids) :]
            else:  # a token reaches over the border: the model writes its answer after the prompt's own tokens
                answer_ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            if not answer_ids and not is_blank(conversation.messages[turn]):
                raise ValueError(f"{conversation.place}: the answer has no tokens")
            add_turn(texts, prompt_ids, answer_ids)
        return texts

    @cached_property
    def vocabulary(self) -> str:
        """The fingerprint of the tokenizer's vocabulary."""
        return fingerprint_vocabulary(self.tokenizer)

    def count_visible(self, tokens: Sequence[int]) -> int:
        """The number of tokens up to the last one with a visible character: without blanks and end tokens after it."""
        seen = (
            place
            for place in range(len(tokens), 0, -1)
            if tokens[place - 1] not in self.ends
            and self.tokenizer.decode([tokens[place - 1]], skip_special_tokens=True).strip()
        )
        return next(seen, 0)

    @cached_property
    def ending(self) -> str:
        """What the model writes after an answer: up to the first end token in the template's text, or else EOS."""
        found = [(self._after.index(name), name) for name in self._end_names if name in self._after]
        if not found:
            return str(self.tokenizer.eos_token or "")
        begin, name = min(found)
        return self._after[: begin + len(name)]

    @cached_property
    def _end_names(self) -> list[str]:
        return [str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.ends]

    @cached_property
    def _after(self) -> str:
        """The template's text after the last answer."""
        with suppress(ValueError):
            if self.has_template:
                return self._apply([ASKED, PROBE], self.options, opened=False).rpartition(PROBE["content"])[2]
        return ""

    @cached_property
    def _opens_answers(self) -> bool:
        """Whether prompts for an answer have text that opens it. Else the template writes that before an answer."""
        with suppress(ValueError):
            asked, before = (self._apply([ASKED], self.options, opened) for opened in (True, False))
            return asked != before
        return True

    def _write_prompt(self, conversation: Conversation, turn: int) -> tuple[str, str]:
        """The text before an answer, and what the model writes between them: blanks, or the header of an answer.

        This is the prompt that the model would get. After another answer, and with templates that have no such prompts,
        it is what the template writes before an answer there. Raises ValueError if the template fails.
        """
        before = conversation.messages[:turn]
        asked = self._render(conversation, before, opened=True)
        if not self.has_template:
            return asked, ""
        if self._opens_answers and before[-1]["role"] != "assistant":
            return self._continue_prompt(conversation, turn, asked)
        unopened = self._render(conversation, before, opened=False)
        probed = self._render(conversation, [*before, PROBE], opened=False, checked=False)
        found, probe, _ = probed.rpartition(PROBE["content"])
        if not probe:
            raise ValueError(f"{conversation.place}: the chat template leaves out an answer")
        if asked == unopened:
            blank = found.removeprefix(asked)
            if not found.startswith(asked):
                return (found if before[-1]["role"] == "assistant" else asked), ""
            return (found, "") if blank.strip() else (asked, blank)
        if found.startswith(asked) or asked.startswith(found):  # one of them opens a thought
            return asked, ""
        # The answer before is written in another way where one follows, for example without an empty thought.
        opening = asked.removeprefix(unopened)
        place = found.find(opening, max(0, found.rfind(self.ending)))
        return (found if place < 0 else found[: place + len(opening)]), ""

    def _continue_prompt(self, conversation: Conversation, turn: int, asked: str) -> tuple[str, str]:
        """The prompt that the model would get, and what it writes before the content of an answer: a header.

        A prompt that opens a thought has it closed if the answer has none, as the template writes such an answer.
        Raises ValueError for an answer with a thought whose prompt has closed one.
        """
        message, before = conversation.messages[turn], conversation.messages[:turn]
        if any(message.get(name) for name in STRUCTURED):
            return asked, ""  # the template writes these answers
        if message["content"].lstrip().startswith(OPENED) and asked.rstrip().endswith(CLOSED):
            raise ValueError(
                f"{conversation.place}: the answer has a thought, and its prompt has closed it; let the template leave "
                "it open, for example by --template-option enable_thinking=true"
            )
        written = self._find_written(conversation, [*before, PROBE])
        if _opens_thought(asked):
            return (asked if CLOSED in message["content"] or not written else written), ""
        header = written.removeprefix(asked)
        if not written.startswith(asked) or not TAG.search(header):
            return asked, ""
        followed = self._find_written(conversation, [*before, PROBE, ASKED])  # an empty thought may be in the last only
        return asked, header if followed == written else ""

    def _find_written(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """What the template writes before the probe among these messages; "" if it cannot."""
        with suppress(ValueError):
            text = self._apply(messages, self.options | conversation.options, opened=False)
            return text.rpartition(str(PROBE["content"]))[0]
        return ""

    def _write_answer(self, conversation: Conversation, turn: int, prompt: str, finished: bool) -> str:
        """The text of an answer with its ending. Tool calls and thoughts in keys of their own need the template."""
        message = conversation.messages[turn]
        if any(message.get(name) for name in STRUCTURED):
            return self._cut_answer(self._render_answer(conversation, turn, prompt), finished)
        answer = str(message["content"])
        if _opens_thought(prompt) and answer.lstrip().startswith(OPENED):  # which is opened already
            answer = answer.lstrip().removeprefix(prompt[prompt.rindex(OPENED) :]).removeprefix(OPENED)
        return answer + self.ending if finished and not answer.endswith(self.ending) else answer

    def _render_answer(self, conversation: Conversation, turn: int, prompt: str) -> str:
        """What the template writes for an answer, and after it. Raises ValueError if it changes or leaves out text."""
        message = conversation.messages[turn]
        whole = self._render(conversation, conversation.messages[: turn + 1], opened=False)
        if not whole.startswith(prompt):
            given = next(name for name in STRUCTURED if message.get(name))
            raise ValueError(
                f"{conversation.place}: the chat template changes the text before an answer with {given}; it cannot be "
                "masked"
            )
        answer = self._drop_empty_thought(conversation, turn, prompt, whole[len(prompt) :])
        # Thoughts inside of the content may be written in another way.
        texts = {"content": message["content"].rpartition(CLOSED)[2]} | {each: message.get(each) for each in THOUGHTS}
        for name, text in texts.items():
            if isinstance(text, str) and text.strip() not in answer:
                raise ValueError(f"{conversation.place}: the chat template leaves out the {name} of an answer")
        return answer

    def _cut_answer(self, answer: str, finished: bool) -> str:
        """A rendered answer up to its ending, which it loses or gets as needed."""
        if self._after and answer.endswith(self._after):
            return answer.removesuffix(self._after) + self.ending * finished
        written = answer.rstrip()
        name = next((name for name in self._end_names if written.endswith(name)), None)  # another one than usual
        return answer + self.ending * finished if name is None else written.removesuffix(name) + name * finished

    def _drop_empty_thought(self, conversation: Conversation, turn: int, prompt: str, answer: str) -> str:
        """A rendered answer without the empty thought that some templates write in front of a last answer only."""
        messages = conversation.messages
        if turn + 1 == len(messages) or any(messages[turn].get(name) for name in THOUGHTS):
            return answer
        followed = self._render(conversation, messages[: turn + 2], opened=False)
        if followed.startswith(prompt + answer):
            return answer
        probed = self._render(conversation, [*messages[:turn], PROBE], opened=False)
        shorter = answer.removeprefix(probed.removeprefix(prompt).rpartition(PROBE["content"])[0])
        ended = shorter.removesuffix(self._after)
        return shorter if followed.startswith(prompt + ended) else answer

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], opened: bool, checked: bool = True
    ) -> str:
        """The text of messages: a prompt with what opens its answer, or without. checked: that it has all of them."""
        options = self.options | conversation.options
        try:
            self._refuse_unknown(options, "the row")
            for message in messages:
                self._refuse_unknown({name: 1 for name in STRUCTURED if message.get(name)}, "a message")
            if not self.has_template:
                return _join(messages, opened)
            text = self._apply(messages, options, opened)
            for place, message in enumerate(messages):
                if checked and message["role"] != "assistant" and message["content"].strip() not in text:
                    changed = [*messages]
                    changed[place] = message | {"content": PROBE["content"]}
                    if self._apply(changed, options, opened) == text:
                        raise ValueError(f"the chat template leaves out the {message['role']} message")
        except ValueError as error:
            raise ValueError(f"{conversation.place}: {error}") from error
        return text

    def _apply(self, messages: Sequence[Message], options: Mapping[str, Any], opened: bool) -> str:
        shown = [
            {name: value for name, value in each.items() if name not in FLAGS and value is not None and value != []}
            for each in messages
        ]
        try:
            return str(
                self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=opened, **options)
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
            if not self.takes(name):
                raise ValueError(f"{giver} gives {name!r}, which this model's chat template does not take")

    def takes(self, name: str) -> bool:
        """Whether the chat template mentions an argument or a message's key."""
        return self.has_template and re.search(rf"\b{re.escape(name)}\b", self._sources) is not None

    @cached_property
    def _sources(self) -> str:
        template: Any = self.tokenizer.chat_template
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)


def _opens_thought(prompt: str) -> bool:
    """Whether a prompt ends within a thought."""
    return prompt.rstrip().endswith(OPENED)


def _begins_with(answer: str, opening: str) -> bool:
    """Whether an answer has this opening, or one of its kind: the same tag first."""
    tag = TAG.search(opening)
    return answer.startswith(opening) or (tag is not None and answer.lstrip().startswith(tag.group()))


RESERVED = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters)


def _join(messages: Sequence[Message], opened: bool) -> str:
    """Texts without a template: an answer follows its question at once, and an empty line separates all else.

    opened: whether an answer follows.
    """
    text, last = "", ""
    for message in [*messages, *([PROBE | {"content": ""}] if opened else [])]:
        answers = message["role"] == "assistant" and last != "assistant"
        text += ("\n\n" if last and not answers else "") + message["content"]
        last = message["role"]
    return text
