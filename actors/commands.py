"""What the command line does: train, evaluate, export. Each returns an exit status (see ``actors/cli.py``)."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import rl.evaluate
from actors.cluster import connect
from actors.launch import Pipeline, held_out, start_graders, text_of
from actors.pool import RolloutPool
from rl import checkpoint
from rl.chat import load_tokenizer, stop_token_ids
from rl.config import Settings
from rl.controller import Interrupted, StopSignal
from rl.settings_file import load
from rl.tasks.builtin_model import resolve_model
from rl.types import Sampling

DONE, FAILED, INTERRUPTED = 0, 1, 130


def train(settings: Settings, resume: bool, quiet: bool) -> int:
    """Runs to the end, or to the first SIGINT or SIGTERM: then to a checkpoint. A second one exits at once."""
    pipeline = Pipeline(settings, resume=resume, quiet=quiet)
    with _signals(pipeline.stop):
        try:
            with pipeline:
                _install(pipeline.stop)  # Ray has put its own handlers in the way
                if pipeline.finished:
                    print(f"{settings.run.output_dir} is finished: all {pipeline.total_steps} steps are done")
                    return DONE
                try:
                    for _ in pipeline:
                        pass
                except Interrupted:
                    return _interrupted(pipeline)
                except ValueError as error:  # a refusal is for what is wrong before the start
                    raise RuntimeError(str(error)) from error
                pipeline.watcher.progress.summary(pipeline.summary())
                return DONE
        except Interrupted:
            print("interrupted while starting; nothing was trained or changed by this start", file=sys.stderr)
            return INTERRUPTED


def _interrupted(pipeline: Pipeline) -> int:
    controller = pipeline.controller
    folder = pipeline.settings.run.output_dir
    if controller.step > 0:
        pipeline.watcher.progress.close()
        pipeline.save()
        print(f"interrupted after step {controller.step}; checkpoint written. Go on with --resume ({folder})")
    else:
        print(f"interrupted before the first step was done. Begin again with --resume ({folder})")
    return INTERRUPTED


@contextmanager
def _signals(stop: StopSignal) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _install(stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install(stop: StopSignal) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            os._exit(INTERRUPTED)  # the second time: at once; Ray's own reaper takes down what it started
        print("\nstopping: a checkpoint is written first; once more to exit at once", file=sys.stderr, flush=True)
        stop.request()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def evaluate(target: str, overrides: Sequence[str]) -> int:
    """Prints ``eval/...`` of a run's newest good checkpoint, or of the model that a settings file names.

    ValueError when there are no held-out rows or, for a run, no checkpoint.
    """
    run = Path(target)
    is_run = (run / "config.yaml").is_file()
    settings = load(run / "config.yaml" if is_run else target, overrides)
    if settings.data.eval is None:
        raise ValueError(f"data.eval is not set in {target}: there are no held-out rows to evaluate on")
    model_path = str(newest_checkpoint(run)) if is_run else resolve_model(settings.model.path, settings.learner.threads)
    tokenizer = load_tokenizer(model_path, settings.model.trust_remote_code)
    stops = stop_token_ids(model_path, tokenizer)
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parkrl-eval-")))
        prompts = held_out(settings, tokenizer, store)
        cluster = connect(settings)
        stack.callback(cluster.close)
        engine = RolloutPool.start(settings, model_path)
        stack.callback(engine.close)
        grader = start_graders(settings)
        stack.callback(grader.close)
        sampling = Sampling(settings.rollout.max_new_tokens, settings.eval.temperature, stops)
        metrics, _ = rl.evaluate.evaluate(
            engine,
            grader,
            text_of(settings, tokenizer, stops),
            prompts,
            samples=settings.eval.samples,
            sampling=sampling,
            seed=settings.run.seed,
        )
    print(f"{model_path} on {len(prompts)} held-out prompts of {settings.data.eval}")
    for name, value in metrics.items():
        print(f"{name:<24} {value:.4f}")
    return DONE


def newest_checkpoint(run: Path) -> Path:
    """The newest good checkpoint of a run; ValueError when there is none."""
    found = checkpoint.latest_valid(run / "checkpoints", lambda text: print(f"warning: {text}", file=sys.stderr))
    if found is None:
        raise ValueError(f"{run} holds no checkpoint (looked into {run / 'checkpoints'})")
    return found[0]


def export(run: Path, out: Path) -> Path:
    """Copies the model of a run's newest good checkpoint to ``out``, a Hugging Face folder. Returns ``out``.

    ValueError when there is no run, no checkpoint or when ``out`` holds something.
    """
    folder = newest_checkpoint(run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.name not in (checkpoint.STATE, checkpoint.MANIFEST):
            shutil.copy2(file, out / file.name)
    return out
