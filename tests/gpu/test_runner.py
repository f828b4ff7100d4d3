"""tests/gpu/run.py itself, without a GPU: limits, summaries, what counts as a failure."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

RUN: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("run.py")), run_name="run")
SCRIPT = Path("check_x.py")
GOOD = 'ok   x\n{"family": "x", "passed": 3, "failed": []}\n'


def test_every_script_runs_in_its_turn() -> None:
    names = [path.stem for path in RUN["scripts"]([])]
    assert names[-2:] == ["test_cuda", "test_engine"] and len(names) == len(set(names))
    assert {"check_experts", "check_linear", "check_attention", "check_providers"} <= set(names)
    assert [path.stem for path in RUN["scripts"](["cache", "test_cuda"])] == ["check_cache", "test_cuda"]
    with pytest.raises(SystemExit, match="no nothing"):
        RUN["scripts"](["nothing"])


@pytest.mark.parametrize(
    ("tool", "code", "text", "ok"),
    [
        ("", 0, GOOD, True),
        ("", 1, '{"family": "x", "passed": 2, "failed": ["swiglu 3"]}', False),
        ("", 124, "", False),
        ("memcheck", 0, GOOD + "========= ERROR SUMMARY: 0 errors", True),
        ("memcheck", 86, GOOD + "========= ERROR SUMMARY: 2 errors", False),
        ("memcheck", 0, GOOD, False),  # the tool did not say that it ran
        ("racecheck", 0, GOOD + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("racecheck", 0, GOOD + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", False),
    ],
)
def test_verdicts(tool: str, code: int, text: str, ok: bool) -> None:
    found = RUN["result"](SCRIPT, tool, code, text, 1.0)
    assert found["ok"] is ok
    assert ("tail" in found) is not ok
    if tool != "" and "SUMMARY" in text:
        assert found["cases"] == 3


def test_a_script_that_hangs_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "check_slow.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(60)\n")
    code, text, seconds = RUN["start"](script, [], 1.0, {"PATH": str(Path(sys.executable).parent)})
    assert code == 124 and text == "begun\n" and seconds < 20
