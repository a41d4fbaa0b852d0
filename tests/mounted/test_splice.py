"""splice(2) and sendfile(2) from raw pages, where a system has its tracefs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FunctionType

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted import splicing
from tests.mounted.system import as_system

pytestmark = [
    pytest.mark.mounted,
    needs_fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting at the system's places needs root"),
]


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
        splicing.texts,
    ],
    ids=lambda case: case.__name__,
)
def test_splicing(case: FunctionType, tmp_path: Path) -> None:
    command = f"cd {tmp_path} && {sys.executable} -m tests.mounted.splicing {case.__name__}"
    as_system(command, tmp_path, "--cpus", "1")
