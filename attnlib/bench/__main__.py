"""`python -m attnlib.bench`."""

import sys

from attnlib.bench.cli import main

sys.exit(main())
