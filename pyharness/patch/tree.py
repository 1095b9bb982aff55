"""Put the operator into a ggml or llama.cpp checkout, see what that changes, or take it out again.

The operator's own files (ggml/include, ggml/src, ggml/tests) are copied into a tree, and the hooks of ggml/edits are
inserted into upstream's files as whole lines between marker lines. Nothing of upstream is removed, so taking the
blocks out restores the bytes. Anchors are syntax nodes found with tree-sitter, so a tree may differ from the pinned.

The pinned upstream trees of ggml/upstream.toml are fetched from PyPI. CMake runs `python -m pyharness.patch.tree` with
`ensure [NAME]` or `copy FROM TO`; both print the patched tree's path.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fcntl
import functools
import gzip
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pyharness.base import build, digest, errors
from pyharness.base.digest import ROOT

try:
    import tree_sitter
    import tree_sitter_c
    import tree_sitter_cmake
    import tree_sitter_cpp
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        sys.exit(f"error: no Python package {error.name}; {build.pip()}, or ./scripts/oracle, which makes {build.VENV}")
    raise

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = "src/ggml-flash-attn-back.sha256"
"""What a patch did to a tree: the hooked files as comments, then the operator's files as sha256sum lists them."""

_MARK = "ggml-flash-attn-back"
_STAGED = f".{_MARK}-"

T = TypeVar("T")


class TreeError(errors.Environment):
    """A tree could not be fetched, patched or restored; says why and what to do. Nothing was changed."""


# ---- pinned upstream trees ----


@dataclass(frozen=True)
class Base:
    """A pinned source archive on PyPI and the folder of it that is the tree."""

    name: str
    version: str
    sha256: str
    subdir: str
    backend: str
    ggml: str

    @property
    def folder(self) -> str:
        """Name of the unpacked tree."""
        return f"{self.name}-{self.version}"


def bases(root: Path = ROOT) -> dict[str, Base]:
    """The pinned trees of ggml/upstream.toml by name, the default one first."""
    file = root / "ggml/upstream.toml"
    pins = _toml(file)
    default = pins.pop("default", None)
    if default not in pins:
        raise TreeError(
            f"{file}: default is {default!r}, expected one of {', '.join(pins) or 'the pins, and there are none'}"
        )
    known = {name: _entry(Base, {"name": name} | _table(pins[name]), f"{file}: {name}") for name in pins}
    for pin in known.values():
        if not re.fullmatch("[0-9a-f]{64}", pin.sha256):
            raise TreeError(f"{file}: {pin.name}: sha256 must be 64 hexadecimal digits")
        if not all(
            re.fullmatch(r"[A-Za-z0-9][\w.+-]*", part) for part in (pin.name, pin.version, *pin.subdir.split("/"))
        ):
            raise TreeError(f"{file}: {pin.name}: name, version and subdir must be plain names")
    return dict(sorted(known.items(), key=lambda item: item[0] != default))


def _toml(file: Path) -> dict[str, Any]:
    with _os_errors(f"cannot read {file}"):
        data = file.read_bytes()
    try:
        found: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise TreeError(f"{file} is not TOML: {error}; restore it, as with git checkout") from error
    return found


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"": value}


def _entry(kind: Callable[..., T], values: dict[str, Any], where: str) -> T:
    """A Base or an Edit of a TOML table, of whose fields every one has the type of the dataclass."""
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    names = {"str": str, "bool": bool, "list[str]": list}
    for name, value in values.items():
        if name not in known:
            raise TreeError(f"{where}: unknown key {name!r}; keys: {', '.join(known)}")
        if type(value) is not names[known[name]] or (
            isinstance(value, list) and not all(type(v) is str for v in value)
        ):
            raise TreeError(f"{where}: {name} is {value!r}, expected {known[name]}")
    try:
        return kind(**values)
    except TypeError as error:
        raise TreeError(f"{where}: {str(error).partition(' ')[2]}") from error


def base(name: str | None = None, root: Path = ROOT) -> Base:
    """The pinned tree of that name, None for the default."""
    known = bases(root)
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise TreeError(f"no upstream tree is called {name!r}; ggml/upstream.toml has {', '.join(known)}")
    return known[name]


