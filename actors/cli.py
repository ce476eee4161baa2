"""The command line. Heavy libraries are imported by the commands that need them, so that the others answer at once.

Exit status: 0 done, 2 refused before the start, 1 failed on the way (the last line says what to do), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

if TYPE_CHECKING:
    from rl.config import Settings

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
CHECKED_ROWS = 1000

app = typer.Typer(
    name="parkrl",
    help="Reinforcement learning of language models on PyTorch, Ray and Kubernetes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or builtin:quickstart.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Another value for one setting; may be given many times."),
]


def main() -> None:
    """The entry point of the command ``parkrl``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a locale that cannot spell a path must not end the run
    app()


def say_error(text: str) -> None:
    """Plain text on standard error, red on a terminal. Nothing in ``text`` is read as markup."""
    red = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[31m{text}\x1b[0m" if red else text, file=sys.stderr, flush=True)


@contextmanager
def _exits(advice: str) -> Iterator[None]:
    """Turns what went wrong into an exit status; ``advice`` is the last line when it went wrong on the way."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        say_error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except ValueError as error:
        say_error(f"refused: {error}")
        raise typer.Exit(REFUSED) from None
    except Exception as error:  # the outermost frame: whatever it was, the last line says what to do
        traceback.print_exc()
        say_error(f"failed: {type(error).__name__}: {error}\n{advice}")
        raise typer.Exit(FAILED) from error


@app.command()
def train(
    config: ConfigArgument,
    overrides: SetOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run folder's newest good checkpoint.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the summary.")] = False,
) -> None:
    """Train; ends with a summary. Ctrl-C writes a checkpoint first."""
    with _exits(f"see the lines above; parkrl train {config} --resume goes on from the last checkpoint"):
        settings = _load(config, overrides)
        from actors.check import file_problems

        _refuse(config, file_problems(settings))
        from actors import commands

        status = commands.train(settings, resume=resume, quiet=quiet)
    raise typer.Exit(status)


@app.command()
def check(config: ConfigArgument, overrides: SetOption = None) -> None:
    """Look at settings, files and the first rows, in seconds and without starting anything."""
    with _exits("see the lines above; nothing was started"):
        settings = _load(config, overrides)
        from actors.check import file_problems

        problems = file_problems(settings)
        rows = {}
        for which in ("train", "eval") if settings.data.eval is not None else ("train",):
            try:
                rows[which] = _check_rows(settings, which)
            except ValueError as error:
                problems.append(f"data.{which}: {error}")
        _refuse(config, problems)
    for which, line in rows.items():
        print(f"data.{which}: {line}")
    samples = settings.rollout.prompts_per_step * settings.algorithm.group_size
    print(
        f"one step: {settings.rollout.prompts_per_step} prompts x {settings.algorithm.group_size} samples = "
        f"{samples} samples, in updates of {samples // settings.learner.updates_per_batch}"
    )
    print(f"{config}: good; parkrl train {config} starts it")


def _check_rows(settings: Settings, which: Literal["train", "eval"]) -> str:
    from rl.data import check_rows

    seen = check_rows(settings, which, limit=CHECKED_ROWS)
    source = settings.data.train if which == "train" else settings.data.eval
    first = "the first " if seen.rows == CHECKED_ROWS else ""
    return f"{source}: {first}{seen.rows} rows are good; columns: {', '.join(seen.columns)}"


@app.command("eval")
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|CONFIG", help="A run folder (its newest model) or a config.")],
    overrides: SetOption = None,
) -> None:
    """Measure accuracy on held-out prompts, without training."""
    with _exits("see the lines above; nothing was changed"):
        from actors import commands

        status = commands.evaluate(target, overrides or [])
    raise typer.Exit(status)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
) -> None:
    """Write the newest model of a run as a Hugging Face folder."""
    with _exits(f"see the lines above; remove {out} before trying again"):
        from actors import commands

        written = commands.export(run, out)
    print(f"{written}: a Hugging Face model folder")


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write.")] = Path(".")) -> None:
    """Write a commented configuration, data and a reward function that run as they are."""
    with _exits(f"see the lines above; is {folder} writable?"):
        from actors.starter import CONFIG, write_starter

        for path in write_starter(folder):
            print(f"wrote {path}")
    print(f"next: parkrl train {folder / CONFIG}")


@app.command()
def tasks() -> None:
    """List the built-in tasks, as data.train: builtin:NAME takes them."""
    from rl.tasks import TASKS

    for name, task in sorted(TASKS.items()):
        summary = (sys.modules[task.__module__].__doc__ or task.__doc__ or "").strip().splitlines()[0]
        print(f"builtin:{name}  {summary}")
    print("reasoning_gym:NAME  any task of the library reasoning-gym")


@app.command()
def algorithms() -> None:
    """List the algorithms, as algorithm.name takes them."""
    from rl.config import Algorithm

    field = Algorithm.model_fields["name"]
    for name in get_args(field.annotation):
        print(f"{name}  {_ALGORITHMS[name]}")


_ALGORITHMS = {
    "grpo": "group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300), token-mean loss, clipped ratio",
}


def _load(config: str, overrides: list[str] | None) -> Settings:
    from rl.settings_file import load

    return load(config, overrides or [])


def _refuse(config: str, problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError("\n  ".join([f"{config}: {count}", *problems]))


if __name__ == "__main__":
    main()
