"""Reward functions of every form, for the tests."""

import asyncio
import sys
from pathlib import Path

import numpy as np

CALLS = [0]


def as_list(completions, **kwargs):
    return [1.0] * len(completions)


def as_array(completions):
    return np.arange(len(completions), dtype=np.float32)


def columns_as_lists(prompts, completions, answers, level, **kwargs):
    assert len(prompts) == len(answers) == len(level) == len(kwargs["extra"]) == len(completions)
    return [float(one) for one in level]


def as_number(completions):
    return 1.0


def one_value(completions):
    return [1.0]


def too_few(completions):
    return [1.0] * (len(completions) - 1)


def too_many(completions):
    return [1.0] * (len(completions) + 1)


def column_vector(completions):
    return np.ones((len(completions), 1))


def generator(completions):
    return (1.0 for _ in completions)


def as_dict(completions):
    return {"reward": [1.0] * len(completions)}


def missing(completion):
    return {"a": 1.0, "b": None, "c": float("nan"), "d": float("inf"), "e": 0, "f": [1.0], "g": True}[completion]


def says(completion):
    return {"reward": 0.25, "outcome": "wrong"}


async def later(completion):
    await asyncio.sleep(0.01)
    return len(completion)


async def batch_later(completions):
    return list(await asyncio.gather(*(later(one) for one in completions)))


def raises(completion):
    raise KeyError("the first traceback")


def prints(completion):
    print("x" * 100_000)
    sys.stdout.write('["part", 0, 0, [5.0, "ok", ""]]\n')
    sys.stdout.flush()
    return 1


def counts(completion):
    CALLS[0] += 1
    return CALLS[0]


def wrong_signature(text, gold):
    return 1.0


def unknown_column(completion, anser):
    return 1.0


def where(completion):
    return bool(Path(__file__).name == "shapes.py")
