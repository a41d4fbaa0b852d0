"""Client of debuginfod servers: downloads a build's debug information into the cache of debuginfod's clients.

Mirrors: elfutils debuginfod/debuginfod-client.c (the request, the environment variables and the cache).
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.progress import Progress

URLS = "DEBUGINFOD_URLS"
"""Environment variable with the addresses of the servers, which are separated by blanks."""
_PART = 1 << 20
_LIMIT = 16 << 30
"""Maximum size in bytes of a file that is downloaded."""
_PATIENCE = 90
"""Seconds without any data after which a server is given up. DEBUGINFOD_TIMEOUT overrides the number."""


def servers() -> list[str]:
    """Return the addresses of the debuginfod servers of this user."""
    return os.environ.get(URLS, "").split()


def fetch(build_id: str) -> Path:
    """Return the path of the debug information for a build id, from the cache or a server.

    Raises: CliError (no server has the file, or no server answers).
    """
    place = _cache() / build_id / "debuginfo"
    if place.is_file() and place.stat().st_size:
        return place
    failures = []
    for server in servers():
        url = f"{server.rstrip('/')}/buildid/{build_id}/debuginfo"
        try:
            _download(url, place)
        except HTTPError as error:
            failures.append(f"{server}: {error.code} {error.reason}")
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{server}: {error}")
        else:
            return place
    shown = "; ".join(map(escape_for_terminal, failures))
    raise CliError(f"{URLS}: no debug information for build id {build_id}: {shown}", ExitStatus.USAGE)


def _download(url: str, place: Path) -> None:
    """Download the file at a URL to the path `place`, where it appears only when it is complete.

    Raises: OSError (the server, the connection or the file fails), HTTPException (the answer is no HTTP),
    ValueError (a malformed URL or length).
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an address of the form http://HOST or https://HOST")
    with urlopen(Request(url, headers={"User-Agent": "kprobefs"}), timeout=_patience()) as answer:
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=place.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _copy(answer, file, int(answer.headers.get("Content-Length") or 0))
            os.replace(name, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def _copy(answer: BinaryIO, file: BinaryIO, expected: int) -> None:
    """Copy a server's answer of `expected` bytes to a file.

    If `expected` is 0, the server did not send the size.

    Raises: OSError (the answer is longer than _LIMIT or has another size, or the file cannot be written).
    """
    size = 0
    with Progress("debug information", expected) as progress:
        while part := answer.read(_PART):
            size += len(part)
            if size > _LIMIT:
                raise OSError(f"the file is larger than {_LIMIT >> 30} GiB")
            file.write(part)
            progress.add(len(part))
    if expected and size != expected:
        raise OSError(f"the connection ended after {size} of {expected} bytes")


def _patience() -> int:
    given = os.environ.get("DEBUGINFOD_TIMEOUT", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else _PATIENCE


def _cache() -> Path:
    own = os.environ.get("DEBUGINFOD_CACHE_PATH")
    if own:
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "debuginfod_client"
