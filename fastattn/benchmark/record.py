"""Results on disk: one JSON file per machine, with what is needed to judge them. No host names."""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from ..machine import cpu_name

PACKAGES = (
    *("fastattn", "numpy", "numba", "llvmlite"),
    *("torch", "onnxruntime", "openvino", "jax", "transformers"),
)


def file_name() -> str:
    """<processor>.json"""
    return re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-") + ".json"


def setting(num_threads: int, commit: str = "") -> dict[str, Any]:
    """Commit, versions, processor and threads: the things a figure depends on."""
    return {
        "commit": commit,
        "cpu": cpu_name(),
        "num_threads": num_threads,
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions(),
        "blas": blas_libraries(),
    }


def versions() -> dict[str, str]:
    """Versions of fastattn, of what it runs on, and of its peers, where they are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def blas_libraries() -> list[str]:
    """The BLAS libraries loaded into this process; none are named without threadpoolctl."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return []
    return [
        f"{lib['internal_api']} {lib['version']} {lib.get('architecture', '')}".strip()
        for lib in threadpool_info()
        if lib["user_api"] == "blas"
    ]


def save(path: Path, section: str, setting: dict[str, Any], results: dict[str, dict]) -> None:
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
