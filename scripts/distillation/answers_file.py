"""The file of answers: rows are appended as they are finished, and an interrupted run continues after the last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decode.models.fingerprint import find_changes
from draftless_commands.distillation.jobs import Job
from heads.atomic_write import write_aside
from training.conversations import TEMPLATE_KEYS

GIVEN = (*TEMPLATE_KEYS, "chat_template_kwargs", "temperature")


def settings_path(path: Path) -> Path:
    """The file with the settings and fingerprints of a file of answers."""
    return path.with_name(path.name + ".settings.json")


class AnswersFile:
    """A file of answer rows, and the settings they were made with in a second file.

    Raises ValueError if the file was made with other settings, or is not such a file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.settings_path = settings_path(path)
        self.size = 0  # bytes of complete lines
        self.rows: dict[int | str, dict[str, Any]] = {}  # by id
        self._before: dict[str, Any] = {}  # the settings of the rows that are there
        if path.exists() and path.stat().st_size:
            self._read()

    def begin(self, fingerprints: Mapping[str, Any], changed_model: bool = False) -> None:
        """Write settings and fingerprints, and remove an incomplete last line.

        Raises ValueError if the answers so far are of a model with other fingerprints, unless it may have changed.
        """
        changes = find_changes(self._before, fingerprints)
        if changes and not changed_model:
            raise ValueError(
                f"the model's {changes} changed since {self.path} was begun; give another --out, or go on with "
                "--changed-model"
            )
        self.settings |= fingerprints
        content = json.dumps(self.settings, indent=2, allow_nan=False) + "\n"
        write_aside(self.settings_path, lambda file: file.write(content.encode()))
        with self.path.open("ab") as file:
            file.truncate(self.size)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row at once. If a kill leaves half a line, the next run removes it."""
        with self.path.open("ab") as file:
            file.write(json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        self.rows[row["id"]] = row

    def list_missing(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs without a row. Raises ValueError if a row has a job's id but other prompts or settings."""
        for job in jobs:
            row = self.rows.get(job.id, job.row())
            messages = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
            asked, later = job.conversation.messages, job.conversation.later
            turns = [each["content"] for each in messages[len(asked) :] if each["role"] == "user"]
            is_other = messages[: len(asked)] != asked or turns != later[: len(turns)]
            if is_other or any(row.get(name) != job.row().get(name) for name in GIVEN):
                number = json.dumps(job.id)
                raise ValueError(
                    f"{self.path} has another prompt or temperature with the id {number}; give another --out"
                )
        return [job for job in jobs if job.id not in self.rows]

    def check(self) -> None:
        """Raise ValueError if no prompt has an answer because all logits are NaN or infinite."""
        if self.rows and all(row.get("dropped") == "nan" for row in self.rows.values()):
            raise ValueError(
                f"the logits of all {len(self.rows)} prompts are NaN or infinite; check the model's weights, and try "
                f"--dtype float32 or bfloat16; then remove {self.path} to begin anew"
            )

    def describe(self) -> str:
        """The contents in one line. Reasons are called as in the file."""
        rows = self.rows.values()
        dropped = Counter(row["dropped"] for row in rows if "dropped" in row)
        tokens = sum(row.get("response_tokens", 0) for row in rows)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none"
        cut = sum("cut" in row for row in rows)
        return f"{self.path}: {len(rows) - dropped.total()} answers ({cut} cut), {tokens} tokens; dropped: {reasons}"

    def _read(self) -> None:
        raw = self.path.read_bytes()
        self.size = raw.rfind(b"\n") + 1
        if not self.settings_path.exists():
            raise ValueError(f"{self.path} has no {self.settings_path.name} next to it, which names its settings")
        try:
            before = self._before = json.loads(self.settings_path.read_bytes())
            changed = [
                f"{name} {json.dumps(before[name])}, not {json.dumps(now)}"
                for name, now in self.settings.items()
                if before.get(name, now) != now
            ]
            self.rows = {row["id"]: row for row in map(json.loads, raw[: self.size].splitlines())}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} or {self.settings_path.name} is damaged ({error}); remove both") from error
        if changed:
            changes = " and ".join(changed)
            raise ValueError(f"{self.path} was begun with {changes}; go on with the same, or give another --out")
