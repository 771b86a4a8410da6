"""Requests of the status page on a recording backend; the page's headers; the files of the demo."""

from __future__ import annotations

import ast
import re

from recording_backend import Served

from megascend.apps.cli.serve import DEMO_CLIENT, demo_directory, demo_settings
from megascend.apps.serve.activity import Activity
from megascend.apps.serve.api.page import loss_curve
from megascend.config.serve import load_serve_config
from megascend.runtime.platforms.base import MemoryFigures


def status(system: Served, name: str | None = None):
    headers = {} if name is None else getattr(system, name).headers
    answer = system.client.get("/status", headers=headers)
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    return answer.json()


def test_terminal_shows_failures_at_once_and_progress_at_intervals(system, capsys) -> None:
    Activity(system.service).report(last=True)
    assert capsys.readouterr().err == ""  # nobody has come yet
    activity, model = Activity(system.service), system.alice.model(rank=8)
    system.tick(1)
    system.alice.fetch(system.alice.forward_backward(model, 1, 10, weights=[1.0, 2.0]))  # two for one token
    activity.report()
    [line] = capsys.readouterr().err.splitlines()
    assert f"forward_backward {model} failed (user's fault): " in line
    activity.report()
    assert capsys.readouterr().err == ""
    system.tick(7)
    activity.report()
    assert capsys.readouterr().err.endswith(" sessions 1, models 1, steps 0, waiting 0\n")
    activity.report(last=True)
    assert capsys.readouterr().err == ""  # nothing has changed


def test_totals_have_no_names_and_tenants_see_only_their_models(system) -> None:
    alices_model, bobs_model = system.alice.model(rank=8), system.bob.model()
    for model, caller in ((alices_model, system.alice), (bobs_model, system.bob)):
        caller.fetch(caller.forward_backward(model, 1, 10, weights=[1.0, 2.0]))  # two for one token
    body = {
        "session_id": alices_model.partition(":")[0],
        "model_seq_id": 1,
        "base_model": "<b>x</b>",
        "lora_config": {"rank": 4},
    }
    assert system.alice.post("create_model", body).status_code == 400
    open_to_all = system.client.get("/status")
    assert list(open_to_all.json()) == ["totals"]
    names = ("alice", "bob", "tiny", alices_model, bobs_model, alices_model.partition(":")[0], "<b>")
    assert not any(name in open_to_all.text for name in names)
    totals = open_to_all.json()["totals"]
    assert (totals["sessions"], totals["models"], totals["max_models"], totals["memory"]) == (2, 2, 64, None)
    assert {"kind": "forward_backward", "pending": 0, "ok": 0, "user": 2, "server": 0} in totals["requests"]
    assert totals["refused"] == {"400": 1}
    system.tick(7)
    alices_status, bobs_status = status(system, "alice")["tenant"], status(system, "bob")["tenant"]
    assert (alices_status["name"], [item["name"] for item in alices_status["sessions"]]) == (
        "alice",
        [alices_model.partition(":")[0]],
    )
    assert [(item["name"], item["rank"]) for item in alices_status["models"]] == [(alices_model, 8)]
    assert [(item["name"], item["rank"]) for item in bobs_status["models"]] == [(bobs_model, 4)]
    refused, failed = alices_status["errors"]  # newest first
    assert (refused["kind"], refused["ago_s"], refused["category"]) == ("create_model", 7, "user")
    assert "<b>x</b>" in refused["message"]
    assert (failed["kind"], failed["model"], "the same shape" in failed["message"]) == (
        "forward_backward",
        alices_model,
        True,
    )
    assert [item["model"] for item in bobs_status["errors"]] == [bobs_model]
    assert status(system)["totals"]["uptime_s"] == 7


