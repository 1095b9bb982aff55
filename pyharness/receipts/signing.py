"""DSSE signatures of receipts with ed25519 keys (securesystemslib; the extra `sign`).

A signature lies beside its receipt as `<receipt>.dsse.json` and carries the receipt's bytes. Keys are PEM files:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub.pem
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base import build, errors
from . import statement

PAYLOAD_TYPE = "application/vnd.in-toto+json"
SUFFIX = ".dsse.json"
KEYS = "receipts/keys"
"""Folder of the public keys that receipts of the repository are signed with, PEM files."""


def _modules() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from securesystemslib import dsse, signer
    except ImportError as e:
        raise errors.Environment("signatures need securesystemslib and cryptography", build.pip("sign")) from e
    return dsse, signer, serialization


def _expect_ed25519(key: Any) -> None:
    if key.keytype != "ed25519":
        raise ValueError(f"it is of type {key.keytype}")


def envelope_path(receipt: Path) -> Path:
    """Where the signature of a receipt lies."""
    return receipt.with_name(receipt.stem + SUFFIX)


def sign(receipt: Path, key: Path) -> Path:
    """Sign the receipt's bytes with an unencrypted ed25519 private key (PEM); another signature there is replaced."""
    dsse, signer, serialization = _modules()
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
        crypto = signer.CryptoSigner(private)
        _expect_ed25519(crypto.public_key)
    except Exception as e:  # no file, or one of several kinds that cryptography raises for what is no such key
        raise errors.Usage(f"{key}: not a readable ed25519 private key in PEM form: {e}") from e
    envelope = dsse.Envelope(receipt.read_bytes(), PAYLOAD_TYPE, {})
    envelope.sign(crypto)
    path = envelope_path(receipt)
    statement.replace(path, json.dumps(envelope.to_dict(), indent=1, sort_keys=True).encode() + b"\n")
    return path


def check(receipt: Path, key: Path) -> str:
    """The id of the public key that signed exactly these bytes; errors.Invalid when there is no such signature."""
    dsse, signer, serialization = _modules()
    try:
        public = signer.SSlibKey.from_crypto(serialization.load_pem_public_key(key.read_bytes()))
        _expect_ed25519(public)
    except Exception as e:  # as above
        raise errors.Usage(f"{key}: not a readable ed25519 public key in PEM form: {e}") from e
    path = envelope_path(receipt)
    try:
        envelope = dsse.Envelope.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as e:
        raise errors.Invalid(f"no signature: {path.name} is not there") from e
    except Exception as e:  # the library's own kinds, and what it runs into where a value has another type
        raise errors.Invalid(f"{path.name} is not a DSSE envelope: {e!r}; sign the receipt again") from e
    if envelope.payload != receipt.read_bytes() or envelope.payload_type != PAYLOAD_TYPE:
        raise errors.Invalid(f"{path.name} signs other bytes than {receipt.name}")
    try:
        envelope.verify([public], threshold=1)
    except Exception as e:  # securesystemslib raises several kinds for a signature that does not verify
        raise errors.Invalid(f"{path.name} is not signed by {key.name} (key {public.keyid[:12]})") from e
    return str(public.keyid)
