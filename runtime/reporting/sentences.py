"""Sentences of Slipstream in further languages.

The tables, `web/js/said/LANGUAGE.json`, are read by the page as well. A sentence is a template: what stands in a hole
such as `{why}` is said in the other language too where a table has it, and stays as it is where none does.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "web" / "js" / "said"
_HOLE = re.compile(r"\{(\w+)\}")
_LONGEST = 4000
_DEEPEST = 4

_Template = tuple[re.Pattern[str], str, str]
"""What a sentence must match, the words that it ends with, and the sentence in the other language."""


def said(text: str, language: str) -> str | None:
    """A sentence in a language; None where its table does not know it.

    Args:
        language: such as `zh` or `de`.
    """
    return _said(text, _table(language), 0) if len(text) <= _LONGEST else None


def _said(text: str, table: tuple[_Template, ...], depth: int) -> str | None:
    for pattern, end, other in table:
        if text.endswith(end) and (found := pattern.fullmatch(text)):
            filled = {name: _in_hole(what, table, depth) for name, what in found.groupdict().items()}
            return _HOLE.sub(lambda hole: filled[hole[1]], other)  # noqa: B023  called at once
    return None


def _in_hole(text: str, table: tuple[_Template, ...], depth: int) -> str:
    return (_said(text, table, depth + 1) if depth < _DEEPEST else None) or text


@functools.cache
def _table(language: str) -> tuple[_Template, ...]:
    try:
        content: Mapping[str, str] = json.loads((FOLDER / f"{language}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple((_pattern(template), _HOLE.split(template)[-1], other) for template, other in content.items())


def _pattern(template: str) -> re.Pattern[str]:
    parts = _HOLE.split(template)  # text, name, text, name, ..., text
    made = [f"(?P<{part}>.+?)" if place % 2 else re.escape(part) for place, part in enumerate(parts)]
    return re.compile("".join(made), re.DOTALL)
