# SPDX-License-Identifier: Apache-2.0
"""The real releases: places are found through moves and renames, and this series lies clean."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from workshop import assert_as_parsed, git, patch

from seam import matrix, stamp
from seam.cli import main
from seam.layer import Layer, Outcome, PatchResult
from seam.seamfile import Patch
from seam.series import Series
from seam.source import Source
from seam.wheels import Wheel, is_cached

ROOT = Path(__file__).resolve().parents[2]
SERIES = Series.load(ROOT)
FEW = ("0.5.6.post2", "0.5.9", "0.5.11", "0.5.12.post1", "0.5.19", "0.5.23")


def wheel(name: str) -> Wheel:
    """A release's wheel; the test is skipped where it would have to be fetched."""
    release = SERIES.release(name)
    if not is_cached(release):
        pytest.skip(f"{release.wheel} is not in the cache; `seam check` fetches it")
    return Wheel(release)


OWNER = patch(
    """\
    +++ disaggregation/decode.py
    @@ DecodeTransferQueue.pop_transferred
      for i in indices_to_remove:
    - self.req_to_metadata_buffer_idx_allocator.free($idx)
    + print(self, self.queue[i], $idx)

    @@? DecodeTransferQueue._do_release
    - self.req_to_metadata_buffer_idx_allocator.free($idx)
    + print(self, decode_req, $idx)

    ! self.req_to_metadata_buffer_idx_allocator.free($*_)
    """,
    "owner",
)
NO_CLONE = patch(
    """\
    +++ disaggregation/utils.py
    @@ MetadataBuffers.get_buf
    - self.output_topk_p[$i].clone()
    + self.output_topk_p[$i]

    - self.output_topk_index[$i].clone()
    + self.output_topk_index[$i]
    """,
    "no-clone",
)
GATE = patch(
    """\
    +++ managers/scheduler.py
    @@ Scheduler.process_input_requests
      for recv_req in recv_reqs:
    + print(self, recv_req)
      if is_health_check_generate_req($r) and $*_:
    """,
    "gate",
)
MOVED = patch(
    """\
    +++ managers/scheduler_components/batch_result_processor.py | managers/scheduler_output_processor_mixin.py
    @@ SchedulerBatchResultProcessor.process_batch_result_prebuilt
    - release_kv_cache($req, self.tree_cache, $*rest)
    + print(self, $req, $*rest)
    @@ or SchedulerOutputProcessorMixin.process_batch_result_prebuilt
    - release_kv_cache($req, self.tree_cache, $*rest)
    + print(self, $req, $*rest)
    """,  # noqa: E501
    "moved",
)


def lay(name: str, patches: Iterable[Patch]) -> list[PatchResult]:
    """Lay patches over a release."""
    with wheel(name) as pristine:
        return Layer(pristine, name, SERIES.overlay).lay(patches)


@pytest.mark.parametrize("release", FEW)
def test_places_are_found_through_moves_and_renames(release: str) -> None:
    results = lay(release, [OWNER, NO_CLONE, GATE, MOVED])
    older = SERIES.release(release).version < SERIES.release("0.5.12.post1").version
    applied, no_clone = Outcome.APPLIED, Outcome.PRESENT if older else Outcome.APPLIED
    assert [one.outcome for one in results] == [applied, no_clone, applied, applied]


def test_post_condition_sees_the_place_that_a_release_brought() -> None:
    hunks = "\n".join(line for line in SEAM_OF_OWNER if "_do_release" not in line)
    (old,) = lay("0.5.12.post1", [patch(hunks)])
    (new,) = lay("0.5.19", [patch(hunks)])
    assert old.outcome is Outcome.APPLIED
    assert (
        new.misfits[0]
        .lines[0]
        .endswith(
            "DecodeTransferQueue._do_release still reads "
            "'self.req_to_metadata_buffer_idx_allocator.free($*_)'"
        )
    )


SEAM_OF_OWNER = """\
+++ disaggregation/decode.py
@@ DecodeTransferQueue.pop_transferred
- self.req_to_metadata_buffer_idx_allocator.free($idx)
+ print(self, self.queue[i], $idx)

! self.req_to_metadata_buffer_idx_allocator.free($*_)
""".splitlines()


