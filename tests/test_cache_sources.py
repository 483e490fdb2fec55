"""Cached kernels are known by the sources that take part in them: all of those, and no others."""

from __future__ import annotations

import ast

import pytest
from processes import PACKAGE, fresh
from test_layers import MODULES, imported_modules

from fastattn.cpu import cache

HASHED = {name for name, path in MODULES.items() if path in set(cache.sources())}


def of_kernels(name):
    return name.partition(".")[0] in cache.FOLDERS


def imports_a_compiler(name):
    """Whether a module imports Numba or llvmlite itself, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return bool(found & {"numba", "llvmlite"})


def test_what_kernels_import_is_hashed_and_nothing_else():
    reached, waiting = set(), [m for m in MODULES if of_kernels(m) or imports_a_compiler(m)]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += imported_modules(name)
    assert reached == HASHED
    names = [name.replace(".", "/") for name in HASHED if not of_kernels(name)]
    assert sorted(names) == sorted(cache.BESIDE)


def test_others_import_nothing_that_kernels_are_written_with(tmp_path):
    """So a function for Numba cannot lie there: the decorators are out of reach."""
    others = set(MODULES) - HASHED
    assert {"api", "plan", "nn.norms", "torch.sdpa"} <= others
    imported = {m for name in others for m in imported_modules(name) if m in HASHED}
    assert {"cpu.run", "cpu.compile", "cuda.run"} <= imported
    code = f"""
import importlib, json, sys
for name in {sorted(imported)}:
    importlib.import_module("fastattn." + name)
print(json.dumps(sorted({{"numba", "llvmlite"}} & set(sys.modules))))
"""
    assert fresh(code, tmp_path) == []


def test_every_function_that_is_translated_is_hashed(monkeypatch):
    pytest.importorskip("numba")
    from numba.core.untyped_passes import TranslateByteCode

    from fastattn.cpu import built_in, compile

    seen, run_pass = [], TranslateByteCode.run_pass

    def watched(one, state):
        seen.append(state.func_id.func.__code__.co_filename)
        return run_pass(one, state)

    monkeypatch.setattr(TranslateByteCode, "run_pass", watched)
    for key in (("elementwise", "gelu", "float32"), "body of a region"):
        compile.translate(built_in.kernels()[key](compile.named_target("x86-64-v3").unit))
    ours = {name for name in seen if name.startswith(str(PACKAGE))}
    assert len(ours) > 1
    assert ours <= set(map(str, cache.sources()))


def test_an_edit_elsewhere_leaves_the_digest_as_it_is(tmp_path, monkeypatch):
    for path in cache.sources():
        copy = tmp_path / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cpu" / "cache.py"))
    digests = []
    for edited in ("", "api.py", "cpu/forward.py", "cuda/new.py"):
        if edited:
            with (tmp_path / edited).open("a", encoding="utf-8") as file:
                file.write("# edited\n")
        digests.append(cache.source_digest.__wrapped__())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
