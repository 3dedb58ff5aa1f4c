"""Slipstream's lines in the log are in the user's language, on the console and in what the page shows of them."""

from __future__ import annotations

import locale
import logging
import os
import re
from collections.abc import Callable

from .sentences import said

VARIABLE = "SLIPSTREAM_LANG"
"""Environment variable: the language of lines in the log, such as `en` or `zh`, whatever the page's is."""

_page: list[Callable[[], str | None]] = []


def follow_page(language: Callable[[], str | None]) -> None:
    """From now on lines are in the page's language, which `language` tells as far as a user chose one."""
    _page[:] = [language]


def log_language() -> str:
    """That the environment names, else the page's, else the system's; such as `en` or `zh`."""
    page = next((found for ask in _page if (found := ask())), None)
    chosen = os.environ.get(VARIABLE) or page or _of_system()
    return re.split(r"[-_.]", chosen)[0].lower() or "en"


def _of_system() -> str:
    try:
        return locale.getlocale()[0] or ""
    except ValueError:  # another extension set one by a name that Python does not know, such as "en-US"
        return ""


class InLanguage(logging.Handler):
    """Puts records into the user's language on their way: it belongs before all other handlers that show them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            language = log_language()
            found = None if language == "en" else said(record.getMessage(), language)
        except Exception:  # of whoever logged something that cannot be formatted
            self.handleError(record)
            return
        if found is not None:
            record.msg, record.args = found, ()
