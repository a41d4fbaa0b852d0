"""Fuzz a parser with coverage guidance: python stress/fuzz/atheris_parsers.py --target T [OPTIONS].

This needs the extra `fuzz`. The first inputs are the seeds of a target in parsers.py. An input that fails is
written to crash-*.
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
    """Run libFuzzer with the options that this program does not know."""
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
        # libFuzzer ends the process, and adds inputs to the first directory among its arguments.
        atheris.Setup([sys.argv[0], *options, corpus], run)
        atheris.Fuzz()


def _write_seeds(target: Target, corpus: Path) -> None:
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)


if __name__ == "__main__":
    main()
