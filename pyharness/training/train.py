"""Train a small model in llama.cpp with flash attention off and on, and compare: losses, gradients, time, memory.

The model has random weights and a real tokenizer, the text is Python's own documentation unless --text gives another.
Everything lands in one folder: train.json, losses.png, losses.svg and the fine-tuned model.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import numpy.typing as npt

from ..base import build, cuda, errors, system
from ..base.digest import ROOT
from ..case import capture_file
from ..device import ggml
from ..receipts import statement, writing
from ..receipts.losses import LIMITS, NOISE, Check, apart, compare
from . import tiny, torch_step

PROGRAM = "flash-attn-train"
SERVER = "ggml-rpc-server"
SPLIT_MODES = ("none", "layer", "row", "tensor")
SERVER_SOURCE = "tools/rpc/rpc-server.cpp"
VOCABULARY = "models/ggml-vocab-llama-spm.gguf"


SCHEDULE = {"lr": 3e-4, "warmup": 10}
"""AdamW's learning rate and in how many steps it rises to that; at 1e-3 from the first on, rounding grows too much."""


CELLS = 256
"""What llama.cpp rounds a context up to; training takes no other."""

CONTEXTS = {"cpu": (512, 1024, 2048), "cuda": (512, 4096, 16384)}
STEPS = {"cpu": 4, "cuda": 12}
CARD = 24 << 30
"""What --bench measures: contexts, steps beside those that make 8192 tokens, of which CUDA captures the first as a
graph, and the bytes of a card that it searches the longest context for."""


RECOMPUTE = ("elementwise", "layers")
BF16 = {"GGML_CUDA_CUBLAS_COMPUTE_TYPE": "bf16"}
"""What the backward pass may form again, and the environment in which CUDA's products are of BF16; docs/training.md
has both."""


def bench_steps(device: str, ctx: int) -> int:
    """Steps of a run of --bench."""
    return STEPS[device] + 2**13 // ctx


@dataclasses.dataclass(frozen=True)
class Run:
    """What the training program told of one run; docs/training.md has the events."""

    command: list[str]
    exit_code: int
    events: list[dict[str, Any]]
    messages: str  # its stderr: warnings, and why it ended early

    def all(self, event: str) -> list[dict[str, Any]]:
        """The events of a name."""
        return [e for e in self.events if e["event"] == event]

    @property
    def flash_attn(self) -> bool:
        """Whether flash attention was on while it trained."""
        return bool(self.all("start")[0]["flash_attn"])

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [e["loss"] for e in self.all("step")]

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step."""
        return [e["seconds"] for e in self.all("step")]

    @property
    def perplexity(self) -> float:
        """Perplexity of the model on the text."""
        return float(self.all("perplexity")[0]["perplexity"])

    def memory(self, key: str) -> int:
        """Bytes: model, context or compute of all buffers, peak of all devices, process."""
        return sum(e.get(key, 0) for e in self.all("memory"))

    @property
    def misplaced(self) -> list[dict[str, Any]]:
        """Attention nodes, forward or backward, that the scheduler gave to another device than their layer's."""
        return [e for e in self.all("node") if e["backend"] != e["device"]]

    @property
    def paths(self) -> str:
        """The operator's kernel paths that ran the attention nodes; none ran a forward that is ggml's own."""
        found = Counter((e["op"], e["path"]) for e in self.all("node"))
        return ", ".join(f"{op} {path} x{count}" for (op, path), count in sorted(found.items()))

    @property
    def problem(self) -> str:
        """Why it failed, in one line; empty if it did not."""
        lines = [line for line in self.messages.splitlines() if line.strip()]
        telling = [line for sign in ("out of memory", "GGML_ASSERT", "error") for line in lines if sign in line]
        said = (telling or lines[-1:] or [""])[0]
        return "" if self.exit_code == 0 else f"exit {self.exit_code}: {said.strip()}"


