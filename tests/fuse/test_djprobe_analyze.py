"""The command djprobe-analyze: the paper's checks on an ELF file with debug information."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from emulated_kernel.image import debug_files
from kprobefs.cli.main import main
from kprobefs.common.errors import ExitStatus
from tests.image.dwarf_file import TEXT, dwarf_file
from tests.image.linux import made

FUNCTIONS = [
    ("plain", bytes.fromhex("89e5 89e5 83ec10 c3")),
    ("jumps_back", bytes.fromhex("89e5 89e5 89e5 89e5 ebf8 c3")),
    ("relative", bytes.fromhex("89e5 eb02 89e5 90 c3")),
    ("calls", bytes.fromhex("90 e800000000 c3")),
    ("short", bytes.fromhex("89e5 c3")),
    ("bug_of_2007", bytes.fromhex("89e5 89e5 90 0f0b e9ffffffff e9 89e5 c3")),
]


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "vmlinux"
    path.write_bytes(dwarf_file(FUNCTIONS))
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["djprobe-analyze", *arguments]) == ExitStatus.OK
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        ("plain", "7"),
        (f"{TEXT:#x}", "7"),
        ("plain+2", "5"),
        ("plain+1", f"0 {TEXT + 1:#x}: not an instruction boundary"),
        ("jumps_back", f"0 {TEXT + 16:#x}: a jump here leads into the bytes to be replaced"),
        ("relative", f"0 {TEXT + 21:#x}: detoured region holds an instruction that needs its address"),
        ("calls", f"0 {TEXT + 28:#x}: detoured region holds a call or trap"),
        ("short", f"0 {TEXT + 37:#x}: no instruction of the function follows the detoured region"),
    ],
)
def test_length_or_the_reason(
    kernel: Path, place: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, str(kernel), place) == answer + "\n"


def test_decoding_starts_afresh_behind_a_bug(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The decoder skips the line number and file name that follow the ud2 of a BUG.

    Decoded as instructions, these bytes would look like a jump.
    """
    assert output(capsys, str(kernel), "bug_of_2007", "--bug-size", "8") == "5\n"


