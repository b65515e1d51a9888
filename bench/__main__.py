"""`python bench` is `python bench/run.py`; see there."""

from __future__ import annotations

from run import leave, main

if __name__ == "__main__":
    leave(main())
