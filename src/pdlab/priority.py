# SPDX-License-Identifier: Apache-2.0
"""Who goes first where servers have fewer processor cores than processes.

A scheduler spins, idle or not. With two of them on two cores every other process, the one that
answers HTTP among them, waits for its turn behind one of them, which says nothing about a server.
"""

from __future__ import annotations

import psutil

# As SGLang titles its process; the kernel keeps 15 characters of it.
SCHEDULER = "sglang::schedul"
NICE = 10


def put_schedulers_last(*servers: int) -> int:
    """Give way to all others, from the schedulers of servers by process id; returns how many."""
    children = [child for pid in servers for child in psutil.Process(pid).children(recursive=True)]
    schedulers = [child for child in children if child.name().startswith(SCHEDULER)]
    for scheduler in schedulers:
        scheduler.nice(NICE)
    return len(schedulers)
