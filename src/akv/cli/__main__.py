"""``python -m akv.cli``: the command where no script ``akv`` was installed."""

from __future__ import annotations

import sys

from akv.cli import main

sys.exit(main())
