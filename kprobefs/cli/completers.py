"""Completion for shells: the possible mounts, functions, events, profiles and limits in arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import suppress

from kprobefs.common.errors import CliError

Completer = Callable[..., Iterable[str]]
"""Function that argcomplete calls with the keyword arguments `prefix`, `action` and `parsed_args`."""
MOST = 4096
"""Maximum number of functions that are offered."""


def attach(parser: argparse.ArgumentParser) -> None:
    """Give each argument in COMPLETERS its completer, in the parsers of all commands, for argcomplete.

    The argument DIR of the command `mount` gets none, because nothing is mounted there yet.
    """
    for chosen, command in _commands(parser).items():
        for action in command._actions:
            completer = COMPLETERS.get(action.dest)
            # The argument of `mount` is a directory without a mount.
            if completer is not None and (chosen, action.dest) != ("mount", "directory"):
                action.completer = completer  # type: ignore[attr-defined]


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def mounts(**_: object) -> list[str]:
    """Return the directories of all mounts."""
    from kprobefs.common.mountpoints import our_mounts

    with suppress(CliError):
        return sorted({point.directory for point in our_mounts()})
    return []


def profiles(**_: object) -> tuple[str, ...]:
    """Return the names of all profiles."""
    from kprobefs.mount_options import PROFILES

    return PROFILES


def limits(**_: object) -> list[str]:
    """Return NAME= for each limit that the option --limit NAME=VALUE can set."""
    from emulated_kernel.util.limits import Limit

    return [f"{limit.value}=" for limit in Limit]


def functions(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return at most MOST functions of the built-in kernel that begin with `prefix`.

    `parsed_args`: the parsed command line. Its option --arch selects the kernel. Return an empty list if the
    command line names another kernel, by --image or --vmcore.
    """
    from emulated_kernel.image.builtin_image import load_image

    if getattr(parsed_args, "image", None) or getattr(parsed_args, "vmcore", None):
        # Reading the symbols of a distribution's kernel takes longer than a user waits for a completion.
        return []
    symbols = load_image(None, getattr(parsed_args, "arch", None) or "x86_64").kallsyms.symbols
    found = sorted({each.name for each in symbols if each.type in "tTwW" and each.name.startswith(prefix)})
    return found[:MOST]


def probes(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the completions of `prefix`, the beginning of a probe of `kprobefs trace`.

    If `prefix` has no colon, the completions are p:, r: and t:. After t: come names of events, and otherwise
    names of functions. Both are those of the built-in kernel that option --arch of `parsed_args` selects.
    """
    head, colon, place = prefix.partition(":")
    if not colon:
        return ["p:", "r:", "t:"]
    if head == "t":
        return [f"t:{name}" for name in _events(parsed_args) if name.startswith(place)]
    return [f"{head}:{name}" for name in functions(place, parsed_args)]


def _events(parsed_args: argparse.Namespace) -> list[str]:
    """Return GROUP:EVENT of each tracepoint of the built-in kernel that --arch selects.

    `parsed_args`: the parsed command line. Return an empty list if it names another kernel, by --image or
    --vmcore.
    """
    from emulated_kernel.image.builtin_image import load_image
    from emulated_kernel.image.trace_events import event_definitions

    if parsed_args.image or parsed_args.vmcore:
        return []
    return sorted(
        f"{each.system}:{each.name}" for each in event_definitions(load_image(None, parsed_args.arch))
    )


COMPLETERS: dict[str, Completer] = {
    "directory": mounts,
    "mount": mounts,
    "profile": profiles,
    "limit": limits,
    "places": functions,
    "probes": probes,
}
"""Name of an argument in the parsed command line -> function that returns the possible words for it."""
