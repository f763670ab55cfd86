# SPDX-License-Identifier: Apache-2.0
"""A release added to the supported ones, and what is left to do for it."""

from __future__ import annotations

import argparse

from packaging.version import InvalidVersion, Version

from seam import wheels
from seam.errors import SeamError
from seam.newrelease import read_entry, steps, with_entry
from seam.series import Series, store

MARKS = {True: "x", False: " ", None: "?"}
"""How a step stands; only a person can tell whether one marked ? is done."""


def run(given: argparse.Namespace) -> int:
    """Add the release, unless it is there, and print the steps that are left."""
    series = Series.load()
    try:
        version = str(Version(given.version))
    except InvalidVersion as error:
        raise SeamError(f"{given.version!r} is no version: want one like 0.5.24") from error
    if version not in series.releases:
        entry = read_entry(wheels.find(version, series.newest), series.newest)
        path = "series/releases.toml"
        text = with_entry((series.root / path).read_text(), entry)
        store(series.root, {path: text.encode()})
        print(f"written  {path}; compare its sha256 with the one that the publisher shows")
        for remark in entry.remarks:
            print(f"{'':<9}{remark}")
        series = Series.load(series.root)
    found = steps(series, series.release(version))
    for step in found:
        print(f"[{MARKS[step.done]}] {step.name:<8}{step.told}")
        for line in step.detail.splitlines():
            print(f"{'':<12}{line}".rstrip())
    return int(any(step.done is False for step in found))
