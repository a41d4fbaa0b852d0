"""Prover: proves all places of an image in parts, in this process, in other processes, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import Any, NamedTuple

import tests.own_thread  # noqa: F401 - for kernels in this process
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from kprobefs.measure.cluster import PACKAGES, code_digest, run_on_cluster
from stress.exhaustion.compiled import CompiledProof
from stress.exhaustion.proof import Proof
from stress.exhaustion.sites import SiteProof, fentry_sites
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import optimizable, refused_by_linux

Where = tuple[str, int, int]
"""Symbol, offset and address of a place."""
_PART = 8
"""Number of places in a part. A process proves one part at a time."""
_CODE = (*PACKAGES, "stress", "tests")
"""Packages whose code can change the results of a proof."""


class Proved(NamedTuple):
    """The kernel and the kind of places that a Prover checks, and the number of CPU states at each place."""

    arch: str
    profile: str
    strategy: str | None
    save_regs: str | None
    sites: bool
    states: int
    tactic: str | None
    """Name of the tactic that the jump of each place needs; None for all places."""


class Prover:
    """A kernel, and the proof that runs on it."""

    def __init__(self, proved: Proved) -> None:
        config = MachineConfig(
            arch=proved.arch,
            profile=proved.profile,
            strategy=proved.strategy,
            save_regs=proved.save_regs,
        )
        self._kernel = Kernel(config)
        kind = SiteProof if proved.sites else CompiledProof if proved.save_regs is not None else Proof
        self._tactic = proved.tactic
        only_tactics = proved.strategy is not None
        self._find = fentry_sites if proved.sites else refused_by_linux if only_tactics else optimizable
        with self._kernel.lock:
            self._proof = kind(Probed(self._kernel), proved.states)

    def places(self) -> list[Where]:
        """Return all places that are to be proved."""
        probed = self._proof.probed
        tactic = None if self._tactic is None else Tactic[self._tactic.upper()]
        with self._kernel.lock:
            found = list(self._find(probed))
            if tactic is None:
                return found
            return [place for place in found if tactic in probed.region(place[2]).tactics]

    def check(self, places: Sequence[Where]) -> list[Any]:
        """Prove the places `places`; return the number of runs and the list of problems."""
        proof = self._proof
        runs = proof.runs
        known = len(proof.problems)
        with self._kernel.lock:
            for place in places:
                proof.check(place)
        return [proof.runs - runs, proof.problems[known:]]


_provers: dict[Proved, Prover] = {}
"""Kernel and kind of places -> prover of this process. Only the last prover is kept."""
_one_at_a_time = Lock()
"""Lock around _provers and the use of a prover, because a worker of a cluster has several threads."""


def check_part(proved: Proved, places: Sequence[Where]) -> list[Any]:
    """Prove places with the prover of this process; return the number of runs and the list of problems."""
    with _one_at_a_time:
        prover = _provers.get(proved)
        if prover is None:
            _provers.clear()
            prover = _provers[proved] = Prover(proved)
        return prover.check(places)


class Parts:
    """Places, divided into parts that can be proved in any order."""

    def __init__(self, proved: Proved, places: Sequence[Where]) -> None:
        self._proved = proved
        self._parts = [places[start : start + _PART] for start in range(0, len(places), _PART)]

    def __len__(self) -> int:
        return len(self._parts)

    def places_in(self, number: int) -> int:
        """Return the number of places in a part."""
        return len(self._parts[number])

    @property
    def digest(self) -> str:
        """Digest of everything on which the results depend: the places, the kernel, and the code."""
        decisive = (code_digest(_CODE), self._proved, self._parts)
        return sha256(repr(decisive).encode()).hexdigest()

    def in_processes(self, jobs: int, numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Prove parts in processes; yield the number and the result of each."""
        with ProcessPoolExecutor(jobs) as pool:
            chosen = [self._parts[number] for number in numbers]
            yield from zip(numbers, pool.map(partial(check_part, self._proved), chosen), strict=True)

    def on_cluster(self, scheduler: str, numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Prove parts on the workers of a Dask cluster; yield the number and the result of each.

        Raises: CliError (the cluster fails).
        """
        arguments = [(self._proved, self._parts[number]) for number in numbers]
        for index, result in run_on_cluster(scheduler, check_part, arguments, _CODE):
            yield numbers[index], result
