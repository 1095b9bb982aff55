"""The commit whose files lie in a tree or stand in a receipt.

A checkout answers through git. A copy without its git carries build/commit.json, which `receipt commit` writes: the
commit object and the list of the commit's files. The ids of all its trees follow from the list and the id of the commit
from the object, so that the copy proves which commit it is, or names the files that differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base import digest, errors
from ..base.digest import ROOT

CARRIED = "build/commit.json"
LEFT_OUT = "receipts/"
"""What runs write: it makes no checkout dirty."""
TREE, LINK, MODULE = "40000", "120000", "160000"

Entry = tuple[str, str, str]
"""Mode, id and path of a file."""
Input = Mapping[str, str]
"""A file of a receipt: role, path, sha256, sha256_lf, git_blob."""


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout


def _is_checkout(root: Path) -> bool:
    """Whether `root` is the top of a git checkout, not a folder inside another one."""
    top = _git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(os.fsdecode(top.rstrip(b"\n"))).resolve() == root.resolve()


def _names(data: bytes | None) -> list[str]:
    return [os.fsdecode(name) for name in (data or b"").split(b"\0") if name]


def object_id(kind: str, data: bytes) -> str:
    """The id that git gives an object of these bytes."""
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


def _content(path: Path) -> bytes | None:
    """What git stores of a file: its bytes, a link's target; None where there is neither."""
    if path.is_symlink():
        return os.fsencode(os.readlink(path))
    return path.read_bytes() if path.is_file() else None


# ---- the commit of a tree ----


def revision(root: Path, inputs: Iterable[str] = ()) -> dict[str, Any] | None:
    """Commit and tree, and what differs from it: the digest of the difference and its paths; None where neither git nor
    a carried commit tells.

    Where both do, as in a copy whose git stands elsewhere, the one that fewer paths differ from. Of `inputs`, what the
    commit does not have counts as different even where git ignores it; LEFT_OUT never does."""
    wanted = set(inputs)
    found = [one for one in (_by_git(root, wanted), _by_carried(root, wanted)) if one is not None]
    return min(found, key=lambda one: len(one["dirty"]["paths"]) if one["dirty"] else 0, default=None)


def _by_git(root: Path, inputs: set[str]) -> dict[str, Any] | None:
    """By git: the difference is `git diff --binary HEAD`, and each untracked file's path and bytes."""
    head = _git(root, "rev-parse", "HEAD", "HEAD^{tree}") if _is_checkout(root) else None
    if head is None:
        return None
    scope = ("--", ".", f":(exclude){LEFT_OUT}")
    diff = _git(root, "diff", "--binary", "HEAD", *scope) or b""
    changed = _names(_git(root, "diff", "--name-only", "-z", "HEAD", *scope))
    untracked = set(_names(_git(root, "ls-files", "--others", "--exclude-standard", "-z", *scope)))
    untracked |= inputs - set(_names(_git(root, "ls-files", "-z"))) - set(changed)
    commit, tree = head.decode().split()
    return _revision(root, commit, tree, diff, changed, untracked)


def _by_carried(root: Path, inputs: set[str]) -> dict[str, Any] | None:
    """By the carried commit: the difference is each changed file's path and bytes."""
    carried = read(root)
    if carried is None:
        return None
    here = {path: _content(root / path) for _, _, path in carried.files}
    changed = {
        path
        for mode, blob, path in carried.files
        if mode != MODULE and not path.startswith(LEFT_OUT)
        if (data := here[path]) is None or object_id("blob", data) != blob
    }
    return _revision(root, carried.commit, carried.tree, b"", (), changed | (inputs - here.keys()))


def _revision(
    root: Path, commit: str, tree: str, diff: bytes, changed: Iterable[str], whole: Iterable[str]
) -> dict[str, Any]:
    total = hashlib.sha256(diff)
    for path in sorted(whole):
        total.update(os.fsencode(path) + b"\0" + (_content(root / path) or b""))
    paths = sorted({*changed, *whole})
    return {
        "commit": commit,
        "tree": tree,
        "dirty": {"diff_sha256": total.hexdigest(), "paths": paths} if paths else None,
    }