def test_losses_are_per_token_of_a_step(system) -> None:
    model = system.alice.model()
    for number, targets in ((1, (10,)), (2, (20, 30))):  # 10 of one token and 50 of two: 20 per token
        system.alice.fetch(system.alice.forward_backward(model, number, *targets))
    system.alice.fetch(system.alice.optim_step(model, 3))
    waiting = [system.alice.forward_backward(model, 4, 7), system.alice.optim_step(model, 6)]
    system.alice.fetch(waiting[0])
    (model_status,) = status(system, "alice")["tenant"]["models"]
    assert (model_status["loss"], model_status["steps"], model_status["pending"]) == ([[0, 20.0], [1, 7.0]], 1, 1)
    assert (model_status["layers"], model_status["ready"]) == (["attention", "mlp", "output"], True)


def test_a_loss_that_is_no_number_is_a_gap() -> None:
    infinite = float("inf")
    curve = [(0, 4.0, 2), (1, float("nan"), 3), (2, 0.0, 0), (3, infinite, 1), (3, -infinite, 1), (4, -3.0, 2)]
    assert loss_curve(curve) == [(0, 2.0), (1, None), (2, None), (3, None), (4, -1.5)]


def test_batches_tell_their_models_and_tokens(system) -> None:
    alices_model, bobs_model = system.alice.model(), system.bob.model()
    system.backend.gate.clear()
    first = system.alice.forward_backward(alices_model, 1, 10)  # runs alone, and is held
    while system.service._inbox._commands:
        pass
    waiting = [
        system.alice.forward_backward(alices_model, 2, 11, 12),
        system.bob.forward_backward(bobs_model, 1, 21, 22, 23),
    ]
    system.backend.gate.set()
    system.alice.fetch(first)
    assert system.alice.fetch(waiting[0])["metrics"]["loss:sum"] == 11 + 12
    assert system.bob.fetch(waiting[1])["metrics"]["loss:sum"] == 21 + 22 + 23
    assert {name for name, _ in system.backend.calls[-1][1:]} == {"a1", "a2"}
    assert status(system)["totals"]["batches"] == {"max_tokens": 65536, "recent": [[1, 1], [2, 5]]}
    system.service.memory = lambda: ("cuda", MemoryFigures(1, 2, 3))
    assert status(system)["totals"]["memory"] == {"device": "cuda", "allocated": 1, "peak": 2, "total": 3}
    figures = system.client.get("/metrics").text.splitlines()
    assert {"megascend_device_memory_bytes 1.0", "megascend_device_memory_peak_bytes 2.0"} <= set(figures)


def test_errors_of_one_tenant_do_not_push_out_anothers(system) -> None:
    model = system.alice.model()
    for number in range(40):
        assert system.bob.post("optim_step", content=b"[]").status_code in (400, 422), number
    system.alice.fetch(system.alice.forward_backward(model, 1, 1000))
    assert len(status(system, "bob")["tenant"]["errors"]) == 20
    assert [problem["model"] for problem in status(system, "alice")["tenant"]["errors"]] == [model]


def test_page_policy_allows_only_its_script_and_style(system) -> None:
    answer = system.client.get("/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/=]{44}'", policy[kind])
    assert {policy[kind] for kind in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert set(re.findall(r"https?://[^\"' ]+", answer.text)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Storage|cookie| style=| on\w+=", answer.text
    )


def test_the_demo_has_a_model_and_a_client_program(tmp_path) -> None:
    with demo_directory(tmp_path) as directory:
        settings = load_serve_config(None, demo_settings(directory, {"storage": tmp_path, "port": 0}))
        assert (settings.name, settings.storage, settings.precision) == ("demo", tmp_path / "checkpoints", "fp32")
        assert (settings.model / "model.safetensors").exists()
        assert (directory / "demo_client.py").read_text() == DEMO_CLIENT
    modified_ns = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    with demo_directory(tmp_path):
        assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == modified_ns
    ast.parse(DEMO_CLIENT)
    with demo_directory(None) as directory:
        assert (directory / "model" / "config.json").exists()
    assert not directory.exists()
