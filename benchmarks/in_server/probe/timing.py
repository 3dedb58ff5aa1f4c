"""Times nodes that sample, VAE Decode and CLIP Text Encode, and within the sampler the calls of the model.

The device is synchronised where such a node begins and ends, and nowhere in between.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .clocks import Mark, mark, seconds_between, synchronised_mark, wait
from .profiles import PROFILES, profiled

EVENT = "slipstream_benchmark"
"""The type of the websocket event that carries a node's figures, and the name of a prompt's wishes in `extra_data`."""

LATENT, PICTURE, TEXT = "latent", "picture", "text"


class SamplerRun:
    """The calls of the model in one run of a sampler node.

    Args:
        is_synchronised: the GPU is waited for around every call, and the host's clock is read.
    """

    def __init__(self, is_synchronised: bool) -> None:
        self._mark = synchronised_mark if is_synchronised else mark
        self._begins: list[Mark] = []
        self._ends: list[Mark] = []
        self._node_begin = self._mark()

    def call(self, compute: Callable[[], Any]) -> Any:
        """Return what one step's call of the model computes, and note when it begins and ends."""
        self._begins.append(self._mark())
        result = compute()
        self._ends.append(self._mark())
        return result

    def end(self) -> None:
        """Note the node's end, and wait until GPUs have reached it and that of the last call."""
        self._node_end = self._mark()
        wait()
        for last in self._ends[-1:]:  # on another GPU where a node put the model there
            last.wait()

    def figures(self) -> dict[str, Any]:
        """Return seconds before the first call, from call to call, and after the last one; after `end`."""
        if not self._ends:
            return {"calls": 0, "before": None, "steps": [], "after": None}
        pairs = zip(self._begins, self._begins[1:], strict=False)
        return {
            "calls": len(self._ends),
            "before": seconds_between(self._node_begin, self._begins[0]),
            "steps": [seconds_between(one, other) for one, other in pairs],
            "after": seconds_between(self._ends[-1], self._node_end),
        }


class Probe:
    """What is timed at the moment, and what the prompt that runs asks for.

    Args:
        send: is given the figures of each sampler, decoder and encoder.
        folder: where latents, pictures and encoded texts are kept for whoever asks for them.

    Attributes:
        wishes: of the prompt that was queued last: `keep` saves these as float32, and `synchronised` waits for the GPU
            around every call of the model; `kernels` and `functions` write where the time goes; `sampler` is the class
            of a node that samples in KSampler's place.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], folder: Path) -> None:
        self.wishes: dict[str, Any] = {}
        self._send, self._folder = send, folder
        self._sampler: SamplerRun | None = None

    def take_wishes(self, json_data: dict[str, Any]) -> dict[str, Any]:
        """Read a queued prompt's wishes; ComfyUI calls this with the body of each request that queues one."""
        self.wishes = dict((json_data.get("extra_data") or {}).get(EVENT) or {})
        return json_data

    def around_sampler(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method of a sampler node; one that another calls is a part of that one."""

        @functools.wraps(sample)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._sampler is not None:
                return sample(*args, **kwargs)
            wait()
            began = time.perf_counter()
            run = self._sampler = SamplerRun(bool(self.wishes.get("synchronised")))
            try:
                result = self._profiled(lambda: sample(*args, **kwargs))
            finally:
                self._sampler = None
            run.end()
            self._send({"node": "sampler", "seconds": time.perf_counter() - began, **run.figures()})
            self._keep(LATENT, _latent_of(result))
            return result

        return timed

    def around_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the call that a sampler makes for each step."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._sampler is None:
                return call(*args, **kwargs)
            return self._sampler.call(lambda: call(*args, **kwargs))

        return timed

    def around_decoder(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method of a decoder node."""
        return self._around(decode, "decoder", lambda result: self._keep(PICTURE, result[0]))

    def around_encoder(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method of a node that encodes a text."""
        return self._around(encode, "encoder", lambda result: self._keep(TEXT, result[0][0][0]))

    def _around(self, method: Callable[..., Any], node: str, keep: Callable[[Any], None]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            began = time.perf_counter()
            result = method(*args, **kwargs)
            wait()
            self._send({"node": node, "seconds": time.perf_counter() - began})
            keep(result)
            return result

        return timed

    def _profiled(self, compute: Callable[[], Any]) -> Any:
        for what in filter(self.wishes.get, PROFILES):
            return profiled(what, self._folder / f"slipstream-benchmark-{what}.txt", compute)
        return compute()

    def _keep(self, what: str, tensor: torch.Tensor) -> None:
        if self.wishes.get("keep"):
            file = self._folder / f"slipstream-benchmark-{what}.npy"
            np.save(file, tensor.detach().to("cpu", torch.float32).numpy())


def _latent_of(result: Any) -> torch.Tensor:
    """The first latent among a node's outputs."""
    outputs = result["result"] if isinstance(result, dict) else result
    found: torch.Tensor = next(each["samples"] for each in outputs if isinstance(each, dict) and "samples" in each)
    return found
