"""`coverage --results` and `--scheduler`: runs that continue an earlier run, and a cluster that loses a
worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kprobefs.cli.main import main
from kprobefs.common.errors import CliError
from kprobefs.measure.cluster import run_on_cluster
from kprobefs.measure.coverage import FunctionCounter
from stress.exhaustion.__main__ import main as prove
from tests.coverage.test_coverage import counted, linux, refused

LOST = """
import os, signal
from kprobefs.measure import cluster

def lost_once(packages, code, function, arguments, call=cluster._call, done=set()):
    if function.__name__ == "check_part":
        if done:
            try:
                os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        done.add(1)
    return call(packages, code, function, arguments)

# Dask may run this code twice in a worker.
if cluster._call.__name__ != "lost_once":
    cluster._call = lost_once
    lost_once.__module__ = cluster.__name__
    lost_once.__qualname__ = "_call"
"""
"""Code for the workers: the first one that gets a second part of a proof is killed, and leaves a mark."""


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the numbers of the pieces that this process counts."""
    found: list[int] = []
    count = FunctionCounter.count_piece

    def noted(self: FunctionCounter, number: int) -> Any:
        found.append(number)
        return count(self, number)

    monkeypatch.setattr(FunctionCounter, "count_piece", noted)
    return found


def same_counts(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two results differ at most in their CPU time."""
    return {**one, "seconds": 0} == {**other, "seconds": 0}


# Results files


def test_a_second_run_counts_only_what_is_missing(
    tmp_path: Path, pieces: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results"
    options = "--jobs", "1", "--results", str(file)
    (whole,) = counted(capsys, *options)
    assert len(pieces) == len(set(pieces)) > 4
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(pieces)
    # A run that was killed while it wrote the fourth result.
    file.write_bytes(b"".join(lines[:4]) + lines[4][:100])
    every = pieces.copy()
    pieces.clear()
    (rest,) = counted(capsys, *options)
    assert pieces == every[3:]
    assert same_counts(whole, rest)
    pieces.clear()
    (again,) = counted(capsys, *options)
    assert not pieces
    assert again == rest


def test_results_of_other_kernels_and_rules_are_not_used(
    tmp_path: Path, pieces: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--jobs", "1", "--results", str(tmp_path / "results"), "--function", "vfs_*"
    seen = [
        counted(capsys, *options, *more)
        for more in ((), ("--strategy", "extended"), ("--profile", "djprobe-2007"), ("--arch", "i386"))
        if not pieces.clear()
    ]
    assert all(json.dumps(one) != json.dumps(other) for one in seen for other in seen if one is not other)
    pieces.clear()
    assert counted(capsys, *options) == seen[0]
    assert not pieces


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("int main(void)\n", "not a file of results"),
        ("int main", "not a file of results"),
        ('{"kprobefs": "results", "version": 1}\n[1]\n', "damaged"),
        ('{"kprobefs": "results", "version": 1}\n' + "[" * 100000 + "\n", "damaged"),
        ('{"kprobefs": "results", "version": 2}\nof a later kprobefs\n', "version 2"),
        ('{"kprobefs": "results"}\n', "not a file of results"),
        (None, "directory"),
    ],
)
def test_another_file_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    file = tmp_path / "file"
    if content is None:
        file.mkdir()
    else:
        file.write_text(content)
    assert why in refused(capsys, "--results", str(file)).lower()
    assert content is None or file.read_text() == content


def test_wrong_counts_in_a_file_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results"
    options = "--results", str(file), "--function", "vfs_*"
    counted(capsys, *options)
    head, line = file.read_text().splitlines()
    key, number, _ = json.loads(line)
    for wrong in ([], [[]], [[[{"NO_REASON": 1}, 0, 0]]], {}, 1, [[[{"": "x"}, 0, 0]]]):
        file.write_text(f"{head}\n{json.dumps([key, number, wrong])}\n")
        assert main(["coverage", *options]) == 1
        assert "wrong counts" in capsys.readouterr().err


# A cluster


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a file that a worker makes before it is killed."""
    return tmp_path_factory.mktemp("lost") / "mark"


@pytest.fixture(scope="module")
def cluster(mark: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of the scheduler of a cluster with two workers, one of which is killed during a
    proof.
    """
    distributed: Any = pytest.importorskip("distributed", reason="kprobefs[cluster] is not installed")
    folder = tmp_path_factory.mktemp("cluster")
    preload = folder / "lost.py"
    preload.write_text(LOST.format(mark=str(mark)))
    options = {
        "n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None,
        "preload": [str(preload)], "local_directory": str(folder), "silence_logs": 50,
    }  # fmt: skip
    with distributed.LocalCluster(**options) as local:
        yield local.scheduler_address


def test_a_cluster_counts_what_a_process_counts(
    tmp_path: Path, cluster: str, pieces: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    (alone,) = counted(capsys, "--jobs", "1", "--function", "*s*")
    every = pieces.copy()
    assert len(every) > 2
    pieces.clear()
    options = "--function", "*s*", "--scheduler", cluster, "--results", str(tmp_path / "results")
    (shared,) = counted(capsys, *options)
    assert same_counts(alone, shared)
    assert len((tmp_path / "results").read_text().splitlines()) == 1 + len(every)
    assert not pieces


def test_a_proof_on_a_cluster_goes_on_without_a_lost_worker(
    tmp_path: Path,
    cluster: str,
    mark: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each part has one place: three calls, so that a worker gets a second one.
    monkeypatch.setattr("stress.exhaustion.prover._PART", 1)
    file = tmp_path / "results"
    options = "--sites", "--part", "0/500", "--results", str(file)
    assert prove([*options, "--scheduler", cluster]) == 0
    assert mark.exists()
    shared = capsys.readouterr().out
    head, *lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    # A run that was killed while it wrote the last result goes on here.
    file.write_bytes(b"".join([head, *lines])[:-5])
    assert prove(options) == 0
    assert file.read_bytes().startswith(b"".join([head, *lines[:-1]]))
    # The number of runs depends on the places that the process proved before.
    for output in (shared, capsys.readouterr().out):
        assert re.match(r"3 places, \d{4,} runs, 0 problems\n", output)


def test_workers_read_a_relative_path_of_the_commands_directory(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(linux(tmp_path))
    monkeypatch.chdir(tmp_path)
    options = "--image", file.name, "--function", "vfs_*"
    for one, other in zip(
        counted(capsys, *options, "--scheduler", cluster), counted(capsys, *options), strict=True
    ):
        assert same_counts(one, other)


def test_a_matrix_runs_on_the_workers(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker fails before it mounts anything: its file of a kernel does not exist.
    monkeypatch.chdir(tmp_path)
    options = "--image", "missing", "--scheduler", cluster
    assert main(["matrix", *options, "--", "true"]) == 1
    shown = capsys.readouterr()
    assert "missing" in shown.out
    assert (tmp_path / "kprobefs-matrix" / "missing.log").read_text()


def test_a_worker_that_reads_another_kernel_is_an_error(
    cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FunctionCounter, "digest", "0")
    assert main(["coverage", "--scheduler", cluster]) == 1
    assert "another kernel" in capsys.readouterr().err


def test_other_code_on_the_workers_is_an_error(
    cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobefs.measure.cluster.code_digest", lambda _packages=(): "0")
    assert main(["coverage", "--scheduler", cluster, "--function", "vfs_*"]) == 1
    assert "another version" in capsys.readouterr().err


class Unpicklable(Exception):
    """An exception that can be pickled, but not unpickled."""

    def __init__(self, _first: int, _second: int) -> None:
        super().__init__("two\nlines")


def fail(what: str) -> object:
    """Raise an exception that cannot be unpickled, return a result that cannot be pickled, or return
    `what`.
    """
    if what == "exception":
        raise Unpicklable(1, 2)
    if what == "result":
        return (each for each in ())
    return what


def test_a_failed_call_ends_the_command_with_its_reason(cluster: str) -> None:
    for what, shown in (("exception", "Unpicklable: two"), ("result", "generator")):
        with pytest.raises(CliError, match=shown):
            list(run_on_cluster(cluster, fail, [(what,)]))
    assert list(run_on_cluster(cluster, fail, [("nothing",)])) == [(0, "nothing")]


def test_a_cluster_without_a_scheduler_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed", reason="kprobefs[cluster] is not installed")
    monkeypatch.setattr("kprobefs.measure.cluster._PATIENCE", 0.5)
    assert main(["coverage", "--scheduler", "tcp://127.0.0.1:1"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "dask scheduler" in shown
    assert main(["coverage", "--scheduler", "nonsense://x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_options_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobefs.measure.cluster.find_spec", lambda name: name)
    for command in (["coverage"], ["matrix"]):
        words = [*command, "--scheduler", "tcp://127.0.0.1:1", "--jobs", "2"]
        assert main([*words, "--", "true"] if command == ["matrix"] else words) == 2
        assert "--jobs" in capsys.readouterr().err
    monkeypatch.setattr("kprobefs.measure.cluster.find_spec", lambda _name: None)
    for command in (["coverage"], ["matrix"]):
        words = [*command, "--scheduler", "tcp://127.0.0.1:1"]
        assert main([*words, "--", "true"] if command == ["matrix"] else words) == 2
        assert "kprobefs[cluster]" in capsys.readouterr().err
