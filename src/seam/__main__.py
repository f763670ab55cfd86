# SPDX-License-Identifier: Apache-2.0
"""Runs the command: `python -m seam`."""

import sys

from seam.cli import main

if __name__ == "__main__":
    sys.exit(main())
