"""Put the operator into a ggml or llama.cpp checkout, see what that changes, or take it out again.

The operator's own files (ggml/include, ggml/src, ggml/tests) are copied into a tree, and the hooks of ggml/edits are
inserted into upstream's files as whole lines between marker lines. Nothing of upstream is removed, so taking the
blocks out restores the bytes. Both come in layers; a tree gets the highest that fit it.

The pinned upstream trees of ggml/upstream.toml are fetched from PyPI. CMake runs `python -m pyharness.patch.tree` with
`ensure [NAME]` or `copy FROM TO`; both print the patched tree's path.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gzip
import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pyharness.base import build, digest
from pyharness.base.digest import ROOT
from pyharness.patch.common import MARK, TreeError, entry, os_errors, table, toml

try:
    from pyharness.patch import hooks
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        sys.exit(f"error: no Python package {error.name}; {build.pip()}, or ./scripts/oracle, which makes {build.VENV}")
    raise

MANIFEST = "src/ggml-flash-attn-back.sha256"
"""What a patch did to a tree: layers and hooked files as comments, then the operator's files as of sha256sum."""

_STAGED = f".{MARK}-"


# ---- pinned upstream trees ----


@dataclass(frozen=True)
class Base:
    """A pinned source archive on PyPI and the folder of it that is the tree."""

    name: str
    version: str
    sha256: str
    subdir: str
    backend: str
    ggml: str = ""

    @property
    def folder(self) -> str:
        """Name of the unpacked tree."""
        return f"{self.name}-{self.version}"


def bases(root: Path = ROOT) -> dict[str, Base]:
    """The pinned trees of ggml/upstream.toml by name, the default one first."""
    file = root / "ggml/upstream.toml"
    pins = toml(file)
    default = pins.pop("default", None)
    if default not in pins:
        raise TreeError(
            f"{file}: default is {default!r}, expected one of {', '.join(pins) or 'the pins, and there are none'}"
        )
    known = {name: entry(Base, {"name": name} | table(pins[name]), f"{file}: {name}") for name in pins}
    for pin in known.values():
        if not re.fullmatch("[0-9a-f]{64}", pin.sha256):
            raise TreeError(f"{file}: {pin.name}: sha256 must be 64 hexadecimal digits")
        if not all(
            re.fullmatch(r"[A-Za-z0-9][\w.+-]*", part) for part in (pin.name, pin.version, *pin.subdir.split("/"))
        ):
            raise TreeError(f"{file}: {pin.name}: name, version and subdir must be plain names")
    return dict(sorted(known.items(), key=lambda item: item[0] != default))


def base(name: str | None = None, root: Path = ROOT) -> Base:
    """The pinned tree of that name, None for the default."""
    known = bases(root)
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise TreeError(f"no upstream tree is called {name!r}; ggml/upstream.toml has {', '.join(known)}")
    return known[name]


def ensure(name: str | None = None, root: Path = ROOT, layer: str | None = None) -> Path:
    """The pinned tree, fetched, unpacked and patched under `root`/build as far as that is still to do."""
    pin = base(name)
    with lock(root):
        tree = root / "build/upstream" / pin.folder
        for killed in tree.parent.glob(f"{_UNPACKING}*"):
            shutil.rmtree(killed, ignore_errors=True)
        if not tree.exists():
            unpack(fetch(pin, root), pin.subdir, tree)
        patch(tree, layer=layer)
    return tree


