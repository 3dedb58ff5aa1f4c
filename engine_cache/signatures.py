"""Signatures of manifests, and through the checksums in them of an engine's files."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict
from pathlib import Path

from .key import canonical_json
from .keyring import GET_CRYPTOGRAPHY, Keyring, PublicKey, can_sign
from .manifest import Manifest

ADOPT = "trust adopt"
"""The command that takes over engines of no maker; its name stands in the reasons that it helps against."""

_VERSION = "slipstream engine 1\n"
_PACK = Path(__file__).resolve().parents[1]


def signed(manifest: Manifest, keyring: Keyring) -> Manifest:
    """A copy with this user's seal, and with a signature for other machines where that can be made."""
    text = _text(manifest)
    signature = keyring.sign(text) if can_sign() else None
    return dataclasses.replace(manifest, seal=keyring.seal(text), signature=signature)


def why_untrusted(manifest: Manifest, keyring: Keyring) -> str | None:
    """Why an engine is not loaded on this machine, and the way out; None where this user built it or trusts its maker.

    Its digest and, by their checksums, its files are covered; checks and times, which machines add, are not.
    """
    text = _text(manifest)
    if manifest.seal is not None and keyring.knows_seal(manifest.seal, text):
        return None
    engine = f"The engine {manifest.digest[:12]} ({manifest.label}) is not loaded"
    if manifest.signature is None:
        return f"{engine}: {_of_nobody(manifest, keyring)}"
    key, proof = _parts(manifest.signature)
    if key is None:
        return f"{engine}: its signature cannot be read. Delete it, and it is built anew."
    if key not in keyring.trusted() and key != keyring.own_key():
        return (
            f"{engine}: it is signed by {key}, which is not among the keys you trust. If you know that it is the "
            f"maker's, run {_command(f'trust add {key}')}; else delete the engine, and it is built anew."
        )
    if not can_sign():
        return f"{engine}: its signature cannot be checked. To check it, {GET_CRYPTOGRAPHY}."
    if not key.verifies(proof, text):
        return f"{engine}: it was changed after {key.short} signed it. Delete it, and it is built anew."
    return None


def origin_to_vouch_for(manifest: Manifest, keyring: Keyring) -> str | None:
    """Where an engine is from that no maker's key vouches for, so that a person may: `unsigned`, or `elsewhere` where
    another machine or user sealed it. None where it is trusted, was changed, or names its maker's key."""
    if manifest.signature is not None or why_untrusted(manifest, keyring) is None:
        return None
    if manifest.seal is None:
        return "unsigned"
    return None if keyring.is_own_seal(manifest.seal) else "elsewhere"


def signer_of(manifest: Manifest) -> PublicKey | None:
    """Whose signature a manifest says it has; nothing is checked."""
    return _parts(manifest.signature)[0] if manifest.signature else None


def _of_nobody(manifest: Manifest, keyring: Keyring) -> str:
    if manifest.seal is None:
        return (
            "nobody signed it. It is from elsewhere, or from a Slipstream before engines were signed. If this machine "
            f"built it, run {_command(ADOPT)} to keep it."
        )
    if keyring.is_own_seal(manifest.seal):
        return "it was changed after this machine built it. Delete it, and it is built anew."
    return (
        "another machine or user built it, and did not sign it for others. Export it there with the package "
        "cryptography installed, or delete it, and it is built anew here. If this machine built it before its key was "
        f"lost, run {_command(f'{ADOPT} {manifest.digest[:12]}')}, and keep the folder of keys (SLIPSTREAM_KEYS)."
    )


def _command(words: str) -> str:
    """A command as it is typed: ComfyUI installs packs as folders, without a command of their own."""
    program = " ".join(f'"{part}"' if " " in part else part for part in (sys.executable, str(_PACK)))
    return f"`{program} {words}`"


def _parts(signature: str) -> tuple[PublicKey | None, bytes]:
    public, _, proof = signature.rpartition(":")
    try:
        return PublicKey(public), bytes.fromhex(proof)
    except ValueError:
        return None, b""


def _text(manifest: Manifest) -> bytes:
    """What is signed: all that tells what would be loaded and how, in one form before and after it was on disk."""
    facts = {
        "digest": manifest.digest,
        "files": {name: asdict(record) for name, record in manifest.files.items()},
        "backend": manifest.backend,
        "details": json.loads(json.dumps(dict(manifest.details))),
        "label": manifest.label,
        "created": manifest.created,
        "slipstream": manifest.slipstream,
    }
    return (_VERSION + canonical_json(facts)).encode("ascii")
