"""Interfaces of tracefs: rules with the versions of Linux that have them. Only these rules decide how a
command is answered.
"""

from __future__ import annotations

from functools import partial

import pytest

from emulated_kernel.arch.analysis.probe_rules import PROBE_RULES, ProbeRule, probe_rules_named
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.trace.interface import (
    INTERFACES,
    LINUX_6_1,
    Interface,
    InterfaceRule,
    interface_named,
)
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.linux_rule import LinuxRule
from tests.trace.events.kernel import Function, errno_of, make_kernel


class Made(LinuxRule):
    """Rules for the tests: CAME began with a version, WENT ended with a version, and TOLD is known from a
    text in the kernel.
    """

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
    assert Made.detected("6.12", "a kernel without it") == {Made.CAME, Made.WENT}
    assert Made.detected("6.1", "with a sign of the backport") == {Made.WENT, Made.TOLD}


def test_each_profile_names_an_interface_and_probe_rules() -> None:
    for profile in PROFILES.values():
        assert interface_named(profile.interface).name == profile.interface
        assert probe_rules_named(profile.probe_rules) is PROBE_RULES[profile.probe_rules]


@pytest.mark.parametrize("named", [interface_named, probe_rules_named])
def test_an_unknown_name_is_refused_with_those_that_exist(named: object) -> None:
    with pytest.raises(KernelError, match=r"'linux-0\.1'; there are .*linux-6\.1") as refused:
        named("linux-0.1")  # type: ignore[operator]
    assert refused.value.name == "EINVAL"


def test_6_1_has_no_rule_that_came_later() -> None:
    assert {rule.since for rule in LINUX_6_1.rules} == {"5.15", "6.1"}
    assert not PROBE_RULES["linux-6.1"]
    assert set(ProbeRule) == {*PROBE_RULES["linux-6.12"], ProbeRule.RISCV_RECORDS} == PROBE_RULES["linux-7.2"]


COMMANDS = (
    "p:a vfs_read %di:char",
    "p8:b vfs_read",
    "p:c no_such_function",
    "p:d vfs_read $comm:u8",
    "p:e vfs_read $arg*",
    "p:f vfs_read count",
    "r:g vfs_read $arg2",
    "p:h vfs_read+0 +0(%di:string",
    "p:i ktgt:no_such_function",
    "p:j vfs_read" + " %di" * 129,
    "p:group/ vfs_read",
    "p:group.k vfs_read",
    "p:a-group/l vfs_read",
    "p:" + "m" * 64 + " vfs_read",
    "p:n no_such_function %nothing",
)


def answers(interface: Interface) -> list[tuple[str, list[str], list[str]]]:
    """Return the errno, error_log and kprobe_events for each command of COMMANDS, each in a new kernel."""
    found = []
    for command in COMMANDS:
        kernel = make_kernel(interface=interface)
        name = errno_of(partial(kernel.events.write, command.encode()))
        found.append((name, kernel.events.error_log.records(), list(kernel.events.records())))
    return found


def test_rules_alone_decide_and_not_a_name_or_a_release() -> None:
    """An interface answers by its rules, whatever its name and release are. No code compares versions."""
    versions = [INTERFACES[f"linux-{version}"] for version in ("5.10", "6.1", "6.12", "7.2")]
    for each, other in zip(versions, reversed(versions), strict=True):
        assert answers(Interface(other.name, other.release, each.rules, each.texts)) == answers(each)
        assert answers(each) != answers(other)


def test_each_later_rule_of_definitions_changes_an_answer() -> None:
    """Each rule about definitions that came after 6.1 changes an answer. A rule without any effect would be
    useless.
    """
    old = INTERFACES["linux-6.1"]
    before = answers(old)
    for rule in (
        InterfaceRule.CHAR_TYPE,
        InterfaceRule.MAXACT_AT_EXIT,
        InterfaceRule.SYMBOL_EINVAL,
        InterfaceRule.STRING_TYPE_LOGGED,
        InterfaceRule.META_ARGS,
        InterfaceRule.BTF_ARGS,
        InterfaceRule.ENTRY_ARGS,
        InterfaceRule.ARGS_LIMITED,
    ):
        assert answers(Interface("one", "0", old.rules | {rule})) != before, rule


def test_each_rule_that_5_10_lacks_changes_an_answer() -> None:
    # Other tests are about these, which are no rules of definitions.
    others = {
        InterfaceRule.OPTION_HASH_PTR,
        InterfaceRule.MIGRATE_COLUMN,
        InterfaceRule.EVENT_PROBES,
        InterfaceRule.PIDS_BEFORE_TRIGGERS,
        InterfaceRule.HIST_BUCKETS,
        InterfaceRule.HIST_ARITHMETIC,
    }
    rules = InterfaceRule.of("6.1") - InterfaceRule.of("5.10") - others
    before = answers(LINUX_6_1)
    for rule in rules:
        assert answers(Interface("one", "0", LINUX_6_1.rules - {rule})) != before, rule


def test_a_symbol_of_a_loaded_module_must_be_unique_in_it() -> None:
    twice = [Function("twice", 0xFFFFFFFFC0230000 + at, size=16, module="ktgt") for at in (0, 16)]
    outcomes = []
    for rules in (LINUX_6_1.rules, LINUX_6_1.rules | {InterfaceRule.MODULE_SYMBOLS_CHECKED}):
        kernel = make_kernel(functions=twice, interface=Interface("one", "0", rules))
        outcomes.append(errno_of(partial(kernel.events.write, b"p:x ktgt:twice")))
        outcomes.append(errno_of(partial(kernel.events.write, b"p:y absent:twice")))
    assert outcomes == ["", "", "EADDRNOTAVAIL", ""]
