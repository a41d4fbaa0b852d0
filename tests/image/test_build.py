"""The build of images: the manifest fits the prebuilt images, and the sources give the same bytes."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import re
from functools import cache
from pathlib import Path

import pytest

from emulated_kernel.image import build_images
from emulated_kernel.image.builtin_image import KernelImage, load_image
from kprobefs.cli.main import main
from tests.guests.linux.debian_kernel import lasting_cache
from tests.sample import share

ARCHES = ("i386", "x86_64-ibt", "riscv64", "riscv64i", "x86_64", "x86_64-retpoline")
"""All targets of builds. A short run builds every second one, from the first on."""


def test_each_target_is_built() -> None:
    assert sorted(ARCHES) == sorted(build_images.TARGETS)


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


@pytest.fixture
def _kept_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep objects on this machine, so that only sources whose files have changed are compiled again."""
    compile_one = build_images._compile
    source_files = build_images.SOURCE.rglob("*.h")
    headers = sorted(path.relative_to(build_images.SOURCE).as_posix() for path in source_files)

    @cache
    def content(path: str) -> str:
        return hashlib.sha256((build_images.SOURCE / path).read_bytes()).hexdigest()

    def compiled(target: build_images.BuildTarget, source: Path, output: Path, more: list[str]) -> None:
        version = build_images.tool_version(target.compiler)
        flags = (
            build_images.COMMON_FLAGS,
            target.flags,
            target.arch_directory,
            more,
            inspect.getsource(compile_one),
        )
        # A new header may be found in place of another one.
        key = hashlib.sha256(repr((version, flags, source.as_posix(), headers)).encode()).hexdigest()
        kept = lasting_cache("build-objects") / key
        notes = output.with_suffix(build_images._NOTES)
        if kept.exists():
            data, told, read = pickle.loads(kept.read_bytes())
            if all((build_images.SOURCE / path).exists() and content(path) == read[path] for path in read):
                output.write_bytes(data)
                if told is not None:
                    notes.write_text(told)
                return
        rule = output.with_suffix(".d")
        compile_one(target, source, output, [*more, "-MD", "-MF", str(rule)])
        words = rule.read_text().partition(":")[2].replace("\\\n", " ").split()
        read = {path: content(path) for path in words}
        told = notes.read_text() if notes.exists() else None
        kept.parent.mkdir(parents=True, exist_ok=True)
        # Another worker may compile the same.
        new = kept.with_name(f"{kept.name}.{os.getpid()}")
        new.write_bytes(pickle.dumps((output.read_bytes(), told, read)))
        new.replace(kept)

    monkeypatch.setattr(build_images, "_compile", compiled)


@pytest.mark.slow
@pytest.mark.usefixtures("_kept_objects")
@pytest.mark.parametrize("arch", share(ARCHES, 0, 2))
def test_the_sources_give_the_prebuilt_image(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sources of an architecture give its prebuilt image, byte for byte. `scripts/test --image` makes
    all images. On x86, the same build also gives the image of `--debug`.

    The same sources and tools give the same images, so images that were built on this machine are not built
    again. The kept file has the reason for which the prebuilt image could not be compared, if there is one.
    """
    compiler = build_images.tool_version(build_images.TARGETS[arch].compiler)
    if compiler != build_images.read_manifest()[arch]["compiler"]:
        pytest.skip(f"another compiler: {compiler}")
    has_lines = arch in share(("i386", "riscv64", "x86_64"), 0, 2)
    kept = lasting_cache("builds") / f"{inputs(arch)}{'-debug' if has_lines else ''}"
    if not kept.exists():
        built = build_images.build(arch, has_lines=has_lines)
        monkeypatch.setattr(build_images, "build", lambda _arch, **_: built)
        if has_lines:
            image_with_lines_has_the_prebuilt_code(arch, tmp_path / "vmlinux", capsys)
        status = build_images.main(["--check", "--arch", arch])
        message = capsys.readouterr().out.strip()
        is_other = status == build_images.EXIT_OTHER_COMPILER
        assert is_other or (status, message) == (0, f"{arch}: prebuilt image is what the sources give")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(message if is_other else "")
    if reason := kept.read_text():
        pytest.skip(reason)


def image_with_lines_has_the_prebuilt_code(arch: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that an image of `--debug` has the text of the prebuilt image, and that `explain` reads its line
    numbers. `file`: where the image is written.
    """
    assert build_images.main(["--arch", arch, "--output", str(file), "--debug"]) == 0
    plain, debug = (load_image(path, arch) for path in (None, file))
    assert debug.kallsyms.kallsyms_text() == plain.kallsyms.kallsyms_text()
    assert debug.segments == plain.segments
    capsys.readouterr()
    lines = (build_images.SOURCE / "lib/math.c").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if re.search(r"\bgcd\([^;]*$", text))
    place = f"lib/math.c:{line + 1}"
    assert main(["explain", "--arch", arch, "--json", "--debug-info", str(debug.path), place]) == 0
    assert json.loads(capsys.readouterr().out)[0]["symbol"] == "gcd"


def inputs(arch: str) -> str:
    """Return a digest of everything that determines an image and its check: files, and versions of
    the tools.
    """
    own = Path(build_images.__file__).parent
    target = build_images.TARGETS[arch]
    others = {each.arch_directory for each in build_images.TARGETS.values()} - {target.arch_directory}
    sources = build_images.SOURCE.rglob("*")
    parts = (
        own.glob("*.py"),
        (path for path in sources if not any(path.is_relative_to(build_images.SOURCE / x) for x in others)),
        (build_images.PREBUILT / arch).rglob("*"),
    )
    tools = map(build_images.tool_version, (target.compiler, target.linker, build_images._TYPES_TOOL))
    digest = hashlib.sha256(repr((arch, *tools, build_images.read_manifest()[arch])).encode())
    for file in sorted(path for part in parts for path in part if path.is_file()):
        digest.update(f"{file.relative_to(own)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


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