@contextlib.contextmanager
def lock(root: Path = ROOT) -> Iterator[None]:
    """Holds `root`/build for one process at a time; waits for the others."""
    path = root / "build/.lock"
    with os_errors(f"cannot write below {root / 'build'}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        build.hold(file.fileno())
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
    with os_errors(f"cannot write {archive}"):
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
            work = Path(folder)
            requirement = f"{pin.name}=={pin.version}"
            (work / "requirements.txt").write_text(f"{requirement} --hash=sha256:{pin.sha256}\n")
            module = work / "backend" / (pin.backend.replace(".", "/") + ".py")
            module.parent.mkdir(parents=True)
            for package in module.parents[: len(pin.backend.split(".")) - 1]:
                (package / "__init__.py").touch()  # before an installed package of the name
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
    with os_errors(f"cannot write {tree}"):
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


# ---- patching ----


@dataclass(frozen=True)
class Change:
    """One file of a tree as it is and as it is to be, None where there is none."""

    path: Path
    old: bytes | None
    new: bytes | None


@dataclass(frozen=True)
class Plan:
    """What is to be done to a tree, the layers that it holds then, and why others are left out, in words."""

    changes: list[Change]
    layers: list[str]
    left_out: dict[str, list[str]] = field(default_factory=dict)


def patch(tree: Path, root: Path = ROOT, layer: str | None = None) -> Plan:
    """Puts the operator of `root` into a ggml or llama.cpp tree, whatever state the tree is in; returns what was done.

    The tree gets the highest layers that fit it, or those up to `layer`. TreeError where these, or the lowest, do not
    fit. A run that was killed is finished by the next one, or undone by `reverse`."""
    with _alone(checkout(tree)):
        plan = _plan(tree, root, layer)
        _apply(plan.changes)
        return plan


def reverse(tree: Path) -> Plan:
    """Takes every layer out of a tree again, so that upstream's bytes are restored; returns what was done."""
    with _alone(checkout(tree)):
        plan = _restoration(tree)
        _apply(plan.changes)
        return plan


@contextlib.contextmanager
def _alone(tree: Path) -> Iterator[None]:
    """Lets one process at a time into a tree, and takes away what one that was killed left behind."""
    with contextlib.ExitStack() as stack:
        with os_errors(f"cannot read {tree}"):
            stack.enter_context(build.alone(tree))
        for part in {ggml_root(tree) / "include", ggml_root(tree) / "src", tree / "src", tree / "tests"}:
            for killed in list(part.rglob(f"{_STAGED}*")) if not part.is_symlink() else ():
                with os_errors(f"cannot write below {tree}"):
                    killed.unlink()
                with contextlib.suppress(OSError):  # the folder holds other files
                    killed.parent.rmdir()
        yield


def check(tree: Path, root: Path = ROOT) -> bool:
    """Whether a tree holds the operator of `root` as it is now, in the layers that it was patched with."""
    held = _patched(checkout(tree))[2]
    return bool(held) and not _plan(tree, root, held[-1]).changes


def held(tree: Path) -> list[str]:
    """The layers that a tree was patched with."""
    return _patched(checkout(tree))[2]


def survey(tree: Path, root: Path = ROOT) -> tuple[list[str], dict[str, list[str]]]:
    """The layers that fit a tree, whatever was put into it, and of the others the reasons in words. TreeError."""
    fitting, left_out, _ = _fit(checkout(tree), hooks.layers(root))
    return fitting, left_out


def diff(tree: Path, root: Path = ROOT, layer: str | None = None) -> str:
    """What `patch` would change, as a unified diff."""
    text = ""
    for change in _plan(tree, root, layer).changes:
        name = change.path.relative_to(checkout(tree)).as_posix()
        old, new = (hooks.split_lines(b or b"") for b in (change.old, change.new))
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
        + (f"; {fork}" if (fork := _fork(tree).strip()) else "")
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
        with os_errors(f"cannot look at {part}"):
            link = part.is_symlink()
        if link:
            raise TreeError(
                f"{part} is a symbolic link, which is not written through; patch the tree that it points to"
            )
    return path


def _read(path: Path) -> bytes | None:
    with os_errors(f"cannot read {path}"):
        return path.read_bytes() if path.exists() else None


def _fit(tree: Path, wanted: list[hooks.Layer]) -> tuple[list[str], dict[str, list[str]], dict[str, list[hooks.Block]]]:
    """Those of the layers that fit, of the others the reasons in words, and the blocks of those that fit by file."""

    def read(file: str) -> bytes | None:
        data = _read(place(tree, file))
        return None if data is None else hooks.strip(data, file)

    fit = hooks.Fit(read)
    fitting: list[str] = []
    left_out: dict[str, list[str]] = {}
    blocks: dict[str, list[hooks.Block]] = {}
    for layer in wanted:
        found, reasons = fit.layer(layer)
        if not reasons and left_out:
            reasons = [f"it needs the layer {next(iter(left_out))}"]
        if reasons:
            left_out[layer.name] = reasons
            continue
        fitting.append(layer.name)
        for file, more in found.items():
            blocks.setdefault(file, []).extend(more)
    return fitting, left_out, blocks


def explain(left_out: dict[str, list[str]]) -> str:
    """Lines that say which layers do not fit and why, hook by hook."""
    return "".join(
        f"layer {name} does not fit:\n" + "".join(f"  {reason}\n" for reason in reasons)
        for name, reasons in left_out.items()
    )


def _plan(tree: Path, root: Path, layer: str | None) -> Plan:
    tree = checkout(tree)
    hooked, copied, _ = _patched(tree)
    layers = hooks.layers(root)
    if layer is not None and layer not in hooks.LAYERS:
        raise TreeError(f"no layer is called {layer!r}; there are {', '.join(hooks.LAYERS)}")
    wanted = layers if layer is None else layers[: hooks.LAYERS.index(layer) + 1]
    fitting, left_out, blocks = _fit(tree, wanted)
    if not fitting or (layer and left_out):
        raise TreeError(f"{tree}: {explain(left_out)}{_fork(tree)}{_HINT}")

    languages = {edit.file: edit.language for of in layers for edit in of.edits}
    content: dict[str, bytes | None] = dict.fromkeys([*copied, MANIFEST])
    for file in {*hooked, *blocks}:
        data = _read(place(tree, file))
        if data is not None:
            stripped = hooks.strip(data, file)
            content[file] = hooks.insert(stripped, blocks[file], file, languages[file]) if file in blocks else stripped
    sources = [path for path in digest.sources(root) if hooks.layer_of(path, layers) in fitting]
    content |= {path: (root / "ggml" / path).read_bytes() for path in sources}
    hashes = {path: hashlib.sha256(content[path] or b"").hexdigest() for path in sources}
    comments = [*(f"layer {name}" for name in fitting), *blocks]
    content[MANIFEST] = ("".join(f"# {line}\n" for line in comments) + digest.manifest(hashes)).encode()
    return Plan(_changes(tree, content, {*hooked, *blocks}, copied), fitting, left_out)


def _restoration(tree: Path) -> Plan:
    tree = checkout(tree)
    hooked, copied, _ = _patched(tree)
    content: dict[str, bytes | None] = dict.fromkeys([*copied, MANIFEST])
    for file in hooked:
        data = _read(place(tree, file))
        if data is not None:
            content[file] = hooks.strip(data, file)
    return Plan(_changes(tree, content, set(hooked), copied), [])


def _changes(
    tree: Path, content: dict[str, bytes | None], upstream: set[str], copied: dict[str, list[str]]
) -> list[Change]:
    """The changes that give files their new content; refuses to lose what a user wrote in the operator's files."""
    changes = []
    for file, new in content.items():
        path = place(tree, file)
        old = _read(path)
        if old == new:
            continue
        if (
            old is not None
            and file != MANIFEST
            and file not in upstream
            and hashlib.sha256(old).hexdigest() not in copied.get(file, ())
        ):
            raise TreeError(f"{path} is not as the patch left it; move your changes elsewhere and delete it")
        changes.append(Change(path, old, new))
    return changes


_HINT = "docs/trees.md lists trees that fit; for another one adapt the anchors in ggml/edits"

_FORKS = (
    ("ik_llama.cpp", "ggml/src/iqk", "its CPU backend is not in files of its own (no ggml/src/ggml-cpu)"),
    ("koboldcpp", "koboldcpp.py", "it builds ggml by a Makefile of its own (no ggml/CMakeLists.txt)"),
    ("ollama", "ml/backend/ggml", "its ggml is built by Go and is cut down to inference"),
    ("ollama's ggml", "src/ggml.go", "it is built by Go and is cut down to inference"),
    ("llamafile", "llamafile", "its ggml is built by make for cosmopolitan, without ggml's CMake files"),
    ("bark.cpp", "encodec.cpp", "its ggml is older than 0.9"),
    ("rwkv.cpp", "rwkv.cpp", "its ggml is older than 0.9"),
)
"""Forks and programs that bring a ggml of their own: the name, what tells it, and why it is not patched."""


def _fork(tree: Path) -> str:
    """The fork that a tree is, and what it lacks, as a sentence; "" where it is none that is known."""
    for name, mark, lacks in _FORKS:
        if (tree / mark).exists():
            return f"this is {name}: {lacks}\n"
    return ""


def _patched(tree: Path) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """What a tree's manifest lists: hooked files, the sha256 that each of the operator's files may have, layers."""
    path = place(tree, MANIFEST)
    hooked: list[str] = []
    copied: dict[str, list[str]] = {}
    layers: list[str] = []
    for line in (_read(path) or b"").decode(errors="replace").splitlines():
        found = re.fullmatch("# layer (.+)|# (.+)|([0-9a-f]{64})  (.+)", line)
        if not found:
            raise TreeError(f"{path} is damaged at {line[:80]!r}; restore the tree from its origin")
        if found[1]:
            layers.append(found[1])
        elif found[2]:
            hooked.append(found[2])
        else:
            copied.setdefault(found[4], []).append(found[3])
    return hooked, copied, layers


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

    with os_errors("the tree was left as it was"):
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


def copy(source: Path, tree: Path, root: Path = ROOT, layer: str | None = None) -> Path:
    """A patched copy at `tree` of what a build needs of a user's tree, brought up to date; `source` is only read."""
    source = source.resolve()
    ggml = ggml_root(source)
    parts = {ggml / "cmake", ggml / "include", ggml / "src", source / "include", source / "src"}
    wanted = [file for part in parts for file in part.rglob("*")]
    wanted += [file for folder in {ggml, source} for pattern in ("*.txt", "*.in") for file in folder.glob(pattern)]
    wanted += (source / "tests").glob("test-backend-ops.cpp")
    wanted += [place(source, file) for file in _patched(source)[1]]
    with lock(root), os_errors(f"cannot copy {source} to {tree}"):
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
            fresh = Path(folder)
            for file in wanted:
                if file.is_file():
                    (fresh / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, fresh / file.relative_to(source))
            plan = patch(fresh, layer=layer)
            sys.stderr.write(explain(plan.left_out))
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


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb `patch`."""
    parser.add_argument("tree", type=Path, metavar="TREE", help="a checkout of ggml, or one that has it in ggml/")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="change nothing; print the layers that the tree holds and those that fit, with every hook that does not;"
        " exit 1 unless it holds the current operator",
    )
    mode.add_argument("--reverse", action="store_true", help="take the operator out; upstream's bytes are restored")
    mode.add_argument(
        "--diff", action="store_true", help="change nothing; print what would be changed as a unified diff"
    )
    _add_layer(parser)


def _add_layer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layer",
        choices=hooks.LAYERS,
        help="the highest layer, and fail unless it fits: operator (FLASH_ATTN_BACK alone), training (kernels and"
        " ggml-opt), llama (training in llama.cpp), devices (training over several devices and RPC); default: as many"
        " as fit",
    )


def run(args: argparse.Namespace) -> int:
    """The verb `patch`: patch, check, reverse or diff one tree."""
    if args.diff:
        sys.stdout.write(diff(args.tree, layer=args.layer))
        return 0
    if args.check:
        return _check(args.tree, args.layer)
    plan = reverse(args.tree) if args.reverse else patch(args.tree, layer=args.layer)
    for change in plan.changes:
        verb = "added" if change.old is None else "removed" if change.new is None else "changed"
        print(f"{verb:7} {change.path}")
    done = "restored" if args.reverse else f"patched with {_words(plan.layers)}"
    print(f"{args.tree}: {done}{'' if plan.changes else ' already'}")
    sys.stdout.write(explain(plan.left_out))
    return 0


def _words(layers: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(layers[:-1]), *layers[-1:])))


def _check(tree: Path, layer: str | None) -> int:
    fitting, left_out = survey(tree)
    there = held(tree)
    current = bool(fitting) and check(tree)
    if current:
        print(f"{tree}: patched with {_words(there)}")
    else:
        print(f"{tree}: not patched with the current operator")
    more = [name for name in fitting if not current or name not in there]
    if more:
        print(f"{_words(more)} fit{'s' * (len(more) == 1)}{' as well' * current}")
    sys.stdout.write(explain(left_out))
    sys.stdout.write(_fork(checkout(tree)) if left_out else "")
    return 0 if current and (layer is None or layer in there) else 1


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
    for verb in (ensure_parser, copy_parser):
        _add_layer(verb)
    args = parser.parse_args(argv)
    try:
        if args.verb == "ensure":
            print(ensure(args.name, layer=args.layer))
        else:
            print(copy(args.source, args.tree, layer=args.layer))
    except TreeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
