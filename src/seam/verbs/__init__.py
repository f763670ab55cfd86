# SPDX-License-Identifier: Apache-2.0
"""The verbs of `seam`: one module each, imported when its verb is used."""
