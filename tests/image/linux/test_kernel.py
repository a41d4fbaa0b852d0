"""Tables of a kernel: entries are relative to themselves, and tables are found by symbols or by sections."""

from __future__ import annotations

import io
import struct
from errno import ENODATA, ENOEXEC

import pytest

from emulated_kernel.image.address_set import EntryTable
from emulated_kernel.image.linux.cached_tables import CachedKernelTables, cached_parts
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, ReturnThunks
from emulated_kernel.image.linux.vmlinux import Vmlinux
from emulated_kernel.util.errors import KernelError
from tests.image.guest import BUGFLAG_WARNING
from tests.image.linux import made
from tests.image.linux.test_btf import sample

CALL_FENTRY = b"\xe8\0\0\0\0"
UD2 = b"\x0f\x0b"
TABLES = (
    "text", "ex_table", "mcount", "jump_labels", "static_calls", "bugs", "blacklist", "return_sites",
    "version", "returns",
)  # fmt: skip
FIRST_BYTES = (made.TEXT, 40)
BODY = bytes.fromhex("4889e5 90909090 31c0")


def read(built: made.Kernel, *, sections: bool = True) -> LinuxKernel:
    return LinuxKernel(Vmlinux(io.BytesIO(built.elf(sections=sections))))


def relative(at: int, *targets: int) -> bytes:
    """Return words that contain the distances of `targets` from the words themselves.

    `at`: address of the first word.
    """
    return b"".join(struct.pack("<i", target - at - 4 * index) for index, target in enumerate(targets))


def built() -> tuple[made.Kernel, dict[str, int]]:
    kernel = made.Kernel()
    first = kernel.function("vfs_read", CALL_FENTRY + BODY + UD2 + made.RETURN_THUNK_CALL)
    thunked = first + len(CALL_FENTRY + BODY + UD2)
    kernel.text.add(b"", 16)
    kernel.mark("__noinstr_text_start")
    second = kernel.function("quiet", BODY + made.RETURN_THUNK_CALL)
    kernel.text.add(b"", 16)
    kernel.mark("__noinstr_text_end")
    third = kernel.function("forbidden", CALL_FENTRY + BODY + b"\xc3")
    kernel.function("its_return_thunk", b"\xc3\xcc")
    name = kernel.area.string("fs/read.c")
    at = kernel.next_data()
    kernel.table("__ex_table", relative(at, first + 5, first + 8) + struct.pack("<i", 3))
    kernel.symbols[-2] = (at, "D", "__start___ex_table")
    kernel.table("mcount_loc", struct.pack("<3Q", first, third, 0))
    at = kernel.next_data()
    kernel.table("__jump_table", relative(at, first + 8, first + 12) + struct.pack("<q", 0x1000 - 8 + 2))
    key = at + 0x1000
    at = kernel.next_data()
    kernel.table("static_call_sites", relative(at, third) + struct.pack("<i", 0x2000 - 4 + 1))
    call_key = at + 0x2000
    at = kernel.next_data()
    kernel.table("__bug_table", relative(at, first + 14, name) + struct.pack("<HH", 42, 1))
    kernel.table("kprobe_blacklist", struct.pack("<Q", third))
    at = kernel.next_data()
    kernel.define("__return_sites", relative(at, thunked))
    kernel.mark("__return_sites_end", kernel.area.end, "D")
    return kernel, {
        "first": first,
        "second": second,
        "third": third,
        "key": key,
        "call_key": call_key,
        "thunked": thunked,
    }


def test_tables_say_what_was_written() -> None:
    source, at = built()
    kernel = read(source)
    first, third = at["first"], at["third"]
    assert kernel.release == "6.1.0-made"
    assert [tuple(entry) for entry in kernel.ex_table] == [(first + 5, first + 8)]
    assert kernel.mcount == {first, third}
    assert [tuple(label) for label in kernel.jump_labels] == [(first + 8, first + 12, at["key"])]
    assert [tuple(call) for call in kernel.static_calls] == [(third, at["call_key"])]
    bug = kernel.bug_entries[first + 14]
    assert (bug.file, bug.line, bug.flags & BUGFLAG_WARNING) == ("fs/read.c", 42, BUGFLAG_WARNING)
    assert [entry.name for entry in kernel.blacklist] == ["forbidden", "quiet"]
    # A name appears once, in the order of the list, not of hashes.
    others = ["vfs_read", "its_return_thunk"]
    kernel.forbid(["quiet", *others, "absent", *others])
    assert [entry.name for entry in kernel.blacklist] == ["forbidden", "quiet", *others]
    assert kernel.text_ranges == ((made.TEXT, source.text.end),)