def ensure(name: str | None = None, root: Path = ROOT) -> Path:
    """The pinned tree, fetched, unpacked and patched under `root`/build as far as that is still to do."""
    pin = base(name)
    with lock(root):
        tree = root / "build/upstream" / pin.folder
        for killed in tree.parent.glob(f"{_UNPACKING}*"):
            shutil.rmtree(killed, ignore_errors=True)
        if not tree.exists():
            unpack(fetch(pin, root), pin.subdir, tree)
        patch(tree)
    return tree


@contextlib.contextmanager
def lock(root: Path = ROOT) -> Iterator[None]:
    """Holds `root`/build for one process at a time; waits for the others."""
    path = root / "build/.lock"
    with _os_errors(f"cannot write below {root / 'build'}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Stands in for the build backend, which `pip download` asks for an archive's metadata before it keeps the archive.
_BACKEND = """
import os
def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = os.environ["GGML_SDIST"] + ".dist-info"
    os.mkdir(os.path.join(metadata_directory, folder))
    with open(os.path.join(metadata_directory, folder, "METADATA"), "w") as file:
        file.write(os.environ["GGML_SDIST_METADATA"])
    return folder
"""


def fetch(pin: Base, root: Path = ROOT) -> Path:
    """The pinned source archive below `root`/build/cache, downloaded by pip with its settings, its sha256 checked."""
    archive = root / "build/cache" / f"{pin.folder}.tar.gz"
    if archive.is_file() and _sha256(archive) == pin.sha256:
        return archive
    with _os_errors(f"cannot write {archive}"):
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            work = Path(folder)
            requirement = f"{pin.name}=={pin.version}"
            (work / "requirements.txt").write_text(f"{requirement} --hash=sha256:{pin.sha256}\n")
            module = work / "backend" / (pin.backend.replace(".", "/") + ".py")
            module.parent.mkdir(parents=True)
            module.write_text(_BACKEND)
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
            command += ["--no-binary", ":all:", "--no-build-isolation", "--require-hashes"]
            command += ["--requirement", str(work / "requirements.txt"), "--dest", str(work / "out")]
            env = os.environ | {
                "PYTHONPATH": str(work / "backend"),
                "GGML_SDIST": f"{pin.name.replace('-', '_')}-{pin.version}",
                "GGML_SDIST_METADATA": f"Metadata-Version: 2.1\nName: {pin.name}\nVersion: {pin.version}\n",
            }
            hint = (
                "Check the network and pip's settings (`pip config list`; PIP_INDEX_URL, HTTPS_PROXY, PIP_CERT are"
                f" honoured), or put the archive from https://pypi.org/project/{pin.name}/{pin.version}/#files"
                f" at {archive}"
            )
            try:
                build.step(f"download of {requirement}", command, hint, env)
            except build.SetupError as error:
                raise TreeError(str(error)) from None
            (download,) = (work / "out").iterdir()
            found = _sha256(download)
            if found != pin.sha256:
                raise TreeError(f"{download.name} has sha256 {found}, not the pinned {pin.sha256}; it was not kept")
            os.replace(download, archive)
    return archive


_UNPACKING = ".unpacking-"
"""Start of the names of folders that are not whole yet; a killed run leaves one behind."""


def unpack(archive: Path, subdir: str, tree: Path) -> None:
    """Unpacks `subdir` of the archive's only top folder as the new folder `tree`, whole or not at all.

    Only files and folders whose names stay inside are accepted. tarfile's own filters are missing before 3.10.12 and
    3.11.4, so the files are written here, with this process's owner and no mode but the executable bit."""
    with _os_errors(f"cannot write {tree}"):
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent, prefix=_UNPACKING) as folder:
            try:
                with tarfile.open(archive, "r:gz") as tar:
                    for member in tar:
                        name = PurePosixPath(member.name)
                        if PurePosixPath(*name.parts[1:]).is_relative_to(subdir):
                            _extract(tar, member, Path(folder))
            # the reader has its own ways to fail on bytes that are not what they say
            except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, AttributeError, ValueError) as error:
                raise TreeError(f"cannot unpack {archive}: {error}; delete it to have it fetched again") from error
            found = [path for path in Path(folder).glob(f"*/{subdir}") if path.is_dir()]
            if len(found) != 1:
                raise TreeError(f"{archive} has no folder {subdir}; delete it to have it fetched again")
            os.replace(found[0], tree)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise tarfile.ExtractError(f"{member.name} leads out of the archive's folder")
    if member.isdir():
        (folder / name).mkdir(parents=True, exist_ok=True)
        return
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise tarfile.ExtractError(f"{member.name} is a link or a device")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("wb") as file:
        shutil.copyfileobj(content, file)
    if member.mode & 0o100:
        (folder / name).chmod(0o755)


