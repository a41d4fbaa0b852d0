"""kprobefs over Debian's kernels, from 5.10 to the newest one, has the interface of the kernel itself."""

from __future__ import annotations

import pytest

from emulated_kernel.arch.analysis.probe_rules import PROBE_RULES
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import (
    detect_interface,
    interface_with,
    profile_of,
)
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.trace.interface import INTERFACES, Interface, InterfaceRule
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.util.linux_rule import series_of
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.oracle.inside.definitions import compare_definitions
from tests.oracle.inside.filters import compare_filters
from tests.oracle.inside.places import compare_places, kernel_places
from tests.oracle.inside.records import compare_records, recorded_definitions
from tests.sample import fewer

DEFINITIONS = fewer(60, 2)
FILTERS = 120
PLACES = 60
BACKPORTED = {InterfaceRule.HIST_POLL}
"""Rules that updates of earlier versions follow, too."""
META = "linux-image-cloud-amd64"
SUITES = (debian_kernel.SUITE, "trixie", "bullseye", "sid")


@pytest.mark.parametrize(("release", "series"), [("6.12.117+deb13-cloud-amd64", "6.12"), ("none", "5.10")])
def test_the_series_of_a_release(release: str, series: str) -> None:
    assert series_of(release) == series


@pytest.mark.parametrize("suite", SUITES)
def test_hits_are_boosted_in_kernels_without_preemption(suite: str) -> None:
    """The profile of a kernel has preemption exactly if the kernel's banner contains PREEMPT."""
    _, kernel = debian_kernel.with_kernel(META, suite)
    assert profile_of(kernel).preemption == ("PREEMPT" in kernel.version)


@pytest.mark.parametrize("suite", SUITES)
def test_a_kernel_answers_as_it_does_itself(suite: str) -> None:
    """kprobefs and the kernel itself give the same answers to definitions and filters, and make the same
    records.
    """
    linux = native_mount(debian_kernel.tasks(META, suite), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    tasks, text = debian_kernel.with_kernel(META, suite)
    engine = LinuxEngine(tasks, text, profile_of(text))
    ours = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    interface: Interface = engine.components.tracing.system.interface
    name = f"linux-{series_of(text.release)}"
    assert interface.name == engine.kprobes.profile.name == name
    # A suite may get a version without a profile.
    assert interface.rules - BACKPORTED == INTERFACES.get(name, interface).rules - BACKPORTED
    assert interface.release == detect_interface(text).release == text.release

    defined = compare_definitions(linux, ours, DEFINITIONS, 3, interface)
    assert not defined.differences, "\n".join(defined.differences[:5])
    assert defined.compared > defined.refused > 0
    filters = compare_filters(linux, ours, FILTERS, 3)
    assert not filters.differences, "\n".join(filters.differences[:5])
    assert filters.compared > filters.refused > 0
    recorded = compare_records(linux, ours, recorded_definitions(engine, interface))
    assert not recorded.differences, "\n".join(recorded.differences[:5])
    assert recorded.compared > 60
    linux.close()
    ours.close()


def test_later_kernels_judge_places_by_their_own_rules() -> None:
    tasks, kernel = debian_kernel.with_kernel(META, SUITES[1])
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    places = kernel_places(kernel, PLACES, 4)
    found = compare_places(linux, kernel, places, PROBE_RULES[profile_of(kernel).probe_rules])
    linux.close()
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > PLACES > found.refused > 0


def test_without_ftrace_there_are_no_fprobe_events() -> None:
    """Without ftrace, the interface has neither fprobe events nor events on tracepoints: Linux builds both
    together.
    """
    _, kernel = debian_kernel.with_kernel(META, SUITES[1])
    profile = profile_of(kernel)
    has_ftrace = interface_with(kernel, profile)
    lacks_ftrace = interface_with(kernel, replace(profile, ftrace=False))
    gone = {InterfaceRule.FPROBE_EVENTS, InterfaceRule.TRACEPOINT_EVENTS}
    assert has_ftrace.rules - lacks_ftrace.rules == gone
