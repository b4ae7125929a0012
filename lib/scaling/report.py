"""Plain-text report of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lib.scaling.isoflop import Growth
from lib.scaling.judge import TITLES, FittedLaw, Verdict
from lib.scaling.laws import intervals
from lib.scaling.results import ScalingResults
from lib.scaling.sweep import failures


def format_report(
    results: Sequence[ScalingResults],
    verdicts: Mapping[str, Verdict],
    source: str,
    lines: Mapping[str, float],
) -> str:
    """Return the report. source: of the data. lines: baseline losses in nats by name."""
    return "\n".join([*_runs(results, source, lines), *_verdicts(results, verdicts, lines)]) + "\n"


def _runs(results: Sequence[ScalingResults], source: str, lines: Mapping[str, float]) -> Iterator[str]:
    unit = results[0].perplexity_unit
    yield f"Data: {source}"
    yield f"Losses in nats per {unit}, of the validation part. N: parameters without embeddings. D: tokens."
    yield ""
    yield f"{'architecture':18}    d   l           N          D seed     loss perplexity"
    for result in results:
        if result.status == "done":
            yield (
                f"{result.arch:18} {result.d_model:>4} {result.n_layers:>3} "
                f"{result.num_params_nonembedding:>11,} {result.tokens:>10,} {result.seed:>4} "
                f"{result.val_nats:>8.4f} {result.final_perplexity:>10.4f}"
            )
    yield from ("", *(f"{name}: {nats:.4f} nats" for name, nats in lines.items()))
    if failed := failures(results):
        yield from (
            "",
            f"{len(failed)} of {len(results)} runs have no valid result and are in no fit:",
            *failed,
        )


def _verdicts(
    results: Sequence[ScalingResults], verdicts: Mapping[str, Verdict], lines: Mapping[str, float]
) -> Iterator[str]:
    for arch, verdict in verdicts.items():
        yield from ("", f"{arch}: {verdict.sentence()}")
        best = min(each.val_nats for each in results if each.arch == arch and each.status == "done")
        better = [name for name, nats in lines.items() if nats < best and "known" not in name]
        if better:
            yield f"  Its best loss, {best:.4f}, is beaten by {', '.join(better)}."
        for name, fitted in verdict.fits.items():
            yield f"  {TITLES[name]}"
            yield from (f"    {line}" for line in _fitted(fitted, lines))
        yield f"  isoFLOP: {_growth(verdict.growth)}"
        yield from (f"  Note: {warning}" for warning in verdict.warnings)


def _growth(growth: Growth) -> str:
    if growth.exponent is None or growth.interval is None:
        return f"insufficient: {growth.reason}"
    figures = f"{growth.exponent:.2f} [{growth.interval[0]:.2f}, {growth.interval[1]:.2f}]"
    return f"optimal N grows as C^{figures} (95 % of draws of the seed noise)"


def _fitted(fitted: FittedLaw, lines: Mapping[str, float]) -> Iterator[str]:
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
    known = lines.get("entropy rate (known)")
    if known is not None and "E" in ends:
        inside = ends["E"][0] <= known <= ends["E"][1]
        yield f"the known floor {known:.4f} is {'inside' if inside else 'outside'} the interval of E"
