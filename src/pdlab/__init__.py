# SPDX-License-Identifier: Apache-2.0
"""The lab: real SGLang servers from a stock or a patched tree, measured side by side."""
