"""What is shown, on a terminal and off it; the numbers of the summary against sums made by hand."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl.progress import Progress, Summary, duration
from rl.types import StepResult

REPOSITORY = Path(__file__).parents[2]

ROWS: list[dict[str, float]] = [
    {"step": 0, "eval/accuracy": 0.25, "eval/sampled_accuracy": 0.125, "time/eval": 2.0},
    {
        "step": 1,
        "reward/mean": 0.5,
        "time/step": 4.0,
        "time/generate": 2.5,
        "time/train": 1.0,
        "tokens/generated": 1000,
        "tokens/trained": 900,
    },
    {
        "step": 2,
        "reward/mean": 0.625,
        "eval/accuracy": 0.75,
        "eval/sampled_accuracy": 0.5,
        "time/step": 4.0,  # the evaluation is not in it
        "time/generate": 2.5,
        "time/train": 1.5,
        "time/eval": 2.0,
        "tokens/generated": 2000,
        "tokens/trained": 1700,
    },
]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def result(step: int, **metrics: float) -> StepResult:
    return StepResult(step, step, {name.replace("__", "/"): value for name, value in metrics.items()})


def plain(total: int = 10, quiet: bool = False, start_step: int = 0) -> tuple[Progress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return Progress(total, quiet, stream, start_step, clock), stream, clock


def test_one_plain_line_per_step() -> None:
    progress, stream, clock = plain()
    progress.step(result(0, eval__accuracy=0.25))
    clock.now += 3.0
    progress.phase("generate")
    progress.step(result(1, reward__mean=0.5))
    clock.now += 5.0
    progress.step(result(2, reward__mean=0.75, eval__accuracy=0.5))
    assert stream.getvalue().splitlines() == [
        "step 0/10  accuracy 0.250",
        "step 1/10  reward 0.500  accuracy 0.250  3.0 s  eta 27 s",  # 9 steps of 3 s
        "step 2/10  reward 0.750  accuracy 0.500  5.0 s  eta 32 s",  # 8 steps of (3 + 5) / 2 s
    ]


def test_eta_by_hand() -> None:
    progress, stream, clock = plain(total=100, start_step=50)
    assert progress.eta_seconds(50) is None
    progress.step(result(51, time__step=2.0))  # the first one of a resumed run: its own measure
    assert progress.eta_seconds(51) == 49 * 2.0
    for step in range(52, 72):
        clock.now += 4.0
        progress.step(result(step))
    assert progress.eta_seconds(71) == 29 * 4.0  # the last 20 only
    clock.now += 1000.0  # one slow step hardly moves the median
    progress.step(result(72))
    assert progress.eta_seconds(72) == 28 * 4.0
    assert stream.getvalue().splitlines()[-1] == "step 72/100  1000.0 s  eta 1 min 52 s"
    progress.step(result(100))
    assert "eta" not in stream.getvalue().splitlines()[-1]


def test_text_of_the_users_is_no_markup_and_is_never_folded() -> None:
    progress, stream, _ = plain()
    texts = ["[bold]no[/bold] [/] :smile: [link=x]", "x" * 500, "two\nlines", "half \ud800 pair"]
    for text in texts:
        progress.note(text)
    progress.warn("[red]careful[/red]")
    *shown, pair, warning = stream.getvalue().splitlines()
    assert shown == [texts[0], texts[1], "two", "lines"]
    assert pair == "half \\ud800 pair"
    assert warning == "warning: [red]careful[/red]"


def test_quiet_says_warnings_only() -> None:
    progress, stream, _ = plain(quiet=True)
    progress.step(result(1, reward__mean=0.5))
    progress.note("hello")
    progress.phase("train")
    progress.summary(Summary.of(ROWS, {"run folder": "runs/a"}))
    assert stream.getvalue() == ""
    progress.warn("grader died")
    assert stream.getvalue() == "warning: grader died\n"


def test_summary_by_hand() -> None:
    summary = Summary.of(ROWS, {"metrics": Path("runs/a/metrics.jsonl")}, 12.5, 3_500_000_000)
    assert summary.steps == 2  # row 0 is the evaluation before the first step
    assert summary.seconds == 2.0 + 4.0 + 6.0
    assert summary.changes == {
        "accuracy (greedy)": (0.25, 0.75),
        "accuracy (sampled)": (0.125, 0.5),
        "reward": (0.5, 0.625),
    }
    assert summary.phases == {"eval": 4.0, "generate": 5.0, "train": 2.5}
    assert summary.tokens == {"generated": 3000, "trained": 2600}
    assert summary.files == {"metrics": "runs/a/metrics.jsonl"}
    assert summary.startup_seconds == 12.5 and summary.peak_memory_bytes == 3_500_000_000


def test_summary_of_what_was_not_measured() -> None:
    summary = Summary.of([{"step": 1, "time/train": 3.0}])
    assert summary.changes == {} and summary.tokens == {} and summary.seconds == 3.0
    progress, stream, _ = plain()
    progress.summary(summary)
    assert "accuracy" not in stream.getvalue() and "nan" not in stream.getvalue()
    progress.summary(Summary.of([]))  # stopped before its first step


def test_summary_is_shown() -> None:
    progress, stream, _ = plain()
    long = "runs/[my run]/" + "folder/" * 40
    progress.summary(Summary.of(ROWS, {"run folder": long, "checkpoints": "runs/a/checkpoints"}, 72.0, 3_500_000_000))
    cells = [re.findall(r"[^\s│┃|]+(?: [^\s│┃|]+)*", line) for line in stream.getvalue().splitlines()]
    for row in (
        ["2 steps in 12 s"],
        ["accuracy (greedy)", "0.250", "0.750"],
        ["accuracy (sampled)", "0.125", "0.500"],
        ["reward", "0.500", "0.625"],
        ["tokens generated", "3,000"],
        ["tokens trained", "2,600"],
        ["start-up", "1 min 12 s"],
        ["peak memory", "3.50 GB"],
        ["generate", "5.0", "41.7 %"],  # 5 / 12
        ["eval", "4.0", "33.3 %"],
        ["train", "2.5", "20.8 %"],
        ["other", "0.5", "4.2 %"],
        ["run folder:", long],  # whole, so that it can be copied
        ["checkpoints:", "runs/a/checkpoints"],
    ):
        assert row in [[re.sub(r"\s+", " ", cell) for cell in line] for line in cells] or " ".join(row) in [
            re.sub(r"\s+", " ", line) for line in stream.getvalue().splitlines()
        ], row
    order = [line[0] for line in cells if line and line[0] in ("generate", "eval", "train", "other")]
    assert order == ["generate", "eval", "train", "other"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


SHOW = """
import sys
from rl.progress import Progress, Summary
from rl.types import StepResult
with Progress(3, quiet="quiet" in sys.argv) as progress:
    progress.note("Gr\\xf6\\xdfe \\u2192 [x]")
    progress.step(StepResult(1, 1, {"reward/mean": 0.5, "eval/accuracy": 0.25, "time/step": 2.0}))
    progress.phase("train[er]")
    progress.warn("careful")
    progress.step(StepResult(2, 2, {"reward/mean": 0.75, "time/step": 2.0}))
    progress.summary(Summary.of([{"step": 1, "eval/accuracy": 0.25, "time/train": 2.0}]))
