"""Builds the loadable modules from src/modules/: each directory becomes a relocatable NAME.ko."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from emulated_kernel.image.elf import SHN_UNDEF, STB_WEAK, ElfFile

MODULES = "modules"
COMMON = Path(MODULES) / "module-common.c"
_EXPORT = "__ksymtab_"

Compile = Callable[[Path, Path, list[str]], None]
"""Compiles (source relative to src/, output, further flags)."""
Link = Callable[[list[Path], Path], None]
"""Links objects into one that can still be relocated."""


def build_modules(source: Path, work: Path, compile_: Compile, link: Link) -> dict[str, bytes]:
    """All modules by name."""
    built = {}
    for directory in sorted((source / MODULES).iterdir()):
        if directory.is_dir():
            built[directory.name] = _build(source, directory, work, compile_, link)
    return built


def _build(source: Path, directory: Path, work: Path, compile_: Compile, link: Link) -> bytes:
    name = directory.name
    flags = ["-DMODULE", f'-DKBUILD_MODNAME="{name}"']
    objects = []
    for path in [*sorted(directory.glob("*.c")), source / COMMON]:
        output = work / f"{name}-{path.stem}.o"
        compile_(path.relative_to(source), output, flags)
        objects.append(output)
    module = work / f"{name}.ko"
    link(objects, module)
    return module.read_bytes()


def dependencies(modules: Mapping[str, bytes]) -> dict[str, list[str]]:
    """For each module the others whose exported symbols it uses. Mirrors: modules.dep of depmod."""
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
