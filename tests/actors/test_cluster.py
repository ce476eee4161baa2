"""Whose Ray it is: joined ones are left as they were, and only a Ray of our own is taken down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from actors import watchdog
from actors.cluster import connect
from rl.settings_file import from_mapping

pytestmark = pytest.mark.ray

JOIN = """
import sys
from actors.cluster import connect
from rl.settings_file import from_mapping
address = sys.argv[1] if len(sys.argv) > 1 else None
cluster = connect(from_mapping({"train": {"steps": 1}, "cluster": {"address": address}}))
import ray
print(cluster.started_here, sorted(node["NodeID"] for node in ray.nodes()))
cluster.close()
print(ray.is_initialized())
"""


def settings(**cluster: Any) -> Any:
    return from_mapping({"train": {"steps": 1}, "cluster": cluster})


def nodes(ray: Any) -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes())


def run(program: str, *arguments: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_initialised_ray_is_used_and_left_alone(ray_cluster: Any) -> None:
    cluster = connect(settings())
    assert not cluster.started_here and cluster.watcher is None
    cluster.close()
    assert ray_cluster.is_initialized()


def test_a_named_cluster_is_joined_and_still_there_afterwards(ray_cluster: Any) -> None:
    address = ray_cluster.get_runtime_context().gcs_address
    expected = f"False {nodes(ray_cluster)}\nFalse\n"
    assert run(JOIN, address) == expected
    assert run(JOIN, RAY_ADDRESS=address) == expected
    assert ray_cluster.get(ray_cluster.put(7)) == 7


def test_without_an_address_a_ray_of_our_own_is_started_and_taken_down(ray_cluster: Any) -> None:
    output = run(JOIN)
    assert output.startswith("True [") and output.endswith("False\n")
    assert nodes(ray_cluster)[0] not in output  # never somebody else's


def test_an_address_that_does_not_answer_is_refused() -> None:
    program = JOIN.replace("cluster = connect", "cluster = None\ntry:\n    connect").replace(
        "\nimport ray\n", "\nexcept ValueError as error:\n    print(error)\n    sys.exit()\n"
    )
    output = run(program, "127.0.0.1:1")
    assert "no Ray answers at '127.0.0.1:1'" in output and "cluster.address or RAY_ADDRESS" in output


def test_the_watchdog_kills_what_it_watches_when_its_owner_dies_and_nothing_else() -> None:
    sleeps = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import psutil, sys, time\nfrom actors import watchdog\n"
            "guard = watchdog.start([psutil.Process(int(sys.argv[1]))])\nprint(guard.pid, flush=True)\ntime.sleep(600)",
            str(sleeps[0].pid),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        guard = psutil.Process(int(owner.stdout.readline()))
        time.sleep(1.0)
        assert sleeps[0].poll() is None
        owner.kill()
        assert sleeps[0].wait(timeout=watchdog.GRACE_SECONDS + 10) == -9
        assert sleeps[1].poll() is None
        psutil.wait_procs([guard], timeout=10)
        assert not guard.is_running() or guard.status() == psutil.STATUS_ZOMBIE
    finally:
        for process in (*sleeps, owner):
            process.kill()
            process.wait()
