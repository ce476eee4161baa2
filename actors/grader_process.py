"""A grader process seen from its supervisor: start, send, read answers under a deadline, kill."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_LAST_WORDS = 4000  # bytes of standard error kept for messages


class GraderDied(Exception):
    """The process ended or broke the protocol; the text says how, with its last words."""


class GraderLate(Exception):
    """No answer before the deadline."""


class GraderProcess:
    """One subprocess in a process group of its own. Used by one thread, which must outlive it (see ``die_with``)."""

    def __init__(self, setup: bytes, memory_mb: int, environment: Mapping[str, str] | None = None) -> None:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.grader", str(os.getpid()), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            env={**threads, **os.environ, "PYTHONPATH": path, **(environment or {})},
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self.pid = self._process.pid
        self._input = self._process.stdin
        self._out, self._err = self._process.stdout, self._process.stderr
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._selector.register(self._err, selectors.EVENT_READ)
        for pipe in (self._input, self._out, self._err):
            os.set_blocking(pipe.fileno(), False)
        self._buffer = b""
        self._lines: collections.deque[bytes] = collections.deque()
        self._words = b""
        self._ended = False
        self._gone = False
        self._send(setup, time.monotonic() + 60.0)

    def request(self, work: tuple[Any, ...], payload: bytes, deadline: float) -> None:
        """Sends one unit of work; ``payload`` is the pickled group. Raises GraderDied or GraderLate."""
        self._send(pickle.dumps((work, payload)), deadline)

    def _send(self, message: bytes, deadline: float) -> None:
        data = memoryview(struct.pack("<Q", len(message)) + message)
        while data:
            try:
                data = data[os.write(self._input.fileno(), data) :]
            except BlockingIOError:
                self._pump(min(0.01, self._left(deadline)))
            except BrokenPipeError:
                raise GraderDied(self.describe_end()) from None

    def answer(self, deadline: float) -> list[Any]:
        """The next answer. Raises GraderLate at ``deadline`` (time.monotonic) and GraderDied at the process's end."""
        while not self._lines:
            if self._ended:
                raise GraderDied(self.describe_end())
            self._pump(self._left(deadline))
        line = self._lines.popleft()
        try:
            answer = json.loads(line)
        except ValueError:
            raise GraderDied(f"the grader process wrote {line[:200]!r} where an answer belongs") from None
        assert isinstance(answer, list), answer
        return answer

    @staticmethod
    def _left(deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise GraderLate
        return left

    def _pump(self, timeout: float) -> None:
        """Reads what is there: answers into lines, what was printed on to our own standard error."""
        for key, _ in self._selector.select(timeout):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                self._ended = self._ended or key.fileobj is self._out
            elif key.fileobj is self._out:
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                self._lines.extend(lines)
            else:
                self._words = (self._words + data)[-_LAST_WORDS:]
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(data.decode(errors="replace"))
                    sys.stderr.flush()

    def describe_end(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the grader process closed its output"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (by the system for lack of memory?)" if code == -signal.SIGKILL else ""
        else:
            how = f"exited with status {code}"
        words = self._words.decode(errors="replace").strip()
        return f"the grader process {how}" + (f"; its last words:\n{words}" if words else "")

    def terminate(self) -> None:
        """SIGKILL to the group, from any thread; the owning thread still has to call ``kill``."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to its group and to descendants that left the group; returns when the process is gone."""
        if self._gone:
            return
        self._gone = True
        others: list[psutil.Process] = []
        if self._process.poll() is None:
            with contextlib.suppress(psutil.Error):
                others = psutil.Process(self.pid).children(recursive=True)
        # the group may outlive its leader: children of a function that are still running
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for other in others:
            with contextlib.suppress(psutil.Error):
                other.kill()
        self._process.wait()
        self._selector.close()
        for pipe in (self._input, self._out, self._err):
            pipe.close()