# ---- hooks ----


@dataclass(frozen=True)
class Edit:
    """One hook of ggml/edits, whose operator.toml explains the fields."""

    name: str
    file: str
    language: str
    anchor: list[str]
    action: str
    text: str = ""
    optional: bool = False


ACTIONS = ("before", "after", "inside", "disable")
LAYERS = ("operator", "training", "llama")
"""Files of hooks in ggml/edits; each layer needs those before it."""


def edits(root: Path = ROOT) -> list[Edit]:
    """The hooks of ggml/edits, layer by layer in their order."""
    found = [edit for layer in LAYERS for edit in _layer(root / f"ggml/edits/{layer}.toml")]
    for edit in found:
        if len({other.language for other in found if other.file == edit.file}) != 1:
            raise TreeError(
                f"{root / 'ggml/edits'}: edit {edit.name!r}: all edits of {edit.file} must be in one language"
            )
    return found


def _layer(file: Path) -> list[Edit]:
    data = _toml(file)
    entries = data.get("edit")
    if set(data) != {"edit"} or not isinstance(entries, list):
        raise TreeError(f"{file} must hold [[edit]] tables and nothing else")
    found = [_entry(Edit, _table(entry), f"{file}: edit {number}") for number, entry in enumerate(entries, 1)]
    for edit in found:
        for ok, rule in (
            (edit.language in _LANGUAGES, f"language must be one of {', '.join(_LANGUAGES)}"),
            (edit.action in ACTIONS, f"action must be one of {', '.join(ACTIONS)}"),
            (edit.anchor and all(step.partition(" ")[0] in KINDS for step in edit.anchor),
             f"anchor needs steps that start with one of {', '.join(KINDS)}"),
            (not re.search(_MARK + " [{}]", edit.text), "text must not hold the marks of a block"),
            ("\r" not in edit.text, "text must have plain line ends"),
        ):  # fmt: skip
            if not ok:
                raise TreeError(f"{file}: edit {edit.name!r}: {rule}")
    return found


def _normal(node: tree_sitter.Node | None) -> str:
    return " ".join((node.text or b"").decode(errors="replace").split()) if node else ""


def _field(name: str) -> Callable[[tree_sitter.Node], str]:
    return lambda node: _normal(node.child_by_field_name(name))


def _declared(node: tree_sitter.Node) -> str:
    """Name of the function that a declaration or a definition declares, whatever macros stand before it."""
    if node.type == "function_declarator":
        return _normal(node.child_by_field_name("declarator"))
    return next(
        (name for child in node.children if child.type != "compound_statement" and (name := _declared(child))), ""
    )


def _variable(node: tree_sitter.Node | None) -> str:
    """Name of the first variable that a declarator declares, "" for a function's."""
    if node is None or node.type == "function_declarator":
        return ""
    return _normal(node) if node.type == "identifier" else _variable(node.child_by_field_name("declarator"))


def _condition(node: tree_sitter.Node) -> str:
    return _normal(node.child_by_field_name("condition")).removeprefix("(").removesuffix(")")


def _function(node: tree_sitter.Node) -> str:
    if node.type == "function_def":  # CMake
        return _normal(node.children[0]).removeprefix("function(").partition(" ")[0].rstrip(")")
    return _declared(node)


