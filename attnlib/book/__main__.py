"""`python -m attnlib.book`."""

import sys

from attnlib.book.build import main

sys.exit(main())