# ---- the commit that a copy carries ----


@dataclass(frozen=True)
class Carried:
    """A commit with all its files, proved by its id."""

    commit: str
    tree: str
    files: tuple[Entry, ...]


def carry(root: Path) -> Path:
    """Write CARRIED for the checkout's HEAD; returns the file. Raises errors.Environment outside git."""
    commit = _git(root, "rev-parse", "HEAD") if _is_checkout(root) else None
    raw, listing = _git(root, "cat-file", "commit", "HEAD"), _git(root, "ls-tree", "-r", "-z", "HEAD")
    if commit is None or raw is None or listing is None:
        raise errors.Environment(f"{root} is no git checkout with a commit", "run this where the commit was made")
    files = []
    for line in _names(listing):
        about, _, path = line.partition("\t")
        mode, _, blob = about.split()
        files.append((mode, blob, path))
    document = {"commit": commit.decode().strip(), "object": os.fsdecode(raw), "files": files}
    file = root / CARRIED
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=0) + "\n", encoding="utf-8")
    read(root)
    return file


def read(root: Path) -> Carried | None:
    """The carried commit, None where there is none; errors.Environment when its ids do not follow from its content."""
    file = root / CARRIED
    try:
        document = json.loads(file.read_bytes())
        files = tuple((str(mode), str(blob), str(path)) for mode, blob, path in document["files"])
        outside = [path for _, _, path in files if path.startswith("/") or ".." in path.split("/")]
        raw = os.fsencode(document["object"])
        tree = _tree_id(files)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unproved(f"not readable: {error!r}") from error
    if outside:
        raise _unproved(f"{outside[0]} lies outside the tree")
    if object_id("commit", raw) != document["commit"]:
        raise _unproved(f"the commit object is not that of {document['commit']}")
    if not raw.startswith(f"tree {tree}\n".encode()):
        raise _unproved(f"the files are not those of commit {document['commit']}")
    return Carried(document["commit"], tree, files)


def _unproved(why: str) -> errors.Environment:
    return errors.Environment(
        f"{CARRIED} proves no commit: {why}", "write it again in the checkout: python -m pyharness receipt commit"
    )


def _tree_id(files: Iterable[Entry]) -> str:
    """Id of the tree that holds the files; a folder sorts as if its name ended in /."""
    entries: dict[bytes, tuple[str, str]] = {}
    folders: dict[str, list[Entry]] = {}
    for mode, blob, path in files:
        name, slash, rest = path.partition("/")
        if slash:
            folders.setdefault(name, []).append((mode, blob, rest))
        else:
            entries[os.fsencode(name)] = mode, blob
    entries |= {os.fsencode(name) + b"/": (TREE, _tree_id(inside)) for name, inside in folders.items()}
    lines = (
        mode.encode() + b" " + name.rstrip(b"/") + b"\0" + bytes.fromhex(id_)
        for name, (mode, id_) in sorted(entries.items())
    )
    return object_id("tree", b"".join(lines))


# ---- the commit of a receipt ----


