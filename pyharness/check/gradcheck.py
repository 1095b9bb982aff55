"""Check ggml's own autodiff of FLASH_ATTN_EXT against finite differences in float64.

The loss is sum(out * dO) with a random dO. A case's `grads` names those of q, k, v and the sinks that are parameters;
K and V of another type than F32 are casts of F32 parameters. Each case runs in several graphs: `plain`; `views`
(q is a PERMUTE of a VIEW, k a cast of a PERMUTE of a RESHAPE, v a PERMUTE of a cast of a RESHAPE); `shared` (one tensor
is k and v); `twice` (two attentions read q, k and v). Every graph must hold one FLASH_ATTN_BACK node per attention that
computes the wanted gradients only, and run on one device.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import options
from ..base import errors
from ..case import cases, inputs, operands
from ..case.cases import Case
from ..case.result import CaseResult, PartResult
from ..device import ggml
from . import report
from .oracle import exit_code

F64 = NDArray[np.float64]

GRAPHS = ("plain", "views", "shared", "twice")
STEP = 1e-5
EXTRA_ROWS = 3  # rows of the tensor that `views` views q of; the first comes before q
NODES = 1024
NOISE = 1e-5  # finite differences of a gradient that is zero are about this far off
OP_PARAM_GRADS = 5  # slot of the wanted gradients, after the forward's


@dataclasses.dataclass
class _Problem:
    """A loss twice: as a function of float64 arrays, and as a ggml graph over parameters of the same shapes."""

    given: operands.Inputs
    graph: str
    values: dict[str, F64]  # the parameters and constants, numpy axis order

    def attention(self, values: dict[str, F64]) -> list[tuple[F64, F64, F64, float]]:
        """q, k, v in the shapes of Inputs and the scale of each attention."""
        q, k, v = values["q"], values["k"], values["k" if self.graph == "shared" else "v"]
        if self.graph == "views":
            s, _, hkv, n, _ = self.given.sizes
            q = q[:, 1 : 1 + n].transpose(0, 2, 1, 3)
            k, v = (x.reshape(s, x.shape[1], hkv, -1).transpose(0, 2, 1, 3) for x in (k, v))
        scale = self.given.scale
        return [(q, k, v, scale), (q, k, v, scale / 2)] if self.graph == "twice" else [(q, k, v, scale)]

    def logical(self, name: str, index: tuple[Any, ...]) -> tuple[int, ...]:
        """An element of a parameter in the coordinates of Inputs; queries from -1 where `views` leaves rows out."""
        place = [int(i) for i in index]
        if self.graph == "views" and name == "q":
            s, row, h, c = place
            place = [s, h, row - 1, c]
        elif self.graph == "views" and name in ("k", "v"):
            s, j, column = place
            g, c = divmod(column, self.values[name].shape[2] // self.given.sizes[2])
            place = [s, g, j, c]
        return tuple(place)

    def loss(self, values: dict[str, F64]) -> float:
        """sum(out * dO), straight from the definition."""
        given = self.given
        _, h, hkv, n, _ = given.sizes
        total = 0.0
        for q, k, v, scale in self.attention(values):
            scores = scale * q @ np.repeat(k, h // hkv, axis=1).transpose(0, 1, 3, 2)
            if given.softcap > 0:
                scores = given.softcap * np.tanh(scores / given.softcap)
            if given.mask is not None:
                mask = given.mask[:, :, :n].astype(np.float64)
                mask = np.tile(mask, (q.shape[0] // mask.shape[0], h // mask.shape[1], 1, 1))
                scores = scores + np.array([_slope(i, h, given.max_bias) for i in range(h)])[:, None, None] * mask
            top = scores.max(axis=3, keepdims=True)
            if "sinks" in values:
                top = np.maximum(top, values["sinks"][:, None, None])
            top = np.where(np.isfinite(top), top, 0)
            p = np.exp(scores - top)
            weight = p.sum(axis=3, keepdims=True)
            if "sinks" in values:
                weight = weight + np.exp(values["sinks"][:, None, None] - top)
            out = p @ np.repeat(v, h // hkv, axis=1) / np.where(weight > 0, weight, 1)
            total += float((out * given.d.astype(np.float64).transpose(0, 2, 1, 3)).sum())
        return total


def _slope(head: int, heads: int, max_bias: float) -> float:
    if max_bias <= 0:
        return 1.0
    power = 1 << (heads.bit_length() - 1)
    if head < power:
        return float(2 ** (-max_bias / power)) ** (head + 1)
    return float(2 ** (-max_bias / 2 / power)) ** (2 * (head - power) + 1)


def check(
    library: ggml.Library,
    device: ggml.Device,
    case: Case,
    seed: int,
    graph: str = "plain",
    threads: int = 0,
    samples: int = 0,
) -> CaseResult:
    """Compare ggml's gradients with finite differences. samples: elements of each parameter, 0 = all."""
    if case.type_K not in ("f32", "f16", "bf16") or case.type_V not in ("f32", "f16", "bf16"):
        return CaseResult(
            case, device.name, case.seed(seed), "unsupported", "a cast to a quantised type has no gradient"
        )
    given = inputs.make(case.replace(layout="cont"), seed)
    given.q, _, _, given.d = given.shown()
    problem = _Problem(given, graph, _values(given, graph))
    rng = np.random.default_rng(case.seed(seed))
    wanted = _wanted(given, graph)
    with _Graph(library, device, problem, wanted, threads) as run:
        if run.refusal:
            return CaseResult(case, device.name, case.seed(seed), "unsupported", f"{graph}: {run.refusal}")
        reasons = run.structure()
        got = run.gradients()
    limit = cases.limits()["nmse"]
    parts = {}
    for name in wanted:
        part = "dsinks" if name == "sinks" else f"d{name}"
        parts[part] = _compare(part, got[name], problem, name, rng, samples, limit)
    reasons += [f"{part.part}: {part.why or 'NMSE'}" for part in parts.values() if not part.passed]
    status = "failed" if reasons else "ok"
    text = "; ".join(f"{graph}: {reason}" for reason in reasons)
    return CaseResult(case, device.name, case.seed(seed), status, text, parts, path=graph)


