"""Extras that Makefile and .ci/ install are in pyproject.toml: pip only warns of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parent.parent
USERS = [ROOT / "Makefile", ROOT / ".ci" / "run", ROOT / ".ci" / "slow"]
pytestmark = pytest.mark.skipif(not all(map(Path.exists, USERS)), reason="no source tree")


@pytest.mark.parametrize("user", USERS, ids=lambda path: path.name)
def test_every_stamp_is_an_extra(user):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stamps = set(re.findall(r"\.venv/(\w+)\.stamp", user.read_text()))
    assert stamps
    assert stamps <= set(project["optional-dependencies"])


def test_extras_of_extras_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = re.findall(r"fastattn\[([\w,]+)\]", str(extras))
    assert {extra for names in named for extra in names.split(",")} <= set(extras)
