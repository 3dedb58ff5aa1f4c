"""What our charts have in common: a card that is light on light pages and dark on dark ones, and text on it."""

from __future__ import annotations

import html
from collections.abc import Iterable


def text(kind: str, x: float, y: float, words: str) -> str:
    """Words that begin at (x, y), in the style of a class."""
    return f'<text class="{kind}" x="{x:.1f}" y="{round(y, 1):g}">{html.escape(words)}</text>'


def card(width: int, height: int, label: str, style: str, parts: Iterable[str]) -> str:
    """The picture.

    Args:
        label: for those who cannot see it.
        style: in CSS, with colours for both kinds of pages.
        parts: that lie on the card.
    """
    body = "\n".join(parts)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">
<style>
{style}
</style>
<rect class="card" width="{width}" height="{height}" rx="10"/>
{body}
</svg>
"""
