"""Check trace-cmd, perf and bpftrace with each version's profile.

    python -m stress.clients [--root DIR] [PROFILE...]

The clients are those of this system or, with --root, those of another system's root, for example one that
`debootstrap --include=trace-cmd,linux-perf,bpftrace trixie DIR` makes. In `scripts/fresh-root trixie`, apt
installs them. Each check compares the output of a client with the files that the client reads. The program
needs root.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from emulated_kernel.kprobes.profile import profile_named
from emulated_kernel.trace.interface import InterfaceRule, interface_named

PROFILES = ("linux-5.10", "linux-6.1", "linux-6.12", "linux-7.2")
TIMEOUT = 120
"""Maximum number of seconds for the clients of one check."""
END = "== end of answer =="
TRACING = "/sys/kernel/tracing"
_CHECKOUT = Path(__file__).resolve().parents[1]
_RUN = sys.executable, "-m", "kprobefs", "run", "--as-system"
IN_ROOT = """
for place in proc sys dev; do mount --rbind /$place {root}/$place; done
mount -t tmpfs none {root}/tmp
exec chroot {root} bash -c {script}
"""
AWAIT_RECORDERS = f"""
await_recorders() {{
    cpus=$(ls -d {TRACING}/per_cpu/cpu* | wc -l)
    until [ $(for each in $(cat /proc/$PPID/task/$PPID/children); do
            grep -q poll /proc/$each/wchan && readlink /proc/$each/fd/* | grep trace_pipe_raw
        done | wc -l) -ge $cpus ]; do sleep 0.02; done
}}
"""
"""Shell function for the command of `trace-cmd record`, which waits until all recorders wait for records.

If trace-cmd stops a recorder before the recorder has begun, the records of its CPU are missing.
"""


class CheckFailed(Exception):
    """Exception of a check whose client's output differs from the files; the text says in which way."""


@dataclass(frozen=True)
class Clients:
    """Runs the clients of one system, such as perf, on mounts of kprobefs's own kernel with one profile.

    `profile`: name of the profile. `root`: root directory of the system.
    """

    profile: str
    root: Path = field(default_factory=lambda: Path("/"))

    def has(self, program: str) -> bool:
        """Return True if the system has a program."""
        path = os.pathsep.join(str(self.root / place) for place in ("usr/bin", "usr/sbin", "bin"))
        return shutil.which(program, path=path) is not None

    def knows(self, rule: InterfaceRule) -> bool:
        """Return True if the profile's interface has a rule."""
        return rule in interface_named(profile_named(self.profile).interface)

    def answers(self, *scripts: str) -> list[str]:
        """Run each shell script in the same mount, which is at the system's own paths; return their outputs.

        Raises: CheckFailed.
        """
        script = f"\necho; echo {shlex.quote(END)}\n".join(("", *scripts))
        if self.root != Path("/"):
            script = IN_ROOT.format(root=shlex.quote(str(self.root)), script=shlex.quote(script))
        with tempfile.TemporaryDirectory(prefix="kprobefs-clients-") as home:
            result = subprocess.run(
                [*_RUN, "--profile", self.profile, "--", "bash", "-c", script],
                env={**os.environ, "HOME": home, "LC_ALL": "C", "PYTHONPATH": str(_CHECKOUT)},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                check=False,
            )
        if result.returncode:
            raise CheckFailed(result.stderr.strip().splitlines()[-1] if result.stderr else "no output")
        return [part.removesuffix("\n") for part in result.stdout.split(f"{END}\n")[1:]]


def _same(found: set[str], wanted: set[str], what: str) -> None:
    """Check that the names in a client's output are those in the files. Raises: CheckFailed.

    `what`: kind of the names, for the message.
    """
    if found != wanted or not wanted:
        lacking = sorted(wanted - found)[:3]
        more = sorted(found - wanted)[:3]
        raise CheckFailed(f"{what}: {len(found)} in place of {len(wanted)}; lacks {lacking}, adds {more}")


def lists(clients: Clients) -> None:
    """Check that trace-cmd lists the events, functions, tracers, options and clocks of the kernel."""
    sources = {
        "e": "cat available_events",
        "f": "cat available_filter_functions",
        "t": "cat available_tracers",
        "o": "ls options",
        "C": "cat trace_clock",
    }
    found = clients.answers(
        *(f"trace-cmd list -{letter}" for letter in sources),
        *(f"cd {TRACING} && {command}" for command in sources.values()),
    )
    for command, shown, there in zip(sources.values(), found, found[len(sources) :], strict=False):
        wanted = set(there.split())
        # An option that is off is listed as noNAME.
        words = {word if word in wanted else word.removeprefix("no") for word in shown.split()}
        _same(words, wanted, command)


def formats(clients: Clients) -> None:
    """Check that trace-cmd shows the format of each event of a group."""
    shown, there = clients.answers("trace-cmd list -e '^sched:' -F", f"cat {TRACING}/events/sched/*/format")
    found, wanted = (
        {line.strip() for line in text.splitlines() if "field:" in line} for text in (shown, there)
    )
    _same(found, wanted, "fields")


def _definitions(clients: Clients) -> tuple[str, ...]:
    later = clients.knows(InterfaceRule.CHAR_TYPE)
    return (
        "p:c/opened do_sys_openat2 dfd=%di:s32 name=+0(%si):ustring flags=+0(%dx):x64 who=$comm",
        "r:c/done do_sys_openat2 fd=$retval:s32",
        "p:c/made vfs_mkdir mode=%cx:x16 low=%cx:b4@0/16 at=%si:symbol two=+0(%si):x8[2]",
        *(("p:c/named vfs_mkdir letter=%cx:char",) if later else ()),
        *(("f:c/entry vfs_mkdir $arg1", "f:c/exit vfs_mkdir%return $retval:s32") if later else ()),
        *(("t:c/forked sched_process_fork",) if later else ()),
    )


def probes(clients: Clients) -> None:
    """Check that trace-cmd records the events of all kinds of probes, and shows the same text as `trace`."""
    lines = [f"echo {shlex.quote(text)} >> {TRACING}/dynamic_events" for text in _definitions(clients)]
    # The records must be shown before trace-cmd reads them.
    show = f"echo 0 > {TRACING}/tracing_on; grep -v '^#' {TRACING}/trace > /tmp/shown"
    work = f"{AWAIT_RECORDERS}await_recorders; mkdir made; rmdir made; (:); {show}"
    record = f"trace-cmd record -o /tmp/recorded.dat -e c bash -c {shlex.quote(work)}"
    listed, _, shown, report = clients.answers(
        "\n".join((*lines, "trace-cmd list -e '^c:'")),
        f"cd /sys/kernel/debug/scratch && {record} 2>&1",
        "cat /tmp/shown",
        "trace-cmd report -i /tmp/recorded.dat; rm -f /tmp/recorded.dat /tmp/shown",
    )
    wanted = {text.split()[0].partition(":")[2].replace("/", ":") for text in _definitions(clients)}
    _same(set(listed.split()), wanted, "events of probes")
    records = [line for line in report.splitlines() if not line.startswith("cpus=")]
    names = [[_event(line, wanted) for line in text] for text in (records, shown.splitlines())]
    if names[0] != names[1] or "UNKNOWN" in report:
        raise CheckFailed(f"report has {len(names[0])} records in place of {len(names[1])}: {records[:1]}")
    missing = wanted - {f"c:{name}" for name in names[1]}
    if missing:
        raise CheckFailed(f"no records of {', '.join(sorted(missing))}")
    texts = [
        [re.findall(r"\b(?:dfd|fd|mode|low)=\S+", line) for line in text]
        for text in (records, shown.splitlines())
    ]
    if texts[0] != texts[1]:
        raise CheckFailed("report shows other values than trace")


def _event(line: str, wanted: set[str]) -> str:
    """Return the name of the event in a line of a report or of `trace`, or "" if it is none of `wanted`."""
    names = "|".join(name.partition(":")[2] for name in wanted)
    found = re.search(rf"[:\s]({names}):\s", line)
    return found[1] if found else ""


def perf_probes(clients: Clients) -> None:
    """Check that perf defines, lists and deletes kprobe events."""
    added, listed, there, _, left = clients.answers(
        "perf probe --add vfs_read 2>&1",
        "perf probe -l 2>&1",
        f"cat {TRACING}/kprobe_events",
        "perf probe -d vfs_read 2>&1",
        f"cat {TRACING}/kprobe_events",
    )
    if "probe:vfs_read" not in added or not re.search(r"probe:vfs_read +\(on vfs_read\b", listed):
        raise CheckFailed(f"perf adds {added.splitlines()[:1]} and lists {listed.splitlines()[:1]}")
    if not there.startswith("p:probe/vfs_read ") or left:
        raise CheckFailed(f"kprobe_events has {there!r}, and afterwards {left!r}")


def perf_lists(clients: Clients) -> None:
    """Check that perf lists all events that have an id."""
    listed, there = clients.answers("perf list tracepoint", f"cd {TRACING}/events && ls -d */*/id")
    found = set(re.findall(r"^ *(\w+:\w+) +\[Tracepoint event\]$", listed, re.MULTILINE))
    _same(found, {path.removesuffix("/id").replace("/", ":") for path in there.split()}, "events")


def bpftrace_lists(clients: Clients) -> None:
    """Check that bpftrace lists functions, and events with their fields."""
    functions, events, fields, traceable, there, declared = clients.answers(
        "bpftrace -l 'kprobe:vfs_*'",
        "bpftrace -l 'tracepoint:sched:*'",
        "bpftrace -lv 'tracepoint:sched:sched_switch'",
        f"cut -d ' ' -f 1 {TRACING}/available_filter_functions | grep '^vfs_'",
        f"grep '^sched:' {TRACING}/available_events",
        f"cat {TRACING}/events/sched/sched_switch/format",
    )
    _same(set(functions.split()), {f"kprobe:{name}" for name in traceable.split()}, "functions")
    _same(set(events.split()), {f"tracepoint:{name}" for name in there.split()}, "events")
    shown = set(re.findall(r"^ +.*?(\w+)(?:\[\w+\])?;?$", fields, re.MULTILINE))
    wanted = set(re.findall(r"field:.*?(\w+)(?:\[\w+\])?;\toffset:(?:[89]|\d\d+);", declared))
    _same(shown, wanted, "fields of sched_switch")


CHECKS: Mapping[Callable[[Clients], None], str] = {
    lists: "trace-cmd",
    formats: "trace-cmd",
    probes: "trace-cmd",
    perf_probes: "perf",
    perf_lists: "perf",
    bpftrace_lists: "bpftrace",
}
"""Check -> name of the client that it runs."""


def results(clients: Clients) -> Iterator[tuple[str, str]]:
    """Yield the name of each check and its outcome.

    The outcome is `good`, the reason of a failure, or a note that the client is missing.
    """
    for check, program in CHECKS.items():
        if not clients.has(program):
            yield check.__name__, f"not run: {program} is not installed"
            continue
        try:
            check(clients)
        except CheckFailed as failure:
            yield check.__name__, f"failed: {failure}"
        else:
            yield check.__name__, "good"


def main() -> int:
    """Print the outcome of each check for each profile; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m stress.clients", description=__doc__)
    parser.add_argument("--root", metavar="DIR", type=Path, default=Path("/"), help="root of the clients")
    parser.add_argument("profiles", metavar="PROFILE", nargs="*", default=PROFILES)
    options = parser.parse_args()
    is_good = True
    for profile in options.profiles:
        for name, outcome in results(Clients(profile, options.root)):
            is_good = is_good and not outcome.startswith("failed")
            print(f"{profile:12} {name:16} {outcome}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
