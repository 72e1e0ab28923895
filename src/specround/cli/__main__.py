"""`python -m specround.cli` is `specround`."""

import sys

from specround.cli.entry import main

sys.exit(main())
