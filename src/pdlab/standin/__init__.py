# SPDX-License-Identifier: Apache-2.0
"""Where a CPU server finds `sgl_kernel` when the real one is not installed."""

import subprocess
import sys
from pathlib import Path

from pdlab.errors import LabError

_HERE = Path(__file__).resolve().parent
_PROBE = (
    "import importlib.util as u; s = u.find_spec('sgl_kernel'); print(s.origin or '' if s else '')"
)


def python_path(interpreter: str | None = None) -> Path | None:
    """The directory to put on PYTHONPATH, or None when `interpreter` has the real `sgl_kernel`.

    `interpreter` is the Python that will run the server (default: this one). The stand-in itself,
    should the environment already name it, does not count as real. Raises LabError when the
    interpreter cannot be run.
    """
    python = interpreter or sys.executable
    try:
        probe = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        raise LabError(f"cannot ask {python} for sgl_kernel: {detail.strip()}") from error
    origin = probe.stdout.strip()
    real = bool(origin) and not Path(origin).resolve().is_relative_to(_HERE)
    return None if real else _HERE