def test_json(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(output(capsys, "--json", str(kernel), "plain+2")) == {
        "address": f"{TEXT + 2:#x}",
        "function": "plain",
        "offset": 2,
        "length": 5,
        "reason": "",
    }


def test_debug_information_in_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, debug = tmp_path / "vmlinux", tmp_path / "vmlinux.debug"
    code.write_bytes(dwarf_file(FUNCTIONS, debug=False))
    debug.write_bytes(dwarf_file(FUNCTIONS, text=False))
    assert output(capsys, str(code), "plain", "--debug-info", str(debug)) == "7\n"


@pytest.mark.parametrize(
    ("place", "status", "words"),
    [
        ("nowhere", ExitStatus.FAILURE, "describes no function nowhere"),
        ("0x10", ExitStatus.FAILURE, "0x10 is in no function"),
        ("plain+two", ExitStatus.USAGE, "give an address"),
        ("0xzz", ExitStatus.USAGE, "give an address"),
    ],
)
def test_bad_places(
    kernel: Path, place: str, status: ExitStatus, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["djprobe-analyze", str(kernel), place]) == status
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"#!/bin/sh\n", "neither a vmlinuz, vmlinux"),
        (dwarf_file(FUNCTIONS)[:200], "ELF"),
        (dwarf_file(FUNCTIONS, debug=False), "no debug information"),
        (dwarf_file(FUNCTIONS, text=False), "no code at"),
        (dwarf_file(FUNCTIONS).replace(b"\x02\x00\x03\x00", b"\x02\x00\xf3\x00"), "not for x86"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vmlinux"
    path.write_bytes(content)
    assert main(["djprobe-analyze", str(path), "plain"]) == ExitStatus.FAILURE
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["djprobe-analyze", str(tmp_path / "none"), "plain"]) == ExitStatus.FAILURE
    assert "No such file" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that djprobe-analyze, which must fail, writes to standard error."""
    assert main(["djprobe-analyze", *arguments]) == ExitStatus.FAILURE
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_elf_or_image(kernel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--image", str(kernel), "plain") == "7\n"
    for both in (["plain"], [str(kernel), "plain", "--image", str(kernel)]):
        assert main(["djprobe-analyze", *both]) == ExitStatus.USAGE
        assert "give ELF or --image KERNEL" in capsys.readouterr().err


def test_the_running_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "emulated_kernel.image.linux.open_image.host_kernel", lambda: tmp_path / "vmlinuz-1.0"
    )
    (tmp_path / "vmlinuz-1.0").write_bytes(dwarf_file(FUNCTIONS))
    assert output(capsys, "--image", "host", "plain") == "7\n"


SOURCE = """
__attribute__((cold, noinline)) int rare(int n) { return n * 3; }
__attribute__((noinline)) int split(int n) {
    int sum;
    if (__builtin_expect(n < 0, 0))
        sum = rare(n);
    else {
        sum = n;
        __asm__ volatile("here: nop; nop; .type here, @function; .size here, 2");
    }
    return sum * 5 + 1;
}
int plain(int n) { __asm__ volatile("nop; nop; nop; nop; nop"); return n + RESULT; }
void _start(void) { for (;;) __asm__ volatile(""); }
"""
"""Source with a function that the compiler splits. The moved part jumps back to after two nops."""


def stripped(directory: Path, *flags: str, result: int = 1) -> Path:
    """Compile a kernel, and return the path of its stripped file `vmlinux`.

    The file `whole` in the same directory is not stripped. `flags`: additional options of gcc. `result`:
    number that replaces RESULT in SOURCE.
    """
    directory.mkdir(exist_ok=True)
    source, whole, code = directory / "t.c", directory / "whole", directory / "vmlinux"
    source.write_text(SOURCE.replace("RESULT", str(result)))
    options = ["-O2", "-g", "-ffreestanding", "-nostdlib", "-static", "-fno-pic", "-no-pie"]
    subprocess.run(["gcc", *options, *flags, "-o", whole, source], check=True)
    subprocess.run(["objcopy", "--strip-all", whole, code], check=True)
    return code


needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@needs_compiler
@pytest.mark.parametrize(
    "flags", [["-m64"], ["-m32"], ["-m64", "-gdwarf-4"]], ids=["x86_64", "i386", "DWARF 4"]
)
def test_what_the_compiler_moved_elsewhere_belongs_to_the_function(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = stripped(tmp_path, *flags)
    debug = ["--debug-info", str(tmp_path / "whole")]
    assert output(capsys, str(code), "plain", *debug) == "5\n"
    answer = json.loads(output(capsys, "--json", str(code), "here", *debug))
    assert answer["function"] == "split"
    assert answer["length"] == 0
    assert answer["reason"].endswith("a jump here leads into the bytes to be replaced")
    moved = int(answer["reason"].partition(":")[0], 0)
    found = json.loads(output(capsys, "--json", str(code), f"{moved:#x}", *debug))
    assert found["function"] == "split"
    assert found["address"] == f"{moved:#x}"
    assert not 0 <= found["offset"] < 64


@needs_compiler
def test_relocations_that_the_linker_kept_are_not_applied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Relocations that the linker kept in the file (`--emit-relocs`) are not applied again. A distribution's
    kernel has ten million.
    """

    def applied(*_: object) -> None:
        pytest.fail("applied again")

    monkeypatch.setattr("elftools.elf.relocation.RelocationHandler.apply_section_relocations", applied)
    code = stripped(tmp_path, "-Wl,--emit-relocs")
    assert output(capsys, str(code), "plain", "--debug-info", str(tmp_path / "whole")) == "5\n"


