# SPDX-License-Identifier: Apache-2.0
"""Stands in for SGLang where a test is about starting, watching and ending servers."""
