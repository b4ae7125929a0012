"""pip install -e .: the package anneal is importable, and nothing else of the tree."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Not by find_spec: asked for pip, setuptools gives up its distutils in this process, which Inductor needs.
INSTALLED = {each.metadata["Name"] for each in importlib.metadata.distributions()}
MISSING = sorted({"pip", "setuptools"} - INSTALLED)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_an_editable_installation_has_this_package_alone(tmp_path: Path) -> None:
    tree, environment = tmp_path / "tree", tmp_path / "environment"
    tree.mkdir()
    for name in ("anneal", "lib", "models", "train", "scripts", "defconfigs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Kconfig", "Kconfig.legacy", "pyproject.toml", "requirements.txt", "README.md"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "known.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n"
    )  # setuptools, and what lib imports
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        f"--python={python}",
        "install",
        "--disable-pip-version-check",
    ]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "-e", "."]
    done = subprocess.run(pip, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    program = (
        "import importlib.util, anneal\n"
        "assert anneal.configure('lenet5').values['MODEL'] == 'lenet5'\n"
        "print(anneal.__file__, [name for name in ('lib', 'models', 'train', 'scripts', 'defconfigs')"
        " if importlib.util.find_spec(name)])\n"
    )
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{tree}/anneal/__init__.py []\n", 0), done.stderr


@pytest.mark.slow
def test_the_tree_on_the_path_of_python_is_enough(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("MINE = True\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import anneal, lib\nprint(anneal.configure('lenet5').values['MODEL'], lib.MINE, anneal.__file__)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == (f"lenet5 True {ROOT}/anneal/__init__.py\n", 0), done.stderr
