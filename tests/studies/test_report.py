"""The results format: what the writer makes, what it refuses, and that every committed file follows it."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer.studies import cpu, report

ROOT = Path(__file__).parents[2]
RATES = {"bandwidth_gb_s": 40.0, "matmul_tflop_s": 0.1}


def new_report(**meta: Any) -> report.Report:
    return report.Report("try", device="a test, 1 core", flags={"rounds": 3}, **meta)


def good_document() -> dict[str, Any]:
    out = new_report(**RATES)
    out.add("decode/tiny", 2000.0, provider="native", baselines={"transformers": 13000.0, "reference": 41000.0})
    out.add("experts/T64", 120.0, provider="native", floor_us=90.0)
    return {"meta": out.meta, "rows": out.rows}


@pytest.mark.parametrize("path", sorted(ROOT.glob("bench/results/*/*.json")), ids=lambda path: path.stem)
def test_committed_results_follow_the_format(path: Path) -> None:
    report.check(json.loads(path.read_text(encoding="utf-8")))


def test_ratios_and_percentages_come_from_the_medians() -> None:
    decode, experts = good_document()["rows"]
    assert decode["ratio"] == {"transformers": 6.5, "reference": 20.5}
    assert experts["percent_of_floor"] == 75.0
    with pytest.raises(report.ReportError, match="ratio follow from the medians"):
        new_report().add("decode/tiny", 2.0, provider="native", baselines={"a": 4.0}, ratio={"a": 3.0})


def test_meta_says_where_the_numbers_come_from() -> None:
    meta = new_report(load_average_before=0.1).meta
    assert set(report.META) <= set(meta)
    assert meta["torch"] and meta["flags"] == {"rounds": 3} and meta["load_average_before"] == 0.1
    assert report.version("no-such-package") is None
    assert report.cpu().endswith("cores")


def test_finish_writes_the_file_and_ends_with_the_same_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = new_report(**RATES)
    out.add("decode/tiny", 1234567.0, provider="native", tok_per_s=0.01234567, baselines={"transformers": 3.1e6})
    out.finish(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "cpu" / "try.json").read_text(encoding="utf-8"))
    assert written == json.loads(lines[-1]) == {"meta": out.meta, "rows": out.rows}
    assert written["rows"][0]["tok_per_s"] == 0.01235  # no more digits than a median has
    assert lines[0].split() == ["case", "median_us", "provider", "tok_per_s", "transformers_us", "/transformers"]
    assert lines[1].split() == ["decode/tiny", "1,235,000", "native", "0.01235", "3,100,000", "2.51x"]


def test_finish_refuses_an_empty_report(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match="no rows"):
        new_report().finish(tmp_path)
    assert not list(tmp_path.iterdir())


def test_table_aligns_rows_of_different_fields() -> None:
    lines = report.table(good_document()["rows"]).splitlines()
    assert [line.index("native") for line in lines[1:]] == [lines[0].index("provider")] * 2
    assert lines[0].rstrip().endswith("percent_of_floor") and lines[2].endswith("75.00")


def set_in(path: str, value: Any) -> Any:
    """A change of the document: rows/0/median_us = value, or removal for ...."""

    def change(document: Any) -> None:
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
        for parent in parents:
            document = document[parent]
        if value is ...:
            del document[last]
        else:
            document[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("meta/commit", ...), "meta lacks 'commit'"),
        (set_in("meta/bandwidth_gb_s", ...), "floor_us needs the measured bandwidth_gb_s in meta"),
        (set_in("meta/flags", {"limit": float("inf")}), "not JSON compliant"),
        (set_in("rows", []), "there are no rows"),
        (set_in("rows/1/case", "decode/tiny"), "'decode/tiny' is there twice"),
        (set_in("rows/0/case", "decode tiny"), "words separated by slashes"),
        (set_in("rows/0/median_us", 0.0), "median_us is 0.0: not a positive"),
        (set_in("rows/0/median_us", float("nan")), "median_us is nan"),
        (set_in("rows/0/median_us", True), "median_us is True"),
        (set_in("rows/0/baselines/reference", "41 ms"), "baselines.reference is '41 ms'"),
        (set_in("rows/0/baselines", ...), "a time alone says nothing"),
        (set_in("rows/0/ratio/reference", ...), r"baselines are \['reference', 'transformers'\] but ratios are of"),
        (set_in("rows/0/ratio/transformers", 7.0), "ratio.transformers is 7.0; the medians give 6.5"),
        (set_in("rows/1/percent_of_floor", 133.0), "percent_of_floor is 133.0; the medians give 75"),
        (set_in("rows/1/floor_us", -1.0), "floor_us is -1.0"),
        (set_in("rows/1/provider", ...), "provider or mode"),
        (set_in("notes", "x"), "exactly the keys meta and rows"),
    ],
)
def test_check_names_what_is_wrong(change: Any, message: str) -> None:
    document = good_document()
    report.check(document)
    change(document)
    with pytest.raises(report.ReportError, match=message):
        report.check(document)


def test_check_lists_everything_at_once() -> None:
    document = copy.deepcopy(good_document())
    for change in (set_in("meta/date", ...), set_in("rows/0/provider", ...), set_in("rows/1/floor_us", 0)):
        change(document)
    with pytest.raises(report.ReportError, match="3 problems"):
        report.check(document)


def test_add_refuses_a_bad_row_and_keeps_the_others() -> None:
    out = new_report()
    out.add("decode/tiny", 2.0, provider="native", baselines={"reference": 4.0})
    with pytest.raises(report.ReportError, match=r"bandwidth_gb_s and matmul_tflop_s"):
        out.add("decode/floor", 2.0, provider="native", floor_us=1.0)
    assert [row["case"] for row in out.rows] == ["decode/tiny"]


def test_the_format_needs_no_torch() -> None:
    code = "import sys; from deepinfer.studies.report import Report; Report('x', device='', flags={}); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ---- the CPU study's rows, without running it ----


def contest_of(ours_us: float) -> cpu.Contest:
    """All cases timed with made-up numbers: theirs is 9 ms a step and 80 ms a prefill, ours a given time."""
    contest = object.__new__(cpu.Contest)  # no processes
    theirs = cpu.Timing(0.08, [0.009] * 3, "bfloat16/eager", "float32/batched_mm")
    ours = cpu.Timing(0.01, [1.0, ours_us / 1e6, ours_us / 1e6], "native", "native")  # one disturbed step
    contest.timings = {}
    for case in cpu.cases(cores=2):
        contest.timings |= {("ours", case): [ours], ("transformers", case): [theirs, theirs]}
    contest.timings["reference", cpu.cases(cores=2)[0]] = [ours]
    return contest


@pytest.mark.parametrize(("ours_us", "word"), [(2000.0, "4.50x.*reached"), (4500.0, "2.00x.*MISSED")])
def test_cpu_rows_are_medians_of_one_run(ours_us: float, word: str) -> None:
    out = new_report()
    cpu.fill(out, contest_of(ours_us), cpu.cases(cores=2))
    rows = {row["case"]: row for row in out.rows}
    assert len(rows) == 2 * len(cpu.cases(cores=2)) == 20
    decode = rows["decode/tiny/batch8/prompt128/threads1"]
    assert decode["tok_per_s"] == pytest.approx(8e6 / ours_us, rel=1e-3)
    assert (decode["provider"], decode["transformers_mode"]) == ("native", "float32/batched_mm")
    prefill = rows["prefill/tiny-realdims/batch8/prompt128/threads2"]
    assert (prefill["ratio"], prefill["tok_per_s"]) == ({"transformers": 8.0}, 102400.0)
    assert "reference" in rows["decode/tiny/batch1/prompt128/threads1"]["baselines"]
    assert set(decode["baselines"]) == {"transformers"}
    assert re.search(word, cpu.verdict(out.rows))


def test_cpu_prompts_are_the_same_for_everybody_and_plain() -> None:
    first, *_, last = cpu.cases(cores=2)
    assert first.prompts() == first.prompts() != last.prompts()
    assert {len(ids) for ids in last.prompts()} == {last.prompt} and len(last.prompts()) == last.batch
    assert all(3 <= token < 500 for ids in last.prompts() for token in ids)
    assert all(case.threads == 1 for case in cpu.cases(cores=1))