@needs_compiler
def test_a_name_is_found_by_its_symbol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a function has a symbol, it is found without a search of all debug information.

    The symbol may be that of a clone, such as `plain.isra.0`.
    """
    code, whole = stripped(tmp_path), tmp_path / "whole"
    debug = ["--debug-info", str(whole)]
    # If the file has no local symbols, functions may lack symbols, so the debug information is searched.
    assert "describes no function nowhere" in refused(capsys, str(code), "nowhere", *debug)
    names = ["--redefine-sym", "plain=plain.isra.0", "--localize-symbol", "plain.isra.0"]
    subprocess.run(["objcopy", *names, whole], check=True)
    monkeypatch.delattr("emulated_kernel.image.debuginfo.DebugInfo._all_functions")
    assert output(capsys, str(code), "plain", *debug) == "5\n"
    for name in ("nowhere", "plain.isra", "int"):
        assert f"describes no function {name}" in refused(capsys, str(code), name, *debug)


@needs_compiler
class TestWhereDebugInformationIs:
    """Debug information is found in the places where debuggers look, and used only if its build id is that of
    the file.
    """

    @pytest.fixture(autouse=True)
    def no_other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(debug_files, "DEBUG_ROOT", tmp_path / "debug")
        monkeypatch.setattr(debug_files, "MODULES_ROOT", tmp_path / "modules")

    @pytest.fixture
    def code(self, tmp_path: Path) -> Path:
        return stripped(tmp_path / "boot", "-Wl,--build-id")

    def identity(self, code: Path, capsys: pytest.CaptureFixture[str]) -> str:
        """Return the build id of the file `code`, which the error for missing debug information names."""
        line = refused(capsys, "--image", str(code), "plain")
        assert "give its file by --debug-info" in line
        return line.partition("build id ")[2].split()[0]

    @pytest.mark.parametrize(
        "place",
        [
            "boot/vmlinuz-1.0.debug",
            "boot/vmlinux-1.0",
            "debug/boot/vmlinux-1.0",
            "debug/lib/modules/1.0/vmlinux",
            "modules/1.0/build/vmlinux",
            "debug/.build-id/ID",
        ],
    )
    def test_of_a_packed_kernel(
        self, place: str, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        packed, whole = tmp_path / "boot" / "vmlinuz-1.0", tmp_path / "boot" / "whole"
        packed.write_bytes(made.vmlinuz(code.read_bytes()))
        identity = self.identity(packed, capsys)
        target = tmp_path / place.replace("ID", f"{identity[:2]}/{identity[2:]}.debug")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stripped(tmp_path / "other", "-Wl,--build-id", result=2).with_name("whole"), target)
        assert f"({target} is of another build)" in refused(capsys, "--image", str(packed), "plain")
        whole.rename(target)
        assert output(capsys, "--image", str(packed), "plain") == "5\n"

    @pytest.mark.parametrize("place", ["boot", "boot/.debug", "debug{}/boot"])
    def test_by_a_link(self, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code = stripped(tmp_path / "boot", "-Wl,--build-id=none")
        assert "neither a build id nor" in refused(capsys, str(code), "plain")
        target = tmp_path / place.format(tmp_path) / "whole"
        subprocess.run(["objcopy", f"--add-gnu-debuglink={code.with_name('whole')}", code], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        code.with_name("whole").rename(target)
        assert output(capsys, str(code), "plain") == "5\n"
        target.write_bytes(target.read_bytes() + b"!")
        assert "of another build" in refused(capsys, str(code), "plain")

    def test_one_that_is_given_is_of_the_same_build(
        self, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = stripped(tmp_path / "other", "-Wl,--build-id", result=2).with_name("whole")
        assert "build ids differ" in refused(capsys, str(code), "plain", "--debug-info", str(other))

    def test_what_is_no_elf_file_is_passed_over(self, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code.with_name("vmlinux.debug").write_bytes(b"\x7fELF")
        assert "of another build" in refused(capsys, str(code), "plain")
