"""The hint of `run` that durations in a histogram come from the virtual clock and are not real times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kprobefs.cli.duration_hint import patches_slowly
from tests.fuse import durations
from tests.fuse.durations import READ, in_instance
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.image.linux.debian import package

MEASURED = f"{durations.MEASURED}for n in 1 2 3 4 5 6 7 8 9 10; do {READ}; done\n"
DURATION = MEASURED.replace("VALUE", "common_timestamp-$t")
REMOVED = durations.REMOVED.replace("VALUE", "common_timestamp-$t")
ALL_REMOVED = f"{REMOVED}rmdir instances/i; echo > synthetic_events; echo > kprobe_events"


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("script", "is_given"),
    [
        (DURATION, True),
        (f"{DURATION}cat events/synthetic/lat/hist", True),
        (DURATION.replace(" 6 7 8 9 10", ""), False),
        (MEASURED.replace("VALUE", "common_pid").replace("common_timestamp", "common_pid"), False),
        (f"{DURATION}{REMOVED}", True),
        (f"{DURATION}{ALL_REMOVED}", True),
        (in_instance(DURATION), True),
        (in_instance(f"{DURATION}{ALL_REMOVED}"), True),
        (f"{DURATION}echo 'hist:keys=ns.log2:clear' >> events/synthetic/lat/trigger", True),
        (DURATION.replace(" 6 7 8 9 10", "") + REMOVED, False),
        (MEASURED.replace("VALUE", "common_pid").replace("common_timestamp", "common_pid") + REMOVED, False),
    ],
    ids=[
        "durations",
        "its own reads",
        "too few",
        "no durations",
        "removed",
        "all removed",
        "in an instance",
        "removed with the instance",
        "cleared",
        "too few removed",
        "others removed",
    ],
)
def test_equal_durations(script: str, is_given: bool) -> None:
    done = kprobefs("run", "--", "sh", "-c", script, program=REAL_PROGRAM)
    hint = "kprobefs: the durations of lat count readings of the virtual clock"
    assert done.stderr.startswith(hint) is is_given


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("clock", "kprobes", "place"),
    [
        ("virtual", "kprobefs", str),
        ("real", "kprobefs", str),
        ("virtual", "kprobefs", in_instance),
        ("virtual", "kernel", in_instance),
    ],
)
def test_durations_of_a_distributions_kernel(clock: str, kprobes: str, place: Callable[[str], str]) -> None:
    """On a distribution's kernel, the hint is shown with the virtual clock, and not with the real clock.

    Durations by the virtual clock fall into several buckets there, but still are not real times.
    """
    image = str(package("linux-image-cloud-amd64"))
    script = DURATION.replace("../dev/zero", "../scratch/file").replace("cd", "echo text > scratch/file; cd")
    script = place(f'cd "$KPROBEFS"; {script}')
    options = ("--image", image, "--clock", clock, "--kprobes", kprobes)
    done = kprobefs("run", *options, "--", "sh", "-c", script, program=REAL_PROGRAM)
    assert done.stderr.startswith("kprobefs: the durations of lat count readings") is (clock == "virtual")


@needs_fuse
@pytest.mark.mounted
def test_the_real_clock_needs_no_hint() -> None:
    done = kprobefs("run", "--clock", "real", "--", "sh", "-c", DURATION, program=REAL_PROGRAM)
    assert done.stderr == ""


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("clock", "kprobes"), [("model", "kernel"), ("model", "kprobefs"), ("virtual", "kernel")]
)
def test_the_kernels_own_call_graph_is_slow_with_the_model_clock(
    clock: str, kprobes: str, directory: Path
) -> None:
    image = str(package("linux-image-cloud-amd64"))
    words = ("--image", image, "--kprobes", kprobes, "--clock", clock)
    with daemon(directory, *words, program=REAL_PROGRAM):
        assert patches_slowly(str(directory)) == ((clock, kprobes) == ("model", "kernel"))
