"""The optimizer's fixtures."""

from tests.kprobes.optimizer.conftest import boot, probed

__all__ = ["boot", "probed"]
