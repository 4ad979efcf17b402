"""The page at / in a real browser: it chats, streams, stops, shows live figures, and obeys its own security policy.

Needs Chromium and the `playwright` package: `make test-web` sets both up.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.web

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "demo",
        "--port",
        str(port),
        "--api-key",
        "k",
    ]
    server = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as playwright:
        if executable is None and not Path(playwright.chromium.executable_path).exists():
            pytest.fail(
                "No Chromium was found. Install it (apt-get install chromium, or: playwright install chromium)."
            )
        found = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found = context.new_page()
    errors: list[str] = []
    requests: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda m: errors.append(m.text) if m.type == "error" and "401" not in m.text else None)
    found.on("request", lambda request: requests.append(request.url))
    found.goto(url)
    yield found
    assert [e for e in errors if "404" not in e] == []
    assert all(r.startswith((url, "data:")) for r in requests), "the page asked for something from outside"
    context.close()


def until(page: Any, condition: str, seconds: float = 20) -> None:
    """Wait for a JavaScript expression to become true. (Playwright's own way needs eval, which the page forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never true: {condition}"
        time.sleep(0.05)


def unlock(page: Any) -> None:
    page.fill("#key", "k")
    page.locator("#key").blur()
    until(page, "document.querySelector('#state').textContent === 'ready'")
    until(page, "document.querySelector('#model').options.length === 1")


def test_without_the_key_it_says_so(page: Any) -> None:
    until(page, "document.querySelector('#state').textContent.includes('API key')")
    until(page, "document.activeElement.id === 'key'")


def test_it_streams_an_answer_and_shows_figures(page: Any) -> None:
    unlock(page)
    page.fill("#temperature", "0")
    page.fill("#prompt", "What is the capital of France?")
    page.keyboard.press("Enter")
    answer = page.locator("#messages li.assistant")
    until(page, "document.querySelector('#messages li.assistant small')")
    assert "Paris" in answer.inner_text()
    assert re.search(r"\d+ tokens, .* first after \d+ ms", answer.inner_text())
    until(page, "/ms$/.test(document.querySelector('#ttft').textContent)")
    until(page, "document.querySelector('#line').getAttribute('points').includes(',')")
    assert page.inner_text("#cache").endswith("%")


def test_figures_are_those_of_all_copies_and_of_a_server_that_has_started_again(page: Any) -> None:
    made = {"tokens": 4000}

    def metrics(route: Any) -> None:
        copies = [("engine_alive", 1.0, 1.0), ("kv_cache_usage_perc", 0.75, 0.25), ("num_requests_running", 3.0, 1.0)]
        lines = [f'vllm:{name}{{engine="{i}"}} {two[i]}' for name, *two in copies for i in (0, 1)]
        made["tokens"] += 10
        route.fulfill(body="\n".join([*lines, f'vllm:generation_tokens_total{{engine="0"}} {made["tokens"]}']))

    count = "document.querySelector('#line').getAttribute('points').split(',').length"
    page.route("**/metrics", metrics)
    unlock(page)
    until(page, f"{count} > 2")
    assert page.inner_text("#cache") == "50.0 %" and page.inner_text("#running") == "4"
    made["tokens"] = 0
    until(page, f"{count} > 4")
    points = page.locator("#line").get_attribute("points").split()
    assert all(float(point.partition(",")[2]) <= 79 for point in points)


def test_stop_ends_the_answer_and_the_request(page: Any) -> None:
    unlock(page)
    page.fill("#max_tokens", "1500")
    page.fill("#prompt", "Tell me a long story.")
    page.click("#send")
    until(page, "document.querySelector('#messages li.assistant .text').textContent.length > 5")
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('#send').disabled")
    until(page, "document.querySelector('#running').textContent === '0'")


def test_an_error_of_the_server_is_shown(page: Any) -> None:
    unlock(page)
    page.evaluate("document.querySelector('#model').options[0].value = 'nobody'")
    page.fill("#prompt", "Hello")
    page.click("#send")
    page.wait_for_selector("#messages li.error")
    assert "does not exist" in page.inner_text("#messages li.error")
    page.evaluate("window.expected = true")


def test_themes_and_small_screens(page: Any) -> None:
    unlock(page)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tops = page.evaluate("[...document.querySelectorAll('header > *')].map(e => e.getBoundingClientRect())")
    assert max(t["top"] for t in tops) < min(t["bottom"] for t in tops), "the header takes two lines on a phone"


def test_an_example_is_one_click(page: Any) -> None:
    unlock(page)
    page.click("#examples button")
    until(page, "document.querySelector('#messages > li.assistant small')")
    assert "Paris" in page.inner_text("#messages > li.assistant .text")
    assert not page.is_visible("#examples")
    page.click("#clear")
    assert page.is_visible("#examples")


def test_an_answer_follows_a_schema(page: Any) -> None:
    unlock(page)
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    page.click("#more summary")
    page.fill("#schema", json.dumps({**schema, "additionalProperties": False}))
    page.fill("#prompt", "Which city?")
    page.click("#send")
    until(page, "document.querySelector('#messages > li.assistant small')")
    until(page, "document.querySelector('#messages > li.assistant .text').textContent.endsWith('}')")
    assert json.loads(page.inner_text("#messages > li.assistant .text"))["city"] in ("Rome", "Oslo")


def test_a_schema_that_is_no_json_is_said(page: Any) -> None:
    unlock(page)
    page.click("#more summary")
    page.fill("#schema", "{")
    page.fill("#prompt", "Hello")
    page.click("#send")
    assert "The schema is no JSON" in page.inner_text("#messages > li.error")


def rendered(page: Any, text: str) -> str:
    return page.evaluate("(text) => { const e = element('div'); markdown(e, text); return e.innerHTML; }", text)


def test_markdown_becomes_elements(page: Any) -> None:
    assert rendered(page, "# One\n\nTwo **three** *four* `five`") == (
        "<h3>One</h3><p>Two <strong>three</strong> <em>four</em> <code>five</code></p>"
    )
    assert rendered(page, "- a\n- b\n\n3. c") == '<ul><li>a</li><li>b</li></ul><ol start="3"><li>c</li></ol>'
    code = rendered(page, "```python\n<b>x</b>\n```")
    assert "<code>&lt;b&gt;x&lt;/b&gt;</code>" in code
    assert 'data-language="python"' in code
    assert rendered(page, "2 * 3 * 4") == "<p>2 * 3 * 4</p>"


@pytest.mark.parametrize(
    "hostile",
    [
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "[a](javascript:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>)",
        "```<img src=x>\n<svg onload=alert(1)>",
        "**<iframe src=//a>**",
    ],
)
def test_markdown_never_becomes_another_element(page: Any, hostile: str) -> None:
    made = page.evaluate(
        """(text) => { const e = element('div'); markdown(e, text);
                       return [...e.querySelectorAll('*')].map(n => [n.localName, n.getAttributeNames().join()]); }""",
        hostile,
    )
    names = {name for name, _ in made}
    assert names <= {"p", "strong", "pre", "code", "button", "em"}
    assert not any("on" in attributes.split(",") for _, attributes in made)


@pytest.mark.parametrize("piece", ["*", "[", "`a", "> ", "- a\n", "**a ", "[a](", "``` "])
def test_markdown_of_a_long_text_ends(page: Any, piece: str) -> None:
    """A quadratic one would outlast the browser's patience."""
    text = piece * (200_000 // len(piece))
    assert page.evaluate("(t) => { const e = element('div'); markdown(e, t); return e.childElementCount; }", text) > 0


def test_the_page_is_not_wider_than_one_can_read(page: Any) -> None:
    page.set_viewport_size({"width": 2400, "height": 1000})
    assert page.evaluate("document.querySelector('main').getBoundingClientRect().width") <= 1400


def test_the_live_chart_is_seen_without_scrolling(page: Any) -> None:
    assert page.evaluate("document.querySelector('.scale').getBoundingClientRect().bottom") <= 800


def test_every_control_has_a_name(page: Any) -> None:
    nameless = page.evaluate(
        """[...document.querySelectorAll('input,select,textarea,button')]
           .filter(e => !(e.labels && e.labels.length) && !e.textContent.trim() && !e.ariaLabel).map(e => e.id)"""
    )
    assert nameless == []
