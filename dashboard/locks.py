"""Locks between processes: who measures holds one, who comes later is told and waits.

A lock is the kernel's on an open file, so it ends with whoever holds it, however that ends, and a
child that got the file holds it too. What stands in the file only says who it is.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

POLL_S: Final = 0.2


def device_lock(device: str) -> Path:
    """Return the lock of a device, a GPU's UUID or "cpu": one for all checkouts and users.

    It lies in the folder for temporary files, so processes see each other's if they share that.
    """
    return Path(tempfile.gettempdir()) / f"ddtree-bench-{device}.lock"


@contextmanager
def held(path: Path, what: str, tell: Callable[[str], None]) -> Iterator[int]:
    """Hold a lock and yield its open file, for children that shall hold it too.

    Parameters
    ----------
    what : is being locked, for the words of who waits
    tell : called once if another process holds it, and once when it was let go
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _opened(path)
    try:
        if not _try(descriptor):
            holder = path.read_text(encoding="utf-8").strip() or "another process"
            tell(f"waiting for {what}: {holder} is measuring there (lock: {path})")
            while not _try(descriptor):
                time.sleep(POLL_S)
            tell(f"{what} is free")
        _sign(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """Open a lock for everybody: who may not write another user's file may still lock it."""
    if path.exists() and not os.access(path, os.W_OK):
        return os.open(path, os.O_RDONLY)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    if os.fstat(descriptor).st_uid == os.geteuid():
        os.fchmod(descriptor, 0o666)  # whatever the umask left
    return descriptor


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int) -> None:
    """Write who holds the lock, where the file may be written."""
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return
    now = datetime.now(UTC)
    os.ftruncate(descriptor, 0)
    os.pwrite(
        descriptor, f"process {os.getpid()} in {Path.cwd()} since {now:%H:%M:%S} UTC".encode(), 0
    )
