# SPDX-License-Identifier: Apache-2.0
"""What a patch begins as: a message, a module and a test that wait to be filled in."""

from __future__ import annotations

from collections.abc import Iterator

from seam.faults import Fault, seam_path
from seam.seamfile import Patch

MESSAGE = """\
{area}: what {name} does, in one line

Why, in a few lines: what is wrong without it, and what is right with it.

Constraint: what bound the design
Rejected: an alternative | why not
Confidence: low
Scope-risk: narrow
Directive: to whoever changes this next
Upstream: the state there
Tested: what was run
Not-tested: what was not
---
"""
MODULE = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"What {word} is, in one sentence.\"\"\"
"""
TEST = """\
# SPDX-License-Identifier: Apache-2.0
\"\"\"What {word} protects, in one sentence.\"\"\"

from __future__ import annotations

import unittest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


class Test{title}(unittest.TestCase):
    def test_property_it_protects(self) -> None:
        self.fail("say what the patch protects")


if __name__ == "__main__":
    unittest.main()
"""


def message(area: str, name: str) -> str:
    """The head of a seam file up to its border; `unfilled` knows what is to be filled in."""
    return MESSAGE.format(area=area, name=name)


def skeleton_files(name: str) -> dict[str, bytes]:
    """The module and the test of a new patch, by their path in the repository."""
    word = name.replace("-", "_")
    title = "".join(part.title() for part in name.split("-"))
    return {
        f"python/sglang/srt/disaggregation/{word}.py": MODULE.format(word=word).encode(),
        f"test/registered/unit/disaggregation/test_{word}.py": TEST.format(
            word=word, title=title
        ).encode(),
    }


def unfilled(patch: Patch) -> Iterator[Fault]:
    """What of a message is still as it began, each at its line."""
    path = seam_path(patch.name)
    began = message("area", patch.name).splitlines()
    if patch.subject.partition(": ")[2] == began[0].partition(": ")[2]:
        yield Fault(path, 1, "fill in the subject")
    if f"\n{began[2]}\n" in patch.message:
        yield Fault(path, 3, "fill in why")
    lines = {line for line in began[4:] if not line.startswith(("Confidence", "Scope-risk"))}
    for trailer in patch.trailers:
        if f"{trailer.key}: {trailer.value}" in lines:
            yield Fault(path, trailer.line, f"fill in {trailer.key}")