KINDS: dict[str, tuple[tuple[str, ...], Callable[[tree_sitter.Node], str], bool]] = {
    "function": (("function_definition", "function_def"), _function, True),
    "declaration": (("declaration",), _declared, True),
    "variable": (("declaration",), lambda node: _variable(node.child_by_field_name("declarator")), True),
    "struct": (
        ("struct_specifier",),
        lambda node: _field("name")(node) if node.child_by_field_name("body") else "",
        True,
    ),
    "enumerator": (("enumerator",), _field("name"), True),
    "include": (("preproc_include",), lambda node: _normal(node.child_by_field_name("path")).strip('"<>'), True),
    "switch": (("switch_statement",), _condition, True),
    "if": (("if_statement",), _condition, True),
    "for": (("for_statement",), _condition, True),
    "case": (("case_statement",), lambda node: _field("value")(node) or "default", True),
    "return": (("return_statement",), lambda node: _normal(node).removeprefix("return ").removesuffix(";"), True),
    "statement": (("expression_statement",), _normal, False),
    "command": (("normal_command",), _normal, False),
}
"""Kinds of anchors: the syntax nodes, the text of a node that an anchor names, whether it is the whole or the start."""

_LANGUAGES = {"c": tree_sitter_c.language, "cpp": tree_sitter_cpp.language, "cmake": tree_sitter_cmake.language}


@functools.cache
def _language(name: str) -> tree_sitter.Language:
    return tree_sitter.Language(_LANGUAGES[name]())


@functools.cache
def _query(language: str, kind: str) -> tree_sitter.Query:
    known = _language(language)
    types = [t for t in KINDS[kind][0] if known.id_for_node_kind(t, True) is not None]
    if not types:
        raise TreeError(f"no anchor {kind!r} in {language}; adapt ggml/edits")
    query: tree_sitter.Query = tree_sitter.Query(known, "[" + " ".join(f"({t})" for t in types) + "] @node")
    return query


def _matches(language: str, node: tree_sitter.Node, step: str) -> list[tree_sitter.Node]:
    kind, _, text = step.partition(" ")
    _, key, whole = KINDS[kind]
    found = tree_sitter.QueryCursor(_query(language, kind)).captures(node).get("node", [])
    return [n for n in found if n != node and (key(n) == text if whole else key(n).startswith(text))]


def _find(edit: Edit, node: tree_sitter.Node) -> tree_sitter.Node:
    for i, step in enumerate(edit.anchor):
        found = _matches(edit.language, node, step)
        if len(found) != 1:
            where = " in ".join([repr(s) for s in reversed(edit.anchor[:i])] + [edit.file])
            raise TreeError(
                f"edit {edit.name!r}: {len(found) or 'no'} anchor{'s' * (len(found) > 1)} {step!r} in {where}; this"
                " tree differs too much from those of ggml/upstream.toml: adapt the edit's anchor in ggml/edits"
            )
        node = found[0]
    return node


def insert(data: bytes, wanted: list[Edit]) -> bytes:
    """The bytes of one upstream file with the blocks of its edits put in; TreeError where an anchor is not found."""
    lines = _lines(data)
    tree = tree_sitter.Parser(_language(wanted[0].language)).parse(data.replace(b"\r\n", b"\n"))
    blocks: list[tuple[int, str]] = []
    for edit in wanted:
        node = _find(edit, tree.root_node)
        first, last = node.start_point.row, node.end_point.row - (node.end_point.column == 0)
        before, after = (
            lines[first][: node.start_point.column],
            lines[last][node.end_point.column :] if node.end_point.column else b"",
        )
        if edit.action == "inside":
            body = node.child_by_field_name("body")
            brace = next((c for c in body.children if c.type == "{"), None) if body else None
            if brace is None:
                raise TreeError(
                    f"edit {edit.name!r}: anchor {edit.anchor[-1]!r} in {edit.file} has no {{ }} to insert in"
                )
            first = last = brace.start_point.row
            before, after = b"", lines[first][brace.end_point.column :]
        if not (re.fullmatch(rb"\s*(\w+\s+)*", before) and re.fullmatch(rb"\s*[;,]?\s*(//.*|/\*.*\*/|#.*)?\s*", after)):
            raise TreeError(
                f"edit {edit.name!r}: anchor {edit.anchor[-1]!r} shares its lines in {edit.file}; break the line there"
            )
        text = edit.text.rstrip("\n")
        if edit.action == "disable":
            blocks += [(first, "\n".join([text, "#if 0"] if text else ["#if 0"])), (last + 1, "#endif")]
        else:
            blocks.append((first if edit.action == "before" else last + 1, text))
    blocks.sort(key=lambda block: (block[0], block[1] != "#endif"))
    for row, text in reversed(blocks):
        if row > 0 and not lines[row - 1].endswith(b"\n"):
            raise TreeError(f"{wanted[0].file} must end in a line end")
        mark = f"{'#' if wanted[0].language == 'cmake' else '//'} {_MARK}"
        block = f"{mark} {{\n{text}\n{mark} }}\n".encode()
        lines.insert(row, block.replace(b"\n", b"\r\n") if lines[max(row - 1, 0)].endswith(b"\r\n") else block)
    return b"".join(lines)


