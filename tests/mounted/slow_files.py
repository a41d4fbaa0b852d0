"""A file system with one file, whose readers wait until a signal: python slow_files.py DIR."""

from __future__ import annotations

import signal
import stat
import sys
import threading
from typing import Any

from fuse import FUSE, Operations

SIZE = 100


class SlowFiles(Operations):  # type: ignore[misc]
    """A file system with the file slow.ko. The event `answers` is set when the file can be read."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def getattr(self, path: str, _fh: object = None) -> dict[str, Any]:
        kind = stat.S_IFDIR | 0o755 if path == "/" else stat.S_IFREG | 0o644
        return {"st_mode": kind, "st_nlink": 1, "st_size": SIZE}

    def readdir(self, _path: str, _fh: object) -> list[str]:
        return ["slow.ko"]

    def read(self, _path: str, size: int, offset: int, _fh: object) -> bytes:
        self.answers.wait()
        return bytes(max(0, min(size, SIZE - offset)))


if __name__ == "__main__":
    files = SlowFiles()

    def wait_for_signal() -> None:
        signal.sigwait([signal.SIGUSR1])
        files.answers.set()

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    threading.Thread(target=wait_for_signal, daemon=True).start()
    FUSE(files, sys.argv[1], foreground=True, nothreads=False)
