"""Pictures of the server's page in a real browser, into docs/images: `python -m tools.page_screenshots [--out DIR]`.

Needs Chromium and the `playwright` package, which `make test-web` sets up.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"page": (1280, 800), "page-dark": (1280, 800), "page-phone": (390, 800), "page-wide": (2200, 1000)}
QUESTIONS = ("What is the capital of France?", "Tell me a story about a drum.", "Name three fruits.")


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """A server of the demo model; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "demo", "--port", str(port), *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        server.wait(20)


def converse(page: Any) -> None:
    """Ask a few questions and wait for each answer."""
    for question in QUESTIONS:
        page.fill("#prompt", question)
        page.keyboard.press("Enter")
        page.wait_for_selector("#messages > li.assistant:last-child > small", timeout=30_000)
    time.sleep(1.5)  # a point of the chart


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out: Path = parser.parse_args().out
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        with serving() as address:
            for name, (width, height) in SIZES.items():
                scheme: Any = "dark" if name.endswith("dark") else "light"
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.goto(address)
                page.wait_for_selector("#model option", state="attached")
                converse(page)
                page.screenshot(path=out / f"{name}.png")
                context.close()
        with serving("--api-key", "secret") as address:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            page.goto(address)
            page.wait_for_selector("#key.wanted")
            page.screenshot(path=out / "page-key.png")
        browser.close()


if __name__ == "__main__":
    main()
