"""Debian's own kernel, running in the emulator, answers definitions and places for probes as ours does."""

from __future__ import annotations

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import detect_interface, profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.interface import LINUX_6_1
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.oracle.inside.definitions import compare_definitions
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
    """errno of a probe there, and whether its kernel makes it a jump."""
    tasks, kernel = debian_kernel.with_kernel()
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    found = compare_places(linux, kernel, kernel_places(kernel, PLACES, 1), frozenset())
    linux.close()
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > PLACES > found.refused > PLACES // 20


def test_a_riscv64_kernel_is_answered_alike() -> None:
    """It refuses probes at entries of functions, so the definitions name places inside of them."""
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


def test_places_in_modules_are_judged_alike() -> None:
    """Both in one guest, which tells our engine what it has loaded."""
    found = compare_modules(str(debian_kernel.image()), [MODULE], PLACES, 1, frozenset())
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > PLACES > found.refused > PLACES // 20


def test_questions_name_the_registers_of_the_processor() -> None:
    question = "p:x vfs_read a=%di +0(%cx):x8[4] x=%pd"
    assert for_processor(question, "riscv64") == "p:x vfs_read a=%a0 +0(%a3):x8[4] x=%pd"
    assert for_processor(question, "x86_64") == question
