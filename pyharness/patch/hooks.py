"""The hooks of ggml/edits: where their text goes in upstream's files, and how it is taken out again.

A hook's text stands in lines of its own between marker lines. Anchors are syntax nodes found with tree-sitter, so a
tree may differ from the pinned; where it differs too much the hook has other forms, each for the versions it names.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import tree_sitter
import tree_sitter_c
import tree_sitter_cmake
import tree_sitter_cpp

from pyharness.base.digest import ROOT
from pyharness.patch.common import MARK, TreeError, entry, table, toml


@dataclass(frozen=True)
class Edit:
    """One hook of ggml/edits, whose operator.toml explains the fields."""

    name: str
    file: str
    language: str
    anchor: list[str]
    action: str
    text: str = ""
    needs: list[str] = field(default_factory=list)
    trees: str = ""
    optional: bool = False
    forms: tuple[Edit, ...] = ()
    """The hook for the trees that this one does not fit, in the order in which they are tried."""


@dataclass(frozen=True)
class Layer:
    """Hooks that go together, and patterns of the source files below ggml/ that go with them."""

    name: str
    files: list[str] = field(default_factory=list)
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Block:
    """Lines to be put in before a row, counted from 0, of an upstream file."""

    row: int
    text: str


class Misfit(TreeError):
    """A hook does not fit a tree; says why."""


ACTIONS = ("before", "after", "inside", "disable", "none")
LAYERS = ("operator", "training", "llama", "devices")
"""Files of hooks in ggml/edits; each layer needs those before it."""

Read = Callable[[str], bytes | None]
"""The bytes of a tree's file without blocks, None where there is no such file."""


def layers(root: Path = ROOT) -> list[Layer]:
    """The layers of ggml/edits in their order. TreeError."""
    found = [_layer(name, root / f"ggml/edits/{name}.toml") for name in LAYERS]
    languages: dict[str, str] = {}
    for edit in (edit for layer in found for edit in layer.edits):
        if languages.setdefault(edit.file, edit.language) != edit.language:
            raise TreeError(
                f"{root / 'ggml/edits'}: edit {edit.name!r}: all edits of {edit.file} must be in one language"
            )
    return found


def edits(root: Path = ROOT) -> list[Edit]:
    """The hooks of every layer in their order. TreeError."""
    return [edit for layer in layers(root) for edit in layer.edits]


def layer_of(path: str, known: Iterable[Layer]) -> str:
    """The layer that a source file belongs to, by its path relative to ggml/: the first unless another names it."""
    return next((layer.name for layer in known if any(fnmatch.fnmatch(path, p) for p in layer.files)), LAYERS[0])


def _layer(name: str, file: Path) -> Layer:
    data = toml(file)
    entries = data.pop("edit", None)
    if not isinstance(entries, list):
        raise TreeError(f"{file} must hold [[edit]] tables")
    found = [_edit(table(values), f"{file}: edit {number}") for number, values in enumerate(entries, 1)]
    for edit in (form for first in found for form in (first, *first.forms)):
        for ok, rule in (
            (edit.language in _LANGUAGES, f"language must be one of {', '.join(_LANGUAGES)}"),
            (edit.action in ACTIONS, f"action must be one of {', '.join(ACTIONS)}"),
            (edit.anchor and all(step.partition(" ")[0] in KINDS for step in edit.anchor),
             f"anchor needs steps that start with one of {', '.join(KINDS)}"),
            (all(need.partition(" ")[2] for need in edit.needs), "needs are a file, a space and text of it each"),
            (not re.search(MARK + " [{}]", edit.text), "text must not hold the marks of a block"),
            ("\r" not in edit.text, "text must have plain line ends"),
        ):  # fmt: skip
            if not ok:
                raise TreeError(f"{file}: edit {edit.name!r}: {rule}")
    return replace(entry(Layer, {"name": name} | data, str(file)), edits=tuple(found))


def _edit(values: dict[str, object], where: str) -> Edit:
    forms = values.pop("or", [])
    edit = entry(Edit, values, where)
    if not isinstance(forms, list):
        raise TreeError(f"{where}: [[edit.or]] tables are expected, not {forms!r}")
    found = []
    for form in map(table, forms):
        if unknown := set(form) - {"trees", "anchor", "action", "text", "needs"}:
            raise TreeError(f"{where}: unknown key {min(unknown)!r} of a form")
        if "trees" not in form:
            raise TreeError(f"{where}: a form must say which trees it is for")
        found.append(entry(Edit, values | {"needs": []} | form, where))
    return replace(edit, forms=tuple(found))


# ---- anchors ----


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


def _declarator(node: tree_sitter.Node | None) -> tree_sitter.Node | None:
    """What declares a function, its name and arguments."""
    while node is not None and node.type != "function_declarator":
        node = node.child_by_field_name("declarator")
    return node


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
    "overload": (("function_definition",), lambda node: _normal(_declarator(node)), False),
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


# ---- hooks in a tree ----


