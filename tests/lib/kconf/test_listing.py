"""explain, searchconfig, diffconfig, listnewconfig, helpnewconfig."""

from __future__ import annotations

import pytest


def rows(lines: list[str]) -> dict[str, str]:
    """Label -> text, continued lines joined; the head is under "". A label met again adds to the first."""
    found: dict[str, str] = {"": lines[0]}
    label = ""
    for line in lines[1:]:
        if line[:14].strip():
            label = line[:14].strip()
        found[label] = " ".join(filter(None, [found.get(label), line[14:].strip()]))
    return found


def test_a_value_and_where_it_comes_from(kconf):
    kconf("defconfig", "gpt2")
    shown = rows(kconf("explain", "EMA_DECAY")[1])
    assert shown[""] == 'CONFIG_EMA_DECAY="0.5"'
    assert shown["from"] == "defconfigs/gpt2:4"
    assert shown["kind"] == "string, Value: float, 0 < x < 1"
    assert shown["default"] == '"0.99"' and shown["needs"] == "CONFIG_EMA"
    assert "hidden" not in shown and shown["defined"].startswith("Kconfig:")


def test_what_forbids_a_value_and_what_would_allow_it(kconf):
    kconf("defconfig", "lenet5")
    shown = rows(kconf("explain", "CONFIG_BATCH_SIZE")[1])
    assert shown[""] == "CONFIG_BATCH_SIZE has no value" and "from" not in shown
    assert shown["kind"] == "int, 1..1048576"
    assert shown["hidden"] == "it needs CONFIG_HYPER_PARAM_MANUAL=y (now CONFIG_HYPER_PARAM_AUTO=y)"
    assert shown["shown by"] == "CONFIG_HYPER_PARAM_MANUAL=y"


def test_what_depends_on_an_option(kconf_project, kconf):
    kconfig = kconf_project / "Kconfig"
    kconfig.write_text(kconfig.read_text() + "\nconfig DERIVED\n\tint\n\tdepends on DEBUG\n\tdefault 1\n")
    kconf("defconfig", "gpt2")
    shown = rows(kconf("explain", "DEBUG")[1])
    assert shown["needed by"] == "CONFIG_TRACE, CONFIG_DERIVED" and shown["range of"] == "CONFIG_NUM_WORKERS"
    shown = rows(kconf("explain", "HYPER_PARAM_MANUAL")[1])
    assert shown["needed by"] == "CONFIG_BATCH_SIZE" and shown["default of"] == "CONFIG_LEARNING_RATE"
    assert (
        shown["instead of"] == "CONFIG_HYPER_PARAM_AUTO: a choice has one member, now CONFIG_HYPER_PARAM_AUTO"
    )
    shown = rows(kconf("explain", "FAST_ATTENTION")[1])
    assert shown["held on by"] == "CONFIG_MODEL_GPT2 (now y), which selects it"
    assert (
        rows(kconf("explain", "MODEL_GPT2")[1])["selects"]
        == "CONFIG_MODEL_HAS_ATTENTION, CONFIG_FAST_ATTENTION"
    )


def test_a_default_is_told_with_its_condition_and_place(kconf):
    kconf("defconfig", "lenet5")
    kconf("setconfig", "HYPER_PARAM_MANUAL=y")
    shown = rows(kconf("explain", "LEARNING_RATE")[1])
    assert shown["from"].startswith("default if CONFIG_HYPER_PARAM_MANUAL, Kconfig:")
    assert shown["default"] == '"0.1" if CONFIG_HYPER_PARAM_MANUAL "0.001"'
    shown = rows(kconf("explain", "NUM_WORKERS")[1])
    assert shown["kind"] == "int, 0..4 while CONFIG_DEBUG, else 0..256"


def test_a_choice_is_explained_by_its_members(kconf):
    kconf("defconfig", "lenet5")
    shown = rows(kconf("explain", "MODEL_CHOICE")[1])
    assert shown[""] == "MODEL_CHOICE: Model" and shown["chosen"] == "CONFIG_MODEL_LENET5=y"
    assert shown["member"] == "CONFIG_MODEL_GPT2=n CONFIG_MODEL_MLP=n"
    shown = rows(kconf("explain", "GPT2_SIZE_CHOICE")[1])
    assert shown["hidden"] == "it needs CONFIG_MODEL_GPT2=y (now CONFIG_MODEL_LENET5=y)"


def test_the_command_line_counts_and_a_missing_file_is_told(kconf, monkeypatch):
    monkeypatch.setenv("KCONFIG_MAKE_VARIABLES", "CONFIG_NUM_EPOCHS")
    monkeypatch.setenv("CONFIG_NUM_EPOCHS", "4")
    status, out, err = kconf("explain", "NUM_EPOCHS")
    assert (status, err) == (0, ["note: there is no .config: these are the defaults"])
    assert rows(out)[""] == "CONFIG_NUM_EPOCHS=4" and rows(out)["from"] == "command line"


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("", "no option is named; give one, as in make explain SYM=LEARNING_RATE"),
        (
            "EPOCHS",
            "CONFIG_EPOCHS is not a symbol; did you mean CONFIG_NUM_EPOCHS?",
        ),
        ("XYZZY", "CONFIG_XYZZY is not a symbol; make searchconfig Q=WORD finds options"),
    ],
)
def test_what_is_no_option_cannot_be_explained(kconf, symbol, message):
    kconf("defconfig", "lenet5")
    assert kconf("explain", symbol) == (2, [], [f"error: {message}"])


