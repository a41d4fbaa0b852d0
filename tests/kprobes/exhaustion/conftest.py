"""Fixtures of the optimizer's tests, which the proofs of the patching protocol also use."""

from tests.kprobes.optimizer.conftest import boot, probed

__all__ = ["boot", "probed"]
