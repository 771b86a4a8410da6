"""What is wrong with data that needs neither torch nor a tokenizer to be found."""

from __future__ import annotations

from pathlib import Path

from megascend.config import Data
from megascend.data.files import iterate_documents
from megascend.data.findings import Findings
from megascend.data.splits import files_of, is_saved, split_files
from megascend.errors import DataError

LARGE = 32 * 2**20
"""Bytes from which on data are read by the ranks alone."""


def check_files(path: Path, data: Data, setting: str = "data.path") -> Findings:
    """Read data and return what is wrong with its files and records.

    Folders that datasets has saved, and what is larger than :data:`LARGE`, are left to the ranks.

    Args:
        path: ``data.path`` or that of a validation set.
        data: how to read it.
        setting: the one that ``path`` is of.

    Raises:
        DataError: there is nothing to read at ``path``, or the chat template cannot be read.
    """
    read_template(data.chat_template)
    findings = Findings(setting)
    if is_saved(path):
        files_of(path, data.split, data.config_name, findings)
        return findings
    try:
        size = 0
        for file in split_files(path, data.split, data.config_name, findings):
            size += file.stat().st_size
            file.open("rb").close()
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    if size < LARGE and not findings.problems:
        findings = Findings(setting)  # reading looks at the folder once more
        for _ in iterate_documents(path, data.split, data.columns, findings, data.config_name):
            pass
    return findings


def read_template(path: Path | None) -> str | None:
    """The chat template at ``data.chat_template``.

    Raises:
        DataError: it cannot be read.
    """
    if path is None:
        return None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"data.chat_template: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template: {path}: not UTF-8 text (byte {error.start}: {error.reason})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as transformers reads the template of a model
