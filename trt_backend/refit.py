"""Refits an engine with the host's weights that changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..core.errors import IncompatibleEngine
from ..core.streams import current_stream
from .fingerprint import fingerprints
from .library import Library
from .surgery.weight_map import WeightMap


class Refit:
    """Keeps an engine's weights equal to those that the host computes with.

    Args:
        sources: name in the engine -> weight of the model.

    Raises:
        IncompatibleEngine: the engine cannot take one of them.
    """

    def __init__(self, library: Library, engine: Any, sources: WeightMap, device: torch.device) -> None:
        self._library = library
        self._engine = engine
        self._sources = sources
        self._device = device
        self._known: dict[str, int] = {}
        refitter = self._new_refitter()
        self._dependents = _dependents(sources)
        takes = set(refitter.get_all_weights())
        if missing := sorted(set(sources) - takes):
            raise IncompatibleEngine(
                f"TensorRT {library.version} made an engine in which {len(missing)} of {len(sources)} weights cannot "
                f"be replaced, such as {missing[0]}; switch bake on in the node, or choose backend compiled"
            )

    def update(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Refit the weights that changed since the last call.

        Args:
            weights: state-dict name -> tensor on the engine's device.

        Returns:
            Whether anything did.

        Raises:
            IncompatibleEngine: a weight is missing or has another size, or TensorRT refuses; every weight is
                given anew by the next call then.
        """
        names = sorted({source.name for source in self._sources.values()})
        if missing := [name for name in names if name not in weights]:
            raise IncompatibleEngine(f"The model has no weight {missing[0]!r} that the engine needs; build it again")
        found = dict(zip(names, fingerprints([weights[name] for name in names]), strict=True))
        changed = [name for name in names if self._known.get(name) != found[name]]
        if not changed:
            return False
        self._known = {}  # a failure below leaves the weights undefined
        self._put((entry for name in changed for entry in self._dependents[name]), weights)
        self._known = found
        return True

    def _put(self, entries: Iterable[str], weights: Mapping[str, torch.Tensor]) -> None:
        self._library.log.clear()  # what it said earlier is no reason for what fails below
        refitter, stream = self._new_refitter(), current_stream(self._device)
        given: dict[str, Any] = {}
        wanted = list(entries)
        while wanted:
            if again := [entry for entry in wanted if entry in given]:
                raise IncompatibleEngine(
                    f"TensorRT {self._library.version} asks for weight {again[0]!r}, which it was given already; "
                    "switch bake on in the node, or choose backend compiled"
                )
            given |= {entry: self._set(refitter, entry, weights) for entry in wanted}
            # Weights that TensorRT merged with those that changed are asked for too.
            wanted = [name for name in refitter.get_missing_weights() if name in self._sources]
        if unknown := list(refitter.get_missing_weights()):
            raise IncompatibleEngine(f"TensorRT asks for weight {unknown[0]!r}, which the model does not have")
        if not self._library.refit(refitter, stream):
            raise IncompatibleEngine(f"TensorRT could not put the weights into its engine: {self._library.log.said()}")
        stream.synchronize()  # the tensors that were lent are free again
        del given

    def _set(self, refitter: Any, entry: str, weights: Mapping[str, torch.Tensor]) -> Any:
        source = self._sources[entry]
        kept = self._library.set_weights(refitter, entry, source.laid_out(weights[source.name].detach()))
        if kept is None:
            shape = list(weights[source.name].shape)
            raise IncompatibleEngine(
                f"TensorRT does not take weight {source.name!r} {shape} of this model: {self._library.log.said()}"
            )
        return kept

    def _new_refitter(self) -> Any:
        return self._library.new_refitter(self._engine)


def _dependents(sources: WeightMap) -> dict[str, list[str]]:
    """State-dict name -> names of the engine's weights that are computed from it."""
    found: dict[str, list[str]] = {}
    for entry, source in sources.items():
        found.setdefault(source.name, []).append(entry)
    return found
