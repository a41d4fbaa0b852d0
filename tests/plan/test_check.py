"""`kprobefs check` gives the answers of a mounted kernel, its warnings are right, and its SARIF is valid."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from kprobefs.cli.main import main
from kprobefs.common.errors import CliError
from kprobefs.definitions.syntax import Line
from kprobefs.plan import check_command
from kprobefs.plan.answer import WARNINGS, Answer
from kprobefs.plan.check import check_lines
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel
from tests.image.linux import debian, made
from tests.project.readme import blocks, steps
from tests.sample import fewer

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "plan-probes.md"
SCHEMA = "package/lib/schemas/sarif-2.1.0-rtm.5.json"
"""OASIS's schema of SARIF in the npm package @microsoft/jest-sarif."""
OWN = planned_kernel("x86_64", None, None, None)
CALL_FENTRY = b"\xe8\0\0\0\0"
BODY = bytes.fromhex("53 4889fb 4889d8 31f6 5b")  # push %rbx; mov %rdi,%rbx; mov %rbx,%rax; xor; pop

heads = st.sampled_from(
    (
        *(
            "p",
            "r",
            "p:ev",
            "p:grp/ev",
            "r:ev",
            "r4:ev",
            "p4",
            "r0",
            "p:",
            "p:1x",
            "p:a/b/c",
            "r9999",
            "p:ev2",
        ),
        *("p:syscalls/sys_enter_read", "p:syscalls/sys_exit_read", "p:ftrace/print", "p:sched/sched_switch"),
        f"p:{'n' * 64}",
    )
)
places = st.sampled_from(
    (
        *("vfs_read", "vfs_read+5", "vfs_read+6", "vfs_read+0x1d", "vfs_raed", "jiffies", "0x10", "mod:f"),
        *("tcp_sendmsg+5", "tcp_sendmsg+7", "tcp_sendmsg", "int_sqrt%return", "int_sqrt%nix", "vfs_read+x"),
        *("do_group_exit", "kprobe_dispatcher", "memcpy", "vfs_read-1", "panic+3", "0xffffffff81000000"),
    )
)
arguments = st.lists(
    st.sampled_from(
        (
            *("$arg1", "a=%di", "a=%dx:u32", "b=$retval", "c=$stack1:x8", "=%di", "c=$foo", "d=+0(%di):u16"),
            *("d=+0(%di", "e=%xx", "f=@jiffies", "f=@nix", "g=%di:u7", "h=$comm", "i=%di:string"),
            *("j=$arg1:u8[99]", "k=\\1:s32"),
        )
    ),
    max_size=3,
)
lines = st.builds(
    lambda head, blanks, place, words: f"{head}{blanks}{place} {'  '.join(words)}".rstrip(),
    heads,
    st.sampled_from((" ", "   ")),
    places,
    arguments,
)


def checked(*texts: str) -> list[Answer]:
    return check_lines(OWN, [Line("x", number, text) for number, text in enumerate(texts, 1)])


def last_error(kernel: Kernel) -> tuple[str, int]:
    """Return text and column of the newest entry of error_log."""
    head, _, caret = kernel.read_file("/tracing/error_log").splitlines()[-3:]
    return head.partition("error: ")[2], caret.index("^") - len("  Command: ")


@settings(max_examples=fewer(60, 3))
@given(st.lists(lines, min_size=1, max_size=8))
def test_answers_are_those_of_a_mounted_kernel(texts: list[str]) -> None:
    """For each line, `check` reports the same errno and the same entry of error_log as a kernel to which the
    line is written.
    """
    answers = checked(*texts)
    with Kernel() as kernel:
        for text, answer in zip(texts, answers, strict=True):
            before = kernel.read_file("/tracing/error_log")
            number = write(kernel, text)
            assert [finding.is_error for finding in answer.findings].count(True) == bool(number)
            if not number:
                continue
            assert answer.outcome == number
            (finding,) = answer.findings
            if kernel.read_file("/tracing/error_log") == before:
                assert finding.column is None
                continue
            said, column = last_error(kernel)
            assert said in finding.message
            words = " ".join(text.split())
            assert finding.column is not None
            if column < len(words):
                assert text[finding.column :].split() == words[column:].split()


def write(kernel: Kernel, text: str) -> str:
    """Write a line to kprobe_events.

    Return the name of the errno, or an empty string if the write succeeds.
    """
    try:
        kernel.write_file("/tracing/kprobe_events", f"{text}\n")
    except KernelError as error:
        return error.name
    return ""


def test_a_probe_that_takes_a_jump_takes_it_on_a_mount_too() -> None:
    rng = Random(2)
    functions = [s for s in OWN.judge.subject.symbols if 40 < s.size < 400]
    seen = 0
    with Kernel() as kernel:
        for symbol in rng.sample(functions, 60):
            explained = Explanation(OWN, find_place(f"{symbol.address:#x}", OWN.tables))
            better = explained.better_after
            if better is None or better.verdict.region is None:
                continue
            inside = [
                insn for insn in explained.insns if better.address < insn.address < better.verdict.region.end
            ]
            if not inside:
                continue
            texts = [f"p:one {better.address:#x}", f"p:two {inside[0].address:#x}"]
            one, two = checked(*texts)
            assert [one.outcome, *(finding.rule for finding in two.findings)] == ["breakpoint", "takes-jump"]
            for name, text in zip(("one", "two"), texts, strict=True):
                kernel.write_file("/tracing/kprobe_events", f"{text}\n")
                kernel.write_file(f"/tracing/events/kprobes/{name}/enable", "1")
            kernel.wait_for_kprobe_optimizer()
            assert kernel.read_file("/kprobes/stats/kprobes/one/mode") in ("int3\n", "boosted\n")
            assert f"the probe at {symbol.name}+{inside[0].offset:#x}" in kernel.read_file(
                "/kprobes/stats/kprobes/one/reason"
            )
            for name in ("one", "two"):
                kernel.write_file(f"/tracing/events/kprobes/{name}/enable", "0")
                kernel.write_file("/tracing/kprobe_events", f"-:{name}\n")
            seen += 1
    assert seen > 5


