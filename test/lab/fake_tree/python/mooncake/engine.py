# SPDX-License-Identifier: Apache-2.0
"""The module that a warm interpreter imports ahead."""