@pytest.mark.parametrize("has_format", [False, True])
def test_entries_of_bugs_as_the_types_say(*, has_format: bool) -> None:
    """Entries of bugs have the layout of the kernel's types.

    Since Linux 6.19, a format precedes the file's name.
    """
    source = made.Kernel()
    btf = made.Btf()
    number = btf.add(1, "int", 4, struct.pack("<I", 32))
    names = ("bug_addr_disp", *(("format_disp",) if has_format else ()), "file_disp")
    btf.structure("bug_entry", 4 * len(names) + 4, *((name, number, 4 * at) for at, name in enumerate(names)))
    source.table("BTF", btf.data())
    where = [source.function(name, UD2) for name in ("first", "second")]
    text = source.area.string("%s is wrong")
    files = [source.area.string(name) for name in ("a.c", "b.c")]
    at = source.next_data()
    entries = b""
    for bug, file in zip(where, files, strict=True):
        fields = (bug, text, file) if has_format else (bug, file)
        entries += relative(at + len(entries), *fields) + struct.pack("<HH", 7, 0)
    source.table("__bug_table", entries)
    assert {bug: entry.file for bug, entry in read(source).bug_entries.items()} == dict(
        zip(where, ("a.c", "b.c"), strict=True)
    )


def test_without_section_headers_nothing_is_missing() -> None:
    source, at = built()
    kernel = read(source, sections=False)
    assert kernel.vmlinux.sections == {}
    assert kernel.mcount == {at["first"], at["third"]}


def test_data_is_all_but_text() -> None:
    source, _ = built()
    kernel = read(source)
    assert all(address % 8 == 0 and not made.TEXT <= address < kernel.text.end for address, _ in kernel.data)
    assert any(address <= source.area.address < address + len(data) for address, data in kernel.data)


def test_returns_as_boot_patches_them() -> None:
    source, at = built()
    kernel = read(source)
    assert kernel.returns == tuple(ReturnThunks)
    offset = at["thunked"] - made.TEXT
    assert kernel.text_as_booted(ReturnThunks.PLAIN)[offset : offset + 5].hex() == "c3cccccccc"
    assert kernel.text_as_booted(ReturnThunks.THUNKS)[offset : offset + 5] == made.RETURN_THUNK_CALL
    assert kernel.booted(ReturnThunks.PLAIN).read(at["thunked"], 5).hex() == "c3cccccccc"
    assert kernel.read(at["thunked"], 5) == made.RETURN_THUNK_CALL
    its = kernel.text_as_booted(ReturnThunks.ITS)[offset : offset + 5]
    assert (its == made.RETURN_THUNK_CALL) == (at["thunked"] & 0x20 == 0)


def test_what_it_was_built_without_is_empty_or_says_so() -> None:
    kernel = read(made.Kernel())
    assert not kernel.ex_table
    assert not kernel.bugs
    assert not kernel.returns
    for what in ("btf", "events", "syscalls"):
        with pytest.raises(KernelError, match="BTF") as caught:
            getattr(kernel, what)
        assert caught.value.errno == ENODATA


@pytest.mark.parametrize("lost", ["_stext", "_etext", "_end"])
def test_symbols_that_it_can_not_be_without(lost: str) -> None:
    source = made.Kernel()
    source.mark("_etext")
    source.mark("_end", made.END, "B")
    source.symbols = [symbol for symbol in source.symbols if symbol[2] != lost]
    with pytest.raises(KernelError, match=lost) as caught:
        LinuxKernel(Vmlinux(io.BytesIO(source.elf(ends=False))))
    assert caught.value.errno == ENOEXEC


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("__per_cpu_offset", "CONFIG_SMP"),
        ("page_offset_base", "CONFIG_RANDOMIZE_MEMORY"),
        ("syscalls_metadata", "CONFIG_FTRACE_SYSCALLS"),
        ("cpu_number", "CONFIG_SMP"),
    ],
)
def test_a_build_option_that_a_kernel_needs_is_named(name: str, option: str) -> None:
    kernel = read(built()[0])
    for required in (kernel.required, kernel.required_per_cpu):
        with pytest.raises(KernelError, match=f"its symbols lack {name}; a kernel needs {option}$") as caught:
            required(name)
        assert caught.value.errno == ENOEXEC


