"""From settings to a running loop, and the way back down, whatever happens.

Order up: run folder, model, rows (all of them read and proven), Ray, learner, engines, graders, controller.
Order down: the reverse, each step tried even if another one failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl import checkpoint
from rl.advantages import group_advantages
from rl.chat import decode, load_tokenizer, stop_token_ids
from rl.collect import Decode, sample_seed
from rl.config import Settings
from rl.controller import Controller, Parts, StopSignal
from rl.data import PromptCursor, open_prompts, require_rows, steps_for_epochs
from rl.metrics import JsonlSink, TensorBoardSink
from rl.progress import Progress, Summary
from rl.run_folder import RunFolder, SampleWriter
from rl.settings_file import dump, load
from rl.tasks.builtin_model import resolve_model
from rl.types import Group, Prompt, StepResult

if TYPE_CHECKING:
    from actors.rewards import RewardPool


class Pipeline:
    """A run, as an object: start it, iterate over its steps, look, go on, stop.

    >>> with Pipeline.from_yaml("configs/quickstart.yaml", {"train.steps": 20}) as pipeline:  # doctest: +SKIP
    ...     for step in pipeline:
    ...         print(step.metrics["reward/mean"])

    ``functions`` are reward functions by name, for scripts and notebooks: a reward {function: NAME} uses them.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        resume: bool = False,
        quiet: bool = True,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.settings, self.resume, self.quiet = settings, resume, quiet
        self.functions = dict(functions or {})
        self.finished = False  # a resumed run had nothing left to do
        self.stop = StopSignal()
        self._stack = ExitStack()

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = (), **options: Any) -> Pipeline:
        return cls(load(path, overrides), **options)

    def __enter__(self) -> Pipeline:
        started = time.monotonic()
        try:
            with self.stop.interruptible():
                self._open()
        except BaseException:
            self.close()
            raise
        self.startup_seconds = time.monotonic() - started
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepResult]:
        """Every step to come, the evaluation before the first one as step 0."""
        if not self.finished:
            yield from self.controller.run()

    def close(self) -> None:
        """Takes everything down that was started here; safe to call twice."""
        self._stack.close()

    def evaluate(self) -> dict[str, float]:
        """``eval/...`` of the weights now in the engines."""
        return self.controller.evaluate()

    def save(self) -> None:
        """A checkpoint of the last finished step."""
        self.controller.save()

    def summary(self) -> Summary:
        files = {
            "run folder": self.folder.path,
            "metrics": self.folder.metrics,
            "samples": self.folder.samples,
            "checkpoints": self.folder.checkpoints,
            "tensorboard": self.folder.tensorboard,
            "Ray's logs": Path(self.cluster.session_dir) / "logs",
        }
        return Summary.of(self.folder.read_metrics(), files, self.startup_seconds)

    # -- up --------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        settings = self.settings
        self.folder = self._stack.enter_context(RunFolder.open(settings.run.output_dir, self.resume))
        found = None
        if self.resume:
            self.folder.write_config(dump(settings))
            found = checkpoint.latest_valid(self.folder.checkpoints, self._warn)
        self._open_data()
        self.folder.write_config(dump(settings))  # only now: what was refused until here left no run behind
        for change in self.folder.write_environment():
            self._warn(f"this machine differs from the one the run began on: {change}")
        if found is not None and found[1]["step"] >= self.total_steps and found[1]["row"] is None:
            self.finished = True
            return
        self._open_watcher(found[1] if found else None)
        self._open_actors(*(found or (None, None)))

    def _open_data(self) -> None:
        """Model, tokenizer and every row: all that can be wrong with them is said before Ray starts."""
        settings = self.settings
        self.model_path = resolve_model(settings.model.path, settings.learner.threads)
        self.tokenizer = load_tokenizer(self.model_path, settings.model.trust_remote_code)
        store = self.folder.path / "data"
        self.train_prompts = open_prompts(settings, "train", self.tokenizer, store)
        self.eval_prompts = held_out(settings, self.tokenizer, store) if settings.data.eval is not None else []
        for line in self.train_prompts.report.lines():
            self._note(f"{settings.data.train}: {line}")
        per_step = settings.rollout.prompts_per_step
        require_rows(len(self.train_prompts), per_step, self.train_prompts.report)
        if settings.train.epochs is not None:
            self.total_steps, left_over = steps_for_epochs(len(self.train_prompts), per_step, settings.train.epochs)
            if left_over:
                self._note(f"{left_over} rows of the last epoch do not fill a batch of {per_step} and are left out")
        else:
            assert settings.train.steps is not None
            self.total_steps = settings.train.steps

    def _open_watcher(self, state: Mapping[str, Any] | None) -> None:
        """Cuts the records back to the checkpoint, so that they go on where it stands."""
        step = state["step"] if state else 0
        first = step if state is None or state["row"] is not None else step + 1  # the next row to be written
        if self.resume:
            self.folder.rewind(step, last_row=first - 1)
        self.watcher = _Watcher(self.settings, self.folder, self.total_steps, self.quiet, first, done=step)
        self._stack.callback(self.watcher.close)

    def _open_actors(self, folder: Path | None, state: dict[str, Any] | None) -> None:
        from actors.cluster import connect
        from actors.learner_group import LearnerGroup
        from actors.pool import RolloutPool

        settings = self.settings
        self._note(
            f"{len(self.train_prompts)} prompts; starting Ray, the learner and {settings.rollout.replicas} engine(s)"
        )
        self.cluster = connect(settings)
        self._stack.callback(self.cluster.close)
        total_updates = self.total_steps * settings.learner.updates_per_batch
        engine = RolloutPool.begin(settings, self.model_path)  # loads while the learner starts
        self._stack.callback(engine.close)
        learner = LearnerGroup.start(settings, self.model_path, self.folder.path, total_updates, folder)
        self._stack.callback(learner.close)
        engine.wait_until_up()
        grader = start_graders(settings, self.functions)
        self._stack.callback(grader.close)
        self.folder.write_placement(placement(learner.describe(), engine.describe()))
        stops = stop_token_ids(self.model_path, self.tokenizer)
        parts = Parts(
            settings=settings,
            engine=engine,
            learner=learner,
            grader=grader,
            decode=text_of(settings, self.tokenizer, stops),
            train_prompts=self.train_prompts,
            eval_prompts=self.eval_prompts,
            cursor=PromptCursor(len(self.train_prompts), settings.run.seed, settings.data.shuffle),
            stop_token_ids=stops,
            total_steps=self.total_steps,
            watcher=self.watcher,
            save_checkpoint=self._save_checkpoint,
        )
        if state is not None and state["fingerprint"] != self.train_prompts.report.fingerprint:
            self._warn("the training rows differ from those the run began with: it goes on with the new ones")
        self.controller = Controller(parts, state, self.stop)

    def _save_checkpoint(self, step: int, fill: Callable[[Path], None], state: dict[str, Any]) -> Path:
        self.watcher.sync()
        state = {**state, "fingerprint": self.train_prompts.report.fingerprint}
        return checkpoint.write(self.folder.checkpoints, step, fill, state, self.settings.train.keep_checkpoints)

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", flush=True)

    def _note(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)


