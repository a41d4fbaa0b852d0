"""Interfaces of tracefs: rules with the versions that have them, and what decides in a command."""

from __future__ import annotations

import pytest

from emulated_kernel.arch.analysis.probe_rules import PROBE_RULES, ProbeRule, probe_rules_named
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.trace.interface import LINUX_6_1, interface_named
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.linux_rule import LinuxRule


class Made(LinuxRule):
    """Three rules: one that came, one that went, and one that a kernel's texts tell."""

    CAME = "6.12", "came", "here.c:came"
    WENT = "5.10", "went", "here.c:went", "", "7.2"
    TOLD = "6.12", "told", "here.c:told", "a sign"


@pytest.mark.parametrize(
    ("version", "rules"),
    [
        ("5.10", {Made.WENT}),
        ("6.1", {Made.WENT}),
        ("6.9", {Made.WENT}),
        ("6.12", set(Made)),
        ("7.2", {Made.CAME, Made.TOLD}),
        ("10.0", {Made.CAME, Made.TOLD}),
    ],
)
def test_a_version_has_the_rules_since_and_until(version: str, rules: set[Made]) -> None:
    assert Made.of(version) == rules


def test_what_a_kernel_says_of_itself_counts_more_than_its_version() -> None:
    assert Made.told("6.12", "a kernel without it") == {Made.CAME, Made.WENT}
    assert Made.told("6.1", "with a sign of the backport") == {Made.WENT, Made.TOLD}


def test_each_profile_names_an_interface_and_probe_rules() -> None:
    for profile in PROFILES.values():
        assert interface_named(profile.interface).name == profile.interface
        assert probe_rules_named(profile.probe_rules) is PROBE_RULES[profile.probe_rules]


@pytest.mark.parametrize("named", [interface_named, probe_rules_named])
def test_an_unknown_name_is_refused_with_those_that_exist(named: object) -> None:
    with pytest.raises(KernelError, match=r"linux-0\.1; there are .*linux-6\.1") as refused:
        named("linux-0.1")  # type: ignore[operator]
    assert refused.value.name == "EINVAL"


def test_6_1_has_no_rule_that_came_later() -> None:
    assert not LINUX_6_1.rules
    assert not PROBE_RULES["linux-6.1"]
    assert set(ProbeRule) == PROBE_RULES["linux-6.12"]
