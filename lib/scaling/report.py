"""The verdict of a sweep as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lib.scaling.isoflop import Growth
from lib.scaling.judge import Fitted, Verdict
from lib.scaling.laws import intervals
from lib.scaling.results import ScalingResults
from lib.scaling.sweep import failures

TITLES = {
    "power": "L = A N^-alpha, at the most data",
    "floor": "L = E + A N^-alpha, at the most data",
    "chinchilla": "L = E + A N^-alpha + B D^-beta",
}


def text_of(
    results: Sequence[ScalingResults],
    verdicts: Mapping[str, Verdict],
    source: str,
    lines: Mapping[str, float],
) -> str:
    """lines: losses to compare with, in nats."""
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
        yield from ("", f"{len(failed)} of {len(results)} runs are no result and are in no fit:", *failed)


def _verdicts(
    results: Sequence[ScalingResults], verdicts: Mapping[str, Verdict], lines: Mapping[str, float]
) -> Iterator[str]:
    for arch, verdict in verdicts.items():
        sound = [result for result in results if result.arch == arch and result.status == "done"]
        yield from ("", f"{arch}: {verdict.sentence()}")
        best = min(result.val_nats for result in sound)
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
    return f"optimal N grows as C^{figures} (95 % of draws of the noise of seeds)"


def _fitted(fitted: Fitted, lines: Mapping[str, float]) -> Iterator[str]:
    """Figures only with their intervals, and after what speaks against them."""
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
    if (held := fitted.held_out) is not None:
        yield (
            f"withheld from 6 N D = {held.flops:.1e} on: predicted to {held.error:.2%} "
            f"(bias {held.bias:+.2%}), {held.covered:.0%} of {held.points} points inside the 90 % band"
        )
    known = lines.get("entropy rate (known)")
    if known is not None and "E" in ends:
        inside = ends["E"][0] <= known <= ends["E"][1]
        yield f"the known floor {known:.4f} is {'inside' if inside else 'outside'} the interval of E"
