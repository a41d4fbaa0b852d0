"""Fuzz the parsers guided by coverage: python stress/fuzz/atheris_parsers.py --target T [OPTIONS]

Needs the extra `fuzz`. Inputs are those of a target in parsers.py; what it finds is written to crash-*.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found, unused-ignore]  # of the extra

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(
    include=["emulated_kernel.trace", "emulated_kernel.image", "emulated_kernel.vfs"]
):
    from emulated_kernel.util.errors import KernelError
    from stress.fuzz.parsers import Target, targets
    from stress.fuzz.report import Violation


def main() -> None:
    """Run libFuzzer; its options follow those of this program."""
    known = targets()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=known, required=True)
    parsed, options = parser.parse_known_args()
    target = known[parsed.target]

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except KernelError as error:
            if (error.errno or 0) <= 0:
                raise Violation("an error without errno") from error

    with tempfile.TemporaryDirectory() as corpus:
        _write_seeds(target, Path(corpus))
        # libFuzzer ends the process; the first directory takes what it adds.
        atheris.Setup([sys.argv[0], *options, corpus], run)
        atheris.Fuzz()


def _write_seeds(target: Target, corpus: Path) -> None:
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)


if __name__ == "__main__":
    main()