class _Watcher:
    """Records every step in metrics.jsonl, TensorBoard and samples/, and shows it on the terminal."""

    def __init__(
        self, settings: Settings, folder: RunFolder, total_steps: int, quiet: bool, first: int, done: int
    ) -> None:
        self._settings = settings
        self.progress = Progress(total_steps, quiet=quiet, start_step=done)
        self._rows = JsonlSink(folder.metrics)
        self._board = TensorBoardSink(folder.tensorboard, purge_step=first or None)
        self._samples = SampleWriter(folder.samples)

    def record(self, result: StepResult) -> None:
        self._rows.log(result.step, result.metrics)
        self._board.log(result.step, result.metrics)
        self.progress.step(result)

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        seed, epsilon = self._settings.run.seed, self._settings.algorithm.advantage_epsilon
        advantages, seeds = {}, {}
        for group in groups:
            scored, values = group_advantages(group, epsilon)
            advantages[group.group_id] = [float(a) if s else None for a, s in zip(values, scored, strict=True)]
            names = (group.group_id, group.prompt.prompt_id)
            seeds[group.group_id] = [sample_seed(seed, *names, each.index) for each in group.trajectories]
        self._samples.write(step, groups, advantages, seeds)

    def warn(self, text: str) -> None:
        self.progress.warn(text)

    def sync(self) -> None:
        self._rows.sync()

    def close(self) -> None:
        self.progress.close()
        self._rows.close()
        self._board.close()


def held_out(settings: Settings, tokenizer: Any, store: Path) -> list[Prompt]:
    """The held-out prompts that are evaluated, at most ``eval.prompts``."""
    prompts = open_prompts(settings, "eval", tokenizer, store)
    return [prompts[row] for row in range(min(len(prompts), settings.eval.prompts or len(prompts)))]


def text_of(settings: Settings, tokenizer: Any, stops: tuple[int, ...]) -> Decode:
    """From a completion's ids to the text that graders see."""
    keep = settings.grading.keep_special_tokens
    return lambda token_ids: decode(tokenizer, token_ids.tolist(), keep, stops)


def start_graders(settings: Settings, functions: Mapping[str, Callable[..., Any]] | None = None) -> RewardPool:
    """The rewards asked for; without any, what ``rl.rewards.load.describe`` takes instead."""
    from actors.rewards import RewardPool

    task = settings.data.train if settings.data.train.startswith(("builtin:", "reasoning_gym:")) else None
    return RewardPool.start(
        settings.rewards, settings.grading, task, functions=functions, task_options=settings.data.task_options
    )


def placement(learner: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """placement.json: which group runs where, from what each process said of itself."""
    groups = {"learner": learner, "rollout": engines}
    return {
        "groups": {
            name: {
                "slice": next((actor["slice"] for actor in actors if actor.get("slice")), None),
                "hosts": sorted({actor["host"] for actor in actors}),
                "chips": [actor.get("chip") for actor in actors],
                "actors": [dict(actor) for actor in actors],
            }
            for name, actors in groups.items()
        }
    }
