"""Build of the kernel images from src/: compile, link with the image's symbol table, write a manifest.

`python -m emulated_kernel.image.build_images` writes prebuilt/. `--check` compares prebuilt/ with a fresh
build byte for byte, `--output` writes one image to another file, and `--module` builds a user's module.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from emulated_kernel.image import call_graph, prototypes, types_file
from emulated_kernel.image.builtin_image import PREBUILT, KernelImage, load_image
from emulated_kernel.image.elf import SHN_UNDEF, STB_WEAK, ElfFile
from emulated_kernel.image.kallsyms import Kallsyms, elf_symbols
from emulated_kernel.util.fast_dataclass import dataclass, field, replace

MODULES = "modules"
_EXPORT = "__ksymtab_"


def dependencies(modules: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Return name of a module -> names of the modules whose exported symbols the module uses.

    `modules`: name -> contents of the module file.
    Mirrors: depmod's modules.dep.
    """
    symbols = {name: ElfFile(data).symbols for name, data in modules.items()}
    owner = {
        symbol.name.removeprefix(_EXPORT): name
        for name, table in symbols.items()
        for symbol in table
        if symbol.name.startswith(_EXPORT)
    }
    return {
        name: sorted(
            {
                owner[symbol.name]
                for symbol in table
                if symbol.section == SHN_UNDEF and symbol.binding != STB_WEAK and symbol.name in owner
            }
        )
        for name, table in symbols.items()
    }


SOURCE = Path(__file__).parent / "src"
MANIFEST = PREBUILT / "manifest.json"
EXIT_OTHER_COMPILER = 77
_SCRIPT = "vmlinux.lds"
_SYMBOLS = "kallsyms.o"
_TYPES_TOOL = "pahole"
_DEBUG_FLAGS = "-gdwarf-4"
_ELFCLASS64 = b"\2"
_NOTES = ".prototypes"
"""Suffix of the files into which gcc writes the prototypes of a source file's functions (-aux-info)."""

COMMON_FLAGS = (
    "-std=gnu11 -O2 -ffreestanding -fno-builtin-printf -fno-strict-aliasing -fno-common "
    "-fno-delete-null-pointer-checks -fno-strict-overflow -fno-stack-protector "
    "-fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns -fno-ident "
    "-Wall -Wextra -Wno-pointer-sign -Wno-sign-compare"
)


@dataclass(frozen=True)
class BuildTarget:
    """Compiler, linker and flags for the image of one architecture."""

    compiler: str
    linker: str
    arch_directory: str
    linker_script: str
    """Path of the linker script, which the compiler preprocesses."""
    bits: int
    """Word size in bits. Source files whose names end in _32 or _64 are compiled only for this word size."""
    flags: str
    linker_flags: str
    has_modules: bool = True
    has_types: bool = False
    """Whether a file with BTF is built next to the image, provided that pahole is installed."""


def _riscv(isa: str, flags: str) -> BuildTarget:
    """Return a target for the RISC-V instruction set `isa`.

    The compiler options `flags` must reserve 8 bytes of nops at the entry of each function.
    """
    return BuildTarget(
        compiler="riscv64-linux-gnu-gcc",
        linker="riscv64-linux-gnu-ld",
        arch_directory="arch/riscv",
        linker_script="arch/riscv/kernel/vmlinux.lds",
        bits=64,
        flags=(
            f"-march={isa}_zicsr_zifencei -mabi=lp64 -mcmodel=medany -mno-relax -msmall-data-limit=0 "
            f"-fno-pic -fno-pie {flags} -DCC_USING_PATCHABLE_FUNCTION_ENTRY "
            '-DKERNEL_MACHINE="riscv64"'
        ),
        linker_flags="-m elf64lriscv --no-relax -z max-page-size=0x1000 -z noexecstack --build-id=none",
    )


