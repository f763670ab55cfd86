# SPDX-License-Identifier: Apache-2.0
"""The real router (sglang-router), started without what it does not need.

`python -m pdlab.router ARGUMENTS` is `python -m sglang_router.launch_router ARGUMENTS`, except that
the small Python router beside the real one may not import SGLang for its tracing: that takes five
seconds of processor time and is never used.
"""

from __future__ import annotations

import sys

from pdlab.ports import HOST

UNUSED_S = 50
"""Seconds for which the router keeps a connection to a server that no request uses.

A server has to keep it longer. One that ends it first may do so when the router has just sent its
half of a request: the router does not send it again, and waits for the other half.
"""


def arguments(
    port: int, metrics_port: int, prefill: str, bootstrap_port: int, decode: str
) -> tuple[str, ...]:
    """Arguments of a router between one prefill and one decode server, given by their addresses.

    A request is sent once and no worker is taken out of service: whatever goes wrong shows.
    """
    return (
        *("--pd-disaggregation", "--host", HOST, "--port", str(port)),
        *("--prefill", prefill, str(bootstrap_port), "--decode", decode),
        *("--prometheus-host", HOST, "--prometheus-port", str(metrics_port)),
        *("--policy", "round_robin", "--worker-startup-check-interval", "1"),
        *("--disable-retries", "--disable-circuit-breaker", "--log-level", "warn"),
    )


def main() -> None:
    """Run the router with this process's arguments."""
    sys.modules["sglang"] = None  # type: ignore[assignment]
    from sglang_router.launch_router import main as launch

    launch()


if __name__ == "__main__":
    main()
