"""Program that moves modules and renames identifiers according to the tables in its directory.

`rename.py modules SECTION...` moves the modules of these sections of modules.tsv with `git mv`. It rewrites
every import, dotted name and path in the tracked text files. `rename.py names [KIND...]` applies names.tsv.
To rebase a branch onto a move, run the same command on the branch first.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = {
    "emulated_kernel.components": "Components of a kernel that is probed: the probe engine and tracing.",
    "emulated_kernel.guests": "Guest kernels: kprobefs's own small kernel, and distributions' kernels.",
    "emulated_kernel.guests.builtin.trees": "File trees that only kprobefs's own kernel has.",
    "emulated_kernel.guests.common": "Host processes, programs and clocks: what both kinds of guests need.",
    "emulated_kernel.guests.linux.boot": "Booting a distribution's kernel, and snapshots of a booted one.",
    "emulated_kernel.guests.linux.guest": "The tasks, system calls and files of a distribution's kernel.",
    "emulated_kernel.guests.linux.mounts": "Mounts of a distribution's kernel.",
    "emulated_kernel.guests.linux.pc": "The emulated PC that a distribution's kernel runs on.",
    "emulated_kernel.guests.linux.probing": "The probe engine and tracing over a distribution's kernel.",
    "emulated_kernel.guests.linux.vmcore": "Kernels of vmcores: memory, callable functions, mount.",
    "emulated_kernel.kernel": "The public API of kprobefs's own kernel, and the builder behind it.",
    "emulated_kernel.kprobes.hit": "Hits, from the breakpoint back to the probed code.",
    "emulated_kernel.util": "Code that knows nothing about kernels: safe reading, locks, errors, settings.",
    "kprobefs.cli": "The commands of the program.",
    "kprobefs.common": "Errors, terminals, mount points and running daemons, for commands and daemon.",
    "kprobefs.daemon": "The process that serves a mount.",
    "kprobefs.daemon.state": "State that outlives a daemon: the --state directory.",
    "kprobefs.definitions": "Files of probe definitions: reading, applying and saving them.",
    "kprobefs.fuse": "The FUSE session and its operations: only these modules import fuse.",
    "kprobefs.measure": "Benchmarks and analyses that the program offers as commands.",
}
"""Package that a move creates -> first line of its __init__.py."""

DONE = "\x01"
"""Prefix of a name that has been rewritten, so that it is not rewritten again."""
DOTTED = re.compile(r"(?<![\w./\x01-])(?:emulated_kernel|kprobefs)(?:\.[A-Za-z_]\w*)+")
PATHS = re.compile(r"(?<![\w.-])(?:emulated_kernel/|kprobefs/)?(?:[a-z_0-9]+/)*[a-z_0-9]+(?:\.py)?(?![\w-])")


def tracked(*patterns: str) -> list[Path]:
    """Return the tracked files that match the patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_files() -> Iterator[Path]:
    """Yield the files that may name a module: sources, documents and scripts, without these tables."""
    for path in tracked():
        if HERE in path.parents or "prebuilt" in path.parts or path.suffix in {".elf", ".ko", ".gz"}:
            continue
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield path


def table(sections: Iterable[str]) -> dict[str, str]:
    """Return a map old module -> new module, from the given sections of modules.tsv."""
    wanted = set(sections)
    found: dict[str, str] = {}
    section = ""
    for line in (HERE / "modules.tsv").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#") and (section in wanted or "all" in wanted):
            old, new = line.split("\t")
            found[old] = new
    return found