JSON = {"nan": "NaN", "-nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""What printf writes for numbers that are not finite, as json reads them."""


def execute(
    program: Path,
    model: Path,
    text: Path,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    environment: dict[str, str] | None = None,
    **options: str | int | float | Path | bool,
) -> Run:
    """Runs the program with options by name (`steps=5`, `fa="off"`, `type_k="q8_0"`); a failure is in the Run.

    It is ended after `seconds`, with exit code 124. `say` gets each event while it runs, in words; `environment` adds
    variables to this process's."""
    command = [str(program), "--model", str(model), "--text", str(text)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(int(value) if isinstance(value, bool) else value)]
    return follow(command, seconds, say, system.search(program.parent) | (environment or {}))


def follow(command: list[str], seconds: float | None, say: Callable[[str], None], environment: dict[str, str]) -> Run:
    """Runs a command that prints events, as `execute` does."""
    events: list[dict[str, Any]] = []

    def read(stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.startswith('{"event"') and line.rstrip("\n").endswith("}"):
                    event = json.loads(re.sub(r": (-?(?:nan|inf))\b", lambda word: f": {JSON[word[1]]}", line))
                    events.append(event)
                    say(", ".join(f"{key} {event[key]:.4g}" for key in ("step", "loss") if key in event))

    with tempfile.TemporaryFile("w+", errors="replace") as messages:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            errors="replace",
            env=os.environ | environment,
        )
        reader = threading.Thread(target=read, args=(process.stdout,))
        reader.start()
        late = ""
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code, late = 124, f"error: not done after {seconds:.0f} s\n"
        finally:
            process.kill()
            process.wait()
            reader.join()
        messages.seek(0)
        return Run(command, code, events, messages.read() + late)


def require(run: Run) -> Run:
    """The run, if it ended well; errors.Environment with its problem if not."""
    if run.exit_code:
        raise errors.Environment(f"{PROGRAM} failed: {run.problem}", hint=shlex.join(run.command))
    return run


def nmse(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    """sum((got - want)^2) / sum(want^2) in float64."""
    difference = got.astype(np.float64) - want
    return float(np.sum(difference**2) / np.sum(want.astype(np.float64) ** 2))


def tensors(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    """The F32 tensors of a GGUF file by name."""
    return {t.name: np.array(t.data, np.float32) for t in gguf.GGUFReader(file).tensors}


def gradient_errors(on: Path, off: Path) -> dict[str, float]:
    """NMSE of every parameter's gradient with flash attention on against off; sinks get one only with it on."""
    got, want = tensors(on), tensors(off)
    return {name: nmse(got[name], want[name]) for name in want if not name.endswith("attn_sinks.weight")}


# ---- what it needs: programs, text, model ----


def prepare(preset: str) -> Path:
    """The training program of a preset and the RPC server beside it, built as far as that is still to do."""
    try:
        return build.build(preset, PROGRAM, SERVER) / "bin" / system.program(PROGRAM)
    except build.SetupError as error:
        raise errors.Environment(str(error)) from None


def prepare_stock(root: Path = ROOT) -> Path:
    """The training program on upstream's pinned llama.cpp, without the patch, built with upstream's own CMake files,
    and upstream's RPC server beside it."""
    from ..patch import tree  # only a build needs its packages

    pin = tree.base()
    source, binary = root / "build/stock" / pin.folder, root / "build/stock/bin"
    if not source.exists():
        tree.unpack(tree.fetch(pin, root), pin.subdir, source)
    program = binary / "bin" / system.program(PROGRAM)
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_RPC=ON"]
    options += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP")]
    if shutil.which("ccache"):
        options += [f"-DCMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
    folders = [f"-I{source / folder}" for folder in ("include", "ggml/include", "src")]
    link = [f"-L{binary / 'bin'}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{binary / 'bin'}"]
    compiler = ["c++", "-std=c++17", "-O2", *folders]
    programs = {program: f"{root}/examples/train/{PROGRAM}.cpp", program.parent / SERVER: f"{source}/{SERVER_SOURCE}"}
    try:
        if not (program.parent / "libggml-rpc.so").exists():
            configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(binary), *options]
            build.step("configuration of stock llama.cpp", configure)
        build.compile_("build of stock llama.cpp", binary, "llama")
        for made, code in programs.items():
            if made == program or not made.exists():  # ours may have changed
                build.step(f"build of {made.name} for it", [*compiler, code, "-o", str(made), *link])
    except build.SetupError as error:
        raise errors.Environment(str(error)) from None
    return program


def corpus() -> str:
    """Python's own documentation as this interpreter carries it: about 120 000 tokens of English and code."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def vocabulary(root: Path = ROOT) -> Path:
    """The tokenizer that upstream's tree ships."""
    from ..patch import tree  # only a build needs its packages

    return root / "build/upstream" / tree.base().folder / VOCABULARY


# ---- the demonstration ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """train's options."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu)")
    shapes = f"shape of the model: {', '.join(tiny.SHAPES)} (default: llama)"
    parser.add_argument("--shape", choices=tiny.SHAPES, default="llama", metavar="NAME", help=shapes)
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="optimizer steps (default: 50)")
    parser.add_argument(
        "--ctx", type=int, default=256, metavar="N", help=f"context, a multiple of {CELLS} (default: 256)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="train on N tokens of the text, 0 = all (default: 7.5 contexts)"
    )
    parser.add_argument("--lr", type=float, default=SCHEDULE["lr"], help="AdamW's learning rate (default: 3e-4)")
    parser.add_argument(
        "--warmup", type=int, default=SCHEDULE["warmup"], metavar="N", help="steps up to that rate (default: 10)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this text")
    parser.add_argument("--rpc", metavar="HOST:PORT,...", help="put layers on these RPC servers, too (docs/devices.md)")
    parser.add_argument("--devices", metavar="NAME,...", help="devices of the layers, in their order (default: all)")
    parser.add_argument("--ngl", type=int, metavar="N", help="layers on devices, with the output (default: all)")
    parser.add_argument("--split-mode", choices=SPLIT_MODES, help="how devices share (default: layer)")
    parser.add_argument("--tensor-split", metavar="N,...", help="share of each device (default: by free memory)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the CPU backend (default: 2)")
    parser.add_argument("--stock", action="store_true", help="build unpatched llama.cpp, too, and try the model there")
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, help="form results of the forward pass again, in less memory; --bench: too"
    )
    parser.add_argument("--bench", action="store_true", help="instead: time and memory by context")
    parser.add_argument("--bf16", action="store_true", help="with --bench on CUDA: with products of BF16, too")
    parser.add_argument("--peer", choices=("torch",), help="with --bench on CUDA: the same steps in PyTorch as well")
    parser.add_argument("--libs", type=Path, metavar="DIR", help=f"folder of a built {PROGRAM} and its libraries")
    parser.add_argument(
        "--vocabulary", type=Path, metavar="GGUF", help="tokenizer (default: the one of the pinned tree)"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/train-demo", metavar="DIR", help="folder of the results"
    )
    parser.add_argument("--capture", type=Path, metavar="DIR", help="store two layers' attention mid-training")
    parser.add_argument(
        "--capture-rows", type=int, default=32, metavar="N", help="its last queries, 0 = all (default: 32)"
    )
    parser.add_argument(
        "--receipts", type=Path, default=ROOT / "receipts", metavar="DIR", help="where the receipt goes"
    )
    parser.add_argument("--no-receipt", action="store_true", help="write no receipt")
    parser.add_argument("--licence", default="unknown", help="licence of the text, for the captures")


def run(args: argparse.Namespace) -> int:
    """Train, compare, write; 0 when every check passed, 1 when one failed."""
    if args.ctx % CELLS:
        raise errors.Usage(f"--ctx {args.ctx}: must be a multiple of {CELLS}")
    if args.peer and not (args.bench and args.device == "cuda" and tiny.SHAPES[args.shape].arch == "llama"):
        raise errors.Usage("--peer torch: needs --bench --device cuda and a shape of architecture llama")
    absent = [name for name in torch_step.PACKAGES if args.peer and not importlib.util.find_spec(name)]
    if absent:
        raise errors.Environment(f"--peer torch: no {' and no '.join(absent)}", f"install it for {sys.executable}")
    if args.bf16 and not (args.bench and args.device == "cuda"):
        raise errors.Usage("--bf16: needs --bench --device cuda")
    if args.device == "cuda":
        cuda.require("CUDA0")
    args.out.mkdir(parents=True, exist_ok=True)
    program = args.libs / system.program(PROGRAM) if args.libs else prepare(args.device)
    if not program.is_file():
        hint = f"build it there, on a llama.cpp tree: cmake --build BUILD --target {PROGRAM}"
        raise errors.Environment(f"no {PROGRAM} in {program.parent}", hint)
    text = args.text
    if text is None:
        text = args.out / "text.txt"
        text.write_text(corpus(), encoding="utf-8")
    model = args.out / f"{args.shape}.gguf"
    tiny.write(model, tiny.SHAPES[args.shape], args.vocabulary or vocabulary())
    if placement(args) and not args.no_receipt:
        print("no receipt: one is of training on the CPU or on one CUDA device", file=sys.stderr)
        args.no_receipt = True
    where = placement(args) or {"device": "none" if args.device == "cpu" else "CUDA0"}
    common = {**where, "threads": args.threads}
    return bench(args, program, model, text, common) if args.bench else demo(args, program, model, text, common)


def placement(args: argparse.Namespace) -> dict[str, Any]:
    """The program's options that put layers on chosen devices, none where --device alone says where."""
    names = {"rpc": args.rpc, "device": args.devices, "ngl": args.ngl}
    names |= {"split_mode": args.split_mode, "tensor_split": args.tensor_split}
    return {name: value for name, value in names.items() if value is not None}


def layout(one: Run) -> list[str]:
    """What lies where, in lines: layers of each device, memory of each buffer type."""
    lines = []
    for e in one.all("layers"):
        parts = [f"layers {', '.join(map(str, e['layers']))}"] if e["layers"] else []
        parts += ["output"] if e["output"] else []
        lines.append(f"{e['device']} ({e['description']}): {'; '.join(parts)}")
    state = {e["buffer"]: e["bytes"] for e in one.all("state")}
    for e in one.all("memory"):
        if "buffer" in e:
            sizes = {"weights": e["model"], "optimizer": state.get(e["buffer"], 0), "compute": e["compute"]}
            words = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items())
            lines.append(f"{e['buffer']}: {words}")
    return lines


