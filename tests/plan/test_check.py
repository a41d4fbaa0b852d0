"""`kprobefs check` gives the answers of a mounted kernel, and its warnings are right."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from kprobefs.cli.main import main
from kprobefs.common.errors import CliError
from kprobefs.definitions.syntax import Line
from kprobefs.plan.check import check_lines
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.place import find_place
from kprobefs.plan.planned_kernel import planned_kernel
from tests.image.linux import debian
from tests.plan.checked_lines import OWN, checked, lines
from tests.plan.typed_kernel import kernel_with_types
from tests.sample import fewer


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


def test_an_errno_has_the_name_that_linux_gives_it(tmp_path: Path) -> None:
    """`check` reports an errno by Linux's name: EOPNOTSUPP, although Python's module errno has the name of
    another standard for this number.
    """
    image = kernel_with_types(tmp_path, bytes.fromhex("53 ff20"))  # push %rbx; jmp *(%rax)
    (answer,) = check_lines(planned_kernel(None, image, None, None), [Line("x", 1, "p:x f+6")])
    assert answer.outcome == "EOPNOTSUPP"
    (finding,) = answer.findings
    assert finding.message.startswith("EOPNOTSUPP: ")


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


@pytest.mark.parametrize("kprobes", ["kprobefs", "kernel"])
def test_a_kernel_s_own_tracefs_has_what_it_was_built_with(typed: str, kprobes: str) -> None:
    """The made kernel has none of the functions of triggers and synthetic events, as a kernel without
    CONFIG_HIST_TRIGGERS and CONFIG_SYNTH_EVENTS.
    """
    kernel = planned_kernel(None, typed, None, None, kprobes=kprobes)
    texts = "p:x f", "events/kprobes/x/trigger = hist:keys=common_pid", "s:lat u64 d"
    answers = check_lines(kernel, [Line("x", number, text) for number, text in enumerate(texts)])
    refused = "unchecked" if kprobes == "kprobefs" else "EINVAL"
    assert [answer.outcome for answer in answers] == ["ftrace", refused, refused]


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
    bare, named = Line("", 1, "p:a aesti_set_key"), Line("", 2, "p:b aes_ti:aesti_set_key")
    (alone,) = check_lines(kernel, [bare])
    assert alone.outcome == "ENOENT"
    assert "MODULE:aesti_set_key" in alone.findings[0].message
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
        "p:b nls_ascii:uni2char a=$arg1": ("ftrace", "EINVAL", ["needs-module"]),
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
    assert "not loaded (nls_cp437): " in messages["p:a nls_cp437:uni2char a=$arg1"]
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
