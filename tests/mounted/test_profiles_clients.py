"""trace-cmd decodes records of all kinds of probes, with the profile of the newest version."""

from __future__ import annotations

import os
import shutil

import pytest

from stress.clients import PROFILES, Clients, probes
from tests.fuse.harness import needs_fuse

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
    pytest.mark.skipif(shutil.which("trace-cmd") is None, reason="trace-cmd isn't installed"),
]


def test_trace_cmd_records_probes_of_the_newest_version() -> None:
    probes(Clients(PROFILES[-1]))
