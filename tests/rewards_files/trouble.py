"""Reward functions that hang, die or fill the memory, told by the completion's text."""

import ctypes
import os
import re
import subprocess
import time

KEPT = []


def trouble(completion):
    if completion == "sleep":
        time.sleep(1e9)
    if completion == "busy":
        while True:
            pass
    if completion == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if completion == "tower":
        base = 10
        return base**base**8
    if completion == "child":
        subprocess.run(["sleep", "98765"], start_new_session=True)
    if completion == "exit":
        os._exit(3)
    if completion == "segfault":
        ctypes.string_at(0)
    return 1.0


def group(completions):
    return [trouble(one) for one in completions]


def slow(completion):
    time.sleep(0.5)
    return float(completion)


def hoard(completion):
    KEPT.append(bytearray(200 << 20))
    return 1.0


def trivial(completion):
    return 1.0
