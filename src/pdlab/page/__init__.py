# SPDX-License-Identifier: Apache-2.0
"""One self-contained page that shows what a comparison measured: no network, no other file."""

from __future__ import annotations

import importlib.util
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from pdlab.errors import LabError

NAME = "index.html"
NEEDS = ("plotly", "jinja2")


def require_packages() -> None:
    """Raise LabError when a package that makes the page is missing."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise LabError(
            f"--html needs {' and '.join(missing)}: pip install 'sglang-pd-series[report]'"
        )


def write(directory: Path, content: Any) -> Path:
    """Write the page of a comparison, as `report.as_json` gives it, and return its path.

    Whole or not at all; LabError when it cannot be written.
    """
    path = directory / NAME
    scratch = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch.write_text(render(content), encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error
    return path


def render(content: Any) -> str:
    """The page as text; the plotting library is in it once."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    from pdlab.page import facts, sections

    here = files(__package__)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((here / "index.html.j2").read_text())
    return template.render(
        headline=facts.headline(content),
        groups=facts.groups(content),
        sections=sections.all_of(content),
        origin=facts.origin(content),
        style=(here / "style.css").read_text(),
        draw=(here / "draw.js").read_text(),
        plotly=get_plotlyjs(),
    )
