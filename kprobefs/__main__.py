"""`python -m kprobefs`."""

import sys

from kprobefs.cli import main

sys.exit(main())
