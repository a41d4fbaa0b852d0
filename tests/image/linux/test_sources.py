"""A kernel is found in all kinds of files that distributions ship, and a bad file raises a KernelError."""

from __future__ import annotations

import gzip
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from errno import EISDIR, ENOENT, ENOEXEC
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulated_kernel.image.linux import open_image
from emulated_kernel.image.linux.linux_kernel import open_kernel
from emulated_kernel.util.errors import KernelError
from tests.image.linux import made
from tests.sample import fewer

RETURN = b"\x31\xc0\xc3"


def kernel() -> made.Kernel:
    built = made.Kernel()
    for number in range(300):
        built.function(f"func_{number}", RETURN)
    return built


VMLINUX = kernel().elf()
VMLINUZ = made.vmlinuz(VMLINUX)
WITH_MODULES = {"./boot/vmlinuz-6.1.0-made": VMLINUZ, "./lib/modules/6.1.0/kernel/odd.ko": bytes(100_000)}


def opened(data: bytes, tmp_path: Path) -> int:
    """Open the kernel in a file with the bytes `data`, and return the number of its symbols."""
    file = tmp_path / "image"
    file.write_bytes(data)
    return len(open_kernel(str(file)).kallsyms.symbols)


def refusal(data: bytes, tmp_path: Path) -> str:
    with pytest.raises(KernelError) as caught:
        opened(data, tmp_path)
    assert caught.value.errno == ENOEXEC
    assert "\n" not in str(caught.value.strerror)
    return str(caught.value.strerror)


SYMBOLS = 300 + 6


@pytest.mark.parametrize("by", made.PACKERS)
def test_vmlinuz_packed_by_each_of_the_kernel_s_packers(by: str, tmp_path: Path) -> None:
    assert opened(made.vmlinuz(VMLINUX, by), tmp_path) == SYMBOLS


def test_more_than_one_block_of_lz4(tmp_path: Path) -> None:
    large = kernel()
    large.define("large", os.urandom(1000) * 18_000)
    assert opened(made.vmlinuz(large.elf(), "lz4"), tmp_path) == SYMBOLS + 1


def test_vmlinux_itself_and_without_section_headers(tmp_path: Path) -> None:
    assert opened(VMLINUX, tmp_path) == SYMBOLS
    assert opened(kernel().elf(sections=False), tmp_path) == SYMBOLS


@pytest.mark.parametrize("by", ["gzip", "bzip2", "xz", "lzma", "zstd", None])
def test_debian_package(by: str | None, tmp_path: Path) -> None:
    files = {"./lib/modules/6.1.0/kernel/odd.ko": bytes(100_000), "./boot/vmlinuz-6.1.0-made": VMLINUZ}
    assert opened(made.deb(files, by), tmp_path) == SYMBOLS


@pytest.mark.parametrize("by", ["gzip", "xz", "zstd"])
@pytest.mark.parametrize("begin", ["./", "/", ""])
def test_rpm_package(by: str, begin: str, tmp_path: Path) -> None:
    """An RPM package like Fedora's kernel-core has the kernel in the directory of its modules."""
    files = {"./usr/share/odd": b"odd" * 7, f"{begin}lib/modules/6.1.0-made.x86_64/vmlinuz": VMLINUZ}
    assert opened(made.rpm(files, by), tmp_path) == SYMBOLS


@pytest.mark.skipif(shutil.which("rpmbuild") is None, reason="no rpmbuild")
@pytest.mark.parametrize("payload", ["w3.zstdio", "w2.xzdio", "w2.gzdio"])
def test_rpm_package_of_rpmbuild(payload: str, tmp_path: Path) -> None:
    (tmp_path / "vmlinuz").write_bytes(VMLINUZ)
    spec = tmp_path / "made.spec"
    spec.write_text(
        "Name: made\nVersion: 6.1\nRelease: 1\nSummary: made\nLicense: none\nBuildArch: noarch\n"
        f"%define _binary_payload {payload}\n%description\nmade\n%install\n"
        f"install -D {tmp_path}/vmlinuz %{{buildroot}}/lib/modules/6.1.0-made/vmlinuz\n%files\n/lib/modules\n"
    )
    options = ("--define", f"_topdir {tmp_path}/top", "--dbpath", str(tmp_path / "db"))
    subprocess.run(("rpmbuild", *options, "-bb", str(spec)), capture_output=True, timeout=60, check=True)
    (found,) = tmp_path.glob("top/RPMS/noarch/*.rpm")
    assert opened(found.read_bytes(), tmp_path) == SYMBOLS


