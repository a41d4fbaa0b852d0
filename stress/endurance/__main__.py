"""Attack a mount for minutes: python -m stress.endurance [ATTACK...] [--count N | --seconds S] [--seed N]."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from stress.endurance.attacks import ATTACKS, SLOWEST


def main() -> int:
    """Run the named attacks, or all of them; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m stress.endurance", description=__doc__)
    parser.add_argument("--count", type=int, default=0, help="operations, kills or rounds")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="time of each attack (default: 60, or no limit with --count)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--slowest", type=float, default=SLOWEST, help="greatest time of a request in seconds"
    )
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}")
    parsed = parser.parse_args()
    seconds = parsed.seconds or (0.0 if parsed.count else 60.0)
    status = 0
    for name in parsed.attacks or ATTACKS:
        if name not in ATTACKS:
            parser.error(f"{name}: unknown attack; use {', '.join(ATTACKS)}")
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place, "mnt")
            directory.mkdir()
            try:
                result = ATTACKS[name](directory, parsed.count, seconds, parsed.seed, parsed.slowest)
            # A failure must not prevent the other attacks.
            except Exception as error:
                result, status = f"FAILED: {type(error).__name__}: {error}", 1
        print(f"{name}: {result} ({time.monotonic() - start:.0f} s)", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
