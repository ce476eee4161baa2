"""Every number against one worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl.metrics import (
    NAMES,
    JsonlSink,
    TensorBoardSink,
    completion_metrics,
    is_time_metric,
    meaning,
    pass_at_k,
    read_rows,
    reward_metrics,
)
from rl.types import Completion, Group, Prompt, Score, Trajectory


def group(name: str, scores: list[Score], lengths: list[int] | None = None, finish: str = "stop") -> Group:
    prompt = Prompt(prompt_id=name, row=f"train.jsonl:{name}", token_ids=np.array([1, 2], np.int32), text="sort: b a")
    trajectories = []
    for index, score in enumerate(scores):
        count = lengths[index] if lengths else 1
        completion = Completion(np.arange(count, dtype=np.int32), np.zeros(count, np.float32), finish, ((0, count),))  # type: ignore[arg-type]
        trajectories.append(Trajectory(name, index, completion, "a b", score))
    return Group(name, prompt, tuple(trajectories))


def right(reward: float = 1.0, **parts: float | None) -> Score:
    return Score(reward, "ok", parts)


def wrong(reward: float = 0.0, **parts: float | None) -> Score:
    return Score(reward, "wrong", parts)


def test_rewards_by_hand() -> None:
    groups = [
        group("a", [right(1.0), wrong(0.0), wrong(0.5), Score(None, "error", detail="ZeroDivisionError")]),
        group("b", [right(1.0), right(1.0), right(1.0), Score(None, "timeout")]),  # flat: all scored are equal
        group("c", [Score(None, "invalid")] * 4),  # flat: none scored
        group("d", [wrong(-0.5), Score(None, "error"), Score(None, "error"), Score(None, "error")]),  # flat: one scored
    ]
    metrics = reward_metrics(groups)
    # scored: 1, 0, 0.5, 1, 1, 1, -0.5: sum 4, of 7. Squares: 1 + 0 + 0.25 + 1 + 1 + 1 + 0.25 = 4.5.
    assert metrics["reward/mean"] == pytest.approx(4 / 7)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(4.5 / 7 - (4 / 7) ** 2))
    assert metrics["reward/flat_groups"] == 3 / 4
    assert metrics["reward/ok"] == 4 / 16
    assert metrics["reward/wrong"] == 3 / 16
    assert metrics["reward/error"] == 4 / 16
    assert metrics["reward/timeout"] == 1 / 16
    assert metrics["reward/invalid"] == 4 / 16
    assert metrics["reward/missing"] == 9
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_mean_of_nothing_does_not_exist() -> None:
    metrics = reward_metrics([group("a", [Score(None, "error"), Score(None, "timeout")])])
    assert "reward/mean" not in metrics and "reward/std" not in metrics
    assert metrics["reward/missing"] == 2 and metrics["reward/flat_groups"] == 1


def test_rounding_noise_is_flat_as_it_is_for_the_advantages() -> None:
    groups = [group("a", [right(0.1 + 0.2), right(0.3)]), group("b", [right(0.30001), right(0.3)])]
    assert reward_metrics(groups)["reward/flat_groups"] == 0.5


def test_parts_by_hand() -> None:
    groups = [
        group("a", [right(1.2, math=1.0, format=0.2), wrong(0.2, math=None, format=0.2)]),
        group("b", [wrong(0.1, math=0.0, format=0.1), Score(None, "error", {"math": float("nan")})]),
    ]
    metrics = reward_metrics(groups)
    assert metrics["reward/part/math"] == pytest.approx((1.0 + 0.0) / 2)
    assert metrics["reward/part_missing/math"] == 2
    assert metrics["reward/part/format"] == pytest.approx((0.2 + 0.2 + 0.1) / 3)
    assert metrics["reward/part_missing/format"] == 1
    assert "reward/part/gone" not in reward_metrics([group("a", [right(1.0, gone=None), wrong()])])


def test_completions_by_hand() -> None:
    groups = [group("a", [right(), wrong()], [3, 8], "length"), group("b", [right(), right()], [1, 4])]
    assert completion_metrics(groups) == {
        "completion/mean_tokens": 4.0,
        "completion/max_tokens": 8.0,
        "completion/truncated": 0.5,
        "tokens/generated": 16.0,
    }


def test_pass_at_k_by_hand_and_by_counting() -> None:
    assert pass_at_k(5, 2, 1) == 0.4
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)  # 1 - C(3, 2) / C(5, 2) = 1 - 3 / 10
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 4, 2) == 1.0
    assert pass_at_k(2000, 1, 1000) == 0.5  # naive products of floats lose this
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1) if c <= n else ():
            draws = list(itertools.combinations(range(n), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_every_name_is_documented() -> None:
    groups = [group("a", [right(1.0, math=1.0), wrong()])]
    names = ["eval/pass@16", "eval/prompts", "sync/probe_max_abs", "data/rows", "idle/rollout"]
    for name in [*reward_metrics(groups), *completion_metrics(groups), *names, "time/generate", "policy/loss"]:
        assert meaning(name)
    assert meaning("sync/seconds") == NAMES["sync/seconds"] != NAMES["sync/<name>"]
    for name in ("rewards/mean", "reward/means", "eval/pass@", "time/a/b"):
        with pytest.raises(ValueError, match=name):
            meaning(name)


def test_time_metrics() -> None:
    times = ["time/step", "idle/learner", "tokens/generated_per_s", "tokens/trained", "sync/seconds"]
    others = ["sync/bytes", "sync/verified", "completion/mean_tokens", "reward/mean", "timeout", "policy/lr"]
    assert [is_time_metric(name) for name in times + others] == [True] * len(times) + [False] * len(others)


def test_jsonl_rows_are_exact_and_there_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"reward/mean": np.float32(0.1), "sync/bytes": 4})  # type: ignore[dict-item]
    sink.log(2, {"reward/mean": 0.1 + 0.2})
    sink.sync()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: every row is flushed
    assert json.loads(lines[0]) == {"step": 1, "reward/mean": float(np.float32(0.1)), "sync/bytes": 4.0}
    assert json.loads(lines[1])["reward/mean"] == 0.30000000000000004
    sink.close()
    again = JsonlSink(tmp_path / "metrics.jsonl")
    again.log(3, {})
    again.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_no_sink_records_what_is_not_finite(tmp_path: Path, value: float) -> None:
    jsonl = JsonlSink(tmp_path / "metrics.jsonl")
    board = TensorBoardSink(tmp_path / "tensorboard")
    for sink in (jsonl, board):
        with pytest.raises(ValueError, match=r"policy/loss is -?(nan|inf) at step 7"):
            sink.log(7, {"reward/mean": 1.0, "policy/loss": value})
        sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_tensorboard_can_be_read_and_is_purged_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.log(step, {"reward/mean": step / 4, "eval/pass@4": 0.5})
    first.close()
    second = TensorBoardSink(tmp_path, purge_step=3)  # resumed from the checkpoint of step 2
    second.log(3, {"reward/mean": 7.0})
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 7.0)]
    assert [each.step for each in events.Scalars("eval/pass_4")] == [1, 2]


def test_a_half_written_last_line_is_no_row_but_damage_inside_is_told(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_rows(file) == []
    file.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": 0.')
    assert read_rows(file) == [{"step": 1, "a": 0.5}]
    file.write_text('{"step": 1, "a": 0.5}\n{"step": 2, "a": 0.\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is damaged"):
        read_rows(file)
    file.write_text('{"step": 1}\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: step 1 follows step 1"):
        read_rows(file)


def test_none_of_the_four_files_imports_torch_or_ray() -> None:
    code = """
import sys
import rl.checkpoint, rl.metrics, rl.progress, rl.run_folder
print([name for name in ("torch", "ray", "vllm", "tensorboardX") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
