"""Uploading a head's folder to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from decode.models.adapters import ADAPTER, find_base, is_adapter
from draftless_commands.checking.card import CARD
from draftless_commands.head_training.record import RECORD
from draftless_commands.shared.options import ADAPTER_FOLDER
from heads.checkpoint import is_saved_head
from heads.formats.weight_files import CONFIG, WEIGHTS
from proposers.calibration import FILE
from training.checkpoint import METRICS

UPLOADED = [CONFIG, WEIGHTS, FILE, CARD, METRICS, RECORD, f"{ADAPTER_FOLDER}/*"]


def check_upload(repository: str, folder: Path | None) -> None:
    """Raise ValueError if a head's folder cannot be uploaded, before anything is measured. None: it is made later.

    The hub is asked who the user is, so a missing login and a hub that cannot be reached are found here too.
    """
    if "/" not in repository:
        raise ValueError(f"--push-to-hub {repository}: name the repository with its owner, USER/NAME")
    validate_repo_id(repository)
    if folder is not None:
        _check_files(folder)
    with _asking_the_hub(repository):
        huggingface_hub.HfApi().whoami()


def _check_files(folder: Path) -> None:
    """Raise ValueError for a folder that would be of no use to others."""
    if not is_saved_head(folder):
        raise ValueError(
            f"--push-to-hub is for heads that Draftless saved: heads.save_head(heads.load_head({folder}), NEW)"
        )
    if is_adapter(folder / ADAPTER_FOLDER):
        base = find_base(folder / ADAPTER_FOLDER)
        if base is not None and Path(base).is_absolute():
            raise ValueError(
                f"{folder / ADAPTER_FOLDER} names its base model by a path of this machine, {base}; write the model's "
                f"hub id in its {ADAPTER}"
            )


def upload(folder: Path, repository: str) -> str:
    """Upload what a head's user needs, in one commit; the repository is made if it is missing. Returns its address.

    Raises ValueError if the hub refuses or cannot be reached.
    """
    with _asking_the_hub(repository):
        api = huggingface_hub.HfApi()
        address = api.create_repo(repository, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=UPLOADED,
            commit_message="Upload a head with draftless check",
        )
    return str(address)


@contextmanager
def _asking_the_hub(repository: str) -> Iterator[None]:
    """Raise ValueError, in one line, for what goes wrong at the hub."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ValueError("--push-to-hub needs a login: run hf auth login, or set HF_TOKEN") from error
    except Exception as error:  # the hub's client and its HTTP library have errors of their own
        fault = "the hub refuses it" if isinstance(error, HfHubHTTPError) else "the hub cannot be reached"
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise ValueError(f"--push-to-hub {repository}: {fault}: {reason}") from error
