"""Engines on disk: their identity (key), their metadata (manifest) and the folder that holds them (store)."""

from .entry import Entry, Hold
from .files import identity as file_identity
from .key import EngineKey, canonical, canonical_json, digest_of, key_of
from .key_differences import describe_differences
from .keyring import Keyring, PublicKey
from .locks import WaitCallback
from .manifest import BuildRecord, FileRecord, Manifest, Speed, Verification, is_digest
from .memos import BuildHistory, ChoiceMemo, OverflowMemo, PastBuild, WeightsMemo
from .signatures import ADOPT, signed, signer_of, why_untrusted
from .store import DEFAULT_LIMIT_BYTES, EngineStore
from .weights_digest import digest_tensors

__all__ = [
    "ADOPT",
    "DEFAULT_LIMIT_BYTES",
    "BuildHistory",
    "BuildRecord",
    "ChoiceMemo",
    "EngineKey",
    "EngineStore",
    "Entry",
    "FileRecord",
    "Hold",
    "Keyring",
    "Manifest",
    "OverflowMemo",
    "PastBuild",
    "PublicKey",
    "Speed",
    "Verification",
    "WaitCallback",
    "WeightsMemo",
    "canonical",
    "canonical_json",
    "describe_differences",
    "digest_of",
    "digest_tensors",
    "file_identity",
    "is_digest",
    "key_of",
    "signed",
    "signer_of",
    "why_untrusted",
]
