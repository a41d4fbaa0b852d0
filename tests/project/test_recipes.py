"""examples/*.yml and the Containerfile: the packages, files and commands that they name exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.project.recipes import (
    ROOT,
    SYSTEMS,
    containerfile,
    entry_point,
    github,
    pip_step,
    programs,
    script,
    systems,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPES = sorted(systems())
CI = ("github.yml", "gitlab.yml")


@pytest.mark.parametrize("recipe", RECIPES)
def test_commands_are_a_shells(recipe: str) -> None:
    _, commands = systems()[recipe]
    assert commands
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_run_in_a_new_root_is_what_it_says(recipe: str) -> None:
    said = script(recipe)
    subprocess.run(["sh", "-n", "-c", said], check=True)
    lines = iter(map(shlex.split, said.splitlines()))
    for command in systems()[recipe][1]:
        assert any(words[:1] == ["sh"] and words[-1] == command for words in lines)
    if recipe == "Containerfile":
        *_, last = lines
        assert last == entry_point()


@pytest.mark.parametrize("recipe", RECIPES)
def test_packages_are_those_of_the_system(recipe: str, tmp_path: Path) -> None:
    """A recipe installs the packages of its system.

    The name of libfuse's package differs between releases; scripts/lib.sh knows each name.
    """
    image, commands = systems()[recipe]
    name, _, version = SYSTEMS[image].partition(":")
    (tmp_path / "os-release").write_text(f'ID={name}\nVERSION_ID="{version}"\n')
    script = f'root=/nonexistent; . "{ROOT}/scripts/lib.sh"; libfuse_package'
    environment = {**os.environ, "OS_RELEASE": str(tmp_path / "os-release")}
    done = subprocess.run(["sh", "-c", script], env=environment, check=True, capture_output=True, text=True)
    (installed,) = (words for words in programs(commands) if words[:2] == ["apt-get", "install"])
    assert {done.stdout.strip(), "fuse3"} <= set(installed)
    assert {word for word in installed if word.startswith("libfuse")} == {done.stdout.strip()}


@pytest.mark.parametrize("recipe", CI)
def test_it_installs_the_checkout_and_runs_its_tests(recipe: str) -> None:
    """The CI recipes install kprobefs from the checkout, because pip does not find it by name. Then they run
    the tests in examples/.
    """
    *_, install, test = programs(systems()[recipe][1])
    assert install == ["pip", "install", ".", "pytest"]
    assert test == ["pytest", "examples"]
    listing = [sys.executable, "-m", "pytest", "--collect-only", "-q", *test[1:]]
    found = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "examples/test_read_sizes.py" in found.stdout


def test_its_python_is_one_of_ours() -> None:
    _, steps = github()
    given = [step["with"]["python-version"] for step in steps if "with" in step]
    (gitlabs,) = re.findall(r"^python:([0-9.]+)-", systems()["gitlab.yml"][0])
    least = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert all(tuple(map(int, version.split("."))) >= least for version in (*given, gitlabs))
    assert given == [gitlabs]
    assert steps[0]["uses"].startswith("actions/checkout@")
    assert all(("uses" in step) != ("run" in step) for step in steps)


def test_the_container_has_what_it_starts() -> None:
    program, command = entry_point()
    installed = Path(sys.executable).with_name(program)
    done = subprocess.run([installed, command, "--help"], check=True, capture_output=True, text=True)
    assert f"usage: {program} {command}" in done.stdout


def test_the_container_is_built_from_the_checkout() -> None:
    instructions = containerfile()
    assert ("COPY", ". /src") in instructions
    assert pip_step() == ["install", "--no-cache-dir", "/src", "pytest"]
    path = dict(instructions)["ENV"].removeprefix("PATH=").split(":")[0]
    commands = systems()["Containerfile"][1]
    assert ["python3", "-m", "venv", str(Path(path).parent)] in programs(commands)
    assert f"{path}/pip" in [words[0] for words in programs(commands)]
