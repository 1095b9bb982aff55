"""Digests of the operator's sources: what a library was built from, and what lies in the repository."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = ("include", "src", "tests")


def is_source(path: str) -> bool:
    """Whether a path below ggml/ is that of a source file: in one of the folders, neither hidden nor a backup."""
    folder, _, name = path.partition("/")
    name = name.rpartition("/")[2]
    return folder in _FOLDERS and name[:1] not in ("", ".") and name[-1] != "~"


def sources(root: Path = ROOT) -> list[str]:
    """Paths of the operator's source files relative to `root`/ggml, sorted bytewise, with / between folders."""
    ggml = root / "ggml"
    found = (path for folder in _FOLDERS for path in (ggml / folder).rglob("*") if path.is_file())
    return sorted(path for p in found if is_source(path := p.relative_to(ggml).as_posix()))


def files(root: Path = ROOT) -> dict[str, str]:
    """sha256 of the bytes of every source file, by its path relative to `root`/ggml, in the order of `sources`."""
    return {path: hashlib.sha256((root / "ggml" / path).read_bytes()).hexdigest() for path in sources(root)}


def manifest(digests: dict[str, str]) -> str:
    """The digests as sha256sum prints them: one line "<sha256>  <path>" per file, in the given order."""
    return "".join(f"{sha256}  {path}\n" for path, sha256 in digests.items())


def patch_digest(root: Path = ROOT) -> str:
    """sha256 of the manifest of `files`: what `ggml_flash_attn_back_source()` of a library built from them returns."""
    return hashlib.sha256(manifest(files(root)).encode()).hexdigest()
