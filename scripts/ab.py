"""make ab A=... B=... SEEDS=5: train two configurations with the same seeds and judge their difference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lib import kconf
from lib.config import config_from_values
from lib.errors import ConfigError, run_main
from lib.runs.metrics import WHATEVER_TOKENS
from lib.sweeps.concurrency import Concurrency, predict_host_memory
from lib.sweeps.paired_comparison import Comparison, parse_looks
from lib.sweeps.runner import Run, compose_text
from scripts.sweep import ROOT, log, study_parser


def main() -> int:
    """Train the pairs of the command line up to each look, and print the verdict."""
    parser = study_parser("ab", __doc__)
    parser.add_argument("--a", default="", help="NAME+FRAGMENT+...: the configuration to compare with")
    parser.add_argument("--b", default="", help="NAME+FRAGMENT+...: the configuration that may be better")
    looks = partial(parse_looks, variable="SEEDS")
    parser.add_argument("--seeds", type=looks, default=[5], help="numbers of pairs to judge after: 3 5 8")
    parser.add_argument("--metric", default="", help="result to compare; default: accuracy, or else loss")
    options = parser.parse_args()
    if not (options.a and options.b):
        missing = " and ".join(f"{name}=" for name in ("A", "B") if not vars(options)[name.lower()])
        raise ConfigError(
            f"there is no {missing}", todo="name both, as in make ab A=lenet5+fp32 B=lenet5+bf16"
        )
    out, first = (options.out or options.runs / "ab").absolute(), options.first_seed or 1
    seeds = range(first, first + options.seeds[-1])
    pairs = make_pairs(options.a, options.b, seeds, options.metric)
    concurrency = Concurrency(options.jobs, partial(predict_host_memory, root=ROOT, log=log))
    Comparison(pairs, out, options.runs, ROOT, concurrency, log).judge(options.seeds, options.metric)
    return 0


def make_pairs(a: str, b: str, seeds: Sequence[int], metric: str = "") -> list[tuple[Run, Run]]:
    """Resolve both configurations with each seed.

    Raises ConfigError where one cannot be configured, where the two train the same, and where they are
    evaluated on different data: data set, HOLDOUT, or tokens of a language model if `metric` is of tokens.
    """
    texts = [compose_text(ROOT, spec) for spec in (a, b)]

    def resolved(number: int, seed: int) -> Run:
        found = kconf.load_written(texts[number], root=ROOT, overrides={"CONFIG_SEED": str(seed)})
        config_from_values(found.values)
        return Run(number=number, settings={"SEED": str(seed)}, resolved=found)

    pairs = [(resolved(0, seed), resolved(1, seed)) for seed in seeds]
    if (same := pairs[0][0].identity) == pairs[0][1].identity:
        todo = "what differs between them changes no number of a training run"
        raise ConfigError(f"A={a} and B={b} are the same run", why=f"both are {same}", todo=todo)
    values = [run.resolved.values for run in pairs[0]]
    names, todo = ["DATASET", "HOLDOUT"], "give both the same"
    is_lm = values[0]["MODEL_DATA_TEXT"] and not (
        values[0]["DATASET_LABELS_TEXTS"] or values[0]["DATASET_HAS_TAGS"]
    )
    if is_lm and (metric not in WHATEVER_TOKENS or values[0]["HOLDOUT"]):  # it counts windows of tokens
        names += ["TOKENIZER", "TOKENIZER_DIR"]
    for name in names:
        if (one := values[0][name]) != (other := values[1][name]):
            key = "" if name == "DATASET" else f"CONFIG_{name}="
            why = f"A={a} is evaluated on {key}{one}, and B={b} on {key}{other}"
            if name.startswith("TOKENIZER"):
                todo += f", or METRIC={' or '.join(WHATEVER_TOKENS)} if both report it"
            raise ConfigError("results on different data cannot be compared", why=why, todo=todo)
    return pairs


if __name__ == "__main__":
    raise SystemExit(run_main(main))
