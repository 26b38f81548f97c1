"""Files that are there in full or not at all, and that say when they have been cut short or altered since."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial-"
"""In the names of files that are being written, or that were when a process was killed."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class StorageError(Exception):
    """A folder that cannot be written to, or a file that is not what was written."""


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file under a temporary name, waits until the disk has it, and gives it its name.

    Whoever reads ``path`` finds the old content or the new one; after a crash, too. If writing fails, the old content
    stays and the temporary file is removed.
    """
    # Not the number of the process: on two machines with one file system it may be the same.
    partial = path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(6)}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)  # noqa: PTH105 - Path.replace returns a path nobody needs
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """:func:`write_bytes` of text."""
    write_bytes(path, text.encode("utf-8"))


def remove_partial(folder: Path) -> None:
    """Removes what killed processes have left of files they were writing; nobody may be writing there now."""
    for path in folder.glob(f"*{PARTIAL}*"):
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some file systems cannot do this for folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def seal(folder: Path, name: str, notes: dict[str, object]) -> None:
    """Marks a folder as complete: the checksums of all its files, and notes, in the file ``name``, written last."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != name)
    for path in files:
        sync(path)
    sums = {path.relative_to(folder).as_posix(): checksum(path) for path in files}
    write_text(folder / name, json.dumps({"notes": notes, "sha256": sums}, indent=1))


def sealed(folder: Path, name: str) -> dict[str, object]:
    """The notes of a folder that :func:`seal` marked, after checking every file.

    Raises:
        StorageError: The mark is missing or unreadable, or a file is missing, cut short or altered.
    """
    mark = folder / name
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
        notes, sums = dict(found["notes"]), dict(found["sha256"])
    except FileNotFoundError:
        raise StorageError(f"{folder}: it was not written to the end") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{mark}: it is cut short or altered ({error})") from error
    for relative, expected in sums.items():
        path = folder / str(relative)
        if not path.is_file():
            raise StorageError(f"{path}: it is missing")
        if checksum(path) != expected:
            raise StorageError(f"{path}: it is cut short or altered since it was written (its checksum has changed)")
    return notes


@contextmanager
def explain_storage_errors(folder: Path) -> Iterator[None]:
    """Turns what a full disk or a read-only folder raises, in whatever library, into a :class:`StorageError`."""
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise StorageError(
            f"{folder}: {reason}. What was complete before is still there, and the run goes on from its last complete "
            "checkpoint when it is started again"
        ) from error


def _reason(error: BaseException) -> str | None:
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"the disk is full or the quota used up ({error.strerror}); free some space, or choose another folder"
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return f"it cannot be written to ({error.strerror}); mind its permissions, or choose another folder"
    text = str(error)
    writers = ("PytorchStreamWriter", "unexpected pos", "No space left", "File too large", "Disk quota")
    if any(sign in text for sign in writers):  # torch and safetensors do not raise an OSError
        return f"a file could not be written in full ({text.splitlines()[0][:120]}), perhaps the disk is full"
    return None
