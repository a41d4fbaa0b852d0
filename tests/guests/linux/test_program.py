"""The command line with a distribution's kernel: refused options, with one line of error and nothing left
behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kprobefs.cli.main import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def vmlinuz(path: Path) -> Path:
    """Write a file that starts like a vmlinuz, and return its path."""
    path.write_bytes(bytes(0x1FE) + b"\x55\xaa\0\0HdrS\x0f\x02" + bytes(4096))
    return path


def refusal(capsys: pytest.CaptureFixture[str], directory: Path, *options: str) -> str:
    """Return the only line of error that `mount` prints before it ends with status 2."""
    assert main(["mount", *options, str(directory)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--profile", "kprobes-2010"),
            "use linux-6.1 or linux-6.1-nopreempt, or leave it out: the kernel's",
        ),
        (("--return-hook", "fgraph"), "--return-hook: not possible"),
        (("--save-regs", "all"), "--save-regs: not possible"),
        (("--cpus", "2"), "has one CPU"),
        (("--arch", "i386"), "of the architecture in its file"),
        ((), "not a usable kernel"),
    ],
)
def test_what_our_engine_can_not_do_there(
    options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "linux-image.deb"
    package.write_bytes(b"!<arch>\n" + bytes(600))
    for image in (vmlinuz(tmp_path / "vmlinuz"), package):
        assert said in refusal(capsys, tmp_path, "--image", str(image), *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "no kernel given"),
        (("--image", "FILE", "--arch", "riscv64"), "one CPU, of the architecture in its file"),
        (("--image", "FILE", "--cpus", "2"), "one CPU, of the architecture in its file"),
        (("--image", "/nonexistent"), "No such file"),
        (("--image", "/"), "Is a directory"),
        (("--image", "FILE", "--profile", "linux-6.1"), "--profile: not possible with --kprobes kernel"),
        (("--image", "FILE", "--return-hook", "fgraph"), "--return-hook: not possible"),
        (("--image", "FILE", "--save-regs", "all"), "--save-regs: not possible"),
        (("--image", "FILE"), "not a usable kernel"),
    ],
)
def test_bad_input(
    options: tuple[str, ...], said: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(vmlinuz(tmp_path / "vmlinuz"))
    given = [file if option == "FILE" else option for option in options]
    assert said in refusal(capsys, tmp_path, "--kprobes", "kernel", *given)
    assert not cache.exists()


def test_no_images_yet(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobefs.cli.images.at_hand", tuple)
    assert main(["images"]) == 0
    assert "images fetch debian:bookworm/cloud" in capsys.readouterr().err
    assert main(["images", "--clear"]) == 0
    assert capsys.readouterr().out == f"0 images removed from {cache}/kprobefs/kernels\n"
