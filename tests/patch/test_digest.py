"""The digest of the operator's sources is the one that sha256sum gives."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from pyharness.base import digest


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "ggml" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_sources_are_include_src_and_tests_sorted_bytewise(tmp_path: Path) -> None:
    names = [
        "tests/b.h",
        "src/ggml-cpu/a.cpp",
        "src/ggml-a.c",
        "include/Z.h",
        "include/a.h",
        "edits/operator.toml",
        "cmake/x.cmake",
    ]
    write(tmp_path, dict.fromkeys(names, ""))
    assert digest.sources(tmp_path) == ["include/Z.h", "include/a.h", "src/ggml-a.c", "src/ggml-cpu/a.cpp", "tests/b.h"]


def test_hidden_and_backup_files_are_no_sources(tmp_path: Path) -> None:
    write(tmp_path, {"src/a.c": "", "src/.a.c.swp": "", "src/a.c~": ""})
    assert digest.sources(tmp_path) == ["src/a.c"]


def test_patch_digest_is_sha256_of_what_sha256sum_prints() -> None:
    listing = subprocess.run(
        ["sha256sum", *digest.sources()], cwd=digest.ROOT / "ggml", capture_output=True, check=True
    ).stdout
    assert digest.patch_digest() == hashlib.sha256(listing).hexdigest()


def test_patch_digest_follows_content_and_names(tmp_path: Path) -> None:
    write(tmp_path, {"src/a.c": "1"})
    first = digest.patch_digest(tmp_path)
    write(tmp_path, {"src/a.c": "2"})
    assert digest.patch_digest(tmp_path) != first
    write(tmp_path, {"src/a.c": "1"})
    assert digest.patch_digest(tmp_path) == first
    (tmp_path / "ggml/src/a.c").rename(tmp_path / "ggml/src/b.c")
    assert digest.patch_digest(tmp_path) != first
