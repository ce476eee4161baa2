"""Checkpoints that are whole or not there: written aside, proven on disk, then renamed.

A checkpoint is a folder ``step_N`` with the files of the learner, ``state.json`` (where the run stood) and
``manifest.json`` (size and xxh3_64 of every other file). While it is being written it is called ``step_N.partial``.
What is newest is found by checking the bytes, never by a name or a pointer.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

STATE = "state.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d+)")
_PARTIAL = ".partial"
_CHUNK = 4 << 20  # bytes read at a time while hashing
_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those on disk can be used."""


def write(root: Path, step: int, fill: Callable[[Path], None], state: Mapping[str, Any], keep: int) -> Path:
    """Writes the checkpoint of ``step`` and returns its folder ``root/step_N``, validated after it got its name.

    ``fill(folder)`` writes the learner's files (folders inside are fine). ``state`` is plain JSON: data cursor, policy
    version, number of metric rows, data fingerprint and the like; "step" is added. A step_N that is already valid
    is left as it is. Afterwards only the ``keep`` newest valid checkpoints are left; until the new one is proven, no
    older one is touched.

    Raises CheckpointError when the disk is full, read-only or otherwise refuses, with what was wanted and what is left;
    ValueError when ``state`` is not JSON. Any other error of ``fill`` passes through. In each case no partial remains
    (as far as the disk lets it be removed) and the good checkpoints are as they were.
    """
    assert step >= 0 and keep >= 1, (step, keep)
    assert state.get("step", step) == step, (step, state["step"])
    text = json.dumps({**state, "step": step}, indent=1, allow_nan=False)
    root = Path(root)
    final = root / f"step_{step}"
    if validate(final) is not None:
        partial = root / f"step_{step}{_PARTIAL}"
        try:
            _build(partial, fill, text, step)
            _remove(final)  # damaged or not there, or we would not be here
            os.rename(partial, final)
            _sync_folder(root)
        except BaseException as error:
            held, free = _bytes_below(partial), _free_bytes(root)
            shutil.rmtree(partial, ignore_errors=True)  # a full or read-only disk may refuse; the next write retries
            if isinstance(error, Exception) and _is_storage(error, root, held, free):
                raise CheckpointError(_story(root, step, held, free, error)) from error
            raise
        reason = validate(final)
        if reason is not None:
            raise CheckpointError(f"checkpoint {final} was written but does not read back: {reason}.{_last_good(root)}")
    _prune(root, step, keep)
    return final


def validate(folder: Path) -> str | None:
    """None when every file of the checkpoint is there, whole and unchanged; otherwise what is wrong with the first.

    >>> validate(Path("no/such/step_3"))
    'is no folder'
    """
    folder = Path(folder)
    try:
        return _validate(folder)
    except OSError as error:
        return f"cannot be read: {error}"


