"""`kprobefs explain FILE:LINE`: source lines of a kernel, from debug information on this machine or on a
server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.debug_elf import MemorySection, build_id, build_id_note, debug_elf
from kprobefs.cli.main import main
from tests.image.dwarf_file import line_sections
from tests.image.linux import made

IDENTITY = bytes(range(20))
BODY = bytes.fromhex("53 4889fb 4889d8 31f6 5b") + made.RETURN_THUNK_CALL  # push %rbx; mov; mov; xor; pop
X86_64 = 62


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a new, empty cache, and no debuginfod server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DEBUGINFOD_URLS", "DEBUGINFOD_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)


def address(symbol: str) -> int:
    found = load_image().kallsyms.lookup_name(symbol)
    assert found is not None
    return found


def own_lines(path: Path, identity: bytes | None = None) -> Path:
    """Write debug information for kprobefs's own kernel to `path`, and return the path.

    The information has lines of several files, one of which is included by two units. `identity`: build id,
    or None.
    """
    read, write = address("vfs_read"), address("vfs_write")
    sections = line_sections(
        [
            ("fs/read_write.c", [("fs/read_write.c", 300, read), ("include/file.h", 20, read + 5)]),
            (
                "mm/all.c",
                [("mm/part.c", 7, write), ("mm/part.c", 9, write + 5), ("include/file.h", 20, write + 5)],
            ),
            ("net/main.c", [("net/main.c", 4, address("ksys_read"))]),
            ("init/main.c", [("init/main.c", 4, address("ksys_write")), ("init/main.c", 5, 0x1000)]),
        ]
    )
    image = load_image()
    start, end = image.text_ranges[0]
    text = MemorySection(".text", start, 6, image.read(start, end - start), end - start)
    path.write_bytes(debug_elf(X86_64, 64, [text], [], sections, identity or build_id(image)))
    return path


def linux_lines(identity: bytes = IDENTITY) -> bytes:
    """Return debug information, with the build id `identity`, for the kernel that linux() writes."""
    sections = line_sections([("fs/read_write.c", [("fs/read_write.c", 300, made.TEXT + 0x40)])])
    text = MemorySection(".text", made.TEXT, 6, b"", 0x1000)
    return debug_elf(X86_64, 64, [text], [], sections, identity)


def linux(folder: Path, *, has_id: bool = True) -> str:
    """Write a distribution's kernel with vfs_read at TEXT + 0x40, and return its path.

    `has_id`: with the build id IDENTITY.
    """
    kernel = made.Kernel()
    while (at := kernel.function("vfs_read", BODY)) < made.TEXT + 0x40:
        pass
    assert at == made.TEXT + 0x40
    if has_id:
        kernel.table("notes", build_id_note(IDENTITY))
    file = folder / "vmlinuz"
    file.write_bytes(made.vmlinuz(kernel.elf(), "xz"))
    return str(file)


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """Run `explain --json` and return its answers."""
    assert main(["explain", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Check that `explain` fails with a single line, and return the line."""
    assert main(["explain", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return shown


@pytest.mark.parametrize(
    ("line", "path", "places"),
    [
        ("fs/read_write.c:300", "fs/read_write.c:300", ["vfs_read"]),
        ("./fs/read_write.c:300", "fs/read_write.c:300", ["vfs_read"]),
        ("read_write.c:300", "fs/read_write.c:300", ["vfs_read"]),
        ("part.c:9", "mm/part.c:9", ["vfs_write+5"]),
        ("include/file.h:20", "include/file.h:20", ["vfs_read+5", "vfs_write+5"]),
        ("init/main.c:4", "init/main.c:4", ["ksys_write"]),
    ],
)
def test_a_line_is_explained_as_its_addresses_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, path: str, places: list[str]
) -> None:
    found = explained(capsys, "--debug-info", str(own_lines(tmp_path / "debug")), line)
    assert {each.pop("line") for each in found} == {path}
    assert {each["place"] for each in found} == {line}
    assert sorted(each["symbol"] for each in found) == sorted(each.partition("+")[0] for each in places)
    wanted = {each["address"]: each for each in explained(capsys, *places)}
    for each in found:
        same = wanted[each["address"]]
        assert {**each, "place": "", "line": None} == {**same, "place": ""}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("fs/read_write.c:299", "nearest lines with code: 300"),
        ("part.c:8", "nearest lines with code: 7, 9"),
        ("part.c:999999999", "nearest lines with code: 9"),
        ("main.c:4", "2 files have this name: init/main.c, net/main.c; give more of the path"),
        ("read_writ.c:1", "similar: read_write.c"),
        ("write.c:300", "similar: read_write.c"),
        ("init/main.c:5", "not in this kernel's text"),
        ("vfs_read:0", "only needed for places of the form FILE:LINE"),
    ],
)
def test_a_line_without_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    assert why in refused(capsys, "--debug-info", str(own_lines(tmp_path / "debug")), line)


