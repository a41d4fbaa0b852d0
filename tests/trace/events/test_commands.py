"""Refused and accepted commands of kprobe_events: cases that the recordings do not have, and random
commands.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.trace.text.numbers import kstrtol, kstrtoul, simple_strtoul
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError
from tests.sample import fewer
from tests.trace.events.kernel import errno_of, make_kernel
from tests.trace.events.recorded import sample


def _refusal(command: str) -> tuple[str, str, int]:
    """Return the errno, the error text, and the caret's column in the command. The column is -1 if nothing is
    logged.
    """
    kernel = make_kernel()
    name = errno_of(lambda: kernel.events.write(command.encode("latin-1")))
    log = "".join(kernel.events.error_log.records()).splitlines()
    if not log:
        return name, "", -1
    return name, log[0].partition("error: ")[2], log[2].index("^") - len("  Command: ")


@pytest.mark.parametrize(
    ("command", "name", "text", "column"),
    [
        ("p:a vfs_read%ret", "EINVAL", "Invalid probed address suffix", 12),
        ("p1:a /bin/sh:0x1", "EINVAL", "Maxactive is not for kprobe", 1),
        ("p:" + "e" * 64 + " vfs_read", "EINVAL", "Event name is too long", 2),
        ("p:g/" + "e" * 64 + " vfs_read", "EINVAL", "Event name is too long", 4),
        ("p: vfs_read", "EINVAL", "Event name is not specified", 2),
        ("p:g+/e vfs_read", "EINVAL", "Group name must follow the same rules as C identifiers", 2),
        ("p:1g/e vfs_read", "EINVAL", "Group name must follow the same rules as C identifiers", 2),
        ("p:a vfs_read x=@99999999999999999999", "ERANGE", "Invalid memory address", 15),
        ("p:a vfs_read +99999999999999999999(%di)", "ERANGE", "Invalid dereference offset", 13),
        ("p:a vfs_read +8", "EINVAL", "Dereference needs a brace", 13),
        ("p:a vfs_read +0($comm)", "EINVAL", "$comm can not be dereferenced", 16),
        ("p:a vfs_read +u0(%xx)", "EINVAL", "Invalid register name", 16),
        ("p:a vfs_read +-8(%xx)", "EINVAL", "Invalid register name", 16),
        ("p:a vfs_read -8(%xx)", "EINVAL", "Invalid register name", 16),
        ("p:a vfs_read $arg0", "EINVAL", "Invalid argument number", 13),
        ("p:a vfs_read+5 $arg1", "EINVAL", "Invalid $-variable specified", 15),
        ("p:a 0xffffffff8134cc50 $arg1", "EINVAL", "Invalid $-variable specified", 23),
        ("r:a 0xffffffff8134cc50 $retval", "EINVAL", "$retval is not available on probe", 23),
        ('p:a vfs_read \\"', "EINVAL", "String is not closed with '\"'", 15),
        ("p:a vfs_read $stack:symstr", "EINVAL", "Symbol String doesn't accept data/userdata", 20),
        ("p:a vfs_read +u0(%di):u8[2]", "EINVAL", "String accepts only memory argument", 22),
        ("p:a vfs_read " + "+0(" * 16 + "%r8" + ")" * 16, "EINVAL", "Argument expression is too long", 13),
        ("p:a vfs_read " + "+0(" * 15 + "%r8" + ")" * 15, "EINVAL", "Dereference is too much nested", 16),
        ("p:a vfs_read " + "+0(" * 14 + "@x" + ")" * 14, "EINVAL", "Dereference is too much nested", 19),
        ("p:a vfs_read " + "+0(" * 12 + "@x" + ")" * 12 + ":u8[2]", "EINVAL",
         "Dereference is too much nested", 13),
        ('p:a vfs_read \\"a":string[2]', "EINVAL", "", -1),
        ("p:a vfs_read " + " ".join(f"a{n}=@jiffies:u64[64]" for n in range(7)), "E2BIG",
         "Event too big (too many fields?)", 13 + 6 * 20 + 3),
        ("r" + "0" * 64 + ":a vfs_read", "EINVAL", "Invalid maxactive number", 1),
        ("-:", "EINVAL", "", -1),
        (" -:a", "EINVAL", "", -1),
    ],
)  # fmt: skip
def test_refused(command: str, name: str, text: str, column: int) -> None:
    assert _refusal(command) == (name, text, column)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("p:\xe9v vfs_read", None),
        ("p:a vfs_read +0(%di)rest", "p:kprobes/a vfs_read arg1=+0(%di)rest"),
        ("p:a vfs_read +0(@jiffies):string[64]", "p:kprobes/a vfs_read arg1=+0(@jiffies):string[64]"),
        ("pabc:a vfs_read", "p:kprobes/a vfs_read"),
        ("r0x1000:a vfs_read", "r4096:kprobes/a vfs_read"),
        ("p:a\xa0vfs_read", "p:kprobes/a vfs_read"),
        ("p:" + "e" * 63 + " vfs_read", f"p:kprobes/{'e' * 63} vfs_read"),
        ("p:a vfs_read " + "+0(" * 14 + "%r8" + ")" * 14, None),
        ("p:a vfs_read %di:b4@60/0x40", "p:kprobes/a vfs_read arg1=%di:b4@60/0x40"),
    ],
)
def test_accepted(command: str, shown: str | None) -> None:
    kernel = make_kernel()
    assert kernel.events.write(command.encode("latin-1")) == len(command)
    assert shown is None or "".join(kernel.events.records()) == shown + "\n"


def test_raw_bytes_of_a_name_come_back() -> None:
    kernel = make_kernel()
    kernel.events.write(b"p:\xe9v vfs_read\n")
    assert (
        "".join(kernel.events.records()).encode("utf-8", "surrogateescape") == b"p:kprobes/\xe9v vfs_read\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x1F", 31),
        ("010", 8),
        ("+7\n", 7),
        ("0x", "EINVAL"),
        ("", "EINVAL"),
        ("9" * 30, "ERANGE"),
        ("-1", "EINVAL"),
    ],
)
def test_kstrtoul(text: str, expected: int | str) -> None:
    assert (errno_of(lambda: kstrtoul(text)) or kstrtoul(text)) == expected


def test_signed_and_lenient_numbers() -> None:
    assert kstrtol("-0x8000000000000000") == -(1 << 63)
    assert errno_of(lambda: kstrtol("0x8000000000000000")) == "ERANGE"
    assert errno_of(lambda: kstrtol("--1")) == "EINVAL"
    assert simple_strtoul("0x10@") == (16, 4)
    assert simple_strtoul("09") == (0, 1)
    assert simple_strtoul("@") == (0, 0)


def test_error_log_keeps_eight() -> None:
    times = iter(
        [
            38114676000,
            38114994000,
            38115310000,
            38115610000,
            38115967000,
            38116289000,
            38116596000,
            38116901000,
        ]
    )
    recorded = sample("error_log_12_errors.txt")
    log = ErrorLog(lambda: next(times, 0))
    for number in range(4, 12):
        command = f"p:e{number} nosuch_{number}"
        log.add("trace_kprobe", command, ProbeError.BAD_PROBE_ADDR, command.index(" ") + 1)
    assert "".join(log.records()) == recorded
    log.add("trace_kprobe", "x", ProbeError.BAD_VAR, 0)
    assert len(log.records()) == 8
    log.clear()
    assert "".join(log.records()) == ""


_WORDS = st.sampled_from(
    [
        *("p", "r", "p:", "r:a", "p:g/a", "-:a", "-:g/", "!:a", "r10:", "\n", "#", "\0", "\xa0", " "),
        *("vfs_read", "vfs_write+5", "%return", "0xffffffff8134cc50", "ktgt:ktgt_add", "no:such"),
        "name_show",
        *("%di", "$retval", "$comm", "$stack0", "$arg1", "@jiffies", "+0(", ")", "-8(", "+u0("),
        *("\\1", '\\"a"'),
        *("x=", "=", ":", "u8", "string", "ustring", "symbol", "symstr", "b4@2/8", "[2]", "[", "]", "x64"),
    ]
)  # fmt: skip
_COMMANDS = st.one_of(
    st.binary(max_size=60),
    st.lists(_WORDS, max_size=14).map(lambda words: "".join(words).encode("latin-1")),
    st.lists(_WORDS, max_size=14).map(lambda words: " ".join(words).encode("latin-1")),
    st.lists(_WORDS, max_size=8).map(lambda words: b"p:a vfs_read x=" + "".join(words).encode("latin-1")),
)


@settings(max_examples=fewer(500, 10))
@given(st.lists(_COMMANDS, max_size=3))
def test_any_bytes_succeed_or_fail_with_an_errno(commands: list[bytes]) -> None:
    kernel = make_kernel()
    kernel.events.write(b"p:first vfs_write\n")
    for command in commands:
        before = (
            "".join(kernel.events.records()),
            list(kernel.backend.handles),
            [e.id for e in kernel.events.registry],
        )
        try:
            assert kernel.events.write(command) == len(command)
        except KernelError:
            if b"\n" not in command and not command.startswith(b"-"):
                ids = [event.id for event in kernel.events.registry]
                assert before == ("".join(kernel.events.records()), list(kernel.backend.handles), ids)
        assert len(kernel.backend.handles) <= len(kernel.events.probes())
        for event in kernel.events.events():
            assert event.format_text().startswith(f"name: {event.name}\nID: {event.id}\n")
    shown = "".join(kernel.events.records()).encode("utf-8", "surrogateescape")
    assert len(shown.splitlines()) >= len(kernel.events.events())


_FETCHED = st.recursive(
    st.sampled_from(["%di", "$comm", "$stack0", "$arg1", "@jiffies", "\\1", '\\"a"']),
    lambda inner: st.builds("{}{})".format, st.sampled_from(["+0(", "-8(", "+u0("]), inner),
    max_leaves=3,
)
_TYPES = st.sampled_from(
    ["", ":u8", ":string", ":ustring", ":symbol", ":symstr", ":b4@2/8", ":x64", ":u8[2]"]
)
_ARGUMENTS = st.lists(st.builds("{}{}".format, _FETCHED, _TYPES), min_size=1, max_size=3).map(" ".join)
"""Strategy for one to three fetch arguments, most of which are valid.

Of arguments that consist of arbitrary words, only one in 75 would be valid.
"""


@settings(max_examples=fewer(200, 4), suppress_health_check=[HealthCheck.filter_too_much])
@given(st.one_of(_ARGUMENTS, st.lists(_WORDS, max_size=8).map("".join)))
def test_what_is_shown_can_be_written_again(arguments: str) -> None:
    kernel, again = make_kernel(), make_kernel()
    command = f"p:a vfs_read x={arguments}"
    assume(not errno_of(lambda: kernel.events.write(command.encode("latin-1"))))
    shown = "".join(kernel.events.records())
    again.events.write(shown.encode("utf-8", "surrogateescape"))
    assert "".join(again.events.records()) == shown


@pytest.mark.parametrize("group", ["-", "-a", "g-1", "_", "G"])
def test_groups(group: str) -> None:
    kernel = make_kernel()
    kernel.events.write(f"p:{group}/e vfs_read\n".encode())
    assert "".join(kernel.events.records()) == f"p:{group}/e vfs_read\n"
