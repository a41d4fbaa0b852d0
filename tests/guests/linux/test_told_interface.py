"""A distribution's kernel has the interface that it tells of itself: Debian's 6.1 and 6.12."""

from __future__ import annotations

import pytest

from emulated_kernel.arch.analysis.probe_rules import PROBE_RULES
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import detect_interface, profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.trace.interface import INTERFACES, Interface
from emulated_kernel.util.linux_rule import series_of
from emulated_kernel.vfs.core.node import Owner
from tests.guests.linux import debian_kernel
from tests.oracle import inside

DEFINITIONS = 120
PLACES = 60
KERNELS = [("linux-image-cloud-amd64", debian_kernel.SUITE), ("linux-image-cloud-amd64", "trixie")]
NAMES = ["linux-6.1", "linux-6.12"]


@pytest.mark.parametrize(("release", "series"), [("6.12.117+deb13-cloud-amd64", "6.12"), ("none", "5.10")])
def test_the_series_of_a_release(release: str, series: str) -> None:
    assert series_of(release) == series


@pytest.mark.parametrize(("kernel", "name"), [*zip(KERNELS, NAMES, strict=True)], ids=NAMES)
def test_a_kernel_answers_as_it_does_itself(kernel: tuple[str, str], name: str) -> None:
    """Definitions with their errors, places, and records of its own probes and of ours."""
    linux = native_mount(debian_kernel.tasks(*kernel), ProcessWatch(), Owner(0, 0), is_tracefs=False)
    tasks, text = debian_kernel.with_kernel(*kernel)
    engine = LinuxEngine(tasks, text, profile_of(text))
    ours = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    interface: Interface = engine.components.tracing.system.interface
    assert interface.name == engine.kprobes.profile.name == name
    assert interface.rules == INTERFACES[name].rules
    assert interface.release == detect_interface(text).release == text.release

    defined = inside.compare_definitions(linux, ours, DEFINITIONS, 3, interface)
    assert not defined.differences, "\n".join(defined.differences[:5])
    assert defined.compared > defined.refused > 0
    filters = inside.compare_filters(linux, ours, DEFINITIONS, 3)
    assert not filters.differences, "\n".join(filters.differences[:5])
    assert filters.compared > filters.refused > 0
    recorded = inside.compare_records(linux, ours, inside.recorded_definitions(engine, interface))
    assert not recorded.differences, "\n".join(recorded.differences[:5])
    assert recorded.compared > 60
    linux.close()
    ours.close()


def test_later_kernels_judge_places_by_their_own_rules() -> None:
    tasks, kernel = debian_kernel.with_kernel(*KERNELS[1])
    linux = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    places = inside.kernel_places(kernel, PLACES, 4)
    found = inside.compare_places(linux, kernel, places, PROBE_RULES[profile_of(kernel).probe_rules])
    linux.close()
    assert not found.differences, "\n".join(found.differences[:5])
    assert found.compared > PLACES > found.refused > 0