def latest_valid(root: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest good checkpoint and its state; None only when ``root`` holds nothing at all.

    Whatever is newer, or has no step in its name, and is passed over is told to ``say`` with its reason: unfinished
    (``.partial``) folders, damaged ones, and entries that are no checkpoint, such as a "latest" pointer, which is
    never followed.

    Raises CheckpointError listing every reason when there is something but nothing good: to begin again quietly would
    throw the run away.
    """
    root = Path(root)
    reasons: list[str] = []
    for folder, step in _entries(root):
        reason = "is not a checkpoint, only a stray entry" if step is None else None
        if folder.name.endswith(_PARTIAL):
            reason = "was never finished"
        reason = reason or validate(folder)
        if reason is None:
            return folder, json.loads((folder / STATE).read_text(encoding="utf-8"))
        reasons.append(f"{folder.name} {reason}")
        say(f"passed over {folder}: it {reason}")
    if reasons:
        raise CheckpointError(
            f"no usable checkpoint in {root}: {'; '.join(reasons)}. Restore one of them, or begin anew in another "
            f"run.output_dir (or, to begin anew here, move {root} away)."
        )
    return None


def _build(partial: Path, fill: Callable[[Path], None], state: str, step: int) -> None:
    """Everything of a checkpoint but its name, and all of it on the disk (fsync) when this returns."""
    _remove(partial)
    partial.mkdir(parents=True)
    fill(partial)
    for reserved in (STATE, MANIFEST):
        assert not (partial / reserved).exists(), f"fill wrote {reserved}, which is the checkpoint's own"
    (partial / STATE).write_text(state, encoding="utf-8")
    files = {}
    for file in _files_below(partial):
        files[file.relative_to(partial).as_posix()] = {"size": file.stat().st_size, "xxh3_64": _checksum(file)}
        _sync_file(file)
    manifest = partial / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
    _sync_file(manifest)
    for folder, _, _ in os.walk(partial):
        _sync_folder(Path(folder))


def _validate(folder: Path) -> str | None:
    named = _NAME.fullmatch(folder.name)
    if not folder.is_dir():
        return "is no folder"
    if not (folder / MANIFEST).is_file():
        return f"has no {MANIFEST}"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        step = int(manifest["step"])
        wanted = {str(name): (int(item["size"]), str(item["xxh3_64"])) for name, item in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has a damaged {MANIFEST} ({type(error).__name__}: {error})"
    if named and int(named[1]) != step:
        return f"holds step {step}, which is not what its name says"
    if STATE not in wanted:
        return f"has a {MANIFEST} without {STATE}"
    for name, (size, _) in wanted.items():  # all sizes before the first checksum: they cost nothing
        if not (folder / name).is_file():
            return f"misses {name}"
        found = (folder / name).stat().st_size
        if found != size:
            return f"is damaged: {name} has {found} bytes instead of {size}"
    for name, (_, checksum) in wanted.items():
        found_sum = _checksum(folder / name)
        if found_sum != checksum:
            return f"is damaged: {name} has xxh3_64 {found_sum} instead of {checksum}"
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        return f"has a {STATE} that is no JSON: {error}"
    return None if isinstance(state, dict) else f"has a {STATE} that is no mapping"


def _entries(root: Path) -> Iterator[tuple[Path, int | None]]:
    """What lies in ``root``: first what has no step, then the newest step first (by number: step_10 before step_9).

    Hidden entries are the file system's own and left out.
    """
    if not root.is_dir():
        return
    found: list[tuple[float, Path, int | None]] = []
    for entry in root.iterdir():
        if not entry.name.startswith("."):
            named = _NAME.fullmatch(entry.name.removesuffix(_PARTIAL))
            step = int(named[1]) if named else None
            found.append((math.inf if step is None else step, entry, step))
    for _, entry, step in sorted(found, key=lambda item: item[:2], reverse=True):
        yield entry, step


def _prune(root: Path, step: int, keep: int) -> None:
    """Leaves the newest ``keep`` valid checkpoints, of which ``step`` is known to be one.

    What is older than the oldest of them goes, and so do unfinished folders. A damaged one that is newer stays where it
    is, to be looked at or written again.
    """
    kept = 0
    doomed: list[Path] = []
    for folder, number in _entries(root):
        if number is None:
            continue
        if folder.name.endswith(_PARTIAL) or kept == keep:
            doomed.append(folder)
        elif number == step or validate(folder) is None:
            kept += 1
    try:
        for folder in doomed:
            aside = folder
            if not folder.name.endswith(_PARTIAL):  # so that a kill halfway leaves no "damaged" checkpoint behind
                aside = folder.with_name(folder.name + _PARTIAL)
                os.rename(folder, aside)
            _remove(aside)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {step} is good, but {folder} cannot be removed: {error}"
        ) from error


def _is_storage(error: Exception, root: Path, held: int, free: int) -> bool:
    """Whether the disk is to blame. Libraries hide errno (safetensors, torch, Ray): then words or the space tell."""
    if isinstance(error, OSError):
        return True
    words = str(error)
    if any(os.strerror(number) in words for number in _STORAGE_ERRNOS):
        return True
    last = _newest_good(root)
    return free < max(held if last is None else _bytes_below(last), 1 << 20)


def _story(root: Path, step: int, held: int, free: int, error: Exception) -> str:
    last = _newest_good(root)
    wanted = f"{_amount(held)} were written when it failed"
    if last is not None:
        wanted += f", the last checkpoint took {_amount(_bytes_below(last))}"
    return (
        f"cannot write the checkpoint of step {step} in {root}: {error}. Wanted: {wanted}; "
        f"free there: {_amount(free)}.{_last_good(root)}"
    )


def _last_good(root: Path) -> str:
    last = _newest_good(root)
    if last is None:
        return " There is no good checkpoint yet."
    return f" The last good checkpoint is {last}: make room or make it writable, then continue with --resume."


def _newest_good(root: Path) -> Path | None:
    numbered = [folder for folder, step in _entries(root) if step is not None and not folder.name.endswith(_PARTIAL)]
    return next((folder for folder in numbered if validate(folder) is None), None)


def _free_bytes(folder: Path) -> int:
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _amount(count: int) -> str:
    """Bytes for people and for machines.

    >>> _amount(431), _amount(431_000_000)
    ('431 bytes', '431.0 MB (431000000 bytes)')
    """
    for name, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {name} ({count} bytes)"
    return f"{count} bytes"


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _bytes_below(folder: Path) -> int:
    """Size of what can be seen: it only serves messages, and ranks may still be writing or the disk be failing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(file, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_file(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """A file's name is on the disk only when its folder is."""
    _sync_file(folder)
