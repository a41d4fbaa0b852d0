"""The import contracts of pyproject.toml: each refuses what it forbids, and every module has its place."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]


CONTAINERS = sorted({each for contract in CONTRACTS for each in contract.get("containers", ())})


def copied(tree: Path) -> Path:
    """The packages as they are, to plant violations in."""
    for package in ("kprobefs", "emulated_kernel"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("src", "prebuilt"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


def lint(tree: Path) -> tuple[int, str]:
    """Exit status and text of lint-imports, in one line."""
    program = Path(sysconfig.get_path("scripts"), "lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=tree, capture_output=True, text=True, check=False)
    return done.returncode, " ".join(done.stdout.split())


def plant(tree: Path, module: str, imported: str) -> None:
    """Let a module import another one, when it is asked to."""
    path = tree.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    path.write_text(path.read_text() + f"\n\ndef planted() -> None:\n    import {imported}\n")


def layers(contract: dict[str, Any]) -> Iterator[list[list[str]]]:
    """The modules of each layer, top to bottom, of each container."""
    for container in contract.get("containers", [""]):
        prefix = f"{container}." if container else ""
        yield [[prefix + name.strip() for name in each.split("|")] for each in contract["layers"]]


def forbidden_imports() -> Iterator[tuple[str, str]]:
    """For each contract, imports from every layer into the one above and beside, or into what it forbids."""
    for contract in CONTRACTS:
        if contract["type"] == "forbidden":
            for module in contract["source_modules"]:
                yield module, contract["forbidden_modules"][0]
            continue
        for levels in layers(contract):
            for upper, lower in pairwise(levels):
                yield from ((module, upper[0]) for module in lower)
            for siblings in levels:
                yield from ((one, other) for one in siblings for other in siblings if one != other)


def test_every_contract_refuses_what_it_forbids(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    planted = list(forbidden_imports())
    for module, imported in planted:
        plant(copy, module, imported)
    status, said = lint(copy)
    assert status == 1
    missed = [pair for pair in planted if "{} is not allowed to import {}".format(*pair) not in said]
    assert not missed
    assert " 0 kept" in said


@pytest.fixture(scope="module")
def newcomers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is said of a module in each container that no contract knows."""
    copy = copied(tmp_path_factory.mktemp("copy"))
    for number, container in enumerate(CONTAINERS):
        path = copy.joinpath(*container.split("."), f"newcomer{number}.py")
        path.write_text('"""In no contract."""\n')
    status, said = lint(copy)
    assert status == 1
    return said


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_new_module_has_to_find_its_place(newcomers: str, container: str) -> None:
    assert f"{container}.newcomer{CONTAINERS.index(container)} " in f"{newcomers} "


def test_no_circles_between_files_of_the_library() -> None:
    """Not by imports for types alone either, nor by those within a function."""
    graph = grimp.build_graph("emulated_kernel", cache_dir=None)
    TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    ).prepare()


def test_every_room_has_a_contract() -> None:
    """A package that holds packages says in which order these stand."""
    rooms = {
        ".".join(path.parent.parent.relative_to(ROOT).parts)
        for path in (ROOT / "emulated_kernel").rglob("__init__.py")
        if path.parent.parent != ROOT
    }
    assert rooms <= {container for contract in CONTRACTS for container in contract.get("containers", ())}


def test_what_is_forbidden_is_forbidden_to_all_but_one() -> None:
    """unicorn to all packages of the library but the machine, fuse to all modules but the adapter."""
    forbidden = {each["forbidden_modules"][0]: set(each["source_modules"]) for each in CONTRACTS[-2:]}
    library = {path.parent.name for path in (ROOT / "emulated_kernel").glob("*/__init__.py")}
    library |= {path.stem for path in (ROOT / "emulated_kernel").glob("[!_]*.py")}
    program = {path.stem for path in (ROOT / "kprobefs").glob("[!_]*.py")}
    assert forbidden["unicorn"] == {
        "kprobefs",
        *(f"emulated_kernel.{each}" for each in library - {"machine"}),
    }
    assert forbidden["fuse"] - {"kprobefs.__main__"} == {
        "emulated_kernel",
        *(f"kprobefs.{each}" for each in program - {"adapter"}),
    }
