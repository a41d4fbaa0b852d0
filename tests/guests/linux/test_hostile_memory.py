"""Damaged data of a distribution's kernel or of a dump: every reader of the host ends with an answer or an
errno.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from stress.hostile import linux
from stress.hostile.corruption import NOT_CANONICAL, attack
from tests.guests.linux.files import Files
from tests.guests.linux.parts import core
from tests.guests.linux.test_core import dumped, mount
from tests.sample import WHOLE

__all__ = ("dumped", "mount")
CLIENT = Client(4242, 0, 0)


@pytest.fixture(scope="module")
def engine() -> Iterator[LinuxEngine]:
    with linux.victim() as made:
        yield made


def test_a_circle_of_tasks(engine: LinuxEngine, caplog: pytest.LogCaptureFixture) -> None:
    """If the task list is circular, the tasks before the circle and the idle task are found, and the damage
    is reported once.

    All ranges of code then count as in use.
    """
    stacks = engine._stacks
    memory = engine.machine.memory
    whole = [*stacks.task_structs()]
    link = engine.kernel.btf.offset("task_struct.tasks")
    third = whole[2] + link
    saved = memory.read_word(third)
    memory.write_word(third, third)
    try:
        assert [*stacks.task_structs()] == [*whole[:3], whole[-1]]
        assert [*stacks.task_structs()] == [*whole[:3], whole[-1]]
        assert stacks.in_use_ranges([(1, 2)]) == [(1, 2)]
    finally:
        memory.write_word(third, saved)
    assert sum("task list" in record.getMessage() for record in caplog.records) == 1
    assert [*stacks.task_structs()] == whole


def test_each_damaged_word(engine: LinuxEngine, caplog: pytest.LogCaptureFixture) -> None:
    """If one pointer, length or page table entry that the host reads is wrong, every reader of the host still
    ends.
    """
    caplog.set_level(logging.CRITICAL)
    watched = linux.watched(engine)
    readers = linux.readers(engine)
    before = engine.machine.memory.ram[: 1 << 20]
    names = {name for name, _, _ in attack(watched, readers, random.Random(1), None if WHOLE else 12)}
    assert names == readers.keys()
    assert engine.machine.memory.ram[: 1 << 20] == before


def test_each_damaged_word_of_a_dump(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    calls = core(mount)
    with calls.engine.lock:
        watched = linux.watched(calls.engine)
        readers = linux.engine_readers(calls.engine)
        names = {name for name, _, _ in attack(watched, readers, random.Random(1), None if WHOLE else 12)}
    assert names == readers.keys()


@pytest.mark.parametrize("member", ["rethooks", "kretprobe_instances"])
def test_a_wild_word_of_a_dumps_task(mount: Mount, dumped: Path, member: str) -> None:
    """If a field of a dump's task that return hooks use is wild, function calls and reads of files answer or
    are undone.
    """
    del dumped
    calls = core(mount)
    memory = calls.engine.machine.memory
    at = calls.guest.init_task + calls.engine.kernel.btf.offset(f"task_struct.{member}")
    shell = Files(mount, CLIENT)
    shell.write("/kprobe_events", "r:back int_sqrt $retval\n")
    shell.write("/tracing/events/kprobes/back/enable", "1")
    saved = memory.read_word(at)
    for value in (NOT_CANONICAL, 1, at, (1 << 64) - 1):
        memory.write_word(at, value)
        for path in ("/machine/dmesg", "/files/scratch/numbers", "/kprobe_events"):
            assert shell.read(path)
        assert shell.call("int_sqrt 144").startswith(("int_sqrt = 0xc", "E"))
        assert [entry.name for entry in islice(mount.readdir("/files/scratch"), 2)] == [".", ".."]
    memory.write_word(at, saved)
    assert shell.call("int_sqrt 144") == "int_sqrt = 0xc (12)\n"
    shell.write("/tracing/events/kprobes/back/enable", "0")
    shell.write("/kprobe_events", "-:back\n")


def test_files_of_a_damaged_dump(mount: Mount) -> None:
    """If a word of the fs_struct of a dump's task is wrong, requests on files end with an answer or
    an errno.
    """
    calls = core(mount)
    memory = calls.engine.machine.memory
    root = memory.read_word(calls.guest.init_task + calls.engine.kernel.btf.offset("task_struct.fs"))
    shell = Files(mount, CLIENT)
    rnd = random.Random(4)
    for place in rnd.sample(range(root, root + 48, 8), 4):
        saved = memory.read_word(place)
        memory.write_word(place, rnd.choice((0, place, NOT_CANONICAL)))
        for read in (lambda: shell.read("/files/scratch/numbers"), lambda: mount.getattr("/files/proc")):
            try:
                read()
            except KernelError as error:
                assert error.errno  # noqa: PT017 - it may also succeed
        memory.write_word(place, saved)
    assert shell.read("/files/scratch/numbers")
