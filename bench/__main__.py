"""Runs the named benches (all of them by default), prints each result and keeps it in runs/bench/NAME.json."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path

BENCHES = ("weight_sync", "rollout", "learner", "quickstart", "trl")
OUT = Path("runs/bench")


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no such bench: {', '.join(unknown)}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    OUT.mkdir(parents=True, exist_ok=True)
    for name in names or BENCHES:
        load, started = os.getloadavg()[0], time.strftime("%Y-%m-%d %H:%M")
        result = importlib.import_module(f"bench.{name}").run()
        result |= {"load_average_before": load, "started": started, "cpus": len(os.sched_getaffinity(0))}
        (OUT / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"== {name}")
        for key, value in result.items():
            print(f"{key:<36} {value:.4g}" if isinstance(value, float) else f"{key:<36} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
