"""The page in a browser, in the words of a person; what differs between Gradios is known here."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVE = Path(__file__).with_name("serve.py")
SECONDS = 120.0
"""Of every wait: far more than it takes on a quiet machine."""


@contextmanager
def serving(home: Path, *options: str) -> Iterator[str]:
    """The address of a page that a process of its own gives out; see `serve`."""
    log = (home.parent / f"{home.name}.log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SERVE), str(home), *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdin is not None
        lines = (re.search(r"^http://\S+$", line.strip()) for line in process.stdout)
        found = next(filter(None, lines), None)
        log.seek(0)
        assert found is not None, f"the page was not given out:\n{log.read()[-4000:]}"
        yield found.group()
        process.stdin.close()
        process.wait(20)
    finally:
        process.kill()
        process.wait(20)
        log.close()


class UiPage:
    """One tab of the browser."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        page.set_default_timeout(1000 * SECONDS)
        page.on("pageerror", lambda error: self.errors.append(str(error)[:500]))

    def open(self) -> None:
        """Load the page, or load it again, until it shows what there is."""
        self.page.goto(self.url)
        self.until(lambda: "free on its disk" in self.text(), "the page's head")

    def tab(self, name: str) -> None:
        """Open a tab; Gradio 3 has plain buttons for them."""
        tab = self.page.get_by_role("tab", name=name, exact=True)
        plain = self.page.locator(".tab-nav button").filter(has_text=re.compile(f"^\\s*{re.escape(name)}\\s*$"))
        (tab if tab.count() else plain).first.click()
        self.page.wait_for_timeout(300)

    def press(self, name: str) -> None:
        """Click a button that is seen."""
        buttons = self.page.locator("button:visible:not(.tab-nav button, .tab-container button)")
        buttons.filter(has_text=re.compile(f"^\\s*{re.escape(name)}\\s*$")).first.click()

    def fill(self, part: str, text: str) -> None:
        """Write into a field, by its element's id."""
        field = self.page.locator(f"#{part} textarea, #{part} input").first
        field.fill(text)
        field.press("Tab")

    def choose(self, part: str, text: str) -> None:
        """Take what begins with `text` from a list, by its element's id."""
        self.page.locator(f"#{part} input").first.click()
        options = self.page.locator("[role=option]:visible, ul.options li:visible")
        options.filter(has_text=re.compile(re.escape(text))).first.click()
        self.page.keyboard.press("Escape")

    def text(self, part: str | None = None) -> str:
        """What is to be read on the page, or in one element."""
        return str(self.page.locator(f"#{part}" if part else "body").first.inner_text())

    def rows(self) -> list[list[str]]:
        """Of the table of engines."""
        cells = "rows => rows.map(row => [...row.querySelectorAll('td, .body-cell')].map(cell => cell.innerText))"
        found: Sequence[list[str]] = self.page.locator("table tbody tr, .virtual-row").evaluate_all(cells)
        return [row for row in found if any(row)]

    def row(self, text: str) -> str:
        """The row in which a text stands, or nothing."""
        return next((joined for row in self.rows() if text in (joined := " ".join(row))), "")

    def click_row(self, text: str) -> None:
        """Click the cell in which a text stands."""
        self.page.locator("table tbody td:visible, .virtual-row .body-cell:visible").filter(has_text=text).first.click()

    def cell(self, row: str, column: str) -> Any:
        """Of the grid of models and sizes."""
        grid = self.page.locator("#slipstream_grid")
        head = "cells => cells.map(cell => cell.innerText.trim())"
        names = [name for name in grid.locator("thead th, .header-cell").evaluate_all(head)]
        seen = list(dict.fromkeys(name for name in names if name))
        rows = grid.locator("tbody tr, .virtual-row").filter(has_text=re.compile(rf"^\s*{re.escape(row)}\s"))
        return rows.last.locator("td, .body-cell").nth(seen.index(column))

    def chosen(self) -> str:
        """What stands in the list of chosen engines."""
        return self.text("slipstream_chosen")

    def fraction(self) -> float:
        """Of the first bar, in percent."""
        width = "bar => parseFloat(bar.style.width || '0')"
        return float(self.page.locator(".slipstream-request div div").first.evaluate(width))

    def until(self, ready: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        """Wait until `ready` gives something, with the page going on meanwhile."""
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            assert time.monotonic() < deadline, (
                f"waited {seconds:.0f} s in vain for {what}; {self.errors}; {self.text()[-1500:]}"
            )
            self.page.wait_for_timeout(100)
        return found

    def until_text(self, text: str, part: str | None = None, seconds: float = SECONDS) -> None:
        """Wait for a text, of an element or anywhere."""
        self.until(lambda: text in self.text(part), repr(text), seconds)

    def order(self, model: str, sizes: str) -> None:
        """Fill the form in and press Build."""
        self.tab("Build")
        self.choose("slipstream_model", model)
        self.fill("slipstream_sizes", sizes)
        self.press("Build")
