# SPDX-License-Identifier: Apache-2.0
"""The command `pdlab`, also as `python -m pdlab`; says so where the lab's packages are missing."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command; the packages it imports are an extra, which `seam` does without."""
    try:
        from pdlab import cli
    except ModuleNotFoundError as missing:
        print(
            f"pdlab: {missing.name} is not installed, and the lab needs it: "
            "pip install 'sglang-pd-series[lab]'",
            file=sys.stderr,
        )
        return 1
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
