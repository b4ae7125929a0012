"""A sweep from its plan to its verdict: what `make scaling` does, for programs too."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lib.data import Place, open_dataset
from lib.data.cache import fingerprint
from lib.data.datasets.texts.markov import entropy_bits
from lib.data.ngram_baseline import counting_floors
from lib.data.types import Dataset, TextSpec
from lib.errors import ConfigError, DataError, ToolkitError
from lib.nn.model_code import build_model
from lib.scaling import gate
from lib.scaling.judge import Verdict, judge
from lib.scaling.laws import Point
from lib.scaling.planning import (
    DOCUMENT_LAYERS,
    DOCUMENT_WIDTHS,
    Planned,
    learning_rate,
    names_of,
    wall_seconds,
)
from lib.scaling.results import (
    BLOCK,
    LOWEST_LOSS_OF_TEXT,
    ScalingConfig,
    ScalingResults,
    code_hash,
    corpus_path,
    read,
    write,
)
from lib.scaling.sweep import Sweep, failures

ROOT = Path(__file__).resolve().parents[2]
ALL_RESULTS, LAW, REPORT, PLAN = "all_scaling_results.json", "scaling_law.json", "report.txt", "sweep.json"
_LUCK_NATS = 0.01  # a loss so far below a known entropy rate can be chance: four deviations


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a sweep trains on. reachable: the entropy rate in nats, where it is known."""

    dataset: Dataset
    spec: TextSpec
    sha256: str
    train_tokens: int
    counting: tuple[float, ...]  # nats per token by counting n-grams
    reachable: float | None

    @property
    def lowest(self) -> float:
        """A loss below it is a leak."""
        return LOWEST_LOSS_OF_TEXT if self.reachable is None else self.reachable - _LUCK_NATS