def file_of(module: str) -> Path | None:
    """Return the file of a module or package; None if it does not exist."""
    path = ROOT / module.replace(".", "/")
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def move(moves: dict[str, str]) -> None:
    """Run `git mv` for each module; a package's __init__.py is moved after its modules."""
    kinds = {}
    for old, new in moves.items():
        source = file_of(old)
        if source is not None:
            kinds[old] = (source, source.name == "__init__.py", new)
    for source, is_package, new in sorted(kinds.values(), key=lambda each: each[1]):
        place = ROOT / new.replace(".", "/")
        target = place / "__init__.py" if is_package else place.with_suffix(".py")
        if target.exists():
            if is_package:
                subprocess.run(["git", "rm", "-q", str(source)], cwd=ROOT, check=True)
                continue
            sys.exit(f"{target}: exists already; remove it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(source), str(target)], cwd=ROOT, check=True)
    for new in moves.values():
        parts = new.split(".")
        for depth in range(2, len(parts)):
            package = ".".join(parts[:depth])
            init = ROOT / package.replace(".", "/") / "__init__.py"
            if not init.exists():
                init.write_text(f'"""{PACKAGES[package]}"""\n', encoding="utf-8")
                subprocess.run(["git", "add", str(init)], cwd=ROOT, check=True)


def dotted(moves: dict[str, str], text: str) -> str:
    """Return `text` with new dotted names. If several modules match the start of a name, use the longest.

    `moves`: old module -> new module.
    """

    def new(found: re.Match[str]) -> str:
        parts = found[0].split(".")
        for depth in range(len(parts), 1, -1):
            if (target := moves.get(".".join(parts[:depth]))) is not None:
                return ".".join([target, *parts[depth:]])
        return found[0]

    return DOTTED.sub(new, text)


def paths(moves: dict[str, str], packages: set[str], text: str) -> str:
    """Return `text` with new paths of files and directories, with or without the name of the package.

    `moves`: old module -> new module. `packages`: old modules that are packages. A path without its package
    is rewritten only if it has at least two parts.
    """
    known = {}
    for old, new in moves.items():
        place, target = old.replace(".", "/"), new.replace(".", "/")
        if old in packages:
            known[place] = target
            if place.startswith("emulated_kernel/") and place.count("/") > 1:
                known[place.removeprefix("emulated_kernel/")] = target.removeprefix("emulated_kernel/")
        else:
            known[f"{place}.py"] = f"{target}.py"
            if place.startswith("emulated_kernel/") and place.count("/") > 1:
                known[place.removeprefix("emulated_kernel/") + ".py"] = (
                    target.removeprefix("emulated_kernel/") + ".py"
                )

    def new(found: re.Match[str]) -> str:
        path = found[0]
        if (target := known.get(path)) is not None:
            return target
        for depth in range(path.count("/"), 0, -1):
            head = "/".join(path.split("/")[:depth])
            if (target := known.get(head)) is not None and head in known:
                return target + path[len(head) :]
        return path

    return PATHS.sub(new, text)


def imports(moves: dict[str, str], modules: set[str], path: Path, source: str) -> str:
    """Return `source` with new statements `from PACKAGE import MODULE`.

    If the module's last name changes, its uses change, too. `moves`: old module -> new module. `modules`:
    names of all modules. `path`: the file of `source`, for messages.
    """
    if "import" not in source:
        return source
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    edits: list[tuple[int, int, str]] = []
    renamed: dict[str, str] = {}
    bound = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        if not any(
            f"{node.module}.{each.name}" in moves and f"{node.module}.{each.name}" in modules
            for each in node.names
        ):
            continue
        rest, statements = [], []
        for each in node.names:
            old = f"{node.module}.{each.name}"
            if old in moves and old in modules:
                package, _, name = moves[old].rpartition(".")
                alias = each.asname
                if alias is None and name != each.name:
                    if each.name in bound or name in bound:
                        alias = each.name
                        print(f"{path.relative_to(ROOT)}: {each.name} is a variable too; kept as an alias")
                    else:
                        renamed[each.name] = name
                renaming = f" as {alias}" if alias and alias != name else ""
                statements.append(f"from {DONE}{package} import {name}{renaming}")
            else:
                rest.append(each.name + (f" as {each.asname}" if each.asname else ""))
        if rest:
            statements.insert(0, f"from {node.module} import {', '.join(rest)}")
        indent = " " * node.col_offset
        edits.append((*place(node), f"\n{indent}".join(statements)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in renamed:
            edits.append((*place(node), renamed[node.id]))
    data = source.encode()
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data.decode()


def remove_empty(directory: Path) -> None:
    """Remove a directory if it contains only bytecode."""
    if directory.is_dir() and not any(
        path.is_file() and path.suffix != ".pyc" for path in directory.rglob("*")
    ):
        shutil.rmtree(directory)


def modules_main(sections: list[str]) -> None:
    """Move the modules of the sections `sections`."""
    moves = table(sections)
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in tracked("emulated_kernel/*.py", "kprobefs/*.py")
    }
    packages = {old for old in moves if (file := file_of(old)) is not None and file.name == "__init__.py"}
    changed = {}
    for path in text_files():
        before = text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = imports(moves, modules, path, text)
        text = paths(moves, packages, dotted(moves, text)).replace(DONE, "")
        if text != before:
            changed[path] = text
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    move(moves)
    for old in packages:
        remove_empty(ROOT / old.replace(".", "/"))


def names_main(kinds: list[str]) -> None:
    """Apply the rows of names.tsv in their order.

    The scope of a row is `global`, or [in:PATHS or not:PATHS] and [re:PATTERN -> REPLACEMENT]. All of these
    are regular expressions.
    """
    files = [
        path for path in tracked("*.py", "*.md") if HERE not in path.parents and path.name != "CHANGELOG.md"
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    before = dict(texts)
    for line in (HERE / "names.tsv").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        kind, old, new, scope, *_reason = line.split("\t")
        if kinds and kind not in kinds:
            continue
        where, _, rule = scope.partition("re:")
        pattern, _, replacement = (
            rule.partition(" -> ") if rule else (rf"(?<!\w){re.escape(old)}(?!\w)", "", new)
        )
        compiled = re.compile(pattern, re.MULTILINE)
        choice, _, paths = where.strip().partition(":")
        hits = 0
        for path in files:
            if path.suffix == ".md" and not (scope == "global" and kind == "class"):
                continue
            if choice in {"in", "not"} and (re.search(paths, str(path.relative_to(ROOT))) is None) == (
                choice == "in"
            ):
                continue
            texts[path], count = compiled.subn(replacement, texts[path])
            hits += count
        if not hits:
            print(f"no hit: {kind} {old} -> {new}")
    for path, text in texts.items():
        if text != before[path]:
            path.write_text(text, encoding="utf-8")


def main() -> None:
    """Run the command that the arguments name."""
    match sys.argv[1:]:
        case ["modules", *sections] if sections:
            modules_main(sections)
        case ["names", *kinds]:
            names_main(kinds)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
