"""`deepinfer doctor`: versions are numbers, and whatever is broken becomes a line instead of a crash."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer import doctor
from deepinfer.cli.main import run


@pytest.mark.parametrize(
    ("version", "spec", "wanted"),
    [
        ("2.13.0+cpu", ">=2.11,<2.15", True),
        ("2.11.0", ">=2.11,<2.15", True),
        ("2.9.1", ">=2.11,<2.15", False),
        ("2.15.0", ">=2.11,<2.15", False),
        ("1.26", ">=1.26", True),
        ("1.26.0", "==1.26", True),
        ("5", ">4,<=5", True),
        ("7", "", True),
    ],
)
def test_versions_are_numbers(version: str, spec: str, wanted: bool) -> None:
    assert doctor.satisfies(version, spec) is wanted


def test_report_is_json_and_names_every_device() -> None:
    for device in doctor.DEVICES:
        report = json.loads(json.dumps(doctor.report(device)))
        assert {"deepinfer", "system", "checks", "devices", "ops", "ok"} <= set(report)
        assert {row["device"] for row in report["ops"]} == set(doctor.DEVICES)
    assert doctor.report("cpu")["ok"]


def test_every_gap_has_a_remedy() -> None:
    for device in doctor.DEVICES:
        for check in doctor.report(device)["checks"]:
            assert check["state"] == "ok" or check["remedy"], check


def test_cann_is_found_in_its_usual_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.cann_version([str(tmp_path)]) == ""
    (tmp_path / "x86_64-linux").mkdir()
    install = tmp_path / "x86_64-linux" / "ascend_toolkit_install.info"
    install.write_text("package_name=Ascend-cann-toolkit\nversion=9.2.0\narch=x86_64\n")
    assert doctor.cann_version(["", "/nowhere", str(tmp_path)]) == "9.2.0"
    (tmp_path / "version.cfg").write_text("# version\nruntime_running_version=[9.1.0:8.5]\n")
    assert doctor.cann_version([str(tmp_path)]) == "9.1.0"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    (check,) = [check for check in doctor.report("npu")["checks"] if check["name"] == "CANN"]
    assert (check["found"], check["state"]) == ("9.1.0", "missing")


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "devices", broken)
    monkeypatch.setattr(doctor, "ops", broken)
    assert run(["doctor"]) == 1
    assert "libtorch_cpu.so" in capsys.readouterr().out


def test_no_compiler_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = doctor.report("cpu")
    (check,) = [check for check in report["checks"] if check["name"] == "C++ compiler"]
    assert (check["found"], check["state"]) == ("no no-such-compiler", "optional") and report["ok"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert sys.executable in out and "Ops" in out
    assert run(["doctor", "--ops"]) == 0
    out = capsys.readouterr().out
    line = r"^  rope +cpu (native|reference), cuda (triton|reference), npu reference$"
    assert re.search(line, out, re.M) and re.search(r"^      not (reference|native): ", out, re.M)
    run(["doctor", "--ops", "--device", "cuda"])
    assert "takes neither" in (text := capsys.readouterr().out) or "no CUDA device" in text
    code = run(["doctor", "--device", "npu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["ok"] else 1)