class ScalingExperiments:
    """Trains models of several sizes, one process each, and judges how their loss falls.

    output_dir: where results, laws and pictures are kept; a sweep that was interrupted goes on there.
    Raises ConfigError for a corpus that is not known, or whose files are not there.
    """

    def __init__(
        self,
        output_dir: str | Path = "benchmark_results/scaling",
        *,
        corpus: str = "synthetic",
        workers: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.out, self.corpus_name, self.say = Path(output_dir).resolve(), corpus, say
        path = corpus_path(corpus)
        if path is not None and not path.exists():
            raise ConfigError(f"CORPUS={corpus} is not there", todo="file: takes a file or a folder of texts")
        self.workers = workers or len(os.sched_getaffinity(0))
        self._judged: tuple[dict[str, tuple[Point, ...]], dict[str, Verdict]] = ({}, {})

    @cached_property
    def corpus(self) -> Corpus:
        """Opened, and made if it has to be. Raises ConfigError where it cannot be used."""
        cache = ROOT / "data"
        name, folder = {"synthetic": "markov"}.get(self.corpus_name, self.corpus_name), cache
        if (path := corpus_path(self.corpus_name)) is not None:
            name, folder = "text_files", path
        tokenizer = "char" if name == "markov" else "byte"
        place = Place(
            name=name,
            root=ROOT,
            data_dir=folder,
            cache_dir=cache,
            download=False,
            say=self.say,
            block_size=BLOCK,
            tokenizer=tokenizer,  # type: ignore[arg-type]
        )
        try:
            dataset = open_dataset(place, {})
        except DataError as error:
            raise ConfigError(f"CORPUS={self.corpus_name} cannot be used", why=str(error)) from error
        assert isinstance(dataset.spec, TextSpec)
        floors = counting_floors(dataset, cache_dir=cache, say=self.say)
        return Corpus(
            dataset=dataset,
            spec=dataset.spec,
            sha256=fingerprint(dataset.source),
            train_tokens=dataset.train.size * dataset.spec.block_size,
            counting=tuple(bits * math.log(2) for bits in floors.bits),
            reachable=entropy_bits() * math.log(2) if name == "markov" else None,
        )

    def run_all_experiments(
        self,
        d_model_values: Sequence[int] = DOCUMENT_WIDTHS,
        n_layers_values: Sequence[int] = DOCUMENT_LAYERS,
        epochs: int = 5,
        batch_size: int = 32,
        device: str = "auto",
    ) -> list[ScalingResults]:
        """Every width with every number of layers. Raises ToolkitError if one of them failed."""
        configs = [
            ScalingConfig(
                width,
                layers,
                batch_size=batch_size,
                epochs=epochs,
                device=device,
                lr=learning_rate(width),
                corpus=self.corpus_name,
                data_sha256=self.corpus.sha256,
            )
            for width in d_model_values
            for layers in n_layers_values
        ]
        results = self.run(configs)
        if failed := failures(results):
            raise ToolkitError(f"{len(failed)} of {len(results)} runs are no result", why="; ".join(failed))
        return results

    def check_gate(self, configs: Iterable[ScalingConfig]) -> None:
        """Of every architecture and length. Raises ToolkitError where a model sees the future, or the gate is
        blind."""
        kinds = {(config.arch, config.n_seq): config for config in configs}
        for (arch, length), config in kinds.items():
            name, options = dataclasses.replace(config, d_model=16, n_layers=2).model()
            found = gate.faults(partial(build_model, name, options, seed=1), length=length)
            if found:
                raise ToolkitError(f"{arch} does not pass the gate", why="; ".join(found))
            self.say(f"Gate: {arch} sees the past alone, {length} tokens long, and learns what comes next")
        form = {"form": "upstream", "layers": 2, "width": 16, "ffn_ratio": 2, "dropout": 0.0}
        canary: dict[str, Any] = form | {"allow_leak": True}
        for spec in (gate.spec_of(length) for length in dict.fromkeys(length for _, length in kinds)):
            model = build_model("resnet_bk", canary, spec, seed=1)
            if not list(gate.leaks(model, spec)):
                raise ToolkitError("the gate is blind", why="it lets the original, two-sided block pass")
        self.say("Gate: the original, two-sided block is caught")

    def run(self, configs: Sequence[ScalingConfig]) -> list[ScalingResults]:
        """Train what is not there yet; the results of all, also of those that failed, are kept together.

        Raises ConfigError where a configuration is of another corpus, and where two would have one name.
        """
        self._check_corpora((config.corpus for config in configs), "a configuration")
        names = names_of(configs)
        configs = [dataclasses.replace(config, data_sha256=self.corpus.sha256) for config in configs]
        sweep = Sweep(
            root=ROOT,
            out=self.out,
            spec=self.corpus.spec,
            floor=self.corpus.lowest,
            code=code_hash(ROOT),
            workers=self.workers,
            say=self.say,
        )
        hashes = [config.identity(sweep.code) for config in configs]
        write(self.out / PLAN, json.dumps(dict(zip(names, hashes, strict=True)), indent=1) + "\n")
        results = sweep.run(configs, names)
        content = "[\n" + ",\n".join(result.to_json().rstrip("\n") for result in results) + "\n]\n"
        write(self.out / ALL_RESULTS, content)
        return results

    def results(self) -> list[ScalingResults]:
        """Those of the last sweep; what an earlier one left under the same name is none of them.

        Raises ConfigError where there is none, or one of another corpus, ToolkitError where a run is missing.
        """
        hashes = self._hashes()
        found = {name: read(self.out / f"{name}_results.json") for name in hashes}
        present = [result for name, result in found.items() if result and result.config_hash == hashes[name]]
        if missing := [name for name, result in found.items() if result not in present]:
            raise ToolkitError(
                f"{len(missing)} of {len(hashes)} runs are missing: {missing[0]} ...",
                todo="make scaling goes on",
            )
        self._check_corpora((result.config["corpus"] for result in present), f"the sweep in {self.out}")
        return present

    def _hashes(self) -> dict[str, str]:
        """Of the configurations of the last sweep, by the names of their results."""
        none = ConfigError(f"there is no sweep in {self.out}", todo="make scaling makes one")
        try:
            hashes = json.loads((self.out / PLAN).read_text())
        except (OSError, ValueError) as error:
            raise none from error
        if not isinstance(hashes, dict) or not hashes:
            raise none
        return hashes

    def _check_corpora(self, names: Iterable[str], what: str) -> None:
        """Losses on a text say nothing beside the floors, the entropy rate and the vocabulary of another."""
        if others := set(names) - {self.corpus_name}:
            raise ConfigError(
                f"{what} is of CORPUS={min(others)}, not of CORPUS={self.corpus_name}",
                todo="give the same to both",
            )

    def verdicts(self) -> dict[str, Verdict]:
        """Of each architecture, from its sound results alone.

        Raises ConfigError where the text of the corpus is no longer the one that the models were trained on.
        """
        results = self.results()
        if any(result.config["data_sha256"] != self.corpus.sha256 for result in results):
            raise ConfigError(
                f"CORPUS={self.corpus_name} has changed since the sweep in {self.out}",
                todo="make scaling trains on what it is now",
            )
        points = {arch: tuple(points_of(sound)) for arch, sound in by_architecture(results).items()}
        if points != self._judged[0]:
            self._judged = points, {arch: judge(own) for arch, own in points.items()}
        return self._judged[1]

    def analyze_scaling_laws(self) -> dict[str, Any]:
        """Fit, doubt and write scaling_law.json, whose content it returns."""
        groups, verdicts = by_architecture(self.results()), self.verdicts()
        parts = {arch: law_of(groups[arch], verdicts[arch]) for arch in groups}
        if not parts:
            raise ToolkitError("there is no sound result to fit", why="; ".join(failures(self.results())))
        first = next(iter(parts))
        content = {
            **parts[first],
            "architectures": parts,
            "corpus": self.corpus_name,
            "synthetic": self.corpus.spec.synthetic,
            "unit": self.corpus.spec.unit,
            "entropy_rate_nats": self.corpus.reachable,
            "counting_nats": list(self.corpus.counting),
            "excluded": failures(self.results()),
        }
        write(self.out / LAW, json.dumps(content, indent=1, sort_keys=True) + "\n")
        return content

    def plot_scaling_laws(self) -> list[Path]:
        """Write scaling_laws.png and, as a second page, scaling_laws_2.png."""
        from lib.scaling.pictures import write_pictures  # matplotlib takes half a second

        return write_pictures(by_architecture(self.results()), self.verdicts(), self.corpus_lines(), self.out)

    def report(self) -> str:
        """Write report.txt, and return what it says."""
        from lib.scaling.report import text_of

        text = text_of(self.results(), self.verdicts(), self.corpus.dataset.source, self.corpus_lines())
        write(self.out / REPORT, text)
        return text

    def corpus_lines(self) -> dict[str, float]:
        """Losses to compare with, in nats: what counting reaches, and the entropy rate where it is known."""
        lines = {f"counting {n}-grams": nats for n, nats in enumerate(self.corpus.counting, start=1)}
        if self.corpus.reachable is not None:
            lines["entropy rate (known)"] = self.corpus.reachable
        return lines


def by_architecture(results: Sequence[ScalingResults]) -> dict[str, list[ScalingResults]]:
    """The sound results of each, in the order of the sweep."""
    names = dict.fromkeys(result.arch for result in results if result.status == "done")
    return {
        arch: [result for result in results if result.arch == arch and result.status == "done"]
        for arch in names
    }


def points_of(results: Sequence[ScalingResults]) -> list[Point]:
    return [
        Point(
            parameters=result.num_params_nonembedding,
            tokens=result.tokens,
            loss=result.val_nats,
            seed=result.seed,
        )
        for result in results
    ]


def law_of(results: Sequence[ScalingResults], verdict: Verdict) -> dict[str, Any]:
    """What the document keeps, of all parameters at the most data, fitted in logarithms; and all else."""
    most = max(result.tokens for result in results)
    pairs = [(result.num_params, math.exp(result.val_nats)) for result in results if result.tokens == most]
    logs = np.log(np.asarray(pairs))
    content: dict[str, Any] = {"formula": "perplexity = a * (num_params)^b", "num_data_points": len(pairs)}
    if len({size for size, _ in pairs}) > 1:
        b, log_a = np.polyfit(logs[:, 0], logs[:, 1], 1)
        rest = logs[:, 1] - log_a - b * logs[:, 0]
        whole = logs[:, 1] - logs[:, 1].mean()
        content |= {"a": float(np.exp(log_a)), "b": float(b)}
        content["r_squared"] = float(1 - rest @ rest / (whole @ whole)) if whole.any() else None
    content["fits"] = {name: fitted.to_json() for name, fitted in verdict.fits.items()}
    content["isoflop"] = dataclasses.asdict(verdict.growth)
    content["verdict"], content["seed_spread_nats"] = verdict.sentence(), verdict.spread
    content["warnings"] = list(verdict.warnings)
    return content


def cost_of(plan: Sequence[Planned], *, workers: int) -> str:
    """Of a whole plan, in words."""
    seconds = sum(each.seconds for each in plan)
    return (
        f"{len(plan)} runs, about {seconds / 60:.1f} minutes of processor, "
        f"{wall_seconds(plan, workers=workers) / 60:.1f} minutes with {workers} workers"
    )
