"""A sample of `python -m stress.fuzz.wild_calls`, which calls any function of the guest. A guest that ends
without a message is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestRunner
from stress.fuzz.wild_calls import WildCalls

SAMPLE = 20
LOST = (
    "cpu_startup_entry", "release_task", "panic", "host_idle", "schedule", "free_task",
    "__switch_to", "del_timer_sync", "host_enqueue_task", "host_return", "host_yield",
)  # fmt: skip
"""Functions whose call loses the guest, or the task that makes the call."""


@pytest.fixture
def calls() -> Iterator[WildCalls]:
    made = WildCalls(seed=1)
    yield made
    made.close()


def test_control_files_answer_whatever_is_called(calls: WildCalls) -> None:
    step = len(calls.names) // SAMPLE
    for number in [*range(0, len(calls.names), step), *map(calls.names.index, LOST)]:
        calls.run(number)
    assert not calls.findings.all, "\n".join(map(str, calls.findings.all))
    assert calls.ends["lost"]


def test_a_guest_that_ends_without_a_word_is_a_finding(
    calls: WildCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuestRunner, "_add_note", lambda *_: None)
    calls.run(calls.names.index("host_return"))
    assert "doesn't say why" in calls.findings.all[0].error