@pytest.mark.parametrize("by", ["gzip", "xz", "zstd"])
def test_package_of_arch(by: str, tmp_path: Path) -> None:
    files = {".PKGINFO": b"pkgname = linux", "usr/lib/modules/6.1.0-made/vmlinuz": VMLINUZ}
    assert opened(made.packed(made.tar(files), by), tmp_path) == SYMBOLS


def test_package_with_a_vmlinux(tmp_path: Path) -> None:
    assert opened(made.deb({"boot/vmlinux-6.1": VMLINUX}), tmp_path) == SYMBOLS


def test_host_is_the_running_kernel_s_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "vmlinuz"
    file.write_bytes(VMLINUZ)
    monkeypatch.setattr(open_image, "host_kernel", lambda: file)
    assert len(open_kernel("host").kallsyms.symbols) == SYMBOLS


def test_host_without_its_file_says_where_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    release = os.uname_result(("Linux", "here", "0.0-of-a-test", "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: release)
    with pytest.raises(KernelError, match=r"/boot/vmlinuz-0[.]0-of-a-test") as caught:
        open_kernel("host")
    assert caught.value.errno == ENOENT


DEPENDS = "kmod, linux-binary-7.2-x (= 7.2), linux-base (>= 4) | other, linux-modules-7.2-x (= 7.2)"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "an empty file"),
        (b"#!/bin/sh\n", "neither a vmlinuz"),
        (b"MZ" + bytes(0x36) + b"ARMd" + bytes(600), "pages have an unknown size"),
        (b"MZ" + bytes(1000), "an EFI program"),
        (made.elf([(made.TEXT, RETURN)], machine=258), "for loongarch64; use a kernel for x86_64, arm64 or"),
        (made.elf([(made.TEXT, RETURN)], machine=999), "another machine .number 999."),
        (
            made.deb({"./boot/vmlinuz-7": b"MZ" + bytes(0x2E) + b"RISCV" + bytes(600)}),
            "for another RISC-V; use one",
        ),
        (made.deb({"./a": b"b"}, depends=DEPENDS), r"on linux-binary-7[.]2-x and linux-modules-7[.]2-x$"),
        (made.rpm({"./usr/share/doc/copyright": b"words"}), "without a kernel"),
        (made.rpm({"./lib/modules/6/vmlinuz": VMLINUZ})[:-200], "truncated|ends too early"),
        (made.rpm({})[:100], "truncated package"),
        (b"\xed\xab\xee\xdb" + bytes(200), "damaged package"),
        (gzip.compress(b"no archive"), "damaged tar archive|truncated"),
        (made.elf([(made.TEXT, RETURN)], kind=1), "isn't linked"),
        (made.elf([(made.TEXT, RETURN)], kind=4), "a dump"),
        (made.elf([]), "no segment"),
        (made.elf([(made.TEXT, RETURN)]), "no symbols"),
        (made.elf([(made.TEXT, RETURN * 9), (made.TEXT + 8, RETURN)]), "overlap"),
        (b"\x7fELF", "truncated"),
        (made.vmlinuz(VMLINUX, protocol=0x207), "boot protocol 2.07"),
        (made.around(b"\x89LZO" + bytes(20)), "it holds|LZO|comes? out"),
        (made.around(b"scrambled bytes" + struct.pack("<I", 1000)), "nothing known is compressed"),
        (made.around(b"tiny"), "empty"),
        (made.vmlinuz(b"no ELF file at all" * 9), "not an ELF file"),
        (VMLINUZ[:0x240], "setup header"),
        (VMLINUZ[:-300], "truncated"),
        (made.deb({"./usr/share/doc/copyright": b"words"}), "without a kernel"),
        (made.deb({"./usr/lib/modules/7.2.1/kernel/fs/f.ko.xz": b"words"}), "give the kernel 7.2.1 itself"),
        (made.deb({"./boot/vmlinuz-6.1": b"garbled"}), "neither a vmlinuz"),
        (b"!<arch>\n" + b"x" * 70, "damaged ar"),
        (b"!<arch>\n", "without data.tar"),
        (made.deb(WITH_MODULES, None)[:-1000], "truncated package: 1000 bytes are missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_kernel(data: bytes, says: str, tmp_path: Path) -> None:
    assert re.search(says, refusal(data, tmp_path))


def test_a_payload_of_another_size_than_it_says(tmp_path: Path) -> None:
    payload = made.packed(VMLINUX, "xz")
    assert "where it says" in refusal(made.around(payload + struct.pack("<I", len(VMLINUX) + 1)), tmp_path)
    assert "more than" in refusal(made.around(payload + struct.pack("<I", 1000)), tmp_path)
    assert "says that" in refusal(made.around(payload + struct.pack("<I", 0xFFFFFFFF)), tmp_path)


@pytest.mark.parametrize("by", made.PACKERS)
def test_bombs_are_stopped_at_what_they_declare(by: str, tmp_path: Path) -> None:
    payload = made.packed(bytes(64 << 20), by) + struct.pack("<I", 1 << 20)
    if by == "gzip":
        payload = payload[:-8] + struct.pack("<I", 1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "more than 1 MiB" in refusal(made.around(payload), tmp_path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 48 << 10, f"{grown} KiB of memory for 1 MiB"


def test_a_package_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from emulated_kernel.image.linux import deb

    monkeypatch.setattr(deb, "_UNPACKED_LIMIT", 4 << 20)
    files = {f"./lib/{number}": bytes(1 << 20) for number in range(8)}
    assert "more than 4 MiB" in refusal(made.deb(files), tmp_path)


@pytest.mark.parametrize("package", ["zstandard", "lz4.block"])
def test_a_missing_unpacker_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made.vmlinuz(VMLINUX, "zstd" if package == "zstandard" else "lz4")
    monkeypatch.setitem(sys.modules, package, None)
    assert f"Python package {package}" in refusal(data, tmp_path)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for odd in (str(fifo), "/dev/zero", "/dev/null"):
        with pytest.raises(KernelError, match="not a regular file"):
            open_kernel(odd)
    with pytest.raises(OSError, match=r"directory|regular") as caught:
        open_kernel(str(tmp_path))
    assert caught.value.errno in (EISDIR, ENOEXEC)
    with pytest.raises(FileNotFoundError):
        open_kernel(str(tmp_path / "nothing"))


@pytest.mark.parametrize("start", [VMLINUX[:64], VMLINUZ[:2600], b"!<arch>\n", b"MZ", b""])
def test_sparse_giants_are_refused_at_once(start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "giant"
    file.write_bytes(start)
    os.truncate(file, 1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    with pytest.raises(KernelError):
        open_kernel(str(file))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert time.process_time() - started < 10


@settings(max_examples=fewer(60, 3))
@given(st.data())
def test_truncated_anywhere(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from((VMLINUX, VMLINUZ, DEB)))
    cut = data.draw(st.integers(0, len(whole) - 1))
    check_bytes(whole[:cut])


@settings(max_examples=fewer(150, 3))
@given(st.data())
def test_damaged_anywhere(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from((VMLINUX, VMLINUZ, DEB))))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, min(len(whole) - 9, 4096)))
        whole[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    check_bytes(bytes(whole))


DEB = made.deb({"./boot/vmlinuz-6.1.0-made": VMLINUZ}, "gzip")


def check_bytes(data: bytes) -> None:
    """Assert that a file with these bytes is a kernel with symbols, or is refused with ENOEXEC."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            assert open_kernel(file.name).kallsyms.symbols
        except KernelError as error:
            if error.errno != ENOEXEC:
                raise
