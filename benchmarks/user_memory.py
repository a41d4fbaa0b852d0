"""Cost of hits that read user memory, in a distribution's kernel where direct loads of user memory fault.

For each kind of argument: entries into Python in 1,000 hits, and net nanoseconds of CPU time of a hit. A
client's task calls the probed function in a loop. Rounds with and without the probe alternate. The figures
are the least of all rounds.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import common  # noqa: F401 (the modules of this checkout come first)

from emulated_kernel.arch.riscv import encoder as riscv
from emulated_kernel.arch.riscv.insn import A1, RA, S1, ZERO
from emulated_kernel.guests.linux.boot_cache import ensure_cached, started_with_kernel
from emulated_kernel.guests.linux.cpu.cpu_models import MODELS
from emulated_kernel.guests.linux.probing.detect_interface import profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from kprobefs.fuse.memory_reserve import share_heap
from tests.guests.linux.user_reads import FUNCTION, USER, UserReads

_SEED = 1
_HITS = 1000
_ARGUMENTS = {
    "none": "",
    "number in a register": "a=ARG",
    "number at an address": "a=+0(ARG):u64",
    "number in user memory": "a=+u0(ARG):u64",
    "string at an address": "a=+0(ARG):string",
    "string in user memory": "a=+0(ARG):ustring",
    "number on the stack": "a=+0($stack):u64",
    "string of the kernel": "a=@linux_banner:string",
}


class _Loop(UserReads):
    """A loop in the guest that calls the probed function _HITS times, and its duration."""

    took = 0
    _begun = 0

    def _caller(self, allowed: bool) -> bytes:
        del allowed
        function = self.engine.kernel.required(FUNCTION)
        arch = self.engine.components.arch
        start = self._code
        if arch.name == "x86_64":
            head = b"\xbd" + _HITS.to_bytes(4, "little")  # mov ebp
            turn = b"\xbe" + USER.to_bytes(4, "little")  # mov esi
            turn += arch.relative_call(start + len(head + turn), function) + b"\xff\xcd"  # dec ebp
            turn += b"\x75" + (-len(turn) - 2).to_bytes(1, "little", signed=True)  # jnz
            return head + turn + arch.relative_jump(start + len(head + turn), self._trap)
        head = riscv.set_register(S1, _HITS)
        turn = riscv.set_register(A1, USER)
        turn += riscv.long_jump(RA, RA, start + len(head + turn), function) + riscv.addi(S1, S1, -1)
        turn += riscv.branch(riscv.BranchFunct3.NE, S1, ZERO, -len(turn))
        return head + turn + riscv.long_jump(ZERO, RA, start + len(head + turn), self._trap)

    def _call(self, regs: Any) -> None:
        super()._call(regs)
        self._begun = time.thread_time_ns()

    def _end(self, regs: Any) -> None:
        self.took = time.thread_time_ns() - self._begun
        super()._end(regs)

    def ns(self) -> float:
        """Return the CPU time in nanoseconds of a call of the probed function: the least of three loops."""
        found = []
        for _ in range(3):
            self.call(1, allowed=False)
            found.append(self.took / _HITS)
        return min(found)


def main() -> None:
    """Print a line for each kind of argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--image", required=True)
    parser.add_argument("--cpu", choices=MODELS, help="a CPU with SMAP, for an x86_64 kernel")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    share_heap()
    cpu = MODELS[options.cpu] if options.cpu else None
    ensure_cached(options.image, _SEED, lambda _done, _total: None, cpu)
    tasks, kernel = started_with_kernel(options.image, _SEED, cpu)
    loop = _Loop(LinuxEngine(tasks, kernel, replace(profile_of(kernel), ftrace=False, optimizer=False)))
    loop.call(1, allowed=False)
    own = loop.entries(1, allowed=False)
    for name, arguments in _ARGUMENTS.items():
        least, plain = 1e9, 1e9
        entered = 0
        for _ in range(options.rounds):
            plain = min(plain, loop.ns())
            with loop.probed(f"p {FUNCTION}", [arguments]):
                loop.call(1, allowed=False)
                least = min(least, loop.ns())
                entered = loop.entries(1, allowed=False) - own
        print(f"{name}: {entered} entries, {least - plain:.0f} ns")


if __name__ == "__main__":
    main()
