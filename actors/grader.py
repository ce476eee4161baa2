"""The program of one grader process: it runs reward functions and nothing else (no Ray, no torch).

It is started and killed by the supervisor in ``actors/rewards.py``. Requests are length-prefixed pickles on standard
input, answers are lines of JSON on what was standard output; both are moved to private descriptors first, so that
whatever a user's function prints goes to standard error. It dies with its parent, and when its input ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from rl.rewards.component import Component, alone
from rl.rewards.load import load_components
from rl.rewards.parts import Part, RewardContractError

_PR_SET_PDEATHSIG = 1
MEMORY_EXIT = 77  # the exit status after MemoryError: what filled the memory may still be held


def main() -> None:
    """``python -m actors.grader PARENT_PID MEMORY_MB``."""
    parent, memory_mb = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def send(*answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")

    try:
        serve(requests, send)
    except MemoryError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        send("memory", peak, traceback.format_exc(limit=-3)[-2000:])
        os._exit(MEMORY_EXIT)


def die_with(parent: int) -> None:
    """Asks Linux for SIGKILL when the starting thread ends, and leaves at once if that has already happened."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def serve(requests: BinaryIO, send: Callable[..., None]) -> None:
    """Loads the components (first request), then grades until the input ends."""
    setup = _read(requests)
    if setup is None:
        return
    sys.path.extend(entry for entry in setup["sys_path"] if entry not in sys.path)
    try:
        components = load_components(setup["specs"], setup["columns"])
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's file may raise anything, SystemExit too; it is reported
        ours = isinstance(error, ValueError) and str(error).startswith(("rewards:", "reward function", "builtin:"))
        send("failed", str(error) if ours else traceback.format_exc()[-8000:])
        return
    send("ready", [component.is_batch for component in components])
    while (request := _read(requests)) is not None:
        work, payload = request
        _grade(components, work, pickle.loads(payload), send)


def _grade(components: Sequence[Component], work: tuple[Any, ...], group: Any, send: Callable[..., None]) -> None:
    kind, numbers, indices = work
    if kind == "batch":
        try:
            send("batch", components[numbers[0]].grade_batch(group))
        except RewardContractError as error:
            send("contract", str(error))
        return
    for index in indices:
        for number in numbers:
            component = components[number]
            try:
                part = component.grade_batch(alone(group, index))[0] if component.is_batch else None
            except RewardContractError as error:
                part = Part(None, "error", str(error))
            send("part", index, number, part or component.grade_one(group, index))


def _read(requests: BinaryIO) -> Any:
    head = requests.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    return pickle.loads(requests.read(size))


if __name__ == "__main__":
    main()
