# SPDX-License-Identifier: Apache-2.0
"""Placeholders for what has no CPU stand-in."""

from collections.abc import Callable
from types import ModuleType
from typing import NoReturn


def missing(module: str, name: str) -> Callable[..., NoReturn]:
    """A callable for `module.name` that raises `NotImplementedError` naming it when called.

    SGLang imports many operators that a Llama on a CPU never calls, so the import has to succeed
    and only the call may fail. Raises `AttributeError` for dunder names, which Python itself and
    `importlib` probe for.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def placeholder(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{module}.{name} has no CPU stand-in: the lab covers Llama with EAGLE on a CPU. "
            f"Install SGLang's own sgl_kernel for this device, or write {name} in "
            "pdlab/standin/sgl_kernel."
        )

    placeholder.__name__ = placeholder.__qualname__ = name
    return placeholder


class MissingModule(ModuleType):
    """A submodule of nothing but placeholders."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return missing(self.__name__, name)
