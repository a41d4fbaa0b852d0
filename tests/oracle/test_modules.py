"""Probes in a module that is loaded, unloaded and loaded again: lists, trace and profile are as Linux showed
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.errors import KernelError
from tests.oracle.recorded import oracle_directory

SAMPLES = oracle_directory() / "samples"
LISTS = SAMPLES / "kprobes_list_states.txt"
PENDING = ("p:mbefore ktgt:ktgt_add a=%di", "p:mnosym ktgt:no_such")
DEFINED = ("p:m1 ktgt:ktgt_str+0 s=+0(%di):string", "p:m2 ktgt_add", "p:m11 ktgt_add+0x5")
RETURN = "r:m3 ktgt:ktgt_add $retval"
ADDRESS = re.compile(r"\b(?:0x)?f{8}c[0-9a-f]{7}\b")
RECORD = re.compile(r"\[\d+\] (\S+) +[\d.]+: (\w+): (.*)")
SIZE = re.compile(r"/0x[0-9a-f]+")

pytestmark = pytest.mark.skipif(not LISTS.exists(), reason=f"no recorded answers in {SAMPLES}")


class Replay:
    """The recorded steps, repeated in a kernel of kprobefs.

    The return probe is left out if the kernel refuses return probes.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.events = kernel.tracing.kprobe_events
        self.has_return = True

    def define(self, command: str) -> None:
        self.events.write(f"{command}\n".encode())

    def define_return(self) -> None:
        try:
            self.define(RETURN)
        except KernelError:
            self.has_return = False

    def enable(self, *names: str) -> None:
        for name in names:
            event = self.events.find("kprobes", name)
            if event is not None:
                event.enable(self.kernel.trace)

    def toggle(self, name: str) -> None:
        event = self.events.find("kprobes", name)
        assert event is not None
        event.disable(self.kernel.trace)
        event.enable(self.kernel.trace)

    def agrees(self, headline: str) -> None:
        """Check that kprobes/list is as recorded under this headline."""
        section = LISTS.read_text().partition(f"--- {headline}\n")[2].partition("---")[0]
        assert self.listed("".join(self.kernel.kprobes.list_records(0))) == self.listed(section)

    def listed(self, text: str) -> list[str]:
        """Return the lines of a list, sorted by address.

        Lines of one address keep their order. Names replace the addresses, which differ from the recorded
        ones.
        """
        lines = [line for line in text.splitlines() if self.has_return or line.split()[1] != "r"]
        first = min((int(line.split()[0], 16) for line in lines), default=0)

        def name(address: re.Match[str]) -> str:
            return {0: "add", 5: "add+5"}.get(int(address[0], 16) - first, "str")

        return sorted((ADDRESS.sub(name, line) for line in lines), key=lambda line: line.split()[0])

    def records(self, text: str) -> list[tuple[str, ...]]:
        """Return the flags, event and text of each record, without the sizes of functions.

        Records of the event m3 are left out, because its caller depends on the compiler.
        """
        found = [match.groups() for match in map(RECORD.search, text.splitlines()) if match]
        return [(flags, event, SIZE.sub("", rest)) for flags, event, rest in found if event != "m3"]

    def call(self) -> None:
        self.kernel.call("ktgt_add", 120, 242)
        self.kernel.call("ktgt_str", "hello")


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Kernel() as kernel:
        yield Replay(kernel)


def test_story(replay: Replay) -> None:
    kernel = replay.kernel
    for command in PENDING:
        replay.define(command)
    replay.enable("mbefore")
    replay.agrees("module probe before load")
    kernel.load_module("ktgt")
    replay.agrees("after insmod")

    for command in DEFINED[:2]:
        replay.define(command)
    replay.define_return()
    replay.define(DEFINED[2])
    replay.enable("m1", "m2", "m3")
    # In the recorded kernel, the function is too short for a jump after its fifth byte.
    kernel.kprobes.set_optimization(False)
    replay.enable("m11")
    replay.agrees("module probes enabled")
    replay.call()
    recorded = (SAMPLES / "trace_module.txt").read_text()
    assert replay.records(kernel.trace.trace_text()) == replay.records(recorded)

    kernel.unload_module("ktgt")
    replay.agrees("after rmmod")
    for name in ("m1", "m2", "m11", *(["m3"] if replay.has_return else [])):
        replay.toggle(name)
    replay.agrees("after toggling a gone event")
    profile = (SAMPLES / "kprobe_profile_module_gone.txt").read_text().splitlines(keepends=True)
    assert list(replay.events.profile_records()) == [
        line for line in profile if replay.has_return or line.split()[0] != "m3"
    ]

    kernel.trace.clear_trace()
    kernel.load_module("ktgt")
    replay.agrees("after second insmod")
    replay.call()
    again = (SAMPLES / "trace_module_reloaded.txt").read_text()
    assert replay.records(kernel.trace.trace_text()) == replay.records(again)
    kernel.unload_module("ktgt")
    replay.agrees("after second rmmod")


@pytest.mark.parametrize("line", range(8))
def test_refused(line: int, replay: Replay) -> None:
    """Definitions that Linux refused while the module was loaded fail with the same errno and message."""
    log = (SAMPLES / "log.txt").read_text().splitlines()
    refused = [re.match(r"module (p:.*) ERR (\w+) \[.*\] (.*)", entry) for entry in log]
    match = [found for found in refused if found is not None][line]
    replay.kernel.load_module("ktgt")
    with pytest.raises(KernelError) as failure:
        replay.define(match[1])
    assert failure.value.name == match[2]
    assert match[3] in replay.events.error_log.records()[-1]
