# SPDX-License-Identifier: Apache-2.0
"""Model classes that SGLang loads beside its own (SGLANG_EXTERNAL_MODEL_PACKAGE)."""
