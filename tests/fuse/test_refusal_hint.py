"""The hints at the end of a failed `run` about requests that the kernel refused."""

from __future__ import annotations

import shlex

import pytest

from emulated_kernel.image.build_images import PREBUILT
from kprobefs.cli.refusal_hint import HINT_LINE
from tests.fuse.harness import REAL_PROGRAM, kprobefs, needs_fuse
from tests.image.linux.debian import package

UNLOGGED = 'tracing/dynamic_events has refused "f:reads vfs_read": this kernel has no events of kind f'
LOGGED = (
    'tracing/error_log ends with "trace_kprobe: error: Invalid register name" for '
    '"p:oops vfs_read a=%nosuch", at "%nosuch"'
)
AT_PLACE = (
    'tracing/error_log ends with "trace_kprobe: error: Probe point is not an instruction boundary" for '
    '"p:x vfs_read+1", at "vfs_read+1"; `kprobefs explain vfs_read+1` says why'
)
IN_INSTANCE = """\
echo 'p:reads vfs_read' > kprobe_events; mkdir instances/i
echo 'hist:keys=count.nosuch' > instances/i/events/kprobes/reads/trigger
"""
TRIGGER = (
    'ends with "hist:kprobes:reads: error: Invalid field modifier" for "hist:keys=count.nosuch", at "nosuch"'
)
MISSING = "this kernel has no file tracing/nosuch, and no command can create it"


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("lines", "options", "hint"),
    [
        (("f:reads vfs_read",), (), UNLOGGED),
        (("p:oops vfs_read a=%nosuch", "f:reads vfs_read"), (), UNLOGGED),
        (("f:reads vfs_read", "p:oops vfs_read a=%nosuch"), (), LOGGED),
        (("p:x vfs_read+1",), (), AT_PLACE),
        (("f:reads vfs_read",), ("--profile", "linux-6.12"), None),
    ],
)
def test_the_last_refused_definition(
    lines: tuple[str, ...], options: tuple[str, ...], hint: str | None
) -> None:
    """The hint names the last refused definition, even if Linux logs no error for this kind of event."""
    script = "".join(f"echo '{line}' >> $KPROBEFS/tracing/dynamic_events\n" for line in lines)
    done = kprobefs("run", *options, "--", "sh", "-c", f"{script}exit 1", program=REAL_PROGRAM)
    hints = [found[1] for line in done.stderr.splitlines() if (found := HINT_LINE.fullmatch(line))]
    assert hints == ([] if hint is None else [hint])


def hints_of(script: str, *options: str) -> list[str]:
    """Run a script in the tracefs of a mount, and return the hints on standard error."""
    script = f'cd "$KPROBEFS/tracing"\n{script}\nexit 3'
    done = kprobefs("run", *options, "--", "sh", "-c", script, program=REAL_PROGRAM)
    return [line for line in done.stderr.splitlines() if line.startswith("kprobefs: ")]


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("kprobes", ["kprobefs", "kernel"])
def test_a_distributions_kernel(kprobes: str) -> None:
    """On a distribution's kernel, the hints are the same for kprobefs's kprobes and for the kernel's own
    kprobes.
    """
    options = ("--image", str(package("linux-image-cloud-amd64")), "--kprobes", kprobes)
    kind, word, missing = (f"kprobefs: {hint}" for hint in (UNLOGGED, LOGGED, MISSING))
    assert hints_of("echo 'f:reads vfs_read' >> dynamic_events", *options) == [kind]
    assert hints_of("echo 'p:oops vfs_read a=%nosuch' >> dynamic_events", *options) == [word]
    if kprobes == "kernel":
        assert hints_of("echo x > nosuch", *options) == [missing]
        instance = hints_of(IN_INSTANCE, *options)
        assert instance == [f"kprobefs: tracing/instances/i/error_log {TRIGGER}"]
    words = options if kprobes == "kernel" else options[:2]
    (place,) = hints_of("echo 'p:x vfs_read+1' >> dynamic_events", *options)
    assert place.endswith(f"; `{shlex.join(['kprobefs', 'explain', *words, 'vfs_read+1'])}` says why")


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("arch", "options", "logged"),
    [
        ("riscv64", (), "module: ELF machine 243, not 62"),
        ("i386", (), "module: ELF class 1, data encoding 1: not of this machine"),
        ("riscv64", ("--kprobes", "kprobefs"), "Invalid architecture in ELF header: 243"),
        ("riscv64", ("--kprobes", "kernel"), "Invalid architecture in ELF header: 243"),
    ],
)
def test_a_module_of_another_architecture(arch: str, options: tuple[str, ...], logged: str) -> None:
    """The hint has the reason that the kernel has logged, because the errno is only ENOEXEC."""
    image = ("--image", str(package("linux-image-cloud-amd64"))) if options else ()
    module = PREBUILT / arch / "modules" / "counter.ko"
    (hint,) = hints_of(f"echo 'load {module}' > ../machine/modules", *image, *options)
    assert HINT_LINE.fullmatch(hint)
    assert hint.endswith(f'"load {module}": Exec format error; machine/dmesg says "{logged}"')