TARGETS = {
    "x86_64": BuildTarget(
        compiler="gcc",
        linker="ld",
        arch_directory="arch/x86",
        linker_script="arch/x86/kernel/vmlinux.lds",
        bits=64,
        flags=(
            "-m64 -march=x86-64 -mtune=generic -mcmodel=kernel -mno-red-zone -mno-sse -mno-mmx -mno-80387 "
            "-mpreferred-stack-boundary=3 -fno-pic -fno-pie -fcf-protection=none "
            '-pg -mfentry -mrecord-mcount -mnop-mcount -DKERNEL_MACHINE="x86_64"'
        ),
        linker_flags="-m elf_x86_64 -z max-page-size=0x1000 -z noexecstack --build-id=none",
        has_types=True,
    ),
    "i386": BuildTarget(
        compiler="gcc",
        linker="ld",
        arch_directory="arch/x86",
        linker_script="arch/x86/kernel/vmlinux.lds",
        bits=32,
        flags=(
            "-m32 -march=i686 -mtune=generic -mregparm=3 -mno-sse -mno-mmx -mno-80387 "
            "-mpreferred-stack-boundary=2 -fno-pic -fno-pie -fcf-protection=none "
            '-pg -mfentry -mrecord-mcount -mnop-mcount -DCONFIG_X86_32 -DKERNEL_MACHINE="i686"'
        ),
        linker_flags="-m elf_i386 -z max-page-size=0x1000 -z noexecstack --build-id=none",
    ),
    "riscv64": _riscv("rv64imac", "-fpatchable-function-entry=4 -DCONFIG_RISCV_ISA_C"),
    "riscv64i": _riscv("rv64ima", "-fpatchable-function-entry=2"),
}


# A kernel with retpolines in place of indirect jumps and calls, like distributions' kernels. Tests load it by
# its path.
TARGETS["x86_64-retpoline"] = replace(
    TARGETS["x86_64"],
    flags=f"{TARGETS['x86_64'].flags} -mindirect-branch=thunk-extern -mindirect-branch-register "
    "-fno-jump-tables -DCONFIG_RETPOLINE",
    has_modules=False,
    has_types=False,
)

# A kernel with landing pads at the entries of C functions and without jump tables, like one with the option
# CONFIG_X86_KERNEL_IBT. Tests load it by its path.
TARGETS["x86_64-ibt"] = replace(
    TARGETS["x86_64"],
    flags=TARGETS["x86_64"].flags.replace("-fcf-protection=none", "-fcf-protection=branch -fno-jump-tables"),
    has_modules=False,
)


@dataclass(frozen=True)
class Built:
    """Result of a build: an image, its manifest entry, and its modules."""

    data: bytes
    manifest: dict[str, Any]
    modules: dict[str, bytes] = field(default_factory=dict)
    """Module name -> contents of the module file."""
    arguments: str = ""
    """Contents of the file prototypes.FILE_NAME: the argument counts of the image's functions."""
    types: bytes = b""
    """Contents of the file types_file.FILE_NAME: BTF of the image; empty if the target has none."""
    described: bytes = b""
    """The image with debugging information; empty if build() was called without `has_lines`."""


