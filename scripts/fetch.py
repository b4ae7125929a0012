"""Download a model from the Hugging Face hub: make fetch REPO=owner/name REVISION=main DIRECTORY=folder.

No other command uses the network for weights. What will be downloaded is shown first: the commit that
REVISION= is now, bytes, free disk and licence. Code and pickled weights are left out. source.json, beside the
files, says where they come from. HF_ENDPOINT and HF_TOKEN are those of the package huggingface_hub.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lib import atomic
from lib.errors import ConfigError, ToolkitError, os_errors, run_main
from lib.nn.packages import import_extra
from lib.runs.identity import SOURCE
from lib.units import aligned, bytes_text

WANTED = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "README.md",
)


def main() -> int:
    """Download what the command line names. Raises ConfigError, ToolkitError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo", default="", help="owner/name on the hub")
    parser.add_argument("--revision", default="main", help="branch, tag or commit")
    parser.add_argument("--directory", default="", help="new folder for the files")
    options = parser.parse_args()
    if options.repo.count("/") != 1 or not all(options.repo.split("/")):
        raise ConfigError(f"REPO={options.repo} is no repository", todo="give REPO=owner/name")
    if not options.directory:
        raise ConfigError("DIRECTORY= is not given", todo="name a new folder for the files")
    if (folder := Path(options.directory).expanduser()).exists():
        raise ConfigError(f"DIRECTORY={folder} exists", todo="name a new folder")
    atomic.check_writable(folder, "DIRECTORY", log=print)
    fetch(options.repo, options.revision, folder)
    return 0


def fetch(repository: str, revision: str, folder: Path) -> None:
    """Download `repository` at `revision` to the new `folder`, and check the hashes of large files.

    Raises ConfigError without the package, for a repository without weights in safetensors, and for one that
    does not fit on the disk; ToolkitError where it cannot be downloaded or a file is damaged.
    """
    hub, errors = import_extra("huggingface_hub"), import_extra("huggingface_hub.errors")
    # Base classes are those of the HTTP client, whose package differs by version, and OSError.
    failures = (*errors.HfHubHTTPError.__bases__, errors.HFValidationError)
    try:
        found = hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
    except failures as error:
        raise _failed(repository, error) from error
    files = {each.rfilename: each for each in found.siblings if _is_wanted(each.rfilename)}
    if not any(name.endswith(".safetensors") for name in files):
        raise ConfigError(
            f"{repository} has no weights in safetensors", todo="convert them, or choose another"
        )
    size_bytes, free_bytes = sum(each.size or 0 for each in files.values()), _free_bytes(folder)
    licence = _licence(found.card_data)
    rows = {
        "repository": repository,
        "revision": f"{revision}, now commit {found.sha}",
        "files": f"{len(files)} of {len(found.siblings)}, {bytes_text(size_bytes)}",
        "free disk": bytes_text(free_bytes),
        "licence": licence,
    }
    print("\n".join(aligned([*zip(*rows.items(), strict=True)])), flush=True)
    if size_bytes > free_bytes:
        raise ConfigError(
            f"{repository} does not fit on the disk of {folder}", todo="name another DIRECTORY="
        )
    # A further try resumes this one; another commit has a folder of its own.
    partial = folder.with_name(f"{folder.name}.{found.sha[:12]}.partial")
    try:
        hub.snapshot_download(repository, revision=found.sha, local_dir=partial, allow_patterns=[*files])
    except failures as error:
        raise _failed(repository, error) from error
    hashes = dict[str, str]()
    with os_errors("keep the files"):
        for name, each in files.items():
            with (partial / name).open("rb") as opened:
                hashes[name] = hashlib.file_digest(opened, "sha256").hexdigest()
            if each.lfs and hashes[name] != each.lfs.sha256:
                what = f"{partial / name} is not what the hub has"
                raise ToolkitError(what, todo="remove it and try again")
        facts = {"repository": repository, "commit": found.sha, "license": licence, "sha256": hashes}
        atomic.write_text(partial / SOURCE, json.dumps(facts, indent=2) + "\n")
        if (cache := partial / ".cache").exists():  # of the package
            shutil.rmtree(cache)
        partial.rename(folder)
    print(f"{folder}: done. CONFIG_INITIAL_WEIGHTS or CONFIG_HUGGINGFACE_DIR takes it")


def _is_wanted(name: str) -> bool:
    return "/" not in name and name != SOURCE and any(fnmatch(name, pattern) for pattern in WANTED)


def _licence(card: Any) -> str:
    """Return the licence that a model card names: a word for a terminal and for the cards of exports."""
    named = getattr(card, "license", None)
    if named == "other":
        named = getattr(card, "license_name", None) or named
    words = named if isinstance(named, list) else [named or ""]
    return "-".join(filter(None, (re.sub(r"[^\w.+-]+", "-", str(word)) for word in words))) or "unknown"


def _free_bytes(folder: Path) -> int:
    there = next(each for each in folder.absolute().parents if each.exists())
    return shutil.disk_usage(there).free


def _failed(repository: str, error: Any) -> ToolkitError:
    why = " ".join(str(error).split())[:300]
    return ToolkitError(
        f"{repository} cannot be downloaded", why=why, todo="check REPO= and REVISION=, or HF_TOKEN"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
