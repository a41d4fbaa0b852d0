"""The recipes of examples/ as data: their commands, and the systems on which they run.

`python -m tests.project.recipes RECIPE` prints a recipe as a script for a checkout in a new root:
scripts/fresh-root trixie -- sh -c "$(.venv/bin/python -m tests.project.recipes Containerfile)"
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SYSTEMS = {
    "ubuntu-24.04": "ubuntu:24.04",
    "python:3.12-slim-bookworm": "debian:12",
    "docker.io/library/debian:trixie-slim": "debian:13",
}
"""Image that a recipe names -> name and version in the image's /etc/os-release."""


def github() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the job of the GitHub workflow, and its steps."""
    recipe = yaml.safe_load((EXAMPLES / "github.yml").read_text())
    (job,) = recipe["jobs"].values()
    return job, job["steps"]


def gitlab() -> dict[str, Any]:
    """Return the job of the GitLab pipeline."""
    return yaml.safe_load((EXAMPLES / "gitlab.yml").read_text())["test"]


def containerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile with their arguments, each on one line."""
    lines = (EXAMPLES / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    found = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(name, arguments) for name, _, arguments in found]


def systems() -> dict[str, tuple[str, list[str]]]:
    """Return recipe -> (image, commands that run in the image)."""
    job, steps = github()
    instructions = containerfile()
    (image,) = (arguments for name, arguments in instructions if name == "FROM")
    return {
        "github.yml": (job["runs-on"], [step["run"] for step in steps if "run" in step]),
        "gitlab.yml": (gitlab()["image"], [*gitlab()["before_script"], *gitlab()["script"]]),
        "Containerfile": (image, [arguments for name, arguments in instructions if name == "RUN"]),
    }


def programs(commands: list[str]) -> list[list[str]]:
    """Return the programs that a shell would run for `commands`, each as a list of words without `sudo`."""
    parts = " && ".join(commands).split("&&")
    return [words[words[0] == "sudo" :] for words in map(shlex.split, parts)]


def pip_step() -> list[str]:
    """Return the arguments of the pip command in the Containerfile."""
    (step,) = (words for words in programs(systems()["Containerfile"][1]) if words[0].endswith("/pip"))
    return step[1:]


def entry_point() -> list[str]:
    """Return the command of the container's entry point."""
    found = dict(containerfile())
    return [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]


IMAGE = """\
apt-get update -qq
apt-get install -qq --no-install-recommends sudo python3-venv >/dev/null
python3 -m venv /opt/image
export PATH=/opt/image/bin:$PATH
"""
"""Commands that add to a minimal root what CI's images have: sudo, and a pip that may install."""


def script(recipe: str) -> str:
    """Return a script that runs a recipe unchanged in a new root of its system, from the checkout."""
    lines = ["set -eux"]
    if recipe != "Containerfile":
        lines += [IMAGE, *(f"sh -ec {shlex.quote(command)}" for command in systems()[recipe][1])]
        return "\n".join(lines)
    lines += ["checkout=$PWD", "cd /"]
    for name, arguments in containerfile():
        match name:
            case "RUN":
                lines.append(f"sh -c {shlex.quote(arguments)}")
            case "COPY":
                source, target = arguments.split()
                lines.append(f'cp -a "$checkout/{source}" {target}')
            case "ENV":
                lines.append(f"export {arguments}")
            case "FROM" | "ENTRYPOINT" | "CMD":
                pass
            case _:
                raise ValueError(f"{name} isn't run here")
    return "\n".join([*lines, shlex.join(entry_point())])


if __name__ == "__main__":
    recipes = list(systems())
    if sys.argv[1:] not in ([recipe] for recipe in recipes):
        sys.exit(f"usage: python -m tests.project.recipes {'|'.join(recipes)}")
    print(script(sys.argv[1]))