def test_a_removed_probe_takes_no_jump() -> None:
    insns = Explanation(OWN, find_place("int_sqrt", OWN.tables)).insns
    one, two = next(
        (first, second)
        for first, second in pairwise(insns)
        if first.verdict.region is not None and second.address < first.verdict.region.end
    )
    texts = [f"p:one {one.address:#x}", f"p:two {two.address:#x}"]
    assert checked(*texts)[0].outcome == "breakpoint"
    answer, _, removal = checked(*texts, "-:two")
    assert (answer.outcome, answer.findings, removal.outcome) == ("optimized", [], "removed")


@pytest.mark.parametrize(
    ("text", "profile"),
    [
        ("e:x sched.sched_switch", "linux-6.1"),
        ("s:x int a", "linux-6.1"),
        ("p:x /bin/sh:0x10", "linux-6.1"),
        ("f:x vfs_read", "linux-6.12"),
        ("t:x sched_switch", "linux-6.12"),
    ],
)
def test_other_kinds_of_events_are_not_checked(text: str, profile: str) -> None:
    (answer,) = check_lines(planned_kernel(None, None, None, profile), [Line("", 1, text)])
    assert (answer.outcome, answer.findings) == ("unchecked", [])


@pytest.mark.parametrize("profile", ["linux-5.10", "linux-6.1", "linux-6.12"])
def test_a_kind_that_the_kernel_lacks_is_refused_as_on_a_mount(profile: str) -> None:
    """`check` refuses an event of a kind that the kernel lacks exactly if dynamic_events of a kernel with the
    same profile refuses the line.
    """
    texts = ("q:x foo bar", "e:x sched.sched_switch", "f:x vfs_read", "t:x sched_switch", "s:x int a")
    planned = planned_kernel(None, None, None, profile)
    with Kernel(MachineConfig(profile=profile)) as kernel:
        for text in texts:
            (answer,) = check_lines(planned, [Line("", 1, text)])
            expected = "unchecked"
            try:
                kernel.write_file("tracing/dynamic_events", text)
            except KernelError as error:
                expected = error.name
            assert (answer.outcome, answer.is_error) == (expected, expected != "unchecked")


def test_a_refused_place_is_named_by_the_function_that_contains_it() -> None:
    """If an offset leads into the next function, the rejection names that function, which must not be
    traced.
    """
    symbol = OWN.tables.kallsyms.by_name("start_kernel")[0]
    follower = OWN.tables.kallsyms.lookup(symbol.address + symbol.size)
    assert follower is not None
    data, behind = checked("p jiffies", f"p start_kernel+{symbol.size}")
    assert f"({follower.symbol.name}: notrace function" in behind.findings[0].message
    assert "jiffies: not kernel text" in data.findings[0].message


@pytest.mark.parametrize(
    ("profile", "text", "remedy"),
    [
        ("linux-6.1", "r vfs_read n=$arg3", "; Linux has $argN at a return since 6.12"),
        ("linux-6.1", "p vfs_read%return n=$arg3", "; Linux has $argN at a return since 6.12"),
        ("linux-6.1", "r vfs_read n=$nosuch", ""),
        ("linux-6.12", "r vfs_read n=$arg3", None),
        ("linux-6.1", "p vfs_read a=+u0($arg2):x8[4]", "; an array has no +u"),
        ("linux-6.1", "p vfs_read a=$arg2:string", ""),
        ("linux-6.1", "p vfs_read a=+0($arg2):x8[4]", None),
    ],
)
def test_errors_with_a_remedy(profile: str, text: str, remedy: str | None) -> None:
    (answer,) = check_lines(planned_kernel("x86_64", None, None, profile), [Line("x", 1, text)])
    messages = [finding.message for finding in answer.findings if finding.is_error]
    assert len(messages) == (remedy is not None)
    for message in messages:
        assert (remedy or "") in message
        assert (";" in message) is bool(remedy)


def test_names_of_modules_that_cannot_exist_are_explained() -> None:
    dash, empty = checked("p:a virtio-net:start_xmit", "p:b :start_xmit")
    assert "modules have _ in place of -: virtio_net:start_xmit" in dash.findings[0].message
    assert "an empty name" in empty.reason


@pytest.mark.parametrize(
    ("line", "outcome", "rules"),
    [
        ("kprobes/enabled = 0", "unchecked", []),
        ("events/kprobes/reads/enable = 1", "unchecked", []),
        ("instances/a/events/kprobes/reads/enable = 1", "unchecked", []),
        ("events/kprobes/raeds/enable = 1", "unchecked", ["no-event"]),
        ("events/kprobes/raeds/filter = n > 1", "unchecked", ["no-event"]),
        ("events/kprobes/refused/enable = 1", "unchecked", []),
        ("events/synthetic/lat/enable = 1", "unchecked", []),
        ("events/kprobes/enable = 1", "unchecked", []),
        ("events/kprobes/reads/filter = n > 1 || common_pid == 2", "accepted", []),
        ("events/kprobes/reads/filter = 0", "accepted", []),
        ("events/kprobes/reads/filter = m > 1", "EINVAL", ["FIELD_NOT_FOUND"]),
        ("events/sched/sched_switch/filter = prev_pid > 1 && CPUS", "EINVAL", ["FIELD_NOT_FOUND"]),
        ("events/sched/sched_switch/filter = prev_pid > ", "EINVAL", ["INVALID_VALUE"]),
        ("events/syscalls/sys_enter_read/filter = x > 1", "unchecked", []),
        ("events/kprobes/reads/trigger = hist:keys=common_pid", "unchecked", []),
        ("events/kprobes/reads/trigger = histogram:keys=common_pid", "EINVAL", ["EINVAL"]),
        ("events/kprobes/reads/trigger = enable_event:sched:sched_switch", "unchecked", []),
        ("events/kprobes/reads/trigger = !enable_event:sched:sched_swich:1", "unchecked", ["no-event"]),
        ("set_ftrace_filter = vfs_read tcp_* !vfs_write vfs_open:traceoff", "unchecked", []),
        ("set_graph_function = vfs_raed", "unchecked", ["no-function"]),
        ("set_ftrace_notrace = linux_banner", "unchecked", ["no-function"]),
        ("trace = 1", "EINVAL", ["EINVAL"]),
        ("/etc/motd = 1", "EINVAL", ["EINVAL"]),
    ],
)
def test_settings_are_checked_in_part(line: str, outcome: str, rules: list[str]) -> None:
    before = "p:reads vfs_read n=$arg3", "p:refused nowhere_at_all", "s:lat u64 d"
    answer = checked(*before, line)[-1]
    assert answer.outcome == outcome
    assert [finding.rule for finding in answer.findings] == rules
    assert answer.is_error is (outcome not in ("accepted", "unchecked"))