def strip(data: bytes, file: str) -> bytes:
    """The bytes of one file without the blocks that `insert` put in."""
    if _MARK.encode() not in data:
        return data
    kept: list[bytes] = []
    inside = False
    for line in _lines(data):
        mark = re.fullmatch(rb"(?://|#) " + _MARK.encode() + rb" ([{}])\r?\n?", line)
        if mark:
            if inside == (mark[1] == b"{"):
                raise TreeError(
                    f"{file}: unpaired line {line.decode().strip()!r}; restore the pair, or the file from its origin"
                )
            inside = not inside
        elif not inside:
            kept.append(line)
    if inside:
        raise TreeError(f"{file} ends inside a block {_MARK!r}; restore the block, or the file from its origin")
    return b"".join(kept)


# ---- patching ----


@dataclass(frozen=True)
class Change:
    """One file of a tree as it is and as it is to be, None where there is none."""

    path: Path
    old: bytes | None
    new: bytes | None


def patch(tree: Path, root: Path = ROOT) -> list[Change]:
    """Puts the operator of `root` into a ggml or llama.cpp tree, whatever state the tree is in; returns what changed.

    A run that was killed is finished by the next one, or undone by `reverse`."""
    with _alone(checkout(tree)):
        return _apply(_plan(tree, root))


def reverse(tree: Path, root: Path = ROOT) -> list[Change]:
    """Takes the operator out of a tree again, so that upstream's bytes are restored; returns what changed."""
    with _alone(checkout(tree)):
        return _apply(_plan(tree, root, remove=True))


@contextlib.contextmanager
def _alone(tree: Path) -> Iterator[None]:
    """Lets one process at a time into a tree, and takes away what one that was killed left behind."""
    with _os_errors(f"cannot read {tree}"):
        folder = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        for part in {ggml_root(tree) / "include", ggml_root(tree) / "src", tree / "src", tree / "tests"}:
            for killed in list(part.rglob(f"{_STAGED}*")) if not part.is_symlink() else ():
                with _os_errors(f"cannot write below {tree}"):
                    killed.unlink()
                with contextlib.suppress(OSError):  # the folder holds other files
                    killed.parent.rmdir()
        yield
    finally:
        os.close(folder)


def check(tree: Path, root: Path = ROOT) -> bool:
    """Whether a tree holds the operator of `root` as it is now."""
    return not _plan(tree, root)


def diff(tree: Path, root: Path = ROOT) -> str:
    """What `patch` would change, as a unified diff."""
    text = ""
    for change in _plan(tree, root):
        name = change.path.relative_to(checkout(tree)).as_posix()
        old, new = (_lines(b or b"") for b in (change.old, change.new))
        old_name, new_name = (
            "/dev/null" if b is None else p + name for p, b in (("a/", change.old), ("b/", change.new))
        )
        for line in difflib.diff_bytes(difflib.unified_diff, old, new, old_name.encode(), new_name.encode()):
            text += line.decode(errors="replace")
            text += "" if line.endswith(b"\n") else "\n\\ No newline at end of file\n"
    return text


def checkout(tree: Path) -> Path:
    """The whole tree, resolved: the llama.cpp checkout where its ggml folder is given, which is patched with it."""
    tree = tree.resolve()
    inside = tree.name == "ggml" and any((tree.parent / "src").glob("llama*.cpp"))
    return tree.parent if inside else tree