class History:
    """The commits that HEAD stands on and the ids of their files; empty outside git and in a shallow clone."""

    def __init__(self, root: Path) -> None:
        self._root = root
        whole = _is_checkout(root) and _git(root, "rev-parse", "--is-shallow-repository") == b"false\n"
        lines = (
            (_git(root, "-c", "log.showSignature=false", "log", "--topo-order", "--reverse", "--format=%H %T") or b"")
            if whole
            else b""
        )
        self._trees: dict[str, str] = dict(line.split() for line in lines.decode().splitlines())  # oldest first

    def __bool__(self) -> bool:
        return bool(self._trees)

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def __contains__(self, commit: object) -> bool:
        return commit in self._trees

    def first(self, files: Sequence[Input]) -> str | None:
        """The first commit that has these files of a receipt, and of the operator's sources no others."""
        return next((commit for commit in self._trees if not any(self._differing(commit, files))), None)

    def differing(self, commit: str, files: Sequence[Input]) -> list[str]:
        """Paths that a commit has otherwise than these files of a receipt, line ends apart."""
        there = self._below(self._trees[commit])
        then = {f["path"]: f["sha256_lf"] for f in files}

        def text(path: str) -> str:
            return hashlib.sha256(self._object(there[path]).replace(b"\r\n", b"\n")).hexdigest()

        return [path for path in self._differing(commit, files) if path not in there or then.get(path) != text(path)]

    def _differing(self, commit: str, files: Sequence[Input]) -> Iterator[str]:
        there = self._below(self._trees[commit])
        yield from (f["path"] for f in files if there.get(f["path"]) != f["git_blob"])
        patch = {f["path"] for f in files if f["role"] == "patch"}
        sources = (path for path in there if path.startswith("ggml/") and digest.is_source(path[5:]))
        yield from (path for path in sources if path not in patch)

    @functools.cache  # noqa: B019 (one history a run; commits share most of their trees)
    def _below(self, tree: str) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for mode, id_, name in _entries(self._object(tree)):
            if mode == TREE:
                found |= {f"{name}/{path}": blob for path, blob in self._below(id_).items()}
            else:
                found[name] = id_
        return found

    @functools.cached_property
    def _reader(self) -> subprocess.Popen[bytes]:
        command = ["git", "-C", str(self._root), "cat-file", "--batch"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _object(self, id_: str) -> bytes:
        """An object's bytes."""
        stdin, stdout = self._reader.stdin, self._reader.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(id_.encode() + b"\n")
        stdin.flush()
        size = int(stdout.readline().split()[2])
        return stdout.read(size + 1)[:size]

    def close(self) -> None:
        """End git."""
        if "_reader" in self.__dict__:
            self._reader.communicate()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entries(tree: bytes) -> Iterator[Entry]:
    """Mode, id and name of everything in a tree object."""
    at = 0
    while at < len(tree):
        space, end = tree.index(b" ", at), tree.index(b"\0", at)
        yield tree[at:space].decode(), tree[end + 1 : end + 21].hex(), os.fsdecode(tree[space + 1 : end])
        at = end + 21


@dataclass(frozen=True)
class Origin:
    """Where the files of a receipt come from.

    `commit` has all of them; None where no commit is known to. `recorded` is what the run found, and `differing` what
    of its files the recorded commit has otherwise although the run found the checkout clean."""

    commit: str | None
    recorded: dict[str, Any] | None
    differing: Sequence[str] = ()

    @property
    def dirty(self) -> bool:
        """Whether no commit is known to have the files."""
        return self.commit is None and self.recorded is not None

    def __str__(self) -> str:
        if self.commit:
            return f"commit {self.commit[:12]}"
        return f"commit {self.recorded['commit'][:12]}, DIRTY" if self.recorded else "no commit"


def origin(body: dict[str, Any], history: History) -> Origin:
    """The commit whose files a receipt stands on: the recorded one where the checkout was clean or the history agrees,
    else the first in the history that has all of them."""
    recorded = body["revision"]
    files = [f for f in body["inputs"] if f["role"] not in ("cases", "data")]
    if recorded and not recorded["dirty"]:
        if recorded["commit"] not in history:
            return Origin(history.first(files) or recorded["commit"], recorded)
        differing = history.differing(recorded["commit"], files)
        return Origin(None if differing else recorded["commit"], recorded, differing)
    return Origin(history.first(files), recorded)


def named(body: dict[str, Any], root: Path = ROOT) -> str:
    """The commit of a receipt in words: `commit <12 digits>`, with DIRTY where no commit has its files."""
    with History(root) as history:
        return str(origin(body, history))
