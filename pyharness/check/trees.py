"""The patch on the trees that people have: which layers fit, whether they compile, and the table of docs/trees.md.

`python -m pyharness.check.trees [NAME-VERSION ...]` fetches the source archives of ggml/trees.toml, puts into each tree
the layers that fit, takes them out again and compares the bytes. --compile has the compilers read every file that the
patch touches, those of CUDA where there is an nvcc; --write writes the table. Exit 1 if a tree fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyharness.base import errors
from pyharness.base.digest import ROOT
from pyharness.patch import hooks, tree
from pyharness.patch.common import TreeError, entry, table, toml
from pyharness.perf import ptxas

TABLE = ROOT / "docs/trees.md"


@dataclass(frozen=True)
class Row:
    """What the patch made of one tree: its layers, and of those that it left out the hooks that do not fit."""

    name: str
    ggml: str
    layers: list[str]
    left_out: dict[str, list[str]]
    llama: bool
    """Whether the tree has a llama.cpp at all."""


def listed(root: Path = ROOT) -> list[tree.Base]:
    """The archives of ggml/trees.toml. TreeError."""
    file = root / "ggml/trees.toml"
    return [
        entry(tree.Base, {"name": name} | table(values), f"{file}: {name}")
        for name, versions in toml(file).items()
        for values in versions
    ]


@contextmanager
def unpacked(pin: tree.Base, root: Path = ROOT) -> Iterator[Path]:
    """The tree of an archive below `root`/build/trees, as upstream has it; TreeError if a patch left other bytes."""
    folder = root / "build/trees" / pin.folder
    if not folder.exists():
        tree.unpack(tree.fetch(pin, root), pin.subdir, folder)
    tree.reverse(folder)
    before = _digests(folder)
    yield folder
    tree.reverse(folder)
    changed = {name for name, _ in _digests(folder).items() ^ before.items()}
    if changed:
        raise TreeError(f"{folder}: reversing the patch changed {', '.join(sorted(changed))}")


def _digests(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def row(pin: tree.Base, folder: Path) -> Row:
    """What the patch makes of a tree. TreeError."""
    fitting, left_out = tree.survey(folder)
    return Row(pin.folder, version(folder), fitting, left_out, (folder / "src/llama-context.cpp").exists())


def version(folder: Path) -> str:
    """The version of a tree's ggml; older ones than 0.9 have none."""
    text = (tree.ggml_root(folder) / "CMakeLists.txt").read_text()
    parts = [re.search(rf"set\(GGML_VERSION_{part} (\d+)\)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(part[1] for part in parts if part) or "older"


# ---- compilers ----


def compile_(folder: Path, plan: tree.Plan, nvcc: Path | None = None) -> list[str]:
    """Has the compilers read the C and C++ files of a patched tree that hooks or layers are in, those of CUDA for
    compute capability 9.0a where there is an nvcc; what they say of those that do not compile."""
    ggml = tree.ggml_root(folder)
    touched = {change.path for change in plan.changes if change.new is not None}
    # the files of ggml's other backends need what this machine may lack
    folders = (ggml / "src", ggml / "src/ggml-cpu", ggml / "src/ggml-rpc", folder / "src")
    sources = [path for path in touched if path.parent in folders or path.name == "test-backend-ops.cpp"]
    include = [ggml / "include", ggml / "src", ggml / "src/ggml-cpu", folder / "include", folder / "src"]
    with tempfile.TemporaryDirectory() as generated, ThreadPoolExecutor(os.cpu_count()) as pool:
        (Path(generated) / "ggml-flash-attn-back-source.h").write_text('#define GGML_FLASH_ATTN_BACK_SOURCE ""\n')
        (Path(generated) / "ggml-version.h").write_text("")
        flags = [f"-I{path}" for path in (*include, generated)]
        jobs = [pool.submit(_read, path, flags) for path in sources if path.suffix in (".c", ".cpp")]
        if nvcc:
            kernels = [path for path in touched if path.parent.name == "ggml-cuda" and path.suffix == ".cu"]
            jobs += [pool.submit(_read_cuda, nvcc, path, flags) for path in kernels]
        return [said for job in jobs if (said := job.result())]


_DEFINES = ["-D_GNU_SOURCE", "-DGGML_USE_CPU", *(f'-DGGML_{name}=""' for name in ("VERSION", "COMMIT", "BUILD_COMMIT"))]


def _read(path: Path, flags: list[str]) -> str:
    implicit = "-Werror=implicit-function-declaration"  # a function that another version of ggml has
    compiler = (
        [os.environ.get("CC", "cc"), "-std=c11", implicit] if path.suffix == ".c" else ["c++", "-std=c++17", "-w"]
    )
    compiler += ["-fsyntax-only"]
    done = subprocess.run([*compiler, *_DEFINES, *flags, str(path)], capture_output=True, text=True)
    return _errors(path, done)


def _read_cuda(nvcc: Path, path: Path, flags: list[str]) -> str:
    """Runs what nvcc runs before it makes code, in a tenth of the time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(nvcc), "--dryrun", "--keep", "--keep-dir", folder, "-std=c++17", "-extended-lambda"]
        command += ["-D_GNU_SOURCE", "-DGGML_CUDA_USE_GRAPHS", "-Xcompiler=-w", "-w", *flags]
        command += ["-gencode=arch=compute_90a,code=sm_90a", "-c", str(path), "-o", f"{folder}/out.o"]
        plan = subprocess.run(command, capture_output=True, text=True)
        env = dict(os.environ)
        for line in re.findall(r"^#\$ (.*)$", plan.stderr, re.MULTILINE):
            variable = re.fullmatch(r"([A-Z_]+)=(.*)", line)
            if variable:
                env[variable[1]] = variable[2].strip()
            elif "cudafe++" in line or (" -E " in line and "-D__CUDA_ARCH__=" not in line):
                words = shlex.split(re.sub(r"\$(\w+)", lambda name: env.get(name[1], ""), line))
                done = subprocess.run(words, env=env, capture_output=True, text=True)
                if done.returncode != 0:
                    return _errors(path, done)
        return _errors(path, plan)


def _errors(path: Path, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == 0:
        return ""
    said = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line]
    return f"{path} does not compile:\n" + "".join(f"  {line}\n" for line in said[:5])


# ---- the table ----


def markdown(rows: Iterable[Row]) -> str:
    """The table, trees by the version of their ggml."""
    columns = ["archive", "ggml", *hooks.LAYERS, "hooks that do not fit"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for found in sorted(rows, key=lambda row: (_order(row.ggml), row.name)):
        cells = [
            "-" if layer == "llama" and not found.llama else "yes" if layer in found.layers else "no"
            for layer in hooks.LAYERS
        ]
        reasons = [reason for reasons in found.left_out.values() for reason in reasons]
        names = [name[1] for reason in reasons if (name := re.match(r"edit '(.*?)': ", reason))]
        lines.append(f"| {found.name} | {found.ggml} | {' | '.join(cells)} | {'; '.join(names)} |")
    return "\n".join(lines) + "\n"


def _order(ggml: str) -> list[int]:
    return [int(part) for part in ggml.split(".")] if ggml[0].isdigit() else []


def write(text: str, path: Path = TABLE) -> None:
    """Puts the table between its marks."""
    old = path.read_text()
    path.write_text(re.sub(r"(?s)(?<=<!-- trees -->\n).*?(?=<!-- /trees -->)", lambda _: text, old))


def main(argv: list[str]) -> int:
    """Tries the trees; see the module."""
    parser = argparse.ArgumentParser(prog="python -m pyharness.check.trees", description="Try the patch on many trees.")
    parser.add_argument("archive", nargs="*", metavar="NAME-VERSION", help="of ggml/trees.toml; default: all")
    parser.add_argument("--compile", action="store_true", help="have the compilers read what the patch touches")
    parser.add_argument("--write", action="store_true", help=f"write the table of {TABLE.relative_to(ROOT)}")
    args = parser.parse_args(argv)
    pins = [pin for pin in listed() if not args.archive or pin.folder in args.archive]
    if args.write and args.archive:
        parser.error("the table is of all trees")
    nvcc = None
    if args.compile:
        try:
            nvcc = ptxas.find_nvcc()
        except errors.Environment as missing:
            print(f"{missing}: CUDA files are not compiled", file=sys.stderr)
    rows, failed = [], False
    for pin in pins:
        said = []
        with unpacked(pin) as folder:
            found = row(pin, folder)
            if found.layers:
                plan = tree.patch(folder)
                said = compile_(folder, plan, nvcc) if args.compile else []
        rows.append(found)
        failed |= bool(said)
        print(f"{pin.folder}: ggml {found.ggml}: {', '.join(found.layers) or 'no layer'}: {'FAILED' if said else 'ok'}")
        print(tree.explain(found.left_out) + "".join(said), end="", flush=True)
    if args.write:
        write(markdown(rows))
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except errors.Failure as failure:
        sys.exit(f"error: {failure}")
