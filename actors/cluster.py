"""Whose Ray this is: one that is there is joined and left as it was, else one is started here and taken down again."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from dataclasses import dataclass

import ray

from actors import watchdog
from rl.config import Settings

OBJECT_STORE_BYTES = 1 << 30
"""Of a Ray that we start: room for two versions of small weights and the batches; Ray spills to disk beyond it."""

CONNECT_SECONDS = 10.0


@dataclass
class Cluster:
    """A connection to Ray. ``close`` undoes exactly what ``connect`` did."""

    address: str
    session_dir: str
    started_here: bool
    connected_here: bool
    watcher: subprocess.Popen[bytes] | None = None  # of a Ray that was started here

    def close(self) -> None:
        """Stops a Ray that was started here, leaves one that was joined here, and touches no other."""
        if self.connected_here and ray.is_initialized():
            ray.shutdown()
        self.connected_here = False
        if self.watcher is not None:
            self.watcher.communicate()  # closes its input; it ends once nothing of Ray is left
            self.watcher = None


def connect(settings: Settings) -> Cluster:
    """An initialised Ray, else ``cluster.address``, else RAY_ADDRESS, else a Ray of our own on this machine.

    ValueError when the address named does not answer.
    """
    connected_here = not ray.is_initialized()
    address = settings.cluster.address or os.environ.get("RAY_ADDRESS")
    started_here = connected_here and address in (None, "", "local")
    others = watchdog.descendants(os.getpid())
    if connected_here:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if started_here:
            _start(settings)
        else:
            try:
                _knock(str(address))
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError) as error:
                raise ValueError(
                    f"no Ray answers at {address!r} (cluster.address or RAY_ADDRESS): {error}. "
                    f"Start one there, or unset both"
                ) from error
    node = ray._private.worker.global_worker.node  # the session folder has no public name
    session = node.get_session_dir_path() if node is not None else ""
    watcher = watchdog.start(watchdog.descendants(os.getpid()) - others) if started_here else None
    return Cluster(ray.get_runtime_context().gcs_address, session, started_here, connected_here, watcher)


def _knock(address: str) -> None:
    """OSError when nothing listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


def _start(settings: Settings) -> None:
    """A Ray of our own with room for every actor of the run, however few cores the machine has."""
    needed = settings.rollout.replicas * settings.rollout.tensor_parallel_size + settings.learner.workers
    ray.init(
        address="local",
        num_cpus=max(needed, len(os.sched_getaffinity(0))),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
