"""A small sample of the inputs of `python -m stress.fuzz`, and the faults that the fuzzer must find."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from emulated_kernel.trace.probes.kprobe_events import KprobeEvents
from emulated_kernel.util.errors import KernelError
from stress.fuzz.fuzzer import RESET_EVERY, Fuzzer
from stress.fuzz.parse import ParserFuzzer
from stress.fuzz.parsers import Target, targets
from stress.fuzz.report import Finding, Violation
from stress.fuzz.session import TRACING, Session
from tests.sample import fewer

INPUTS = fewer(2000, 16)
PARSER_INPUTS = fewer(500, 4)
SLOW, SLOW_INPUTS = ("image", "module"), fewer(30, 2)


@pytest.fixture
def fuzzer() -> Iterator[Fuzzer]:
    made = Fuzzer(seed=7)
    yield made
    made.close()


def test_every_write_ends_in_success_or_an_errno(fuzzer: Fuzzer) -> None:
    for number in range(INPUTS):
        fuzzer.run(number)
    assert not fuzzer.findings.all, "\n".join(map(str, fuzzer.findings.all))
    refused = sum(count for (_, error), count in fuzzer.answers.items() if error)
    assert INPUTS / 4 < refused < INPUTS


@pytest.mark.parametrize("error", [ValueError("not an errno"), KernelError(0)])
def test_other_errors_are_findings(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_events: KprobeEvents, data: bytes) -> int:
        if b"no_such" in data:
            raise error
        return len(data)

    assert "no_such" in str(_first_finding(fail, monkeypatch).history[-1])


def test_changed_state_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    write = KprobeEvents.write

    def fail(events: KprobeEvents, _data: bytes) -> int:
        write(events, b"p vfs_read\n")
        raise KernelError(errno.EINVAL)

    assert "refused with EINVAL" in _first_finding(fail, monkeypatch).error


def _first_finding(write: Callable[[KprobeEvents, bytes], int], monkeypatch: pytest.MonkeyPatch) -> Finding:
    """Return the first finding of a fuzzer if `write` replaces KprobeEvents.write from the second
    input on.
    """
    real, begun = KprobeEvents.write, False

    def switched(events: KprobeEvents, data: bytes) -> int:
        return write(events, data) if begun else real(events, data)

    # Replace the method before the files are made, because the files hold a reference to it.
    monkeypatch.setattr(KprobeEvents, "write", switched)
    with closing(Fuzzer(seed=7)) as fuzzer:
        fuzzer.kinds = ("kprobe_events",)
        fuzzer.run(0)
        begun = True
        for number in range(1, RESET_EVERY):
            fuzzer.run(number)
            for finding in fuzzer.findings.all:
                return finding
    pytest.fail("nothing was found")


def test_a_late_answer_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Session()) as session:
        monkeypatch.setattr("stress.fuzz.report.SLOWEST", 0.0)
        with pytest.raises(Violation, match="/machine/version answered after"):
            session.read("/machine/version")


def test_function_stacks_in_several_arrays_are_in_time() -> None:
    """Four trace arrays can record each call of the guest with a stack, and the session's requests are still
    answered in time.
    """
    with closing(Session()) as session:
        for number in range(3):
            session.mount.mkdir(session.client, f"{TRACING}/instances/{number}", 0o755)
        for array in (TRACING, *(f"{TRACING}/instances/{number}" for number in range(3))):
            session.write(f"{array}/current_tracer", b"function")
            session.write(f"{array}/options/func_stack_trace", b"1")
        session.use()
        assert b"<stack trace>" in session.read(f"{TRACING}/instances/2/trace")


@pytest.mark.parametrize("target", targets().values(), ids=lambda target: target.name)
def test_parsers(target: Target) -> None:
    fuzzer = ParserFuzzer(target, seed=6)
    for number in range(SLOW_INPUTS if target.name in SLOW else PARSER_INPUTS):
        fuzzer.run(number)
    assert not fuzzer.findings.all, "\n".join(map(str, fuzzer.findings.all))
