# SPDX-License-Identifier: Apache-2.0
"""Runs scenarios on trees: one pair for all scenarios with equal settings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pdlab.control import get
from pdlab.errors import LabError
from pdlab.figures import Figure, median, show
from pdlab.health import HTTP_ONLY_PATH, Probe, probing
from pdlab.occupancy import Sample, kv_in_use, sampling
from pdlab.pair import Launcher, Pair
from pdlab.progress import Progress
from pdlab.scenarios.model import (
    AcceptLengths,
    Observation,
    Reference,
    Scenario,
    Seen,
    Stage,
    Wave,
    WaveResult,
)
from pdlab.settings import Model, Role, Settings, read_model
from pdlab.trace import Collector
from pdlab.traffic import Outcome, Request, send_all
from pdlab.trees import Tree

T = TypeVar("T")
# As many as the aggregated server takes at once; more would only queue.
REFERENCE_CONCURRENCY = 48
LOOK_S = 0.5


@dataclass(frozen=True)
class ScenarioRun:
    """A scenario on one tree: its figures (medians over rounds) and all that was observed."""

    scenario: Scenario
    figures: tuple[Figure, ...]
    rounds: tuple[tuple[WaveResult, ...], ...]
    seconds: float


@dataclass(frozen=True)
class TreeRun:
    """All scenarios on one tree. `commands` are the servers' command lines, by settings."""

    tree: Tree
    scenarios: tuple[ScenarioRun, ...]
    commands: dict[str, tuple[tuple[str, ...], ...]]
    startup_s: tuple[float, ...]

    def of(self, name: str) -> ScenarioRun:
        return next(run for run in self.scenarios if run.scenario.name == name)

    @property
    def broken(self) -> list[str]:
        """What must hold and does not, one line each."""
        return [
            f"{run.scenario.name}: {figure.name} is {show(figure)}, not what it must be"
            for run in self.scenarios
            for figure in run.figures
            if not figure.holds
        ]


