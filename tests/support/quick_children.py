"""Training processes of sweeps that take no time: they make and resume run directories, and train nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from lib.sweeps import runner
from lib.sweeps.subprocess_run import Children, ChildRun

# The accuracy of a run is the number of its training among all of them.
_PROGRAM = """
import json, os, pathlib, sys
place, text = pathlib.Path(sys.argv[2]), pathlib.Path(os.environ["KCONFIG_CONFIG"]).read_text()
runs = sorted(place.glob("*/*"))
begun = [run for run in runs if json.loads((run / "status.json").read_text())["state"] != "done"]
if begun and "CONFIG_RESUME_AUTO=y" in text:
    run = begun[-1]
else:
    run = place / "lenet5" / f"2100010{len(runs) + 1}T000000Z-{place.name}"
    run.mkdir(parents=True)
with open("trained", "a") as file:
    file.write(f"{run.name}\\n")
(run / "config").write_text(text)
(run / "values.json").write_text("{}")
digests = {"model": pathlib.Path("code").read_text(), "task": "of a task"}
(run / "plugins.json").write_text(json.dumps({kind: {"sha256": digest} for kind, digest in digests.items()}))
facts = {"accuracy": len(open("trained").readlines()), "part": "test"}
(run / "status.json").write_text(json.dumps({"state": "done", "facts": facts}))
"""


@dataclass(frozen=True)
class QuickChildren:
    """Replaces what `Children` start. folder: for its files."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        (self.folder / "train").mkdir(parents=True)
        (self.folder / "train" / "__main__.py").write_text(_PROGRAM)
        whole = Children.train

        def train(children: Children, place: Path, configuration: str, *, root: Path) -> ChildRun:  # noqa: ARG001
            return whole(children, place, configuration, root=self.folder)

        self.monkeypatch.setattr(Children, "train", train)

    def edit(self, model: str, *, seen: bool = True) -> None:
        """Give the model another code. seen: also by this process, as by a new command."""
        (self.folder / "code").write_text(model)
        if seen:
            self.monkeypatch.setattr(
                runner, "plugin_digests", lambda *_: {"model": model, "task": "of a task"}
            )

    @property
    def trained(self) -> list[str]:
        """Names of the runs that were trained, once for each training."""
        file = self.folder / "trained"
        return file.read_text().split() if file.exists() else []
