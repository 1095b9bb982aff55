"""Fuzz targets for what pyharness reads: captures, receipts, signatures, hooks, trees to be patched, archives.

    python fuzz/readers.py TARGET [libFuzzer's options] [CORPUS...]     # corpus/TARGET holds inputs to start from

runs one under atheris (`pip install atheris`); tests/harness/test_fuzz.py runs all of them under hypothesis. A target
takes any bytes: they say how something valid is damaged before it is read. What comes back is right, or an
`errors.Failure`; nothing outside the target's folder is written, and an error leaves what was there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import gguf as gguf_format
import numpy as np

from pyharness.base import digest, errors
from pyharness.case import capture_file
from pyharness.cli import receipt
from pyharness.patch import hooks as patch_hooks
from pyharness.patch import tree
from pyharness.receipts import differences, pages, show, signing, statement, tables, verify

T = TypeVar("T")

CORNERS = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NAMES = (
    "..",
    "../outside/file",
    "../../escaped",
    "/outside",
    "",
    ".",
    "a\0b",
    "a" * 300,
    "ggml",
    "src",
    "link",
    "\ud800",
)
MEMBERS = (
    *(tarfile.REGTYPE, tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE),
    tarfile.FIFOTYPE,
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**53 + 1, 10**40, 0.5, 1e308, "0", "nan", "-inf", "1e999", "1e-400", "x"),
    *([], {}, [0], [[]], [None], {"x": 0}, {"nmse": "nan"}, *NAMES),
)
TOKENS = (
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"NaN",
    b"-Infinity",
    b"1e999",
    b'"a":1,"a":2',
    b"9" * 5000,
    b"\xff\xfe",
    b"\\ud800",
    b"\0",
)


class Choices:
    """Decisions taken from bytes, all 0 when there are no more."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.used = 0

    def below(self, n: int) -> int:
        """A number in [0, n), n at most 65536."""
        width = 1 if n <= 256 else 2
        piece = self.data[self.used : self.used + width]
        self.used += width
        return int.from_bytes(piece, "little") % max(n, 1)

    def of(self, options: Any) -> Any:
        """One of some options."""
        return options[self.below(len(options))]

    def damaged(self, data: bytes) -> bytes:
        """The bytes with up to four edits: cut off, overwritten, taken out, put in, repeated."""
        for _ in range(self.below(5)):
            at = (self.below(65536) * 65536 + self.below(65536)) % (len(data) + 1)
            count = self.below(64)
            kind = self.below(6)
            if kind == 0:
                data = data[:at]
            elif kind == 1:
                piece = self.of(CORNERS).to_bytes(8, "little")[: self.of((1, 4, 8))]
                data = data[:at] + piece + data[at + len(piece) :]
            elif kind == 2:
                data = data[:at] + data[at + count :]
            elif kind == 3:
                data = data[:at] + self.of(TOKENS) + data[at:]
            elif kind == 4:
                data = data[:at] + data[at : at + count] * 2 + data[at + count :]
            else:
                data = data[:at] + bytes([self.below(256)]) + data[at + 1 :]
        return data

    def edited(self, value: Any) -> Any:
        """A JSON value with one part of it replaced, taken out or added."""
        if isinstance(value, dict) and value and self.below(8):
            key = self.of(sorted(value))
            if self.below(16) == 1:
                return {k: v for k, v in value.items() if k != key}
            return value | {key: self.edited(value[key])}
        if isinstance(value, list) and value and self.below(8):
            at = self.below(len(value))
            if self.below(16) == 1:
                return value[:at] + value[at + 1 :]
            return [*value[:at], self.edited(value[at]), *value[at + 1 :]]
        if isinstance(value, dict) and self.below(2):
            return value | {self.of(NAMES): self.of(VALUES)}
        return self.of(VALUES)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder, beside it a folder `outside` that must stay as it is."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        outside, inside = Path(name) / "outside", Path(name) / "inside"
        for path in (outside, inside):
            path.mkdir()
        (outside / "file").write_bytes(b"precious\n")
        yield inside
        assert contents(Path(name), "inside") == {"outside": None, "outside/file": b"precious\n"}


