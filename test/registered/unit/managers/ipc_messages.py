# SPDX-License-Identifier: Apache-2.0
"""Messages between SGLang's processes, as the release that is tested has them."""

import dataclasses

import msgspec


def build(cls, **values):
    """A message of this release: the given fields, and None for whatever else it requires."""
    if dataclasses.is_dataclass(cls):
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is field.default_factory is dataclasses.MISSING
        ]
    else:
        missing = [field.name for field in msgspec.structs.fields(cls) if field.required]
    return cls(**{**dict.fromkeys(missing), **values})
