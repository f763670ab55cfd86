# SPDX-License-Identifier: Apache-2.0
"""`python -m pdlab` is the command `pdlab`."""

import sys

from pdlab.cli import main

sys.exit(main())
