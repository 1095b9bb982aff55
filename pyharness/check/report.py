"""How the oracle's results look: console, JSON, CSV and Markdown on stdout; progress on stderr."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..base import commands
from ..case.cases import CHECKED, Case
from ..case.result import CaseResult, PartResult

SCHEMA_VERSION = "1.0"
COLOURS = {"ok": "green", "failed": "bold red", "unsupported": "yellow", "skipped": "yellow"}
HEARTBEAT = 20.0  # seconds between progress lines where there is no terminal


def console(stderr: bool = False) -> Console:
    """A Console on stdout or stderr. A terminal gets one only: a second one would write over the first one's bar."""
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, color_system=colours, highlight=False, soft_wrap=True, markup=False, emoji=False)


class _Narrow(ConsoleRenderable):
    """What leaves the last columns free: there the terminal echoes Ctrl-C, and a line that wraps is not erased."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return console.render(self.inner, options.update_width(options.max_width - len("^C^C^C")))


class _Bars(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        return map(_Narrow, super().get_renderables())


class Reporter:
    """Reports a run as it goes. A context manager: the progress bar lives inside."""

    def __init__(self, output: str, total: int, seed: int, verb: str = "oracle") -> None:
        self.output = output
        self.verb = verb
        self.total = total
        self.seed = seed
        self.out = console()
        self.bars = self.out if sys.stdout.isatty() else console(stderr=True)
        self.counts: Counter[str] = Counter()
        self.case_now: Case | None = None
        self.beat = time.monotonic()
        self.csv: Any = None
        self.progress = _Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.bars,
            disable=not sys.stderr.isatty() or self.bars.is_dumb_terminal,
            redirect_stdout=sys.stdout.isatty(),
            transient=True,
        )
        self.bar = self.progress.add_task(_counts(self.counts), total=total)
        self.inner = self.progress.add_task("reference", total=1.0, visible=False)

    def __enter__(self) -> Reporter:
        self.progress.start()
        if self.output == "csv":
            self.csv = csv.writer(sys.stdout, lineterminator="\n")
            self.csv.writerow(CSV)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def start(self, case: Case) -> None:
        """A case begins."""
        self.case_now = case
        self.progress.update(self.inner, completed=0, visible=False)

    def fraction(self, done: float) -> None:
        """How much of the current case's reference is done, 0 to 1."""
        self.progress.update(self.inner, completed=done, visible=True)
        if self.progress.disable and time.monotonic() - self.beat > HEARTBEAT:
            self.beat = time.monotonic()
            print(
                f"{sum(self.counts.values())}/{self.total} {_counts(self.counts)}, {done:.0%} of {self.case_now}",
                file=sys.stderr,
            )

    def case(self, result: CaseResult) -> None:
        """A case has ended."""
        self.counts[result.status] += 1
        self.progress.update(self.bar, advance=1, description=_counts(self.counts))
        if self.output == "console":
            self._line(result)
        elif self.output == "csv":
            for row in csv_rows(result):
                self.csv.writerow(row)

    def finish(self, results: list[CaseResult], total: int) -> None:
        """The summary, the failing list last."""
        self.progress.stop()
        if self.output == "json":
            document = {"schema_version": SCHEMA_VERSION, "seed": self.seed, "results": [to_json(r) for r in results]}
            print(json.dumps(document, indent=1))
        elif self.output == "md":
            print(markdown(results))
        elif self.output == "console":
            self._summary(results, total)
        if self.output != "console":
            print(f"{len(results)} of {total}: {_counts(self.counts)}", file=sys.stderr)

    def flush(self) -> None:
        """Before the process ends without unwinding."""
        self.progress.stop()
        sys.stdout.flush()
        sys.stderr.flush()

    def _line(self, result: CaseResult) -> None:
        text = Text(f"{result.status:<11} ", style=COLOURS[result.status])
        figures = " ".join(f"{part} {_short(max(p.nmse, p.worst_head_nmse))}" for part, p in result.parts.items())
        text.append(f"{result.device} {result.case}", style="default")
        self.out.print(text)
        if result.status == "ok":
            forward = f"{result.forward.by} forward, " if result.forward else ""
            time = f" {result.seconds * 1e3:.2f} ms" if result.seconds else ""
            self.out.print(f"{'':<11}  {figures}  {forward}{result.path_and_units()}{time}")
        elif result.status == "failed":
            self.out.print(failure(result, self.seed, self.verb))
        else:
            self.out.print(f"{'':<11}  {result.reason}")

    def _summary(self, results: list[CaseResult], total: int) -> None:
        self.out.print()
        if len(results) < total:
            self.out.print(f"stopped after {len(results)} of {total} cases", style="bold red")
        for part in CHECKED:
            measured = [(max(r.parts[part].nmse, r.parts[part].worst_head_nmse), r) for r in results if part in r.parts]
            if measured:
                worst, where = max(measured, key=lambda item: item[0])
                self.out.print(
                    f"{part:<7} worst NMSE {_short(worst)}, limit {where.parts[part].limit:g}, of {len(measured)}: "
                    f"{where.case}"
                )
        own = [(max(r.forward.nmse, r.forward.worst_head_nmse), r) for r in results if r.forward and "o" not in r.parts]
        if own:
            worst, where = max(own, key=lambda item: item[0])
            self.out.print(f"o of ggml's own forward: worst NMSE {_short(worst)}, of {len(own)}: {where.case}")
        reasons = Counter((r.device, r.reason) for r in results if r.status in ("unsupported", "skipped"))
        for (device, reason), count in reasons.most_common():
            self.out.print(f"{device}: {count} not run: {reason}", style="yellow")
        failed = [r for r in results if r.status == "failed"]
        cases = f"{len(results)} case{'s' * (len(results) != 1)}"
        self.out.print(f"{cases}: {_counts(self.counts)}", style="bold red" if failed else "bold green")
        for result in failed:
            self.out.print(f"  failed {result.device} {result.case}: {result.reason}", style="red")


