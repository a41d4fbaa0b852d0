"""The directory in the user's cache for snapshots of booted kernels and for large temporary files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory for snapshots and large temporary files. The directory may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home and home.startswith("/") else Path.home() / ".cache") / "kprobefs" / "kernels"
