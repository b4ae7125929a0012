"""The Makefile: thin calls, values carried byte for byte, nothing ignored in silence.

Most tests give make a recorder for PYTHON, so they see exactly what a target would run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.making import ROOT, Make, make_database, named_targets, table, user_targets

CONFIGURATION_TARGETS = {
    **{
        word: [word]
        for word in (
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
            *(
                "listnewconfig",
                "helpnewconfig",
                "alldefconfig",
                "allnoconfig",
                "allyesconfig",
                "allmodconfig",
            ),
            *(
                "tinyconfig",
                "randconfig",
                "update-defconfigs",
                "list-defconfigs",
                "kconfig-docs",
                "kconfig-lint",
            ),
            *("savedefconfig", "checkconfig", "defconfig", "explain"),
        )
    },
    "savedefconfig FILE=out/my": ["savedefconfig", "--", "out/my"],
    "savedefconfig FILE=--name=x": ["savedefconfig", "--", "--name=x"],
    "savedefconfig DEFCONFIG=lenet5": ["savedefconfig", "--name=lenet5"],
    "checkconfig FILE=defconfigs/lenet5": ["checkconfig", "--", "defconfigs/lenet5"],
    "defconfig DEFCONFIG=lenet5+fp32": ["defconfig", "--", "lenet5+fp32"],
    "defconfig-lenet5": ["defconfig", "lenet5"],
    "lenet5_defconfig": ["defconfig", "lenet5"],
    "defconfig-resnet18+fp32": ["defconfig", "resnet18+fp32"],
    "resnet18+fp32_defconfig": ["defconfig", "resnet18+fp32"],
    "defconfig-nope": ["defconfig", "nope"],
    # No name has a slash, and a pattern does not reach across one: it is not make that answers.
    "defconfig-a/b": ["defconfig", "a/b"],
    "a/b_defconfig": ["defconfig", "a/b"],
    "a/b.config": ["merge", "a/b"],
    "defconfig-lenet5 'FRAGMENT=a b/c' STRICT=1": ["defconfig", "--fragments=a b/c", "--strict", "lenet5"],
    "debug.config": ["merge", "debug"],
    "nope.config STRICT=1": ["merge", "--strict", "nope"],
    "mergeconfig FRAGMENT=a": ["merge", "--fragments=a"],
    "setconfig 'SET=A=1 B=-2'": ["setconfig", "--", "A=1 B=-2"],
    "diffconfig": ["diffconfig"],
    "diffconfig A=a 'B=it is'": ["diffconfig", "-a=a", "-b=it is"],
    "diffconfig A=-x": ["diffconfig", "-a=-x"],
    "explain SYM=SEED": ["explain", "--", "SEED"],
    "searchconfig 'Q=-b|c d'": ["searchconfig", "--", "-b|c d"],
    "Q=x V=1 searchconfig": ["searchconfig", "--", "x"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", CONFIGURATION_TARGETS)
def test_configuration_targets_are_thin_calls(make: Make, command: str) -> None:
    done = make(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    assert done.calls == [["scripts/kconf.py", *CONFIGURATION_TARGETS[command]]]
    assert done.environments[0]["KCONFIG_CONFIG"] == ".config"


@pytest.mark.slow
def test_training_targets(make: Make, tmp_path: Path) -> None:
    (tmp_path / ".config").touch()
    out = f"O={tmp_path}"
    for word in ("train", "plan"):
        assert make(word, out).calls == [["-m", "train", "--runs", f"{tmp_path}/runs", word]]
    assert make(out).calls == [["-m", "train", "--runs", f"{tmp_path}/runs", "train"]]
    profile = ["-m", "train", "--runs", f"{tmp_path}/runs", "profile"]
    assert make("profile", out).calls == [[*profile, f"--out={tmp_path}/profile"]]
    given = make("profile", out, "STEPS=3", "OUT=a b")
    assert given.calls == [[*profile, "--steps=3", "--out=a b"]]
    assert make("eval", "RUN=runs/a b").calls == [["-m", "train", "--runs", "runs", "eval", "--", "runs/a b"]]
    best = ["-m", "train", "--runs", "runs", "eval", "--best"]
    assert make("eval", "BEST=1").calls == [best]
    assert make("eval", "RUN=it's", "BEST=1").calls == [[*best, "--", "it's"]]
    sample = ["-m", "train", "--runs", "runs", "sample"]
    assert make("sample").calls == [sample]
    options = ["PROMPT=it's -1", "TEMPERATURE=0.5", "TOP_K=3", "SEED=2", "TOKENS=9"]
    given = ["--prompt=it's -1", "--temperature=0.5", "--top-k=3", "--seed=2", "--tokens=9"]
    assert make("sample", *options, "RUN=x").calls == [[*sample, *given, "--", "x"]]
    export = ["-m", "train", "--runs", "runs", "export", "--best", "--format=onnx", "--directory=a b"]
    assert make("export", "BEST=1", "FORMAT=onnx", "DIRECTORY=a b").calls == [export]
    assert make("plots", "RUN=x").calls == [["-m", "scripts.plots", "--runs", "runs", "--", "x"]]
    options = ["COLUMN=loss", "THRESHOLD=0.5", "REFERENCE=a b", "TOLERANCE=0.1", "OUT=c.json", "RUN=x"]
    given = ["--column=loss", "--threshold=0.5", "--reference=a b", "--tolerance=0.1", "--out=c.json"]
    assert make("curve", *options).calls == [["-m", "scripts.curve", "--runs", "runs", *given, "--", "x"]]
    where = ["WHERE=model=gpt2 lr>1", "SORT=-loss", "LIMIT=3", "JSON=1"]
    asked = ["--where=model=gpt2 lr>1", "--sort=-loss", "--limit=3", "--json"]
    assert make("runs", *where).calls == [["-m", "scripts.runs", "--runs", "runs", *asked]]
    tag = ["-m", "scripts.runs", "--runs", "runs", "--tag=a -b", "--", "x"]
    assert make("tag", "TAG=a -b", "RUN=x").calls == [tag]
    assert make("watch").calls == [["-m", "scripts.watch", "--runs", "runs"]]
    (asked,) = make("doctor", "JSON=1").calls
    assert asked[:3] == ["scripts/doctor.py", "--venv=", "--runs=runs"] and asked[4:] == ["--json"]
    assert re.fullmatch(r"--make=[34]\.\d+(\.\d+)?", asked[3])
    compared = ["A=lenet5", "B=lenet5+bf16", "SEEDS=3 5", "FIRST_SEED=4", "METRIC=loss", "JOBS=2", "OUT=x"]
    ab = ["--a=lenet5", "--b=lenet5+bf16", "--seeds=3 5", "--first-seed=4", "--metric=loss", "--jobs=2"]
    assert make("ab", *compared).calls == [["-m", "scripts.ab", "--runs", "runs", *ab, "--out=x"]]
    assert make("plots", "eval", out).calls == [
        ["-m", "scripts.plots", "--runs", f"{tmp_path}/runs"],
        ["-m", "train", "--runs", f"{tmp_path}/runs", "eval"],
    ]
    assert make("bench", out).calls == [["-m", "scripts.bench.throughput"]]
    peers = ["-m", "scripts.bench.throughput", "--peers", "--out=x"]
    assert make("bench", "PEERS=1", "OUT=x").calls == [peers]


def test_out_directory_with_a_space_and_a_quote(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "it's one"
    out.mkdir()
    (out / ".config").touch()
    done = make("train", f"O={out}")
    assert done.calls == [["-m", "train", "--runs", f"{out}/runs", "train"]]
    assert done.environments[0]["KCONFIG_CONFIG"] == f"{out}/.config"
    assert done.environments[0]["KCONFIG_OUTPUT"] == str(out)


def test_named_training_keeps_to_its_own_directory(make: Make) -> None:
    done = make("train-resnet18+fp32")
    assert done.calls == [
        ["scripts/kconf.py", "defconfig", "resnet18+fp32"],
        ["-m", "train", "--runs", "build/resnet18+fp32/runs", "train"],
    ]
    assert {kept["KCONFIG_CONFIG"] for kept in done.environments} == {"build/resnet18+fp32/.config"}


def test_named_training_stops_where_the_configuration_fails(make: Make) -> None:
    done = make("train-nope", env={"RECORDER_EXIT": "2"})
    assert done.returncode == 2
    assert done.calls == [["scripts/kconf.py", "defconfig", "nope"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "named", "file"),
    [
        (None, "elsewhere/cfg", "elsewhere/cfg"),
        ("out", "sub/cfg", "out/sub/cfg"),
        ("out", "/abs/cfg", "/abs/cfg"),
        ("out", "out/cfg", "out/cfg"),  # as a make around this one hands it on
        ("out", "", "out/.config"),
        ("an out", "my cfg", "an out/my cfg"),
        ("/abs out", "cfg", "/abs out/cfg"),
    ],
)
def test_kconfig_config_is_honoured_below_out(make: Make, out: str | None, named: str, file: str) -> None:
    given = [f"O={out}"] if out else []
    on_the_command_line = make("checkconfig", f"KCONFIG_CONFIG={named}", *given)
    assert on_the_command_line.environments[0]["KCONFIG_CONFIG"] == file
    of_the_environment = make("checkconfig", *given, env={"KCONFIG_CONFIG": named})
    assert of_the_environment.environments[0]["KCONFIG_CONFIG"] == file
    # Named training has a place of its own only where nobody names one.
    if named:
        done = make("train-lenet5", f"KCONFIG_CONFIG={named}", *given)
        assert {kept["KCONFIG_CONFIG"] for kept in done.environments} == {file}


def test_a_shipped_configuration_takes_no_presets(make: Make) -> None:
    assert make("defconfig", "KCONFIG_ALLCONFIG=a").environments[0]["KCONFIG_ALLCONFIG"] == "a"
    done = make("defconfig", "DEFCONFIG=lenet5", "KCONFIG_ALLCONFIG=a")
    assert (done.returncode, done.calls) == (2, [])
    assert "KCONFIG_ALLCONFIG is not used by make defconfig" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["a b", "it's", 'say "so"', "x#y", r"back\slash", "$HOME", "(a;b)&|<>*?", "end ", "ü"]
)
def test_values_reach_the_script_byte_for_byte(make: Make, value: str) -> None:
    done = make("checkconfig", "CONFIG_DATA_DIR=" + value.replace("$", "$$"), "CONFIG_SEED=7")
    assert done.returncode == 0, done.stderr
    environment = done.environments[0]
    assert environment["CONFIG_DATA_DIR"] == value
    assert {"CONFIG_DATA_DIR", "CONFIG_SEED"} <= set(environment["KCONFIG_MAKE_VARIABLES"].split())


def test_variables_of_the_environment_are_told_apart(make: Make) -> None:
    done = make("checkconfig", env={"CONFIG_SEED": "7", "LR": "3"})
    assert done.returncode == 0
    assert set(done.environments[0]["KCONFIG_MAKE_VARIABLES"].split()) == {"VENV", "PYTHON"}


@pytest.mark.slow
def test_an_unknown_variable_stops_every_target(make: Make) -> None:
    """No target may run a single thing but the check that names the variable: all at once, and each form."""
    for goals in (user_targets(), *([name] for name in ("help", "train", "train-lenet5", "debug.config"))):
        done = make(*goals, "LR=3")
        assert done.returncode == 2, goals
        assert done.calls in ([], [["scripts/kconf.py", "check-variables"]]), goals
        assert "LR is not a variable" in done.stderr, goals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("goals", "told"),
    [
        (["trian"], "trian is not a target; did you mean train?"),
        (["rerunn"], "rerunn is not a target; did you mean rerun?"),  # be it a directory that is there
        (["lib"], "lib is not a target; "),
        (["lenet5"], "lenet5 is not a target; did you mean lenet5_defconfig"),
        ([".config"], ".config is not a target; did you mean config"),
        (["defconfig-"], "defconfig- is not a target; did you mean defconfig"),
        (["Makefile"], "Makefile is not a target"),
        (["x:y;z%it's$$(a)"], "x:y;z%it's$$(a) is not a target"),
        (["defconfig-lenet5", "trian"], "trian is not a target"),  # and nothing before it is begun
        (["-n", "trian"], "trian is not a target"),
        (["-q", "rerunn"], "rerunn is not a target"),
    ],
)
def test_a_goal_that_is_no_target_stops_everything(tree: Path, goals: list[str], told: str) -> None:
    (tree / "rerunn").mkdir(exist_ok=True)
    command = ["make", "VENV=", f"PYTHON={sys.executable}", *goals]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"command line: {told}" in done.stderr
    assert not (tree / ".config").exists()


def test_a_goal_that_is_no_target_is_told_without_an_environment(tmp_path: Path) -> None:
    command = ["make", "trian", f"VENV={tmp_path}/none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: trian is not a target; make help-all shows what there is" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_stored_run_needs_no_configuration(make: Make, tmp_path: Path) -> None:
    runs = ["-m", "train", "--runs", f"{tmp_path}/runs"]
    out = f"O={tmp_path}"
    assert make("resume", out).calls == [[*runs, "resume"]]
    assert make("rerun", out, "RUN=a b").calls == [[*runs, "rerun", "--", "a b"]]
    assert make("resume", out, "RUN=a b").calls == [[*runs, "resume", "--", "a b"]]
    assert make("eval", out).calls == [[*runs, "eval"]]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["sweep SWEEP=a", "ab A=a B=b", "runs", "tag TAG=a", "plots", "curve"])
def test_what_reads_or_writes_runs_obeys_the_output_directory(make: Make, tmp_path: Path, words: str) -> None:
    (call,) = make(*words.split(), f"O={tmp_path}").calls
    assert call[2:4] == ["--runs", f"{tmp_path}/runs"], call
    assert make(*words.split()).calls[0][2:4] == ["--runs", "runs"]


def test_an_unknown_variable_is_named_before_anything_is_set_up(tmp_path: Path) -> None:
    command = ["make", "train", "LR=3", f"VENV={tmp_path}/none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "LR is not a variable" in done.stderr
    assert not (tmp_path / "none").exists()


def test_without_a_configuration_training_names_the_three_ways(make: Make, tmp_path: Path) -> None:
    for target in ("all", "train", "plan"):
        done = make(target, f"O={tmp_path}")
        assert done.returncode == 2
        assert done.calls == []
        for way in ("make defconfig-lenet5", "make menuconfig", "make alldefconfig"):
            assert way in done.stderr


def test_parallel_make_keeps_the_order_of_goals(make: Make, tmp_path: Path) -> None:
    (tmp_path / ".config").touch()
    done = make("-j8", "defconfig-lenet5", "train", "plan", f"O={tmp_path}")
    words = [call[-1] for call in done.calls]
    assert words == ["lenet5", "train", "plan"]


def test_a_failing_script_fails_make(make: Make) -> None:
    assert make("checkconfig", env={"RECORDER_EXIT": "2"}).returncode == 2


def test_verbose_shows_the_command(make: Make) -> None:
    log = subprocess.run(
        ["make", "-n", "V=1", "list-defconfigs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "scripts/kconf.py list-defconfigs" in log.stdout
    assert make("list-defconfigs", "V=1").environments[0]["KCONFIG_MAKE_VARIABLES"].split().count("V") == 1


@pytest.mark.slow
def test_verbose_shows_the_whole_plan(make: Make, tmp_path: Path) -> None:
    (tmp_path / ".config").touch()
    for target in ("train", "resume", "rerun", "train-lenet5"):
        last = [make(target, f"O={tmp_path}", f"V={given}").calls[-1] for given in ("1", "0")]
        assert ["--verbose" in call for call in last] == [True, False], target


def test_spin_count_has_a_default_and_obeys_the_user(make: Make) -> None:
    assert make("plots").environments[0]["GOMP_SPINCOUNT"] == "10000"
    assert make("plots", env={"GOMP_SPINCOUNT": "5"}).environments[0]["GOMP_SPINCOUNT"] == "5"


def help_of(target: str) -> list[str]:
    done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def described(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if re.match("  [a-zA-Z]", line)]


def test_the_long_help_has_every_target_and_no_other() -> None:
    written = {"defconfig-NAME", "NAME_defconfig", "FRAGMENT.config", "train-NAME"}
    assert set(described(help_of("help-all"))) == set(user_targets()) - named_targets() | written


def test_the_short_help_has_each_marked_target_under_its_goal() -> None:
    found: dict[str, set[str]] = {}
    for block in re.split(r"^(?=[A-Z])", "\n".join(help_of("help")), flags=re.M):
        goal, *lines = block.splitlines() or [""]
        found[goal] = set(described(lines))
    marked: dict[str, set[str]] = {}
    for row in (ROOT / "scripts" / "targets").read_text().splitlines():
        if row.count(" |") == 3 and not row.startswith("#"):
            marked.setdefault(row.rpartition("| ")[2], set()).add(row.split()[0])
    assert {goal: names for goal, names in found.items() if names} == marked
    assert 12 <= sum(map(len, marked.values())) <= 16


@pytest.mark.parametrize("target", ["help", "help-all"])
def test_help_fits_a_terminal(target: str) -> None:
    lines = help_of(target)
    assert [line for line in lines if len(line) > 100 or line != line.rstrip()] == []
    text = " ".join(" ".join(lines).split())
    assert all(row.text in text for row in table() if row.target in described(lines))
    assert ("COLUMN= OUT=" in text) == (target == "help-all")


def test_shells_complete_every_defconfig() -> None:
    lines = make_database().splitlines()
    for target in named_targets():
        assert any(line.startswith(f"{target}:") for line in lines), target


def test_help_needs_no_python() -> None:
    assert subprocess.call(["make", "-s", "help", "PYTHON=/nonexistent"], cwd=ROOT) == 0


def test_the_makefile_never_reads_the_configuration() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert not [line for line in lines if line.lstrip("-s ").startswith("include")]
    assert not [line for line in lines if "$(shell" in line]


@pytest.mark.slow
def test_cleaning_keeps_data_and_runs_as_it_says(tree: Path) -> None:
    def run(target: str) -> None:
        subprocess.run(["make", target], cwd=tree, capture_output=True, check=True)

    mine = tree / ".venv"
    made = ("data/mnist/x", "runs/lenet5/a/status.json", "build/lenet5/runs/x", ".config", ".config.old")
    for name in (*made, ".venv/precious"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    cache = tree / "lib" / "__pycache__"
    cache.mkdir(exist_ok=True)

    run("clean")
    assert not cache.exists() and (tree / ".config").exists()
    run("mrproper")
    assert not (tree / ".config").exists() and not (tree / ".config.old").exists()
    assert (mine / "precious").exists(), "an environment that make did not create was removed"
    (mine / ".created").touch()
    run("mrproper")
    assert not mine.exists()
    assert (tree / "runs/lenet5/a/status.json").exists() and (tree / "build/lenet5/runs/x").exists()
    run("distclean")
    assert not (tree / "runs").exists() and not (tree / "build").exists()
    assert (tree / "data/mnist/x").exists()
    run("data-clean")
    assert not (tree / "data").exists()
