"""Calls of a function on the machines of a Dask cluster. A call is repeated if its worker is lost."""

from __future__ import annotations

import hashlib
import logging
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kprobefs.common.errors import CliError, ExitStatus

PACKAGES = ("emulated_kernel", "kprobefs")
"""Names of the packages whose code on the workers must be the same as in this process."""
_PATIENCE = 15
"""Seconds within which the scheduler must answer."""
_log = logging.getLogger(__name__)
_LOGGERS = ("distributed.client", "distributed.core", "distributed.comm")
"""Loggers of Dask that report a lost connection. They are silenced, because a CliError reports it, too."""


def check_installed() -> None:
    """Check that Dask's library for clusters is installed. Raises: CliError (the library is missing)."""
    if find_spec("distributed") is None:
        why = "needs dask and distributed; install kprobefs[cluster]"
        raise CliError(f"--scheduler: {why}", ExitStatus.USAGE)


def run_on_cluster(
    address: str,
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    packages: Sequence[str] = PACKAGES,
) -> Iterator[tuple[int, Any]]:
    """Call a function of a module with each tuple of arguments on the workers of a Dask cluster.

    `address`: address of the scheduler. Yield (index of the arguments, result) in the order in which the
    calls end. If a worker is lost, other workers repeat its calls. `packages`: names of packages whose code
    must be the same on all workers.
    Raises: CliError (Dask is missing, no scheduler answers, a worker has other code, or a call fails).
    """
    check_installed()
    distributed: Any = import_module("distributed")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = distributed.Client(address, timeout=_PATIENCE)
    except (OSError, ValueError) as error:
        why = "no Dask scheduler answers; start one with: dask scheduler"
        raise CliError(f"--scheduler {address}: {why}") from error
    code = code_digest(packages)
    try:
        futures = [client.submit(_call, packages, code, function, each, pure=False) for each in arguments]
        numbers = {future.key: number for number, future in enumerate(futures)}
        for future in distributed.as_completed(futures):
            result = _result(distributed, address, future)
            yield numbers[future.key], result
    finally:
        client.close()


def _result(distributed: Any, address: str, future: Any) -> Any:
    """Wait for the end of a call, and return its result.

    `distributed`: Dask's module for clusters. `future`: the call's future in Dask. `address`: address of
    the scheduler, for messages.
    Raises: CliError (the call or the cluster has failed).
    """
    try:
        has_ended, outcome = future.result()
    except distributed.KilledWorker as error:
        why = "several workers were lost during the same call; look at their logs"
        raise CliError(f"--scheduler {address}: {why}") from error
    except (distributed.client.FutureCancelledError, distributed.comm.CommClosedError) as error:
        why = "the scheduler is lost; run the command again, with --results to keep what is finished"
        raise CliError(f"--scheduler {address}: {why}") from error
    except ImportError as error:
        why = f"a worker cannot import kprobefs ({error}); install the same version there"
        raise CliError(f"--scheduler {address}: {why}") from error
    if not has_ended:
        raise CliError(f"--scheduler {address}: {outcome}")
    return pickle.loads(outcome)


def _call(
    packages: Sequence[str], code: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[bool, bytes | str]:
    """Call `function` with `arguments` on a worker.

    Return (True, pickled result), or (False, text about the failure). `code`: digest that `packages` must
    have on the worker. No exception is sent: the process that asked for the call would wait forever for an
    exception that cannot be unpickled.
    """
    host = socket.gethostname()
    try:
        if code_digest(packages) != code:
            return False, f"{host} has another version of kprobefs than this command; install the same there"
        return True, pickle.dumps(function(*arguments))
    except CliError as error:
        return False, f"{host}: {error}"
    except Exception as error:
        _log.exception("a call failed")
        what = traceback.format_exception_only(error)[-1].strip()
        return False, f"a call failed on {host}: {what}; the worker's log has the traceback"


_digests: dict[tuple[str, ...], str] = {}
"""Names of packages -> result of code_digest() for these packages."""


def code_digest(packages: Sequence[str] = PACKAGES) -> str:
    """Return a digest of all files of packages; it changes if their code or their images change."""
    known = _digests.get(tuple(packages))
    if known is not None:
        return known
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for place in spec.submodule_search_locations:
            root = Path(place)
            for file in sorted(path for path in root.rglob("*") if path.is_file()):
                if "__pycache__" not in file.parts:
                    digest.update(f"{package}/{file.relative_to(root)}\0".encode())
                    digest.update(hashlib.sha256(file.read_bytes()).digest())
    return _digests.setdefault(tuple(packages), digest.hexdigest())
