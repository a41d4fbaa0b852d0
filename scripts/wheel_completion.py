"""Puts completion for shells, as `kprobefs completion` prints it, into each wheel."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argcomplete.shell_integration import shellcode
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACES = {
    "bash": "share/bash-completion/completions/kprobefs",
    "zsh": "share/zsh/site-functions/_kprobefs",
    "fish": "share/fish/vendor_completions.d/kprobefs.fish",
}


class CompletionHook(BuildHookInterface[Any]):
    """The files are made for each build, and gone behind it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """In front of a build."""
        del version
        self._work = TemporaryDirectory()
        for shell, place in PLACES.items():
            path = Path(self._work.name, shell)
            path.write_text(f"{shellcode(['kprobefs'], shell=shell)}\n")
            build_data["shared_data"][str(path)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Behind it."""
        del version, build_data, artifact_path
        self._work.cleanup()
