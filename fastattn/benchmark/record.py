"""Results on disk: one JSON file per machine, with what is needed to judge them. No host names."""

from __future__ import annotations

import json
import os
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
    """<processor>.json, or <processor>-<target>.json where FASTATTN_TARGET names one."""
    words = f"{cpu_name()} {target()}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def target() -> str:
    """The lesser machine that kernels are compiled for; "" for this one."""
    return os.environ.get("FASTATTN_TARGET", "")


def setting(num_threads: int, commit: str = "") -> dict[str, Any]:
    """Commit, versions, processor and threads: the things a figure depends on."""
    return {
        "commit": commit,
        "cpu": cpu_name(),
        "target": target(),
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


def machine_text(setting: dict[str, Any]) -> str:
    """On what a setting was measured: "AMD EPYC as x86-64-v3, 2 threads"."""
    as_target = f" as {setting['target']}" if setting.get("target") else ""
    number = setting["num_threads"]
    return f"{setting['cpu']}{as_target}, {number} thread{'s' * (number > 1)}"


def read(path: Path) -> dict[str, dict[str, dict]]:
    """What save() has put into a file; {} and a folder for it if there is none yet.

    Raises
    ------
    ValueError  the file holds something else
    OSError     it cannot be read, or its folder not be made
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"results must be kept in a file of results, got {path}") from error
    return content


def save(path: Path, section: str, setting: dict[str, Any], results: dict[str, dict]) -> None:
    """Put results into one section of a machine's file; cases of that section measured before stay.

    Each result carries the setting it was measured in, so that a file may grow over many runs.
    """
    content = read(path)
    part = content.setdefault(section, {})
    part.update({name: {"setting": setting, **result} for name, result in results.items()})
    # One line for each list of samples, so that a new run is a short change.
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(text + "\n", encoding="utf-8")
