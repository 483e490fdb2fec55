"""The scripts of bench/: their arithmetic, and that README says what the results say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import fastattn
import fastattn.plan as planning
from fastattn import repeat
from fastattn.benchmark import contest, record
from fastattn.benchmark.cases import CASES, Case
from fastattn.cpu import run as cpu_run

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def script(monkeypatch):
    """A script of bench/ as a module, by its name. Any kernel can be planned for."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setattr(cpu_run, "unavailable", lambda variant: "")
    planning._plan.cache_clear()
    repeat.forget()
    yield importlib.import_module
    planning._plan.cache_clear()
    repeat.forget()
    for name in [name for name, module in sys.modules.items() if is_script(module)]:
        del sys.modules[name]


def is_script(module):
    return Path(getattr(module, "__file__", None) or "").parent == BENCH


def test_readmes_are_what_the_report_writes(script):
    report = script("report")
    readme, bench = report.README.read_text(), report.BENCH_README.read_text()
    name = readme.partition("bench/results/")[2].partition(".png")[0]
    path = BENCH / "results" / f"{name}.json"
    results, lesser = json.loads(path.read_text()), report.held_to_avx2(path)
    assert report.fill(readme, report.text(results, f"bench/results/{name}.png")) == readme
    assert "forward" in lesser
    assert "inside" in results
    assert report.fill_bench(bench, results, lesser) == bench
    with pytest.raises(ValueError, match=r"README.md must hold the markers"):
        report.fill("no markers", "")


def test_report_shows_what_is_absent(script):
    report = script("report")
    result = {"flop": 10**9, "bound": "", "least_seconds": []}
    forward = {
        "tiny": {**result, "contenders": {"fastattn cpu": {"seconds": [0.5, 0.5]}}},
        "one": {
            **result,
            "contenders": {"fastattn cpu": {"seconds": [1, 2]}, "jax": {"seconds": [2, 4]}},
        },
    }
    rows = report.plots.rows_by_case(forward, ["one", "tiny"])
    lines = report.speed_table(rows, forward).splitlines()
    assert lines[0].endswith("| limit | jax |")
    assert [line.split(" | ")[-1] for line in lines[2:]] == ["2.00 |", "– |"]


# Blocks of whole registers: nothing is computed but what is seen, if all is.
DENSE = Case("dense", 2, 6, 3, 480, 1024, 64)


def costs(script):
    return script("simulate").Costs(pair=1e-9, key=1e-7, start=1e-6)


