"""A small sample of what `python -m tests.fuzz` writes, and whether it would notice what must not happen."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from emulated_kernel.errors import KernelError
from emulated_kernel.trace.kprobe_events import KprobeEvents
from tests.fuzz.fuzzer import RESET_EVERY, Fuzzer
from tests.fuzz.parse import ParserFuzzer
from tests.fuzz.parsers import Target, targets
from tests.fuzz.report import Finding

INPUTS = 2000
PARSER_INPUTS = 500
SLOW, SLOW_INPUTS = ("image", "module"), 30


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
def test_other_errors_are_findings(fuzzer: Fuzzer, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_events: KprobeEvents, data: bytes) -> int:
        if b"no_such" in data:
            raise error
        return len(data)

    assert "no_such" in str(_first_finding(fuzzer, fail, monkeypatch).history[-1])


def test_changed_state_is_a_finding(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    write = KprobeEvents.write

    def fail(events: KprobeEvents, _data: bytes) -> int:
        write(events, b"p vfs_read\n")
        raise KernelError(errno.EINVAL)

    assert "refused with EINVAL" in _first_finding(fuzzer, fail, monkeypatch).error


def _first_finding(
    fuzzer: Fuzzer, write: Callable[[KprobeEvents, bytes], int], monkeypatch: pytest.MonkeyPatch
) -> Finding:
    """What is found first when kprobe_events takes commands so."""
    fuzzer.kinds = ("kprobe_events",)
    fuzzer.run(0)
    monkeypatch.setattr(KprobeEvents, "write", write)
    for number in range(1, RESET_EVERY):
        fuzzer.run(number)
        for finding in fuzzer.findings.all:
            return finding
    pytest.fail("nothing was found")


@pytest.mark.parametrize("target", targets().values(), ids=lambda target: target.name)
def test_parsers(target: Target) -> None:
    fuzzer = ParserFuzzer(target, seed=6)
    for number in range(SLOW_INPUTS if target.name in SLOW else PARSER_INPUTS):
        fuzzer.run(number)
    assert not fuzzer.findings.all, "\n".join(map(str, fuzzer.findings.all))
