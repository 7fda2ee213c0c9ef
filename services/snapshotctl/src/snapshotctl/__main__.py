"""`python -m snapshotctl`."""

import sys

from snapshotctl.main import main

sys.exit(main())