class Source:
    """One upstream file without blocks, to find the places of hooks in."""

    def __init__(self, data: bytes, language: str) -> None:
        self.lines = split_lines(data)
        self.language = language
        self.tree = tree_sitter.Parser(_language(language)).parse(data.replace(b"\r\n", b"\n"))
        self.nodes: dict[tuple[int, str], list[tree_sitter.Node]] = {}

    def matches(self, node: tree_sitter.Node, step: str) -> list[tree_sitter.Node]:
        """The nodes inside one that a step of an anchor names."""
        kind, _, text = step.partition(" ")
        _, key, whole = KINDS[kind]
        if (node.id, kind) not in self.nodes:
            found = tree_sitter.QueryCursor(_query(self.language, kind)).captures(node).get("node", [])
            self.nodes[node.id, kind] = [n for n in found if n != node]
        return [n for n in self.nodes[node.id, kind] if (key(n) == text if whole else key(n).startswith(text))]

    def find(self, edit: Edit) -> tree_sitter.Node:
        """The anchor of an edit. Misfit."""
        node = self.tree.root_node
        for i, step in enumerate(edit.anchor):
            found = self.matches(node, step)
            if len(found) != 1:
                where = " in ".join([repr(s) for s in reversed(edit.anchor[:i])] + [edit.file])
                raise Misfit(f"{len(found) or 'no'} anchor{'s' * (len(found) > 1)} {step!r} in {where}")
            node = found[0]
        return node

    def blocks(self, edit: Edit) -> list[Block]:
        """Where the edit's text goes. Misfit."""
        node = self.find(edit)
        first, last = node.start_point.row, node.end_point.row - (node.end_point.column == 0)
        before, after = (
            self.lines[first][: node.start_point.column],
            self.lines[last][node.end_point.column :] if node.end_point.column else b"",
        )
        if edit.action == "none":
            return []
        if edit.action == "inside":
            body = node.child_by_field_name("body")
            brace = next((c for c in body.children if c.type == "{"), None) if body else None
            if brace is None:
                raise Misfit(f"anchor {edit.anchor[-1]!r} in {edit.file} has no {{ }} to insert in")
            first = last = brace.start_point.row
            before, after = b"", self.lines[first][brace.end_point.column :]
        if not (re.fullmatch(rb"\s*(\w+\s+)*", before) and re.fullmatch(rb"\s*[;,]?\s*(//.*|/\*.*\*/|#.*)?\s*", after)):
            raise Misfit(f"anchor {edit.anchor[-1]!r} shares its lines in {edit.file}; break the line there")
        text = edit.text.rstrip("\n")
        if edit.action == "disable":
            return [Block(first, "\n".join([text, "#if 0"] if text else ["#if 0"])), Block(last + 1, "#endif")]
        return [Block(first if edit.action == "before" else last + 1, text)]


class Fit:
    """How the hooks of one tree's files go in, as far as they do."""

    def __init__(self, read: Read) -> None:
        self._read = functools.cache(read)
        self._sources: dict[str, Source] = {}
        self._words: dict[str, str] = {}

    def layer(self, layer: Layer) -> tuple[dict[str, list[Block]], list[str]]:
        """The blocks of a layer by file, and the reasons in words why it does not fit, one for each hook. TreeError."""
        blocks: dict[str, list[Block]] = {}
        reasons = []
        for edit in layer.edits:
            if self._read(edit.file) is None:
                if not edit.optional:
                    reasons.append(f"edit {edit.name!r}: the tree has no {edit.file}")
                continue
            try:
                blocks.setdefault(edit.file, []).extend(self._edit(edit))
            except Misfit as misfit:
                reasons.append(f"edit {edit.name!r}: {misfit}")
        return blocks, reasons

    def _edit(self, edit: Edit) -> list[Block]:
        if edit.file not in self._sources:
            self._sources[edit.file] = Source(self._read(edit.file) or b"", edit.language)
        reasons = []
        for form in (edit, *edit.forms):
            try:
                for need in form.needs:
                    file, _, words = need.partition(" ")
                    if not self._has(file, words):
                        raise Misfit(f"no {words!r} in {file}")
                return self._sources[edit.file].blocks(form)
            except Misfit as misfit:
                reasons.append(f"{misfit}" + f" ({form.trees})" * bool(form.trees))
        raise Misfit("; ".join(reasons))

    def _has(self, file: str, words: str) -> bool:
        if file not in self._words:
            self._words[file] = " ".join((self._read(file) or b"").decode(errors="replace").split())
        start, end = (r"\b" if re.match(r"\w", end) else "" for end in (words[0], words[-1]))
        return re.search(start + re.escape(words) + end, self._words[file]) is not None


def insert(data: bytes, blocks: Iterable[Block], file: str, language: str) -> bytes:
    """The bytes of one upstream file, named in errors, with the blocks put in. TreeError."""
    lines = split_lines(data)
    mark = f"{'#' if language == 'cmake' else '//'} {MARK}"
    ordered = sorted(blocks, key=lambda block: (block.row, block.text != "#endif"))
    for block in ordered[::-1]:
        if block.row > 0 and not lines[block.row - 1].endswith(b"\n"):
            raise TreeError(f"{file} must end in a line end")
        text = f"{mark} {{\n{block.text}\n{mark} }}\n".encode()
        crlf = lines[max(block.row - 1, 0)].endswith(b"\r\n")
        lines.insert(block.row, text.replace(b"\n", b"\r\n") if crlf else text)
    return b"".join(lines)


def strip(data: bytes, file: str) -> bytes:
    """The bytes of one file without the blocks that `insert` put in."""
    if MARK.encode() not in data:
        return data
    kept: list[bytes] = []
    inside = False
    for line in split_lines(data):
        mark = re.fullmatch(rb"(?://|#) " + MARK.encode() + rb" ([{}])\r?\n?", line)
        if mark:
            if inside == (mark[1] == b"{"):
                raise TreeError(
                    f"{file}: unpaired line {line.decode().strip()!r}; restore the pair, or the file from its origin"
                )
            inside = not inside
        elif not inside:
            kept.append(line)
    if inside:
        raise TreeError(f"{file} ends inside a block {MARK!r}; restore the block, or the file from its origin")
    return b"".join(kept)


def split_lines(data: bytes) -> list[bytes]:
    """The lines with their ends."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
