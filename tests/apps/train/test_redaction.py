"""Passwords of addresses and options are used, and neither printed nor saved."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megascend import errors
from megascend.apps.cli.main import app
from megascend.apps.tracking import TrackedRun
from megascend.apps.tracking import tracker as registry
from megascend.apps.train.resume import differences
from megascend.apps.train.train import train
from megascend.config import RunConfig
from megascend.config.run import load_config
from megascend.errors import HIDDEN, ConfigError, ControllerLostError, MegascendError, hidden_entries, redacted
from megascend.runtime.bootstrap.runtime import Runtime
from megascend.testing import run_distributed
from megascend.training.checkpoint import manifest
from support.runs import events, run_config, tiny_run

SECRETS = ("hunter1", "hunter2", "hunter3", "hunter4")
OPTIONS = {
    "tracking_uri": "https://me:hunter1@tracks.example:5000/a?x=1&token=hunter2#y",
    "mirrors": ["postgresql://hunter3@db/runs"],
    "password": "hunter4",
}


SECRET_NAMES = (
    "db_password",
    "pwd",
    "pass",
    "Authorization",
    "x-api-key",
    "accessToken",
    "aws_secret_access_key",
    "cookie",
)
PLAIN_NAMES = ("key", "sort_key", "pad_token", "imageToken", "tokens", "passes", "author", "keyfile")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://u:p@h:1/a@b", "http://***@h:1/a@b"),
        ("http://u:p@ss@h", "http://***@h"),
        ("at http://tok@h, then 'ftp://u:p@i'", "at http://***@h, then 'ftp://***@i'"),
        ("http://[::1]:80/?api_key=x&step=3", "http://[::1]:80/?api_key=***&step=3"),
        ("https://h/a?access_token=x", "https://h/a?access_token=***"),
        ("https://huggingface.co/owner/name@main?tokens=3", "https://huggingface.co/owner/name@main?tokens=3"),
        ("mail me@example.com?token=x", "mail me@example.com?token=x"),
        ({"max_tokens": 3, "secret": None}, {"max_tokens": 3, "secret": None}),
        ([{"a": ("http://u:p@h", 1)}], [{"a": ("http://***@h", 1)}]),
        *(({name: "x"}, {name: "***"}) for name in SECRET_NAMES),
        ({"password": 1234, "secrets": 5, "secret": ["x"]}, {"password": "***", "secrets": 5, "secret": "***"}),
        *(({name: "x"}, {name: "x"}) for name in PLAIN_NAMES),
        *(
            (f"http://h/a?b=1&{name}=x&c=2", f"http://h/a?b=1&{name}=***&c=2")
            for name in ("sig", "X-Amz-Signature", "key", "pwd", "api-key", "X-Amz-Security-Token")
        ),
        ("http://h/#access_token=x", "http://h/#access_token=***"),
        ("http://h/?monkey=x&design=y", "http://h/?monkey=x&design=y"),
    ],
)
def test_secrets_are_replaced_and_nothing_else(value: Any, expected: Any) -> None:
    assert redacted(value) == expected
    assert redacted(expected) == expected
    assert list(hidden_entries({"k": value})) == []
    assert bool(list(hidden_entries({"k": expected}))) == (value != expected)


def test_no_declared_setting_counts_as_a_secret() -> None:
    from megascend.config.rl import RlConfig
    from megascend.config.section import all_settings
    from megascend.config.serve import ServeConfig

    names = {path.rpartition(".")[2] for kind in (RunConfig, RlConfig, ServeConfig) for path in all_settings(kind)}
    assert redacted(dict.fromkeys(names, "x")) == dict.fromkeys(names, "x")


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MegascendError)]


@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_errors_show_no_password(kind: type[MegascendError]) -> None:
    error = kind("no answer from http://u:hunter1@h/x")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == f"no answer from http://{HIDDEN}@h/x"


def test_refused_settings_show_no_password(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["show-config", str(tmp_path), "--set", f"a=[{OPTIONS['tracking_uri']}"])
    assert result.exit_code
    with pytest.raises(ConfigError) as raised:
        RunConfig(
            model=tmp_path, output=tmp_path, data={"path": tmp_path}, trackers={"mlflow": OPTIONS}, engines=OPTIONS
        )
    for text in (str(raised.value), result.output, str(ControllerLostError(f"{OPTIONS['tracking_uri']}"))):
        assert not any(secret in text for secret in SECRETS)


def test_run_saves_no_password_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    """Give the tracker its password; find it in no file and in no line of output; resume from the original settings."""
    tiny_run(tmp_path)
    output = tmp_path / "run"

    def settings(steps: int) -> RunConfig:
        checkpoint = {"every": 1, "asynchronous": False}
        trackers = [{"kept": OPTIONS}]
        return run_config(
            tmp_path, output, steps=steps, engine="megatron", checkpoint=checkpoint, trackers=trackers, export=True
        )

    def act() -> list[Any]:
        options = []

        def open_kept(run: TrackedRun) -> Any:
            options.append(run.options)
            assert not any(secret in json.dumps(run.config) for secret in SECRETS)
            raise RuntimeError(f"no answer from {run.options['tracking_uri']}")

        monkeypatch.setitem(registry.TRACKERS, "kept", registry.TrackerEntry(open_kept))
        train(settings(1))
        train(settings(2), resume="auto")
        return options

    assert run_distributed(act, 1, init=False, timeout_s=300) == [[OPTIONS, OPTIONS]]
    written = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert {"config.yaml", "events.jsonl", "metrics.jsonl"} <= {path.name for path in written}
    assert [path for path, content in written.items() for secret in SECRETS if secret.encode() in content] == []
    problems = [event["problem"] for event in events(output, "tracker_failed")]
    assert len(problems) == 2
    assert all(f"https://{HIDDEN}@tracks.example" in problem for problem in problems)
    saved = manifest.read(output / "checkpoints" / "step-00000002").config
    assert differences(saved, settings(2)) == []  # another password is no other setting
    with pytest.raises(ConfigError, match=r"config\.yaml: trackers.*without its password"):
        load_config(output / "config.yaml")
    again = load_config(output / "config.yaml", [f"trackers={json.dumps([{'mlflow': OPTIONS}])}"])
    assert again.tracker_options["mlflow"] == OPTIONS
