# SPDX-License-Identifier: Apache-2.0
"""Makes the directory look like a tree."""