class BuildError(Exception):
    """Error of a build: the compiler or the linker failed, or the symbol table didn't become stable."""


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0 for success, 1 for a difference or an error, and 77 if `--check` finds another compiler.
    """
    parser = argparse.ArgumentParser(prog="python -m emulated_kernel.image.build_images", description=__doc__)
    parser.add_argument("--check", action="store_true", help="rebuild and compare with prebuilt/")
    parser.add_argument("--arch", choices=sorted(TARGETS), action="append", help="default: all")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the image of one --arch to FILE")
    parser.add_argument(
        "--debug", action="store_true", help="write line numbers (DWARF) into the image of --output, too"
    )
    parser.add_argument(
        "--module",
        type=Path,
        metavar="DIR",
        action="append",
        help="build DIR/*.c as the module DIR/NAME.ko, for one --arch; may be repeated",
    )
    options = parser.parse_args(argv)
    if (options.output or options.module) and len(options.arch or ()) != 1:
        parser.error("--output and --module take one --arch")
    if options.debug and not options.output:
        parser.error("--debug: only for --output; the images in prebuilt/ have no line numbers")
    try:
        if not SOURCE.is_dir():
            raise BuildError("needs a checkout of kprobefs: the sources of its kernel aren't installed")
        if options.module:
            return max(write_module(options.arch[0], each.resolve()) for each in options.module)
        if options.output:
            return write_image(options.arch[0], options.output, has_lines=options.debug)
        outcomes = {check(a) if options.check else write(a) for a in options.arch or sorted(TARGETS)}
    except (BuildError, OSError) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 1 if 1 in outcomes else max(outcomes)


def write(arch: str) -> int:
    """Build an image, write it and its manifest entry into prebuilt/, and return exit status 0."""
    built = build(arch)
    if TARGETS[arch].has_types and not built.types:
        raise BuildError(f"{arch}: its types are part of prebuilt/; install {_TYPES_TOOL} (package dwarves)")
    _write_files(built, PREBUILT / arch / "vmlinux")
    _write_modules(PREBUILT / arch / MODULES, built.modules)
    manifest = read_manifest()
    if arch in call_graph.ARCHITECTURES:
        image = load_image(arch=arch)
        image.path.with_name(call_graph.FILE_NAME).write_text(call_graph.file_text(image))
    manifest[arch] = built.manifest
    MANIFEST.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    print(f"{arch}: {len(built.data)} bytes, {built.manifest['functions']} functions")
    return 0


def write_image(arch: str, output: Path, *, has_lines: bool = False) -> int:
    """Build an image into a file that `--image` accepts, and return exit status 0.

    `has_lines`: put debugging information into the file, too. The code is the same with and without it. The
    argument counts of the image's functions are written to another file in the directory of `output`. If
    pahole is installed, the kernel's types (BTF) are written to a third file in this directory.
    """
    built = build(arch, has_lines=has_lines)
    size = _write_files(built, output)
    print(f"{output}: {size} bytes")
    return 0


def _write_files(built: Built, output: Path) -> int:
    """Write an image and the files next to it, and return the size of the image in bytes."""
    output.parent.mkdir(parents=True, exist_ok=True)
    size = output.write_bytes(built.described or built.data)
    output.with_name(prototypes.FILE_NAME).write_text(built.arguments)
    if built.types:
        output.with_name(types_file.FILE_NAME).write_bytes(built.types)
    return size


def write_module(arch: str, directory: Path) -> int:
    """Build a module from the C sources in a directory, and return exit status 0.

    The module has the directory's name. It is written to the file NAME.ko in the directory, which the command
    `load PATH` of a mount's machine/modules accepts.
    """
    if not any(directory.glob("*.c")):
        raise BuildError(f"{directory}: the directory has no C files")
    with tempfile.TemporaryDirectory(prefix="kprobefs-module-") as work:
        # <linux/NAME.h> is a file of include/linux, or else NAME.h.
        names = Path(work, "names")
        names.mkdir()
        (names / "linux").symlink_to(SOURCE / "include")
        options = ["-Wno-unused-parameter", "-idirafter", str(names)]
        data = _build_module(TARGETS[arch], directory, Path(work), options)
    output = directory / f"{directory.name}.ko"
    old = output.read_bytes() if output.exists() else data
    output.write_bytes(data)
    other = ", in place of one for another architecture" if _architecture(old) != _architecture(data) else ""
    print(f"{output.name}: {len(data)} bytes for {arch}{other}")
    return 0


def _architecture(module: bytes) -> tuple[bytes, ...]:
    """Return the class, the machine and the flags in an ELF header, which tell architectures apart."""
    flags = 48 if module[4:5] == _ELFCLASS64 else 36
    return module[4:5], module[18:20], module[flags : flags + 4]


def _write_modules(directory: Path, modules: dict[str, bytes]) -> None:
    if not modules and not directory.exists():
        return
    directory.mkdir(exist_ok=True)
    for stale in directory.glob("*.ko"):
        stale.unlink()
    for name, data in modules.items():
        (directory / f"{name}.ko").write_bytes(data)


def check(arch: str) -> int:
    """Compare a fresh build with prebuilt/, and return the exit status.

    The status is 0 if they are equal, 1 if they differ, 77 if the manifest names another compiler or linker.
    """
    expected = read_manifest().get(arch)
    if expected is None:
        print(f"{arch}: not in the manifest")
        return 1
    target = TARGETS[arch]
    tools = {"compiler": target.compiler, "linker": target.linker}
    if target.has_types:
        tools["types"] = _TYPES_TOOL
    for kind, tool in tools.items():
        version = tool_version(tool)
        if version != expected[kind]:
            print(f"{arch}: not checked: built by {expected[kind]}, here is {version or 'no ' + kind}")
            return EXIT_OTHER_COMPILER
    built = build(arch)
    there = PREBUILT / arch
    counts = PREBUILT / arch / prototypes.FILE_NAME
    same = built.data == (there / "vmlinux").read_bytes() and built.manifest == expected
    same &= built.modules == {path.stem: path.read_bytes() for path in (there / MODULES).glob("*.ko")}
    same &= built.arguments == (counts.read_text() if counts.exists() else "")
    types = there / types_file.FILE_NAME
    same &= built.types == (types.read_bytes() if types.exists() else b"")
    if not same:
        print(f"{arch}: prebuilt image and sources differ")
        return 1
    print(f"{arch}: prebuilt image is what the sources give")
    return 0


def read_manifest() -> dict[str, Any]:
    """Return prebuilt/manifest.json as architecture -> entry; empty if the file doesn't exist."""
    if not MANIFEST.exists():
        return {}
    manifest: dict[str, Any] = json.loads(MANIFEST.read_text())
    return manifest