@needs_fuse
@pytest.mark.mounted
def test_a_module_that_does_not_exist() -> None:
    (hint,) = hints_of("echo 'load nosuch' > ../machine/modules")
    assert (
        hint
        == 'kprobefs: machine/modules has refused "load nosuch": module nosuch: there is none of that name'
    )


@needs_fuse
@pytest.mark.mounted
def test_only_what_the_kernel_refused_is_named() -> None:
    """Only a request that the kernel has refused gets this hint.

    A probe without hits and an error in scratch/ do not count as refusals.
    """
    enabled = "echo 'p:sent tcp_sendmsg' > kprobe_events; echo 1 > events/kprobes/sent/enable"
    assert hints_of(f"{enabled}; echo 'f:reads vfs_read' >> dynamic_events") == [f"kprobefs: {UNLOGGED}"]
    filtered = "echo 'p:reads vfs_read n=$arg3' > kprobe_events; echo 'n == 1' > events/kprobes/reads/filter"
    filtered += "; echo 1 > events/kprobes/reads/enable; head -c 8 ../dev/zero > /dev/null"
    refused, unrecorded = hints_of(f"{filtered}; echo 'f:reads vfs_read' >> dynamic_events")
    assert refused == f"kprobefs: {UNLOGGED}"
    assert "its filter is n == 1" in unrecorded
    (hint,) = hints_of(f"{enabled}; echo x > ../scratch/nosuch/file")
    assert hint.startswith("kprobefs: no hit of sent: the command ended with status 3")
    (hint,) = hints_of("echo 7 > tracing_on; echo nosuch > trace_clock")
    assert hint.startswith('kprobefs: tracing/trace_clock has refused "nosuch": ')


@needs_fuse
@pytest.mark.mounted
def test_a_trigger_that_does_not_exist() -> None:
    """For an unknown trigger, the hint says that the kernel does not have this trigger, although the error is
    only EINVAL.
    """
    file = "events/sched/sched_switch/trigger"
    (hint,) = hints_of(f"echo 'nosuch:1' > {file}")
    assert hint == f'kprobefs: tracing/{file} has refused "nosuch:1": this kernel has no trigger nosuch'
    (hint,) = hints_of(f"echo 'traceoff:x' > {file}")
    assert "no trigger" not in hint


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize(
    ("end", "log"),
    [
        ("", "tracing/instances/i/error_log"),
        ("echo > instances/i/error_log", None),
        ("rmdir instances/i", "error_log of the removed instance i"),
        ("rmdir instances/i; mkdir instances/i", "error_log of the removed instance i"),
        ("echo 'p:oops vfs_read a=%nosuch' >> kprobe_events", "tracing/error_log"),
    ],
    ids=["present", "cleared", "removed", "made again", "at the top"],
)
def test_the_log_of_an_instance(end: str, log: str | None) -> None:
    """The hint has the error from the log of the instance, also if the instance was removed."""
    (hint,) = hints_of(f"{IN_INSTANCE}{end}")
    assert HINT_LINE.fullmatch(hint)
    if log is None:
        assert hint.endswith('trigger has refused "hist:keys=count.nosuch": Invalid field modifier')
    else:
        assert hint.startswith(f"kprobefs: {log} ends with ")
        assert ("tracing/error_log" in hint) == ("oops" in hint)
