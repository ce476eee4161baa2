"""Takes a Ray that we started down with us, even when we are killed: ``python -m actors.watchdog PID:STARTED ...``.

Ray's own reaper kills most of it at once, but its two agents stay for another minute, trying to tell a server that is
gone of their parent's death. This process waits for the end of its standard input, which the kernel closes with the
process that holds the other end, however that one dies.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

import psutil

GRACE_SECONDS = 3.0
"""For an orderly shutdown, and for Ray's own reaper."""


def descendants(root: int) -> set[psutil.Process]:
    return set(psutil.Process(root).children(recursive=True))


def start(processes: Iterable[psutil.Process]) -> subprocess.Popen[bytes]:
    """Watches over ``processes``; close its ``stdin`` to end it."""
    names = [f"{process.pid}:{process.create_time()}" for process in processes]
    return subprocess.Popen(
        [sys.executable, "-m", "actors.watchdog", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C at the terminal is not for it
    )


def main(names: list[str]) -> None:
    """Waits, then kills what is left of the named processes (by pid and start, so that no other is ever hit)."""
    watched = []
    for name in names:
        pid, _, started = name.partition(":")
        try:
            process = psutil.Process(int(pid))
        except psutil.NoSuchProcess:
            continue
        if process.create_time() == float(started):
            watched.append(process)
    sys.stdin.buffer.read()
    _, alive = psutil.wait_procs(watched, timeout=GRACE_SECONDS)
    for process in alive:
        try:
            process.kill()  # checks the start time again
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
