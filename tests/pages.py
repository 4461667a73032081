"""What is on an HTML report, by its text and by a browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser")
BROWSERS += ("google-chrome", "google-chrome-stable")


class Page(html.parser.HTMLParser):
    """The ids, links and words of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.outside: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            elif key in ("src", "href", "xlink:href") and value:
                self.outside += [] if value.startswith(("#", "data:")) else [value]

    def handle_data(self, data: str) -> None:
        self.text += data


PROBE = """<script>
const found = {errors: window.seen, series: {}};
for (const one of document.querySelectorAll("[id*='/']")) {
  const box = one.getBBox();
  found.series[one.id] = Math.max(box.width, box.height);
}
document.body.innerHTML = "";
document.body.dataset.found = JSON.stringify(found);
</script></body>"""
LISTEN = """<head><script>
window.seen = [];
console.error = (...words) => window.seen.push(words.join(" "));
window.addEventListener("error", event => window.seen.push(event.message), true);
</script>"""


def seen(page: Path, directory: Path) -> dict[str, Any]:
    """The errors of a page in a browser, and the size of each series on it.

    Args:
        directory: For the browser's own files.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"there is no browser: {', '.join(BROWSERS)}")
    probed = directory / "probed.html"
    text = page.read_text()
    text = text.replace("<head>", LISTEN, 1).replace("</body>", PROBE, 1)
    probed.write_text(text)
    shown = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--disable-dev-shm-usage", f"--user-data-dir={directory / 'profile'}"),
            *("--enable-logging=stderr", "--dump-dom", probed.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in shown.stderr
    data = re.search(r'data-found="([^"]*)"', shown.stdout)
    assert data is not None, f"{shown.stdout[-500:]}\n{shown.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(html.unescape(data[1]))
    return found
