"""Models and data by their names on the Hugging Face Hub, such as ``Qwen/Qwen3-0.6B``, downloaded by huggingface_hub; uploads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from megascend.config.registry import COMPRESSIONS, DATA_FORMATS
from megascend.errors import CheckpointError, DataError, HubError

if TYPE_CHECKING:
    from megascend.config import TrainerConfig
    from megascend.config.serve import ServeConfig

Settings = TypeVar("Settings", bound="TrainerConfig | ServeConfig")
NAME = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
"""A repository, ``owner/name``, optionally with a branch, a tag or a commit."""
FILES = (*DATA_FORMATS, *COMPRESSIONS, ".safetensors", ".yaml")
"""Endings of files, which are not names of repositories."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ckpt", "original/*", "metal/*")
"""Files of models that are not read: weights in other formats."""


SNAPSHOT = re.compile(r"(?P<kind>models|datasets)--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/", re.ASCII)
"""Part of a path in the Hub's cache."""


def with_snapshots(config: Settings) -> Settings:
    """Return the settings with directories in place of names on the Hub."""
    from megascend.config import RunConfig
    from megascend.config.rl import BASE
    from megascend.config.serve import ServeConfig

    changes: dict[str, Any] = {"model": snapshot(config.model)}
    for section, setting in (("teacher", "model"), ("distillation", "teacher"), ("reference", "model")):
        settings = getattr(config, section, None)
        if settings is not None and (other := getattr(settings, setting)) not in (None, BASE):
            directory = snapshot(other, setting=f"{section}.{setting}")
            changes[section] = settings.model_copy(update={setting: directory})
    if isinstance(config, ServeConfig) and config.name is None and changes["model"] != config.model:
        changes["name"] = str(config.model)
    if isinstance(config, RunConfig):
        data, validation = config.data, config.validation
        sources = tuple(
            source.model_copy(update={"path": snapshot(source.path, "dataset", f"data.sources[{number}]")})
            for number, source in enumerate(data.sources)
        )
        path = None if data.path is None else snapshot(data.path, "dataset", "data.path")
        # Prepared samples are read without the data.
        if data.prepared is None:
            changes["data"] = data.model_copy(update={"path": path, "sources": sources})
        if validation is not None and validation.path is not None and data.prepared is None:
            held_out = snapshot(validation.path, "dataset", "validation.path")
            changes["validation"] = validation.model_copy(update={"path": held_out})
    return config.model_copy(update=changes)


def snapshot(
    path: str | Path,
    kind: Literal["model", "dataset"] = "model",
    setting: str = "model",
    files: Sequence[str] | None = None,
) -> Path:
    """Return a path unchanged if it exists or is not a name on the Hub, else the directory with the downloaded files.

    Without a network, that is what the Hub's cache has of an earlier download. Every call and command that takes a model resolves
    it here.

    Args:
        path: directory, or ``owner/name`` or ``owner/name@revision``.
        setting: what the path is for, in messages.
        files: names of the files that are needed; None: all but weights in formats that are not read.

    Raises:
        CheckpointError, DataError: it cannot be downloaded, by ``kind``.
    """
    path = Path(path)
    error_class = CheckpointError if kind == "model" else DataError
    match = None if path.exists() or path.suffix in FILES else NAME.fullmatch(str(path))
    if match is None:
        return path
    # A mistyped path is not downloaded from whoever has such a name.
    if path.parent.exists():
        raise error_class(
            f"{setting}: {path} does not exist, and is not looked for on the Hub while a folder {path.parent} is here: correct "
            "it, or start elsewhere"
        )
    from huggingface_hub import constants, snapshot_download

    repository, revision = match["repository"], match["revision"]
    try:
        return Path(
            snapshot_download(
                repository,
                repo_type=kind,
                revision=revision,
                allow_patterns=None if files is None else list(files),
                ignore_patterns=list(OTHER_WEIGHTS) if kind == "model" else None,
            )
        )
    except (OSError, ValueError) as error:  # its own errors are of these kinds
        reason = " ".join(str(error).split()).rstrip(".")
        option = f" --revision {revision}" if revision else ""
        dataset = " --repo-type dataset" if kind == "dataset" else ""
        message = (
            f"{setting}: {path} does not exist here, and {constants.ENDPOINT} did not give it ({type(error).__name__}: "
            f"{reason:.80}). Without a network, run 'hf download {repository}{dataset}{option}' where there is one, and copy "
            f"{constants.HF_HUB_CACHE}"
        )
        raise error_class(message) from error


def repository_of(path: Path | str) -> str | None:
    """Return the repository on the Hub, ``owner/name``, of a path in the Hub's cache; None for other paths."""
    match = SNAPSHOT.search(Path(path).as_posix())
    return None if match is None else f"{match['owner']}/{match['name']}"


# --- uploads ---


def check_access(repository: str) -> None:
    """Check that there is a token, that the Hub accepts it, and that it may write to a repository, as far as its kind shows."""
    from huggingface_hub import HfApi, get_token

    namespace = repository.partition("/")[0]
    if get_token() is None:
        raise HubError(f"push to {repository}: there is no token: set HF_TOKEN to one that may write to {namespace}")
    with _reported(f"push to {repository}: the Hub did not accept the token (HF_TOKEN, or of 'hf auth login')"):
        account = HfApi().whoami()
    user, token = account.get("name"), (account.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise HubError(
            f"push to {repository}: the token {token.get('displayName', '')!r} of {user} may only read: create one with "
            "the role write, and set HF_TOKEN to it"
        )
    organisations = [entry.get("name") for entry in account.get("orgs") or []]
    # The account does not show what a fine-grained token may write to.
    if namespace not in (user, *organisations) and token.get("role") == "write":
        belongs = f", a member of {', '.join(map(str, organisations))}" if organisations else ", in no organisation"
        raise HubError(
            f"push to {repository}: the token is of {user}{belongs}, and cannot write to {namespace}: choose "
            f"{user}/{repository.partition('/')[2]}, or another token"
        )


def create_repository(repository: str, *, private: bool) -> None:
    """Create a model repository unless it exists, and check that files may be written to it. Nothing is written."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with _reported(f"push to {repository}: the repository can neither be created nor written to"):
        api.create_repo(repository, private=private, exist_ok=True)
        # An existing repository passes the call above without permission to write. This asks where a file would be stored, which
        # needs the permission, and uploads nothing as long as it is small.
        api.preupload_lfs_files(repository, [CommitOperationAdd("README.md", b"#")])


def upload(directory: Path, repository: str, message: str) -> str:
    """Upload all files of a directory, and return the address of the commit.

    Raises:
        HubError: the upload failed; files that have been stored are not sent again by the next one.
    """
    from huggingface_hub import HfApi

    with _reported(f"push to {repository}: the upload failed"):
        return HfApi().upload_folder(repo_id=repository, folder_path=directory, commit_message=message).commit_url


@contextmanager
def _reported(problem: str) -> Iterator[None]:
    """Raise HubError with ``problem`` and the reason for an error of huggingface_hub."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:  # of HTTP clients, of storage back ends, or of answers that are not the Hub's
        reason = " ".join(str(error).split())
        raise HubError(f"{problem} ({constants.ENDPOINT}): {type(error).__name__}: {reason:.400}") from error
