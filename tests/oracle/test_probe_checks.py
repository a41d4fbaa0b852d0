"""For each recorded answer of a real Linux 6.1 about registering and optimizing a probe, the probe checker's
answer is the same.
"""

from __future__ import annotations

import pytest

from tests.oracle import verdict
from tests.oracle.recorded import Recording, oracle_directory, versions
from tests.oracle.verdict import Report, compare, main

DIRECTORY = oracle_directory()
VERSIONS = versions(DIRECTORY)


@pytest.mark.skipif(not VERSIONS, reason=f"no recorded verdicts in {DIRECTORY}")
def test_all_verdicts_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[Report] = []

    def noted(recording: Recording) -> Report:
        reports.append(compare(recording))
        return reports[-1]

    monkeypatch.setattr(verdict, "compare", noted)
    assert main([str(DIRECTORY)]) == 0
    assert "flags: agree" in capsys.readouterr().out
    assert [report.version for report in reports] == VERSIONS
    for report in reports:
        assert not report.errno.differences
        assert not report.flags.differences
        assert not report.parentless.differences
        assert report.flags.total > 9000
        assert report.perfect


def test_exit_status_without_recordings(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no recordings" in capsys.readouterr().err
