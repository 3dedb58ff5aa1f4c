"""Layers of the host's code like a live network's, which hold no weights of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ...live_model.layer_walk import layers_of, tensors_of
from .channels_last import in_channels_last


class NetworkCopy:
    """A copy of a network that computes with given weights, and with others in the place of some layers.

    What lies between a UNet's blocks computes in channels last.

    Args:
        fresh: the network as a meta module.

    Attributes:
        weights: of the meta module, by name.
    """

    def __init__(self, fresh: torch.nn.Module) -> None:
        self.network = copy.deepcopy(fresh)
        self._layers = layers_of(self.network)
        self.weights = dict(tensors_of(self._layers))
        self._weights_in: dict[str, Mapping[str, torch.Tensor]] = {}
        for layer in self._layers.values():
            if (call := in_channels_last(layer)) is not None:
                layer.__dict__["forward"] = call

    def weights_in(self, path: str) -> Mapping[str, torch.Tensor]:
        """Those of a layer and of what lies in it, by name; of all for an empty path."""
        if path not in self._weights_in:
            start = f"{path}." if path else ""
            self._weights_in[path] = {name: each for name, each in self.weights.items() if name.startswith(start)}
        return self._weights_in[path]

    @contextmanager
    def holding(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Meanwhile its layers compute with these."""
        self._hold(weights)
        try:
            yield
        finally:
            self._hold({name: self.weights[name] for name in weights})

    @contextmanager
    def leading(self, calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Meanwhile others compute the calls of some layers, which are named by their paths."""
        for path, call in calls.items():
            self._layers[path].__dict__["forward"] = call
        try:
            yield
        finally:
            for path in calls:
                del self._layers[path].__dict__["forward"]

    def _hold(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            path, _, own = name.rpartition(".")
            layer = self._layers[path]
            holder = layer._parameters if own in layer._parameters else layer._buffers
            holder[own] = tensor  # type: ignore[assignment]
