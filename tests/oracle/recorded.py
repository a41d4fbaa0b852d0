"""Reader of a real kernel's recorded answers: function tables, and the result for each probe point."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from errno import errorcode
from functools import cache
from pathlib import Path
from typing import Any

from emulated_kernel.arch.analysis.function import Function, PatchSite
from tests.arch.sample import MODULES, Sample

ROOT = Path(__file__).resolve().parents[2]
IMAGE_ALIGNMENT = 2 << 20
CALL_SIZE = 5
"""Size in bytes of a static call site, and of an fentry site."""


def oracle_directory() -> Path:
    """Return the directory of the recordings: $KPROBEFS_ORACLE, or `shared/oracle` next to the project."""
    return Path(os.environ.get("KPROBEFS_ORACLE") or ROOT.parent / "shared" / "oracle")


@dataclass(frozen=True, slots=True)
class Point:
    """One probe point as it was written to kprobe_events, and the kernel's answer."""

    symbol: str
    offset: int
    addr: int | None
    """Address of the point; None if the symbol does not exist."""
    ambiguous: bool
    """Whether several symbols have the name.

    The recorded tables hold one symbol per name, so the address is stored with the point.
    """
    errno: str
    flags: str

    @property
    def place(self) -> str:
        """Return the place as symbol+offset."""
        return f"{self.symbol}+{self.offset:#x}"


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded answers of one real kernel."""

    version: str
    sample: Sample
    points: tuple[Point, ...]


def versions(directory: Path) -> list[str]:
    """Return the versions of the kernels whose functions and results are in `directory`."""
    functions = sorted(directory.glob("functions-*.json.gz"))
    found = [path.name.removeprefix("functions-").removesuffix(".json.gz") for path in functions]
    return [version for version in found if _verdicts(directory, version).exists()]


def recordings(directory: Path) -> Iterator[Recording]:
    """Yield the recording of each kernel in `directory`."""
    return (recording(directory, version) for version in versions(directory))


def _verdicts(directory: Path, version: str) -> Path:
    return directory / f"optverdict-{version}.csv.gz"


@cache
def recording(directory: Path, version: str) -> Recording:
    """Return the recording of one kernel; reading it takes a second."""
    points = tuple(_points(_verdicts(directory, version)))
    return Recording(version, _sample(directory / f"functions-{version}.json.gz", points), points)


def _points(path: Path) -> Iterator[Point]:
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            yield Point(
                symbol=row["symbol"],
                offset=int(row["offset"], 0),
                addr=int(row["addr"], 16) if row["addr"] else None,
                ambiguous=row["category"] == "dupname",
                errno=row["errno"],
                flags=row["flags"],
            )


def _sample(path: Path, points: tuple[Point, ...]) -> Sample:
    with gzip.open(path) as file:
        recorded = json.load(file)
    names = {name: int(value, 16) for name, value in recorded.pop("_meta")["ranges"].items()}
    text = range(names["_stext"], names["_etext"])
    return Sample(
        functions=[_function(name, entry) for name, entry in recorded.items()],
        text=text,
        end=_image_end(text, points),
        names=names,
        blacklisted=frozenset(name for name, entry in recorded.items() if entry["blacklisted"]),
        complete=False,
    )


def _image_end(text: range, points: tuple[Point, ...]) -> int:
    """Return the end of the kernel image, which is not recorded: the end of the large page that contains the
    last symbol.
    """
    symbols = (p.addr for p in points if p.addr and p.offset == 0)
    last = max((addr for addr in symbols if text.start <= addr < MODULES.start), default=text.stop)
    return -(-max(last + 1, text.stop) // IMAGE_ALIGNMENT) * IMAGE_ALIGNMENT


def _function(name: str, entry: dict[str, Any]) -> Function:
    def addresses(key: str) -> frozenset[int]:
        return frozenset(int(value, 16) for value in entry.get(key, ()))

    def sites(key: str) -> tuple[PatchSite, ...]:
        return tuple(PatchSite(addr, CALL_SIZE) for addr in sorted(addresses(key)))

    return Function(
        name=name,
        addr=int(entry["addr"], 16),
        size=entry["size"],
        code=bytes.fromhex(entry["bytes_hex"]),
        fentry_sites=sites("mcount"),
        exception_entries=addresses("ex_table"),
        bug_entries=addresses("bug"),
        jump_labels=tuple(PatchSite(int(addr, 16), size) for addr, size in entry.get("jump_labels", ())),
        static_calls=sites("static_calls"),
    )


def errno_name(errno: int) -> str:
    """Return "0" or the symbolic name of an errno, as it is recorded."""
    return errorcode[errno] if errno else "0"