@pytest.mark.parametrize(
    "text", ["n > 1", "n >", "m == 1", "n == x", "(n == 1", "comm ~ 1", 'comm ~ "a"', "n ~ 3", "", "CPU & 1"]
)
def test_filters_are_judged_as_on_a_mount(text: str) -> None:
    """`check` accepts or refuses a filter as the filter file of a kernel with the same event does."""
    answer = checked("p:reads vfs_read n=$arg3", f"events/kprobes/reads/filter = {text}")[-1]
    with Kernel(MachineConfig()) as kernel:
        kernel.write_file("tracing/kprobe_events", "p:reads vfs_read n=$arg3")
        expected = "accepted"
        try:
            kernel.write_file("tracing/events/kprobes/reads/filter", text or "\n")
        except KernelError as error:
            expected = error.name
    assert answer.outcome == expected


def test_functions_that_the_compiler_changed(typed: str) -> None:
    kernel = planned_kernel(None, typed, None, "linux-6.12")
    for line, rules in (
        ("p:x split.isra.0 a=$arg1 b=%di c=+0($arg2):u8", ["changed-parameters"] * 2),
        ("p:x split.isra.0 b=%di", []),
        ("r:x split.isra.0 a=$arg1", ["changed-parameters"]),
        ("f:x split.isra.0 a=$arg1", ["changed-parameters"]),
        ("p:x f a=$arg1:s32", []),
    ):
        (answer,) = check_lines(kernel, [Line("x", 1, line)])
        assert not answer.is_error
        assert [finding.rule for finding in answer.findings] == rules
    explained = Explanation(kernel, find_place("split.isra.0", kernel.tables))
    assert "split" in explained.unknown_arguments
    assert not Explanation(kernel, find_place("f", kernel.tables)).unknown_arguments