def tool_version(tool: str) -> str:
    """Return the first line of the output of `tool --version`; "" if the tool isn't installed."""
    try:
        output = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return output.splitlines()[0]


def build(arch: str, *, has_lines: bool = False) -> Built:
    """Compile and link the image of an architecture in a temporary directory.

    `has_lines`: also link a second image, with debugging information, for Built.described. The first image is
    the same whether `has_lines` is True or False.
    """
    target = TARGETS[arch]
    with tempfile.TemporaryDirectory(prefix="kprobefs-image-") as directory:
        work = Path(directory)
        has_types = target.has_types and bool(tool_version(_TYPES_TOOL))
        # gcc's code does not depend on debugging information, so the image and its types share the objects.
        objects = _compile_all(target, work, [_DEBUG_FLAGS] if has_types or has_lines else [])
        vmlinux = _link_with_symbols(target, objects, work)
        data = _sort_ex_table(vmlinux.read_bytes())
        vmlinux.write_bytes(data)
        image = load_image(vmlinux, arch.partition("-")[0])
        modules = _build_modules(target, work) if target.has_modules else {}
        arguments = _argument_counts(work, image, modules)
        types, described = b"", b""
        if has_types or has_lines:
            with_debug = _link(target, [*objects, work / _SYMBOLS], work, keeps_debug=True)
            types = _build_types(with_debug, work) if has_types else b""
            described = _sort_ex_table(with_debug.read_bytes()) if has_lines else b""
    manifest = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "text_size": sum(r.end - r.start for r in image.text_ranges),
        "functions": sum(1 for symbol in image.kallsyms.symbols if symbol.is_text),
        "fentry_sites": len(image.mcount),
        "compiler": tool_version(target.compiler),
        "linker": tool_version(target.linker),
        "flags": f"{COMMON_FLAGS} {target.flags}",
        "linker_flags": target.linker_flags,
        "modules": _describe_modules(modules),
        **({"types": tool_version(_TYPES_TOOL)} if target.has_types else {}),
    }
    return Built(data, manifest, modules, arguments, types, described)


