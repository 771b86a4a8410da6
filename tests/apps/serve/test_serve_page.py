"""``megascend serve --demo`` as a process, its client program, and the page in a headless browser.

Needs Chromium on the path and Playwright in the environment. MEGASCEND_PAGE_SCREENSHOT=FILE.png writes the screenshot in
docs/serve.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from support.forked_programs import environment

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [
    *(["chromium on the path"] if CHROMIUM is None else []),
    *(["pip install playwright"] if importlib.util.find_spec("playwright") is None else []),
]
HTML = "<img src=x onerror=alert(1)>"
DEADLINE_S = 240

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return (address, key) of a demo whose client program has finished, and whose tenant then made a mistake."""
    storage = tmp_path_factory.mktemp("demo")
    variables = environment(TINKER_TELEMETRY="0")
    variables.pop("MEGASCEND_API_KEYS", None)
    program = [sys.executable, "-m", "megascend", "serve", "--demo", "--storage", str(storage), "--port", "0"]
    server = subprocess.Popen(
        [*program, "--set", "platform=cpu"], stdout=subprocess.PIPE, text=True, env=variables, start_new_session=True
    )
    guard = threading.Timer(DEADLINE_S, lambda: os.killpg(server.pid, signal.SIGKILL))
    guard.start()
    try:
        assert server.stdout is not None
        demo_variables = {}
        for line in server.stdout:
            demo_variables |= dict(re.findall(r"(TINKER_\w+)=(\S+)", line))
            if line.startswith("python "):
                break
        assert line.split()[1:] == [str(storage / "demo_client.py")]
        completed = subprocess.run(
            [sys.executable, line.split()[1]],
            env=variables | demo_variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.splitlines()[-1] == "completed: the quick brown fox jumps over the lazy dog"
        url, key = demo_variables["TINKER_BASE_URL"], demo_variables["TINKER_API_KEY"]
        headers = {"X-API-Key": key}
        session = httpx.post(f"{url}/api/v1/create_session", json={}, headers=headers).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": HTML, "lora_config": {"rank": 4}}
        assert httpx.post(f"{url}/api/v1/create_model", json=body, headers=headers).status_code == 400
        yield url, key
    finally:
        server.send_signal(signal.SIGTERM)
        ended = server.wait(60)
        guard.cancel()
    assert ended == 0


@contextmanager
def browser_page(**options: Any) -> Iterator[Any]:
    """Open a page in a browser; any console complaint, and any request to another server, fails the test."""
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(**options).new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url) if "127.0.0.1" not in request.url else None)
        yield page
        browser.close()
    assert [complaint for complaint in complaints if not complaint.startswith("data:") and "401" not in complaint] == []


def enter(page: Any, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")


def test_the_demo_serves_its_client(demo) -> None:
    url, key = demo
    figures = httpx.get(f"{url}/status", headers={"X-API-Key": key}).json()
    (model,) = figures["tenant"]["models"]
    steps, losses = zip(*model["loss"], strict=True)
    assert (steps, model["steps"]) == (tuple(range(60)), 60)
    assert losses[0] > 5 > 0.5 > losses[-1]  # from about log(320) on
    assert figures["totals"]["memory"]["device"] == "cpu"
    assert figures["totals"]["batches"]["recent"] == [[1, 42]] * 60


@pytest.mark.skipif(bool(MISSING), reason=f"a browser is missing: {', '.join(MISSING)}")
def test_page_shows_totals_and_with_a_key_the_tenants_models(demo) -> None:
    url, key = demo
    with browser_page(viewport={"width": 1000, "height": 800}) as page:
        page.goto(url)
        page.get_by_text("Ready", exact=True).wait_for()
        assert (
            page.locator("dt", has_text="Models in training").locator("xpath=..").locator("dd").inner_text()[0] == "1"
        )
        assert page.locator("#batch-models rect").count() == 60
        assert not page.locator("#mine").is_visible()

        enter(page, "tml-wrong-0123456789abcdef")
        page.get_by_text("The server does not know this key.").wait_for()
        assert page.evaluate("document.activeElement.id") == "key"
        enter(page, key)
        page.get_by_text("You are local.").wait_for()
        assert "60 steps" in page.locator("#model-cards").inner_text()
        assert re.fullmatch(
            r"Loss per token: 5\.\d+ at step 0, 0\.\d+ at step 59",
            page.locator("#model-cards svg").get_attribute("aria-label"),
        )
        assert HTML in page.locator("#error-rows").inner_text()
        assert page.locator("img").count() == 0
        assert page.locator("table").count() == page.locator("table > caption").count() == 3
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert key not in page.content()
        assert page.locator("#key").input_value() == ""
        if screenshot := os.environ.get("MEGASCEND_PAGE_SCREENSHOT"):
            page.screenshot(path=screenshot, full_page=True)

        page.get_by_role("button", name="Forget the key").click()
        page.locator("#mine").wait_for(state="hidden")
        assert page.locator("#error-rows").inner_text() == ""
        enter(page, key)
        page.get_by_text("You are local.").wait_for()
        page.reload()
        page.get_by_text("Ready", exact=True).wait_for()
        assert not page.locator("#mine").is_visible()
