# SPDX-License-Identifier: Apache-2.0
"""Stands in for the router."""
