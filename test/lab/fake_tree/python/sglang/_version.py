# SPDX-License-Identifier: Apache-2.0
"""The release that the fake tree claims to be."""

__version__ = version = "9.9.9"
