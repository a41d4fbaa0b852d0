"""splice(2) and sendfile(2) of raw pages, and copies of files: each test runs one case of splicing.py."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import FunctionType

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted import splicing
from tests.mounted.system import as_system, beside

pytestmark = [pytest.mark.mounted, needs_fuse]

COMMAND = f"{shlex.quote(sys.executable)} -m tests.mounted.splicing"


@pytest.mark.parametrize(
    "case",
    [
        splicing.the_pages_of_read,
        splicing.only_full_pages,
        splicing.without_nonblock,
        splicing.a_poller,
        splicing.copies,
        splicing.inside_of_a_page,
        splicing.pages_set_aside,
        splicing.opened_again,
        splicing.files_of_scratch,
        splicing.sizes,
        splicing.pages_by_tools,
        splicing.readers_of_pages,
        splicing.texts_by_tools,
    ],
    ids=lambda case: case.__name__,
)
def test_splicing(case: FunctionType, tmp_path: Path) -> None:
    beside(f"cd {tmp_path} && {COMMAND} {case.__name__}", tmp_path, "--cpus", "1")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root")
def test_texts_as_a_system(tmp_path: Path) -> None:
    as_system(f"cd {tmp_path} && {COMMAND} {splicing.texts.__name__}", tmp_path, "--cpus", "1")
