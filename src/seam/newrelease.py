# SPDX-License-Identifier: Apache-2.0
"""A release of SGLang that is to be supported: its entry, and what is left to do for it."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections import Counter
from dataclasses import dataclass
from datetime import date
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from seam import matrix
from seam.drift import Sources, drift
from seam.errors import SeamError
from seam.series import Release, Series
from seam.wheels import Wheel

NOTED_IN = ("README.md", "CHANGELOG.md")
"""Files that tell users which releases are supported."""


@dataclass(frozen=True)
class Entry:
    """What releases.toml is to say of a release, read from its wheel."""

    release: Release
    remarks: list[str]
    """What the wheel does not say and somebody has to look at."""

    @property
    def text(self) -> str:
        """The entry as it is written."""
        one = self.release
        pins = "".join(f'    "{pin}",\n' for pin in one.pins)
        return (
            f'[[release]]\nversion = "{one.name}"\nreleased = {one.released}\n'
            f'wheel = "{one.wheel}"\nsha256 = "{one.sha256}"\n'
            f'requires-python = "{one.requires_python}"\ntorch = "{one.torch}"\n'
            f"pins = [\n{pins}]\n"
        )


def read_entry(wheel: Path, like: Release) -> Entry:
    """The entry of a wheel; it pins the packages that `like`, an earlier release, pins.

    A package that the wheel does not pin keeps the earlier version while that is within its range.
    Raises `SeamError` when the file is no wheel of SGLang.
    """
    try:
        version = parse_wheel_filename(wheel.name)[1]
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            said = BytesParser().parsebytes(archive.read(metadata))
            newest = max(info.date_time for info in archive.infolist())
            asked = [Requirement(text) for text in said.get_all("Requires-Dist") or []]
    except (InvalidWheelFilename, InvalidRequirement, zipfile.BadZipFile, ValueError) as error:
        raise SeamError(f"{wheel} is not a wheel of SGLang: {error}") from error
    plain: dict[str, Requirement] = {
        canonicalize_name(one.name): one
        for one in asked
        if one.marker is None or one.marker.evaluate({"extra": ""})
    }
    remarks: list[str] = []
    pins = [_pin(pin, plain, remarks) for pin in like.pins]
    torch = _exact(plain.get(canonicalize_name("torch"))) or like.torch
    release = Release(
        str(version),
        wheel.name,
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        date(*newest[:3]),
        str(said["Requires-Python"] or like.requires_python),
        torch,
        tuple(sorted(pins, key=str.lower)),
    )
    return Entry(release, remarks)


def _pin(earlier: str, asked: dict[str, Requirement], remarks: list[str]) -> str:
    name, _, version = earlier.partition("==")
    wanted = asked.get(canonicalize_name(name))
    exact = _exact(wanted)
    if exact:
        return f"{name}=={exact}"
    if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
        remarks.append(f"{name}: it wants {wanted.specifier}, {version} was taken over: choose one")
    return earlier


def _exact(requirement: Requirement | None) -> str | None:
    """The version that a requirement allows, when it is only one."""
    specifiers = list(requirement.specifier) if requirement else []
    only = len(specifiers) == 1 and specifiers[0].operator == "=="
    return specifiers[0].version if only and "*" not in specifiers[0].version else None


def with_entry(text: str, entry: Entry) -> str:
    """releases.toml with one more entry, where its version belongs."""
    head, *blocks = re.split(r"(?m)^(?=\[\[release\]\])", text)
    versions = [re.search(r'(?m)^version = "(.*)"', block) for block in blocks]
    at = sum(1 for one in versions if one and Version(one[1]) < entry.release.version)
    before, after = blocks[:at], blocks[at:]
    if before:
        before[-1] = before[-1].rstrip("\n") + "\n\n"
    return head + "".join([*before, entry.text + ("\n" if after else ""), *after])


# what is left --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One thing to do for a release; `done` is None where nobody but a person can tell."""

    name: str
    done: bool | None
    told: str
    detail: str = ""


def steps(series: Series, release: Release) -> list[Step]:
    """Everything there is to do for a release that is listed, in order."""
    column = matrix.resolve(series, release)
    failures = matrix.failures(series, {release.name: column})
    bad = [name for name, cell in column.items() if cell.misfits]
    fits = f"{len(column)} patches" if not bad else f"not {', '.join(bad)}: mend their seams"
    names = list(series.releases)
    before = names[max(names.index(release.name) - 1, 0)]
    silent = [name for name in NOTED_IN if not _names(series.root / name, release.name)]
    return [
        Step("listed", True, f"{release.released}, wheel sha256 {release.sha256}"),
        Step("fits", not bad, fits, "\n\n".join(failures)),
        _reading(series, series.release(before), release),
        Step("test", None, f"make test-release R={release.name}"),
        Step(
            "noted", not silent, f"{' and '.join(silent)} must name it" if silent else "for users"
        ),
    ]


def _reading(series: Series, before: Release, release: Release) -> Step:
    with Wheel(before) as old, Wheel(release) as new:
        found = list(drift(series.patches, Sources(before, old), Sources(release, new)))
    counts = Counter(one.patch for one in found)
    told = f"{len(found)} touched scopes changed since {before.name}"
    detail = "\n".join(
        f"seam drift {before.name} {release.name} {patch}  # {count}"
        for patch, count in counts.items()
    )
    return Step("read", None if found else True, told, detail)


def _names(file: Path, release: str) -> bool:
    """Whether a file names a release."""
    text = file.read_text() if file.is_file() else ""
    return re.search(rf"(?<![\w.]){re.escape(release)}(?![\w]|\.\w)", text) is not None