@dataclass
class Runner:
    """Everything that runs of one command share.

    `occupancy`: look at what decode holds. `trace`: gather what the servers trace. `others`: the
    roles that run from another tree than the one that is measured.
    """

    launcher: Launcher
    progress: Progress
    fixtures: Path
    model: Model | None = None
    rounds: int = 1
    occupancy: bool = False
    others: dict[Role, Tree] = field(default_factory=dict)
    trace: Collector | None = None
    undisturbed: dict[Settings, AcceptLengths] = field(default_factory=dict)

    def run(self, trees: Sequence[Tree], scenarios: Sequence[Scenario]) -> tuple[TreeRun, ...]:
        """Run the scenarios on each tree, one tree after the other.

        Raises LabError when servers do not start, or end while they are measured.
        """
        self.launcher.warm_up(*trees, *self.others.values())
        references = {
            settings: self._reference(trees[0], settings, scenarios)
            for settings in dict.fromkeys(each.settings.reference() for each in scenarios)
        }
        return tuple(self._run_tree(tree, scenarios, references) for tree in trees)

    def model_of(self, settings: Settings) -> Model:
        """The model that was given, or the fixture that the settings name, written if missing."""
        if self.model:
            return self.model
        from pdlab import fixture  # imports torch, which takes seconds

        if settings.fixture not in fixture.PRESETS:
            known = ", ".join(fixture.PRESETS)
            raise LabError(f"no fixture {settings.fixture}: there are {known}")
        try:
            paths = fixture.write(
                fixture.PRESETS[settings.fixture], self.fixtures / settings.fixture
            )
        except OSError as error:
            raise LabError(f"cannot write the fixture {settings.fixture}: {error}") from error
        return read_model(*paths)

    def _reference(
        self, tree: Tree, settings: Settings, scenarios: Sequence[Scenario]
    ) -> Reference:
        model = self.model_of(settings)
        mine = [each for each in scenarios if each.settings.reference() == settings]
        reference: Reference = {}
        undisturbed = self.undisturbed.setdefault(settings, {})
        waves = [wave for scenario in mine for wave in scenario.waves(model.vocab)]
        if not any(wave.requests for wave in waves):
            return reference
        with (
            self.progress.step("reference: the same requests to an aggregated server"),
            self.launcher.aggregated(tree, settings, model) as server,
        ):
            while requests := _unanswered(waves, reference):
                outcomes = asyncio.run(_watched(server, _answers(server, requests)))
                for request, outcome in zip(requests, outcomes, strict=True):
                    reference[request.key] = outcome.tokens
                    undisturbed[request.key] = outcome.accept_length
                waves = [wave for scenario in mine for wave in scenario.follow_ups(reference)]
        return reference

    def _run_tree(
        self,
        tree: Tree,
        scenarios: Sequence[Scenario],
        references: dict[Settings, Reference],
    ) -> TreeRun:
        runs: dict[str, ScenarioRun] = {}
        commands: dict[str, tuple[tuple[str, ...], ...]] = {}
        startup = []
        for scenario in scenarios:
            if scenario.conduct:
                with self.progress.step(f"{tree.label}: {scenario.name}"):
                    reference = references[scenario.settings.reference()]
                    runs[scenario.name] = self._conducted(tree, scenario, reference)
        for together in _sharing([each for each in scenarios if not each.conduct]):
            settings = together[0].settings
            model = self.model_of(settings)
            about = f"{tree.label}: prefill, decode and router, {settings.describe()}"
            with self.launcher.pair(tree, settings, model, others=self.others) as pair:
                self.progress.say(f"{about}  [dim]{pair.seconds:.1f} s[/]")
                startup.append(pair.seconds)
                commands[settings.describe()] = pair.commands
                for scenario in together:
                    with self.progress.step(f"{tree.label}: {scenario.name}"):
                        reference = references[settings.reference()]
                        run = self._run_scenario(pair, scenario, model, reference)
                    runs[scenario.name] = run
                if self.trace:
                    self.trace.collect(pair, f"{tree.label}, {settings.describe()}")
        ordered = tuple(runs[scenario.name] for scenario in scenarios)
        return TreeRun(tree, ordered, commands, tuple(startup))

    def _conducted(self, tree: Tree, scenario: Scenario, reference: Reference) -> ScenarioRun:
        """A scenario that starts its servers by itself."""
        assert scenario.conduct
        start = time.monotonic()
        settings = scenario.settings
        model = self.model_of(settings)
        stage = Stage(self.launcher, tree, settings, model, self.model_of, self.progress.say)
        figures = median([scenario.conduct(stage, reference) for _ in range(self.rounds)])
        return ScenarioRun(scenario, tuple(figures), (), time.monotonic() - start)

    def _run_scenario(
        self, pair: Pair, scenario: Scenario, model: Model, reference: Reference
    ) -> ScenarioRun:
        start = time.monotonic()
        rounds = []
        for _ in range(1 if scenario.ends_servers else self.rounds):
            rounds.append(_turns(pair, scenario, model, reference, self.occupancy))
        undisturbed = self.undisturbed[scenario.settings.reference()]
        seen = (Observation(waves, reference, undisturbed) for waves in rounds)
        figures = median([scenario.figures(each) for each in seen])
        seconds = time.monotonic() - start
        return ScenarioRun(scenario, tuple(figures), tuple(rounds), seconds)


def _turns(
    pair: Pair, scenario: Scenario, model: Model, reference: Reference, occupancy: bool
) -> tuple[WaveResult, ...]:
    """The results of a scenario's waves, sent once, or as often as begins in its time."""
    start = time.monotonic()
    waves = (*scenario.waves(model.vocab), *scenario.follow_ups(reference))
    results: list[WaveResult] = []
    while not results or time.monotonic() - start < scenario.lasts_s:
        results += (asyncio.run(_watched(pair, _drive(pair, wave, occupancy))) for wave in waves)
    return tuple(results)


def _sharing(scenarios: Sequence[Scenario]) -> list[list[Scenario]]:
    """Scenarios that can use the same servers, one after the other."""
    shared: dict[Settings, list[Scenario]] = {}
    for scenario in scenarios:
        if not scenario.ends_servers:
            shared.setdefault(scenario.settings, []).append(scenario)
    return [*shared.values(), *([scenario] for scenario in scenarios if scenario.ends_servers)]