@pytest.mark.parametrize(
    ("function", "clones"),
    [
        ("whole", ["whole.part.0", "whole.constprop.1.isra.0"]),
        ("whole.part.0", []),
        ("f", []),
    ],
)
def test_functions_that_the_compiler_made_from_the_probed_one(
    typed: str, function: str, clones: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` warns of a probe on a function with clones, and `explain` lists the clones.

    Callers that were compiled to call a clone do not hit a probe on the original function.
    """
    kernel = planned_kernel(None, typed, None, None)
    for line in (f"p:x {function}", f"r:x {function}", f"p:x {function}+5"):
        (answer,) = check_lines(kernel, [Line("x", 1, line)])
        messages = [finding.message for finding in answer.findings if finding.rule == "other-calls"]
        assert len(messages) == bool(clones)
        assert all(", ".join(clones) in message for message in messages)
    assert main(["explain", "--image", typed, "--json", function]) == 0
    (explained,) = json.loads(capsys.readouterr().out)
    assert explained["clones"] == clones


@pytest.mark.parametrize("function", ["panic", "do_group_exit", "do_exit", "make_task_dead"])
def test_a_return_probe_that_is_never_hit(function: str) -> None:
    (answer,) = checked(f"r:x {function}")
    assert [finding.rule for finding in answer.findings] == ["never-returns"]
    assert not checked("r:x vfs_read", f"p:y {function}")[0].findings


# A kernel with types


def kernel_with_types(tmp_path: Path, body: bytes = BODY, *, is_later: bool = False) -> str:
    """Write a made kernel with BTF and return its path.

    The kernel's function int f(int number, unsigned long size, struct pair *pair) consists of `body`.
    `is_later`: in this version, the members of struct pair and two parameters of g() have changed places.
    """
    source = made.Kernel()
    at = source.function("f", CALL_FENTRY + body + b"\xc3")
    source.function("a_function_whose_name_is_too_long_for_an_event_of_its_own_name_1", BODY + b"\xc3")
    source.function("g", CALL_FENTRY + BODY + b"\xc3")
    source.function("split.isra.0", CALL_FENTRY + BODY + b"\xc3")
    for name in ("whole", "whole.part.0", "whole.constprop.1.isra.0", "whole.cold", "wholesale.part.0"):
        source.function(name, CALL_FENTRY + BODY + b"\xc3")
    for _ in range(2):
        source.function("twice", CALL_FENTRY + BODY + b"\xc3")
    sites = [address for address, letter, _ in source.symbols if letter == "T" and address >= at]
    btf = made.Btf()
    number = btf.add(1, "int", 4, (1 << 24 | 32).to_bytes(4, "little"))
    size = btf.add(1, "unsigned long", 8, (64).to_bytes(4, "little"))
    port = btf.add(8, "__be16", btf.add(1, "unsigned short", 2, (16).to_bytes(4, "little")))
    place = 8 * is_later
    members = ("first", number, place), ("port", port, place + 6), ("second", size, 8 - place)
    pair = btf.structure("pair", 16, *sorted(members, key=lambda member: member[2]))
    pointer = btf.add(2, "", pair)
    proto = btf.prototype(number, ("number", number), ("size", size), ("pair", pointer))
    btf.add(12, "f", proto)
    add_nodes(btf, number, size, pair, is_later=is_later)
    btf.add(12, "whole", btf.prototype(0))
    btf.add(12, "many", btf.prototype(number, ("number", number), ("", 0)))
    stub = btf.prototype(0, ("__data", pointer), ("number", number), ("size", size))
    btf.add(12, "__probestub_event", stub)
    source.table("mcount_loc", b"".join(site.to_bytes(8, "little") for site in sites))
    source.table("BTF", btf.data())
    file = tmp_path / "vmlinuz"
    file.write_bytes(made.vmlinuz(source.elf(), "xz"))
    return str(file)


def add_nodes(btf: made.Btf, number: int, size: int, pair: int, *, is_later: bool) -> None:
    """Add struct node *g(struct node *node, loff_t length, char **names, void *any, unsigned long word)."""
    letter = btf.add(1, "char", 1, (1 << 24 | 8).to_bytes(4, "little"))
    text = btf.add(2, "", letter)
    longer = btf.add(1, "long long int", 8, (1 << 24 | 64).to_bytes(4, "little"))
    length = btf.add(8, "loff_t", longer)
    bits = btf.fields("bits", 4, ("low", number, 0, 3), ("high", number, 3, 9), ("rest", number, 16, 16))
    anything = btf.add(2, "", 0)
    to_pair = btf.add(2, "", pair)
    tail = btf.array(letter, 0)
    label = btf.array(letter, 8)
    to_node = btf.add(2, "", label + 3)
    either = btf.structure("", 8, ("one", to_pair, 0), ("two", to_node, 0), union=True)
    node = btf.structure(
        "node", 72,
        ("id", number, 0), ("bits", bits, 4), ("pair", to_pair, 8), ("next", to_node, 16), ("word", size, 24),
        ("length", length, 32), ("text", text, 40), ("label", label, 48), ("any", anything, 56),
        ("either", either, 64), ("tail", tail, 72),
    )  # fmt: skip
    names = btf.add(2, "", text)
    btf.structure("part", 24, ("pair", pair, 0), ("more", number, 16), ("last", number, 20))
    words = [("node", to_node), ("length", length), ("names", names), ("any", anything), ("word", size)]
    if is_later:
        words[1:3] = reversed(words[1:3])
    btf.add(12, "g", btf.prototype(to_node, *words))
    assert node == label + 3


def test_an_errno_has_the_name_that_linux_gives_it(tmp_path: Path) -> None:
    """`check` reports an errno by Linux's name: EOPNOTSUPP, although Python's module errno has the name of
    another standard for this number.
    """
    image = kernel_with_types(tmp_path, bytes.fromhex("53 ff20"))  # push %rbx; jmp *(%rax)
    (answer,) = check_lines(planned_kernel(None, image, None, None), [Line("x", 1, "p:x f+6")])
    assert answer.outcome == "EOPNOTSUPP"
    (finding,) = answer.findings
    assert finding.message.startswith("EOPNOTSUPP: ")


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return kernel_with_types(tmp_path)


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("a=$arg1:s32 b=$arg2:u64 c=$arg3:x64", []),
        ("a=$arg1:x32 b=$arg2", []),
        ("a=$arg1", ["type-size"]),
        ("a=$arg1:u32", ["type-sign"]),
        ("a=$arg1:u64", ["type-size"]),
        ("b=$arg2:u32", ["type-size"]),
        ("b=%si:u32", ["type-size"]),
        ("c=+0($arg3):s32", []),
        ("c=+8($arg3)", []),
        ("c=+010($arg3) d=+0x8($arg3)", []),
        ("c=+012($arg3)", ["no-member"]),
        ("c=+0($arg3):u64", ["type-size"]),
        ("c=+4($arg3):u32", ["no-member"]),
        ("c=+1($arg3):s32", ["no-member"]),
        ("c=+12($arg3):u64", ["no-member"]),
        ("c=+1($arg3):string", ["no-member"]),
        ("c=+9($arg3):x8[4]", ["no-member"]),
        ("c=+8($arg3):x8[4]", []),
        ("c=+8($arg3):string", ["type-size"]),
        ("c=+8($arg3):symbol", []),
        ("c=+16($arg3):u64", ["no-member"]),
        ("c=+6($arg3):u16 d=+6($arg3):u8 e=+7($arg3):x8 f=+7($arg3):s8", []),
        ("c=+7($arg3):u16 d=+7($arg3):string e=+7($arg3):u8[1] f=+5($arg3):u8", ["no-member"] * 4),
        ("c=+0(%dx):u8 d=%r8:u8", ["type-size"]),
        ("d=$comm e=@linux_banner:string", []),
        ("e=$arg4:u64", ["no-parameter"]),
        ("c=$arg3:x64 e=+8(+0($arg12)):u8 f=%si:u64", ["no-parameter"]),
    ],
)
def test_types_are_compared_with_those_of_the_kernel(typed: str, words: str, rules: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (answer,) = check_lines(kernel, [Line("x", 1, f"p:x f {words}")])
    assert [finding.rule for finding in answer.findings] == rules
    for finding in answer.findings:
        assert finding.column is not None
        assert f"p:x f {words}"[finding.column - 1] == " "


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("a=+8(+8($arg1)):u64 b=+0(+8(+16(+16($arg1)))):s32", []),
        ("a=+4(+8($arg1)):u32", ["no-member"]),
        ("a=+8(+9($arg1)):u64", ["no-member"]),
        ("a=+8(+8(+17($arg1))):u64", ["no-member"]),
        ("a=+8(+8(+16(+200($arg1)))):u64", ["no-pointer"]),
        ("a=+0(+16(+8($arg1))):u64", ["no-member"]),
        ("a=+16(+8($arg1)):u64", ["no-member"]),
        ("a=+0(+8($arg1)):u64", ["type-size"]),
        ("a=+0(+0($arg1)):u64", ["no-pointer"]),
        ("a=+0(+4($arg1)):u64", ["no-pointer"]),
        ("a=+0(+24($arg1)):u64 b=+0($arg5):u8", []),
        ("a=+0(+32($arg1)):u64", ["no-pointer"]),
        ("a=+0($arg2):u64", ["no-pointer"]),
        ("a=+0(+40($arg1)):string b=+40($arg1):string", ["type-size"]),
        ("a=+48($arg1):string b=+51($arg1):string", []),
        ("a=+0(+48($arg1)):string", ["no-pointer"]),
        ("a=+99(+56($arg1)):u16 b=+99($arg4):u16", []),
        ("a=+0(+64($arg1)):s32 b=+40(+64($arg1)):x64", []),
        ("a=+12(+64($arg1)):u32", ["no-member"]),
        ("a=+72($arg1):string b=+99($arg1):string", []),
        ("a=+99($arg1):u16", ["type-size"]),
        ("a=+4($arg1):b3@0/8 b=+5($arg1):u8 c=+6($arg1):u16", []),
        ("a=+7($arg1):u8 b=+0($arg1):b1@3/8", []),
        ("a=+0(+8($arg3)):string b=+8($arg3):x64", []),
        ("a=+8($arg3):u32 b=+8($arg3):string", ["type-size"] * 2),
        ("a=-8($arg1):u64 b=+-8($arg1):u64", ["no-member"] * 2),
        ("a=+u8(+u8($arg1)):u32", ["type-size"]),
    ],
)
def test_types_are_followed_through_pointers(typed: str, words: str, rules: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (answer,) = check_lines(kernel, [Line("x", 1, f"p:x g {words}")])
    assert [finding.rule for finding in answer.findings] == rules


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("p:x g a=+9(node):u8", ["no-member"]),
        ("p:x g a=+0(+8(node)):s32 b=node->pair", []),
        ("p:x g a=+0(length):u64", ["no-pointer"]),
        ("r:x g a=+9($arg1):u8 b=+9(node):u8 c=+9($retval):u8 d=+9(%di):u8", ["no-member"] * 3),
    ],
)
def test_types_of_parameters_by_name_and_at_the_return(typed: str, line: str, rules: list[str]) -> None:
    """`check` uses the types of parameters that are given by name or as $argN, and the type of the return
    value.

    At the return, a register such as %di may have any value, and so it has no type.
    """
    (answer,) = check_lines(planned_kernel(None, typed, None, "linux-6.12"), [Line("x", 1, line)])
    assert [finding.rule for finding in answer.findings] == rules


@pytest.mark.parametrize(
    ("offset", "said"),
    [(16, "part.more"), (20, "part.last"), (18, ""), (24, ""), (12, "")],
)
def test_an_offset_beyond_a_structure_names_larger_ones_that_begin_with_it(
    typed: str, offset: int, said: str
) -> None:
    """If an offset is beyond a structure, the finding names members of larger structures that begin with this
    structure.

    struct part begins with struct pair, which has 16 bytes.
    """
    (answer,) = check_lines(
        planned_kernel(None, typed, None, None), [Line("x", 1, f"p:x f c=+{offset}($arg3):u32")]
    )
    (finding,) = answer.findings
    assert finding.rule == "no-member"
    assert ("part." in finding.message) is bool(said)
    assert said in finding.message


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ("f:x f a=$arg3 b=$arg4", ["$arg4 is no parameter: f has 3 parameters, so the value is undefined"]),
        ("f:x f%return a=$arg4", ["$arg4 is no parameter: f has 3 parameters, so the value is undefined"]),
        ("f:x * a=$arg4", []),
        ("f:x many a=$arg9", []),
        ("t:x event a=$arg1 b=$arg2", []),
        ("t:x event a=$arg3", ["$arg3 is no parameter: event has 2 parameters, so the value is undefined"]),
        ("t:x none a=$arg3", []),
        ("r:x f a=$arg4", ["$arg4 is no parameter: f has 3 parameters, so the value is undefined"]),
    ],
)
def test_parameters_that_a_function_does_not_have(typed: str, line: str, messages: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, "linux-6.12")
    (answer,) = check_lines(kernel, [Line("x", 1, line)])
    assert not answer.is_error
    found = [finding for finding in answer.findings if finding.rule == "no-parameter"]
    assert [finding.message for finding in found] == messages
    assert [line[finding.column :] for finding in found] == [line.rsplit(maxsplit=1)[-1]] * len(found)


@pytest.mark.parametrize(("kind", "rules"), [("s32", []), ("u32", ["type-sign"]), ("s64", ["type-size"])])
def test_the_type_of_a_result(typed: str, kind: str, rules: list[str]) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (answer,) = check_lines(kernel, [Line("x", 1, f"r:x f ret=$retval:{kind}")])
    assert [finding.rule for finding in answer.findings] == rules


def test_a_function_without_a_result(typed: str) -> None:
    for line, rules in (("r whole a=$retval", ["no-result"]), ("r f a=$retval:s32", []), ("r whole", [])):
        (answer,) = check_lines(planned_kernel(None, typed, None, None), [Line("x", 1, line)])
        assert [finding.rule for finding in answer.findings if finding.rule != "other-calls"] == rules


def test_names_that_are_cut_ambiguous_or_only_split(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    long = "a_function_whose_name_is_too_long_for_an_event_of_its_own_name_1"
    file.write_text(f"p {long}\np:named {long}\np:a split\np:b twice\n")
    assert main(["check", str(file), "--image", typed, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    cut, named, split, twice = found["kernels"][0]["lines"]
    assert [finding["rule"] for finding in cut["findings"]] == ["name-cut"]
    assert named["findings"] == []
    assert "split.isra.0" in split["findings"][0]["message"]
    assert twice["outcome"] == "EADDRNOTAVAIL"
    assert "_stext+" in twice["findings"][0]["message"]


def test_places_for_a_name_that_is_not_unique(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If a function's name is not unique, `check` and `explain` propose places relative to _stext, which
    KASLR does not change.

    Events and return events at these places are valid.
    """
    kernel = planned_kernel(None, typed, None, None)
    (refused,) = check_lines(kernel, [Line("x", 1, "p:x twice")])
    places = re.findall(r"_stext\+0x[0-9a-f]+", refused.findings[0].message)
    assert main(["explain", "--image", typed, "twice"]) == 0
    shown = re.findall(r"_stext\+0x[0-9a-f]+", capsys.readouterr().out)
    lines = [
        Line("x", 1, f"{kind} {place}{arg}")
        for place in places
        for kind, arg in (("p", " a=$arg1"), ("r", ""))
    ]
    answers = check_lines(kernel, lines)
    assert [answer.outcome for answer in answers] == ["ftrace"] * 4
    addresses = [symbol.address for symbol in kernel.tables.kallsyms.by_name("twice")]
    assert [answer.address for answer in answers[::2]] == addresses
    assert shown == places
    assert not any(answer.findings for answer in answers)


@pytest.mark.parametrize(("offset", "rules"), [(0, []), (5, []), ("size", ["other-function"])])
def test_an_offset_may_lead_out_of_the_function(typed: str, offset: int | str, rules: list[str]) -> None:
    """A place in the next function has a warning; the same place as an offset from _stext has none."""
    kernel = planned_kernel(None, typed, None, None)
    (symbol,) = kernel.tables.kallsyms.by_name("f")
    distance = symbol.size if offset == "size" else int(offset)
    (start,) = kernel.tables.kallsyms.by_name("_stext")
    places = f"f+{distance}", f"_stext+{symbol.address + distance - start.address}"
    answers = check_lines(kernel, [Line("x", 1, f"p:x{n} {place}") for n, place in enumerate(places)])
    assert answers[0].address == answers[1].address
    assert [[finding.rule for finding in answer.findings] for answer in answers] == [rules, []]


def test_an_older_kernel_probes_the_first_of_several_functions(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = planned_kernel(None, typed, None, "linux-5.10")
    first, _ = kernel.tables.kallsyms.by_name("twice")
    (answer,) = check_lines(kernel, [Line("x", 1, "p:x twice")])
    assert (answer.outcome, answer.address) == ("ftrace", first.address)
    assert [finding.rule for finding in answer.findings] == ["not-unique"]
    for profile, is_refused in (("linux-5.10", False), ("linux-6.1", True)):
        assert main(["explain", "--image", typed, "--profile", profile, "twice"]) == 0
        assert ("refuses it" in capsys.readouterr().out) is is_refused


def test_an_address_belongs_to_one_boot(typed: str) -> None:
    kernel = planned_kernel(None, typed, None, None)
    (symbol,) = kernel.tables.kallsyms.by_name("f")
    for offset, place in ((0, "f"), (5, "f+0x5")):
        (answer,) = check_lines(kernel, [Line("x", 1, f"p:x {symbol.address + offset:#x}")])
        (finding,) = answer.findings
        assert finding.rule == "boot-address"
        assert finding.message.endswith(f"give {place}")
    assert not checked(f"p:x {OWN.tables.kallsyms.lookup_name('vfs_read'):#x}")[0].findings


def test_a_bare_name_of_a_modules_function_needs_a_line_with_the_module() -> None:
    """For the bare name of a module's function, `check` says to write MODULE:NAME.

    A line with that name makes the bare name valid, too.
    """
    kernel = planned_kernel(None, str(debian.package("linux-image-cloud-amd64")), None, None)
    bare, named = Line("", 1, "p:a nf_conntrack_in"), Line("", 2, "p:b nf_conntrack:nf_conntrack_in")
    (alone,) = check_lines(kernel, [bare])
    assert alone.outcome == "ENOENT"
    assert "MODULE:nf_conntrack_in" in alone.findings[0].message
    both = check_lines(kernel, [bare, named])
    assert [(each.outcome, each.unloaded) for each in both] == [("ftrace", "ENOENT"), ("ftrace", "pending")]


@pytest.mark.parametrize(
    ("line", "outcome", "unloaded", "rules"),
    [
        ("p:x mod:g", "pending", "", ["no-module"]),
        ("p:x mod:g a=$arg1 b=$arg2", "unchecked", "EINVAL", ["needs-module", "no-module"]),
        ("p:x mod:g a=$arg1 b=$nosuch", "EINVAL", "", ["NOFENTRY_ARGS", "no-module"]),
        ("p:x mod:g a=%nosuch", "EINVAL", "", ["BAD_REG_NAME", "no-module"]),
        ("p:x mod:g+4 a=$arg1", "EINVAL", "", ["NOFENTRY_ARGS", "no-module"]),
    ],
)
def test_a_module_that_cannot_be_read_makes_no_line_wrong(
    typed: str, line: str, outcome: str, unloaded: str, rules: list[str]
) -> None:
    """If a module cannot be read, a line about its functions is pending or unchecked, not wrong.

    The unloaded kernel refuses parameters of unknown functions. Errors that do not depend on the module
    remain errors.
    """
    (answer,) = check_lines(planned_kernel(None, typed, None, "linux-6.12"), [Line("x", 1, line)])
    assert (answer.outcome, answer.unloaded) == (outcome, unloaded)
    assert [finding.rule for finding in answer.findings] == rules
    assert answer.is_error is (outcome == "EINVAL")


@pytest.mark.parametrize("is_dump", [False, True])
def test_the_remedy_for_a_module_can_be_followed(is_dump: bool) -> None:
    """For a dump, the error for a missing module does not advise --image, because --image excludes
    --vmcore.
    """
    kernel = planned_kernel("x86_64", None, None, None)
    kernel.is_dump = is_dump
    with pytest.raises(CliError) as refused:
        kernel.with_module_of("tcp_bbr", "bbr_main")
    assert ("--image" in str(refused.value)) is not is_dump
    assert "mount" in str(refused.value)


def test_lines_with_modules_are_judged_with_them_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines with modules of the package are checked as if these were loaded.

    Lines with other modules stay pending, as on a kernel without the module.
    """
    package = debian.package("linux-image-cloud-amd64")
    lines = {
        "p:a nls_cp437:uni2char a=$arg1": ("ftrace", "EINVAL", ["needs-module"]),
        "r:c nls_cp437:uni2char": ("ftrace", "pending", []),
        "p:d nls_cp437:uni2char+3": ("EILSEQ", "pending", ["BAD_INSN_BNDRY"]),
        "p:e nls_cp437:uni2chra": ("ENOENT", "pending", ["BAD_PROBE_ADDR"]),
        "p:f nls_cp43:uni2char": ("pending", "", ["no-module"]),
        "p:g vfs:vfs_read": ("pending", "", ["no-module"]),
        "p:h vfs_read": ("ftrace", "", []),
        "p:i nosuch_function": ("ENOENT", "", ["BAD_PROBE_ADDR"]),
    }
    kernel = planned_kernel(None, str(package), None, None)
    answers = check_lines(kernel, [Line("", number, line) for number, line in enumerate(lines, 1)])
    found = {
        each.line.text: (each.outcome, each.unloaded, [finding.rule for finding in each.findings])
        for each in answers
    }
    assert found == lines
    messages = {each.line.text: each.findings[0].message for each in answers if each.findings}
    assert "similar names: nls_cp437:uni2char" in messages["p:e nls_cp437:uni2chra"]
    assert messages["p:f nls_cp43:uni2char"].startswith(
        "no module nls_cp43 comes with this kernel; similar names: nls_cp437"
    )
    assert "write MODULE:nosuch_function" in messages["p:i nosuch_function"]
    assert "the kernel itself has vfs_read" in messages["p:g vfs:vfs_read"]
    file = tmp_path / "x.probes"
    file.write_text("p:e nls_cp437:uni2chra\n")
    assert main(["check", str(file), "--image", str(package)]) == 1
    (both,) = (line for line in capsys.readouterr().out.splitlines() if "pending" in line)
    assert "ENOENT" in both


# The command


def test_the_table_has_the_beginning_of_a_long_definition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text(f"p:long vfs_read {'a=$arg1 ' * 100_000}\n")
    assert main(["check", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "p:long vfs_read a=$arg1" in shown
    assert len(shown) < 10_000


def test_several_kernels_have_a_column_each(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text("# comment\np:x f\np:y vfs_read\nkprobes/enabled = 0\n")
    assert main(["check", str(file), "--image", typed, "--image", typed]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("2 errors, 0 warnings in 2 kernels; 1 ")
    table = text[text.index("definition") :].splitlines()
    rows = [line.split()[:4] for line in table if re.match("[2-4]     ", line)]
    assert rows == [
        ["2", "ftrace", "ftrace", "p:x"],
        ["3", "ENOENT", "ENOENT", "p:y"],
        ["4", "unchecked", "unchecked", "kprobes/enabled"],
    ]
    # A long path stays one word, which can be copied.
    assert max(len(line) for line in text.splitlines() if " " in line.strip()) <= 80
    assert main(["check", str(file), "--image", typed, "--image", typed, "--sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    (result,) = log["runs"][0]["results"]
    region = result["locations"][0]["physicalLocation"]["region"]
    assert (region, result["ruleId"]) == ({"startLine": 3, "startColumn": 5}, "BAD_PROBE_ADDR")


def test_definitions_are_below_the_columns_if_they_do_not_fit(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If definitions do not fit beside the columns of the kernels, they are below, and no line is longer than
    80.

    No word is broken, and even the longest errno is separated from the next column.
    """
    file = tmp_path / "x.probes"
    lines = ["p:b twice", "p:x f number=$arg1:s32 size=$arg2:u64 first=+0($arg3):s32 second=+8($arg3):u64"]
    file.write_text("\n".join(lines) + "\n")
    for count in range(1, 6):
        assert main(["check", str(file), *["--image", typed] * count]) == 1
        text = capsys.readouterr().out
        shown = text[text.index("\nline ") : text.index(f"\n\n{file}")].splitlines()
        assert max(map(len, shown)) <= 80
        words = " ".join(shown[2:]).split()
        assert [word for word in words if word in lines[1].split()] == lines[1].split()
        assert words.count("EADDRNOTAVAIL") == words.count("ftrace") == count


def test_a_caret_is_below_its_column_in_a_long_line(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    for wrong in range(8):
        words = [f"argument{number}=$arg2:u64" for number in range(8)]
        words[wrong] = f"argument{wrong}=$nosuch:u64"
        file.write_text(f"p:x f {' '.join(words)}\n")
        assert main(["check", str(file), "--image", typed]) == 1
        lines = capsys.readouterr().out.splitlines()
        (number,) = (number for number, line in enumerate(lines) if line.strip() == "^")
        assert lines[number - 1][lines[number].index("^") :].startswith("$nosuch")
        assert len(lines[number - 1]) <= 80


def test_one_finding_for_all_cpus_is_one_result(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finding for one of a kernel's CPUs names the CPU."""
    (tmp_path / "other").mkdir()
    other = kernel_with_types(tmp_path / "other", BODY[1:4] + BODY[:1] + BODY[4:])
    kernels = []

    def with_cpu(*arguments: Any) -> PlannedKernel:
        kernels.append(planned_kernel(*arguments))
        kernels[-1].cpu_description = f"CPU {len(kernels)}"
        return kernels[-1]

    monkeypatch.setattr(check_command, "planned_kernel", with_cpu)
    file = tmp_path / "x.probes"
    file.write_text("p f+6\np vfs_read\n")
    assert main(["check", str(file), "--image", typed, "--image", other, "--sarif"]) == 1
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    found = {each["ruleId"]: each["message"]["text"] for each in results}
    assert len(found) == len(results)
    assert ["CPU 2" in found["BAD_INSN_BNDRY"], "CPU 1" in found["BAD_INSN_BNDRY"]] == [True, False]
    assert "CPU" not in found["BAD_PROBE_ADDR"]


def test_a_place_that_is_another_instruction_in_one_of_the_kernels(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    # mov %rdi,%rbx; push %rbx: this kernel has another instruction at +5, and one at +8.
    other = kernel_with_types(tmp_path / "other", BODY[1:4] + BODY[:1] + BODY[4:])
    file = tmp_path / "x.probes"
    file.write_text("p f+5\np f+8\np f+12\np f\nr f\n")
    images = ["--image", typed, "--image", other, "--image", typed]
    assert main(["check", str(file), *images, "--json"]) == 1
    kernels = json.loads(capsys.readouterr().out)[0]["kernels"]
    found = [
        (line["line"], finding["message"])
        for kernel in kernels
        for line in kernel["lines"]
        for finding in line["findings"]
        if finding["rule"] == "other-instruction"
    ]
    assert len(found) == len(kernels)
    ((number, message),) = set(found)
    assert number == 1
    assert message.index("pushq %rbx") < message.index("movq %rdi, %rbx")
    assert main(["check", str(file), "--image", typed, "--image", typed]) == 1
    assert "other-instruction" not in capsys.readouterr().out
    assert main(["check", str(file), *images]) == 1
    text = capsys.readouterr().out
    assert text.count("[other-instruction]") == 1
    assert len(re.findall(r":2\s+\(1,\s+3\):\s+error:\s+EILSEQ:", text)) == text.count("EILSEQ:") == 1


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("p f a=$arg1:s32 b=$arg2 c=$arg3", [[], []]),
        ("p f a=+0($arg3):s32", [["other-member"], ["type-size", "other-member"]]),
        ("p f a=+4($arg3):x8[4]", [["no-member"], ["no-member"]]),
        ("p f a=+12($arg3):x8[4]", [["no-member"], ["no-member"]]),
        ("p g a=+0(+8($arg1)):x8[2]", [["other-member"], ["other-member"]]),
        ("p g a=+16($arg1) b=+0(+64($arg1)):x8[2]", [[], []]),
        ("p g a=+40(+64($arg1)):x64", [[], []]),
        ("p g a=$arg4 b=$arg5", [[], []]),
        ("p g a=$arg2 b=%si c=$arg2:s64", [["other-parameter"] * 2] * 2),
        ("p g a=+0($arg2):x8[2]", [["no-pointer", "other-parameter"], ["other-parameter"]]),
        ("r g a=$retval b=+0($retval):s32", [[], []]),
    ],
)
def test_lines_that_mean_other_things_in_one_of_the_kernels(
    typed: str, line: str, rules: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` warns if a line means something else in one of the given kernels.

    The second kernel has other parameters and members. Twice the same kernel causes no such warning.
    """
    (tmp_path / "later").mkdir()
    later = kernel_with_types(tmp_path / "later", is_later=True)
    file = tmp_path / "x.probes"
    file.write_text(f"{line}\n")

    def found(*images: str) -> list[list[str]]:
        assert (
            main(["check", str(file), *[word for image in images for word in ("--image", image)], "--json"])
            == 0
        )
        (checked,) = json.loads(capsys.readouterr().out)
        answers = [each["lines"][0] for each in checked["kernels"]]
        return [[finding["rule"] for finding in answer["findings"]] for answer in answers]

    assert found(typed, later) == rules
    differences = [[rule for rule in each if not rule.startswith("other-")] for each in rules]
    assert found(typed, typed) == [differences[0]] * 2


def test_the_kernels_own_kprobes_leave_no_choice(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_text("p:x f\n")
    own = ["check", str(file), "--kprobes", "kernel"]
    assert main([*own, "--image", typed]) == 0
    assert "ftrace" in capsys.readouterr().out
    for options, message in (
        ([], "--kprobes kernel: no kernel given; add --image"),
        (["--image", typed, "--profile", "linux-6.12"], "--profile: not possible with --kprobes kernel"),
        (["--image", typed, "--strategy", "extended"], "--strategy: not possible with --kprobes kernel"),
    ):
        assert main([*own, *options]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("npm") is None:
        pytest.skip("no npm, which has the schema of SARIF")
    place = tmp_path_factory.mktemp("npm")
    command = ("npm", "pack", "--silent", "@microsoft/jest-sarif@1.0.0-beta.0")
    made = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60, check=False)
    found = [*place.glob("*.tgz")]
    if not found:
        pytest.skip(f"npm cannot fetch the schema of SARIF: {made.stderr.strip()}")
    with tarfile.open(found[0]) as package:
        file = package.extractfile(SCHEMA)
        assert file is not None
        return json.load(file)


@settings(max_examples=fewer(40, 2))
@given(texts=st.lists(lines, max_size=8))
def test_sarif_logs_are_valid(schema: Any, texts: list[str]) -> None:
    log = sarif_of("\n".join(texts))
    jsonschema.validate(log, schema)
    rules = [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]]
    for result in log["runs"][0]["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]["region"]
        assert 1 <= place["startLine"] <= len(texts)


def sarif_of(text: str) -> Any:
    from contextlib import redirect_stdout
    from io import StringIO
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile("w", suffix=".probes") as file, redirect_stdout(StringIO()) as out:
        file.write(text)
        file.flush()
        main(["check", file.name, "--sarif"])
    return json.loads(out.getvalue())


def test_each_warning_is_explained_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs/man/kprobefs.1").read_text().replace("\\-", "-")
    for rule in WARNINGS:
        assert rule in manual


def test_definitions_from_standard_input() -> None:
    command = [sys.executable, "-m", "kprobefs", "check", "-", "--json"]
    done = subprocess.run(command, input="p vfs_read\n", capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    assert found["kernels"][0]["lines"][0]["outcome"] == "ftrace"


def test_definitions_that_are_no_text_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.probes"
    file.write_bytes(b"p:a vfs_\x86read\np:b \xff\xfe\x00\nr:\x80 vfs_read\np " + bytes(range(128, 256)))
    assert main(["check", str(file)]) == 1
    assert "\x86" not in capsys.readouterr().out
    assert main(["check", str(file), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert {line["outcome"] for line in found["kernels"][0]["lines"]} <= {"EINVAL", "ENOENT"}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.probes"
    file.write_text("p vfs_read\n", encoding)
    assert main(["check", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kprobefs: {file}: it begins with a byte order mark (UTF-")
    assert line.endswith("; save it as UTF-8 without the mark")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nonexistent"], "/nonexistent"),
        (["/etc"], "/etc"),
        (["/dev/null", "--profile", "windows"], "no profile"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_debian(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = debian.package("linux-image-cloud-amd64")
    file = tmp_path / "x.probes"
    file.write_text("p:send tcp_sendmsg+5 size=%dx:u64\np:short tcp_sendmsg size=$arg3:u32\nr:x vfs_raed\n")
    assert main(["check", str(file), "--image", str(package), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    send, short, wrong = found["kernels"][0]["lines"]
    assert (send["outcome"], send["findings"]) == ("optimized", [])
    assert [finding["rule"] for finding in short["findings"]] == ["type-size"]
    assert wrong["outcome"] == "ENOENT"
    assert "vfs_read" in wrong["findings"][0]["message"]


def test_the_guide_shows_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = debian.package("linux-image-6.1.0-50-cloud-amd64")
    shown, check = [step for body in blocks("console check", GUIDE) for step in steps(body)]
    monkeypatch.chdir(tmp_path)
    (tmp_path / shown.command.removeprefix("cat ")).write_text(shown.output)
    _, *words = check.command.replace("$D", str(package)).split()
    assert main(words) == 1
    assert capsys.readouterr().out == check.output