def ggml_root(tree: Path) -> Path:
    """The ggml folder of a ggml or llama.cpp checkout."""
    for folder in (tree / "ggml", tree):
        if (folder / "include/ggml.h").is_file() and (folder / "src/ggml.c").is_file():
            return folder
    raise TreeError(
        f"{tree} is no ggml or llama.cpp checkout: no include/ggml.h and src/ggml.c in it or in its ggml folder"
    )


def place(tree: Path, file: str) -> Path:
    """Where a file of the patch lies in a tree; refuses paths that lead out of the tree."""
    relative = PurePosixPath(file)
    if relative.is_absolute() or not relative.parts or ".." in relative.parts:
        raise TreeError(f"{file} leads out of the tree")
    of_llama = relative.parts[0] == "tests" or file.startswith("src/llama")
    path = (tree if of_llama else ggml_root(tree)) / relative
    for part in [path, *path.parents]:
        if part == tree:
            break
        with _os_errors(f"cannot look at {part}"):
            link = part.is_symlink()
        if link:
            raise TreeError(
                f"{part} is a symbolic link, which is not written through; patch the tree that it points to"
            )
    return path


def _read(path: Path) -> bytes | None:
    with _os_errors(f"cannot read {path}"):
        return path.read_bytes() if path.exists() else None


def _plan(tree: Path, root: Path, remove: bool = False) -> list[Change]:
    tree = checkout(tree)
    hooked, copied = _patched(tree)
    content: dict[str, bytes | None] = dict.fromkeys([*copied, MANIFEST])

    wanted: dict[str, list[Edit]] = {file: [] for file in hooked}
    if not remove:
        for edit in edits(root):
            wanted.setdefault(edit.file, []).append(edit)
    for file in list(wanted):
        data = _read(place(tree, file))
        if data is not None:
            stripped = strip(data, file)
            content[file] = insert(stripped, wanted[file]) if wanted[file] else stripped
        elif all(edit.optional for edit in wanted[file]):
            del wanted[file]
        else:
            raise TreeError(f"edit {wanted[file][0].name!r}: the tree has no {file}")
    if not remove:
        content |= {path: (root / "ggml" / path).read_bytes() for path in digest.sources(root)}
        hashes = {path: hashlib.sha256(content[path] or b"").hexdigest() for path in digest.sources(root)}
        content[MANIFEST] = ("".join(f"# {file}\n" for file in wanted) + digest.manifest(hashes)).encode()

    changes = []
    for file, new in content.items():
        path = place(tree, file)
        old = _read(path)
        if old == new:
            continue
        if (
            old is not None
            and file != MANIFEST
            and file not in wanted
            and hashlib.sha256(old).hexdigest() not in copied.get(file, ())
        ):
            raise TreeError(f"{path} is not as the patch left it; move your changes elsewhere and delete it")
        changes.append(Change(path, old, new))
    return changes


def _patched(tree: Path) -> tuple[list[str], dict[str, list[str]]]:
    """What a tree's manifest lists: hooked files, and the sha256 that each of the operator's files may have there."""
    path = place(tree, MANIFEST)
    hooked: list[str] = []
    copied: dict[str, list[str]] = {}
    for line in (_read(path) or b"").decode(errors="replace").splitlines():
        entry = re.fullmatch("# (.+)|([0-9a-f]{64})  (.+)", line)
        if not entry:
            raise TreeError(f"{path} is damaged at {line[:80]!r}; restore the tree from its origin")
        if entry[1]:
            hooked.append(entry[1])
        else:
            copied.setdefault(entry[3], []).append(entry[2])
    return hooked, copied


