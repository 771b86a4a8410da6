"""The bundle contains the results and nothing about the user or the machine."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import tarfile
from pathlib import Path

import pytest

from npu_acceptance.privacy import machine_scrubber
from npu_acceptance.records import Report, SectionResult, at_most, failed, noted
from npu_acceptance.report import write_bundle

PRIVATE = {
    "USER": "evelyn",
    "LOGNAME": "evelyn",
    "HOSTNAME": "cobalt-node17.lab.example.org",
    "MY_API_TOKEN": "tok",  # short, and secret all the same
    "WANDB_API_KEY": "0123456789wandb",
    "MODEL_FOLDER": "/data/projects/unannounced-model",
    "MASTER_ADDR": "cobalt-master",
    "HTTPS_PROXY": "proxy.lab.example.org:3128",
    "HCCL_SOCKET_IFNAME": "enp189s0f0",
}
"""As in an environment; every value must be gone from the bundle."""

LOOKS_PRIVATE = (
    "10.32.1.207",
    "fe80::1ff:fe23:4567:890a",
    "2001:0db8:85a3:0000:0000:8a2e:0370:7334",
    "02:42:ac:11:00:02",
    "/mnt/nas/team/checkpoints/step_100",
    "~/models/secret",
    "evelyn.w@example.org",
    "s3://bucket-of-ours/run",
    "https://git.lab.example.org/x",
    "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "d41d8cd98f00b204e9800998ecf8427e",
    r"C:\Users\evelyn\run",
)
MUST_STAY = (
    "2.7.1.post2",
    "8.0.RC3",
    "Ascend910B3",
    "RuntimeError: aclnnSwiGlu failed, error code 561002",
    "step 3/10  loss 5.1569",
    "12:34:56",
    "swiglu, bf16: 0.4",
    "train/step.py",
    "TP2 x DP2",
)


def text_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read().decode() for member in archive}  # type: ignore[union-attr]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a report with private data in every text field."""
    import megascend

    for name, value in PRIVATE.items():
        monkeypatch.setenv(name, value)
    source = Path(megascend.__file__).parent
    parts = [
        *PRIVATE.values(),
        *LOOKS_PRIVATE,
        *MUST_STAY,
        str(Path.home()),
        str(Path.cwd()),
        socket.gethostname(),
    ]
    line = " | ".join(parts) + f' File "{source}/train/step.py", line 3, in step; tcp://10.0.0.1:29500 [fe80::1]'
    log = "\n".join([line, f"[rank0]: error on {PRIVATE['HOSTNAME'].upper()} (cobalt-node17):29500, user evelyn", line])
    sections = (
        SectionResult(
            "operators", "failed", 1.0, 2.0, (failed(f"a {line}", line), noted("b", line)), "exit code 1", log
        ),
        SectionResult("speed", "ok", 1.0, 2.0, (at_most("median step", 12.5, 20, "ms"),)),
    )
    report = Report({"versions": {"torch": "2.7.1.post2", "MindSpeed": line}, "device": line}, sections)
    return write_bundle(tmp_path / "bundle.tar.gz", report, machine_scrubber(os.environ))


def test_bundle_files_contain_no_private_data(bundle: Path) -> None:
    files = text_of(bundle)
    assert set(files) == {f"npu_acceptance/{name}" for name in ("report.json", "summary.txt", "operators.txt")}
    forbidden = [
        *PRIVATE.values(),
        *LOOKS_PRIVATE,
        str(Path.home()),
        str(Path.cwd()),
        socket.gethostname(),
        getpass.getuser(),
    ]
    forbidden += ["evelyn", "cobalt", "10.0.0.1", "unannounced", "fe80", "lab.example.org"]
    for name, text in files.items():
        for private in {*forbidden} - {"localhost", "root"}:  # which are names of everybody
            # As a whole word: the short names are substrings of ordinary words.
            match = re.search(rf"(?<![A-Za-z0-9]){re.escape(private)}(?![A-Za-z0-9])", text, re.IGNORECASE)
            assert match is None, (name, private, text[max(match.start() - 60, 0) : match.end() + 60])


def test_bundle_keeps_measurements(bundle: Path) -> None:
    files = text_of(bundle)
    for text in files.values():
        for part in MUST_STAY:
            assert part in text
    report = json.loads(files["npu_acceptance/report.json"])
    assert report["sections"][1]["measurements"][0]["found"] == 12.5
    assert "<MY_API_TOKEN>" in files["npu_acceptance/operators.txt"]


def test_archive_headers_contain_no_owner_or_time(bundle: Path) -> None:
    with tarfile.open(bundle) as archive:
        for member in archive:
            assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 0)
    header = bundle.read_bytes()[:10]
    assert header[3] == 0  # no file name in the compressed file's header
    assert header[4:8] == bytes(4)  # and no time
