# SPDX-License-Identifier: Apache-2.0
"""Lays a patch series over any supported release of SGLang."""