def _build_types(described: Path, work: Path) -> bytes:
    """Return the BTF of an image. `described`: path of the image, which has debugging information.

    `work` is the directory of the build.

    Raises: BuildError (pahole failed).
    """
    output = work / types_file.FILE_NAME
    _run([_TYPES_TOOL, "--btf_encode", f"--btf_encode_detached={output}", str(described)])
    return output.read_bytes()


def _argument_counts(work: Path, image: KernelImage, modules: dict[str, bytes]) -> str:
    """Return the contents of the file prototypes.FILE_NAME for the functions of an image and its modules.

    `work` is the directory of the build, in which gcc has written the prototypes of all source files.
    """
    names = {symbol.name for symbol in image.kallsyms.symbols if symbol.is_text}
    for data in modules.values():
        names.update(symbol.name for symbol in ElfFile(data).symbols)
    notes = sorted(work.glob(f"*{_NOTES}"))
    return prototypes.to_json(prototypes.argument_counts(path.read_text() for path in notes), names)


def _build_modules(target: BuildTarget, work: Path) -> dict[str, bytes]:
    directories = sorted(path for path in (SOURCE / MODULES).iterdir() if path.is_dir())
    return {directory.name: _build_module(target, directory, work) for directory in directories}


def _build_module(target: BuildTarget, directory: Path, work: Path, options: Sequence[str] = ()) -> bytes:
    """Compile a module's sources and link them into one relocatable file; return the file's contents.

    `directory` has the sources, and its name is the module's name. The file is written to `work`.
    `options`: further options of the compiler.
    """
    name = directory.name
    flags = ["-DMODULE", f'-DKBUILD_MODNAME="{name}"', *options]
    objects = []
    for path in [*sorted(directory.glob("*.c")), SOURCE / MODULES / "module-common.c"]:
        objects.append(work / f"{name}-{path.stem}.o")
        source = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else path
        _compile(target, source, objects[-1], flags)
    module = work / f"{name}.ko"
    emulation = target.linker_flags.split()[:2]
    _run([target.linker, *emulation, "-r", "-o", str(module), *map(str, objects)])
    return module.read_bytes()


def _describe_modules(modules: dict[str, bytes]) -> dict[str, Any]:
    depends = dependencies(modules)
    return {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "depends": depends[name]}
        for name, data in modules.items()
    }


def sources(target: BuildTarget) -> list[Path]:
    """Return the paths of a target's C and assembly files, relative to src/ and in a fixed order."""
    found = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.[cS]")]
    found = [p for p in found if p.parts[0] != MODULES]
    mine = [p for p in found if p.parts[0] != "arch" or p.as_posix().startswith(target.arch_directory + "/")]
    other_width = f"_{96 - target.bits}"
    return sorted((p for p in mine if not p.stem.endswith(other_width)), key=lambda p: p.as_posix())


def _compile_all(target: BuildTarget, work: Path, more: list[str]) -> list[Path]:
    def compile_one(source: Path) -> Path:
        output = work / (source.as_posix().replace("/", "_") + ".o")
        _compile(target, source, output, more)
        return output

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(compile_one, sources(target)))


def _compile(target: BuildTarget, source: Path, output: Path, more: list[str]) -> None:
    """Compile one source file to the object `output`, with the additional options `more`.

    The compiler gets a path relative to src/, so that __FILE__ and symbols do not contain the build
    directory.
    """
    includes = ["-nostdinc", "-Iinclude", f"-I{target.arch_directory}/include"]
    flags = [*f"{COMMON_FLAGS} {target.flags}".split(), f"-ffile-prefix-map={output.parent}=.", *more]
    if source.suffix == ".c":
        flags += ["-aux-info", str(output.with_suffix(_NOTES))]
    _run([target.compiler, *flags, *includes, "-c", source.as_posix(), "-o", str(output)])


