"""Draftless under one name: `from draftless import Target, generate`, and the command `draftless`.

The public names are those of `decode` and `proposers`, and `Rollouts`. They are imported when they are first used, so
that the command answers at once and Ctrl-C ends it while torch is still being imported.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decode import *  # noqa: F403
    from proposers import *  # noqa: F403
    from training.rollouts import *  # noqa: F403

PLACES = "decode", "proposers", "training.rollouts"  # of the public names

COMMANDS = {
    "generate": "answer prompts, faster and with the same text as plain decoding",
    "serve": "answer requests over HTTP, as OpenAI's API does",
    "demo": "see it at work: an answer streams in, then methods are compared",
    "bench": "measure proposers on questions, yours too; or forward passes",
    "distill": "write a model's own answers to prompts, to train a head on",
    "train": "train a head of any kind, or a draft model",
    "calibrate": "measure how often a head's or draft model's tokens are accepted",
    "reproduce": "compare a published head's tau with the published one",
    "check": "find out whether vLLM and SGLang serve a head as it was trained",
}
USAGE = """\
usage: draftless COMMAND ...

Lossless speculative decoding for the Hugging Face model you already have.

{}

draftless COMMAND --help lists the options of a command.""".format(
    "\n".join(f"  {name:10} {purpose}" for name, purpose in COMMANDS.items())
)


def __getattr__(name: str) -> Any:
    """One of the public names, or for `from draftless import *` the list of them."""
    if name == "__all__":
        return [each for place in PLACES for each in import_module(place).__all__]
    if not name.startswith("_"):
        for package in map(import_module, PLACES):
            if name in package.__all__:
                return getattr(package, name)
    raise AttributeError(f"module 'draftless' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = (import_module(place).__all__ for place in PLACES)
    return sorted({*globals(), *(name for each in names for name in each)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command: its name, then its options. `arguments`: None takes those of the process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the slow imports ends without a traceback
    command, *options = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "--version":
        print(f"draftless {version('draftless')}")
    elif command in COMMANDS:
        import_module(f"draftless_commands.{command}").main(options)
    else:
        close = get_close_matches(command, COMMANDS, 1)
        meant = f"; did you mean {close[0]}?" if close else f"; choose from {', '.join(COMMANDS)}"
        print(f"draftless: error: there is no command {command!r}{meant}", file=sys.stderr)
        sys.exit(2)  # as for wrong options


if __name__ == "__main__":
    main()