def test_types_that_were_removed_from_the_file_name_their_build_option() -> None:
    """If objcopy(1) removed the BTF section but left its symbols, the kernel counts as built without BTF, and
    the error names the build option.
    """
    source = made.Kernel()
    source.mark("__start_BTF")
    source.define("types", bytes(64))
    source.mark("__stop_BTF")
    kernel = read(source)
    assert not kernel.has_btf
    with pytest.raises(KernelError, match=r"without CONFIG_DEBUG_INFO_BTF") as caught:
        _ = kernel.btf
    assert caught.value.errno == ENODATA


def test_a_kernel_with_symbols_of_functions_alone_needs_those_of_variables() -> None:
    kernel = made.Kernel()
    kernel.symbols = [symbol for symbol in kernel.symbols if symbol[1] in "Tt"]
    for number in range(300):
        kernel.function(f"func_{number}", b"\xc3")
    kernel.mark("_etext")
    with pytest.raises(KernelError, match=r"its symbols lack _end; a kernel needs CONFIG_KALLSYMS_ALL$"):
        LinuxKernel(Vmlinux(io.BytesIO(kernel.elf(ends=False))))


def test_text_that_is_not_there() -> None:
    source = made.Kernel()
    source.mark("_etext", made.TEXT)
    source.mark("_end", made.END, "B")
    with pytest.raises(KernelError, match="isn't where"):
        LinuxKernel(Vmlinux(io.BytesIO(source.elf(ends=False))))


def test_reading_beyond_memory() -> None:
    kernel = read(made.Kernel())
    assert kernel.read(made.DATA + 0x800, 16) == bytes(16)
    for address, size in ((made.DATA + (1 << 20), 8), (0x1000, 1), (made.TEXT - 1, 2), (made.TEXT, -1)):
        with pytest.raises(KernelError):
            kernel.read(address, size)


def test_kept_parts_tell_the_same() -> None:
    made_kernel, _ = built()
    made_kernel.table("BTF", sample().data())
    kernel = read(made_kernel)
    parts = {name: memoryview(data) for name, data in cached_parts(kernel).items()}
    kept = CachedKernelTables(parts)
    for name in (*TABLES, "syscalls"):
        found, wanted = (getattr(each, name) for each in (kept, kernel))
        assert (tuple(found) if isinstance(found, EntryTable) else found) == wanted, name
    assert kept.jump_labels[0] == kernel.jump_labels[0]
    assert len(kept.jump_labels) == len(kernel.jump_labels)
    assert kept.kallsyms.kallsyms_text() == kernel.kallsyms.kallsyms_text()
    assert kept.kallsyms.by_name("vfs_read") == kernel.kallsyms.by_name("vfs_read") != ()
    assert [*kept.data] == [*kernel.data]
    assert kept.read(*FIRST_BYTES) == kernel.read(*FIRST_BYTES)
    assert kept.btf.offset("task_struct.high") == kernel.btf.offset("task_struct.high") == 28
    assert kept.btf.parameters("read_task") == kernel.btf.parameters("read_task") == 3


@pytest.mark.parametrize(
    "missing", ["about", "segment.0", "symbols.names", "symbols.starts", "btf.names", "jump_labels"]
)
def test_kept_parts_that_nobody_has_written(missing: str) -> None:
    made_kernel, _ = built()
    made_kernel.table("BTF", sample().data())
    parts = {name: memoryview(data) for name, data in cached_parts(read(made_kernel)).items()}
    whole = bytes(parts[missing])
    for strange in (None, b"", b"\xff" * 7, whole[:-4], whole[:-8]):
        others = dict(parts)
        del others[missing]
        if strange is not None:
            others[missing] = memoryview(strange)
        if missing in ("segment.0", "symbols.names") and strange is not None:
            continue
        # A table may be empty.
        if missing == "jump_labels" and not strange and strange is not None:
            continue
        with pytest.raises((KernelError, KeyError, TypeError, ValueError)):
            CachedKernelTables(others)
