"""python -m fastattn verify: it finds what is wrong, says it in few words, and survives it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fastattn import commands, reference
from fastattn.commands import verify
from fastattn.verifying import campaign, modifiers, peer
from fastattn.verifying.case import Case
from fastattn.verifying.draw import draw
from fastattn.verifying.modifiers import NAMES
from fastattn.verifying.oracle import WrongAnswer
from fastattn.verifying.shrink import shrink
from fastattn.verifying.trial import PACKED, Trial, inputs_of

NUMBERS = range(150)


def solve(trial, backend):
    return campaign.solve(trial, inputs_of(trial), backend)


@pytest.mark.parametrize("part", range(3))
def test_drawn_problems_are_solved(part, backend):
    for number in NUMBERS[part::3]:
        trial = draw(5, number)
        # Compiled modifiers, and pages of other types, are left to the command: a dozen kernels.
        rare = trial.case.modifiers or (trial.page_size and trial.case.dtype != "float32")
        if backend == "numpy" or not rare:
            assert solve(trial, backend) <= 1


@pytest.mark.parametrize("block", [None, (7, 12)], ids=["mask_mod", "block_mask"])
@pytest.mark.parametrize("kind", ["forward", "merge", "varlen", "backward", "varlen backward"])
@pytest.mark.parametrize("name", NAMES)
def test_modifiers(name, kind, block):
    case = Case("", 30, 41, 5, batch=3, heads_kv=1, modifiers=name, block=block, sinks=True)
    assert solve(Trial(case, kind, seed=3), "numpy") <= 1


def test_a_wrong_modifier_is_found(monkeypatch):
    monkeypatch.setattr(modifiers, "scattered", lambda b, h, i, j, aux: (i + j) % 5 != 0)
    with pytest.raises(WrongAnswer, match="the error is"):
        solve(Trial(Case("", 30, 41, 5, modifiers="gaps")), "numpy")


@pytest.mark.parametrize("kind", ["forward", "varlen"])
@pytest.mark.parametrize("lengths", ["", "kv_len kv_start"])
def test_pages(lengths, kind, backend):
    case = Case("", 5, 60, 9, batch=3, heads_kv=1, lengths=lengths, mask="qk" * (kind == "forward"))
    for page_size in (1, 4, 12, 60):
        assert solve(Trial(case, kind, page_size=page_size), backend) <= 1


def test_merged_parts(backend):
    for seed in range(9):
        case = Case("", 5, 9, 4, sinks=True, dtype=("float32", "float64", "float16")[seed % 3])
        assert solve(Trial(case, "merge", seed=seed), backend) <= 1


def test_problems_are_the_same_again():
    assert [draw(3, n) for n in NUMBERS] == [draw(3, n) for n in NUMBERS]
    assert draw(3, 0) != draw(4, 0) != draw(4, 1)
    one, again = (inputs_of(draw(3, 2)) for _ in range(2))
    assert all((a == b).all() for a, b in zip(one.arrays, again.arrays, strict=True))


def test_every_option_is_drawn():
    trials = [draw(0, n) for n in range(600)]
    for name in ("scale", "causal", "align", "window", "chunk", "softcap", "mask", "bias", "alibi"):
        assert len({getattr(trial.case, name) for trial in trials}) > 1, name
    for name in ("sinks", "lengths", "dropout_p", "spread", "dtype", "bias_dtype", "modifiers"):
        assert len({getattr(trial.case, name) for trial in trials}) > 1, name
    assert len({trial.kind for trial in trials}) == 5
    assert len({trial.page_size for trial in trials}) > 20
    assert {trial.case.modifiers for trial in trials if trial.case.block} == {"", *NAMES}
    assert {trial.poison for trial in trials} == {"", "q", "k", "v"}
    assert max(trial.case.seqlen_k for trial in trials) > 1024


def test_pytorch_agrees():
    pytest.importorskip("torch")
    answers = [solve(draw(5, n), peer.NAME) for n in range(400)]
    answers = [ratio for ratio in answers if ratio is not None]
    assert len(answers) > 40
    assert max(answers) < 2


# --- what is wrong is found -----------------------------------------------------------------------


@pytest.fixture
def wrong_window(monkeypatch):
    """A NumPy backend that sees one key too many on the left."""
    right = reference.run

    def run(plan, problem, operands):
        if problem.left is not None:
            problem = replace(problem, left=problem.left + 1)
        right(plan, problem, operands)

    monkeypatch.setattr(reference, "run", run)
    monkeypatch.setattr("fastattn.launch._launcher", lambda backend: run)


def test_a_wrong_answer_is_found_and_made_small(wrong_window):
    failures = []
    for number in NUMBERS:
        trial = draw(5, number)
        try:
            solve(trial, "numpy")
        except WrongAnswer as error:
            failures.append(campaign._failure(number, "numpy", error, trial))
            break
    (failure,) = failures
    case, plain = failure.shrunk.case, Case("", 0, 0)
    assert case.window[0] is not None
    assert case.batch * case.heads_q * case.seqlen_q * case.seqlen_k <= 4
    for name in ("softcap", "mask", "bias", "alibi", "sinks", "dropout_p", "chunk", "lengths"):
        assert getattr(case, name) == getattr(plain, name), name
    assert "WrongAnswer: the error is" in failure.what


def test_shrinking_ends_where_nothing_smaller_fails():
    case = Case("large", 40, 300, 64, 32, batch=3, heads_q=8, heads_kv=2, softcap=3.0, mask="qk")
    found = shrink(
        Trial(case, "varlen backward", num_threads=3),
        lambda trial: trial.case.seqlen_k > 17 and trial.kind in PACKED,
    )
    assert found == Trial(Case("large", 1, 18, 1, 1, batch=1, heads_q=1, heads_kv=1), "varlen")


@pytest.mark.parametrize("what", ["NaN missing", "NaN", "shape"])
def test_wrong_places_are_wrong_answers(what, monkeypatch):
    def results(trial, x, backend):
        out = np.zeros(x.dout.shape, x.dout.dtype)
        if what == "NaN":
            out[0, 0, 0, 0] = np.nan
        return {"out": out[..., :-1] if what == "shape" else out}

    monkeypatch.setattr(campaign, "results", results)
    trial = Trial(Case("", 3, 5, 4), poison="q" if what == "NaN missing" else "")
    with pytest.raises(WrongAnswer, match=r"NaN or infinity where the oracle|shape must be|number"):
        solve(trial, "numpy")


# --- the command ----------------------------------------------------------------------------------


def run(*arguments):
    return commands.main(["verify", *map(str, arguments)])


def test_command_and_report(capsys, tmp_path):
    path = tmp_path / "report.json"
    assert run("--seed", 3, "--first", 10, "--calls", 25, "--backend", "numpy", "--json", path) == 0
    assert "25 problems in" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["seed"] == 3
    assert report["tallies"]["numpy"]["calls"] == 25
    assert 0 < report["tallies"]["numpy"]["worst_ratio"] <= 1
    assert report["failures"] == []
    assert report["setting"]["versions"]["numpy"] == np.__version__


def test_without_bfloat16_its_problems_are_left_out(monkeypatch, capsys):
    sent, dtypes = [], []
    monkeypatch.setattr(campaign, "has_bfloat16", lambda: False)
    monkeypatch.setattr(verify, "has_bfloat16", lambda: False)

    def solve(trial, x, name):
        dtypes.append({trial.case.dtype, trial.case.bias_dtype})
        return 0.5

    monkeypatch.setattr(campaign, "solve", solve)
    connection, current = SimpleNamespace(send=sent.append), SimpleNamespace(value=0)
    campaign._work(connection, current, 3, range(100), ("numpy",))
    assert sum(message["problems"] for message in sent) == 100
    assert 50 < len(dtypes) < 90
    assert not any("bfloat16" in pair for pair in dtypes)
    assert run("--calls", 1, "--backend", "numpy") == 0
    assert "bfloat16 are left out" in capsys.readouterr().out


def test_a_crash_is_a_failure_and_the_next_problems_are_solved(monkeypatch):
    """The process kills itself in problem 12: see _dying_work()."""
    monkeypatch.setattr(campaign, "_work", dying_work)
    outcome = campaign.campaign(3, range(10, 20), ("numpy",), lambda outcome: False)
    assert outcome.problems == 10
    (failure,) = outcome.failures
    assert failure.number == 12
    assert failure.what == f"the process ended with status -{signal.SIGKILL}"


def dying_work(send, current, seed, numbers, implementations):
    def solve(trial, x, name, right=campaign.solve):
        if current.value == 12:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(trial, x, name)

    campaign.solve = solve
    work(send, current, seed, numbers, implementations)


work = campaign._work


def test_a_hang_is_a_failure(monkeypatch):
    monkeypatch.setattr(campaign, "STUCK", 0.5)
    monkeypatch.setattr(campaign, "_work", hanging_work)
    outcome = campaign.campaign(3, range(2), ("numpy",), lambda outcome: bool(outcome.failures))
    assert outcome.failures[0].what == "no answer within 0.5 seconds"


def hanging_work(*arguments):
    signal.pause()


def test_an_interrupt_ends_it_with_what_was_found(monkeypatch, capfd, tmp_path):
    """Ctrl-C reaches the process that makes the calls, too, which leaves it to the other."""
    of_others = set(multiprocessing.active_children())

    @contextmanager
    def meter():
        def show(done, text):
            (process,) = set(multiprocessing.active_children()) - of_others
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.2)  # for what it might say
            raise KeyboardInterrupt

        yield show

    monkeypatch.setattr(verify, "meter", meter)
    path = tmp_path / "new" / "report.json"
    assert run("--seed", 3, "--calls", 10000, "--backend", "numpy", "--json", path) == 130
    out, err = capfd.readouterr()
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["is_interrupted"]
    assert 0 < report["problems"] < 10000
    assert f"{report['problems']} problems in {report['seconds']:.1f} s, then interrupted\n" in out
    assert err == ""


def test_a_report_that_could_not_be_written_is_refused_at_once(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "campaign", lambda *arguments: pytest.fail("begun"))
    assert run("--calls", 1, "--backend", "numpy", "--json", tmp_path) == 1
    assert capsys.readouterr().err == f"fastattn: [Errno 21] Is a directory: '{tmp_path}'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "must be a number of minutes above 0, got '0'"),
        (["--minutes", "soon"], "must be a number of minutes above 0, got 'soon'"),
        (["--calls", "0"], "must be an int of at least 1, got '0'"),
        (["--seed", "-1"], "must be an int of at least 0, got '-1'"),
        (["--calls", "3", "--minutes", "1"], "not allowed with argument"),
    ],
)
def test_what_is_no_length(arguments, message, capsys):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert message in capsys.readouterr().err
