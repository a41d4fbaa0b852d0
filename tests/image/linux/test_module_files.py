"""Modules are found in a package without unpacking everything again, and errors name damaged files."""

from __future__ import annotations

import lzma
import random
from collections.abc import Iterator
from errno import ENOENT, ENOEXEC
from pathlib import Path

import pytest

from emulated_kernel.image.linux import deb, module_files
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.image.linux.xz_blocks import xz_blocks
from emulated_kernel.util.errors import KernelError, UnusableFile
from tests.guests.linux.made_module import made_module
from tests.image.linux import made

BLOCK = 512 << 10
SIZE = 300_000
PIECE = 256 << 10
MODULES = [f"made-{number}" for number in range(24)]
DICE = random.Random(18)
CONTENTS = {name: made_module([]) + DICE.randbytes(1000) + bytes(SIZE) for name in MODULES}
CONTENTS["made-3"] = made_module([], needs=("made_20", "made-1"))
CONTENTS["made-20"] = made_module([], needs=("made-5",))
FILES = {f"./lib/modules/6.1.0-made/kernel/{name}.ko": data for name, data in CONTENTS.items()}
KINDS = {"blocks": made.deb(FILES, block=BLOCK)} | {
    str(by): made.deb(FILES, by) for by in ("xz", "gzip", "zstd", None)
}


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the size in bytes of each piece unpacked from a package."""
    sizes: list[int] = []
    unpack = deb.unpack

    def counted(packed: deb.Readable, limit: int) -> Iterator[bytes]:
        for piece in unpack(packed, limit):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(deb, "unpack", counted)
    return sizes


def package(tmp_path: Path, data: bytes) -> ModuleFiles:
    (tmp_path / "made.deb").write_bytes(data)
    return ModuleFiles(tmp_path / "made.deb", "6.1.0-made")


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_found_in_any_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_files, "_CACHE_BYTES", 2 * SIZE + 10_000)
    files = package(tmp_path, KINDS[kind])
    for name in random.Random(kind).choices(MODULES, k=40):
        assert files.read(name)[-1] == (name.replace("-", "_"), CONTENTS[name])
    with pytest.raises(KernelError, match="no module nothing comes with") as refused:
        files.read("nothing")
    assert refused.value.errno == ENOENT
    assert {name for name, _ in files.read("made-3")} == {"made_5", "made_1", "made_20", "made_3"}


@pytest.mark.parametrize("first", ["a", "c"])
def test_dependencies_are_loaded_before_the_modules_that_need_them(tmp_path: Path, first: str) -> None:
    """A module and its dependency may both be dependencies of a third module, as lockd and sunrpc of nfs."""
    needs = {
        "top": ("a", "b", "c") if first == "a" else ("c", "b", "a"),
        "b": ("a", "c"),
        "c": ("a",),
        "a": (),
    }
    files = {
        f"./lib/modules/6.1.0-made/kernel/{name}.ko": made_module([], needs=needs[name]) for name in needs
    }
    read = [name for name, _ in package(tmp_path, made.deb(files)).read("top")]
    assert read == ["a", "c", "b", "top"]


def test_modules_that_need_each_other(tmp_path: Path) -> None:
    needs = {"a": ("b",), "b": ("a",)}
    files = {
        f"./lib/modules/6.1.0-made/kernel/{name}.ko": made_module([], needs=needs[name]) for name in needs
    }
    with pytest.raises(UnusableFile, match="modules that need each other"):
        package(tmp_path, made.deb(files)).read("a")


def test_a_wrong_name_names_similar_modules(tmp_path: Path) -> None:
    """The error for a wrong name lists similar modules.

    Without similar modules, the error advises to give packages.
    """
    directory = tmp_path / "given" / "kernel"
    directory.mkdir(parents=True)
    (directory / "nf_tables.ko").write_bytes(made_module([]))
    package(tmp_path, next(iter(KINDS.values())))
    files = ModuleFiles(tmp_path / "made.deb", "6.1.0-made", (directory,))
    for wrong, right in (("nf_tabels", "nf_tables"), ("mde_3", "made_3")):
        with pytest.raises(KernelError, match=rf"no module {wrong} comes with .*; similar names: .*{right}"):
            files.read(wrong)
    with pytest.raises(KernelError, match="or give --modules"):
        files.read("zzz")
    with pytest.raises(KernelError, match=r"another flavour may have this one$"):
        ModuleFiles(tmp_path / "made.deb", "6.1.0-made").read("zzz")


@pytest.mark.parametrize(
    ("name", "data", "advice"),
    [
        (
            "kernel.deb",
            made.deb({"./boot/vmlinuz": b"none"}),
            "put linux-modules-6.1 or linux-modules-extra-",
        ),
        (
            "kernel.rpm",
            made.rpm({"./boot/vmlinuz": b"none"}),
            "put kernel-modules-6.1 or ",
        ),
        ("kernel.deb", made.deb({"./lib/own.ko": made_module([])}), "its package has other modules"),
    ],
)
def test_the_advice_names_packages_that_the_distribution_has(
    name: str, data: bytes, advice: str, tmp_path: Path
) -> None:
    """The advice names only packages that the distribution has.

    Debian's kernels before 7.2 have all modules in the kernel's own package, so no package is advised.
    """
    (tmp_path / name).write_bytes(data)
    with pytest.raises(KernelError) as refused:
        ModuleFiles(tmp_path / name, "6.1").read("zzz")
    assert f"no module zzz comes with this kernel; {advice}" in str(refused.value)


def test_packages_and_directories_with_more_modules(tmp_path: Path) -> None:
    """Modules of given packages and directories come first, then packages for the release in the directory of
    the kernel's file.
    """
    directory = tmp_path / "given" / "kernel"
    directory.mkdir(parents=True)
    (directory / "other.ko.zst").write_bytes(made.packed(made_module([]), "zstd"))
    extra = made_module([], needs=("made_2", "other"))
    beside = {
        "linux-modules-6.1.0-made_1_amd64.deb": made.deb({"./lib/made-2.ko": CONTENTS["made-2"]}, "zstd"),
        "linux-modules-extra-6.1.0-made_1_amd64.deb": made.deb({"./lib/extra.ko": extra}),
        "linux-modules-6.1.0-none_1_amd64.deb": made.deb({"./lib/none.ko": extra}),
    }
    for name, data in beside.items():
        (tmp_path / name).write_bytes(data)
    image = tmp_path / "vmlinuz.deb"
    image.write_bytes(made.deb({"./boot/vmlinuz": b"none"}))
    rpm = tmp_path / "given.rpm"
    rpm.write_bytes(made.rpm({"./lib/modules/x/made-9.ko": CONTENTS["made-9"]}))
    arch = tmp_path / "given.pkg.tar.zst"
    arch.write_bytes(made.packed(made.tar({"usr/lib/made-8.ko": CONTENTS["made-8"]}), "zstd"))
    files = ModuleFiles(image, "6.1.0-made", (tmp_path / "given", rpm, arch))
    assert {name for name, _ in files.read("extra")} == {"extra", "made_2", "other"}
    for name in ("made-9", "made-8"):
        assert files.read(name)[-1][1] == CONTENTS[name]
    with pytest.raises(KernelError, match=r"no module none .* linux-modules-extra-6[.]1[.]0-made next to it"):
        files.read("none")
    with pytest.raises(KernelError, match="no module other comes with"):
        ModuleFiles(image, "6.1.0-made").read("extra")


def test_what_was_passed_is_not_unpacked_again(tmp_path: Path, unpacked: list[int]) -> None:
    files = package(tmp_path, KINDS["blocks"])
    files.read("made_12")
    assert SIZE < sum(unpacked) < 14 * SIZE + PIECE
    unpacked.clear()
    files.read("made_12")
    assert not unpacked
    files.read("made_2")
    assert SIZE < sum(unpacked) <= SIZE + BLOCK + PIECE
    unpacked.clear()
    for _ in range(2):
        with pytest.raises(KernelError):
            files.read("nothing")
    # The package is unpacked once more, from the first module that was read to the end.
    assert SIZE < sum(unpacked) < 12 * SIZE + BLOCK


def test_another_file_of_that_name(tmp_path: Path) -> None:
    files = package(tmp_path, KINDS["blocks"])
    assert files.read("made_2")[0][1] == CONTENTS["made-2"]
    other = made_module(["printk"])
    package(tmp_path, made.deb({"./lib/made_2.ko.xz": lzma.compress(other)}, "gzip"))
    assert files.read("made_2") == [("made_2", other)]
    with pytest.raises(KernelError):
        files.read("made_4")


DAMAGED = {
    "nothing known is compressed like this (it begins with nothing)": b"",
    "damaged xz data: it ends too early": lzma.compress(made_module([]))[:-20],
    "truncated: section header ends at 0xd0, the file at 0x64": made_module([])[:100],
    "it has no .modinfo": made_module([]).replace(b".modinfo", b".madinfo"),
}


@pytest.mark.parametrize("why", DAMAGED)
def test_a_damaged_module_is_named(why: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.ko"
    path.write_bytes(DAMAGED[why])
    for files, name in (
        (ModuleFiles(tmp_path / "none", "6.1.0-made"), str(path)),
        (package(tmp_path, made.deb({"./lib/odd.ko": DAMAGED[why]})), "odd"),
    ):
        with pytest.raises(KernelError) as refused:
            files.read(name)
        assert refused.value.errno == ENOEXEC
        assert refused.value.strerror == f"not a usable module (odd): {why}"


def test_damaged_packages_end_in_one_error(tmp_path: Path) -> None:
    """From a damaged package, each module is read whole, or reading raises a KernelError."""
    whole, refused, absent = KINDS["blocks"], 0, set[int | None]()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(DICE.choice([1, 3, 30])):
            damaged[DICE.randrange(DICE.choice([len(whole), 400]) * -1, 0)] ^= 1 << DICE.randrange(8)
        files = package(tmp_path, bytes(damaged))
        for name in ("made_15", "made_3", "nothing"):
            try:
                assert files.read(name)[-1][0] == name
            except UnusableFile:
                refused += 1
            except KernelError as error:
                # The path of a file is damaged.
                absent.add(error.errno)
    assert refused > 20
    assert absent <= {ENOENT}


def test_an_index_that_does_not_fit(tmp_path: Path) -> None:
    """An xz file whose index does not fit its data has no known blocks, and is read from its beginning."""
    streams = [lzma.compress(bytes(1000))] * 2
    for data, known in (
        (made.xz_blocks(bytes(5 * BLOCK - 1), BLOCK), 5),
        (streams[0], 1),
        (b"".join(streams), 0),
        (streams[0] + bytes(4), 0),
        (streams[0][:20], 0),
        (b"", 0),
    ):
        path = tmp_path / "data.xz"
        path.write_bytes(b"..." + data)
        with open(path, "rb") as file:
            found = xz_blocks(file, 3, 3 + len(data))
        assert len(found[0] if found else ()) == known
