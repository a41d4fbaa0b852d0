"""Debian's own kernel, run in the emulator, and kprobefs give the same answers to definitions and about
places for probes.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import detect_interface, profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.interface import LINUX_6_1
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from kprobefs.definitions.syntax import Line
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.plan.check import check_lines
from kprobefs.plan.planned_kernel import planned_kernel
from tests.guests.linux import debian_kernel
from tests.oracle.inside.definitions import compare_definitions
from tests.oracle.inside.mount_files import write
from tests.oracle.inside.places import (
    compare_modules,
    compare_places,
    kernel_places,
    refused_sites,
    refuses_entries,
)
from tests.oracle.inside.records import compare_records, recorded_definitions
from tests.oracle.inside.registers import for_processor

DEFINITIONS, PLACES = 150, 80
MODULE = "dm_mod"
CLIENT = Client(1, 0, 0)


def test_definitions_are_answered_alike() -> None:
    linux = debian_kernel.mount()
    found = compare_definitions(linux, Kernel().mount(), DEFINITIONS, 1, LINUX_6_1)
    linux.close()
    assert not found.differences, "\n".join(found.differences[:5])
    assert DEFINITIONS == found.compared > found.refused > DEFINITIONS // 2


def test_our_engine_over_it_answers_and_records_alike() -> None:
    linux = debian_kernel.mount()
    engine = LinuxEngine(*debian_kernel.with_kernel())
    ours = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    defined = compare_definitions(linux, ours, DEFINITIONS // 2, 2, LINUX_6_1)
    assert not defined.differences, "\n".join(defined.differences[:5])
    assert defined.compared > defined.refused > 0
    found = compare_records(linux, ours, recorded_definitions(engine, LINUX_6_1))
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > 60
    for path in ("/scratch", "/kprobes"):
        handle = ours.opendir(CLIENT, path)
        assert ours.fgetattr(handle).ino == ours.getattr(path).ino
        ours.release(handle)
    linux.close()
    ours.close()


def test_places_are_judged_alike() -> None:
    """For a sample of places, Debian's kernel and kprobefs agree on the errno of a probe, and on whether the
    probe becomes a jump.
    """
    tasks, kernel = debian_kernel.with_kernel()
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    found = compare_places(linux, kernel, kernel_places(kernel, PLACES, 1), frozenset())
    linux.close()
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > PLACES > found.refused > PLACES // 20


def test_a_riscv64_kernel_is_answered_alike() -> None:
    """Debian's riscv64 kernel and kprobefs give the same answers.

    This kernel refuses probes at entries of functions, and so the definitions name places inside of
    functions.
    """
    package = "linux-image-riscv64", "trixie"
    tasks, kernel = debian_kernel.with_kernel(*package)
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    engine = LinuxEngine(*debian_kernel.with_kernel(*package), profile_of(kernel))
    ours = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    defined = compare_definitions(linux, ours, PLACES, 1, detect_interface(kernel), kernel)
    sites = refused_sites(kernel)
    places = kernel_places(kernel, PLACES, 1)
    placed = compare_places(linux, kernel, places, frozenset(), kernel.architecture, sites)
    linux.close()
    ours.close()
    for found in (defined, placed):
        assert not found.differences, "\n".join(found.differences[:5])
        assert found.compared > found.refused > 0
    assert refuses_entries(kernel)


@pytest.mark.parametrize(
    "package", [("linux-image-riscv64", "trixie"), ("linux-image-cloud-arm64", "trixie")], ids=str
)
def test_plans_for_a_kernel_that_uses_its_own_kprobes(package: tuple[str, str]) -> None:
    tasks, kernel = debian_kernel.with_kernel(*package)
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    plan = planned_kernel(None, str(debian_kernel.image(*package)), None, None, kprobes="kernel")
    dice = Random(1)
    symbols = [symbol for symbol in plan.judge.subject.symbols if symbol.name.isidentifier()]
    symbols = [symbol for symbol in symbols if kernel.kallsyms.count_name(symbol.name) == 1]
    offsets = [0, 0, 2, 4, 6, 8, 12]
    places = [f"{dice.choice(symbols).name}+{dice.choice(offsets)}" for _ in range(2 * PLACES)]
    lines = [f"{kind}:x{at} {place}" for kind in "pr" for at, place in enumerate(places)]
    answers = check_lines(plan, [Line("", number, text) for number, text in enumerate(lines, 1)])
    refused = {}
    for found in answers:
        assert found.outcome not in (ProbeOutcome.OPTIMIZED.value, ProbeOutcome.FTRACE.value)
        wanted = "" if found.outcome == ProbeOutcome.BREAKPOINT.value else found.outcome
        refused[found.line.text] = write(linux, "/tracing/kprobe_events", found.line.text, os.O_APPEND)
        assert refused[found.line.text] == wanted, found
    linux.close()
    assert {"", "EINVAL"} <= set(refused.values())


def test_places_in_modules_are_judged_alike() -> None:
    """For places in a loaded module, Debian's kernel and kprobefs agree.

    Both run in one guest, which reports its modules to kprobefs.
    """
    found = compare_modules(str(debian_kernel.image()), [MODULE], PLACES, 1, frozenset())
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > PLACES > found.refused > PLACES // 20


def test_questions_name_the_registers_of_the_processor() -> None:
    question = "p:x vfs_read a=%di +0(%cx):x8[4] x=%pd"
    assert for_processor(question, "riscv64") == "p:x vfs_read a=%a0 +0(%a3):x8[4] x=%pd"
    assert for_processor(question, "x86_64") == question
