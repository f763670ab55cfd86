# SPDX-License-Identifier: Apache-2.0
"""What the command prints, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from workshop import MESSAGE, SEAMS, Workshop, git, patch

from seam.cli import main
from seam.errors import SeamError
from seam.faults import Fault
from seam.lint import lint_seams
from seam.series import Series, find_root


def test_series_lists_patches_in_order(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["series"]) == 0
    told = capsys.readouterr().out
    heads = [line.partition(":")[0] for line in told.splitlines() if not line.startswith(" ")]
    assert heads == list(SEAMS)
    assert "adds python/sglang/srt/sales.py" in told and "in   shop.py" in told


def test_check_prints_the_matrix(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split() for line in told[:4]] == [
        ["22", "23"],
        ["count-sales", "x", "x"],
        ["round-total", "x", "x"],
        ["close-till", "x", "x"],
    ]
    assert told[4].startswith("x applied")
    assert main(["check", "0.5.22"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["22"]


def test_check_tells_each_trouble_once_for_all_its_releases(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    seam = workshop.root / "series/close-till.seam"
    seam.write_text(seam.read_text().replace("+ assert item", "- gone($x)\n+ abs($x)"))
    assert main(["check"]) == 1
    told = capsys.readouterr().out
    assert "close-till.seam:13 on 0.5.22 … 0.5.23 (2 releases): no-anchor\n" in told
    assert told.count("  close: nothing reads 'gone($x)'\n") == 1
    assert "last fit" not in told


def test_check_tells_the_last_release_that_fitted(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    seam = workshop.root / "series/close-till.seam"
    seam.write_text(seam.read_text().replace("+++ till.py\n@@ close", "+++ old.py\n@@ gone"))
    assert main(["check"]) == 1
    told = capsys.readouterr().out
    assert told.splitlines()[3].split() == ["close-till", "x", "E"]
    assert told.endswith(
        "close-till.seam:11 on 0.5.23: no-file\n"
        "  none of old.py is in this release\n"
        "  last fit  0.5.22\n"
    )


def test_check_prints_json_for_machines(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True and told["lint"] == []
    assert told["releases"]["0.5.23"]["count-sales"]["outcome"] == "applied"
    seam = workshop.root / "series/close-till.seam"
    seam.write_text(seam.read_text().replace("@@ close", "@@ lock"))
    assert main(["check", "--json", "0.5.23"]) == 1
    told = json.loads(capsys.readouterr().out)
    (error,) = told["releases"]["0.5.23"]["close-till"]["errors"]
    assert (error["kind"], error["line"]) == ("no-scope", 13)
    assert told["ok"] is False


def test_diff_is_what_git_applies(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    checkout = workshop.checkout()
    assert main(["am", str(checkout), "--branch", "ours"]) == 0
    capsys.readouterr()
    assert main(["diff"]) == 0
    patch = tmp_path / "all.diff"
    patch.write_text(capsys.readouterr().out)
    git(checkout, "apply", str(patch))
    git(checkout, "add", "--all")
    assert git(checkout, "write-tree") == git(checkout, "rev-parse", "ours^{tree}")


def test_diff_of_one_patch_is_on_top_of_the_earlier_ones(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "round-total", "--release", "0.5.22"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert "-        self.total = self.total + price" in lines
    assert "+        self.total = round(self.total + price, 2)" in lines
    assert "         sales.count(item)" in lines
    assert told.err == "round-total on 0.5.22: applied\n"


def test_names_may_follow_options(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "0.5.23"]) == 0
    assert list(json.loads(capsys.readouterr().out)["releases"]) == ["0.5.23"]
    for wrong in (["series", "more"], ["check", "--what"], ["nothing"], []):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2


def test_reader_that_stops_reading_is_no_error(workshop: Workshop) -> None:
    run = subprocess.run(
        f"{sys.executable} -m seam diff | true", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in run.stderr and "Error" not in run.stderr


# bad input ---------------------------------------------------------------------------------------


def test_malformed_seam_file_is_named_by_every_verb(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.write("series/close-till.seam", MESSAGE + "+++ till.py\n@@ close\n- a(\n+ b()\n")
    for verb in ("series", "check", "diff", "tree new", "am ."):
        assert main(verb.split()) == 1
        told = capsys.readouterr().err
        assert told == "seam: close-till.seam:13: not Python: 'a(': '(' was never closed\n"


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("series/series", "count-sales\ncount-sales\n", "series/series:2: .* listed above"),
        ("series/series", "Count\n", "series/series:1: 'Count' is no name"),
        ("series/series", "missing\n", "there is no series/missing.seam"),
        ("series/series", "round-total\ncount-sales\n", "needs count-sales, which does not come"),
        ("series/releases.toml", "[[release]\n", "releases.toml: "),
        ("series/releases.toml", "[[release]]\nversion = '1'\n", "releases.toml: KeyError"),
        ("series/close-till.seam", "\udcff", "not UTF-8 at byte 0"),
    ],
)
def test_broken_series_is_one_clear_error(
    workshop: Workshop, path: str, text: str, reason: str
) -> None:
    (workshop.root / path).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SeamError, match=reason):
        Series.load()


def test_series_is_that_of_the_repository_around_the_folder(workshop: Workshop) -> None:
    inner = workshop.root / "python" / "sglang"
    assert find_root(inner) == workshop.root
    assert find_root(workshop.folder) == Path(__file__).resolve().parents[2]


def test_command_runs_as_a_module(workshop: Workshop) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "seam", "check", "0.4"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr == "seam: unknown release '0.4'; supported are: 0.5.22, 0.5.23\n"


# lint --------------------------------------------------------------------------------------------


def linted(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["check", "0.5.23", "--json"]) == 1
    faults = json.loads(capsys.readouterr().out)["lint"]
    return [str(Fault(one["file"], one["line"], one["text"])) for one in faults]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("area: what it does", "What it does", "close-till.seam:1: want a subject"),
        ("area: what it does", "area: what it does.", "close-till.seam:1: want a subject"),
        ("area: what it does", "area: " + "x" * 70, "close-till.seam:1: want a subject"),
        ("Why it is done.\n\n", "", "close-till.seam:1: say why"),
        ("Tested: here\n", "", "close-till.seam: no trailer Tested"),
        ("Tested: here", "Tested: here\nSeen: x", "close-till.seam:10: unknown trailer Seen"),
        ("Confidence: high", "Confidence: some", "close-till.seam:5: Confidence is one of high"),
        ("Scope-risk: narrow", "Scope-risk: no", "close-till.seam:6: Scope-risk is one of narrow"),
        ("Tested: here", "Tested: here\nRejected: x", "close-till.seam:10: want 'Rejected: alt"),
        ("Tested: here", "Tested: test/lab/test_x.py", "close-till.seam:9: names test/lab/test_x"),
    ],
)
def test_lint_of_headers(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], old: str, new: str, fault: str
) -> None:
    workshop.write("series/close-till.seam", SEAMS["close-till"].replace(old, new))
    (told,) = linted(workshop, capsys)
    assert told.startswith(fault)


@pytest.mark.parametrize(
    ("hunk", "reason"),
    [
        ("- return $x  # why\n+ return str($x)", "holds a comment"),
        ('- log("no such item", $x)\n+ abs($x)', "holds words for people"),
        ('- log(f"{item}")\n+ abs(1)', "holds an f-string"),
        ("- abs(1),\n+ (2,)", "ends like a line that goes on"),
    ],
)
def test_lint_of_anchors_that_lean_on_text(hunk: str, reason: str) -> None:
    (fault,) = lint_seams([patch(f"+++ till.py\n@@ close\n{hunk}")])
    assert fault.path == "series/a-patch.seam" and fault.line == 13
    assert reason in fault.text


def test_lint_of_imports_that_take_names(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    seam = SEAMS["count-sales"].replace("srt import sales", "srt.sales import count")
    workshop.write("series/count-sales.seam", seam.replace("sales.count(", "count("))
    (told,) = linted(workshop, capsys)
    assert told.startswith("count-sales.seam:16: import sglang.srt.sales itself and call through")


@pytest.mark.parametrize("line", ["import helper", "from sglang.srt import extra"])
def test_lint_of_files_that_take_from_a_patch_that_is_not_needed(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    adds = "adds test/registered/unit/helper.py\nadds python/sglang/srt/extra.py\n"
    workshop.write("series/close-till.seam", SEAMS["close-till"].replace("+++", adds + "+++"))
    workshop.write("test/registered/unit/helper.py", "")
    workshop.write("python/sglang/srt/extra.py", "")
    test = "test/registered/unit/test_sales.py"
    workshop.write(test, f"def test():\n    {line}\n")
    (told,) = linted(workshop, capsys)
    assert told.startswith(f"{test}:2: imports ") and told.endswith(
        "of close-till, which count-sales does not need: say 'needs: close-till' in its seam file"
    )
    workshop.write(test, f"try:\n    {line}\nexcept ImportError:\n    pass\n")
    assert main(["check", "0.5.23"]) == 0


def test_annotations_of_a_ci_service_name_file_line_and_releases(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.write("python/sglang/srt/nobody.py", "")
    seam = workshop.root / "series/close-till.seam"
    seam.write_text(seam.read_text().replace("@@ close", "@@ lock"))
    assert main(["check", "--json", "--annotations", "github"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert err.splitlines() == [
        "::error file=series/close-till.seam,line=13,title=close-till%3A no-scope on "
        "0.5.22 … 0.5.23 (2 releases)::no lock in till.py",
        "::error file=python/sglang/srt/nobody.py,line=1,title=seam check::no patch adds it",
    ]
    assert main(["check", "0.5.23"]) == 1
    assert "::error" not in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["check", "0.5.23"]) == 1
    assert "::error" in capsys.readouterr().err


def test_lint_of_owners(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    workshop.write("python/sglang/srt/nobody.py", "")
    workshop.write("series/spare.seam", SEAMS["close-till"])
    assert linted(workshop, capsys) == [
        "python/sglang/srt/nobody.py: no patch adds it",
        "spare.seam: not listed in series/series",
    ]


def test_lint_of_files_added_twice_or_missing(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    adds = "---\nadds python/sglang/srt/sales.py\nadds test/registered/unit/test_none.py\n"
    workshop.write("series/close-till.seam", SEAMS["close-till"].replace("---\n", adds))
    assert linted(workshop, capsys) == [
        "close-till.seam: adds test/registered/unit/test_none.py, which does not exist",
        "python/sglang/srt/sales.py: added by more than one patch: count-sales, close-till",
    ]
