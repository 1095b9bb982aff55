"""The pair: a forward that saves for its gradient, and a gradient that never takes what is stale or another's.

On the CPU nothing is saved, so that what a mark, an `o` of a pair and the memory behind it mean can be seen there. With
`--device CUDA0` the tests that take `pairs` run on each kernel path.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention import case, last_words, parameters, small
from graphs import Graph
from numpy.typing import NDArray

from pyharness.base import errors
from pyharness.base.cuda import KERNEL_PATH, PATHS
from pyharness.case import cases, inputs, reference
from pyharness.case.cases import Case
from pyharness.case.operands import Inputs
from pyharness.check import oracle
from pyharness.cli import cli
from pyharness.device import ggml
from pyharness.receipts import statement

SAVED = 15  # slot of op_params: the mark of a FLASH_ATTN_EXT node, and of a gradient's o
SPLIT = 14
PREC = 3
STAMP = {"hopper": 0xA4E0EDF4, "mma": 0x37D4AACF}
STAMP_BYTES = 16

SHAPES = (
    "hsk=64,hsv=64,nh=4,nhkv=2,kv=300,nb=200,ns=2,type_K=f32,type_V=f32,pair=1",
    "hsk=128,hsv=128,nh=4,nhkv=1,kv=256,nb=256,sinks=1,pair=1",
)


class Internal:
    """What ggml-base exports to the backends alone."""

    def __init__(self, library: ggml.Library) -> None:
        self._ffi = library.ffi
        base = ctypes.CDLL(str(library.directory / "libggml-base.so"))
        self._forward, self._size = base.ggml_flash_attn_back_forward, base.ggml_flash_attn_back_saved_size
        self._forward.restype, self._size.restype = ctypes.c_void_p, ctypes.c_size_t

    def address(self, tensor: Any) -> int:
        return int(self._ffi.cast("uintptr_t", tensor))

    def forward(self, back: Any) -> int | None:
        """Address of the forward whose savings a gradient may use, None if there is none."""
        found: int | None = self._forward(ctypes.c_void_p(self.address(back)))
        return found

    def saved_size(self, attn: Any) -> int:
        """Bytes behind the result of a FLASH_ATTN_EXT node."""
        return int(self._size(ctypes.c_void_p(self.address(attn))))


@pytest.fixture(scope="session")
def internal(library: ggml.Library) -> Internal:
    return Internal(library)


class PairGraph(Graph):
    """Attentions of one size and their gradients."""

    def sources(self, param: bool = True) -> tuple[Any, Any, Any]:
        return self.tensor(64, 16, 4, param=param), self.tensor(64, 16, 2, param=param), self.tensor(64, 16, 2)

    def gradient(self, q: Any, k: Any, v: Any, o: Any) -> Any:
        d, null = self.tensor(64, 4, 16), self.ffi.NULL
        return self.c.ggml_flash_attn_back(self.ctx, q, k, v, null, null, o, d, parameters(1, 0.125))

    def backs(self, graph: Any) -> list[Any]:
        return [node for node in self.nodes(graph) if node.op == self.c.GGML_OP_FLASH_ATTN_BACK]


@pytest.fixture
def made(library: ggml.Library) -> Iterator[PairGraph]:
    graph = PairGraph(library)
    yield graph
    graph.c.ggml_free(graph.ctx)


# ---- the graph ----


def test_autodiff_marks_the_forward_and_hands_it_to_the_gradient(made: PairGraph, internal: Internal) -> None:
    attn = made.attend(*made.sources())
    assert not attn.op_params[SAVED]
    (back,) = made.backs(made.backward(attn))
    assert attn.op_params[SAVED]
    assert back.op_params[SAVED]
    assert back.src[5] == attn
    assert internal.forward(back) == internal.address(attn)


def test_a_gradient_by_hand_is_the_same_node(made: PairGraph) -> None:
    q, k, v = made.sources()
    other, attn = made.attend(q, k, v), made.attend(q, k, v)
    (theirs,) = made.backs(made.backward(other))
    assert not made.c.ggml_flash_attn_back_use_saved(made.gradient(q, k, v, made.ffi.NULL))
    ours = made.gradient(q, k, v, attn)
    assert not ours.op_params[SAVED]
    assert made.c.ggml_flash_attn_back_use_saved(ours)
    ours.op_params[5] = theirs.op_params[5]  # the gradients that are asked for
    assert list(ours.op_params) == list(theirs.op_params)
    assert list(attn.op_params) == list(other.op_params)


def test_a_forward_that_nobody_differentiates_is_not_marked(made: PairGraph, internal: Internal) -> None:
    attn = made.attend(*made.sources(param=False))
    made.backward(made.c.ggml_mul(made.ctx, attn, made.tensor(64, 4, 16, param=True)))
    assert not attn.op_params[SAVED]
    assert internal.saved_size(attn) == 0


def test_a_forward_whose_memory_is_placed_already_is_not_marked(
    library: ggml.Library, made: PairGraph, cpu: ggml.Device
) -> None:
    attn = made.attend(*made.sources())
    backend = library.backend(cpu)
    buffer = made.c.ggml_backend_alloc_ctx_tensors(made.ctx, backend)
    (back,) = made.backs(made.backward(attn))
    assert not attn.op_params[SAVED]
    assert not back.src[5]
    assert not made.c.ggml_flash_attn_back_use_saved(made.gradient(attn.src[0], attn.src[1], attn.src[2], attn))
    made.c.ggml_backend_buffer_free(buffer)
    made.c.ggml_backend_free(backend)


def test_a_forward_whose_result_is_overwritten_is_not_marked(made: PairGraph) -> None:
    attn = made.attend(*made.sources())
    written = made.c.ggml_cpy(made.ctx, made.tensor(64, 4, 16, param=True), attn)
    (back,) = made.backs(made.backward(made.c.ggml_add(made.ctx, written, made.c.ggml_scale(made.ctx, attn, 2.0))))
    assert not attn.op_params[SAVED]
    assert not back.src[5]


def test_the_forwards_precision_is_not_the_gradients_and_its_split_is(made: PairGraph) -> None:
    attn = made.attend(*made.sources())
    made.c.ggml_flash_attn_ext_set_prec(attn, made.c.GGML_PREC_F32)
    split = made.attend(*made.sources())
    made.c.ggml_flash_attn_back_set_split(split, True)
    first, second = made.backs(made.backward(made.c.ggml_add(made.ctx, attn, split)))
    assert {int(back.op_params[PREC]) for back in (first, second)} == {int(made.c.GGML_PREC_DEFAULT)}
    assert {bool(back.src[5] == split): int(back.op_params[SPLIT]) for back in (first, second)} == {False: 0, True: 1}


def a_copy(made: PairGraph, attn: Any) -> Any:
    return made.c.ggml_cont(made.ctx, attn)


def a_view(made: PairGraph, attn: Any) -> Any:
    return made.c.ggml_view_4d(made.ctx, attn, *attn.ne, *list(attn.nb)[1:], 0)


def another_forward(made: PairGraph, attn: Any) -> Any:
    return made.attend(*(attn.src[i] for i in range(3)))


def a_leaf(made: PairGraph, attn: Any) -> Any:
    return made.tensor(*attn.ne)


SLOTS = {"scale": 0, "bias": 1, "softcap": 2, "split": SPLIT, "mark": SAVED}


@pytest.mark.parametrize("node", ["forward", "gradient"])
@pytest.mark.parametrize("what", ["q", "k", "v", "mask", "sinks", *SLOTS])
def test_a_node_that_changes_after_the_build_ends_the_pair(
    made: PairGraph, internal: Internal, node: str, what: str
) -> None:
    sources = made.sources()
    attn = made.attend(*sources)
    back = made.gradient(*sources, attn)
    assert made.c.ggml_flash_attn_back_use_saved(back)
    assert internal.forward(back) == internal.address(attn)
    changed = attn if node == "forward" else back
    if what in SLOTS:
        changed.op_params[SLOTS[what]] ^= 1
    else:
        place = ("q", "k", "v", "mask", "sinks").index(what)
        changed.src[place] = made.tensor(64, 16, 4)
    assert internal.forward(back) is None


@pytest.mark.parametrize("other", [a_copy, a_view, another_forward, a_leaf])
def test_an_output_that_is_not_the_forwards_own_ends_the_pair(
    made: PairGraph, internal: Internal, other: Callable[[Graph, Any], Any]
) -> None:
    sources = made.sources()
    attn = made.attend(*sources)
    back = made.gradient(*sources, attn)
    assert made.c.ggml_flash_attn_back_use_saved(back)
    back.src[5] = other(made, attn)
    assert internal.forward(back) is None


# ---- memory behind the result ----


def test_what_is_saved_is_counted_and_only_a_mark_reserves_it(
    library: ggml.Library, internal: Internal, device: ggml.Device
) -> None:
    buft = library.c.ggml_backend_dev_buffer_type(library.handle(device))

    def reserved(session: ggml.Session) -> int:
        return int(library.c.ggml_backend_buft_get_alloc_size(buft, session.attn))

    for text in SHAPES:
        given = inputs.make(case(text), 0)
        with library.prepare(device, given) as session:
            s, h, _, n, _ = given.sizes
            assert internal.saved_size(session.attn) == STAMP_BYTES + 4 * s * h * (n + 1)
            marked = reserved(session)
            session.attn.op_params[SAVED] = 0
            plain, nbytes = reserved(session), int(library.c.ggml_nbytes(session.attn))
            assert internal.saved_size(session.attn) == 0
            saved = 0 if device.name == "CPU" else STAMP_BYTES + 4 * s * h * (n + 1)
            assert marked == max(plain, nbytes + saved)
            session.attn.op_params[SAVED] = 1


class BufferType(ctypes.Structure):
    """ggml_backend_buffer_type: memory of the CPU that reserves what is saved, as a device does."""

    CALL = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)
    ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    SIZE = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    _fields_ = [
        ("get_name", CALL),
        ("alloc_buffer", ALLOC),
        ("get_alignment", CALL),
        ("get_max_size", ctypes.c_void_p),
        ("get_alloc_size", SIZE),
        ("is_host", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def test_the_allocator_gives_nobody_the_result_or_what_is_saved_before_the_gradient_has_it(
    library: ggml.Library, made: PairGraph, internal: Internal, cpu: ggml.Device
) -> None:
    c, ffi = library.c, library.ffi
    backend = library.backend(cpu)
    name = ctypes.create_string_buffer(b"reserving")

    def alloc(_: Any, size: int) -> int:
        return internal.address(c.ggml_backend_alloc_buffer(backend, size))

    def size(address: int) -> int:
        tensor = ffi.cast("struct ggml_tensor *", address)
        return int(c.ggml_nbytes(tensor)) + internal.saved_size(tensor)

    kind = BufferType(
        BufferType.CALL(lambda _: ctypes.addressof(name)),
        BufferType.ALLOC(alloc),
        BufferType.CALL(lambda _: 64),
        None,
        BufferType.SIZE(lambda _, address: size(address)),
    )
    leaves = [made.tensor(64, 16, 4, param=True)]
    out, attentions = leaves[0], []
    for _ in range(4):
        leaves += [made.tensor(64, 16, 2, param=True) for _ in range(2)]
        attentions.append(made.attend(out, *leaves[-2:]))
        out = c.ggml_scale(made.ctx, c.ggml_scale(made.ctx, attentions[-1], 0.5), 2.0)  # could be done in place
        out = c.ggml_reshape_4d(made.ctx, out, 64, 16, 4, 1)
    for leaf in leaves:
        c.ggml_set_input(leaf)
    graph = made.backward(out, 512)
    allocator = c.ggml_gallocr_new(ffi.cast("ggml_backend_buffer_type_t", ctypes.addressof(kind)))
    assert c.ggml_gallocr_alloc_graph(allocator, graph)

    def span(tensor: Any) -> tuple[int, int]:
        start = int(ffi.cast("uintptr_t", tensor.data))
        return start, start + size(internal.address(tensor))

    nodes = made.nodes(graph)
    reused = False
    for attn in attentions:
        assert internal.saved_size(attn) > 0
        low, high = span(attn)
        first = next(i for i, node in enumerate(nodes) if node == attn)
        last = next(i for i, node in enumerate(nodes) if node.src[5] == attn)
        for i, node in enumerate(nodes):
            start, end = span(node)
            overlaps = start < high and low < end and node != attn and node.view_src != attn
            assert not (overlaps and first <= i <= last), library.text(c.ggml_op_name(node.op))
            reused |= overlaps
    assert reused  # else there was nothing to see
    c.ggml_gallocr_free(allocator)
    c.ggml_backend_free(backend)


# ---- the oracle's pairs ----


def test_a_case_runs_with_and_without_its_forward_on_the_same_data() -> None:
    plain = small()
    both = cases.in_graphs([plain, small(o=1), small(layout="strided"), small(kv=0, nb=0)], cases.GRAPHS)
    assert [(c.pair, c.o, c.layout, c.kv) for c in both] == [
        (0, 0, "cont", 20),
        (1, 0, "cont", 20),
        (0, 1, "cont", 20),
        (0, 0, "strided", 20),
        (0, 0, "cont", 0),
    ]
    assert both[1].seed(0) == plain.seed(0)
    with pytest.raises(errors.Usage, match="o=1: must be 0 with pair=1"):
        Case.parse(str(small(o=1)).replace("o=1", "o=1,pair=1"))


def test_a_pair_on_the_cpu_has_the_bits_of_the_gradient_alone(library: ggml.Library, cpu: ggml.Device) -> None:
    for text in SHAPES:
        pair = oracle.check(library, cpu, case(text), 0)
        alone = oracle.check(library, cpu, case(text).replace(pair=0), 0)
        assert (pair.status, alone.status, alone.forward) == ("ok", "ok", None)
        assert pair.digests == alone.digests
        assert pair.forward
        assert pair.forward.by == "ggml"
        assert 0 < pair.forward.worst_head_nmse < 1e-5


@pytest.mark.parametrize(
    ("words", "graphs"),
    [(["--graph", "pair"], [1]), (["--graph", "backward"], [0]), (["--graph", "both"], [0, 1]), ([], [0])],
)
def test_the_oracle_runs_the_graphs_that_it_is_told_and_its_receipt_says_which(
    library: ggml.Library, tmp_path: Path, words: list[str], graphs: list[int]
) -> None:
    listed = tmp_path / "some.def"
    listed.write_text(f"{small()}\n")
    where = ["--libs", str(library.directory), "-b", "CPU", "--case-file", str(listed), "--receipts", str(tmp_path)]
    assert cli.main(["oracle", *where, *words]) == 0
    (file,) = tmp_path.glob("*-oracle-*.json")
    assert not statement.schema_errors(statement.read(file))
    records = statement.read(file)["predicate"]["receipt"]["cases"]
    assert [record["case"] for record in records] == [str(small(pair=pair)) for pair in graphs]
    assert ["forward" in record for record in records] == [bool(pair) for pair in graphs]


def test_the_output_of_a_path_is_a_part_like_the_others(
    library: ggml.Library, cpu: ggml.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ggml.Session.result

    def spoilt(session: ggml.Session) -> ggml.Result:
        result = whole(session)
        result.forward = "mma"
        result.parts["o"] = result.parts["o"].copy()
        result.parts["o"][0, 1, 2, 3] += 100
        return result

    monkeypatch.setattr(ggml.Session, "result", spoilt)
    found = oracle.check(library, cpu, small(pair=1), 0)
    assert found.reason == "o: NMSE"
    assert found.parts["o"].place() == "s=0, h=1, i=2, c=3"


def test_the_cpu_ignores_the_values_of_an_output_that_stands_for_what_is_saved(
    library: ggml.Library, cpu: ggml.Device
) -> None:
    given = inputs.make(small(), 0)
    alone = library.run(cpu, given)
    with library.prepare(cpu, dataclasses.replace(given, o=np.full_like(given.d, np.nan))) as session:
        session.back.op_params[SAVED] = 1
        session.compute()
        assert session.result().digest == alone.digest


# ---- never stale, never another's ----


class Pairs:
    """Pairs on a device, on CUDA held to a kernel path."""

    def __init__(self, library: ggml.Library, device: ggml.Device, path: str, set_path: Callable[[str], None]) -> None:
        self.library, self.device, self.path, self.set_path = library, device, path, set_path

    def given(self, text: str, seed: int = 0) -> Inputs:
        """Inputs of a pair that the path takes; skips if it does not."""
        given = inputs.make(case(text), seed)
        reason = self.library.refusal(self.device, given)
        if reason and self.path not in ("", PATHS[-1]):
            pytest.skip(f"{self.path}: {reason}")
        assert reason is None
        return given

    def prepare(self, given: Inputs) -> ggml.Session:
        return self.library.prepare(self.device, given)

    def alone(self, given: Inputs) -> ggml.Result:
        """The gradient of the same inputs that starts from nothing."""
        case = given.case.replace(pair=0)
        return self.library.run(self.device, dataclasses.replace(given, case=case))

    def compute(self, session: ggml.Session, *nodes: Any) -> None:
        """Compute some nodes and no others."""
        c = self.library.c
        ctx = c.ggml_init({"mem_size": 1 << 16, "mem_buffer": self.library.ffi.NULL, "no_alloc": True})
        graph = c.ggml_new_graph_custom(ctx, 16, False)
        for node in nodes:
            c.ggml_graph_add_node(graph, node)
        assert c.ggml_backend_graph_compute(session.backend, graph) == c.GGML_STATUS_SUCCESS
        c.ggml_backend_synchronize(session.backend)
        c.ggml_free(ctx)

    def saved(self, session: ggml.Session, size: int) -> Any:
        """The first bytes of what is saved, as a tensor."""
        c, ffi = self.library.c, self.library.ffi
        spy = c.ggml_new_tensor_1d(session._node.ctx, c.GGML_TYPE_I8, size)
        place = int(ffi.cast("uintptr_t", session.attn.data)) + int(c.ggml_nbytes(session.attn))
        c.ggml_backend_tensor_alloc(session.attn.buffer, spy, ffi.cast("void *", -(-place // 16) * 16))
        return spy

    def stamp(self, session: ggml.Session) -> int:
        """What the forward says behind its result."""
        return int(self.library.download(self.saved(session, STAMP_BYTES), np.uint32)[0])

    def agree(self, given: Inputs, result: ggml.Result, but: str = "") -> None:
        """All parts but one agree with float64, the output if a path has made it."""
        assert not result.guards
        for name, part in oracle.compare(given, result, reference.backward(given)).items():
            assert part.passed or name == but or (name == "o" and not result.forward), part


@pytest.fixture
def pairs(library: ggml.Library, device: ggml.Device, path: str, monkeypatch: pytest.MonkeyPatch) -> Pairs:
    def set_path(name: str) -> None:
        if name:
            monkeypatch.setenv(KERNEL_PATH, name)

    set_path(path)
    return Pairs(library, device, path, set_path)


def load(library: ggml.Library, session: ggml.Session, given: Inputs) -> None:
    """Give a session other data."""
    for name in ("q", "k", "v", "sinks", "d"):
        array: NDArray[Any] | None = getattr(given, name)
        if array is not None:
            library.upload(session.storages[name], np.ascontiguousarray(array))
    session.inputs = given


@pytest.mark.parametrize("text", SHAPES)
def test_evaluations_with_other_data_are_each_right(pairs: Pairs, text: str) -> None:
    """More of them than a CUDA graph needs to be captured and launched."""
    sets = [pairs.given(text, seed) for seed in range(3)]
    fresh = []
    for given in sets:
        with pairs.prepare(given) as session:
            session.compute()
            fresh.append(session.result())
            pairs.agree(given, fresh[-1])
    with pairs.prepare(sets[0]) as session:
        for i in [0, 1, 2, 2, 1, 0, 0]:
            load(pairs.library, session, sets[i])
            session.poison()
            session.compute()
            assert session.result().digest == fresh[i].digest


@pytest.mark.parametrize("text", SHAPES)
def test_the_stamp_is_the_forwards_and_is_cleared_by_the_gradient(pairs: Pairs, text: str) -> None:
    if pairs.device.name == "CPU":
        pytest.skip("the CPU saves nothing")
    with pairs.prepare(pairs.given(text)) as session:
        pairs.compute(session, session.attn)
        assert pairs.stamp(session) == STAMP.get(session.forward, 0)
        pairs.compute(session, session.back)
        assert pairs.stamp(session) == 0


@pytest.mark.parametrize("text", SHAPES)
def test_a_second_gradient_of_one_forward_starts_from_nothing(pairs: Pairs, text: str) -> None:
    given = pairs.given(text)
    alone = pairs.alone(given)
    with pairs.prepare(given) as session:
        pairs.compute(session, session.attn)
        pairs.compute(session, session.back)
        pairs.agree(given, session.result())
        session.poison()
        pairs.compute(session, session.back)
        result = session.result()
        assert {part: result.digests[part] for part in alone.digests} == alone.digests


@pytest.mark.parametrize("stamp", [0, 1, 0xFFFFFFFF, "another path's"])
@pytest.mark.parametrize("text", SHAPES)
def test_a_wrong_stamp_is_not_believed(pairs: Pairs, text: str, stamp: int | str) -> None:
    """Neither what is saved nor the output is used then: both are NaN here."""
    if pairs.device.name == "CPU":
        pytest.skip("the CPU saves nothing")
    given = pairs.given(text)
    alone = pairs.alone(given)
    with pairs.prepare(given) as session:
        pairs.compute(session, session.attn)
        s, h, _, n, _ = given.sizes
        words = np.full(4 + s * h * n, 0xFFFFFFFF, np.uint32)
        others = [word for name, word in STAMP.items() if name != pairs.path]
        words[0] = others[0] if isinstance(stamp, str) else stamp
        pairs.library.upload(pairs.saved(session, words.nbytes), words)
        session.poison()
        pairs.compute(session, session.back)
        result = session.result()
        assert {part: result.digests[part] for part in alone.digests} == alone.digests


@pytest.mark.parametrize("text", SHAPES)
def test_a_gradient_on_another_path_than_the_forward_starts_from_nothing(pairs: Pairs, text: str) -> None:
    if pairs.device.name == "CPU":
        pytest.skip("the CPU has one path")
    given = pairs.given(text)
    for other in (name for name in PATHS if name != pairs.path):
        pairs.set_path(other)
        if pairs.library.refusal(pairs.device, given):
            continue
        alone = pairs.alone(given)
        pairs.set_path(pairs.path)
        with pairs.prepare(given) as session:
            pairs.compute(session, session.attn)
            pairs.set_path(other)
            pairs.compute(session, session.back)
            result = session.result()
            assert {part: result.digests[part] for part in alone.digests} == alone.digests
        pairs.set_path(pairs.path)


@pytest.mark.parametrize("text", SHAPES)
def test_a_gradient_that_is_no_longer_its_forwards_starts_from_nothing(pairs: Pairs, text: str) -> None:
    given = pairs.given(text)
    alone = pairs.alone(given)
    slot = pairs.library.ffi.cast("float *", pairs.library.ffi.new("int32_t[1]"))
    slot[0] = 2 * given.scale
    for change in ("scale", "split"):
        with pairs.prepare(given) as session:
            if change == "scale":
                session.attn.op_params[0] = pairs.library.ffi.cast("int32_t *", slot)[0]
            else:
                pairs.library.c.ggml_flash_attn_back_set_split(session.attn, True)
            session.compute()
            result = session.result()
            assert {part: result.digests[part] for part in alone.digests} == alone.digests, change


@pytest.mark.parametrize("text", SHAPES)
def test_a_forward_that_saves_nothing_is_ggmls_own(pairs: Pairs, text: str) -> None:
    given = pairs.given(text)
    with pairs.prepare(given) as session:
        session.compute()
        if session.forward:
            pytest.skip(f"{session.forward} has one")
        marked = session.result().parts["o"].copy()
    with pairs.prepare(given) as session:
        session.attn.op_params[SAVED] = 0
        session.compute()
        np.testing.assert_array_equal(session.result().parts["o"], marked)


@pytest.mark.parametrize(("forward", "gradient"), [("CPU", "device"), ("device", "CPU")])
@pytest.mark.parametrize("text", SHAPES)
def test_a_forward_on_another_backend_is_not_used(pairs: Pairs, text: str, forward: str, gradient: str) -> None:
    if pairs.device.name == "CPU":
        pytest.skip("needs two backends")
    given = pairs.given(text)
    library, c, ffi = pairs.library, pairs.library.c, pairs.library.ffi
    made = PairGraph(library)
    arrays = {name: np.ascontiguousarray(getattr(given, name)) for name in ("q", "k", "v", "d")}
    kinds = {"k": given.type_K, "v": given.type_V}
    tensors, null = {}, ffi.NULL
    for name, array in arrays.items():
        values, size = cases.block(kinds.get(name, "f32"))
        row = array.shape[-1] // size * values if name in kinds else array.shape[-1]
        ne = [row, *reversed(array.shape[:-1])]
        tensors[name] = c.ggml_new_tensor_4d(made.ctx, int(cases.TYPES[kinds.get(name, "f32")]), *ne)
        c.ggml_set_input(tensors[name])
    q, k, v, d = (tensors[name] for name in ("q", "k", "v", "d"))
    attn = c.ggml_flash_attn_ext(made.ctx, q, k, v, null, given.scale, 0.0, 0.0)
    grads = sum(1 << cases.PARTS.index(part) for part in ("dq", "dk", "dv"))
    back = c.ggml_flash_attn_back(made.ctx, q, k, v, null, null, attn, d, parameters(grads, given.scale))
    assert c.ggml_flash_attn_back_use_saved(back)
    c.ggml_set_output(back)
    graph = c.ggml_new_graph_custom(made.ctx, 64, False)
    c.ggml_build_forward_expand(graph, back)
    backends = {"device": library.backend(pairs.device), "CPU": library.backend(library.device("CPU"))}
    scheduler = c.ggml_backend_sched_new(
        ffi.new("ggml_backend_t[]", list(backends.values())), null, len(backends), 64, False, False
    )
    c.ggml_backend_sched_set_tensor_backend(scheduler, attn, backends[forward])
    c.ggml_backend_sched_set_tensor_backend(scheduler, back, backends[gradient])
    assert c.ggml_backend_sched_alloc_graph(scheduler, graph)
    for name, array in arrays.items():
        library.upload(tensors[name], array)
    assert c.ggml_backend_sched_graph_compute(scheduler, graph) == c.GGML_STATUS_SUCCESS
    assert back.src[5] != attn
    got = library.download(back, np.float32)
    plain = given.case.replace(pair=0, mask="none", sinks=0)
    bare = dataclasses.replace(given, case=plain, mask=None, sinks=None, grads=("dq", "dk", "dv"))
    want = library.run(pairs.device if gradient == "device" else library.device("CPU"), bare)
    for i, part in enumerate(cases.PARTS[:5]):
        first = int(c.ggml_flash_attn_back_offset(back, i)) // 4
        np.testing.assert_array_equal(got[first : first + want.parts[part].size], want.parts[part].ravel(), part)
    c.ggml_backend_sched_free(scheduler)
    for backend in backends.values():
        c.ggml_backend_free(backend)
    c.ggml_free(made.ctx)


def layers(made: PairGraph, count: int) -> tuple[list[Any], Any]:
    """Parameters and the graph of attentions one after the other, forward and backward."""
    c = made.c
    leaves = [made.tensor(64, 128, 4, param=True)]
    out = leaves[0]
    for _ in range(count):
        leaves += [made.tensor(64, 128, 2, param=True) for _ in range(2)]
        out = c.ggml_scale(made.ctx, made.attend(out, *leaves[-2:]), 0.5)
        out = c.ggml_reshape_4d(made.ctx, out, 64, 128, 4, 1)
    out = c.ggml_mul(made.ctx, out, leaves[0])
    for leaf in leaves:
        c.ggml_set_input(leaf)
    graph = made.backward(out, 1024)
    for leaf in leaves:
        c.ggml_set_output(c.ggml_graph_get_grad(graph, leaf))
    return leaves, graph


def test_gradients_do_not_depend_on_who_places_the_graph_in_memory(pairs: Pairs) -> None:
    """ggml's allocator gives memory to several tensors, one after the other; a buffer of all tensors does not."""
    library, c = pairs.library, pairs.library.c
    rng = np.random.default_rng(0)
    found: list[list[list[NDArray[np.float32]]]] = []
    data: list[list[NDArray[np.float32]]] = []
    for shared in (True, False):
        made = PairGraph(library)
        leaves, graph = layers(made, 3)
        if not data:
            shapes = [tuple(leaf.ne[i] for i in range(4)) for leaf in leaves]
            data = [[rng.standard_normal(shape, np.float32) for shape in shapes] for _ in range(2)]
        backend = library.backend(pairs.device)
        allocator = c.ggml_gallocr_new(c.ggml_backend_get_default_buffer_type(backend))
        buffer = library.ffi.NULL
        if shared:
            assert c.ggml_gallocr_alloc_graph(allocator, graph)
        else:
            buffer = c.ggml_backend_alloc_ctx_tensors(made.ctx, backend)
        rounds = []
        for arrays in [*data, *data, *data]:
            c.ggml_graph_reset(graph)
            for leaf, array in zip(leaves, arrays, strict=True):
                library.upload(leaf, array)
            assert c.ggml_backend_graph_compute(backend, graph) == c.GGML_STATUS_SUCCESS
            rounds.append([library.download(c.ggml_graph_get_grad(graph, leaf), np.float32) for leaf in leaves])
        found.append(rounds)
        c.ggml_backend_buffer_free(buffer)
        c.ggml_gallocr_free(allocator)
        c.ggml_backend_free(backend)
        c.ggml_free(made.ctx)
    for i, (ours, theirs) in enumerate(zip(*found, strict=True)):
        for a, b, again in zip(ours, theirs, found[0][i % 2], strict=True):
            assert np.abs(a).max() > 0
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, again)


def test_a_node_of_another_operator_is_refused_in_words(library: ggml.Library) -> None:
    c = library.c
    made = PairGraph(library)
    other = c.ggml_new_tensor_1d(made.ctx, c.GGML_TYPE_F32, 1)
    neither = "neither FLASH_ATTN_BACK nor FLASH_ATTN_EXT"
    assert neither in last_words(lambda: c.ggml_flash_attn_back_set_split(other, True))
    assert neither in last_words(lambda: c.ggml_flash_attn_back_has(other, 0))
    assert "not a FLASH_ATTN_BACK node" in last_words(lambda: c.ggml_flash_attn_back_use_saved(other))
    handle = library.handle(library.device("CPU"))
    assert "not a FLASH_ATTN_EXT node" in last_words(lambda: c.ggml_flash_attn_back_train_refusal(handle, other, 1))
    c.ggml_free(made.ctx)
