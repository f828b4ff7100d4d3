"""`deepinfer run-batch`: order, bounds, errors of single lines, and going on after whatever stopped a run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cli import batch
from deepinfer.cli.prompts import open_llm
from deepinfer.config import EngineConfig
from deepinfer.params import SamplingParams
from deepinfer.text.batch_file import read_batch


def request(number: int, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"p{number}", "max_tokens": 3, "ignore_eos": True, "seed": number} | body
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def chat(number: int, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3} | body
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> list[Any]:
    """What must not depend on how often a run was interrupted."""
    return [(line["custom_id"], line["error"] or line["response"]["body"]["choices"]) for line in results(path)]


def test_results_come_in_order_and_errors_stay_with_their_line(
    deepinfer: Callable[..., Any], mock_model: Any, tmp_path: Path
) -> None:
    lines = [
        request(0, max_tokens=9),
        request(1, prompt=[5, 6, 9999]),
        chat(2, logprobs=True, top_logprobs=1),
        request(3, prompt="x" * 5000),
        request(4, prompt=["a", "b"], n=2, temperature=0.9),
        chat(5, response_format={"type": "json_object"}),
        chat(6, messages=[{"role": "user", "content": [{"type": "image", "image": "/absent.png"}]}]),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = deepinfer("run-batch", "-m", "mock", "-i", source, "-o", target)
    assert result.code == 1 and result.out == ""
    found = results(target)
    assert [line["custom_id"] for line in found] == [f"id-{i}" for i in range(7)]
    failed = {i: line["error"]["message"] for i, line in enumerate(found) if line["error"]}
    assert sorted(failed) == [1, 3, 5, 6]
    assert "absent.png" in failed[6]
    assert "9999" in failed[1] and "max_model_len" in failed[3] and "structured output" in failed[5]
    assert len(found[4]["response"]["body"]["choices"]) == 4
    (choice,) = found[2]["response"]["body"]["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["logprobs"]["content"]) == 3


def test_nothing_is_loaded_or_written_for_a_bad_file(
    deepinfer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "open_llm", lambda config: pytest.fail("the model was loaded"))
    nobody = [{"role": "nobody", "content": "Hi"}]
    source = write(tmp_path / "in.jsonl", [request(0), request(0), request(1, bogus=1), chat(2, messages=nobody)])
    result = deepinfer("run-batch", "-m", "mock", "-i", source, "-o", tmp_path / "out.jsonl")
    assert result.code == 2 and all(f"line {number}" in result.err for number in (2, 3, 4))
    assert not (tmp_path / "out.jsonl").exists()


def test_at_most_the_limit_is_in_flight(mock_model: Any, tmp_path: Path) -> None:
    """The first request is the longest, so that results pile up behind it."""
    lines = [request(i, max_tokens=30 if i == 0 else 1 + i % 3) for i in range(12)]
    requests = read_batch(write(tmp_path / "in.jsonl", lines), SamplingParams())
    with open_llm(EngineConfig("mock", max_num_seqs=4)) as llm:
        made: list[str] = []
        original = llm.make_request

        def count(*args: Any) -> Any:
            made.append("made")
            return original(*args)

        llm.make_request = count  # type: ignore[method-assign]
        order = []
        for line in batch.run(llm, requests, 5):
            order.append(line["custom_id"])
            assert len(made) - len(order) < 5
        llm.engine.check_idle()
    assert order == [f"id-{i}" for i in range(12)]


def test_an_interrupted_run_goes_on_where_it_stopped(
    deepinfer: Callable[..., Any], mock_model: Any, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", [request(i) for i in range(6)])
    command = ("run-batch", "-m", "mock", "-i", source, "--max-inflight", "2", "-o")
    assert deepinfer(*command, tmp_path / "whole.jsonl").code == 0
    mock_model.steps.clear()

    def interrupt(step: Any) -> None:
        if len(mock_model.steps) == 5:
            mock_model.steps.append(step)
            raise KeyboardInterrupt

    mock_model.before_step = interrupt
    stopped = deepinfer(*command, tmp_path / "out.jsonl")
    assert stopped.code == 130 and "2 of 6 results are written" in stopped.err
    resumed = deepinfer(*command, tmp_path / "out.jsonl")
    assert resumed.code == 0 and "2 of 6 results are in" in resumed.err
    assert texts(tmp_path / "out.jsonl") == texts(tmp_path / "whole.jsonl")
    nothing = deepinfer(*command, tmp_path / "out.jsonl")
    assert nothing.code == 0 and "6 of 6" in nothing.err


def test_a_killed_run_and_a_full_disk_on_the_real_engine(deepinfer: Callable[..., Any], tmp_path: Path) -> None:
    folder, target = tmp_path / "tiny", tmp_path / "out.jsonl"
    assert deepinfer("make-checkpoint", "tiny", folder).code == 0
    source = write(tmp_path / "in.jsonl", [request(i, max_tokens=8) for i in range(24)])
    options = ["-m", str(folder), "-i", str(source), "--max-inflight", "2", "-o"]
    command = [sys.executable, "-m", "deepinfer", "run-batch", *options]

    process = subprocess.Popen([*command, str(target)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and not (target.exists() and target.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 1 <= len(results(target)) < 24
    with target.open("a") as file:
        file.write('{"custom_id": "id-7", "respo')  # as if the kill had come in the middle of a write

    limit = target.stat().st_size + 700  # room for one or two more results

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    full = subprocess.run([*command, str(target)], capture_output=True, text=True, preexec_fn=small_disk)
    assert full.returncode == 2
    told = full.stderr.splitlines()[-1]
    assert told.startswith(f"deepinfer: error: cannot write {target}") and "the same command goes on" in told
    assert "Traceback" not in full.stderr
    assert 1 <= len(results(target)) < 24

    for path in (target, tmp_path / "whole.jsonl"):
        assert deepinfer("run-batch", *options, path).code == 0
    assert texts(target) == texts(tmp_path / "whole.jsonl")
    assert len(os.listdir(tmp_path)) == 4  # nothing is left lying about