def graphs(case: Case) -> list[str]:
    """The graphs that a case can run in: `shared` needs k and v of one shape and type."""
    alike = case.hsk == case.hsv and case.type_K == case.type_V
    return [graph for graph in GRAPHS if alike or graph != "shared"]


def _values(given: operands.Inputs, graph: str) -> dict[str, F64]:
    """The arrays that stand in the graph, rounded as the casts round them; keys that no row sees are zeros."""
    q, k, v, _ = given.shown()
    values: dict[str, F64] = {name: x.astype(np.float64) for name, x in (("q", q), ("k", k), ("v", v))}
    if given.sinks is not None:
        values["sinks"] = given.sinks.astype(np.float64)
    if graph == "shared":
        del values["v"]
    if graph == "views":
        s, h, _, n, m = given.sizes
        wide = np.ones((s, n + EXTRA_ROWS, h, given.q.shape[3]))
        wide[:, 1 : 1 + n] = values["q"].transpose(0, 2, 1, 3)
        values["q"] = wide
        for name in ("k", "v"):
            values[name] = values[name].transpose(0, 2, 1, 3).reshape(s, m, -1)
    return values


def _wanted(given: operands.Inputs, graph: str) -> list[str]:
    """Names of the parameters."""
    names = {"dq": "q", "dk": "k", "dv": "k" if graph == "shared" else "v", "dsinks": "sinks"}
    return list(dict.fromkeys(names[part] for part in given.grads))


