"""Sections of a report on a sweep: its runs, and the laws of each architecture or why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lib.reports.page import Block, Section, curve, section, table
from lib.scaling.judge import TITLES, FittedLaw, Verdict
from lib.scaling.laws import intervals
from lib.scaling.noise import sizes_by_tokens
from lib.scaling.results import ScalingResults, by_architecture, points_of
from lib.scaling.sweep import failures

KNOWN = "entropy rate (known)"  # a baseline that is no rival
_HEADS = ("architecture", "d", "l", "N", "D", "seed", "loss", "perplexity")
_DRAWN = 40  # points of a law


def sections(
    results: Sequence[ScalingResults],
    verdicts: Mapping[str, Verdict],
    source: str,
    lines: Mapping[str, float],
) -> list[Section]:
    """Return the sections of a report. source: of the data. lines: baseline losses in nats by name."""
    groups, failed = by_architecture(results), failures(results)
    rows = [_row(result) for group in groups.values() for result in group]
    none = f"{len(failed)} of {len(results)} runs have no valid result and are in no fit: {'; '.join(failed)}"
    runs = section(
        "Runs of the sweep",
        f"Data: {source}",
        f"Losses in nats per {results[0].perplexity_unit}, of the validation part. N: parameters without "
        "embeddings. D: tokens.",
        none if failed else "",
        table("Runs", _HEADS, rows),
        table("Baselines", ("baseline", "nats"), [(name, f"{nats:.4f}") for name, nats in lines.items()]),
    )
    return [runs, *(_architecture(groups[arch], verdicts[arch], lines) for arch in verdicts)]


def _row(each: ScalingResults) -> tuple[str, ...]:
    sizes = (f"{size:,}" for size in (each.num_params_nonembedding, each.tokens))
    shape = str(each.d_model), str(each.n_layers)
    return each.arch, *shape, *sizes, str(each.seed), f"{each.val_nats:.4f}", f"{each.final_perplexity:.4f}"


def _architecture(results: Sequence[ScalingResults], verdict: Verdict, lines: Mapping[str, float]) -> Section:
    best = min(each.val_nats for each in results)
    better = ", ".join(name for name, nats in lines.items() if nats < best and name != KNOWN)
    growth, isoflop = verdict.growth, f"isoFLOP: insufficient: {verdict.growth.reason}"
    if growth.exponent is not None and growth.interval is not None:
        figures = f"{growth.exponent:.2f} [{growth.interval[0]:.2f}, {growth.interval[1]:.2f}]"
        isoflop = f"isoFLOP: optimal N grows as C^{figures} (95 % of draws of the seed noise)"
    findings = [(TITLES[name], line) for name, law in verdict.fits.items() for line in _findings(law, lines)]
    return section(
        f"Scaling of {results[0].arch}",
        f"{results[0].arch}: {verdict.sentence()}.",
        f"Its best loss, {best:.4f}, is beaten by {better}." if better else "",
        isoflop,
        *(f"Note: {warning}" for warning in verdict.warnings),
        _chart(results, verdict),
        table("Laws", ("law", "finding"), findings),
    )


def _chart(results: Sequence[ScalingResults], verdict: Verdict) -> Block:
    """Return the losses by size for each amount of data, and the laws at the most data."""
    drawn, rows = dict[str, list[tuple[float, float]]](), sizes_by_tokens(points_of(results))
    for tokens, row in rows.items():
        drawn[f"{tokens:,.0f} tokens"] = [(each.parameters, each.loss) for each in row]
    most, row = [*rows.items()][-1]
    across = np.geomspace(row[0].parameters, row[-1].parameters, _DRAWN).tolist()
    for name, fitted in verdict.fits.items():
        if (law := fitted.law) is not None and len(row) > 1:
            refused = " (insufficient)" if fitted.reasons else ""
            drawn[TITLES[name] + refused] = [(n, law.loss(parameters=n, tokens=most)) for n in across]
    note = "Laws are drawn at the most data; the last one has the amount of data as a variable."
    x = "parameters without embeddings"
    return curve("Loss by size, in nats", drawn, x=x, note=note, controls=True)


def _findings(fitted: FittedLaw, lines: Mapping[str, float]) -> Iterator[str]:
    """Format the reasons against a law, then its figures with their intervals."""
    if fitted.reasons:
        yield f"insufficient: {'; '.join(fitted.reasons)}"
    if fitted.law is None or not fitted.samples:
        return
    ends = intervals(fitted.samples, level=0.95)
    figures = (
        f"{name} {value:.4g} [{ends[name][0]:.4g}, {ends[name][1]:.4g}]"
        for name, value in fitted.law.figures().items()
    )
    yield f"{', '.join(figures)} (95 % of bootstraps)"
    if (held := fitted.holdout) is not None:
        yield (
            f"held out from 6 N D = {held.flops:.1e} on: error {held.error:.2%} "
            f"(bias {held.bias:+.2%}), {held.covered:.0%} of {held.points} points inside the 90 % band"
        )
    known = lines.get(KNOWN)
    if known is not None and "E" in ends:
        inside = ends["E"][0] <= known <= ends["E"][1]
        yield f"the known floor {known:.4f} is {'inside' if inside else 'outside'} the interval of E"
