# SPDX-License-Identifier: Apache-2.0
"""The command `pdlab`: up, run, compare."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pdlab import page, ports, preflight, report, scenarios, trace, trees
from pdlab.errors import Interrupted, LabError
from pdlab.pair import Launcher
from pdlab.progress import Progress
from pdlab.runner import Runner, TreeRun
from pdlab.scenarios.model import Scenario
from pdlab.settings import Device, Role, Settings, read_model
from pdlab.warm import UNWINDING

RELEASE = "0.5.23"
# What a comparison shows in five minutes; the other scenarios are for whoever looks closer.
USUAL = ("parity", "prefix", "pressure", "health")
START_LIMIT_S = 180.0
DEMO_PROMPT_TOKENS = range(5, 45)
TABLE_WIDTH = 110
LOOK_S = 1.0

EPILOG = "exit status: 0 done and right, 1 not, 2 the command line is wrong, 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status. Whatever was started is ended before it returns."""
    given = _parser().parse_args(argv)
    _unwind_on_signals()
    try:
        return int(given.verb(given))
    except LabError as error:
        print(f"pdlab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pdlab: interrupted; all servers are ended", file=sys.stderr)
        return 130
    except Interrupted as interruption:
        return 128 + interruption.signum


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdlab",
        description="Real SGLang servers, prefill and decode, measured stock beside patched.",
        epilog=EPILOG,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(
        run: Callable[[argparse.Namespace], int], name: str, does: str
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=does, description=does, epilog=EPILOG)
        sub.set_defaults(verb=run)
        _add_common(sub)
        return sub

    known = ", ".join(scenarios.SCENARIOS)
    usual = " ".join(USUAL)
    up = verb(_up, "up", "start a pair and leave it running until Ctrl-C")
    up.add_argument("--port", type=int, help="the router's port; a free one by default")
    up.add_argument("--scenario", metavar="NAME", help="with the settings of this scenario")
    run = verb(_run, "run", f"run scenarios on one tree: {known}")
    run.add_argument("scenario", nargs="+", metavar="SCENARIO")
    run.add_argument("--stock-role", choices=[Role.PREFILL.value, Role.DECODE.value],
                     help="serve this role from stock: a fleet half upgraded")  # fmt: skip
    compare = verb(_compare, "compare", f"run scenarios on stock and on the patched tree: {known}")
    compare.add_argument("scenario", nargs="*", metavar="SCENARIO", default=USUAL,
                         help=f"{usual} by default")  # fmt: skip
    for sub in (run, compare):
        sub.add_argument(
            "--rounds", type=_count, default=1, help="medians of this many (default 1)"
        )
        sub.add_argument("--seconds", type=_seconds, metavar="N",
                         help="send the waves again until so many have passed")  # fmt: skip
        sub.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
        sub.add_argument("--trace", type=Path, metavar="FILE",
                         help="write the way of each request, for Perfetto")  # fmt: skip
    compare.add_argument("--html", type=Path, metavar="DIR",
                         help=f"write a page that shows it all, DIR/{page.NAME}")  # fmt: skip
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    tree = parser.add_argument_group("what is served")
    which = tree.add_mutually_exclusive_group()
    which.add_argument("--stock", action="store_true", help="SGLang without the series")
    which.add_argument("--tree", type=Path, metavar="DIR", help="a tree that seam built")
    tree.add_argument("--release", default=RELEASE, metavar="R", help=f"default {RELEASE}")
    tree.add_argument("--device", choices=[each.value for each in Device], default="cpu")
    tree.add_argument("--model", type=Path, metavar="PATH", help="a model in place of the fixture")
    tree.add_argument("--draft", type=Path, metavar="PATH", help="its EAGLE draft")
    tree.add_argument("--fixture", metavar="NAME", help="tiny or wide, for all scenarios")
    tree.add_argument("--topk", type=_count, metavar="N", help="branches of the draft tree")
    tree.add_argument("--page-size", type=_count, metavar="N", help="tokens in a page of KV cache")
    tree.add_argument("--layered-draft", action="store_true", default=None,
                      help="a draft of one layer per step, each with its own KV")  # fmt: skip
    how = parser.add_argument_group("how")
    how.add_argument("--timeout", type=_seconds, default=START_LIMIT_S, metavar="SECONDS",
                     help=f"for a server to get ready (default {START_LIMIT_S:g})")  # fmt: skip
    how.add_argument("--build", type=Path, default=Path("build"), metavar="DIR",
                     help="where trees, fixtures and logs go (default build)")  # fmt: skip
    how.add_argument("--keep-logs", action="store_true", help="also when all went well")
    how.add_argument("--cold", action="store_true",
                     help="an interpreter of its own for every server, as on a GPU")  # fmt: skip


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _up(given: argparse.Namespace) -> int:
    if given.port is not None:
        ports.require(given.port)
    chosen = scenarios.choose([given.scenario]) if given.scenario else []
    settings = _adjusted(chosen[0].settings if chosen else Settings(), given)
    with _session(given) as session:
        tree = session.tree()
        model = session.runner.model_of(settings)
        session.runner.launcher.warm_up(tree)
        with session.runner.launcher.pair(tree, settings, model, given.port) as pair:
            session.say(f"serving {tree.describe()}, {settings.describe()}")
            for server in pair.servers:
                session.say(f"{server.process.name:<8} {server.url}  log {server.process.log}")
            print(_curl(pair.url, model.has_tokenizer), flush=True)
            session.say("Ctrl-C ends all of them")
            while True:
                pair.require_alive()
                time.sleep(LOOK_S)


