# SPDX-License-Identifier: Apache-2.0
"""A tree whose bodies are put in later is the tree that is parsed at once."""

from __future__ import annotations

import textwrap

import pytest
from workshop import assert_as_parsed, on_shop

from seam.errors import Kind, Misfit
from seam.filelayer import resolve_file
from seam.outline import outline
from seam.source import Source

LONG = "\n".join(f"    total = total + {n}  # a line like any other" for n in range(6))
METHOD = textwrap.indent(LONG, "    ")

HEAD = "def f(total):\n"
DEEP = textwrap.indent(METHOD, "    ")

FOLDED = {
    "a function": f"{HEAD}{LONG}\n    return total\n",
    "a method": f"class C:\n    def f(self, total):\n{METHOD}\n        return total\n",
    "a head of lines": f"def f(\n    total,\n    more: int = 2,\n) -> int:\n{LONG}\n    pass\n",
    "a docstring at the margin": f'{HEAD}    """Say.\n\nSo.\n    """\n{LONG}\n    pass\n',
    "nothing but a docstring": f'{HEAD}    """Say.\n' + "    more\n" * 30 + '    """\n',
    "decorators and async": f"@d(\n    1\n)\nasync {HEAD}{LONG}\n    pass\n",
    "comments at the margin": f"{HEAD}{LONG}\n# so\n    pass\n# and so\n\nx = 1\n",
    "no last newline": f"{HEAD}{LONG}\n    pass",
    "carriage returns": f"x = 1\n{HEAD}{LONG}\n    pass\n".replace("\n", "\r\n"),
    "inner functions": f"{HEAD}    def g(total):\n{METHOD}\n    return g\n\ny = f\n",
}
WHOLE = {
    "a string at the margin": f'{HEAD}{LONG}\n    x = """\ndef g(): pass\n"""\n    return x\n',
    "a continued line": f"{HEAD}{LONG}\n    x = 1 + \\\ntotal\n    return x\n",
    "an open bracket": f"{HEAD}{LONG}\n    x = (\ntotal)\n    return x\n",
    "tabs": HEAD + "\ttotal = total + 1\n" * 20,
    "a form feed": f"{HEAD}{LONG}\n\f    pass\n",
    "a function in a string": f'x = """\n{HEAD}{LONG}\n    pass\n"""\n',
    "a comment behind the last line": f"{HEAD}{LONG}\n    pass  # so\n",
    "a lambda in the head": f"def f(total=lambda:\n    1):\n{LONG}\n    pass\n",
    "a method under a condition": f"class C:\n    if C:\n        def f(self, total):\n{DEEP}\n",
    "a short one": "def f():\n    pass\n",
}


@pytest.mark.parametrize("code", FOLDED.values(), ids=FOLDED)
def test_bodies_left_out_come_back_as_they_were(code: str) -> None:
    assert outline(code.encode())
    assert_as_parsed(Source(code.encode(), "shop.py"))


@pytest.mark.parametrize("code", WHOLE.values(), ids=WHOLE)
def test_what_an_indent_does_not_prove_is_parsed_as_a_whole(code: str) -> None:
    assert outline(code.encode()) is None
    assert_as_parsed(Source(code.encode(), "shop.py"))


def test_a_body_is_put_in_when_its_function_is_asked_for() -> None:
    source = Source((FOLDED["a method"] + FOLDED["a function"]).encode(), "shop.py")
    assert len(source.heads("C.f")[-1].body) == 1
    assert len(source.scope("C.f").body) == 7
    assert len(source.heads("f")[-1].body) == 1
    assert len(source.tree.body[1].body) == 7  # type: ignore[attr-defined]


def test_a_body_that_is_not_python_is_told_by_its_function() -> None:
    code = FOLDED["a function"].replace("total + 3", "total + + +")
    with pytest.raises(Misfit, match="f is not Python") as told:
        Source(code.encode(), "shop.py").scope("f")
    assert told.value.kind is Kind.BROKEN


def test_a_patch_of_one_body_leaves_the_others_out() -> None:
    code = FOLDED["a method"].encode() + FOLDED["a function"].replace("def f", "def g").encode()
    before = Source(code, "shop.py")
    (file,) = on_shop("@@ C.f\n- return total\n+ return -total\n").files
    after = resolve_file(file, before, before).after
    assert len(after.heads("g")[-1].body) == 1
    assert_as_parsed(after)
