"""Results on disk: one JSON file per machine, with what is needed to judge them. No host names."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from threadpoolctl import threadpool_info

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = (
    *("numpy", "numba", "llvmlite"),
    *("torch", "onnxruntime", "jax", "openvino", "transformers"),
)


def cpu_name() -> str:
    """The processor as it names itself."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def parser(doc: str) -> argparse.ArgumentParser:
    """The options that every script has."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps the lines of doc
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=default_path(),
        help="keep the samples; without a path in bench/results/<processor>.json",
    )
    return parser


def default_path() -> Path:
    """bench/results/<processor>.json."""
    return RESULTS / (re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-") + ".json")


def setting(num_threads: int) -> dict:
    """Commit, versions, processor and threads: the things a figure depends on."""
    return {
        "commit": _commit(),
        "cpu": cpu_name(),
        "num_threads": num_threads,
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "blas": [
            f"{lib['internal_api']} {lib['version']} {lib.get('architecture', '')}".strip()
            for lib in threadpool_info()
            if lib["user_api"] == "blas"
        ],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit that was run, with "+" if files differ from it; "" outside a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


def save(path: Path, section: str, setting: dict, results: dict) -> None:
    """Put results into one section of a machine's file; cases of that section measured before stay.

    Each result carries the setting it was measured in, so that a file may grow over many runs.
    """
    content = json.loads(path.read_text()) if path.exists() else {}
    part = content.setdefault(section, {})
    part.update({name: {"setting": setting, **result} for name, result in results.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    # One line for each list of samples, so that a new run is a short change.
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(text + "\n")
