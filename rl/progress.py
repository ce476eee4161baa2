"""What the person at the terminal sees: a live bar (or plain lines), warnings, and the summary at the end."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from rl.types import StepResult

_RECENT = 20  # steps whose median duration the ETA is made of: one slow step (an evaluation) hardly moves it
_ACCURACIES = {"accuracy (greedy)": "eval/accuracy", "accuracy (sampled)": "eval/sampled_accuracy"}


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run in numbers. ``changes``: title -> (first value, last value); ``phases``: name -> seconds."""

    steps: int
    seconds: float  # steps and evaluations, start-up excluded
    changes: Mapping[str, tuple[float, float]]
    phases: Mapping[str, float]
    tokens: Mapping[str, float]  # "generated", "trained"
    files: Mapping[str, str] = field(default_factory=dict)
    startup_seconds: float | None = None
    peak_memory_bytes: int | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, float]],
        files: Mapping[str, object] | None = None,
        startup_seconds: float | None = None,
        peak_memory_bytes: int | None = None,
    ) -> Summary:
        """From all rows of metrics.jsonl, so that a resumed run is summed up whole. Row 0, if any, is no step."""
        changes = {}
        for title, name in {**_ACCURACIES, "reward": "reward/mean"}.items():
            values = [row[name] for row in rows if name in row]
            if values:
                changes[title] = (values[0], values[-1])
        phases: dict[str, float] = {}
        for row in rows:
            for name, value in row.items():
                if name.startswith("time/") and name != "time/step":
                    phases[name.removeprefix("time/")] = phases.get(name.removeprefix("time/"), 0.0) + value
        seconds = sum(_seconds(row) for row in rows)
        names = [name for name in ("generated", "trained") if any(f"tokens/{name}" in row for row in rows)]
        return cls(
            steps=sum(row["step"] > 0 for row in rows),
            seconds=seconds,
            changes=changes,
            phases=phases,
            tokens={name: sum(row.get(f"tokens/{name}", 0.0) for row in rows) for name in names},
            files={title: str(place) for title, place in (files or {}).items()},
            startup_seconds=startup_seconds,
            peak_memory_bytes=peak_memory_bytes,
        )


class Progress:
    """Shows a run. On a terminal a live bar, elsewhere one plain line per step, with ``quiet`` only warnings.

    ``start_step`` is the last step that an earlier part of a resumed run has made. Text of the user's is shown as it
    is: [brackets] are no markup, and what the stream's encoding lacks is escaped. Use as a context manager, or call
    ``close``, so that the terminal gets its cursor back.
    """

    def __init__(
        self,
        total_steps: int,
        quiet: bool = False,
        stream: TextIO | None = None,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        self._total, self._quiet, self._clock = total_steps, quiet, clock
        self._console = Console(file=self._stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._last_time: float | None = None
        self._accuracy: float | None = None
        self._bar: Bar | None = None
        if self._console.is_terminal and not quiet:
            columns = (
                TextColumn("step", markup=False),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Bar(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=total_steps, completed=start_step)
            self._status, self._phase = "", ""
            self._bar.start()

    def step(self, result: StepResult) -> None:
        """Shows a finished step (the evaluation before the first one is step 0)."""
        now = self._clock()
        spent = now - self._last_time if self._last_time is not None else result.metrics.get("time/step")
        self._last_time = now
        if spent is not None and result.step > 0:
            self._durations.append(spent)
        self._accuracy = result.metrics.get("eval/accuracy", self._accuracy)
        status = self._describe(result, spent)
        if self._bar is not None:
            self._status, self._phase = status, ""
            self._bar.update(self._task, completed=result.step, description=self._clean(status))
        elif not self._quiet:
            self._print(f"step {result.step}/{self._total}  {status}")

    def phase(self, name: str) -> None:
        """Shows what is going on inside a step; only the live bar has room for it."""
        if self._bar is not None:
            self._phase = name
            text = "  ".join(part for part in (self._status, self._phase) if part)
            self._bar.update(self._task, description=self._clean(text))

    def note(self, text: str) -> None:
        """One line above the bar; silent with ``quiet``."""
        if not self._quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """One line above the bar, with ``quiet`` too."""
        self._print(f"warning: {text}", style="yellow")

    def eta_seconds(self, step: int) -> float | None:
        """Seconds to go after ``step``: steps left x the median of the last 20 durations; None before the first."""
        if not self._durations:
            return None
        return (self._total - step) * statistics.median(self._durations)

    def summary(self, summary: Summary) -> None:
        """Ends the bar and prints the final tables; silent with ``quiet``."""
        self.close()
        if self._quiet:
            return
        self._print_renderable(self._results(summary))
        if summary.phases:
            self._print_renderable(self._times(summary))
        for title, place in summary.files.items():  # no table: a path is never cut or folded, so it can be copied
            self._print(f"{title + ':':<14} {place}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, result: StepResult, spent: float | None) -> str:
        parts = []
        if "reward/mean" in result.metrics:
            parts.append(f"reward {result.metrics['reward/mean']:.3f}")
        if self._accuracy is not None:
            parts.append(f"accuracy {self._accuracy:.3f}")
        if spent is not None and result.step > 0:
            parts.append(f"{spent:.1f} s")
        eta = self.eta_seconds(result.step)
        if eta is not None and result.step < self._total:
            parts.append(f"eta {duration(eta)}")
        return "  ".join(parts)

    def _results(self, summary: Summary) -> Table:
        table = Table(title=f"{summary.steps} steps in {duration(summary.seconds)}", title_justify="left")
        for heading in ("", "start", "end"):
            table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
        for title, (first, last) in summary.changes.items():
            table.add_row(title, f"{first:.3f}", f"{last:.3f}")
        for name, count in summary.tokens.items():
            table.add_row(f"tokens {name}", "", f"{count:,.0f}")
        if summary.startup_seconds is not None:
            table.add_row("start-up", "", duration(summary.startup_seconds))
        if summary.peak_memory_bytes is not None:
            table.add_row("peak memory", "", f"{summary.peak_memory_bytes / 1e9:.2f} GB")
        return table

    def _times(self, summary: Summary) -> Table:
        table = Table(title="time per phase", title_justify="left")
        for heading in ("phase", "seconds", "share"):
            table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
        rest = summary.seconds - sum(summary.phases.values())
        phases = dict(sorted(summary.phases.items(), key=lambda item: -item[1]))
        if rest > 0.0005 * summary.seconds:  # what no phase accounts for is shown, down to what 0.1 % can show
            phases["other"] = rest
        for name, seconds in phases.items():
            share = f"{100 * seconds / summary.seconds:.1f} %" if summary.seconds > 0 else ""
            table.add_row(Text(self._clean(name)), f"{seconds:.1f}", share)
        return table

    def _print(self, text: str, style: str = "") -> None:
        self._print_renderable(Text(self._clean(text), style=style))

    def _print_renderable(self, what: RenderableType) -> None:
        self._console.print(what, crop=False, no_wrap=isinstance(what, Text), overflow="ignore")
        self._stream.flush()

    def _clean(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float) -> str:
    """Time for people.

    >>> duration(42.4), duration(187), duration(7260)
    ('42 s', '3 min 07 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _seconds(row: Mapping[str, float]) -> float:
    """A whole row: the step and its evaluation, which time/step leaves out; without that, its phases."""
    if "time/step" in row:
        return row["time/step"] + row.get("time/eval", 0.0)
    return sum(value for name, value in row.items() if name.startswith("time/"))
