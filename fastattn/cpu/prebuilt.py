"""Kernels that come with the package, compiled when it was built, for machines with a name.

They are images, keyed by the sources of kernels: a copy where those were edited finds none. A
source tree has none.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Hashable
from pathlib import Path

from ..machine import listed_features, runnable_targets
from .cache import entry_name, replace_file
from .image import Kernel, link
from .image import load as load_image

log = logging.getLogger("fastattn")

FOLDER = Path(__file__).parent / "prebuilt"


@functools.cache
def host_name() -> str:
    """The name in TARGETS whose code runs here best; "" if none is known to run.

    FASTATTN_TARGET may name a lesser one.
    """
    able = runnable_targets(listed_features())
    wanted = os.environ.get("FASTATTN_TARGET") or (able[-1] if able else "")
    return wanted if wanted in able else ""


@functools.cache
def load(key: Hashable) -> Kernel | None:
    """The kernel of this key that came with the package, or None."""
    name = host_name()
    if not name or not FOLDER.exists():
        return None
    try:
        return load_image(image_path(FOLDER, key, name), str(key))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.debug("prebuilt kernel %s not used: %s", key, error)
        return None


def write(folder: Path, key: Hashable, target: str, entry: str, code: bytes) -> None:
    """Put the object code of a kernel, compiled for a name in TARGETS, into a folder."""
    replace_file(image_path(folder, key, target), link(code, entry))


def image_path(folder: Path, key: Hashable, target: str) -> Path:
    """Where a folder has the image of this key and target."""
    return folder / (entry_name(key, target) + ".img")
