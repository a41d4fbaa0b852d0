"""The same seed and the same requests give byte-identical traces, logs and other files, and even the same
times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.sample import WHOLE, fewer

PROJECT = Path(__file__).resolve().parents[3]
HASH_SEEDS = ("0", "1", "2", "random")
"""Values of PYTHONHASHSEED: the order in which Python iterates over sets must not matter."""
RUNS = fewer(5, 3)
"""Number of runs in one process."""
CASES = [("x86_64", 1), ("i386", 1), ("riscv64", 1), ("x86_64", 4)]


@cache
def session(arch: str, seed: int, runs: int, hash_seed: str = "0", cpus: int = 1) -> tuple[list[str], str]:
    """Return the digest of each run, and the text of the last run.

    `hash_seed`: value of PYTHONHASHSEED. `cpus`: number of the guest's CPUs.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.guests.builtin.determinism", str(runs), arch, str(seed), str(cpus)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    *digests, text = done.stdout.split("\n", runs)
    return digests, text


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "cpus"), CASES)
def test_runs_are_byte_identical(arch: str, cpus: int) -> None:
    """Two runs in each of two processes show the same bytes; with KPROBEFS_WHOLE=1, five runs in each of four
    processes.
    """
    hash_seeds = HASH_SEEDS if WHOLE else ("0", HASH_SEEDS[1 + CASES.index((arch, cpus)) % 3])
    digests: list[str] = []
    shown = []
    for hash_seed in hash_seeds:
        found, text = session(arch, 1, RUNS, hash_seed, cpus)
        digests += found
        shown.append(text)
    assert shown[1:] == shown[:-1]
    assert len(digests) == RUNS * len(hash_seeds)
    assert len(set(digests)) == 1


def test_another_seed_gives_other_times_for_the_same_events() -> None:
    """Another seed changes only the times of records, not their order, tasks and text."""
    one, other = (records(session("x86_64", seed, RUNS, HASH_SEEDS[0], 1)[1]) for seed in (1, 2))
    assert len(one) == len(other) > 20
    assert [words for _, words in one] == [words for _, words in other]
    assert [time for time, _ in one] != [time for time, _ in other]


def records(text: str) -> list[tuple[str, str]]:
    """Return (time, task and text) for each record of the top trace array."""
    trace = text.partition("== /tracing/trace\n")[2].partition("\n== ")[0]
    # A recorded string may contain line ends, too.
    lines = [line.split(None, 4) for line in trace.splitlines() if " [000] " in line]
    return [(time, f"{task} {words}") for task, _cpu, _flags, time, words in lines]
