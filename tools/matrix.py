# SPDX-License-Identifier: Apache-2.0
"""Write what `seam check` prints into README.md: `make matrix`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"(?<=<!-- make matrix -->\n```text\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Nothing is written when a patch does not fit."""
    run = subprocess.run([sys.executable, "-m", "seam", "check"], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        print(run.stdout)
        return run.returncode
    # Trailing blanks are a terminal's; no tool that tidies text has to leave them alone.
    lines = "".join(f"{line.rstrip()}\n" for line in run.stdout.splitlines())
    README.write_text(BLOCK.sub(lambda _: lines, README.read_text(), count=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
