"""The hint of `run` with the reason why the histogram of a synthetic event is empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kprobefs.cli.nothing_hint import Past
from kprobefs.cli.past_hists import PastHist
from kprobefs.cli.unmatched_hint import HINT_LINE, unmatched
from tests.fuse import durations
from tests.fuse.durations import READ, in_instance
from tests.fuse.harness import REAL_PROGRAM, kprobefs, needs_fuse
from tests.image.linux.debian import package
from tests.sample import fewer

MEASURED = durations.MEASURED.replace("VALUE", "common_timestamp-$t") + READ
REMOVED = "\n" + durations.REMOVED.replace("VALUE", "common_timestamp-$t")
ALL_REMOVED = f"{REMOVED}rmdir instances/i; echo > synthetic_events; echo > kprobe_events"
CLEARED = """
echo 'hist:keys=ns.log2:clear' >> events/synthetic/lat/trigger
echo 'hist:keys=common_pid:t=common_timestamp:clear' >> events/kprobes/in/trigger
"""


def hints_of(script: str, *options: str) -> list[str]:
    """Run a script with a mount, and return the hints about empty histograms on standard error."""
    done = kprobefs("run", *options, "--", "sh", "-c", script, program=REAL_PROGRAM)
    return [line for line in done.stderr.splitlines() if HINT_LINE.fullmatch(line)]


WHY = {
    "a match": ("", "", ""),
    "another key": (
        "keys=common_pid:d",
        "keys=common_timestamp:d",
        "no hit of out found a variable that in had set",
    ),
    "no first hit": ("p:in vfs_read", "p:in tcp_sendmsg", "in had no hit that sets a variable"),
    "no last hit": ("r:out vfs_read", "r:out tcp_sendmsg", "out had no hit"),
}
"""Case -> text of MEASURED, the text that replaces it, and the reason in the hint ("": no hint)."""
WHERE: dict[str, tuple[str, Callable[[str], str]]] = {
    "kept": ("", str),
    "removed": (ALL_REMOVED, str),
    "in an instance": ("", in_instance),
    "removed with the instance": (ALL_REMOVED, in_instance),
}
"""Case -> end of the script, and the function that moves the histograms."""
PAIRS = [
    (why, where)
    for shift in range(len(WHY))
    for why, where in zip(WHY, [*WHERE][shift:] + [*WHERE][:shift], strict=True)
]
"""All pairs of a case of WHY and one of WHERE. Each quarter of the list has each case once."""


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(("reason", "where"), PAIRS[: fewer(len(PAIRS), 2)])
def test_why_a_histogram_is_empty(reason: str, where: str) -> None:
    """The hint says why, wherever the histogram is, and also if everything was removed."""
    (old, new, why), (end, place) = WHY[reason], WHERE[where]
    script = f"{MEASURED}{end}"
    hints = hints_of(place(script.replace(old, new) if old else script))
    assert len(hints) == bool(why)
    assert all(f"the histogram of lat is empty: {why}" in hint for hint in hints)


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("place", [str, in_instance], ids=["at the top", "in an instance"])
def test_the_guests_own_histograms(place: Callable[[str], str]) -> None:
    """With `--kprobes kernel`, the hint is the same for histograms that exist."""
    image = str(package("linux-image-cloud-amd64"))
    script = MEASURED.replace("../dev/zero", "../scratch/file").replace(
        "=common_pid:d", "=common_timestamp:d"
    )
    script = f'echo text > "$KPROBEFS/scratch/file"\n{script}'
    (hint,) = hints_of(place(script), "--image", image, "--kprobes", "kernel")
    assert "the histogram of lat is empty: no hit of out found a variable that in had set" in hint


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    "end",
    [CLEARED, f"{REMOVED}echo 'hist:keys=ns.log2' > events/synthetic/lat/trigger"],
    ids=["cleared", "replaced"],
)
def test_a_histogram_that_had_hits_gets_no_hint(end: str) -> None:
    assert hints_of(f"{MEASURED}{end}") == []


def past(*hists: tuple[str, str, str, int], has_forgotten_hists: bool = False) -> Past:
    return Past(hists=[PastHist(*hist) for hist in hists], has_forgotten_hists=has_forgotten_hists)


FIRST = "kprobes/in", "hist:keys=a:t=common_timestamp"
LAST = "kprobes/out", "hist:keys=a:d=b-$t:onmatch(kprobes.in).lat($d)"
SHOWN = "synthetic/lat", "hist:keys=ns"


def test_the_array_of_a_variable_counts() -> None:
    """A variable belongs to one trace array. A synthetic event goes to all arrays."""
    missing = past(("i", *FIRST, 0), ("i", *LAST, 0), ("j", *FIRST, 3), ("", *SHOWN, 0))
    (hint,) = unmatched(missing)
    assert hint.endswith("in had no hit that sets a variable")
    assert not list(unmatched(past(("j", *FIRST, 0), ("i", *LAST, 0), ("i", *SHOWN, 0))))
    matched = past(("i", *FIRST, 1), ("i", *LAST, 1), ("j", *FIRST, 0), ("j", *LAST, 0), ("", *SHOWN, 0))
    assert not list(unmatched(matched))


def test_no_hint_without_all_histograms() -> None:
    empty = (("", *FIRST, 0), ("", *LAST, 0), ("", *SHOWN, 0))
    assert list(unmatched(past(*empty)))
    assert not list(unmatched(past(*empty, has_forgotten_hists=True)))
