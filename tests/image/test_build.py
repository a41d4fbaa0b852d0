"""The build of images: the manifest fits the prebuilt images, and the sources give the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from emulated_kernel.image import build_images
from emulated_kernel.image.builtin_image import KernelImage, load_image
from kprobefs.cli.main import main
from tests.guests.linux.debian_kernel import lasting_cache
from tests.sample import share


def test_the_manifest_fits_the_image(each_image: KernelImage) -> None:
    image = each_image
    entry = build_images.read_manifest()[image.arch]
    data = image.path.read_bytes()
    assert entry["sha256"] == hashlib.sha256(data).hexdigest()
    assert entry["size"] == len(data)
    assert entry["functions"] == sum(symbol.is_text for symbol in image.kallsyms.symbols) >= 400
    assert entry["fentry_sites"] == len(image.mcount)


def test_no_path_of_the_build_place_is_in_the_image(each_image: KernelImage) -> None:
    data = each_image.path.read_bytes()
    assert b"/tmp" not in data
    assert str(Path(__file__).parents[2]).encode() not in data


@pytest.mark.slow
@pytest.mark.parametrize("arch", share(sorted(build_images.TARGETS), 0, 2))
def test_the_sources_give_the_prebuilt_image(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sources of an architecture give its prebuilt image, byte for byte. `scripts/test --image` makes all
    images.

    The same sources and tools give the same image, so an image that was built on this machine is not built
    again.
    """
    kept = lasting_cache("builds") / inputs(arch)
    if kept.exists():
        return
    status = build_images.main(["--check", "--arch", arch])
    message = capsys.readouterr().out.strip()
    if status == build_images.EXIT_OTHER_COMPILER:
        pytest.skip(message)
    assert (status, message) == (0, f"{arch}: prebuilt image is what the sources give")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.touch()


def inputs(arch: str) -> str:
    """Return a digest of everything that determines an image and its check: files, and versions of
    the tools.
    """
    own = Path(build_images.__file__).parent
    parts = (own.glob("*.py"), build_images.SOURCE.rglob("*"), build_images.PREBUILT.rglob("*"))
    target = build_images.TARGETS[arch]
    tools = map(build_images.tool_version, (target.compiler, target.linker, build_images._TYPES_TOOL))
    digest = hashlib.sha256(repr((arch, *tools)).encode())
    for file in sorted(path for part in parts for path in part if path.is_file()):
        digest.update(f"{file.relative_to(own)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def make_debug_image(arch: str, file: Path) -> None:
    """Build an image of `--debug`, or copy the one that was last built on this machine, if the same sources
    and tools made it.
    """
    kept = lasting_cache("builds") / f"{arch}-{inputs(arch)}.debug"
    if kept.exists():
        shutil.copyfile(kept, file)
        return
    assert build_images.main(["--arch", arch, "--output", str(file), "--debug"]) == 0
    kept.parent.mkdir(parents=True, exist_ok=True)
    for earlier in kept.parent.glob(f"{arch}-*.debug"):
        earlier.unlink(missing_ok=True)
    # Another worker may build the same.
    new = kept.with_name(f"{kept.name}.{os.getpid()}")
    shutil.copyfile(file, new)
    new.replace(kept)


@pytest.mark.slow
@pytest.mark.parametrize("arch", share(["i386", "riscv64", "x86_64"], 0, 2))
def test_an_image_with_line_numbers_has_the_code_of_the_one_without(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image of `--debug` has the text of the prebuilt image, and `explain` reads its line numbers."""
    compiler = build_images.tool_version(build_images.TARGETS[arch].compiler)
    if compiler != build_images.read_manifest()[arch]["compiler"]:
        pytest.skip(f"another compiler: {compiler}")
    file = tmp_path / "vmlinux"
    make_debug_image(arch, file)
    plain, debug = (load_image(path, arch) for path in (None, file))
    assert debug.kallsyms.kallsyms_text() == plain.kallsyms.kallsyms_text()
    for start, end in plain.text_ranges:
        assert debug.read(start, end - start) == plain.read(start, end - start)
    capsys.readouterr()
    lines = (build_images.SOURCE / "lib/math.c").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if re.search(r"\bgcd\([^;]*$", text))
    place = f"lib/math.c:{line + 1}"
    assert main(["explain", "--arch", arch, "--json", "--debug-info", str(debug.path), place]) == 0
    assert json.loads(capsys.readouterr().out)[0]["symbol"] == "gcd"


def test_another_compiler_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build_images, "tool_version", lambda _: "gcc (Elsewhere) 99.1")
    assert build_images.main(["--check"]) == build_images.EXIT_OTHER_COMPILER
    assert capsys.readouterr().out.count("not checked") == len(build_images.TARGETS)


def test_a_missing_compiler_has_no_version() -> None:
    assert build_images.tool_version("no-such-compiler") == ""


def test_a_changed_image_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vmlinux: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = vmlinux.read_bytes()
    (tmp_path / "x86_64").mkdir()
    (tmp_path / "x86_64" / "vmlinux").write_bytes(data[:-1] + b"!")
    manifest = build_images.read_manifest()
    versions = {
        "gcc": manifest["x86_64"]["compiler"],
        "ld": manifest["x86_64"]["linker"],
        "pahole": manifest["x86_64"]["types"],
    }
    monkeypatch.setattr(build_images, "PREBUILT", tmp_path)
    monkeypatch.setattr(build_images, "tool_version", versions.get)
    monkeypatch.setattr(build_images, "build", lambda _: build_images.Built(data, manifest["x86_64"]))
    assert build_images.main(["--check", "--arch", "x86_64"]) == 1
    assert "differ" in capsys.readouterr().out


def test_without_the_sources_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the sources, as in an installed package, the build ends with one line of error."""
    monkeypatch.setattr(build_images, "SOURCE", tmp_path / "src")
    assert build_images.main(["--arch", "x86_64", "--module", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told == "build: needs a checkout of kprobefs: the sources of its kernel aren't installed\n"


def test_a_warning_is_an_error_and_says_so() -> None:
    script = "echo 'x.c:1: warning: w' >&2; exit $0"
    for status, head in (("0", "sh - (warnings are errors):"), ("1", "sh -:")):
        command = ["sh", "-c", script, status, "-", "-o", "x.o"]
        with pytest.raises(build_images.BuildError) as told:
            build_images._run(command)
        assert str(told.value).splitlines() == [head, "x.c:1: warning: w"]
