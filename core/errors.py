"""Every error Slipstream raises on purpose.

    SlipstreamError
    ├── BackendUnavailable   this machine lacks what a backend needs
    ├── UnsupportedModel     a model, patch or dtype that no engine can honour
    ├── BuildFailed          a build ended without an engine
    │   ├── BuildCancelled   ... because somebody asked for it
    │   ├── BuildPostponed   ... because its memory was needed; it begins anew by itself
    │   ├── BuildDied        ... because its process was killed or ran out of time; the next try may work
    │   └── BuildOutOfMemory ... because memory did not suffice; the next try may work
    ├── ShapeOutsideProfile  inputs that an engine was not built for
    ├── IncompatibleEngine   an artifact made for another machine, version or set of weights
    │   └── NotFinite        ... that computes NaN or Inf where the fp32 reference does not
    ├── CorruptEngine        files that differ from what their manifest says
    ├── UntrustedEngine      native code that neither this machine built nor a trusted key signed
    └── StoreError           the engine store cannot be read or written
        └── EngineInUse      ... because a living process needs the engine that was to go

A message says what happened, on what, and what to do next; it is shown to users as it stands.
"""

from __future__ import annotations

import logging


class SlipstreamError(Exception):
    """Base of all errors that Slipstream raises on purpose."""


class BackendUnavailable(SlipstreamError):
    """This machine lacks something that the backend needs."""


class UnsupportedModel(SlipstreamError):
    """The model, one of its patches, or a dtype cannot be honoured by an engine."""


class BuildFailed(SlipstreamError):
    """A build ended without an engine. Nothing of it was kept."""


class BuildCancelled(BuildFailed):
    """A build was cancelled. Nothing of it was kept."""


class BuildPostponed(BuildFailed):
    """A build was ended to give its device memory back: it begins anew later. Nothing of it was kept."""


class BuildDied(BuildFailed):
    """The build's process was killed, or ran out of time: the next try may work. Nothing of it was kept."""


class BuildOutOfMemory(BuildFailed):
    """A build ran out of memory: the next try may find more. Nothing of it was kept."""


class ShapeOutsideProfile(SlipstreamError):
    """Inputs differ in name, shape, dtype, stride or device from what the engine was built for."""


class IncompatibleEngine(SlipstreamError):
    """An artifact was made for another machine, another version or other weights."""


class NotFinite(IncompatibleEngine):
    """An engine computes NaN or Inf where the fp32 reference does not: values overflow its precision."""


class CorruptEngine(SlipstreamError):
    """Files of an engine differ from what their manifest says."""


class UntrustedEngine(SlipstreamError):
    """An engine was neither built by this user nor signed by a key that the user trusts; its code is not loaded."""


class StoreError(SlipstreamError):
    """The engine store cannot be read or written: no space, no permission, or a lock that never came free."""


class EngineInUse(StoreError):
    """An engine was not deleted, since a run needs it."""


def first_line(error: BaseException) -> str:
    """The type and the first line of a foreign error, whose message may be pages long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


_said: set[str] = set()


def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning unless this process has logged the same message before: it would be said with every picture."""
    if message not in _said:
        _said.add(message)
        log.warning("%s", message)
