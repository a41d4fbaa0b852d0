"""Fixtures of the optimizer's tests."""

from tests.kprobes.optimizer.conftest import boot, probed

__all__ = ["boot", "probed"]
