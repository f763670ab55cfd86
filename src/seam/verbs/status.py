# SPDX-License-Identifier: Apache-2.0
"""Which patches an SGLang carries, and whether it is unchanged."""

from __future__ import annotations

import argparse
import json

from seam.status import status


def run(given: argparse.Namespace) -> int:
    """Print the status; the exit status is 0 when the tree is sound."""
    found = status(given.dir)
    if given.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print("\n".join(found.lines()))
    return int(not found.is_sound)
