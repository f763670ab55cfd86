# SPDX-License-Identifier: Apache-2.0
"""Schedulers, and no other process of a server, give way."""

from __future__ import annotations

import os
import subprocess
import sys

from pdlab.priority import NICE, put_schedulers_last

SERVER = """
import subprocess, sys
child = "open('/proc/self/comm', 'w').write(sys.argv[1]); print(flush=True); input()"
for name in ("sglang::scheduler_TP0", "sglang::detokenizer"):
    words = [sys.executable, "-c", f"import sys; {child}", name]
    one = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    one.stdout.readline()
    print(one.pid, flush=True)
input()
"""


def test_schedulers_of_a_server_give_way_and_nothing_else_does() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin and server.stdout
        scheduler, other = (int(server.stdout.readline()) for _ in range(2))
        try:
            assert put_schedulers_last(server.pid) == 1
            given = [os.getpriority(os.PRIO_PROCESS, p) for p in (scheduler, other, server.pid)]
            assert given == [NICE, before, before]
        finally:
            server.stdin.close()
