"""Graders in killable processes: hangs, deaths, memory, order, speed, and nothing left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from actors.rewards import RewardPool
from rl.config import Grading, Reward
from rl.rewards import RewardContractError
from rl.types import GradeJob, Prompt, Score

pytestmark = pytest.mark.ray

FILES = Path(__file__).parents[1] / "rewards_files"
TROUBLE = f"{FILES / 'trouble.py'}:"
SHAPES = f"{FILES / 'shapes.py'}:"


def job(texts: list[str], answer: object = "4", prompt: str = "2+2=") -> GradeJob:
    row = Prompt("0", "train.jsonl:1", np.arange(3, dtype=np.int32), prompt, answer, columns={"level": 2, "extra": "x"})
    count = len(texts)
    return GradeJob("g0", row, tuple(texts), (1,) * count, ("stop",) * count, 100)


@contextlib.contextmanager
def pool(*functions: str, workers: int = 2, timeout: float = 10.0, memory_mb: int = 2048) -> Iterator[RewardPool]:
    rewards = [Reward(function=name) if ":" in name else Reward.model_validate({"name": name}) for name in functions]
    with RewardPool.start(rewards, Grading(workers=workers, timeout=timeout, memory_mb=memory_mb)) as made:
        yield made


def grade(graders: RewardPool, texts: list[str], answer: object = "4") -> list[Score]:
    (scores,) = graders.result(graders.submit([job(texts, answer)]))
    return scores


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def settled(graders: RewardPool, count: int) -> list[int]:
    """The processes once ``count`` of them are up and have loaded: they no longer change for a second."""
    seen: list[int] = []
    for _ in range(30):
        last, seen = seen, alive(graders.pids())
        if len(seen) == count and seen == last:
            break
        time.sleep(1.0)
    return seen


@pytest.fixture(scope="module")
def troubled(ray_cluster: object) -> Iterator[RewardPool]:
    with pool(TROUBLE + "trouble", timeout=2.0) as made:
        yield made


@pytest.mark.parametrize("kind", ["sleep", "busy", "regex", "tower", "child"])
def test_a_hang_is_killed_and_costs_one_sample(troubled: RewardPool, kind: str) -> None:
    before = set(troubled.pids())
    start = time.monotonic()
    scores = grade(troubled, ["a", "b", kind, *"defghijklmnop"])
    assert 2.0 <= time.monotonic() - start < 8.0
    assert [score.outcome for score in scores] == ["ok", "ok", "timeout", *["ok"] * 13]
    assert scores[2].reward is None
    assert scores[0].reward == 1.0
    assert "trouble ran longer than grading.timeout = 2 s" in scores[2].detail
    assert len(alive(list(before))) == 1  # killed already when the result is there
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "98765"]]


def test_after_hangs_the_processes_are_idle(troubled: RewardPool) -> None:
    grade(troubled, ["busy", "a", "b", "busy"])
    assert len(settled(troubled, 2)) == 2
    processes = [psutil.Process(pid) for pid in troubled.pids()]
    begin = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(1.0)
    end = [sum(process.cpu_times()[:2]) for process in processes]
    assert max(late - early for late, early in zip(end, begin, strict=True)) < 0.1


@pytest.mark.parametrize(("kind", "word"), [("exit", "exited with status 3"), ("segfault", "killed by SIGSEGV")])
def test_a_process_that_dies_is_an_error_of_one_sample(troubled: RewardPool, kind: str, word: str) -> None:
    scores = grade(troubled, ["a", kind, "b", "c"])
    assert [score.outcome for score in scores] == ["ok", "error", "ok", "ok"]
    assert word in scores[1].detail


def test_fifty_hangs_do_not_drain_the_pool(ray_cluster: object) -> None:
    with pool(TROUBLE + "trouble", workers=4, timeout=0.3) as graders:
        scores = grade(graders, ["sleep"] * 50)
        assert {score.outcome for score in scores} == {"timeout"}
        assert [score.outcome for score in grade(graders, ["a"] * 8)] == ["ok"] * 8
        assert len(settled(graders, 4)) == 4


def test_slow_samples_run_side_by_side_and_keep_their_order(ray_cluster: object) -> None:
    with pool(TROUBLE + "slow", workers=8) as graders:
        start = time.monotonic()
        handles = [graders.submit([job([str(8 * number + one) for one in range(8)])]) for number in range(4)]
        scores = [score for handle in handles for group in graders.result(handle) for score in group]
        assert 2.0 <= time.monotonic() - start < 4.0
        assert [score.reward for score in scores] == [float(one) for one in range(32)]


def test_a_finished_group_is_there_before_a_slow_one(ray_cluster: object) -> None:
    with pool(TROUBLE + "trouble", workers=2, timeout=3.0) as graders:
        start = time.monotonic()
        slow = graders.submit([job(["sleep"])])
        assert [score.outcome for score in grade(graders, ["a", "b"])] == ["ok", "ok"]
        assert time.monotonic() - start < 2.0
        assert graders.result(slow)[0][0].outcome == "timeout"


def test_a_batch_function_that_hangs_is_run_again_sample_by_sample(ray_cluster: object) -> None:
    with pool(TROUBLE + "group", timeout=1.0) as graders:
        start = time.monotonic()
        scores = grade(graders, ["a", "sleep", "b", "exit"])
        assert [score.outcome for score in scores] == ["ok", "timeout", "ok", "error"]
        assert time.monotonic() - start < 8.0


@pytest.mark.parametrize("name", ["too_few", "as_number", "column_vector", "generator", "as_dict"])
def test_a_batch_of_the_wrong_form_raises(ray_cluster: object, name: str) -> None:
    with (
        pool(SHAPES + name, workers=1) as graders,
        pytest.raises(RewardContractError, match=rf"{name} .*8 completions"),
    ):
        grade(graders, ["a"] * 8)


def test_memory_has_a_limit(ray_cluster: object) -> None:
    """Each call keeps 200 MB: under 500 MiB every third sample of a process is over, and only that one is lost."""
    with pool(TROUBLE + "hoard", workers=1, memory_mb=500) as graders:
        scores = grade(graders, ["a"] * 6)
        assert [score.outcome for score in scores] == ["ok", "ok", "error"] * 2
        detail = scores[2].detail
        assert "component hoard ran out of memory" in detail
        assert "grading.memory_mb = 500 MiB" in detail
        peak = int(detail.split("peak was ")[1].split()[0])
        assert 400 <= peak <= 520


def test_forms_of_functions(ray_cluster: object) -> None:
    with pool(SHAPES + "missing", SHAPES + "later", SHAPES + "batch_later", SHAPES + "says") as graders:
        scores = grade(graders, list("abeg"))
        assert [score.outcome for score in scores] == ["ok", "error", "wrong", "ok"]
        assert scores[0].reward == 1.0 + 1.0 + 1.0 + 0.25
        assert dict(scores[0].parts) == {"missing": 1.0, "later": 1.0, "batch_later": 1.0, "says": 0.25}


def test_printing_disturbs_nothing_and_tracebacks_arrive(ray_cluster: object) -> None:
    with pool(SHAPES + "prints") as graders:
        assert [score.reward for score in grade(graders, ["a"] * 8)] == [1.0] * 8
    with pool(SHAPES + "raises") as graders:
        score = grade(graders, ["a"])[0]
        assert score.outcome == "error"
        assert 'raise KeyError("the first traceback")' in score.detail


def test_unscorable_references(ray_cluster: object) -> None:
    with pool("math") as graders:
        seen = {gold: grade(graders, [r"\boxed{5}", ""], gold) for gold in ("6", r"\frac{63}{400}", "", "see proof")}
    assert [[score.outcome for score in scores] for scores in seen.values()] == [
        ["wrong", "wrong"],
        ["wrong", "wrong"],
        ["invalid", "invalid"],
        ["invalid", "invalid"],
    ]
    assert [score.reward for score in seen["6"]] == [0.0, 0.0]


def test_a_power_tower_in_mathematics_is_killed(ray_cluster: object) -> None:
    with pool("math", timeout=2.0) as graders:
        scores = grade(graders, [r"\boxed{4}", r"\boxed{10^{10^{10}}}", r"\boxed{4}"])
        assert [score.outcome for score in scores] == ["ok", "timeout", "ok"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{FILES / 'broken.py'}:f", "broken while importing"),
        (SHAPES + "as_lst", "did you mean 'as_list'"),
        (SHAPES + "wrong_signature", "exactly one of the parameters"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_the_start(ray_cluster: object, function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardPool.start([Reward(function=function)], Grading())


def test_callables_of_a_notebook(ray_cluster: object) -> None:
    factor = 3
    functions = {"mine": lambda completion: factor * len(completion)}
    with RewardPool.start([Reward(function="mine", weight=2.0)], Grading(workers=1), functions=functions) as graders:
        assert [score.reward for score in grade(graders, ["a", "bb"])] == [6.0, 12.0]


def test_little_overhead(ray_cluster: object) -> None:
    with pool(TROUBLE + "trivial") as graders:
        seconds = []
        for _ in range(4):
            start = time.monotonic()
            scores = graders.result(graders.submit([job(["a"] * 8) for _ in range(32)]))
            assert [len(group) for group in scores] == [8] * 32
            seconds.append(time.monotonic() - start)
        assert min(seconds) < 0.5  # about 0.035 s on two idle cores


def test_nothing_is_left_after_close(ray_cluster: object) -> None:
    with pool(TROUBLE + "trouble", workers=3) as graders:
        pids = graders.pids()
        assert len(alive(pids)) == 3
        graders.submit([job(["busy"] * 2)])
        time.sleep(0.3)
    assert alive(pids) == []
    graders.close()


def test_processes_die_with_their_supervisor_and_the_error_names_it(ray_cluster: object) -> None:
    with pool(TROUBLE + "trouble", timeout=60.0) as graders:
        pids = graders.pids()
        handle = graders.submit([job(["busy"])])
        time.sleep(0.3)
        psutil.Process(pids[0]).parent().kill()
        with pytest.raises(RuntimeError, match=r"reward supervisor on node .* died"):
            graders.result(handle)
        deadline = time.monotonic() + 5.0
        while alive(pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(pids) == []
