"""No variable of make's command line is dropped: a target uses it or refuses it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.contract.making import ROOT, Make, table, user_targets

COMPOSE = {"defconfig", "defconfig-lenet5", "mergeconfig"}
EXTREMES = {"alldefconfig", "allnoconfig", "allyesconfig", "allmodconfig", "tinyconfig", "randconfig"}
USED_BY = {
    "FILE": {"savedefconfig", "checkconfig"},
    "RUN": {"resume", "rerun", "eval", "plots", "curve", "sample", "predict", "export", "report", "tag"},
    "BEST": {"eval", "sample", "predict", "export"},
    "INPUT": {"predict"},
    "TOP": {"predict"},
    "FORMAT": {"export"},
    "DIRECTORY": {"export", "fetch"},
    "PROMPT": {"sample"},
    "TEMPERATURE": {"sample", "predict"},
    "TOP_K": {"sample", "predict"},
    "SEED": {"sample", "predict"},
    "TOKENS": {"sample", "predict"},
    "NAME": {"new-model", "new-task", "new-data"},
    "TASK": {"new-model"},
    "DEFCONFIG": {"defconfig", "savedefconfig"},
    "FRAGMENT": COMPOSE,
    "STRICT": {*COMPOSE, "debug.config"},
    "SET": {"setconfig"},
    "GPU": {"plan", "fits", "elastic-check"},
    "PRICE": {"plan", "fits"},
    "LORA": {"fits"},
    "A": {"diffconfig", "ab"},
    "B": {"diffconfig", "ab"},
    "SEEDS": {"ab"},
    "WHERE": {"runs", "compare"},
    "RUNS": {"compare"},
    "TAG": {"tag"},
    "SYM": {"explain"},
    "Q": {"searchconfig"},
    "EXP": {"experiment"},
    "EPOCHS": {"scaling", "scaling-plan", "scaling-run"},
    "SHAPES": {"scaling", "scaling-plan", "scaling-run"},
    "COLUMN": {"curve"},
    "THRESHOLD": {"curve"},
    "REFERENCE": {"curve"},
    "TOLERANCE": {"curve"},
    "TO": {"emit"},
    "IMAGE": {"emit"},
    "STORAGE": {"emit"},
    "ACCELERATOR": {"emit"},
    "KCONFIG_ALLCONFIG": {*EXTREMES, "defconfig"},
    "KCONFIG_SEED": {"randconfig"},
    "KCONFIG_PROBABILITY": {"randconfig"},
    "KCONFIG_NOSILENTUPDATE": {"syncconfig"},
    "ANNEAL_CONFIG_PATH": {
        *COMPOSE,
        "debug.config",
        "tinyconfig",
        "list-defconfigs",
        "diffconfig",
        "ab",
        "train-lenet5",
    },
    "CONFIG_SEED": {
        *("train", "train-lenet5", "launch-print", "sbatch", "submit", "emit", "plan", "probe", "preflight"),
        *(
            "profile",
            "data-check",
            "bench",
            "experiment",
            "sweep-yaml",
            "checkconfig",
            "explain",
            "searchconfig",
        ),
        *(
            "menuconfig",
            "nconfig",
            "guiconfig",
            "xconfig",
            "config",
            "oldconfig",
            "olddefconfig",
            "syncconfig",
        ),
        *("savedefconfig", "setconfig", "debug.config"),
        *COMPOSE,
        *EXTREMES,
    },
}


def used_by(variable: str) -> set[str]:
    """Return the targets that use it; `experiment` goes with its plug-in."""
    return USED_BY[variable] - ({"experiment"} - set(user_targets()))


@pytest.mark.slow
@pytest.mark.parametrize("variable", [name for name in USED_BY if used_by(name)])
def test_a_variable_that_a_target_does_not_use_stops_it(make: Make, tmp_path: Path, variable: str) -> None:
    """A target by itself, and all together: one that used the variable would let the others have it."""
    (tmp_path / ".config").touch()
    others = [target for target in user_targets() if target not in used_by(variable)]
    alone = others[list(USED_BY).index(variable) :: len(USED_BY)]
    for goals in (others, *([target] for target in alone)):
        done = make(*goals, f"{variable}=1", f"O={tmp_path}")
        assert (done.returncode, done.calls) == (2, []), goals
        if variable.startswith("CONFIG_"):  # too many to name
            assert "it is for: targets that configure or train, such as setconfig, plan, train" in done.stderr
            continue
        users = {
            word.replace("FRAGMENT.config", "debug.config").replace("NAME", "lenet5")
            for word in done.stderr.split("it is for: ")[1].split()
        }
        assert f"{variable} is not used by make {' '.join(goals)};" in done.stderr
        assert used_by(variable) <= users
    for target in used_by(variable):
        done = make("-n", target, f"{variable}=1", f"O={tmp_path}")
        assert done.returncode == 0, (target, done.stderr)


@pytest.mark.parametrize("command", ["tag TAG=--", "runs WHERE=--", "fits MODEL=--", "ab A=-- B=x"])
def test_two_dashes_are_refused_before_a_program_stumbles_over_them(make: Make, command: str) -> None:
    done = make(*command.split())
    assert (done.returncode, done.calls) == (2, []) and "=-- is no value; two dashes" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "train RUN=a",
        "RUN=a",
        "resume CONFIG_SEED=7",
        "resume CONFIG_NUM_DEVICES=2",
        "eval CONFIG_SEED=7",
        "eval BEST=yes",
        "help 'VENV=my env'",
    ],
)
def test_no_variable_is_dropped(make: Make, tmp_path: Path, command: str) -> None:
    (tmp_path / ".config").touch()
    done = make(*shlex.split(command), f"O={tmp_path}")
    assert (done.returncode, done.calls) == (2, [])
    assert shlex.split(command)[-1].partition("=")[0] in done.stderr
    assert ("keeps its configuration" in done.stderr) == ("CONFIG_" in command)
    assert ("make train resumes" in done.stderr) == ("NUM_DEVICES" in command)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rerun", "RUN="], "RUN= is empty; give it a value, or leave it out"),
        (["checkconfig", "FILE="], "FILE= is empty; give it a value, or leave it out"),
        (
            ["setconfig", "SET=DATA_DIR=a$b"],
            "SET has a dollar sign, which make takes for itself; write $$ for each",
        ),
        (["checkconfig", "CONFIG_NOTE=$5"], "CONFIG_NOTE has a dollar sign, which make takes"),
        (["setconfig", "SET=SEED=3\nEMA=y"], "SET has a line break; it is a single line"),
        (["checkconfig", "O=a$b"], "O has a dollar sign, which make takes for itself; write $$ for each"),
        (["checkconfig", "KCONFIG_CONFIG=$(HOME)"], "KCONFIG_CONFIG has a dollar sign"),
        (["checkconfig", "O=~/x"], "O begins with a tilde that the shell did not replace"),
        (["savedefconfig", "FILE=~/x"], "FILE begins with a tilde"),
        (["eval", "BEST"], "BEST is a variable; write BEST=value"),
        (["train", "CONFIG_EMA"], "CONFIG_EMA is a variable; write CONFIG_EMA=value"),
        (["checkconfig", "V=2"], "V is 1 to show commands and origins, or 0"),
    ],
)
def test_a_value_that_would_not_arrive_is_refused(make: Make, arguments: list[str], told: str) -> None:
    done = make(*arguments)
    assert (done.returncode, done.calls) == (2, [])
    assert f"error: {told}" in done.stderr or f"*** {told}" in done.stderr


@pytest.mark.parametrize("name", ["file", "a 'file"])
def test_a_file_is_no_place_for_what_is_made(make: Make, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    done = make("plan", f"O={tmp_path / name}")
    assert (done.returncode, done.calls) == (2, [])
    assert f"*** O={tmp_path / name} is not a folder" in done.stderr and len(done.stderr.splitlines()) == 1


def known_variables() -> list[str]:
    text = subprocess.run(["make", "printvars"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [line.partition("=")[0] for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("goals", [["-n", "help"], ["help"], ["printvars", "help"], []])
def test_no_value_is_expanded_before_it_is_refused(tmp_path: Path, goals: list[str]) -> None:
    """Also of names that make or the Makefile uses itself; from the command line, whatever the goals."""
    mark = tmp_path / "mark"
    internal = ("MAKEFLAGS", "MAKECMDGOALS", "SHELL", "VPATH", "UNKNOWN", "PLACES", "name", "newline")
    for name in (*known_variables(), "CONFIG_SEED", "CONFIG_NOTHING", "LR", *internal):
        done = subprocess.run(
            ["make", *goals, "VENV=", f"{name}=$(shell touch {mark})"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert not mark.exists(), name
        assert goals == ["-n", "help"] or done.returncode == 2, name


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["-e"]])
def test_no_value_of_the_environment_is_expanded(tmp_path: Path, flags: list[str]) -> None:
    mark = tmp_path / "mark"
    own = re.findall(r"^(\w+) (?:[:?]?=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"RUN_FOLDER", "quiet", "VENV"} <= {*own}
    for name in dict.fromkeys((*known_variables(), *own, "CONFIG_SEED", "LR", "MAKECMDGOALS")):
        environment = {**os.environ, name: f"$(shell touch {mark})"}
        goals = [] if name == "MAKECMDGOALS" else ["printvars"]  # which make gives it itself
        command = ["make", *flags, "VENV=", "-n", *goals]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
        assert not mark.exists(), name


def test_a_make_around_this_one_hands_values_on_unexpanded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    around = tmp_path / "Makefile"
    around.write_text(f"all:\n\t@$(MAKE) -C {ROOT} help 'SET=$(value TEXT)'\n")
    text = {"TEXT": f"$(shell touch {mark})"}
    done = subprocess.run(
        ["make", "-C", str(tmp_path)], env={**os.environ, **text}, capture_output=True, text=True
    )
    assert done.returncode == 2 and "SET has a dollar sign" in done.stderr and not mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        ["UNKNOWN="],
        ["KCONFIG_MAKE_KNOWN=LR KCONFIG_MAKE_KNOWN"],
        ["KCONFIG_MAKE_VARIABLES="],
        ["newline=LR"],
        [],
    ],
)
def test_the_check_of_variables_cannot_be_replaced(given: list[str]) -> None:
    for unknown in ("LR=3", "name=3"):
        command = ["make", "help", *given, unknown]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, ""), command


@pytest.mark.parametrize("name", ["KCONFIG_CONFIG", "O", "VENV", "PYTHON"])
def test_a_place_of_the_environment_has_no_line_break(name: str) -> None:
    command = ["make", "checkconfig"]
    environment = {**os.environ, name: "a\nb"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"*** {name} has a line break; it is a single line" in done.stderr


def test_what_may_be_empty_is_not_refused(make: Make) -> None:
    done = make("defconfig-lenet5", "STRICT=", "V=", "O=", "ANNEAL_CONFIG_PATH=", "CONFIG_NOTE=$$")
    assert done.calls == [["scripts/kconf.py", "defconfig", "lenet5"]]
    assert make("alldefconfig", "KCONFIG_ALLCONFIG=").environments[0]["KCONFIG_ALLCONFIG"] == ""
    assert make("checkconfig", "V=0").returncode == 0


def test_a_place_with_a_dollar_sign_arrives(make: Make) -> None:
    environment = make("checkconfig", "O=a$$b").environments[0]
    assert (environment["KCONFIG_OUTPUT"], environment["KCONFIG_CONFIG"]) == ("a$b", "a$b/.config")
    assert make("checkconfig", env={"FILE": "~/x"}).returncode == 0


def test_make_outside_the_source_tree_says_so(tmp_path: Path) -> None:
    command = ["make", "-f", str(ROOT / "Makefile"), "checkconfig"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "make works in the source tree: make -C DIRECTORY" in done.stderr


@pytest.mark.slow
def test_one_of_several_goals_may_use_a_variable(make: Make, tmp_path: Path) -> None:
    (tmp_path / ".config").touch()
    done = make("train", "eval", "RUN=a", "CONFIG_SEED=7", f"O={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert [call[4] for call in done.calls if call[1] == "train"] == ["train", "eval"]
    assert done.calls[-1][-1] == "a"


@pytest.mark.parametrize(
    "goals",
    [
        "plan train probe preflight data-check",
        "resume rerun eval sample predict export report",
        "elastic-check elastic-demo",
        "test-deletion test-faults",
        "new-model new-task new-data",
    ],
)
def test_of_several_goals_each_gets_its_own_variables(make: Make, tmp_path: Path, goals: str) -> None:
    """They share a rule, and a program ends at an option that it does not know."""
    (tmp_path / ".config").touch()
    own = {row.target: {*row.variables} - {"CONFIG_*"} for row in table() if row.target in goals.split()}
    values = {name: "y" if name == "MERGE" else "1" for name in sorted(set().union(*own.values()))}

    def calls(goals: list[str], names: Iterable[str]) -> list[list[str]]:
        done = make(*goals, *(f"{name}={values[name]}" for name in names), f"O={tmp_path}")
        assert done.returncode == 0, done.stderr
        return done.calls

    alone = [call for goal in goals.split() for call in calls([goal], sorted(own[goal]))]
    assert calls(goals.split(), values) == alone


def test_a_note_names_what_is_used_from_the_environment(make: Make, tmp_path: Path) -> None:
    places = {"O": str(tmp_path), "V": "0", "KCONFIG_CONFIG": "named"}
    done = make("checkconfig", env={**places, "RUN": "mine"})
    assert done.stderr == "note: used from the environment: O KCONFIG_CONFIG V\n"
    assert done.environments[0]["KCONFIG_CONFIG"] == f"{tmp_path}/named"
    given = [f"{name}={value}" for name, value in places.items()]
    assert make("checkconfig", *given).stderr == ""
    assert make("checkconfig", env={**places, "MAKELEVEL": "1"}).stderr == "", "a make around this one"


def test_names_of_the_environment_are_not_taken(make: Make) -> None:
    done = make("eval", env={"RUN": "mine", "BEST": "1", "FILE": "x"})
    assert done.calls == [["-m", "train", "--runs", "runs", "eval"]]
    assert make("checkconfig", env={"FILE": "x"}).calls == [["scripts/kconf.py", "checkconfig"]]


@pytest.mark.slow
def test_symbols_on_the_command_line_are_checked_by_every_target(make: Make, tree: Path) -> None:
    """By the script that loads the configuration, or by check-variables before anything else is done."""
    (tree / ".config").touch()
    for target in user_targets():
        done = make(target, "CONFIG_TYPO=3", "KCONFIG_CONFIG=.config", cwd=tree)
        if target in USED_BY["CONFIG_SEED"]:
            first = done.calls[0]
            loads = (
                first[0] == "scripts/kconf.py"
                or "profile" in first
                or first[-1]
                in {
                    "train",
                    "plan",
                    "probe",
                    "preflight",
                    "data-check",
                    "print",
                    "sbatch",
                    "submit",
                    "emit",
                    "scripts.bench.throughput",
                    "scripts.eqprop",
                    "--yaml",
                }
            )
            assert loads, f"{target} runs {first} first"
        else:
            assert (done.returncode, done.calls) == (2, []), target
        (tree / ".config").touch()
