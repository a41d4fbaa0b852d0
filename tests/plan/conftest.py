"""Fixture of the tests of plans: a kernel with types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.typed_kernel import kernel_with_types


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return kernel_with_types(tmp_path)
