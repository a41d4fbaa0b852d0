"""Call every kernel function with wild arguments: python -m stress.fuzz.wild_calls [--count N] [--seed S]."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from stress.fuzz.report import Findings, Violation
from stress.fuzz.session import Session, time_limit
from tests.progress import show_progress

FILES = (
    *("/kprobes/list", "/kprobes/enabled", "/kprobes/blacklist", "/machine/dmesg", "/machine/version"),
    *("/tracing/kprobe_events", "/tracing/kprobe_profile", "/tracing/trace", "/tracing/set_event"),
)
"""Files that must be readable in every state of the guest."""
DIRECTORIES = ("/", "/kprobes", "/kprobes/stats/base/one", "/tracing", "/tracing/events/base", "/machine")
GUEST_FILES = ("/machine/tasks", "/machine/cpus", "/machine/meminfo", "/machine/modules", "/scratch/none")
"""Files that show data of the guest; reading them fails with EIO if the data are corrupt."""
SWITCH = "/tracing/events/base/enable"
WHY = ("Kernel panic - not syncing", "kprobefs: ")
"""Texts in the guest's log; one of them is there if the guest is dead, or if a call has not ended."""
SECONDS = 45.0
"""Time limit in seconds of a call and the reads after it.

It is long enough even if the guest exceeds its run budget several times.
"""
_WILD = (
    *(0, 1, 2, 8, 255, 4096, 1 << 31, (1 << 32) - 1, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(0xFFFFFFFF81000000, 0xFFFFFFFF82000000, 0xFFFF888000000000, 0xFFFF888001000000, 0xDEAD000000000100),
)


@dataclass
class WildCalls:
    """Calls functions, and boots a new kernel if a call has killed or corrupted the guest."""

    seed: int
    arch: str = "x86_64"
    findings: Findings = field(default_factory=Findings)
    ends: Counter[str] = field(default_factory=Counter)
    _session: Session | None = None

    def __post_init__(self) -> None:
        self.names = sorted(
            {symbol.name for symbol in self._ready().kernel.image.kallsyms.symbols if symbol.is_text}
        )

    def run(self, number: int) -> None:
        """Call function number `number` with random arguments, and check all files."""
        random = Random(f"{self.seed}:{number}")
        line = self._line(random, self.names[number % len(self.names)])
        try:
            with time_limit(SECONDS):
                self._call(self._ready(), line)
        # Every other exception is a finding. The kernel may be broken, so it is not used again.
        except Exception as error:
            self.findings.add(error, (line,))
            self.close()

    def close(self) -> None:
        """Free the kernel."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _ready(self) -> Session:
        if self._session is None:
            self._session = Session(MachineConfig(arch=self.arch, run_budget=0.05))
            self._session.write(SWITCH, b"1")
        return self._session

    def _line(self, random: Random, name: str) -> str:
        words = [
            '"wild"' if random.random() < 0.1 else f"{random.choice(_WILD) % self._word:#x}" for _ in range(6)
        ]
        return " ".join([name, *words])

    @property
    def _word(self) -> int:
        return 1 << (32 if self.arch == "i386" else 64)

    def _call(self, session: Session, line: str) -> None:
        try:
            session.write("/machine/call", line.encode())
            end = "returned"
        except KernelError as error:
            end = error.name
        for path in DIRECTORIES:
            session.mount.opendir(session.client, path)
            session.mount.readdir(path)
        texts = {path: session.read(path) for path in FILES}
        session.write(SWITCH, b"0")
        for path in GUEST_FILES:
            with suppress(KernelError):
                session.read(path)
        log = session.read("/machine/dmesg").decode()
        if session.is_spent:
            end = "lost"
        if end in ("lost", "EIO") and not any(why in log for why in WHY):
            raise Violation(f"the log doesn't say why: {log[-300:]!r}")
        if not all(texts[path] for path in ("/kprobes/list", "/machine/dmesg", "/machine/version")):
            raise Violation(f"empty: {[path for path in FILES if not texts[path]]}")
        self.ends[end] += 1
        if session.is_spent or not self._is_sound(session):
            self.close()
        else:
            session.write(SWITCH, b"1")

    def _is_sound(self, session: Session) -> bool:
        """Return True if the guest can execute the next call; a corrupt guest would cause false findings."""
        try:
            session.write("/machine/call", b'strlen "four"')
            session.use()
            session.read("/machine/tasks")
        except KernelError:
            return False
        return session.read("/machine/call") == b"strlen = 0x4 (4)\n"


def main() -> int:
    """Call a number of functions; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m stress.fuzz.wild_calls", description=__doc__)
    parser.add_argument(
        "--count", type=int, default=0, help="number of calls (default: one for each function)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arch", default="x86_64")
    parsed = parser.parse_args()
    calls = WildCalls(parsed.seed, parsed.arch)
    count = parsed.count or len(calls.names)
    start = time.monotonic()
    for done in range(count):
        calls.run(parsed.first + done)
        show_progress(done + 1, count, start, f"{len(calls.findings.all)} findings")
    calls.close()
    print(*calls.findings.all, sep="\n\n")
    ends = ", ".join(f"{number} {end}" for end, number in calls.ends.most_common())
    print(f"{count} calls of {len(calls.names)} functions: {ends}; {len(calls.findings.all)} findings")
    return int(bool(calls.findings.all))


if __name__ == "__main__":
    sys.exit(main())
