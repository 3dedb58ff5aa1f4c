"""Models for few steps (Turbo, Lightning, Hyper, LCM, ...), told by the names of their files.

Nothing else tells: their networks are those of the models that they were distilled from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FEW_STEPS = re.compile(
    r"turbo|lightning|schnell|hyper[-_ ]?(?:sd|flux)"
    r"|(?<!cfg)(?<!cfg[-_ ])(?<!guidance[-_ ])distill"  # guidance alone was distilled: as many steps as ever
    r"|(?<![a-z])(?:lcm|dmd2?|tcd|pcm)(?![a-z])"
    r"|(?<![0-9a-z])(?:1|2|4|6|8)[-_ ]?steps?(?![a-z])",
    re.IGNORECASE,
)


def few_step_name(names: Iterable[str]) -> str:
    """The first name of a file by which a model is one for few steps; empty where none is.

    Args:
        names: of checkpoints and LoRAs, with or without folders.
    """
    files = (name.replace("\\", "/").rsplit("/", 1)[-1] for name in names)
    return next((name for name in files if _FEW_STEPS.search(name)), "")
