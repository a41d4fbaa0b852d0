"""The text of a refusal names the refused word, and all choices."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.trace.interface import interface_named
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.node_tree import NodeTree
from tests.vfs.files import read, write

TRIGGER = "events/kprobes/a/trigger"
FILTER = "set_ftrace_filter"
FUNCTION_COMMANDS = {
    "traceon": "traceon",
    "traceoff": "traceoff",
    "stacktrace": "stacktrace",
    "snapshot": "snapshot",
    "enable_event": "enable_event:kprobes:a",
    "disable_event": "disable_event:kprobes:a",
    "mod": "mod:nosuch",
    "dump": "dump",
    "cpudump": "cpudump",
}
"""Name of a command that Linux 6.1 accepts in set_ftrace_filter -> an example of the command."""


def refusal(tree: NodeTree, file: str, text: str) -> KernelError:
    """Write `text` to a file, and return the error. Check that error_log does not show the error's text."""
    path = file if file.startswith("/") else f"/tracing/{file}"
    with pytest.raises(KernelError) as raised:
        write(tree, path, f"{text}\n")
    assert raised.value.strerror not in read(tree, "/tracing/error_log")
    return raised.value


@pytest.mark.parametrize(
    ("file", "text", "name", "shown"),
    [
        (TRIGGER, "traceoff:5x", "EINVAL", "5x"),
        (TRIGGER, "hist:keys=count:size=x", "EINVAL", "x"),
        (TRIGGER, "hist:keys=count:size=-1", "EINVAL", "-1"),
        (TRIGGER, "hist:keys=count:size=18446744073709551616", "ERANGE", "18446744073709551616"),
        (TRIGGER, "hist:keys=count:v=-", "EINVAL", "-"),
        ("kprobe_events", "p:q vfs_read @foo+x", "EINVAL", "+x"),
        ("kprobe_events", "p:q vfs_read @foo-x", "EINVAL", "-x"),
        ("kprobe_events", "p:q vfs_read @foo+0xffffffffffffffff", "ERANGE", "+0xffffffffffffffff"),
        ("kprobe_events", "-:nosuch", "ENOENT", "-:nosuch"),
        ("kprobe_events", "-nosuch", "EINVAL", "-nosuch"),
        ("kprobe_events", "nosuch", "EINVAL", "nosuch"),
        ("dynamic_events", "nosuch", "EINVAL", "nosuch"),
        ("synthetic_events", "!", "ENOENT", ""),
        ("set_event", "nosuch", "EINVAL", "nosuch"),
        ("set_event", "!kprobes:nosuch", "EINVAL", "kprobes:nosuch"),
        ("set_event_pid", "x", "EINVAL", "x"),
        (FILTER, "vfs_read:nosuch", "EINVAL", "nosuch"),
        (FILTER, "vfs_read:traceon:x", "EINVAL", "x"),
        (FILTER, ":traceon", "EINVAL", ""),
        ("trace_options", "nosuch", "EINVAL", "nosuch"),
        ("tracing_on", "x", "EINVAL", "x"),
        ("tracing_on", "99999999999999999999", "ERANGE", "99999999999999999999"),
        ("tracing_cpumask", "1,x", "EINVAL", "x"),
        ("tracing_cpumask", "123456789", "EOVERFLOW", "123456789"),
        ("tracing_cpumask", "4", "EOVERFLOW", "4"),
        ("/kprobes/enabled", "x", "EINVAL", "x"),
        ("/kprobes/optimization", "x", "EINVAL", "x"),
        ("/kprobes/stages", "x", "EINVAL", "x"),
        ("/kprobes/return_hook", "", "EINVAL", ""),
    ],
)
def test_the_refused_word_is_shown_in_quotes(
    tree: NodeTree, file: str, text: str, name: str, shown: str
) -> None:
    error = refusal(tree, file, text)
    assert error.name == name
    assert repr(shown) in str(error)


@pytest.mark.parametrize(
    ("file", "text", "name", "shown"),
    [
        ("kprobe_events", "p:q vfs_read @", "ENOENT", "@:"),
        ("kprobe_events", "p:q vfs_read @nosuch+4", "ENOENT", "@nosuch+4:"),
        ("set_event_pid", "99999999999", "EPERM", "99999999999"),
        (TRIGGER, "hist:keys=count:size=9999999", "EINVAL", "9999999"),
        ("events/enable", "2", "EINVAL", "2:"),
        (TRIGGER, "enable_event", "EINVAL", "enable_event:GROUP:EVENT"),
        (TRIGGER, "disable_hist:", "EINVAL", "disable_hist:GROUP:EVENT"),
        (TRIGGER, "enable_event::", "EINVAL", "enable_event:GROUP:EVENT"),
        (TRIGGER, "enable_event:kprobes:nosuch", "EINVAL", "kprobes:nosuch:"),
        (FILTER, "vfs_read:disable_event", "EINVAL", "disable_event:GROUP:EVENT"),
        (FILTER, "vfs_read:disable_event:kprobes:nosuch", "EINVAL", "kprobes:nosuch:"),
        ("stack_trace_filter", "vfs_read:traceon", "ENODEV", "vfs_read:traceon:"),
    ],
)
def test_what_is_refused_or_missing_is_named(
    tree: NodeTree, file: str, text: str, name: str, shown: str
) -> None:
    error = refusal(tree, file, text)
    assert error.name == name
    assert shown in str(error)


def test_an_unknown_command_of_functions_gets_the_list_of_all_that_are_accepted(tree: NodeTree) -> None:
    error = refusal(tree, FILTER, "vfs_read:nosuch")
    listed = set(re.findall(r"\w+", str(error).partition("; use ")[2]))
    accepted = set()
    for command, example in FUNCTION_COMMANDS.items():
        try:
            write(tree, f"/tracing/{FILTER}", f"vfs_read:{example}\n")
        except KernelError:
            continue
        accepted.add(command)
    assert {"traceoff", "disable_event", "mod"} <= accepted
    assert listed & FUNCTION_COMMANDS.keys() == accepted


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("traceon", "traceoff"),
        ("traceoff:5 if count > 3", "traceon"),
        ("snapshot", "snapshot:3"),
        ("enable_event:kprobes:a", "disable_event:kprobes:a"),
        ("disable_hist:kprobes:a", "enable_hist:kprobes:a:2"),
    ],
)
def test_the_trigger_that_excludes_another_is_named(tree: NodeTree, first: str, second: str) -> None:
    write(tree, "/tracing/kprobe_events", "p:q vfs_write count=%dx\n")
    file = "events/kprobes/q/trigger"
    write(tree, f"/tracing/{file}", f"{first}\n")
    (line,) = read(tree, f"/tracing/{file}").splitlines()
    error = refusal(tree, file, second)
    assert error.name == "EEXIST"
    assert str(error).startswith(f"[Errno 17] {second.partition(':')[0]}: ")
    assert line in str(error)


def test_a_word_that_does_not_wait_for_a_module_is_named() -> None:
    """In Linux 7.2, words of set_event may wait for a module. One that does not wait cannot be removed."""
    with Kernel(profile=profile_named("linux-7.2")) as kernel:
        error = refusal(kernel.filesystem(), "set_event", "!y:mod:nosuch")
    assert error.name == "EINVAL"
    assert "'y:mod:nosuch'" in str(error)


@pytest.mark.parametrize("find", [profile_named, interface_named])
def test_an_empty_name_is_shown_in_quotes(find: Callable[[str], object]) -> None:
    with pytest.raises(KernelError, match="''"):
        find("")
