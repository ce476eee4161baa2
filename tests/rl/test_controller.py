"""The loop with plain objects behind the protocols: order, versions, stops, resumes and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl.collect import collect, sample_seed
from rl.config import Settings
from rl.controller import Controller, Interrupted, Parts
from rl.data import PromptCursor
from rl.evaluate import accuracy_metrics, pass_at_k_metrics
from rl.metrics import is_time_metric
from rl.types import Sampling, Score
from tests.rl.fakes import FakeEngine, FakeGrader, FakeLearner, Notebook, Prompts, decode

ROWS, STEPS = 10, 6


class Bench:
    """A controller and all it works with, over the files of ``folder``."""

    def __init__(self, folder: Path, state: dict[str, Any] | None = None, eval_rows: int = 3, **train: Any) -> None:
        self.folder = folder
        self.settings = Settings.model_validate(
            {
                "algorithm": {"group_size": 2},
                "rollout": {"prompts_per_step": 4, "max_new_tokens": 4},
                "train": {"steps": STEPS, **train},
                "grading": {"max_error_rate": 0.5},
                "eval": {"samples": 2},
            }
        )
        self.engine, self.learner, self.grader, self.notebook = FakeEngine(), FakeLearner(), FakeGrader(), Notebook()
        self.learner.steps = state["step"] if state else 0
        parts = Parts(
            settings=self.settings,
            engine=self.engine,
            learner=self.learner,
            grader=self.grader,
            decode=decode,
            train_prompts=Prompts(ROWS),  # type: ignore[arg-type]
            eval_prompts=Prompts(eval_rows),
            cursor=PromptCursor(ROWS, seed=0, shuffle=True),
            stop_token_ids=(7,),
            total_steps=STEPS,
            watcher=self.notebook,
            save_checkpoint=self._save,
        )
        self.controller = Controller(parts, state)

    def _save(self, step: int, fill: Any, state: dict[str, Any]) -> Path:
        folder = self.folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        fill(folder)
        (folder / "state.json").write_text(json.dumps(state))
        return folder

    def state(self, step: int) -> dict[str, Any]:
        return json.loads((self.folder / f"step_{step}" / "state.json").read_text())

    def sampled(self) -> list[Any]:
        """What was asked of the engine in training: (weights' version, requests)."""
        asked = [entry[1:] for entry in self.engine.log if entry[0] == "generate"]
        return [entry for entry in asked if not entry[1][0][0].startswith("eval")]

    def numbers(self) -> dict[int, dict[str, float]]:
        return {
            row.step: {name: value for name, value in row.metrics.items() if not is_time_metric(name)}
            for row in self.notebook.rows
        }


def test_every_step_is_sampled_by_the_weights_of_the_step_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    results = list(bench.controller.run())
    assert [result.step for result in results] == list(range(STEPS + 1))
    assert [version for version, _ in bench.sampled()] == list(range(STEPS))
    assert all(result.metrics["staleness/max"] == 0 for result in results[1:])
    assert [entry for entry in bench.engine.log if entry[0] == "load"] == [("load", step) for step in range(STEPS + 1)]
    assert all(result.metrics["sync/verified"] == 1 and result.metrics["sync/bytes"] == 431 for result in results)
    assert sorted(bench.notebook.groups) == list(range(1, STEPS + 1))
    assert len({seed for _, requests in bench.sampled() for *_, seed in requests}) == STEPS * 4 * 2


def test_rows_of_six_steps_are_three_resumed_by_three(tmp_path: Path) -> None:
    straight = Bench(tmp_path / "straight", checkpoint_every=3, eval_every=2)
    list(straight.controller.run())
    first = Bench(tmp_path / "broken", checkpoint_every=3, eval_every=2)
    for result in first.controller.run():
        if result.step == 3:
            break
    second = Bench(tmp_path / "broken", state=first.state(3), checkpoint_every=3, eval_every=2)
    list(second.controller.run())
    assert first.sampled() + second.sampled() == straight.sampled()
    assert first.numbers() | second.numbers() == straight.numbers()


def test_evaluation_leaves_training_untouched(tmp_path: Path) -> None:
    often, never = Bench(tmp_path / "a", eval_every=1), Bench(tmp_path / "b", eval_rows=0)
    list(often.controller.run())
    list(never.controller.run())
    assert often.sampled() == never.sampled()
    assert often.engine.log.count(("reset",)) == STEPS + 1
    without = {
        step: {name: value for name, value in row.items() if not name.startswith("eval/")}
        for step, row in often.numbers().items()
    }
    assert without == never.numbers()


def test_a_stop_while_sampling_gives_the_step_up_without_a_trace(tmp_path: Path) -> None:
    straight = Bench(tmp_path / "straight")
    list(straight.controller.run())
    bench = Bench(tmp_path / "broken")

    def stop(request: Any) -> None:
        if request.request_id == "3:1:0":
            bench.controller.stop.request()

    bench.engine.before_each = stop
    with pytest.raises(Interrupted):
        list(bench.controller.run())
    assert bench.controller.step == 2 and bench.learner.steps == 2
    bench.controller.save()
    rest = Bench(tmp_path / "broken", state=bench.state(2))
    list(rest.controller.run())
    assert bench.sampled()[:2] + rest.sampled() == straight.sampled()
    assert bench.numbers() | rest.numbers() == straight.numbers()


def test_a_stop_while_training_sees_the_step_through(tmp_path: Path) -> None:
    straight = Bench(tmp_path / "straight", eval_every=1)
    list(straight.controller.run())
    bench = Bench(tmp_path / "broken", eval_every=1)
    bench.learner.before_train = lambda step: bench.controller.stop.request() if step == 4 else None
    with pytest.raises(Interrupted):
        list(bench.controller.run())
    assert bench.controller.step == 4 and [row.step for row in bench.notebook.rows] == [0, 1, 2, 3]
    bench.controller.save()
    assert bench.state(4)["row"]["policy/loss"] == 4.0
    rest = Bench(tmp_path / "broken", state=bench.state(4), eval_every=1)
    assert [result.step for result in rest.controller.run()] == [4, 5, 6]
    assert bench.numbers() | rest.numbers() == straight.numbers()


def test_a_stop_while_evaluating_evaluates_after_the_resume(tmp_path: Path) -> None:
    straight = Bench(tmp_path / "straight", eval_every=2)
    list(straight.controller.run())
    bench = Bench(tmp_path / "broken", eval_every=2)

    def stop(request: Any) -> None:
        if request.request_id == "eval-sampled:1:0" and bench.controller.step == 4:
            bench.controller.stop.request()

    bench.engine.before_each = stop
    with pytest.raises(Interrupted):
        list(bench.controller.run())
    bench.controller.save()
    rest = Bench(tmp_path / "broken", state=bench.state(4), eval_every=2)
    list(rest.controller.run())
    assert bench.sampled() + rest.sampled() == straight.sampled()
    assert bench.numbers() | rest.numbers() == straight.numbers()


def test_checkpoints_are_told_to_the_learner_and_not_written_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checkpoint_every=4)
    list(bench.controller.run())
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_4", "step_6"]
    assert bench.learner.kept_until == 6
    (tmp_path / "step_6" / "weights.txt").unlink()
    bench.controller.save()
    assert not (tmp_path / "step_6" / "weights.txt").exists()


