"""Build hook that adds the output of `kprobefs completion` to each wheel, for bash, zsh and fish."""

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
    """Creates the completion files before a build, and removes them after it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Create the completion files in a temporary directory, and register them as shared data."""
        del version
        self._work = TemporaryDirectory()
        for shell, place in PLACES.items():
            path = Path(self._work.name, shell)
            path.write_text(f"{shellcode(['kprobefs'], shell=shell)}\n")
            build_data["shared_data"][str(path)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary directory."""
        del version, build_data, artifact_path
        self._work.cleanup()
