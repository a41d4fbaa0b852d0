"""What a hit costs in each mode: a Python handler that counts, net of the unprobed run, in one run.

The guest calls int_sqrt(0) in a loop; the figures are nanoseconds a call more than without a probe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from common import Distribution, arguments, report

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, Stepper

FUNCTION = "int_sqrt"
BEHIND_ENTRY = 5
"""Offset of the first instruction behind the fentry site."""
PLAIN = Profile("plain", ftrace=False, optimizer=False)
MODES = (
    ("int3, stepped by int3", PLAIN, BEHIND_ENTRY),
    ("int3, stepped by TF", replace(PLAIN, stepper=Stepper.TRAP_FLAG), BEHIND_ENTRY),
    ("boosted", replace(PLAIN, preemption=False), BEHIND_ENTRY),
    ("ftrace", Profile("ftrace"), 0),
    ("optimized", Profile("optimized"), BEHIND_ENTRY),
)


def caller(kernel: Kernel, hits: int) -> Callable[[], float]:
    """A guest loop over the function; calling it gives ns a turn."""
    text = kernel.machine.text
    code = text.alloc_text(64)
    target = kernel.image.kallsyms.lookup_name(FUNCTION)
    assert target is not None
    head = b"\x53\xbb" + hits.to_bytes(4, "little")  # push rbx; mov ebx, hits
    call_at = code + len(head) + 2
    turn = b"\x31\xff\xe8" + (target - call_at - 5).to_bytes(4, "little", signed=True)  # xor edi, edi; call
    turn += b"\xff\xcb\x75"  # dec ebx; jnz to the turn's start
    back = -(len(turn) + 1)
    text.poke(code, head + turn + back.to_bytes(1, "little", signed=True) + b"\x5b\xc3")

    def run() -> float:
        start = time.perf_counter_ns()
        kernel.machine.call(code)
        return (time.perf_counter_ns() - start) / hits

    return run


def measure(name: str, profile: Profile, offset: int, hits: int, rounds: int) -> Distribution:
    """One mode: rounds without the probe and with it, in turns."""
    counted = 0

    def count(_kprobe: Kprobe, _regs: object) -> None:
        nonlocal counted
        counted += 1

    with Kernel(MachineConfig(run_budget=60), profile=profile) as kernel:
        run = caller(kernel, hits)
        probe = Kprobe(symbol_name=FUNCTION, offset=offset, pre_handler=count)
        net = []
        for _ in range(rounds + 1):
            unprobed = run()
            kernel.register_kprobe(probe)
            if kernel.kprobes.optimizer is not None:
                kernel.kprobes.optimizer.flush()
            net.append(run() - unprobed)
            kernel.unregister_kprobe(probe)
        assert counted == hits * (rounds + 1), "a hit was lost, or counted twice"
    return Distribution(name, "ns", tuple(net[1:]))


def main() -> None:
    """Run, report; the ratios are against the first row."""
    parser = arguments(__doc__)
    parser.add_argument("--hits", type=int, default=20000, help="hits a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    report([measure(*mode, options.hits, options.rounds) for mode in MODES], options.json)


if __name__ == "__main__":
    main()