@pytest.mark.parametrize("cores", [1, 3, 64])
def test_simulated_items_are_those_of_the_plan(script, cores):
    simulate = script("simulate")
    for case in (DENSE, CASES["llama-2k-gqa"], CASES["decode-gqa"], CASES["vit-197"]):
        plan = simulate.plan_for(case, cores)
        items = simulate.items_of(plan, simulate.Costs(pair=1.0, key=0.0, start=0.0))
        assert len(items.seconds) == plan.work_items
        heads = case.batch * case.heads_kv
        visible = case.batch * case.heads_q * case.problem.visible_pairs
        most = (
            2 * visible if case.causal else visible * -(-case.seqlen_k // 16) * 16 // case.seqlen_k
        )
        assert visible <= items.seconds.sum() <= most
        if case is DENSE:
            assert items.seconds.sum() == visible
        if plan.num_splits > 1:  # every key once
            assert items.nbytes.sum() == heads * case.seqlen_k * 2 * case.head_dim * 4


def test_simulated_time(script):
    simulate, price = script("simulate"), costs(script)
    one = simulate.simulate(simulate.plan_for(DENSE, 1), price, 1)
    assert one.seconds == pytest.approx(one.ideal)
    assert (one.idle, one.starting) == (pytest.approx(0), 0)
    many = simulate.simulate(simulate.plan_for(DENSE, 8), price, 8)
    assert many.ideal < many.seconds < 2 * many.ideal
    assert 0 < many.starting < many.idle < 1
    # Starts so slow that all is done before the last thread begins.
    late = simulate.simulate(simulate.plan_for(DENSE, 8), price._replace(start=1.0), 8)
    assert late.seconds == pytest.approx(7.0)
    # Decoding: memory sets the time.
    decode = simulate.simulate(simulate.plan_for(CASES["decode-gqa"], 8), price, 8)
    assert decode.bound == (decode.seconds == decode.ideal)
    assert decode.gb_s <= 8 * simulate.READ_GB_S * 1.0001


def test_tuned_plans(script):
    tune = script("tune")
    problem = CASES["causal-1k"].problem
    with fastattn.num_threads(2):
        before = planning.plan(problem, "cpu")
        plan = tune.plan_with(problem, BLOCK_N=2048)
        assert (plan.block_n, plan.split_n, plan.mc) == (2048, 2048, before.mc)
        assert tune.plan_with(problem, BLOCK_M=96).block_m == 96
        assert planning.plan(problem, "cpu") == before  # nothing stays
    assert tune.knobs_of("MC,BLOCK_M") == ["MC", "BLOCK_M"]
    with pytest.raises(ValueError, match=r"knobs must be among .*, got 'mc'"):
        tune.knobs_of("mc")
    for values in tune.VALUES["BLOCK_N"]:
        assert values % 32 == 0
    assert all(hasattr(planning, knob) for knob in tune.VALUES)
    tried = {"MC 24": {"present": [1.0, 2.0], "seconds": [2.0, 4.0]}}
    other = {"MC 24": {"present": [2.0, 2.0], "seconds": [1.0, 1.0]}}
    (shown,) = tune.tables({"one": tried, "two": other, "three": {}}, 2)
    assert [list(column.cells) for column in shown.columns] == [
        ["one", "two", "three", "all"],
        ["2.00", "[green]0.50 *[/green]", "", "1.000"],
    ]


def test_shares_of_the_variants_are_what_they_see(script):
    variants = script("variants")
    rng = np.random.default_rng(0)
    for variant in variants.VARIANTS:
        arguments = variant.arguments(rng, 1, variant.seqlen)
        if "block_mask" in arguments:
            share = (
                np.count_nonzero(arguments["block_mask"].kinds) / arguments["block_mask"].kinds.size
            )
        else:
            kept = {k: v for k, v in arguments.items() if k in ("causal", "window")}
            keys = arguments.get("kv_len", variant.seqlen)
            q = np.broadcast_to(np.float32(0), (variant.seqlen, 1))
            problem = fastattn.explain(q, q[:keys], q[:keys], backend="numpy", **kept).problem
            share = problem.visible_pairs / variant.seqlen**2
        assert variant.share == pytest.approx(share), variant.name
    assert [variant.name for variant in variants.select("soft*,plain")] == ["softcap", "plain"]
    with pytest.raises(ValueError, match=r"variants must be names or patterns .*, got 'nope'"):
        variants.select("nope")


@pytest.mark.parametrize("name", ["alibi", "t5", "shaw", "transformer_xl"])
def test_relative_encodings_agree_with_a_bias(name, script):
    relative = script("relative")
    assert set(relative.SCHEMES) == {"alibi", "t5", "shaw", "transformer_xl"}
    ours, theirs = relative.measure(name, 40, rounds=1)
    assert len(ours) == len(theirs) == 1


@pytest.mark.parametrize(
    "wanted",
    ["softmax", *(pytest.param(w, marks=pytest.mark.slow) for w in ("*s", "*t*", "*_mod *"))],
)
def test_pieces_are_timed(script, wanted):
    pytest.importorskip("numba")
    pieces = script("pieces")
    found = pieces.measure([wanted], "float32", 16)
    assert "pass over scores" in found
    assert len(found) > 1
    for name, row in found.items():
        # Of a modifier, the pass is taken off: on a busy machine, nothing or less may be left.
        assert row["ns"] > 0 or "_mod " in name


def test_trees_take_turns(script, tmp_path):
    trees, said = script("trees"), []

    class Tree:
        def __init__(self, commit, seconds):
            self.commit, self.each = commit, seconds

        def seconds(self, case):
            said.append(self.commit)
            return self.each

    row = trees.measure((Tree("a", 2.0), Tree("b", 1.0)), DENSE, 3)
    assert "".join(said) == "ab" + "ab" + "ba" + "ab"
    assert row == {"trees": ["a", "b"], "first": [2.0] * 3, "second": [1.0] * 3}
    assert trees.ratio_text(row) == "[green]0.500 (0.500–0.500)[/green]"
    assert trees.ratio_text({"first": [1, 1], "second": [0.5, 1.5]}) == "1.000 (0.750–1.250)"
    with trees.folder_of(str(tmp_path)) as folder:
        assert folder == tmp_path.resolve()


def test_scaling_is_shown_key_by_key(script):
    scaling = script("scaling")
    found = {"1000 keys": {"seconds": [1e-3, 2e-3]}, "3000 keys": {"seconds": [6e-3, 12e-3]}}
    cells = [list(column.cells) for column in scaling.growth_table(found).columns]
    assert cells[0] == ["1000", "3000"]
    assert cells[2] == ["1500.0", "3000.0"]
    assert [text.split()[0] for text in cells[3]] == ["0.667", "1.333"]  # of the mean of a round
    ratios = scaling.threads_table({"one": {"one": [2.0, 2.2], "two": [1.0, 1.0]}}).columns[3]
    assert list(ratios.cells) == ["2.10 (2.05–2.15)"]


def test_every_built_in_kernel_has_a_first_call(script):
    startup = script("startup")
    assert list(startup.first_calls("gelu, float64")) == [
        "first call, cold cache, gelu, float64",
        "first call, warm cache, gelu, float64",
    ]
    assert len(startup.first_calls("*")) == 2 * (3 * 4 + 6 * 2)
    with pytest.raises(ValueError, match=r"calls must be a pattern of .*, got 'gelu'"):
        startup.first_calls("gelu")


@pytest.mark.slow
def test_trees_are_timed_in_their_own_processes(script):
    pytest.importorskip("numba")
    trees = script("trees")
    with trees.Tree(BENCH.parent, 1) as tree:
        assert 0 < tree.seconds(CASES["one"]) < 1
        with pytest.raises(ValueError, match=r"tree .* cannot run dense"):
            tree.seconds(DENSE)


@pytest.mark.slow
def test_pieces_inside_the_kernel_add_up(script, monkeypatch):
    pytest.importorskip("numba")
    inside = script("inside")
    monkeypatch.setattr(contest, "SAMPLE_SECONDS", 0.0)
    ns = inside.measure(Case("few", 1, 2, 2, 200, 300, 24), 3)
    assert {name for name, value in ns.items() if value > 0} >= {*inside.PIECES} - {"masks"}
    assert cpu_run.kernel.__module__ == cpu_run.__name__  # no clocks stay


def test_layers_are_timed_once_they_agree(script, monkeypatch):
    monkeypatch.setattr(contest, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(contest, "SETTLE_SECONDS", 0.0)
    layers = script("layers")
    monkeypatch.setattr(layers, "find_spec", lambda name: None)
    for name, contenders in layers.calls((3, 128)).items():
        seconds = layers.measure(contenders, 2)
        assert [len(samples) for samples in seconds.values()] == [2, 2], name
        assert layers.ratio(seconds, "torch") == "–"
        assert float(layers.ratio(seconds, "numpy")) > 0
    with pytest.raises(AssertionError, match="Not equal"):
        layers.measure({"numpy": lambda: np.zeros(3), "fastattn": lambda: np.ones(3)}, 1)


def test_pairs_take_turns(monkeypatch):
    monkeypatch.setattr(contest, "SAMPLE_SECONDS", 0.0)
    said = []
    first, second = contest.paired(lambda: said.append("a"), lambda: said.append("b"), 3)
    assert "".join(said) == "ab" + "ab" + "ba" + "ab"  # once each to count calls, then in turns
    assert len(first) == len(second) == 3


def test_results_for_a_lesser_target_have_a_file_of_their_own(monkeypatch):
    monkeypatch.setattr(record, "cpu_name", lambda: "Some(R) CPU  @ 2.40 GHz")
    monkeypatch.delenv("FASTATTN_TARGET", raising=False)
    assert record.file_name() == "some-r-cpu-2-40-ghz.json"
    assert record.setting(1)["target"] == ""
    monkeypatch.setenv("FASTATTN_TARGET", "x86-64-v3")
    assert record.file_name() == "some-r-cpu-2-40-ghz-x86-64-v3.json"
    assert record.setting(1)["target"] == "x86-64-v3"


def test_results_of_other_runs_stay(tmp_path):
    path = tmp_path / "machine.json"
    record.save(path, "forward", {"n": 1}, {"a": {"seconds": [1, 2]}, "b": {"seconds": [3]}})
    record.save(path, "forward", {"n": 2}, {"b": {"seconds": [4]}})
    record.save(path, "memory", {"n": 3}, {"b": {"extra_bytes": None}})
    content = json.loads(path.read_text())
    assert content["forward"]["a"] == {"setting": {"n": 1}, "seconds": [1, 2]}
    assert content["forward"]["b"] == {"setting": {"n": 2}, "seconds": [4]}
    assert content["memory"]["b"]["extra_bytes"] is None
    assert '"seconds": [ 1, 2 ]' in path.read_text()  # a line for each list of samples