def demo(args: argparse.Namespace, program: Path, model: Path, text: Path, common: dict[str, Any]) -> int:
    """Train with flash attention off and on; check that they agree and that the checkpoint works elsewhere."""
    started = time.time()
    figures = pyplot()
    library = None if args.no_receipt else load(program.parent)
    tokens = int(7.5 * args.ctx) if args.tokens is None else args.tokens
    common |= {"ctx": args.ctx, "tokens": tokens, "lr": args.lr, "warmup": args.warmup}
    if args.recompute:
        os.environ["GGML_OPT_RECOMPUTE"] = args.recompute  # of all runs, and told by the receipt
    tuned = args.out / "tuned.gguf"
    runs: dict[str, Run] = {}
    for fa in ("off", "on"):
        keep = {"save": tuned} if fa == "on" else {}
        with build.Progress(f"{args.steps} steps with flash attention {fa}") as progress:
            one = execute(program, model, text, say=progress.say, steps=args.steps, fa=fa, **keep, **common)
            runs[fa] = require(one)
    changed = args.out / f"{args.shape}-changed.gguf"
    tiny.write(changed, tiny.SHAPES[args.shape], args.vocabulary or vocabulary(), noise=NOISE)
    with build.Progress(f"{args.steps} steps with it off, the weights changed by {NOISE}") as progress:
        one = execute(program, changed, text, say=progress.say, steps=args.steps, fa="off", **common)
        runs["control"] = require(one)
    watched = {
        fa: require(
            execute(program, model, text, steps=1, fa=fa, nodes=True, grads=args.out / f"gradients-{fa}.gguf", **common)
        )
        for fa in ("off", "on")
    }
    off, on = runs["off"], runs["on"]
    print(f"{'step':>4}  {'loss off':>10}  {'loss on':>10}  {'rel. error':>10}  {'s off':>8}  {'s on':>8}")
    errors_ = apart(off.losses, on.losses)
    for i, row in enumerate(zip(off.losses, on.losses, errors_, off.seconds, on.seconds, strict=True), 1):
        print("{:4d}  {:10.6f}  {:10.6f}  {:10.1e}  {:8.3f}  {:8.3f}".format(i, *row))
    for fa, one in (("off", off), ("on", on)):
        spread = f"{min(one.seconds):.3f} to {max(one.seconds):.3f}"
        print(
            f"flash attention {fa:3}  step {statistics.median(one.seconds):.3f} s ({spread}), "
            f"compute buffers {one.memory('compute') / 2**20:.1f} MiB, "
            f"peak of the process {one.memory('process') / 2**20:.0f} MiB"
            + (f", of the device {one.memory('peak') / 2**20:.0f} MiB" if args.device != "cpu" else "")
        )
    print(*layout(watched["on"]), f"kernel paths: {watched['on'].paths}", sep="\n")
    gradients = gradient_errors(args.out / "gradients-on.gguf", args.out / "gradients-off.gguf")
    losses = {name: one.losses for name, one in runs.items()}
    checks = [
        Check("flash attention was off, then on", float(off.flash_attn or not on.flash_attn), 0),
        *compare(losses, gradients, NOISE, LIMITS[args.device]),
    ]
    if args.ngl is None:  # else ggml's scheduler lends the neighbours of a device's layers to it
        checks.append(Check("attention nodes on another device than their layer", len(watched["on"].misplaced), 0))
    reader, at = (prepare_stock(), {}) if args.stock else (program, placement(args) or {"device": common["device"]})
    with build.Progress("perplexity of the saved model"):
        before, after = (
            require(execute(reader, one, text, perplexity=True, fa="off", ctx=args.ctx, tokens=tokens, **at)).perplexity
            for one in (model, tuned)
        )
    where = "stock llama.cpp" if args.stock else "llama.cpp without flash attention"
    checks.append(Check(f"perplexity of the saved model in {where}, {before:.1f} before", after, before))
    if args.capture:
        capture(args, program, model, text, common)
    for check in checks:
        print(f"{'ok' if check.passed else 'FAILED':6}  {check.name}: {check.found:.3g} (at most {check.limit:.3g})")
    events = {name: one.events for name, one in runs.items()}
    for fa, one in watched.items():
        events[fa] = events[fa] + one.all("ops") + one.all("node")
    record = {"checks": [{**dataclasses.asdict(c), "passed": c.passed} for c in checks], "gradients": gradients}
    (args.out / "train.json").write_text(json.dumps(record | {"runs": events}, indent=1) + "\n", encoding="utf-8")
    if figures:
        plot(figures, args.out, runs)
    if library:
        stamp(args, library, program, model, text, runs, gradients, checks, started)
    print(f"results in {args.out}", file=sys.stderr)
    return 0 if all(check.passed for check in checks) else 1