def contents(root: Path, but: str = "") -> dict[str, bytes | str | None]:
    """What lies below a folder: bytes of files, targets of links, None for folders."""
    found: dict[str, bytes | str | None] = {}
    for place, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(place) / name
            relative = path.relative_to(root).as_posix()
            if not but or relative.split("/")[0] != but:
                found[relative] = (
                    os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
                )
    return found


def attempt(read: Callable[[], T]) -> tuple[T] | None:
    """What a reader returns, None where it refuses in words."""
    try:
        return (read(),)
    except errors.Failure as failure:
        if not str(failure).strip():
            raise AssertionError("a refusal without words") from failure
        return None


# ---- captures ----


def _gguf() -> bytes:
    """The least capture, with keys of another tool."""
    with folder() as inside:
        writer = gguf_format.GGUFWriter(inside / "a.gguf", "flash_attn_back")
        writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
        writer.add_array("other.sizes", [1, 2, 3])
        writer.add_uint32("flash_attn_back.version", 1)
        writer.add_float32("flash_attn_back.scale", 0.25)
        for name, shape in {"q": (2, 2, 32), "k": (1, 3, 32), "v": (1, 3, 4), "d": (2, 2, 4)}.items():
            writer.add_tensor(name, np.ones(shape, np.float32))
        writer.add_tensor("mask", np.zeros((1, 2, 3), np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (inside / "a.gguf").read_bytes()


def _safetensors() -> bytes:
    from safetensors.numpy import save

    shapes = {"q": (2, 2, 32), "k": (1, 3, 32), "v": (1, 3, 4), "d": (2, 2, 4)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return bytes(save(tensors, {"flash_attn_back.version": "1", "flash_attn_back.scale": "0.25"}))


def _capture(data: bytes, suffix: str, whole: bytes) -> None:
    choices = Choices(data)
    with folder() as inside:
        file = inside / f"a{suffix}"
        file.write_bytes(choices.damaged(whole))
        found = attempt(lambda: capture_file.read(file))
        if found:  # what is read can be written, and read again
            capture_file.write(inside / "again.gguf", found[0])
            again = capture_file.read(inside / "again.gguf").inputs
            for name in ("q", "k", "v", "d", "mask", "sinks", "o"):
                np.testing.assert_array_equal(getattr(again, name), getattr(found[0].inputs, name))


def gguf(data: bytes) -> None:
    """A damaged GGUF capture."""
    _capture(data, ".gguf", GGUF)


def safetensors(data: bytes) -> None:
    """A damaged safetensors capture, its header rewritten or its bytes."""
    choices = Choices(data)
    length = int.from_bytes(SAFETENSORS[:8], "little")
    header = json.loads(SAFETENSORS[8 : 8 + length])
    for _ in range(choices.below(3)):
        header = choices.edited(header)
    text = json.dumps(header).encode()
    _capture(data[choices.used :], ".safetensors", len(text).to_bytes(8, "little") + text + SAFETENSORS[8 + length :])


# ---- receipts ----


def _receipts() -> list[statement.Document]:
    """A committed receipt of every mode, with its first records only."""
    latest = {path.name.split("-")[1]: path for path in pages.listed()}
    found = [statement.read(path) for path in latest.values()]
    for document in found:
        body = document["predicate"]["receipt"]
        del body["cases"][3:]
        if body["perf"]:
            del body["perf"]["measurements"][3:]
        if body["monitor"]["device"]:
            del body["monitor"]["device"]["samples"][3:]
    return [_sealed(document) for document in found]


def _sealed(document: statement.Document) -> statement.Document:
    """The document with id, sums and digests that fit its members, as far as they can be made."""
    body = document["predicate"]["receipt"]
    with contextlib.suppress(Exception):  # members of the wrong type
        bare = {name: value for name, value in body.items() if name not in ("id", "seals", "harness")}
        return statement.seal(copy.deepcopy(bare), body["counts"]["listed"])
    return document


def receipts(data: bytes) -> None:
    """A damaged receipt, verified, shown and compared; its members edited, or its bytes."""
    choices = Choices(data)
    first = choices.of(RECEIPTS)
    document = first
    for _ in range(choices.below(4)):
        body = choices.edited(document["predicate"]["receipt"])
        document = {**document, "predicate": {**document["predicate"], "receipt": body}}
    if choices.below(2) and isinstance(document["predicate"]["receipt"], dict):
        document = _sealed(document)
    if choices.below(8) == 1:
        document = choices.edited(document)
    text = json.dumps(document).encode()
    with folder() as inside:
        path = inside / "a.json"
        path.write_bytes(choices.damaged(text) if choices.below(2) else text)
        findings = attempt(lambda: verify.check(path))
        assert findings is not None
        assert all(finding.text for finding in findings[0])
        found = attempt(lambda: statement.read(path))
        if found:
            show.summary(found[0])
            show.markdown([found[0]])
            if found[0]["predicate"]["receipt"]["perf"]:
                tables.peers_table(found[0]["predicate"]["receipt"]["perf"])
            list(differences.differences(first, found[0]))
            list(differences.differences(found[0], first))
        else:
            assert verify.exit_code(findings[0]) == verify.INVALID


def _key_pair() -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)


def signatures(data: bytes) -> None:
    """A damaged signature of a file: none but the whole one passes."""
    choices = Choices(data)
    with folder() as inside:
        file, private, public = inside / "a.json", inside / "key.pem", inside / "key.pub.pem"
        file.write_bytes(b"{}\n")
        private.write_bytes(KEYS[0])
        public.write_bytes(KEYS[1])
        path = signing.sign(file, private)
        whole = json.loads(path.read_bytes())
        envelope = whole
        for _ in range(choices.below(3)):
            envelope = choices.edited(envelope)
        path.write_bytes(choices.damaged(json.dumps(envelope).encode()))
        public.write_bytes(choices.damaged(KEYS[1]))
        attempt(lambda: signing.check(file, public))
        file.write_bytes(b"{ }\n")  # other bytes than were signed
        assert attempt(lambda: signing.check(file, public)) is None


# ---- the patch ----

HOOKS = """
[[edit]]
name = "declaration"
file = "include/ggml.h"
language = "c"
anchor = ["declaration ggml_flash_attn_back"]
action = "disable"
text = '#include "ggml-flash-attn-back.h"'

[[edit]]
name = "switch"
file = "src/ggml.c"
language = "c"
anchor = ["function f", "switch x", "case 1"]
action = "before"
text = "    case 0: break;"

[[edit]]
name = "loop"
file = "src/ggml.c"
language = "c"
anchor = ["function f", "for"]
action = "inside"
text = "    g();"

[[edit]]
name = "sources"
file = "src/CMakeLists.txt"
language = "cmake"
anchor = ["command add_library"]
action = "after"
optional = true
text = "include(x)"
"""
UPSTREAM = {
    "include/ggml.h": b"void ggml_flash_attn_back(int a);\n",
    "src/ggml.c": b"int f(int x) {\n    for (;;) {\n    }\n    switch (x) {\n    case 1:\n        break;\n    }\n}\n",
    "src/CMakeLists.txt": b"add_library(ggml ggml.c)\n",
}
OPERATOR = {
    "include/ggml-flash-attn-back.h": b"int a;\n",
    "src/ggml-flash-attn-back.c": b"int b;\n",
    "tests/a.def": b"x\n",
}
EDITS = {
    "edits/operator.toml": HOOKS.encode(),
    "edits/training.toml": b"edit = []\n",
    "edits/llama.toml": b"edit = []\n",
    "edits/devices.toml": b"edit = []\n",
}


def lay(root: Path, files: dict[str, bytes]) -> None:
    """Write files below a folder."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def reverse(target: Path, repository: Path) -> None:
    """tree.reverse, called as tree.patch is."""
    assert repository.is_dir()
    tree.reverse(target)


def hooks(data: bytes) -> None:
    """Damaged patch data: hooks and pins."""
    choices = Choices(data)
    with folder() as inside:
        lay(inside / "repository/ggml", OPERATOR | EDITS | {"edits/operator.toml": choices.damaged(HOOKS.encode())})
        lay(inside / "repository/ggml", {"upstream.toml": choices.damaged(PINS)})
        lay(inside / "tree", UPSTREAM)
        before = contents(inside / "tree")
        attempt(lambda: tree.base(root=inside / "repository"))
        changes = attempt(lambda: tree.patch(inside / "tree", inside / "repository"))
        if changes is None:
            assert contents(inside / "tree") == before
        else:
            tree.reverse(inside / "tree")
            assert contents(inside / "tree") == before


def trees(data: bytes) -> None:
    """A tree with links, missing and foreign files and a damaged list of what was patched, patched and restored."""
    choices = Choices(data)
    with folder() as inside:
        repository, target = inside / "repository", inside / "tree"
        lay(repository / "ggml", OPERATOR | EDITS | {"upstream.toml": PINS})
        lay(target / ("ggml" if choices.below(2) else ""), UPSTREAM)
        if choices.below(2):
            tree.patch(target, repository)
        for _ in range(choices.below(4)):
            path = target / choices.of(sorted(contents(target)) or ["src"])
            kind = choices.below(6)
            if kind < 3 and path.is_file() and not path.is_symlink():
                text = path.read_bytes()
                line = f"{'0' * 64}  {choices.of(NAMES)}\n".encode(errors="replace")
                path.write_bytes(
                    choices.damaged(text) if kind else text + choices.of((line, b"# ../../outside/file\n", b"#\n"))
                )
            elif path.is_symlink() or path.exists():
                (shutil.rmtree if path.is_dir() and not path.is_symlink() else Path.unlink)(path)
                if kind > 3:
                    path.symlink_to(choices.of(("../../outside", "../../outside/file", "/", ".", "ggml.c", "nowhere")))
                elif kind == 3:
                    path.mkdir()
        for _ in range(1 + choices.below(3)):
            before = contents(target)
            action = choices.of((tree.patch, reverse, tree.check, tree.diff))
            if attempt(functools.partial(action, target, repository)) is None or action in (tree.check, tree.diff):
                assert contents(target) == before


def archives(data: bytes) -> None:
    """An archive with links, devices, names that lead out, and damaged bytes, unpacked whole or not at all."""
    choices = Choices(data)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for number in range(1 + choices.below(4)):
            member = tarfile.TarInfo(
                choices.of(("top/tree/file", "top/tree", "top/tree/a/b", "top/tree/link", "top/tree/link/file", "top"))
                if number or choices.below(2)
                else "top/tree/" + choices.of(NAMES[:-1])
            )
            member.type = choices.of(MEMBERS)
            member.linkname = choices.of(
                ("", "../../../outside/file", "/", "top/tree/file", "file", "top/nowhere", ".", "..")
            )
            member.mode = choices.of((0o644, 0o7777, 0))
            content = b"content" if member.isreg() else b""
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    plain = choices.damaged(packed.getvalue()) if choices.below(2) else packed.getvalue()
    with folder() as inside:
        archive, target = inside / "a.tar.gz", inside / "trees/tree"
        archive.write_bytes(choices.damaged(gzip.compress(plain, mtime=0)))
        if attempt(functools.partial(tree.unpack, archive, "tree", target)) is None:
            assert not list((inside / "trees").iterdir())
        else:
            assert [path.name for path in (inside / "trees").iterdir()] == ["tree"]
            assert target.is_dir()
            assert not target.is_symlink()
            for path in target.rglob("*"):
                assert path.resolve().is_relative_to(target.resolve()), f"{path} leads out"


GGUF = _gguf()
SAFETENSORS = _safetensors()
RECEIPTS = _receipts()
KEYS = _key_pair()
PINS = (digest.ROOT / "ggml/upstream.toml").read_bytes()
TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (gguf, safetensors, receipts, signatures, hooks, trees, archives)
}


def main() -> None:
    """Fuzz one target with atheris."""
    import atheris

    name = sys.argv.pop(1)
    for module in (capture_file, receipt, signing, statement, tables, patch_hooks, tree, verify):
        for value in vars(module).values():
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__code__"):
                setattr(module, value.__name__, atheris.instrument_func(value))
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