def _link_with_symbols(target: BuildTarget, objects: list[Path], work: Path) -> Path:
    """Link `objects` until the kallsyms table in the image matches the image's symbols.

    Return the path of the image in the directory `work`.
    Raises: BuildError (the table differs after each link).
    """
    _preprocess_script(target, work)
    table = _assemble_symbols(target, None, work)
    previous = ""
    for attempt in range(4):
        vmlinux = _link(target, [*objects, table], work)
        symbols = Kallsyms(elf_symbols(ElfFile(vmlinux.read_bytes())))
        text = symbols.kallsyms_text()
        if attempt >= 2 and text == previous:
            return vmlinux
        previous = text
        table = _assemble_symbols(target, symbols, work)
    raise BuildError("the symbol table differs after each link")


def _link(target: BuildTarget, objects: list[Path], work: Path, *, keeps_debug: bool = False) -> Path:
    vmlinux = work / ("vmlinux.debug" if keeps_debug else "vmlinux")
    script = str(work / _SCRIPT)
    command = [target.linker, *target.linker_flags.split(), "-X", "-T", script, "-o", str(vmlinux)]
    command += [] if keeps_debug else ["--strip-debug"]
    _run([*command, *map(str, objects)])
    return vmlinux


def _preprocess_script(target: BuildTarget, work: Path) -> None:
    """Preprocess the linker script, and write the result to the directory `work`.

    The option -undef is used, because predefined macros such as i386 would change the script.
    """
    command = [target.compiler, *target.flags.split(), "-undef", "-E", "-P", "-xc", target.linker_script]
    _run([*command, "-o", str(work / _SCRIPT)])


def _assemble_symbols(target: BuildTarget, symbols: Kallsyms | None, work: Path) -> Path:
    """Assemble the tables that kernel/kallsyms.c reads, and return the path of the object in `work`.

    Without `symbols`, the tables are empty.
    """
    source = work / "kallsyms.S"
    output = work / _SYMBOLS
    source.write_text(_symbol_source(symbols))
    _run([target.compiler, *target.flags.split(), "-c", str(source), "-o", str(output)])
    return output


def _symbol_source(symbols: Kallsyms | None) -> str:
    entries = symbols.symbols if symbols else ()
    lines = ['.section .kallsyms, "a"', ".balign 8"]
    lines += _table("kallsyms_addresses", [f".quad {s.address:#x}" for s in entries])
    offset = 0
    offsets = []
    for symbol in entries:
        offsets.append(f".long {offset}")
        offset += len(symbol.name) + 2
    lines += _table("kallsyms_name_offsets", offsets)
    lines += _table("kallsyms_num_syms", [f".long {len(entries)}"])
    lines += _table("kallsyms_names", [f'.asciz "{s.type}{s.name}"' for s in entries])
    return "\n".join([*lines, '.section .note.GNU-stack, "", @progbits', ""])


def _table(name: str, lines: list[str]) -> list[str]:
    return [f".globl {name}", f".type {name}, @object", f"{name}:", *lines]


def _sort_ex_table(data: bytes) -> bytes:
    """Return the image with its exception table sorted by the address of the instruction.

    `data`: contents of the image's file. Entries are relative to their own addresses, and are adjusted when
    they move.

    Mirrors: scripts/sorttable.c (v6.1).
    """
    section = ElfFile(data).sections["__ex_table"]
    pairs = []
    for offset in range(0, section.size, 8):
        insn, fixup = struct.unpack_from("<ii", data, section.offset + offset)
        pairs.append((insn + offset, fixup + offset))
    table = b"".join(
        struct.pack("<ii", insn - 8 * index, fixup - 8 * index)
        for index, (insn, fixup) in enumerate(sorted(pairs))
    )
    return data[: section.offset] + table + data[section.offset + section.size :]


def _run(command: list[str]) -> None:
    environment = {**os.environ, "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}
    result = subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, check=False)
    if result.returncode or result.stderr:
        why = "" if result.returncode else " (warnings are errors)"
        raise BuildError(f"{' '.join(command[:1])} {command[-3]}{why}:\n{result.stderr}")


if __name__ == "__main__":
    sys.exit(main())
