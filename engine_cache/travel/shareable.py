"""What other machines are given of an engine."""

from __future__ import annotations

import dataclasses

from ...core.errors import UntrustedEngine
from .. import Entry, Manifest, signed
from ..keyring import GET_CRYPTOGRAPHY, Keyring, can_sign


def shareable_manifest(entry: Entry, keyring: Keyring) -> Manifest:
    """The manifest as other machines may have it: signed, and without times, which were measured on this one.

    An engine that this user built and could not sign when it was built is signed now.

    Raises:
        UntrustedEngine: this machine would not load it itself, or cannot sign it.
    """
    if reason := entry.why_untrusted():
        raise UntrustedEngine(reason)
    manifest = entry.manifest
    if manifest.signature is None:
        if not can_sign():
            raise UntrustedEngine(
                f"The engine {entry.digest[:12]} ({manifest.label}) is not signed, and other machines would refuse it: "
                f"{GET_CRYPTOGRAPHY}, then try again."
            )
        manifest = signed(manifest, keyring)
    return dataclasses.replace(manifest, seal=None, speed=None)