def test_options_are_found_by_name_prompt_and_help(kconf):
    kconf("defconfig", "lenet5")
    found = kconf("searchconfig", "learning")[1]
    assert found[0].startswith('CONFIG_LEARNING_RATE="0.001"  Learning rate  Kconfig:')
    by_help = [line.split()[0] for line in kconf("searchconfig", "how far")[1]]
    assert by_help == ['CONFIG_LEARNING_RATE="0.001"']
    assert [line.split()[0] for line in kconf("searchconfig", "^config_num")[1]] == [
        "CONFIG_NUM_EPOCHS=3",
        "CONFIG_NUM_WORKERS=2",
    ]
    now = ["CONFIG_BATCH_SIZE " not in line for line in kconf("searchconfig", "batch|epochs")[1]]
    assert now == sorted(now, reverse=True), "what can be set comes first"
    hidden = "(hidden: needs CONFIG_HYPER_PARAM_MANUAL=y (now CONFIG_HYPER_PARAM_AUTO=y); "
    found = kconf("searchconfig", "batch_size")[1][0]
    assert f"CONFIG_BATCH_SIZE has no value {hidden}CONFIG_HYPER_PARAM_MANUAL=y shows it)" in found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing is looked for; give words, as in make searchconfig Q=momentum"),
        ("epoch(", "Q=epoch( is not a regular expression: missing ), unterminated subpattern at position 5"),
        ("LEARNIG_RAET", "no option has 'LEARNIG_RAET'; did you mean CONFIG_LEARNING_RATE?"),
        ("xyzzy", "no option has 'xyzzy'"),
    ],
)
def test_what_is_not_found(kconf, words, message):
    kconf("defconfig", "lenet5")
    assert kconf("searchconfig", words) == (2, [], [f"error: {message}"])


# diffconfig

CHANGES = [
    ' MODEL "lenet5" -> "gpt2"',
    "+MODEL_HAS_ATTENTION y",
    " FAST_ATTENTION n -> y",
    " NUM_EPOCHS 3 -> 10",
    " EMA n -> y",
    '+EMA_DECAY "0.5"',
]


def test_the_last_change_is_what_is_compared(kconf):
    kconf("defconfig", "lenet5")
    kconf("defconfig", "gpt2")
    assert kconf("diffconfig") == (0, CHANGES, [])
    assert kconf("diffconfig", "-a", ".config") == (0, [], [])


def test_without_a_configuration_there_is_nothing_to_compare(kconf):
    assert kconf("diffconfig", "-a", "lenet5")[::2] == (
        2,
        ["error: there is no configuration at .config; give B="],
    )
    kconf("defconfig", "lenet5")
    assert kconf("diffconfig")[::2] == (2, ["error: there is no configuration at .config.old; give A="])


def test_shipped_configurations_files_and_runs_are_compared(kconf_project, kconf):
    assert kconf("diffconfig", "-a", "lenet5", "-b", "gpt2")[1] == CHANGES
    assert kconf("diffconfig", "-a", "lenet5", "-b", "lenet5+long+debug")[1] == [
        " NUM_EPOCHS 3 -> 90",
        " DEBUG n -> y",
        "+TRACE n",
    ]
    kconf("defconfig", "gpt2")
    run = kconf_project / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config").write_bytes((kconf_project / ".config").read_bytes())
    assert kconf("diffconfig", "-a", "lenet5", "-b", "runs/one")[1] == CHANGES
    assert kconf("diffconfig", "-a", "defconfigs/gpt2", "-b", "runs/one")[1] == []


def test_a_run_of_another_version_can_be_compared(kconf_project, kconf):
    kconf("defconfig", "gpt2")
    kconfig = kconf_project / "Kconfig"
    kconfig.write_text(kconfig.read_text().replace("config NOTE\n", "config REMARK\n"))
    assert kconf("diffconfig", "-a", ".config", "-b", "gpt2")[1] == ['+REMARK ""', '-NOTE ""']


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nope", "error: there is no configuration called 'nope'; make list-defconfigs shows what there is"),
        ("no/where", "error: no/where is neither a configuration nor the directory of a run"),
        (".config", "error: .config is neither a configuration nor the directory of a run"),
        ("faulty", "faulty:1: CONFIG_SEED is not a symbol; leave it out"),
        ("garbage", "garbage:1: 'what' is not an assignment; write CONFIG_NAME=value, or # before a comment"),
    ],
)
def test_what_cannot_be_compared(kconf_project, kconf, place, message):
    (kconf_project / "faulty").write_text("CONFIG_SEED=1\n")
    (kconf_project / "garbage").write_text("what\n")
    status, out, err = kconf("diffconfig", "-a", place, "-b", "gpt2")
    assert (status, out, err[0]) == (2, [], message)


# listnewconfig, helpnewconfig


def test_new_options_are_listed_with_default_or_help(kconf_project, kconf):
    kconf("defconfig", "lenet5")
    assert kconf("listnewconfig") == (0, [], [])
    kconfig = kconf_project / "Kconfig"
    kconfig.write_text(
        kconfig.read_text() + '\nconfig NEW\n\tint "New"\n\tdefault 7\n\thelp\n\t  About it.\n'
        '\nchoice KIND_CHOICE\n\tprompt "Kind"\n\thelp\n\t  Which.\n'
        '\nconfig KIND_A\n\tbool "A"\n\nendchoice\n'
    )
    assert kconf("listnewconfig") == (0, ["CONFIG_NEW=7", "CONFIG_KIND_A=y"], [])
    assert kconf("helpnewconfig")[1] == [
        "CONFIG_NEW=7",
        "New",
        "",
        "About it.",
        "",
        "CONFIG_KIND_A=y",
        "Kind",
        "",
        "Which.",
    ]
