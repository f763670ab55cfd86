# SPDX-License-Identifier: Apache-2.0
"""What has to be there before the first server starts, each with the way to get it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from pdlab import standin
from pdlab.errors import LabError
from pdlab.settings import Device

PACKAGES = {
    "sglang": "sglang",
    "sglang_router": "sglang-router",
    "mooncake": "mooncake-transfer-engine (on a CPU: mooncake-transfer-engine-non-cuda)",
}
# What Mooncake's Python module is linked with, and the Debian package that brings it.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}


def check() -> None:
    """Raise LabError for a missing Python package or system library."""
    for module, package in PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise LabError(f"{module} is not installed; make setup installs it ({package})")
    missing = [package for name, package in LIBRARIES.items() if not _loads(name)]
    if missing:
        raise LabError(
            "Mooncake, which moves the KV cache, needs system libraries that are not here; "
            f"install them: apt-get install {' '.join(missing)}"
        )


def standin_path(device: Device) -> tuple[Path, ...]:
    """Where servers find CPU stand-ins for `sgl_kernel`; nothing on a GPU or beside a real one."""
    if device is not Device.CPU:
        return ()
    try:
        path = standin.python_path()
    except RuntimeError as error:
        raise LabError(str(error)) from error
    if path is None:
        return ()
    if not (path / "sgl_kernel" / "__init__.py").is_file():
        raise LabError(
            f"the CPU stand-in operators are missing: {path / 'sgl_kernel'} is not there; "
            "reinstall sglang-pd-series"
        )
    return (path,)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
