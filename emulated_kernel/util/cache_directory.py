"""The directory for images of kernels and for large temporary files, in the user's cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory of the snapshots of booted kernels. It need not exist."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home and home.startswith("/") else Path.home() / ".cache") / "kprobefs" / "kernels"
