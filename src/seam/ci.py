# SPDX-License-Identifier: Apache-2.0
"""What `check` found, as lines that a CI service shows beside the code."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from seam.faults import Fault, seam_path

if TYPE_CHECKING:
    from seam.matrix import Trouble


def service() -> str:
    """The CI service that runs us, as far as it is known."""
    return "github" if os.environ.get("GITHUB_ACTIONS") == "true" else "none"


def github(troubles: Iterable[Trouble], faults: Iterable[Fault]) -> Iterator[str]:
    """Workflow commands of GitHub Actions, one for each trouble and fault."""
    for trouble in troubles:
        misfit = trouble.misfit
        title = f"{trouble.patch}: {misfit.kind.value} on {trouble.shown}"
        last = [f"last fit {trouble.last_fit}"] if trouble.last_fit else []
        text = "\n".join([*misfit.lines, *last])
        yield _error(seam_path(trouble.patch), misfit.line, title, text)
    for fault in faults:
        yield _error(fault.path, fault.line, "seam check", fault.text)


def _error(path: str, line: int, title: str, text: str) -> str:
    values = {"file": path, "line": str(max(line, 1)), "title": title}
    fields = ",".join(f"{key}={_property(value)}" for key, value in values.items())
    return f"::error {fields}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
