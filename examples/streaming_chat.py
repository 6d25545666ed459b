"""A chat in the terminal. Text streams in as it is decoded; an empty line ends the chat.

python examples/streaming_chat.py [MODEL]
"""

import sys

from draftless import AnswerStore, Engine, Sampling, Target, load_proposer


def main(name: str | None = None) -> None:
    target = Target.load(name)
    proposer = load_proposer("auto", target, store=AnswerStore())  # drafts from earlier answers too
    target.warm_up()  # measures now, so that the first answer does not wait for it
    engine = Engine(target, proposer, rows=1)  # keeps what it has read: a turn reads the new question alone
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
    messages: list[dict[str, str]] = []
    while question := ask():
        messages.append({"role": "user", "content": question})
        for chunk in engine.add(messages, sampling=sampling, max_new_tokens=128):
            print(chunk.text, end="", flush=True)
            if chunk.answer is not None:
                stats = chunk.answer.stats
                print(f"\n[tau {stats.tau:.2f}, {stats.reused} tokens of the prompt not read again]")
                messages.append({"role": "assistant", "content": chunk.answer.text})


def ask() -> str:
    """The next question; empty at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