"""


def test_works_in_a_locale_without_utf8() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, cwd=REPOSITORY, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert text.splitlines()[0] == r"Gr\xf6\xdfe \u2192 [x]"
    assert "step 1/3  reward 0.500  accuracy 0.250  2.0 s  eta 4 s" in text
    assert "accuracy (greedy)" in text


def in_a_terminal(*arguments: str) -> str:
    """What a real (pseudo) terminal receives."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW, *arguments],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=REPOSITORY,
        env=environment,
    )
    os.close(terminal)
    received = b""
    try:
        while chunk := os.read(controller, 65536):
            received += chunk
    except OSError:  # Linux says EIO when the other side is closed
        pass
    finally:
        os.close(controller)
        assert process.wait(timeout=60) == 0, received
    return received.decode("utf-8")


def test_a_live_bar_on_a_terminal() -> None:
    text = in_a_terminal()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "Größe → [x]" in shown and "warning: careful" in shown
    assert "2/3" in shown and "reward 0.750  accuracy 0.250" in shown
    assert "step 1/3  reward" not in shown  # no plain lines beside the bar
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l") == 1  # the cursor is given back


def test_quiet_on_a_terminal() -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", in_a_terminal("quiet"))
    assert shown.split("\r\n") == ["warning: careful", ""]