def test_debug_information_of_another_build_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = own_lines(tmp_path / "other", IDENTITY)
    assert IDENTITY.hex() in refused(capsys, "--debug-info", str(other), "read_write.c:300")
    image = linux(tmp_path)
    (tmp_path / "debug").write_bytes(linux_lines(bytes(20)))
    options = "--image", image, "--debug-info", str(tmp_path / "debug"), "read_write.c:300"
    assert "another build" in refused(capsys, *options)
    # Without build ids, the code decides, and this file has none.
    (tmp_path / "debug").write_bytes(linux_lines(b""))
    assert "another build" in refused(capsys, *options)
    (tmp_path / "debug").write_bytes(linux_lines())
    assert [each["symbol"] for each in explained(capsys, *options)] == ["vfs_read"]


def test_missing_debug_information_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "build_images --debug" in refused(capsys, "read_write.c:300")
    assert IDENTITY.hex() in refused(capsys, "--image", linux(tmp_path), "read_write.c:300")
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no build id" in refused(capsys, "--image", linux(bare, has_id=False), "read_write.c:300")
    for name, content in (("text", b"int main"), ("elf", debug_elf(X86_64, 64, [], [], {}))):
        (tmp_path / name).write_bytes(content)
        assert name in refused(capsys, "--debug-info", str(tmp_path / name), "read_write.c:300")
    for name, content, remedy in (
        ("linux-image-dbg.deb", b"!<arch>\ndebian-binary", "dpkg-deb --extract"),
        ("kernel-debuginfo.rpm", b"\xed\xab\xee\xdb\x03\0", "rpm2cpio"),
        ("linux-debug.pkg.tar.zst", bytes.fromhex("28b52ffd"), "tar -xf"),
        ("vmlinuz", b"MZ", "give a vmlinux"),
    ):
        (tmp_path / name).write_bytes(content)
        shown = refused(capsys, "--debug-info", str(tmp_path / name), "read_write.c:300")
        assert name in shown
        assert remedy in shown
    for path in ("/nowhere", str(tmp_path), "/dev/zero"):
        assert path in refused(capsys, "--debug-info", path, "read_write.c:300")


def test_damaged_debug_information_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = own_lines(tmp_path / "debug")
    whole = file.read_bytes()
    # The debug sections and the headers follow the text.
    start = len(whole) - 4000
    rng = Random(5)
    for number in range(30):
        damaged = bytearray(whole)
        if number % 3:
            for _ in range(8):
                damaged[rng.randrange(start, len(whole))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        else:
            del damaged[rng.randrange(start, len(whole)) :]
        file.write_bytes(damaged)
        status = main(["explain", "--debug-info", str(file), "include/file.h:20"])
        shown = capsys.readouterr()
        assert (status, shown.err.count("\n")) in ((0, 0), (2, 1)), shown.err


# debuginfod


class Server(ThreadingHTTPServer):
    """A debuginfod server with the files of a folder; `requests` has the paths that clients asked for."""

    requests: list[str]


class _Handler(SimpleHTTPRequestHandler):
    def log_request(self, *_: object) -> None:
        assert isinstance(self.server, Server)
        self.server.requests.append(self.path)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server with the debug information of the kernel that linux() writes."""
    place = tmp_path / "served" / "buildid" / IDENTITY.hex()
    place.mkdir(parents=True)
    (place / "debuginfo").write_bytes(linux_lines())
    with Server(("127.0.0.1", 0), partial(_Handler, directory=str(tmp_path / "served"))) as found:
        found.requests = []
        monkeypatch.setenv("DEBUGINFOD_URLS", f"http://127.0.0.1:{found.server_port}/")
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        thread = Thread(target=partial(found.serve_forever, 0.01))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_debug_information_comes_from_a_server_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: Server
) -> None:
    options = "--image", linux(tmp_path), "read_write.c:300"
    first = explained(capsys, *options)
    assert first[0]["line"] == "fs/read_write.c:300"
    assert explained(capsys, *options) == first
    assert server.requests == [f"/buildid/{IDENTITY.hex()}/debuginfo"]
    kept = list((tmp_path / "cache" / "debuginfod_client").rglob("*"))
    assert [each.name for each in kept if each.is_file()] == ["debuginfo"]


def test_a_server_without_the_build_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "served" / "buildid" / IDENTITY.hex() / "debuginfo").unlink()
    one = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setenv("DEBUGINFOD_URLS", f"{one} http://127.0.0.1:1 file:///etc nonsense")
    shown = refused(capsys, "--image", linux(tmp_path), "read_write.c:300")
    assert all(
        each in shown for each in (f"{one}: 404", "http://127.0.0.1:1: ", "file:///etc: not", "nonsense: not")
    )
    assert not [each for each in (tmp_path / "cache" / "debuginfod_client").rglob("*") if each.is_file()]
