"""Selections of steps as ways through a graph, whose edges are gaps between computed steps.

As in Gao et al., "LeMiCa: Lexicographic Minimax Path Caching for Efficient Diffusion-Based Video Generation"
(arXiv 2511.00090), a gap's cost is what the final output loses where this gap alone is skipped. There the largest cost
on the way is made small; here their sum, as if the losses of several gaps added up. They do so only about, so what is
found this way is a start for a search on the true loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..schedule import Steps

Gap = tuple[int, int]
"""Two computed steps between which at least one is skipped, and all are."""


def gaps_up_to(longest: int, steps: int) -> list[Gap]:
    """All gaps of a run of `steps` that are at most `longest` wide: about (longest - 1) * steps of them."""
    return [(i, j) for i in range(steps) for j in range(i + 2, min(i + longest, steps - 1) + 1)]


def with_gap(gap: Gap, steps: int) -> Steps:
    """The steps that are computed where this gap alone is skipped."""
    return (*range(gap[0] + 1), *range(gap[1], steps))


def least_gap(count: int, steps: int) -> int:
    """How wide the widest gap of `count` computed steps is at least, the first and the last among them."""
    return -(-(steps - 1) // max(count - 1, 1))


def cheapest_selections(costs: Mapping[Gap, float], steps: int) -> dict[int, Steps]:
    """For each number of computed steps the selection whose gaps cost least in sum: dynamic programming.

    Args:
        costs: of the gaps that may be skipped; next to each other costs nothing.
        steps: of the run, at least 2.

    Returns:
        Only numbers for which there is one; each selection holds the first and the last step.
    """
    onward: dict[int, list[tuple[int, float]]] = {i: [(i + 1, 0.0)] for i in range(steps - 1)}
    for (i, j), cost in costs.items():
        onward[i].append((j, cost))
    reached: dict[int, tuple[float, Steps]] = {0: (0.0, (0,))}
    found = {}
    for count in range(2, steps + 1):
        reached = _one_more(reached, onward)
        if steps - 1 in reached:
            found[count] = reached[steps - 1][1]
    return found


def _one_more(
    reached: Mapping[int, tuple[float, Steps]], onward: Mapping[int, list[tuple[int, float]]]
) -> dict[int, tuple[float, Steps]]:
    """The cheapest way to each step with one more computed step than before."""
    best: dict[int, tuple[float, Steps]] = {}
    for i, (before, path) in reached.items():
        for j, cost in onward.get(i, ()):
            way = before + cost, (*path, j)
            if j not in best or way < best[j]:
                best[j] = way
    return best
