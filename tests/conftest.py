"""Fixtures that several groups of tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

collect_ignore = ["rewards_files"]  # reward functions as users write them, broken ones among them

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[object]:
    """One local Ray for the whole session, in a temp dir of its own; never somebody else's cluster."""
    import ray

    folder = tempfile.mkdtemp(prefix="prl-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=1 << 30,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
