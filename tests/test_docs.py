"""What the texts name is there: files, links, names of the package, and examples that run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).parents[1]
TEXTS = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench/README.md"])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Libraries that are not imported here: other tests do, in processes of their own.
FACES = ("dask", "jax", "torch", "transformers")


@pytest.fixture(params=TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def text(request):
    """A text, and where it lies."""
    return request.param.read_text(encoding="utf-8"), request.param.parent


def named_files(text):
    """Paths of the repository in code, some of them patterns."""
    outside = BLOCK.sub("", text)
    commands = " ".join(code for kind, code in BLOCK.findall(text) if kind != "python")
    folders = r"(?:bench|docs|examples|fastattn|tests)/[\w*/.-]*\w"
    return set(re.findall(rf"`({folders})`", outside)) | set(re.findall(folders, commands))


def test_files_are_there(text):
    content, folder = text
    links = re.findall(r"\]\((?!https?:)([^)#]+)", content)
    missing = [link for link in links if not (folder / link).exists()]
    missing += [name for name in named_files(content) if not list(ROOT.glob(name))]
    assert not missing


def test_names_are_there(text):
    content, _ = text
    for name in set(re.findall(r"(?<![\w./-])(fastattn(?:\.[a-z_]\w*)+)", content)):
        if name.split(".")[1] not in FACES:
            if name.startswith("fastattn.onnx."):
                pytest.importorskip("onnx")
            resolve_name(name)


def python_blocks(text):
    return [code for kind, code in BLOCK.findall(text) if kind == "python"]


def test_examples_are_python(text):
    for code in python_blocks(text[0]):
        ast.parse(code)


@pytest.mark.slow
def test_examples_of_the_readme_run():
    names = {}
    for code in python_blocks((ROOT / "README.md").read_text(encoding="utf-8")):
        exec(code, names)
    assert names["dq"].shape == names["q"].shape
    assert names["y"].shape == (1, 512)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["arrays", "flash_attn", "jax", "onnx", "torch"])
def test_examples_of_a_page_run(page):
    """The others name files, a cluster or a model that are not here."""
    code = "\n".join(python_blocks((ROOT / f"docs/{page}.md").read_text(encoding="utf-8")))
    for package in set(re.findall(r"^(?:import|from) (torch|jax|onnx)\b", code, re.MULTILINE)):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
