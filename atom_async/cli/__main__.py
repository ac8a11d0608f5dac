"""`python -m atom_async.cli` is `atom-async`."""

import sys

from atom_async.cli import main

sys.exit(main())