def _run(given: argparse.Namespace) -> int:
    chosen = _chosen(given)
    with _session(given) as session:
        tree = session.tree()
        if given.stock_role:
            session.runner.others[Role(given.stock_role)] = session.stock(tree.release)
        runs = session.runner.run([tree], chosen)
        console = Console(width=TABLE_WIDTH, highlight=False)
        console.print(_title(runs[0]), soft_wrap=True)
        if given.stock_role:
            console.print(f"[bold]{given.stock_role}[/] runs from stock")
        console.print()
        console.print(report.table(runs[0]))
        return session.finish(given, runs, [])


def _compare(given: argparse.Namespace) -> int:
    if given.stock:
        raise LabError("compare runs stock beside a tree; leave --stock out")
    chosen = _chosen(given)
    with _session(given) as session:
        patched = session.tree()
        stock = session.stock(patched.release)
        runs = session.runner.run([stock, patched], chosen)
        compared = report.rows(*runs)
        console = Console(width=TABLE_WIDTH, highlight=False)
        for run in runs:
            console.print(_title(run), soft_wrap=True)
        console.print()
        console.print(report.comparison(compared))
        console.print(f"\n{report.summary(compared)}")
        return session.finish(given, runs, compared)


@dataclass
class _Session:
    given: argparse.Namespace
    runner: Runner

    def say(self, text: str) -> None:
        self.runner.progress.say(text)

    def tree(self) -> trees.Tree:
        """The tree that the command line names; LabError when it cannot do what is asked of it."""
        tree = self._named()
        if self.runner.trace:
            trace.require_patch(tree)
        return tree

    def _named(self) -> trees.Tree:
        if self.given.tree:
            return trees.existing(self.given.tree, trees.PATCHED, build=self.given.build)
        if self.given.stock:
            return self.stock(self.given.release)
        with self.runner.progress.step(f"tree of SGLang {self.given.release} with the series"):
            return trees.patched(self.given.release, self.given.build)

    def stock(self, release: str) -> trees.Tree:
        """The tree to compare with."""
        with self.runner.progress.step(f"stock SGLang {release}"):
            return trees.stock(release, self.given.build, self.runner.launcher.device)

    def finish(
        self,
        given: argparse.Namespace,
        runs: Sequence[TreeRun],
        compared: Sequence[report.Row],
    ) -> int:
        """Write what was asked for; the exit status says whether the last tree was right."""
        html = getattr(given, "html", None)
        content = report.as_json(sys.argv, runs, compared) if given.json or html else None
        if given.json:
            report.write(given.json, content)
            self.say(f"written: {given.json}")
        if self.runner.trace:
            report.write(given.trace, self.runner.trace.content(sys.argv), indent=None)
            self.say(f"written, to open in Perfetto: {given.trace}")
        if html:
            self.say(f"the page to look at: {page.write(html, content)}")
        for line in runs[-1].broken:
            print(f"pdlab: {runs[-1].tree.label}: {line}", file=sys.stderr)
        return int(bool(runs[-1].broken))