def _apply(changes: list[Change]) -> list[Change]:
    """Makes all of the changes or none: new bytes are staged beside their places, a failure puts the old ones back.

    The manifest lists what is and what is to be until the other changes are made, so that a killed run can be told
    from edits of the user."""
    manifest = [change for change in changes if change.path.parts[-2:] == PurePosixPath(MANIFEST).parts]
    steps = [change for change in changes if change not in manifest]
    for change in manifest:
        both = (change.old or b"") + (change.new or b"")
        steps = [Change(change.path, change.old, both), *steps, Change(change.path, both, change.new)]
    staged: dict[int, Path] = {}
    made: list[Path] = []

    def stage(path: Path, data: bytes) -> Path:
        made.extend(p for p in reversed(path.parents) if not p.exists())
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_STAGED)
        staged[len(staged)] = Path(name)
        with open(descriptor, "wb") as file:
            file.write(data)
        Path(name).chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o644)
        return Path(name)

    with _os_errors("the tree was left as it was"):
        done: list[Change] = []
        try:
            ready = [(step, None if step.new is None else stage(step.path, step.new)) for step in steps]
            for step, new in ready:
                done.append(step)
                if new is None:
                    step.path.unlink()
                else:
                    os.replace(new, step.path)
        except BaseException:
            for step in reversed(done):
                if step.old is None:
                    step.path.unlink(missing_ok=True)
                elif _read(step.path) != step.old:
                    os.replace(stage(step.path, step.old), step.path)
            for temporary in staged.values():
                temporary.unlink(missing_ok=True)
            for folder in reversed(made):
                with contextlib.suppress(OSError):  # was not made, or somebody else uses it by now
                    folder.rmdir()
            raise
    for folder in {change.path.parent for change in changes if change.new is None}:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return changes


def copy(source: Path, tree: Path, root: Path = ROOT) -> Path:
    """A patched copy at `tree` of what a build needs of a user's tree, brought up to date; `source` is only read."""
    source = source.resolve()
    ggml = ggml_root(source)
    parts = {ggml / "cmake", ggml / "include", ggml / "src", source / "include", source / "src"}
    wanted = [file for part in parts for file in part.rglob("*")]
    wanted += [file for folder in {ggml, source} for pattern in ("*.txt", "*.in") for file in folder.glob(pattern)]
    wanted += (source / "tests").glob("test-backend-ops.cpp")
    wanted += [place(source, file) for file in _patched(source)[1]]
    with lock(root), _os_errors(f"cannot copy {source} to {tree}"):
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
            fresh = Path(folder)
            for file in wanted:
                if file.is_file():
                    (fresh / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, fresh / file.relative_to(source))
            patch(fresh)
            _mirror(fresh, tree)
    return tree


def _mirror(source: Path, target: Path) -> None:
    """Makes the files of `target` those of `source`; files that are the same already are not touched."""
    files = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    for file in target.rglob("*"):
        if file.is_file() and file.relative_to(target) not in files:
            file.unlink()
    for name in files:
        if not (target / name).is_file() or (source / name).read_bytes() != (target / name).read_bytes():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(source / name, target / name)


# ---- small things ----


def _lines(data: bytes) -> list[bytes]:
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TreeError(f"{what}: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb `patch`."""
    parser.add_argument("tree", type=Path, metavar="TREE", help="a ggml or llama.cpp checkout")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 unless the tree holds the current operator"
    )
    mode.add_argument("--reverse", action="store_true", help="take the operator out; upstream's bytes are restored")
    mode.add_argument(
        "--diff", action="store_true", help="change nothing; print what would be changed as a unified diff"
    )


def run(args: argparse.Namespace) -> int:
    """The verb `patch`: patch, check, reverse or diff one tree."""
    if args.diff:
        sys.stdout.write(diff(args.tree))
        return 0
    if args.check:
        current = check(args.tree)
        print(f"{args.tree}: {'patched' if current else 'not patched with the current operator'}")
        return 0 if current else 1
    changes = reverse(args.tree) if args.reverse else patch(args.tree)
    for change in changes:
        verb = "added" if change.old is None else "removed" if change.new is None else "changed"
        print(f"{verb:7} {change.path}")
    print(f"{args.tree}: {'restored' if args.reverse else 'patched'}{'' if changes else ' already'}")
    return 0


def _main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pyharness.patch.tree", description="Provides patched trees to CMake."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    ensure_parser = verbs.add_parser("ensure", help="fetch, unpack and patch a pinned tree")
    ensure_parser.add_argument("name", nargs="?")
    copy_parser = verbs.add_parser("copy", help="make a patched copy of a tree")
    copy_parser.add_argument("source", type=Path)
    copy_parser.add_argument("tree", type=Path)
    args = parser.parse_args(argv)
    try:
        print(ensure(args.name) if args.verb == "ensure" else copy(args.source, args.tree))
    except TreeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
