"""If the host has no memory to compile handlers to guest code, Python handles the hits; for each kind of
probe.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.output.graph_output import NAME
from tests.ledger import ledger_mismatches

Probed = tuple[Callable[[], int], Callable[[], object]]
"""(function that returns the number of hits, function that changes the handler)."""


def probe(kernel: Kernel, command: str) -> Probed:
    kernel.tracing.kprobe_events.write(command.encode())
    event = kernel.tracing.kprobe_events.probes()[-1].event
    kernel.trace.expand()
    event.enable(kernel.trace)
    assert kernel.kprobes.optimizer is not None
    kernel.kprobes.optimizer.flush()
    return lambda: event.probes[0].hits, lambda: kernel.trace.set_clock("global")


def fprobe(kernel: Kernel) -> Probed:
    ring = kernel.hit_ring(kernel.arch.registers.return_value)
    fp = ring.fprobe("gcd")
    kernel.register_fprobe(fp)
    return lambda: ring.hits, lambda: kernel.enable_fprobe(fp)


def graph(kernel: Kernel) -> Probed:
    kernel.trace.expand()
    kernel.trace_arrays.top.functions.filter.write(b"gcd")
    kernel.trace.set_tracer(NAME)
    return lambda: kernel.trace.written // 2, lambda: kernel.tracing.function_graph.set_max_depth(2)


KINDS: dict[str, Callable[[Kernel], Probed]] = {
    "kprobe": lambda kernel: probe(kernel, "p:a gcd+8\n"),
    "kretprobe": lambda kernel: probe(kernel, "r:a gcd\n"),
    "fprobe": fprobe,
    "function graph": graph,
}


@pytest.mark.parametrize("missing", [MemoryError, ImportError, OSError])
@pytest.mark.parametrize("step", ["emit", "program"])
@pytest.mark.parametrize("kind", KINDS)
def test_hits_stay_with_python(
    kind: str,
    step: str,
    missing: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An error while a handler is compiled in the middle of a hit does not reach the guest.

    Python handles the hits, and a later change compiles again.
    """

    def none(*_: object) -> None:
        raise missing("no such package")

    with Kernel() as kernel:
        hits, change = KINDS[kind](kernel)
        with monkeypatch.context() as patch:
            patch.setattr(ProgramBuilder, step, none)
            assert [kernel.call("gcd", 12, 18) for _ in range(3)] == [6] * 3
        assert (hits(), kernel.kprobes.compiler.made) == (3, 0)
        # The daemon itself reports a lack of memory, but nothing else reports a broken package.
        lines = ["handlers stay with Python: no guest code can be made: no such package"]
        assert [record.getMessage() for record in caplog.records] == lines * (missing is not MemoryError)
        change()
        assert [kernel.call("gcd", 12, 18) for _ in range(2)] == [6] * 2
        assert kernel.kprobes.compiler.made > 0
        assert (hits(), ledger_mismatches(kernel.machine.text)) == (5, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_that_cannot_be_loaded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder is loaded before the first probe is armed, and again at each later attempt to compile.

    If loading fails, Python handles the hits.
    """

    def no_descriptor() -> None:
        attempts.append(None)
        raise OSError(errno.EMFILE, "too many open files")

    attempts: list[None] = []
    with Kernel() as kernel:
        with monkeypatch.context() as patch:
            patch.setattr(kernel.arch, "load_decoder", no_descriptor)
            hits, change = KINDS[kind](kernel)
            assert attempts
            assert [kernel.call("gcd", 12, 18) for _ in range(3)] == [6] * 3
        assert (hits(), kernel.kprobes.compiler.made) == (3, 0)
        change()
        assert [kernel.call("gcd", 12, 18) for _ in range(2)] == [6] * 2
        assert kernel.kprobes.compiler.made > 0
        assert hits() == 5