def _unanswered(waves: Sequence[Wave], reference: Reference) -> list[Request]:
    """The requests of `waves` that the reference does not hold yet, each once."""
    wanted = {
        request.key: replace(request, stream=False, cancel=None)
        for wave in waves
        for request in wave.requests
    }
    return [request for key, request in wanted.items() if key not in reference]


async def _watched(pair: Pair, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ServerDied as soon as a server ends, whatever `work` waits for."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
            pair.require_alive()
        pair.require_alive()
    finally:
        task.cancel()
    return task.result()


async def _answers(server: Pair, requests: Sequence[Request]) -> list[Outcome]:
    outcomes = await send_all(server.url, requests, REFERENCE_CONCURRENCY)
    failed = [outcome.error for outcome in outcomes if not outcome.ok]
    if failed:
        raise LabError(
            f"the aggregated server failed {len(failed)} of {len(outcomes)} requests, "
            f"so there is no reference: {failed[0]}"
        )
    return outcomes


async def _settled(pair: Pair, limit_s: float) -> dict[str, Any]:
    """Internal state of the decode server, as soon as all its metadata rows are free.

    A stock server, which does not count its rows, is not waited for.
    """
    limit = time.monotonic() + limit_s
    while True:
        state = await _internal_state(pair)
        slots = state.get("metadata_slots", {})
        if not slots or slots["free"] == sum(slots.values()) or time.monotonic() > limit:
            return state
        await asyncio.sleep(LOOK_S)


async def _internal_state(pair: Pair) -> dict[str, Any]:
    state: dict[str, Any] = (await get(pair.decode, "/server_info"))["internal_states"][0]
    return state


def _looks(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Looks at rows between two states, by stage and verdict; empty while digests are off."""
    then = before.get("handoff_digests", {})
    return {name: n - then.get(name, 0) for name, n in after.get("handoff_digests", {}).items()}


async def _drive(pair: Pair, wave: Wave, occupancy: bool) -> WaveResult:
    before = await _internal_state(pair) if wave.settle_s else {}
    start = time.monotonic()
    async with AsyncExitStack() as asking:
        probes: list[Probe] = []
        http: list[Probe] = []
        samples: list[Sample] = []
        if wave.probes:
            probes = await asking.enter_async_context(probing(pair.decode.url))
        if wave.http:
            http = await asking.enter_async_context(probing(pair.decode.url, path=HTTP_ONLY_PATH))
        if occupancy and not wave.asks:  # never beside probes, whose answers it would delay
            samples = await asking.enter_async_context(sampling(pair.decode.url))
        if wave.script:
            seen = await wave.script(pair, lambda: _send(pair, wave))
        else:
            seen = Seen(await _send(pair, wave))
        seconds = time.monotonic() - start
    result = WaveResult(
        wave,
        tuple(seen.outcomes),
        (*probes, *seen.probes),
        seconds,
        samples=tuple(samples),
        http=tuple(http),
        counts=seen.counts,
    )
    if not wave.settle_s:
        return result
    after = await _settled(pair, wave.settle_s)
    return replace(
        result,
        slots=dict(after.get("metadata_slots", {})),
        digests=_looks(before, after),
        kv_in_use=await _kv_in_use(pair, wave.settle_s),
    )


async def _kv_in_use(pair: Pair, limit_s: float) -> dict[str, int]:
    """KV tokens in use by server, of those that say so, once there are none or time is up."""
    servers = [server for server in pair.servers if server.url != pair.url]
    used = [await kv_in_use(server.url, limit_s) for server in servers]
    return {
        s.process.name: tokens
        for s, tokens in zip(servers, used, strict=True)
        if tokens is not None
    }


async def _send(pair: Pair, wave: Wave) -> list[Outcome]:
    await asyncio.sleep(wave.idle_s)
    servers = [server.url for server in pair.servers if server.url != pair.url]
    return await send_all(pair.url, wave.requests, wave.concurrency, servers=servers)
