"""Runs what the documents show: ``make test-docs``.

A fenced block is run when the line above it says ``<!-- test: run -->`` (bash, python) or ``<!-- test: yaml -->``
(settings). All blocks run in order in one copy of configs/ and examples/, so that a later one may use what an earlier
one made. Links between files are followed, and what ``parkrl init`` writes is run. Exits 1 when anything failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- test: (run|yaml) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#([\w-]+))?\)")
TIMEOUT = 400


def documents() -> list[Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
        ROOT.glob("docs/**/*.md")
    )


def run(command: list[str], folder: Path) -> None:
    """Raises RuntimeError with the end of what the command said when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def run_block(kind: str, language: str, text: str, folder: Path) -> None:
    if kind == "yaml":
        from rl.settings_file import load

        (folder / "block.yaml").write_text(text, encoding="utf-8")
        load(folder / "block.yaml")
    elif language == "python":
        run([sys.executable, "-c", text], folder)
    else:
        run(["bash", "-euo", "pipefail", "-c", text], folder)


def check_links(document: Path) -> None:
    """Raises RuntimeError for a link to a file or heading that is not there."""
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file = document.parent / target
        if not file.exists():
            raise RuntimeError(f"link to {target}: no such file")
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        if anchor and anchor not in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}:
            raise RuntimeError(f"link to {target}#{anchor}: no such heading")


def run_starter(folder: Path) -> None:
    """What ``parkrl init`` writes runs as it is."""
    run(["parkrl", "init", "started"], folder)
    config = next((folder / "started").glob("*.yaml"))
    run(["parkrl", "check", str(config.relative_to(folder))], folder)
    run(["parkrl", "train", str(config.relative_to(folder)), "--set", "train.steps=2"], folder)


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    for document in documents():
        name = document.relative_to(ROOT)
        yield f"{name}: links", lambda document=document: check_links(document)  # type: ignore[misc]
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            groups = match.groups()
            yield f"{name}:{line} {groups[1]}", lambda groups=groups: run_block(*groups, folder)  # type: ignore[misc]
    yield "parkrl init", lambda: run_starter(folder)


def main() -> int:
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="parkrl-docs-") as made:
        for name in ("configs", "examples"):
            shutil.copytree(ROOT / name, Path(made) / name)
        for name, case in cases(Path(made)):
            started = time.monotonic()
            try:
                case()
            except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"FAILED {name}: {error}", flush=True)
            else:
                passed += 1
                print(f"passed {name} ({time.monotonic() - started:.1f} s)", flush=True)
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