CSV = (
    "device", "case", "seed", "status", "reason", "path", "seconds", "part", "nmse", "worst_head", "worst_head_nmse",
    "worst_row", "worst_row_nmse", "worst_index", "got", "want", "limit", "passed", "why", "digest",
)  # fmt: skip


def csv_rows(result: CaseResult) -> list[list[Any]]:
    """A row for each part of a result; one with empty part columns if it has none."""
    head = [
        result.device,
        str(result.case),
        result.seed,
        result.status,
        result.reason,
        result.path,
        repr(result.seconds),
    ]
    if not result.parts:
        return [head + [""] * (len(CSV) - len(head))]
    rows = []
    for name, part in result.parts.items():
        fields = dataclasses.astuple(part)
        rows.append(
            [
                *head,
                *(" ".join(map(str, f)) if isinstance(f, tuple) else f for f in fields),
                result.digests.get(name, ""),
            ]
        )
    return rows


def to_json(result: CaseResult) -> dict[str, Any]:
    """A result as JSON values; floats that JSON lacks become strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    fields["case"] = str(result.case)
    fields["parts"] = {name: dataclasses.asdict(part) for name, part in result.parts.items()}
    fields["forward"] = dataclasses.asdict(result.forward) if result.forward else None
    return dict(plain(fields))


def markdown(results: list[CaseResult]) -> str:
    """A table with a row for each case and a column for each part's worst NMSE."""
    lines = ["| case | device | path | status | " + " | ".join(CHECKED) + " |", "|---" * (4 + len(CHECKED)) + "|"]
    for r in results:
        cells = [_short(max(r.parts[p].nmse, r.parts[p].worst_head_nmse)) if p in r.parts else "" for p in CHECKED]
        status = r.status if r.status == "ok" else f"{r.status}: {r.reason}"
        lines.append(f"| `{r.case}` | {r.device} | {r.path} | {status} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def failure(result: CaseResult, seed: int, verb: str = "oracle") -> str:
    """What went wrong and one line to paste that shows it again."""
    lines = [f"  {result.reason}"]
    lines += [f"  {part_failure(part)}" for part in result.parts.values() if not part.passed]
    lines.append(f"  seed {result.seed} (--seed {seed})")
    graph = f" --graph {result.path}" if verb == "grad" else ""
    lines.append(f"  {replay(result.case, result.device, seed, verb)}{graph}")
    return "\n".join(lines)


def part_failure(part: PartResult) -> str:
    """A failed part in a line."""
    return (
        f"{part.part}: NMSE {_short(part.nmse)}, head {part.worst_head} {_short(part.worst_head_nmse)}, "
        f"row {part.worst_row} {_short(part.worst_row_nmse)}, limit {part.limit:g}{part.why and ': ' + part.why}; "
        f"worst at ({part.place()}): got {part.got:.9g}, want {part.want:.9g}"
    )


def replay(case: Case, device: str, seed: int, verb: str = "oracle") -> str:
    """The command that runs one case again."""
    return f"{commands.python()} -m pyharness {verb} -b {device} --seed {seed} -o {shlex.quote(str(case))}"


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[state]} {state}" for state in COLOURS)