def test_an_engine_that_is_not_proven_stops_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.engine.verified = False
    with pytest.raises(RuntimeError, match="no engine could be proven to hold version 0"):
        list(bench.controller.run())
    assert bench.sampled() == []
    assert "engine-0 does not hold version 0" in bench.notebook.warnings[0]


def test_grader_failures_above_the_limit_stop_the_run_with_the_first_words(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grader.force = lambda job, index: (
        Score(None, "error", detail="ZeroDivisionError in reward.py:3") if job.group_id[:2] in ("2:",) else None
    )
    with pytest.raises(RuntimeError, match=r"8 of 8 samples could not be graded.*max_error_rate=0.5.*reward.py:3"):
        list(bench.controller.run())
    assert bench.learner.steps == 1


def test_missing_rewards_weigh_nothing_and_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grader.force = lambda job, index: Score(None, "invalid") if job.group_id[:2] == "2:" and index == 0 else None
    results = list(bench.controller.run())
    assert results[2].metrics["reward/missing"] == 4 and results[2].metrics["reward/invalid"] == 0.5
    assert bench.learner.trained[1][0].updates == ((),)  # groups of one carry no signal
    assert bench.learner.trained[1][0].apply == (True,)


def test_a_step_without_any_score_makes_no_update_and_warns(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.grader.force = lambda job, index: Score(None, "invalid") if job.group_id[:2] == "2:" else None
    results = list(bench.controller.run())
    assert bench.learner.trained[1][0].apply == (False,)
    assert bench.notebook.warnings == ["step 2: no sample could be scored; the weights stay as they are"]
    assert "reward/mean" not in results[2].metrics


def test_groups_keep_the_order_of_prompts_and_are_graded_as_they_come() -> None:
    engine, grader = FakeEngine(version=0), FakeGrader()
    sampling = Sampling(4, 1.0, (7,))
    groups = collect(engine, grader, decode, Prompts(3), samples=2, sampling=sampling, label=5, seed=0).groups
    assert [group.group_id for group in groups] == ["5:0", "5:1", "5:2"]
    assert grader.order == ["5:2", "5:1", "5:0"]  # the fake engine ends with the last request first
    requests = {entry[0]: entry[2] for entry in engine.log[0][2]}
    for group in groups:
        for trajectory in group.trajectories:
            seed = requests[f"{group.group_id}:{trajectory.index}"]
            assert seed == sample_seed(0, group.group_id, group.prompt.prompt_id, trajectory.index)
            assert trajectory.text == f"{seed % 2} 7"


def test_accuracy_leaves_out_what_could_not_be_graded() -> None:
    engine, grader = FakeEngine(version=1), FakeGrader()
    grader.force = lambda job, index: {
        "x:0": Score(1.0, "ok"),
        "x:1": Score(0.0, "wrong") if index else Score(1.0, "ok"),
        "x:2": Score(0.0, "wrong"),
        "x:3": Score(None, "invalid"),
    }[job.group_id]
    groups = collect(
        engine, grader, decode, Prompts(4), samples=4, sampling=Sampling(4, 1.0, (7,)), label="x", seed=0
    ).groups
    metrics = accuracy_metrics(groups, "eval/sampled_accuracy")
    assert metrics == {"eval/prompts": 4.0, "eval/unscored": 4.0, "eval/sampled_accuracy": (4 + 1 + 0) / 12}
    # of 4 samples 4, 1 and 0 are right: pass@2 = 1, 1 - C(3, 2) / C(4, 2) = 1/2, 0
    assert pass_at_k_metrics(groups) == pytest.approx(
        {"eval/pass@1": (1 + 0.25) / 3, "eval/pass@2": (1 + 0.5) / 3, "eval/pass@4": 2 / 3}
    )
