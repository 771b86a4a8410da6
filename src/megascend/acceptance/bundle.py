"""The bundle to send back: the report as JSON and as text, in one .tar.gz, nothing else, and nothing private."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

from megascend.acceptance.privacy import Scrubber
from megascend.acceptance.records import Report, SectionResult
from megascend.acceptance.summary import render

FOLDER = "npu_acceptance"


def write_bundle(path: Path, report: Report, scrub: Scrubber) -> Path:
    """Write the bundle: ``report.json``, ``summary.txt``, and the end of the output of each section that failed."""
    content = scrub.value(json.loads(report.to_json()))
    files = {"report.json": json.dumps(content, indent=2) + "\n", "summary.txt": scrub.text(render(report)) + "\n"}
    files |= {f"{section.name}.txt": scrub.text(tail_of(section)) for section in report.sections if section.tail}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")  # owner, group and time stay 0: they belong to this machine
            data = text.encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    # Neither a file name nor a time in the compressed file's header.
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return path


def tail_of(section: SectionResult) -> str:
    """What a failed section printed last."""
    return f"{section.name}: {section.problem}\n\n{section.tail}\n"
