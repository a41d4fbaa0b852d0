"""Every recorded answer of a real 6.1 about registering and optimizing must be ours too."""

from __future__ import annotations

import pytest

from tests.oracle.recorded import Recording, oracle_directory, recordings
from tests.oracle.verdict import compare, main

DIRECTORY = oracle_directory()
RECORDINGS = tuple(recordings(DIRECTORY)) if DIRECTORY.is_dir() else ()
needs_recordings = pytest.mark.skipif(not RECORDINGS, reason=f"no recorded verdicts in {DIRECTORY}")


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.version)
@needs_recordings
def test_all_verdicts_agree(recording: Recording) -> None:
    report = compare(recording)
    assert not report.errno.differences
    assert not report.flags.differences
    assert not report.parentless.differences
    assert report.flags.total > 9000
    assert report.perfect


@needs_recordings
def test_exit_status_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DIRECTORY)]) == 0
    assert "flags: agree" in capsys.readouterr().out


def test_exit_status_without_recordings(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no recordings" in capsys.readouterr().err
