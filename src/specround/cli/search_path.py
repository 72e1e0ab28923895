"""Modules of the working directory can be named as speculators, as with `python -m`."""

from __future__ import annotations

import os
import sys


def add_working_directory() -> None:
    """Put the working directory at the end of the module search path, behind everything that is installed.

    It stays where it is if it is there already. A working directory that was removed has no modules to offer.
    """
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        return
    if directory not in sys.path:
        sys.path.append(directory)