@contextmanager
def _session(given: argparse.Namespace) -> Iterator[_Session]:
    """Everything a verb needs; logs are kept when it fails, or when they were asked for."""
    if given.draft and not given.model:
        raise LabError("--draft goes with --model")
    _require_outputs(given)
    device = Device(given.device)
    if device is Device.CUDA and not given.model:
        raise LabError("--device cuda needs --model PATH: the fixtures are for the CPU")
    model = read_model(given.model, given.draft) if given.model else None
    if given.tree:
        trees.existing(given.tree, trees.PATCHED)
    preflight.check()
    given.build = given.build.resolve()
    logs = given.build / "lab" / time.strftime("%Y%m%d-%H%M%S")
    traced = trace.Collector(logs / "trace") if getattr(given, "trace", None) else None
    more = traced.environment() if traced else None
    keep = True
    try:
        with Launcher(device, given.timeout, logs, given.cold, more) as launcher:
            runner = Runner(
                launcher,
                Progress(),
                given.build / "fixtures",
                model,
                getattr(given, "rounds", 1),
                occupancy=bool(getattr(given, "html", None)),
                trace=traced,
            )
            yield _Session(given, runner)
        keep = given.keep_logs
    except KeyboardInterrupt:
        keep = given.keep_logs
        raise
    finally:
        if not keep:
            shutil.rmtree(logs, ignore_errors=True)
        elif any(logs.glob("*")):
            print(f"logs: {logs}", file=sys.stderr)


def _require_outputs(given: argparse.Namespace) -> None:
    """Raise LabError, before anything is started, for a file that could not be written."""
    html = getattr(given, "html", None)
    if html:
        page.require_packages()
    for path in (getattr(given, "json", None), getattr(given, "trace", None)):
        if path:
            report.require_writable(path)
    if html:
        report.require_writable(html / page.NAME)


def _chosen(given: argparse.Namespace) -> list[Scenario]:
    return [
        replace(
            scenario,
            settings=_adjusted(scenario.settings, given),
            lasts_s=given.seconds or scenario.lasts_s,
        )
        for scenario in scenarios.choose(given.scenario)
    ]


def _adjusted(settings: Settings, given: argparse.Namespace) -> Settings:
    """The settings with what the command line says in their place."""
    changes = {
        name: getattr(given, name)
        for name in ("fixture", "topk", "page_size", "layered_draft")
        if getattr(given, name) is not None
    }
    return replace(settings, **changes)


def _title(run: TreeRun) -> str:
    return f"[bold]{run.tree.label}[/] {run.tree.describe()}"


def _curl(url: str, text: bool) -> str:
    """A request to paste into a shell."""
    prompt = {"text": "The capital of France is"} if text else {"input_ids": [*DEMO_PROMPT_TOKENS]}
    body = {**prompt, "sampling_params": {"max_new_tokens": 32, "temperature": 0}}
    return f"curl -s {url}/generate -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def _unwind_on_signals() -> None:
    """The first signal unwinds; later ones must not disturb the ending of servers."""

    def once(error: Callable[[int], BaseException], signum: int) -> None:
        def handle(*_: object) -> None:
            for each in UNWINDING:
                signal.signal(each, signal.SIG_IGN)
            raise error(signum)

        signal.signal(signum, handle)

    once(lambda _: KeyboardInterrupt(), signal.SIGINT)
    once(Interrupted, signal.SIGTERM)
    once(Interrupted, signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main())
