"""The same seed and the same requests give byte-identical traces, logs and other files, and even the same
times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.sample import WHOLE, fewer, share

PROJECT = Path(__file__).resolve().parents[3]
HASH_SEEDS = ("0", "1", "2", "random")
"""Values of PYTHONHASHSEED: the order in which Python iterates over sets must not matter."""
RUNS = fewer(5, 3)
"""Number of runs in the first process."""
KERNELS = ("x86_64,1,1", "i386,1,1", "riscv64,1,1", "x86_64,1,4")
"""Architecture, seed and number of CPUs."""
OTHER_SEED = "x86_64,2,1"

Run = tuple[list[str], str]
"""The digest of each run, and the text of the last run."""


@cache
def sessions(hash_seed: str, runs: int) -> dict[str, Run]:
    """Run the sessions in a new process, and return kernel -> its runs. `hash_seed`: its PYTHONHASHSEED."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.guests.builtin.determinism", str(runs), *KERNELS, OTHER_SEED],
        cwd=PROJECT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found: dict[str, Run] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_runs_are_byte_identical() -> None:
    """Two runs in one process and a run in another show the same bytes; with KPROBEFS_WHOLE=1, five runs in
    each of four processes.
    """
    repeats = [(HASH_SEEDS[0], RUNS)] + [(each, RUNS if WHOLE else 1) for each in share(HASH_SEEDS[1:], 2, 3)]
    found = [sessions(*each) for each in repeats]
    for kernel in KERNELS:
        digests = [digest for process in found for digest in process[kernel][0]]
        assert len(digests) == sum(runs for _, runs in repeats) > 2
        assert len(set(digests)) == 1, kernel
        assert len({process[kernel][1] for process in found}) == 1, kernel


def test_another_seed_gives_other_times_for_the_same_events() -> None:
    """Another seed changes only the times of records, not their order, tasks and text."""
    found = sessions(HASH_SEEDS[0], RUNS)
    one, other = (records(found[kernel][1]) for kernel in (KERNELS[0], OTHER_SEED))
    assert len(one) == len(other) > 20
    assert [words for _, words in one] == [words for _, words in other]
    assert [time for time, _ in one] != [time for time, _ in other]


def records(text: str) -> list[tuple[str, str]]:
    """Return (time, task and text) for each record of the top trace array."""
    trace = text.partition("== /tracing/trace\n")[2].partition("\n== ")[0]
    # A recorded string may contain line ends, too.
    lines = [line.split(None, 4) for line in trace.splitlines() if " [000] " in line]
    return [(time, f"{task} {words}") for task, _cpu, _flags, time, words in lines]