def load(directory: Path) -> ggml.Library:
    """The libraries that train, in this process as well, if they were built from this tree: for the receipt."""
    library = ggml.Library.open(directory)
    writing.check_source(library)
    return library


def stamp(
    args: argparse.Namespace,
    library: ggml.Library,
    program: Path,
    model: Path,
    text: Path,
    runs: dict[str, Run],
    gradients: dict[str, float],
    checks: list[Check],
    started: float,
) -> None:
    """Writes the receipt."""
    number = statement.number
    (start,) = runs["on"].all("start")
    train = {
        **trained(args, program, model, text),
        "schedule": {
            "steps": args.steps,
            "ctx": start["n_ctx"],
            "tokens": start["tokens"],
            "lr": number(args.lr),
            "warmup": args.warmup,
        },
        "noise": number(NOISE),
        "runs": {name: measured(one) for name, one in runs.items()},
        "gradients": {name: number(error) for name, error in gradients.items()},
        "checks": [
            {"name": c.name, "found": number(c.found), "limit": number(c.limit), "passed": c.passed} for c in checks
        ],
    }
    writing.save(
        args.receipts,
        statement.build(
            "train",
            library,
            [],
            seed=0,
            partial=False,
            started=started,
            finished=time.time(),
            case_files=[],
            exit_code=int(not all(check.passed for check in checks)),
            train=train,
        ),
    )