class _Graph:
    """The problem in ggml, with its backward, on a device."""

    def __init__(
        self, library: ggml.Library, device: ggml.Device, problem: _Problem, wanted: list[str], threads: int
    ) -> None:
        self.library, self.problem, self.wanted = library, problem, wanted
        c = self.c = library.c
        size = NODES * c.ggml_tensor_overhead() + c.ggml_graph_overhead_custom(NODES, True)
        self.ctx = c.ggml_init({"mem_size": size, "mem_buffer": library.ffi.NULL, "no_alloc": True})
        self.data: list[tuple[Any, NDArray[Any]]] = []
        self.parameters = {name: self._leaf(name, array.astype(np.float32)) for name, array in problem.values.items()}
        for name in wanted:
            c.ggml_set_param(self.parameters[name])
        self.graph = c.ggml_new_graph_custom(self.ctx, NODES, True)
        self.attentions: list[Any] = []
        loss = self._loss()
        c.ggml_set_loss(loss)
        c.ggml_build_forward_expand(self.graph, loss)
        c.ggml_build_backward_expand(self.ctx, self.graph, library.ffi.NULL)
        self.backend = library.backend(device, threads)
        self.buffer = library.ffi.NULL
        nodes = [c.ggml_graph_node(self.graph, i) for i in range(c.ggml_graph_n_nodes(self.graph))]
        self.backs = [node for node in nodes if node.op == c.GGML_OP_FLASH_ATTN_BACK]
        refused = [node for node in nodes if not c.ggml_backend_supports_op(self.backend, node)]
        self.refusal = f"{device.name} refuses {library.text(c.ggml_op_name(refused[0].op))}" if refused else ""
        if not refused:
            self.buffer = c.ggml_backend_alloc_ctx_tensors(self.ctx, self.backend)
            if not self.buffer:
                raise errors.Environment(f"{device.name} has no memory for its graph")
            for tensor, array in self.data:
                library.upload(tensor, array)

    def _leaf(self, name: str, array: NDArray[Any], kind: str = "f32") -> Any:
        ne = [*reversed(array.shape), 1, 1, 1][:4]
        tensor = self.c.ggml_new_tensor_4d(self.ctx, int(cases.TYPES[kind]), *ne)
        self.c.ggml_set_name(tensor, name.encode())
        self.data.append((tensor, np.ascontiguousarray(array)))
        return tensor

    def _loss(self) -> Any:
        c, ctx, given = self.c, self.ctx, self.problem.given
        null = self.library.ffi.NULL
        q, k, v = self._sources()
        mask = null if given.mask is None else self._leaf("mask", given.mask, "f16")
        d = self._leaf("d", given.d)
        total = None
        for *_, scale in self.problem.attention(self.problem.values):
            out = c.ggml_flash_attn_ext(ctx, q, k, v, mask, scale, given.max_bias, given.softcap)
            if "sinks" in self.parameters:
                c.ggml_flash_attn_ext_add_sinks(out, self.parameters["sinks"])
            self.attentions.append(out)
            term = c.ggml_sum(ctx, c.ggml_mul(ctx, out, d))
            total = term if total is None else c.ggml_add(ctx, total, term)
        return total

    def _sources(self) -> tuple[Any, Any, Any]:
        """q, k and v as the attention reads them."""
        c, ctx, given = self.c, self.ctx, self.problem.given
        q, k = self.parameters["q"], self.parameters["k"]
        v = k if self.problem.graph == "shared" else self.parameters["v"]
        views = self.problem.graph == "views"
        s, h, hkv, n, m = given.sizes

        def swap(tensor: Any) -> Any:
            return c.ggml_permute(ctx, tensor, 0, 2, 1, 3)

        def cast(tensor: Any, kind: str) -> Any:
            return tensor if kind == "f32" else c.ggml_cast(ctx, tensor, int(cases.TYPES[kind]))

        if views:
            q = swap(c.ggml_view_4d(ctx, q, q.ne[0], h, n, s, q.nb[1], q.nb[2], q.nb[3], q.nb[2]))
            k, v = (c.ggml_reshape_4d(ctx, x, x.ne[0] // hkv, hkv, m, s) for x in (k, v))
            k = swap(k)
        k = cast(k, given.type_K)
        if self.problem.graph == "shared":
            return q, k, k
        v = cast(v, given.type_V)
        return q, k, swap(v) if views else v

    def structure(self) -> list[str]:
        """What is wrong with the backward graph itself."""
        bits = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks"}
        expected = sum(1 << cases.PARTS.index(bits[name]) for name in self.wanted)
        if self.problem.graph == "shared" and "k" in self.wanted:
            expected |= 1 << cases.PARTS.index("dv")
        problems = []
        if len(self.backs) != len(self.attentions):
            problems.append(f"{len(self.backs)} FLASH_ATTN_BACK nodes for {len(self.attentions)} attentions")
        others = {int(back.op_params[OP_PARAM_GRADS]) for back in self.backs} - {expected}
        problems += [f"FLASH_ATTN_BACK computes gradients {bits:#x} instead of {expected:#x}" for bits in others]
        return problems

    def gradients(self) -> dict[str, NDArray[np.float32]]:
        """Gradient of each parameter, computed by the device, in the parameter's shape."""
        c = self.c
        c.ggml_graph_reset(self.graph)
        status = c.ggml_backend_graph_compute(self.backend, self.graph)
        if status != c.GGML_STATUS_SUCCESS:
            raise errors.Environment(f"the graph failed: {self.library.text(c.ggml_status_to_string(status))}")
        got = {}
        for name in self.wanted:
            gradient = c.ggml_graph_get_grad(self.graph, self.parameters[name])
            if not gradient:
                raise errors.Failure(f"{name} has no gradient in the graph")
            got[name] = self.library.download(gradient, np.float32).reshape(self.problem.values[name].shape)
        return got

    def __enter__(self) -> _Graph:
        return self

    def __exit__(self, *_: object) -> None:
        if self.buffer:
            self.c.ggml_backend_buffer_free(self.buffer)
        self.c.ggml_backend_free(self.backend)
        self.c.ggml_free(self.ctx)


def _compare(
    part: str,
    got: NDArray[np.float32],
    problem: _Problem,
    name: str,
    rng: np.random.Generator,
    samples: int,
    limit: float,
) -> PartResult:
    values = {key: array.copy() for key, array in problem.values.items()}
    array = values[name]
    count = min(samples or array.size, array.size)
    flat = rng.permutation(array.size)[:count] if count < array.size else np.arange(array.size)
    want = np.empty(count)
    for i, position in enumerate(flat):
        centre = array.flat[position]
        step = STEP * max(1.0, abs(float(centre)))
        array.flat[position] = centre + step
        above = problem.loss(values)
        array.flat[position] = centre - step
        below = problem.loss(values)
        array.flat[position] = centre
        want[i] = (above - below) / (2 * step)
    found = got.reshape(-1)[flat].astype(np.float64)
    difference = np.abs(found - want)
    difference[np.isnan(difference)] = np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        nmse = float(np.square(difference).sum() / (np.square(want).sum() + count * NOISE**2))
    worst = int(difference.argmax())
    index = problem.logical(name, np.unravel_index(int(flat[worst]), array.shape))
    why = "" if np.isfinite(found).all() else "not finite"
    return PartResult(
        part,
        nmse,
        (),
        0.0,
        (),
        0.0,
        index,
        float(found[worst]),
        float(want[worst]),
        limit,
        not why and nmse <= limit,
        why,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `grad`."""
    options.selection(parser, cases.GRAD)
    options.backend(parser)
    options.seed(parser)
    options.strict(parser)
    options.output(parser)
    parser.add_argument("--graph", choices=GRAPHS, action="append", help="only this graph; may be repeated")
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="check N elements of each parameter (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    """Check the selected cases in each graph."""
    selected = options.select(args)
    library = options.library(args)
    devices = options.devices(args, library)
    work = [
        (device, case, graph)
        for device in devices
        for case in selected
        for graph in graphs(case)
        if not args.graph or graph in args.graph
    ]
    results: list[CaseResult] = []
    stopped = 0
    with report.Reporter(args.output, len(work), args.seed, verb="grad") as reporter:

        def aborted(message: str) -> None:
            device, case, graph = work[len(results)]
            why = f"{graph}: ggml aborted: {message.strip()}"
            results.append(CaseResult(case, device.name, case.seed(args.seed), "failed", why, path=graph))
            reporter.case(results[-1])
            reporter.finish(results, len(work))
            reporter.flush()
            os._exit(1)

        otherwise, library.on_abort = library.on_abort, aborted
        try:
            for device, case, graph in work:
                reporter.start(case)
                try:
                    result = check(library, device, case, args.seed, graph, args.threads, args.samples)
                except errors.Lost:
                    raise
                except (errors.Failure, MemoryError) as error:
                    status = "skipped" if isinstance(error, (errors.Environment, MemoryError)) else "failed"
                    why = f"{graph}: {error or 'out of memory'}"
                    result = CaseResult(case, device.name, case.seed(args.seed), status, why, path=graph)
                results.append(result)
                reporter.case(result)
        except KeyboardInterrupt:
            stopped = errors.INTERRUPTED
        library.on_abort = otherwise
        reporter.finish(results, len(work))
    return stopped or exit_code(results, args.strict)
