# SPDX-License-Identifier: Apache-2.0
"""Stands in for Mooncake, which the lab looks for before it starts anything."""
