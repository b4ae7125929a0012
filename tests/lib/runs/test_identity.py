"""Identities: what is trained, whatever else the tree can train."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lib import kconf, plugin_folders
from lib.nn.model_code import code_facts
from lib.runs import identity as run_identity
from lib.runs import weight_files
from lib.runs.directory import RunDir
from lib.runs.identity import (
    code_digest,
    digest_of,
    former_identity,
    has_former_identity,
    identity,
    initial_digest,
    is_identity,
    plugin_digests,
    source_of_base,
    sources_of,
    stored_digests,
    stored_weight_facts,
    trains,
    weight_facts,
)

ROOT = Path(__file__).parents[3]
MODELS = sorted(path.parent.name for path in ROOT.glob("models/*/model.py"))


DATASET = """\
choice DATASET_CHOICE

config DATASET_MINE
\tbool "Mine"
\thelp
\t  New.

endchoice

config DATASET
\tstring
\tdefault "mine" if DATASET_MINE

config MINE_SIZE
\tint "Size"
\tdepends on DATASET_MINE
\tdefault 7
\thelp
\t  New.
"""


@pytest.fixture
def kconfig(tmp_path: Path) -> Path:
    """A tree of Kconfig files alone."""
    for file in [*ROOT.glob("Kconfig*"), *ROOT.glob("[!.b]*/**/Kconfig")]:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return tmp_path


def resolved(tree: Path, **overrides: str) -> kconf.Resolved:
    requested = {f"CONFIG_{name}": value for name, value in overrides.items()}
    return kconf.load_written("", root=tree, overrides=requested)


def identities(tree: Path, models: list[str]) -> dict[str, str]:
    return {model: identity(resolved(tree, **{f"MODEL_{model.upper()}": "y"}).in_effect) for model in models}


def edit(tree: Path, file: str, before: str, after: str) -> None:
    text = (tree / file).read_text()
    assert before in text
    (tree / file).write_text(text.replace(before, after, 1))


@pytest.mark.slow
@pytest.mark.parametrize("removed", MODELS)
def test_no_model_is_part_of_anothers_identity(removed: str, kconfig: Path) -> None:
    others = [model for model in MODELS if model != removed]
    edit(kconfig, "Kconfig", "\tdefault MODEL_LENET5\n", "")  # a model that is no more cannot be the default
    before = identities(kconfig, others)
    assert len(set(before.values())) == len(others)
    shutil.rmtree(kconfig / "models" / removed)
    assert identities(kconfig, others) == before


def test_a_data_set_is_no_part_of_the_identity_of_runs_on_others(kconfig: Path) -> None:
    before = identities(kconfig, ["lenet5", "gpt2"])
    home = kconfig / "lib" / "data" / "datasets" / "mine"
    home.mkdir()
    (home / "Kconfig").write_text(DATASET)
    assert resolved(kconfig, DATASET_MINE="y").in_effect["MINE_SIZE"] == 7
    assert identities(kconfig, ["lenet5", "gpt2"]) == before


OPTION = 'config NEW_OPTION\n\t{kind} "New"\n\tdefault {default}\n\thelp\n\t  What is new.\n{neutral}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "default", "neutral", "same"),
    [
        ("bool", "n", "n", True),
        ("int", "0", "0", True),
        ("string", '""', '""', True),
        ("bool", "n", None, False),
        ("int", "0", None, False),
        ("int", "3", "0", False),
        ("bool", "y", "n", False),
    ],
)
def test_a_new_option_counts_where_it_is_not_neutral(
    kind: str, default: str, neutral: str | None, same: bool, kconfig: Path
) -> None:
    before = identities(kconfig, ["lenet5"])
    line = "" if neutral is None else f"	  Neutral: {neutral}\n"
    with (kconfig / "train/Kconfig").open("a") as file:
        file.write(OPTION.format(kind=kind, default=default, neutral=line))
    assert (identities(kconfig, ["lenet5"]) == before) == same
    if same and kind == "int":
        changed = resolved(kconfig, MODEL_LENET5="y", NEW_OPTION="1")
        assert identity(changed.in_effect) != before["lenet5"]


def test_a_changed_default_is_another_training(kconfig: Path) -> None:
    before = identities(kconfig, ["lenet5"])
    edit(kconfig, "models/lenet5/Kconfig", "default 512 if MODEL_LENET5", "default 256 if MODEL_LENET5")
    changed = identities(kconfig, ["lenet5"])
    assert changed != before, "the effective batch that the model recommends"
    edit(kconfig, "train/Kconfig", 'default "0.001"', 'default "0.002"')
    assert identities(kconfig, ["lenet5"]) != changed


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {"NUM_DEVICES": "1"},
        {"KEEP_LAST": "9"},
        {"RESUME_NEVER": "y"},
        {"SINK_TENSORBOARD": "y"},
        {"CHECKPOINT_FORMAT_SHARDED": "y"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_changes_no_number_of_a_run_is_no_part_of_it(setting: Mapping[str, str]) -> None:
    assert identity(resolved(ROOT, **setting).in_effect) == identity(resolved(ROOT).in_effect)
    assert identity(resolved(ROOT, SEED="2").in_effect) != identity(resolved(ROOT).in_effect)


def old_run(runs: Path, values: Mapping[str, Any]) -> RunDir:
    run = RunDir.create(
        runs, model="lenet5", identity=former_identity(values), files={"config": "", "values": values}
    )
    run.release()
    return run


def test_a_run_of_an_older_tree_is_known_by_its_values(tmp_path: Path) -> None:
    requested = resolved(ROOT)
    older = {**requested.values, "OTHER_WIDTH": None, "MODEL_OTHER_HAS": False}  # of a model that is no more
    del older["CHANNELS_LAST"]
    without = kconf.Resolved.from_json(
        {
            **requested.to_json(),
            "in_effect": {k: v for k, v in requested.in_effect.items() if k != "CHANNELS_LAST"},
        }
    )
    run = old_run(tmp_path / "older", older)
    assert trains(run, without) and has_former_identity(run)
    assert not trains(run, requested), "an option at a value that is not neutral is new"
    other = old_run(tmp_path / "other", {**requested.values, "SEED": 2})
    assert not trains(other, requested)
    removed = old_run(tmp_path / "removed", {**requested.values, "GONE": 3})
    assert not trains(removed, requested), "an option that it was trained with is no more"
    run.write("values", {**older, "SEED": 2})
    assert not trains(run, without), "its values are not those that named it"
    (run.path / "values.json").unlink()
    assert not trains(run, without) and not has_former_identity(run)


def test_values_that_went_through_json_are_the_same(tmp_path: Path) -> None:
    requested = resolved(ROOT, SCHEDULE_STEP="y")
    assert isinstance(requested.in_effect["LR_STEP_PCT_LIST"], tuple)
    run = old_run(tmp_path, dict(requested.values))
    assert json.loads((run.path / "values.json").read_text())["LR_STEP_PCT_LIST"] == [50, 75]
    assert trains(run, requested)
    assert kconf.Resolved.from_json(json.loads(json.dumps(requested.to_json()))) == requested


def test_values_are_asked_for_only_where_the_name_is_another() -> None:
    requested = resolved(ROOT)

    def never() -> None:
        raise AssertionError

    assert is_identity(identity(requested.in_effect), requested, stored=never)


def test_an_option_of_a_model_with_a_name_that_begins_like_a_symbol_counts() -> None:
    requested = dict(resolved(ROOT).in_effect)
    assert "PREFETCH" in requested and "KEEP_LAST" in requested
    one, other = ({**requested, "PREFETCH_WIDTH": width} for width in (8, 16))
    assert identity(one) != identity(other)


def test_the_strategy_is_no_part_of_the_identity(kconfig: Path) -> None:
    """A run goes on with any strategy; one whose name was made with it is found by that one."""
    auto = resolved(kconfig, NUM_DEVICES="2")
    ddp = resolved(kconfig, NUM_DEVICES="2", DIST_STRATEGY_DDP="y")
    assert identity(ddp.in_effect) == identity(auto.in_effect)
    known = hashlib.sha256(b"").hexdigest()[:8]
    assert not is_identity(known, ddp, stored=lambda: None)
    before = run_identity._digest(run_identity.hashed_values(ddp.in_effect))
    assert before != identity(ddp.in_effect) and is_identity(before, ddp, stored=lambda: None)


def weighed(path: Path | str, **more: str) -> kconf.Resolved:
    return resolved(ROOT, INITIAL_WEIGHTS=str(path), **more)


def test_initial_weights_count_by_their_content(tmp_path: Path) -> None:
    for name, content in (("a", b"GGU"), ("b", b"PK\x03\x04 one"), ("c", b"PK\x03\x04 two")):
        (tmp_path / name).write_bytes(content)
    one, other = (identity(weighed(tmp_path / name).in_effect) for name in ("b", "c"))
    assert len({one, other, identity(resolved(ROOT).in_effect)}) == 3
    (tmp_path / "there").mkdir()
    (tmp_path / "b").rename(tmp_path / "there" / "d")
    assert identity(weighed(tmp_path / "there" / "d").in_effect) == one
    assert identity(weighed("d", WEIGHTS_DIR=str(tmp_path / "there")).in_effect) == one
    missing = [identity(weighed(tmp_path / name).in_effect) for name in ("b", "a")]
    assert len({one, *missing}) == 3, "what cannot be read counts by its path"


def test_a_run_is_found_when_its_weights_have_gone_or_changed(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(b"PK\x03\x04 one")
    requested = weighed(path)
    values, name = dict(requested.values), identity(requested.in_effect)
    files = {"config": "", "values": values, "env": {"initial_weights": initial_digest(requested.in_effect)}}
    run = RunDir.create(tmp_path / "runs", model="lenet5", identity=name, files=files)
    run.release()
    assert trains(run, requested)
    path.write_bytes(b"PK\x03\x04 two")
    assert identity(requested.in_effect) != name
    assert trains(run, requested), "it is evaluated with what it stored"
    path.unlink()
    assert trains(run, requested)
    assert not trains(run, weighed(tmp_path / "other")), "its path is another one"
    run.write("env", {})
    assert not trains(run, requested)


def test_a_run_named_by_the_path_of_its_weights_is_found(tmp_path: Path) -> None:
    path = tmp_path / "w"
    requested = weighed(path, MODEL_GPT2="y")
    by_path = identity(requested.in_effect)  # of before, and of what is not there
    path.write_bytes(b"PK\x03\x04 one")
    assert by_path != identity(requested.in_effect)
    assert is_identity(by_path, requested, stored=lambda: None)
    run = RunDir.create(
        tmp_path / "runs",
        model="gpt2",
        identity=by_path,
        files={"config": "", "values": dict(requested.values)},
    )
    run.release()
    assert trains(run, requested)
    run.write("env", {"initial_weights": initial_digest(requested.in_effect)})  # as after it was resumed
    assert trains(run, requested)


def test_digests_of_large_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_CACHED_BYTES", 4)
    (tmp_path / "w").write_bytes(b"PK\x03\x04 one")
    found = weight_files.find_weights("w", root=tmp_path)
    digest = found.digest(cache=tmp_path / "cache")
    assert digest == hashlib.sha256(b"PK\x03\x04 one").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("it is hashed again"))
        assert found.digest(cache=tmp_path / "cache") == digest
    (tmp_path / "w").write_bytes(b"PK\x03\x04 another")
    assert found.digest(cache=tmp_path / "cache") != digest


def test_a_model_directory_counts_by_its_content_wherever_it_is(tmp_path: Path) -> None:
    def made(name: str, config: str, weights: bytes = b"") -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config)
        if weights:
            (folder / "model.safetensors").write_bytes(weights)
        return identity(resolved(ROOT, MODEL_HUGGINGFACE="y", HUGGINGFACE_DIR=str(folder)).in_effect)

    one = made("one", "{}")
    assert one == made("two", "{}")
    trained = made("trained", "{}", b"weights" * 100_000)
    others = {trained, made("other", "{ }"), made("more", "{}", b"weights" * 100_001)}
    others |= {made("last", "{}", b"weights" * 99_999 + b"WEIGHTS")}
    assert len(others | {one}) == 5
    nowhere = resolved(ROOT, MODEL_HUGGINGFACE="y", HUGGINGFACE_DIR=str(tmp_path / "nowhere"))
    assert identity(nowhere.in_effect) not in others, "training it is refused"


def test_where_weights_were_fetched_is_kept_and_handed_on(tmp_path: Path) -> None:
    source = {"repository": "me/tiny", "commit": "0" * 40, "license": "mit", "sha256": {}}
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"PK\x03\x04weights")
    for text in (None, "[1]", "{", json.dumps({**source, "license": ["mit"]})):  # none, and those of others
        if text is not None:
            (folder / "source.json").write_text(text)
        assert set(weight_facts(weighed(folder / "model.pt").in_effect)) == {"initial_weights"}
    (folder / "source.json").write_text(json.dumps(source))
    for path in (folder, folder / "model.pt"):
        facts = weight_facts(weighed(path).in_effect)
        assert facts["fetched"] == {"INITIAL_WEIGHTS": source}
    (folder / "source.json").unlink()
    card = {"base_model": "me/tiny", "base_commit": "0" * 40, "license": "mit"}
    (folder / "model.json").write_text(json.dumps({**card, "format": "safetensors"}))
    exported = weight_facts(weighed(folder).in_effect)["fetched"]["INITIAL_WEIGHTS"]
    assert exported == {name: source[name] for name in ("repository", "commit", "license")}
    (folder / "model.json").write_text(json.dumps({**card, "base_commit": None}))  # of a run, not of the hub
    assert set(weight_facts(weighed(folder).in_effect)) == {"initial_weights"}
    (folder / "source.json").write_text(json.dumps(source))
    in_effect = {"HUGGINGFACE_DIR": str(folder), "TOKENIZER_DIR": str(folder)}
    assert weight_facts(in_effect) == {"fetched": dict.fromkeys(in_effect, source)}
    run = old_run(tmp_path, {"INITIAL_WEIGHTS": str(folder)})
    assert source_of_base(run) is None and stored_weight_facts(run) == {}, "a run of before"
    run.write("env", {"torch": "2", **facts})
    assert stored_weight_facts(run) == facts and source_of_base(run) == source
    run.write("values", {"INITIAL_WEIGHTS": ""})
    assert source_of_base(run) is None, "of the tokenizer alone, say"


SHARED = {
    "models/resnet18/model.py": "x = 1; import torch, models.resnet\n",
    "models/resnet.py": "import torch\nimport models.layers.norm\n",
    "models/layers/norm.py": "",
    "models/lenet5/model.py": "import torch  # as models.resnet does\n",
}
EXTERNAL = {
    "models/own/model.py": "from models.common import (\n    first,\n)\nfrom models.resnet import ResNet\n",
    "models/common.py": "from models import other as another, none; '\\d'\n",
    "models/other/model.py": "from .. import last\n",
    "models/last.py": "from .least import nothing\n",
    "models/least.py": "",
    "data/table/data.py": "from ..read import rows\n",
    "data/read.py": "",
    "models/resnet.py": "",
}


def test_the_code_of_a_plug_in_has_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "lab"
    for folder, files in ((tmp_path / "tree", SHARED), (base, EXTERNAL)):
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    monkeypatch.setattr(run_identity, "ROOT", tmp_path / "tree")
    plain, resnet = (tmp_path / "tree" / "models" / name for name in ("lenet5", "resnet18"))

    def is_changed_by(plugin: Path, *files: Path) -> list[bool]:
        found = []
        for file in files:
            before, text = code_digest(plugin), file.read_text()
            file.write_text(f"{text}# changed\n")
            found.append(code_digest(plugin) != before)
            file.write_text(text)
        return found

    tree = [tmp_path / "tree" / name for name in SHARED]
    assert is_changed_by(resnet, *tree) == [True, True, True, False]
    assert is_changed_by(plain, *tree) == [False, False, False, True]
    assert code_digest(plain) == digest_of([plain / "model.py"], plain), "as before others counted"
    assert {tree[1], tree[2]} <= set(sources_of(tmp_path / "tree", "resnet18"))
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(base))
    own, net = [base / name for name in EXTERNAL], base / "models" / "own"
    assert is_changed_by(net, *own, tree[1]) == [True] * 5 + [False] * 3 + [True]
    assert is_changed_by(base / "data" / "table", *own) == [False] * 5 + [True] * 2 + [False]
    before, new = code_digest(net), base.rename(tmp_path / "a lab")
    monkeypatch.setenv(plugin_folders.EXTERNAL, str(new))
    assert code_digest(new / "models" / "own") == before, "wherever it is"


def test_a_run_stores_the_digests_that_sweeps_compare() -> None:
    assert stored_digests(code_facts(*(c := ("resnet18", "classify", "cifar10")))) == plugin_digests(*c)
