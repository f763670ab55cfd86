# SPDX-License-Identifier: Apache-2.0
"""A tree says at start which patches it carries, and refuses to start as anything else."""

import hashlib
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from sglang.srt import pd_series
from sglang.srt.entrypoints import engine
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


class Announced(Exception):
    """Raised in place of everything a launch does after it announced itself."""


def stamp(patch="a-patch", release="0.5.23", adds=None, lines=None):
    return pd_series.Stamp(patch, release, adds or {}, lines or {})


class TestThisTree(unittest.TestCase):
    def test_the_tree_carries_its_own_stamp(self):
        self.assertIn("series-stamp", [found.patch for found in pd_series.carried()])

    def test_the_tree_is_what_its_stamps_say(self):
        with self.assertLogs(pd_series.logger, "INFO") as log:
            pd_series.announce()
        self.assertEqual(len(log.output), 1)
        self.assertIn("series-stamp", log.output[0])

    def test_a_launch_announces_the_series_once_logging_works(self):
        launch = getattr(engine.Engine, "_launch_subprocesses", None) or engine._launch_subprocesses
        steps = []
        with (
            mock.patch.object(engine, "configure_logger", lambda *_, **__: steps.append("logger")),
            mock.patch.object(pd_series, "announce", side_effect=Announced),
            self.assertRaises(Announced),
        ):
            launch(*[mock.MagicMock()] * (1 if _takes_one_argument(launch) else 4))
        self.assertEqual(steps, ["logger"])


class TestStamp(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.sglang = Path(directory.name)
        self.module = self.sglang / "srt" / "ours.py"
        self.module.parent.mkdir()
        self.module.write_text("ours = 1\n")
        self.stamp = stamp(
            adds={"python/sglang/srt/ours.py": hashlib.sha256(b"ours = 1\n").hexdigest()},
            lines={"python/sglang/srt/theirs.py": {"hook()": 2}},
        )
        self.theirs = self.sglang / "srt" / "theirs.py"
        self.theirs.write_text("if a:\n    hook()\nhook()\n")

    def test_an_untouched_tree_has_no_fault(self):
        self.assertEqual(self.stamp.faults(self.sglang), [])

    def test_other_edits_in_a_hooked_file_are_nobodys_business(self):
        self.theirs.write_text("a = 1\nif a:\n        hook()\nhook()\nhook()\n")
        self.assertEqual(self.stamp.faults(self.sglang), [])

    def test_a_lost_hook_is_named(self):
        self.theirs.write_text("hook()\n")
        (fault,) = self.stamp.faults(self.sglang)
        self.assertIn("theirs.py lost the line 'hook()'", fault)

    def test_a_changed_module_is_named(self):
        self.module.write_text("ours = 2\n")
        (fault,) = self.stamp.faults(self.sglang)
        self.assertIn("ours.py was changed", fault)

    def test_missing_files_are_named(self):
        self.module.unlink()
        self.theirs.unlink()
        self.assertEqual(len(self.stamp.faults(self.sglang)), 2)


class TestAnnounce(unittest.TestCase):
    def setUp(self):
        gone = stamp(adds={"python/sglang/srt/gone.py": "0" * 64})
        self.enterContext(mock.patch.object(pd_series, "carried", lambda: [gone]))

    def test_a_changed_tree_refuses_to_start(self):
        with self.assertRaisesRegex(pd_series.TreeChanged, r"a-patch: .*gone\.py is missing"):
            pd_series.announce()

    def test_an_edited_tree_starts_when_told_to_and_says_so(self):
        with (
            mock.patch.dict(os.environ, {pd_series.ALLOW_EDITED: "1"}),
            self.assertLogs(pd_series.logger, "WARNING") as log,
        ):
            pd_series.announce()
        self.assertIn("(edited)", log.output[0])


class TestDescribe(unittest.TestCase):
    def test_release_and_patches_stand_in_one_line(self):
        said = pd_series.describe([stamp("b"), stamp("c")])
        self.assertEqual(said, "release 0.5.23, 2 patches: b, c")

    def test_a_patch_made_for_another_release_says_so(self):
        said = pd_series.describe([stamp("a"), stamp("b"), stamp("c", "0.5.11")])
        self.assertIn("c (made for 0.5.11)", said)

    def test_a_tree_without_stamps_says_so(self):
        self.assertEqual(pd_series.describe([]), "no patches")


def _takes_one_argument(launch):
    """Up to 0.5.8 a launch took the server arguments alone; the entry points came later."""
    code = launch.__code__ if hasattr(launch, "__code__") else launch.__func__.__code__
    return "init_tokenizer_manager_func" not in code.co_varnames[: code.co_argcount]


if __name__ == "__main__":
    unittest.main()