class Patched:
    """A release with patches laid over it, taken for pristine."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def read(self, path: str) -> bytes | None:
        return self.layer.read(path)

    def paths(self) -> Iterable[str]:
        return self.layer.pristine.paths()

    def is_executable(self, path: str) -> bool:
        return False


@pytest.mark.parametrize("release", ["0.5.9", "0.5.11", "0.5.23"])
def test_this_series_fits_is_stamped_and_found_present_again(release: str) -> None:
    with wheel(release) as pristine:
        layer = Layer(pristine, release, SERIES.overlay)
        results = layer.lay(SERIES.patches)
        assert layer.misfits == []
        for result in results:
            assert result.stamp is None or not list(result.stamp.broken(layer.read))
        again = Layer(Patched(layer), release, SERIES.overlay).lay(SERIES.patches)
    settled = {Outcome.APPLIED: Outcome.PRESENT}
    for once, twice in zip(results, again, strict=True):
        assert twice.outcome is settled.get(once.outcome, once.outcome), once.patch.name
        assert not twice.changes


@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
def test_trees_that_are_taken_over_are_those_that_would_be_parsed(release: str) -> None:
    for result in lay(release, [*SERIES.patches, OWNER, GATE, MOVED]):
        for file in result.files:
            assert_as_parsed(file.after)


@pytest.mark.parametrize("release", ["0.5.9", "0.5.23"])
def test_bytes_outside_the_edits_stay(release: str) -> None:
    for result in lay(release, [*SERIES.patches, OWNER, GATE, MOVED]):
        for file in result.files:
            kept, last = [], 0
            for edit in sorted(file.edits, key=lambda edit: edit.span):
                kept.append(file.before.raw[last : edit.span.start])
                last = edit.span.end
            kept.append(file.before.raw[last:])
            rest = file.after.raw
            for span in sorted(file.spans, reverse=True):
                rest = rest[: span.start] + rest[span.end :]
            assert rest == b"".join(kept)


def test_every_source_of_a_release_can_be_read_and_cut_by_its_positions() -> None:
    with wheel("0.5.9") as pristine:
        for path in sorted(pristine.paths()):
            if path.startswith("python/sglang/srt/disagg") and path.endswith(".py"):
                content = pristine.read(path)
                assert content is not None
                source = Source(content, path)
                assert source.bom + source.raw == content


def test_one_release_after_another_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    counts: list[int] = []
    release = SERIES.release("0.5.9")
    wheel("0.5.9").archive.close()
    gc.disable()
    try:
        matrix.resolve_all(SERIES, [release] * 3, lambda _: counts.append(len(gc.get_objects())))
    finally:
        gc.enable()
    assert counts[2] - counts[1] < 100 < counts[1]


# whole commands ----------------------------------------------------------------------------------


def test_tree_of_the_newest_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    target = tmp_path / "tree"
    with wheel("0.5.23") as pristine:
        assert main(["tree", str(target), "--release", "0.5.23"]) == 0
        assert git(target, "status", "--porcelain") == ""
        files = {path for path in pristine.paths() if (target / path).is_file()}
        assert files == set(pristine.paths())
    assert stamp.read_all(target / "python")
    assert main(["status", str(target)]) == 0


def test_series_on_a_checkout_and_one_patch_picked_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=empty")
    for release in ("0.5.9", "0.5.11"):
        commit_release(folder, release)
    for release in ("0.5.9", "0.5.11"):
        assert main(["am", str(folder), "--onto", f"v{release}", "--branch", f"on-{release}"]) == 0
    log = git(
        folder, "log", "--reverse", "--format=%(trailers:key=Seam,valueonly)", "v0.5.11..on-0.5.11"
    )
    column = matrix.resolve(SERIES, SERIES.release("0.5.11"))
    applied = [name for name, cell in column.items() if cell.outcome is Outcome.APPLIED]
    assert log.split() == applied
    picked = git(folder, "log", "--format=%H", "--grep=^Seam: suffix-slice$", "on-0.5.11")
    git(folder, "checkout", "--quiet", "--force", "-b", "pick", "v0.5.9")
    git(folder, "cherry-pick", picked)
    changed = git(folder, "show", "--name-only", "--format=", "HEAD")
    assert "python/sglang/srt/disaggregation/decode_schedule_batch_mixin.py" in changed


def commit_release(folder: Path, release: str) -> None:
    """Commit the disaggregation, managers and other sources of a release on a branch of its own."""
    git(folder, "checkout", "--quiet", "--orphan", f"release-{release}")
    with wheel(release) as pristine:
        for path in pristine.paths():
            if path.startswith("python/sglang/srt/") and path.endswith(".py"):
                content = pristine.read(path)
                assert content is not None
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", f"--message=sglang {release}")
    git(folder, "tag", f"v{release}")
    git(folder, "rm", "-r", "--quiet", "--force", ".")
