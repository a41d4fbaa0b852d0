"""Thousands of probes: definition, a hit of many of them, and removal."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.files import EVENTS, Files
from tests.sample import fewer

pytestmark = [needs_fuse, pytest.mark.mounted]

MANY = fewer(10_000, 4)


def probeable(files: Files) -> list[str]:
    """Return the functions whose entries take a probe, found by trying all functions of machine/kallsyms."""
    taken = []
    for line in files.lines("machine/kallsyms"):
        _, kind, name, *_ = line.split()
        if kind in "tT":
            with suppress(OSError):
                files.write("kprobe_events", f"p:try{len(taken)} {name}\n")
                taken.append(name)
    files.shell("> kprobe_events")
    return taken


@pytest.mark.slow
def test_many_probes(files: Files) -> None:
    functions = probeable(files)
    assert len(functions) > 300
    places = [functions[number % len(functions)] for number in range(MANY)]
    text = "".join(f"p:e{number} {place}\n" for number, place in enumerate(places))
    assert files.write("kprobe_events", text) == len(text)
    assert len(files.lines("kprobe_events")) == MANY
    files.write(f"{EVENTS}/enable", "1")
    assert len(files.lines("kprobes/list")) == MANY
    files.path("scratch/d").mkdir()
    fired = [line for line in files.lines("kprobe_profile") if line.split()[1] != "0"]
    assert len(fired) > MANY * 9 // 100
    files.write(f"{EVENTS}/enable", "0")
    assert files.shell("> kprobe_events; cat kprobe_events kprobes/list").stdout == ""
    assert files.read("machine/version")
