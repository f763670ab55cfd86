# SPDX-License-Identifier: Apache-2.0
"""The page's plots as Plotly figures without colours: the page gives them those of its scheme.

A trace's `meta` names its tree, which decides the colour; sign and dash differ as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdlab.page.facts import LABELS, Spread
from pdlab.trees import PATCHED, STOCK

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROW_PX, BAR_PX, PANEL_PX, FRAME_PX = 72, 74, 240, 110
COLUMNS = 2
SYMBOLS = {STOCK: "diamond", PATCHED: "circle"}
DASHES = {STOCK: "dash", PATCHED: "solid"}
# Beside its row's middle, in rows; stock above, as in every table.
OFFSETS = {STOCK: -0.17, PATCHED: 0.17}
DECADES = (0.001, 0.01, 0.1, 1, 10)


@dataclass(frozen=True)
class Plot:
    """Plotly's JSON of a figure, and its height in pixels."""

    json: str
    height: int


def ranges(kinds: dict[str, dict[str, Spread | None]], most: int) -> Plot:
    """A mark at each mean and a line from the 10th to the 90th percentile; a row per kind."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label in LABELS:
        known = [(row, by[label]) for row, by in enumerate(kinds.values())]
        points = [(row + OFFSETS[label], each) for row, each in known if each is not None]
        figure.add_scatter(
            name=label,
            meta=label,
            mode="markers+text",
            x=[each.mean for _, each in points],
            y=[row for row, _ in points],
            text=[f"{each.mean:.2f}" for _, each in points],
            # clear of the line through the mark and of the other tree's number
            textposition="top center" if label == STOCK else "bottom center",
            cliponaxis=False,
            error_x={
                "array": [each.high - each.mean for _, each in points],
                "arrayminus": [each.mean - each.low for _, each in points],
                "thickness": 3,
                "width": 0,
            },
            marker={"symbol": SYMBOLS[label], "size": 13},
            customdata=[[each.count, each.low, each.high] for _, each in points],
            hovertemplate="%{x:.2f}, p10 %{customdata[1]:.2f}, p90 %{customdata[2]:.2f}, "
            "%{customdata[0]} requests",
        )
    figure.add_vline(x=most, line={"dash": "dot", "width": 1.5})
    figure.update_xaxes(range=[0.8, most + 0.45], dtick=1, title="tokens accepted per verification")
    figure.update_yaxes(
        range=[len(kinds) - 0.5, -0.5],
        tickvals=list(range(len(kinds))),
        ticktext=[kind.replace(", ", "<br>") for kind in kinds],
        showgrid=False,
        zeroline=False,
    )
    return _plot(figure, FRAME_PX + ROW_PX * len(kinds))


def bars(values: dict[str, dict[str, float]]) -> Plot:
    """Two bars for each scenario."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label in LABELS:
        figure.add_bar(
            name=label,
            meta=label,
            orientation="h",
            y=list(values),
            x=[by[label] for by in values.values()],
            text=[f"{by[label]:,.0f}" for by in values.values()],
            textposition="outside",
            cliponaxis=False,
            marker={"pattern": {"shape": "/" if label == STOCK else "", "solidity": 0.25}},
            hovertemplate="%{x:.0f} tok/s",
        )
    most = max(max(by.values()) for by in values.values())
    figure.update_layout(barmode="group", bargap=0.35, bargroupgap=0.08)
    figure.update_xaxes(title="tokens per second", range=[0, most * 1.12], tickformat=",d")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _plot(figure, FRAME_PX + BAR_PX * len(values))


def distributions(waves: dict[str, dict[str, list[float]]]) -> Plot:
    """The share of all values that are no larger, one panel per wave, all on the same axes."""
    figure = _panels(list(waves))
    for number, by in enumerate(waves.values()):
        for label in LABELS:
            times = by[label]
            figure.add_scatter(
                name=label,
                meta=label,
                legendgroup=label,
                showlegend=number == 0,
                mode="lines",
                line={"shape": "hv", "dash": DASHES[label], "width": 3},
                x=times,
                y=[(place + 1) / len(times) for place in range(len(times))],
                hovertemplate="%{y:.0%} within %{x:.3f} s",
                **_at(number),
            )
    all_times = [each for by in waves.values() for times in by.values() for each in times]
    ends = math.log10(min(all_times) / 1.5), math.log10(max(all_times) * 1.5)
    figure.update_xaxes(
        type="log", title="seconds", range=ends, tickvals=DECADES, ticktext=[*map(str, DECADES)]
    )
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", dtick=0.25)
    return _plot(figure, FRAME_PX + PANEL_PX)


def steps(scenarios: dict[str, dict[str, list[tuple[float, int]]]]) -> Plot:
    """A count over time, one panel per scenario."""
    figure = _panels(list(scenarios))
    for number, by in enumerate(scenarios.values()):
        for label in LABELS:
            figure.add_scatter(
                name=label,
                meta=label,
                legendgroup=label,
                showlegend=number == 0,
                mode="lines",
                line={"shape": "hv", "dash": DASHES[label], "width": 2.5},
                x=[at for at, _ in by[label]],
                y=[count for _, count in by[label]],
                hovertemplate="%{y} rows after %{x:.1f} s",
                **_at(number),
            )
    figure.update_xaxes(title="seconds", rangemode="tozero")
    figure.update_yaxes(title="rows held", rangemode="tozero")
    rows = -(-len(scenarios) // COLUMNS)
    return _plot(figure, FRAME_PX + PANEL_PX * rows + 60 * (rows - 1))


def _panels(titles: list[str]) -> Figure:
    """A grid of panels, filled row by row."""
    from plotly.subplots import make_subplots

    columns = min(COLUMNS, len(titles))
    return make_subplots(
        rows=-(-len(titles) // columns),
        cols=columns,
        subplot_titles=titles,
        horizontal_spacing=0.12,
        vertical_spacing=0.2,
    )


def _at(number: int) -> dict[str, int]:
    return {"row": number // COLUMNS + 1, "col": number % COLUMNS + 1}


def _plot(figure: Figure, height: int) -> Plot:
    fixed: dict[str, Any] = {"fixedrange": True, "automargin": True}
    figure.update_xaxes(**fixed)
    figure.update_yaxes(**fixed)
    figure.update_layout(
        template={"layout": {}},
        height=height,
        margin={"l": 16, "r": 24, "t": 56, "b": 16},
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"},
        hovermode="closest",
        dragmode=False,
    )
    return Plot(figure.to_json(), height)