def trained(args: argparse.Namespace, program: Path, model: Path, text: Path) -> dict[str, Any]:
    """What was trained with what, as a receipt records it."""
    return {
        "device": args.device,
        "shape": {"name": args.shape, **dataclasses.asdict(tiny.SHAPES[args.shape])},
        "text_sha256": statement.sha256(text),
        "model_sha256": statement.sha256(model),
        "programs": [
            {"name": file.name, "digest": {"sha256": statement.sha256(file)}}
            for file in (program, next(system.libraries(program.parent, "llama")).resolve())
        ],
    }


def measured(one: Run) -> dict[str, Any]:
    """Losses, times and memory of a run, as a receipt records them."""
    return {
        "losses": [statement.number(loss) for loss in one.losses],
        "steps_ns": [round(seconds * 1e9) for seconds in one.seconds],
        "memory_bytes": {key: one.memory(key) for key in ("model", "context", "compute", "peak", "process")},
    }


def capture(args: argparse.Namespace, program: Path, model: Path, text: Path, common: dict[str, Any]) -> None:
    """Captures (docs/captures.md) of the first and the last layer's attention in the middle of the training."""
    args.capture.mkdir(parents=True, exist_ok=True)
    whole, rows = args.out / "capture.gguf", slice(-args.capture_rows if args.capture_rows else None, None)
    middle = max(args.steps // 2, 1)
    notes = {
        "model": f"{args.shape} shape, random weights at first",
        "text": text.name,
        "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest(),
        "licence": args.licence,
    }
    for layer in (0, tiny.SHAPES[args.shape].layers - 1):
        options = {"capture": whole, "capture_layer": layer, "capture_step": middle}
        require(execute(program, model, text, steps=middle, fa="on", **options, **common))
        given = capture_file.read(whole)
        inputs = given.inputs
        kept = dataclasses.replace(
            inputs,
            case=inputs.case.replace(nb=inputs.q[:, :, rows].shape[2]),
            q=inputs.q[:, :, rows],
            d=inputs.d[:, rows],
            mask=None if inputs.mask is None else inputs.mask[:, :, rows],
        )
        file = args.capture / f"llamacpp-{args.shape}-l{layer}.gguf"
        capture_file.write(file, capture_file.Capture(kept, notes=dict(given.notes) | notes))
        print(file)


def pyplot() -> Any:
    """matplotlib's pyplot, None where it is not installed. To be called before ggml's libraries are loaded, whose
    symbols are global: its extensions may end in a SystemError after them."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print(f"no plot: matplotlib is not installed\n  {build.pip('plot')}", file=sys.stderr)
        return None
    return pyplot


def plot(pyplot: Any, folder: Path, runs: dict[str, Run]) -> None:
    """The loss curves as losses.png and losses.svg."""
    figure, (top, bottom) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(3, 1))
    for fa, style in (("off", "-"), ("on", "--")):
        losses = runs[fa].losses
        top.plot(range(1, len(losses) + 1), losses, style, label=f"flash attention {fa}")
    for name, label in (("on", "on against off"), ("control", f"off, weights {NOISE} apart")):
        difference = apart(runs["off"].losses, runs[name].losses)
        bottom.semilogy(range(1, len(difference) + 1), [max(d, 1e-9) for d in difference], ".", label=label)
    top.set_ylabel("loss")
    top.legend()
    bottom.set_ylabel("relative error")
    bottom.legend()
    bottom.set_xlabel("step")
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"losses.{suffix}", dpi=120)
    pyplot.close(figure)


# ---- the benchmark ----


def torch_peers(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """The same contexts in PyTorch, in each of its modes, as a receipt records them."""
    words = next(int(t.shape[1]) for t in gguf.GGUFReader(model).tensors if t.name == "token_embd.weight")
    found = []
    for ctx in CONTEXTS[args.device]:
        for mode in torch_step.MODES:
            command = [sys.executable, "-m", torch_step.__name__, "--shape", args.shape, "--words", str(words)]
            command += ["--ctx", str(ctx), "--mode", mode, "--steps", str(bench_steps(args.device, ctx))]
            one = follow(command, BOX, lambda _: None, system.search(ROOT, "PYTHONPATH"))
            versions = {name: e[name] for e in one.all("start") for name in ("torch", "transformers")}
            times = one.seconds[1:] or [float("nan")]
            print(
                f"{ctx:7}  PyTorch {mode}  {statistics.median(times):9.4f}  {min(times):.4f} .. {max(times):.4f}  "
                f"{one.memory('peak') / 2**20:16.0f}  {one.problem}",
                flush=True,
            )
            ended = {"exit_code": one.exit_code, "problem": one.problem, "versions": versions}
            measures = {key: value for key, value in measured(one).items() if key != "memory_bytes"}
            memory = {"peak": one.memory("peak")}
            found.append({"name": "torch", "mode": mode, "ctx": ctx, **ended, **measures, "memory_bytes": memory})
    return found


BOX = 150.0
"""Seconds that one run of the benchmark may take."""


def bench(args: argparse.Namespace, program: Path, model: Path, text: Path, common: dict[str, Any]) -> int:
    """Step time and memory by context, flash attention off and on; on a GPU the longest context of a 24 GiB card."""
    started = time.time()
    library = None if args.no_receipt else load(program.parent)
    timed: list[dict[str, Any]] = []
    record: dict[str, Any] = {"device": args.device, "shape": args.shape, "runs": [], "longest": {}}

    def attempt(environment: dict[str, str] | None = None, **options: Any) -> Run:
        # training reads K and V of the batch, never the cache
        given = {"type_k": "f16", "type_v": "f16", **options, **common}
        one = execute(program, model, text, BOX, environment=environment, **given)
        told = {"exit_code": one.exit_code, "problem": one.problem, "events": one.events}
        record["runs"].append({"environment": environment or {}, **options, **told})
        (args.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return one

    kinds: dict[str, dict[str, Any]] = {"off": {"fa": "off"}, "on": {"fa": "on"}}
    if args.recompute:
        kinds[args.recompute] = {"fa": "on", "recompute": args.recompute}
    if args.bf16:
        kinds["bf16"] = {"fa": "on", "environment": BF16}
    variants: list[dict[str, Any]] = []
    print(f"context  FA, with     {'step, s':>9}  {'spread':>16}  {'compute, MiB':>12}  {'device peak, MiB':>16}  loss")
    for ctx in CONTEXTS[args.device]:
        for kind, options in kinds.items():
            one = attempt(steps=bench_steps(args.device, ctx), ctx=ctx, **options)
            ended = {"exit_code": one.exit_code, "problem": one.problem, **measured(one)}
            if kind in ("off", "on"):
                timed.append({"ctx": ctx, "flash_attn": kind == "on", **ended})
            else:
                variants.append({"name": kind, "ctx": ctx, **ended})
            times = one.seconds[1:] or [float("nan")]
            print(
                f"{ctx:7}  {kind:11}  {statistics.median(times):9.4f}  {min(times):.4f} .. {max(times):.4f}  "
                f"{one.memory('compute') / 2**20:12.0f}  {one.memory('peak') / 2**20:16.0f}  "
                f"{one.problem or f'{one.losses[-1]:.6f}'}",
                flush=True,
            )
    peers = torch_peers(args, model) if args.peer else []
    record["peers"] = peers
    placed = attempt(steps=1, fa="on", ctx=CONTEXTS[args.device][1], nodes=True)
    if args.device != "cpu":
        on_cpu = [f"{e['op']} x{e['nodes']}" for e in placed.all("ops") if e["backend"] == "CPU" and e["op"] != "NONE"]
        print(f"nodes on the CPU: {', '.join(on_cpu) or 'none'}")
    print(f"attention nodes on another device than their layer: {len(placed.misplaced)} of {len(placed.all('node'))}")
    print(f"kernel paths: {placed.paths}")
    for kind in [kind for kind in kinds if kind != "bf16"] if args.device != "cpu" else ():
        ctx = 512
        while ctx < 1 << 18 and attempt(steps=1, ctx=ctx, memory=CARD, **kinds[kind]).exit_code == 0:
            record["longest"][kind] = ctx
            ctx *= 2
        longest = record["longest"].get(kind, "none")
        print(f"longest of 512, 1024, 2048, ... on {CARD >> 30} GiB, flash attention {kind}: {longest}")
    (args.out / "bench.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    # a context that does not fit is a result
    failed = any(one["exit_code"] and "out of memory" not in one["problem"] for one in timed + variants + peers)
    plain = {one["ctx"]: one["losses"] for one in timed if one["flash_attn"] and not one["exit_code"]}
    for again in variants:
        if again["name"] in RECOMPUTE and again["losses"] != plain.get(again["ctx"], again["losses"]):
            print(f"FAILED  context {again['ctx']}: other losses where results are formed again")
            failed = True
    if library:
        longest = {"card_bytes": CARD, **record["longest"]} if record["longest"] else None
        found = {**trained(args, program, model, text), "runs": timed, "longest": longest}
        if variants:
            found["variants"] = variants
        if args.peer:
            found["peers"] = peers
        writing.save(
            args.receipts,
            statement.build(
                "train",
                library,
                [],
                seed=0,
                partial=False,
                started=started,
                finished=time.time(),
                case_files=[],
                exit_code=int(failed),
                bench=found,
            ),
        )
    return int(failed)
