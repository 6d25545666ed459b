"""What every command does alike: parse options, check files before the work, and fail in one line."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError

INTERRUPTED, UNREAD = 128 + 2, 128 + 13  # a shell's exit statuses for programs ended by SIGINT and SIGPIPE
WIDTH = 100  # characters of a line of help
PLOT_FORMATS = (".png", ".svg")


def measure_line() -> int:
    """The characters of a line of prose: as wide as the terminal, `WIDTH` at most."""
    return min(shutil.get_terminal_size().columns, WIDTH) - 2


class Layout(argparse.HelpFormatter):
    """Help as wide as the terminal, `WIDTH` characters at most. Descriptions and epilogs have paragraphs.

    The usage shows what must be given; all options are listed below it.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"width": measure_line(), **settings})

    def add_usage(self, usage: Any, actions: Iterable[Any], groups: Iterable[Any], prefix: Any = None) -> None:
        groups = [group for group in groups if group.required]
        grouped = [action for group in groups for action in group._group_actions]
        shown = [action for action in actions if action.required or action in grouped]
        options = argparse.Action([], "options", nargs="?", metavar="options")
        super().add_usage(usage, [*shown, options], groups, prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join("\n".join(self._split_lines(part, width)) for part in text.strip().split("\n\n"))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line, without the whole usage, and names a mistyped option."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": Layout, "allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; an unknown option is refused before anything else that is wrong, which may follow from it."""
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        if not {"-h", "--help"} & {*options}:
            for text in options:
                self._check_option(text)
        return super().parse_known_args(given, namespace)

    def _check_option(self, text: str) -> None:
        """End the program if an argument is read as a long option that there is not. Text with spaces is a value."""
        name = text.partition("=")[0]
        if not text.startswith("--") or " " in text or name in self._option_string_actions:
            return
        known = [each[2:] for each in self._option_string_actions if each.startswith("--")]
        longer = sorted((each for each in known if each.startswith(name[2:])), key=len)
        close = [*longer, *get_close_matches(name[2:], known, 1)]
        self.error(f"there is no option {name}" + (f"; did you mean --{close[0]}?" if close else ""))

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message} (see {self.prog} --help)")

    def fail(self, message: str) -> NoReturn:
        """End the program: one line on stderr, exit status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


@contextmanager
def failing_clearly(parser: Parser) -> Iterator[None]:
    """End without a traceback: bad input in one line with status 2, Ctrl-C with 130, a closed pipe with 141.

    A warning is one line as well, without the code that it came from.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands ignore it during their imports
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{parser.prog}: warning: {' '.join(str(message).split())}\n"
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Python flushes stdout once more at exit; it must not find the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(UNREAD) from None
    except OSError as error:
        parser.fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (ValueError, torch.OutOfMemoryError, SafetensorError) as error:  # SafetensorError: a full disk, for example
        parser.fail("; ".join([str(error), *getattr(error, "__notes__", ())]))
    finally:
        warnings.formatwarning = usual


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return int(text)

    return parse


def check_writable(path: Path | None, option: str) -> None:
    """Raise ValueError if a file cannot be written there. None is fine: the option was not given."""
    if path is not None and (path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ValueError(f"{option} {path} cannot be written; it names a file in a folder that exists")


def check_output_folder(path: Path | None, option: str) -> None:
    """Raise ValueError if files cannot be written in such a folder, which may not exist yet. None was not given."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {path} is a file; give a folder")
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{option} {path} cannot be written: {there} is no folder that may be written in")


def check_new_folder(path: Path | None, option: str) -> None:
    """Raise ValueError as `check_output_folder` does, and if there are files in it."""
    check_output_folder(path, option)
    if path is not None and path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{option} {path} is not empty; give another folder")


def check_plot(path: Path | None) -> None:
    """Raise ValueError if `--plot` cannot be drawn: a bad place or suffix, or no matplotlib."""
    if path is None:
        return
    check_writable(path, "--plot")
    if path.suffix not in PLOT_FORMATS:
        raise ValueError(f"--plot {path} must end in {' or '.join(PLOT_FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "draftless[plot]"')
