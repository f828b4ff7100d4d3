"""Batch files: every bad line is told before anything runs; the result file survives what kills a run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.outputs import CompletionOutput, Logprob, RequestOutput
from deepinfer.params import SamplingParams
from deepinfer.text.batch_file import BatchRequest, ResultFile, error_line, read_batch, result_line

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=33)
COMPLETION = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}
CHAT = {
    "custom_id": "b",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}]},
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def with_body(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return line | {"body": line["body"] | changes}


def read_one(tmp_path: Path, line: dict[str, Any]) -> BatchRequest:
    (request,) = read_batch(write(tmp_path / "in.jsonl", line), DEFAULTS)
    return request


# ---- requests


def test_both_kinds_with_defaults(tmp_path: Path) -> None:
    completion, chat = read_batch(write(tmp_path / "in.jsonl", COMPLETION, "", CHAT), DEFAULTS)
    assert (completion.line, completion.kind, completion.prompts) == (1, "completion", ("Hi",))
    assert completion.params == DEFAULTS
    assert (chat.line, chat.kind, chat.messages) == (3, "chat", CHAT["body"]["messages"])
    assert chat.params == DEFAULTS.replace(max_tokens=None)  # a chat may fill the context


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ("x",)),
        ([1, 2], ([1, 2],)),
        (["x", "y"], ("x", "y")),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_the_four_forms_of_a_prompt(tmp_path: Path, prompt: Any, prompts: Any) -> None:
    assert read_one(tmp_path, with_body(COMPLETION, prompt=prompt)).prompts == prompts


def test_fields_of_a_completion(tmp_path: Path) -> None:
    body = {
        "max_tokens": 3,
        "n": 2,
        "stop": ["a"],
        "seed": 4,
        "logprobs": 2,
        "logit_bias": {"5": 1},
        "top_k": 7,
    }
    request = read_one(tmp_path, with_body(COMPLETION, model="m", user="u", stream=False, best_of=2, **body))
    assert request.model == "m"
    assert request.params == DEFAULTS.replace(**{**body, "logit_bias": {5: 1.0}})


def test_fields_of_a_chat(tmp_path: Path) -> None:
    body = {"max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2, "thinking": {"type": "disabled"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = read_one(tmp_path, with_body(CHAT, tools=tools, reasoning_effort="low", **body))
    assert (request.params.max_tokens, request.params.logprobs) == (3, 2)
    assert request.chat_options == {"tools": tools, "thinking": False, "reasoning_effort": "low"}
    assert "tools" not in read_one(tmp_path, with_body(CHAT, tools=tools, tool_choice="none")).chat_options
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    wanted = read_one(tmp_path, with_body(CHAT, response_format=schema)).params.so_args
    assert wanted is not None and wanted.json_schema == {"type": "object"}


BAD_LINES: list[tuple[Any, str]] = [
    ("{", "not a JSON object"),
    ("[]", "expected an object"),
    ({**COMPLETION, "custom_id": ""}, "custom_id is ''"),
    ({**COMPLETION, "method": "GET"}, "method is 'GET'"),
    ({**COMPLETION, "url": "/v1/embeddings"}, "url is '/v1/embeddings'"),
    ({**COMPLETION, "body": None}, "body is NoneType"),
    ({**COMPLETION, "extra": 1}, "unknown keys extra"),
    (with_body(COMPLETION, prompt=[]), "prompt must be"),
    (with_body(COMPLETION, prompt=["x", ""]), "prompt must be"),
    (with_body(COMPLETION, prompt=[1, "x"]), "prompt must be"),
    (with_body(COMPLETION, bogus=1), "bogus"),
    (with_body(COMPLETION, stream=True), "stream is True"),
    (with_body(COMPLETION, best_of=3), "best_of is 3"),
    (with_body(COMPLETION, temperature=-1), "temperature is -1"),
    (with_body(COMPLETION, logit_bias={"x": 1}), "logit_bias"),
    (with_body(CHAT, messages=[]), "messages must be"),
    (with_body(CHAT, messages=["hi"]), "messages must be"),
    (with_body(CHAT, tool_choice="required"), "tool_choice is 'required'"),
    (with_body(CHAT, logprobs=3), "logprobs is 3"),
    (with_body(CHAT, top_logprobs=3), "needs logprobs: true"),
    (with_body(CHAT, thinking="yes"), "thinking is 'yes'"),
    (with_body(CHAT, response_format={"type": "xml"}), "response_format is 'xml'"),
    (with_body(CHAT, response_format={"type": "json_schema", "json_schema": "x"}), "json_schema: "),
    (with_body(CHAT, messages=[{"role": "user", "content": 5}]), "content should be a string or a list"),
    (with_body(CHAT, messages=[{"role": "wizard", "content": "x"}]), "unknown variant `wizard`"),
    (with_body(CHAT, tools=["x"]), "chat request"),
    (with_body(CHAT, reasoning_effort="extreme"), "chat request"),
    (with_body(COMPLETION, prompt="\ud800"), "surrogates not allowed"),
    (with_body(COMPLETION, model="half \ud800"), "surrogates not allowed"),
    ("[" * 100_000, "recursion"),
]


def test_every_bad_line_is_listed_at_once(tmp_path: Path) -> None:
    lines = []
    for i, (line, _) in enumerate(BAD_LINES):
        named = isinstance(line, dict) and line["custom_id"]
        lines.append({**line, "custom_id": f"id{i}"} if named else line)
    path = write(tmp_path / "in.jsonl", COMPLETION, *lines, COMPLETION)
    with pytest.raises(RequestError) as error:
        read_batch(path, DEFAULTS)
    message = str(error.value)
    for number, (_, words) in enumerate(BAD_LINES, start=2):
        assert any(f"line {number}:" in line and words in line for line in message.splitlines()), (
            words,
            message,
        )
    assert f"line {len(BAD_LINES) + 2}: custom_id 'a' is that of line 1 already" in message
    assert "line 1:" not in message


def test_an_empty_file_and_an_absent_one(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no requests"):
        read_batch(write(tmp_path / "in.jsonl", ""), DEFAULTS)
    with pytest.raises(RequestError, match=r"absent\.jsonl"):
        read_batch(tmp_path / "absent.jsonl", DEFAULTS)
    (tmp_path / "in.jsonl").write_bytes(b'{"custom_id": "\xff"}\n')
    with pytest.raises(RequestError, match="line 1"):
        read_batch(tmp_path / "in.jsonl", DEFAULTS)


# ---- results


def token_bytes(token: int) -> bytes:
    return {1: b"ab", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"c"}[token]


def output(prompt_ids: list[int], *completions: CompletionOutput, error: str | None = None) -> RequestOutput:
    return RequestOutput("request-7", None, prompt_ids, outputs=list(completions), finished=True, error=error)


def completion(text: str, ids: list[int], reason: Any = "stop", **more: Any) -> CompletionOutput:
    return CompletionOutput(0, text, ids, finish_reason=reason, **more)


def test_result_of_a_completion(tmp_path: Path) -> None:
    request = read_one(tmp_path, with_body(COMPLETION, prompt=["x", "y"], logprobs=1, model="m"))
    best = {1: Logprob(-0.5, 1, "ab")}
    unlikely = {2: Logprob(float("-inf"), 9, "\ufffd"), **best}
    logprobs = [best, unlikely, {3: Logprob(-1.0, 1, "\ufffd")}, {4: Logprob(-2.0, 1, "c")}]
    outputs = [
        output([5, 6], completion("abéc", [1, 2, 3, 4], "length", logprobs=logprobs)),
        output([7], completion("c", [4], logprobs=logprobs[3:])),
    ]
    line = json.loads(json.dumps(result_line(request, outputs, dict, token_bytes), allow_nan=False))
    assert (line["custom_id"], line["error"], line["response"]["status_code"]) == ("a", None, 200)
    body = line["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 5
    first, second = body["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (0, "abéc", "length")
    assert (second["index"], second["text"]) == (1, "c")
    assert first["logprobs"]["token_logprobs"] == [-0.5, -9999.0, -1.0, -2.0]
    assert first["logprobs"]["top_logprobs"][1] == {"ab": -0.5}  # one was asked for, and not the sampled one
    assert first["logprobs"]["text_offset"] == [0, 2, 2, 3]  # the two halves of é start at the same place


def test_result_of_a_chat(tmp_path: Path) -> None:
    request = read_one(tmp_path, with_body(CHAT, logprobs=True))

    def parse(text: str) -> dict[str, Any]:
        return {"content": text.upper(), "reasoning_content": "r", "tool_calls": [{"id": "1"}]}

    logprobs = [{2: Logprob(-1.0, 1, "\ufffd")}]
    line = result_line(request, [output([5], completion("x", [2], logprobs=logprobs))], parse, token_bytes)
    (choice,) = line["response"]["body"]["choices"]
    assert choice["message"] == {"role": "assistant", **parse("x")}
    assert choice["finish_reason"] == "tool_calls"
    entry = {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3]}
    assert choice["logprobs"] == {"content": [entry | {"top_logprobs": []}]}


def test_a_failed_request_is_an_error_line(tmp_path: Path) -> None:
    request = read_one(tmp_path, COMPLETION)
    line = result_line(request, [output([5], error="logits are not finite")], dict, token_bytes)
    assert line == error_line(request, "logits are not finite")
    assert line["response"] is None and line["error"]["message"] == "logits are not finite"


# ---- the result file

IDS = {"a", "b", "c"}


def row(custom_id: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "text": "ö" * 20}


def fill(path: Path, *ids: str) -> bytes:
    results = ResultFile(path, IDS)
    for custom_id in ids:
        results.write(row(custom_id))
    results.close()
    return path.read_bytes()


def test_results_are_whole_lines_in_order(tmp_path: Path) -> None:
    data = fill(tmp_path / "out", "a", "b")
    assert [json.loads(line) for line in data.splitlines()] == [row("a"), row("b")]


@pytest.mark.parametrize("cut", range(0, 130, 7))
def test_a_file_cut_anywhere_is_resumed_to_the_same_bytes(tmp_path: Path, cut: int) -> None:
    whole = fill(tmp_path / "whole", "a", "b", "c")
    path = tmp_path / "out"
    path.write_bytes(whole[:cut])
    results = ResultFile(path, IDS)
    assert len(results.done) == whole[:cut].count(b"\n")
    for custom_id in ("a", "b", "c"):
        if custom_id not in results.done:
            results.write(row(custom_id))
    results.close()
    assert path.read_bytes() == whole


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for data, words in (
        (b'notes\n{"custom_id": "a"}\n', "line 1 holds no result"),
        (b'{"custom_id": "z"}\n{"custom_id": "a"}\n', "'z', which the batch file does not have"),
        (b'{"custom_id": "z"}\n', "'z'"),
    ):
        path.write_bytes(data)
        with pytest.raises(RequestError, match=words):
            ResultFile(path, IDS)
        assert path.read_bytes() == data


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out", IDS)
    with pytest.raises(RequestError, match="another run"):
        ResultFile(tmp_path / "out", IDS)
    first.close()
    ResultFile(tmp_path / "out", IDS).close()


def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe", tmp_path, tmp_path / "absent" / "out"):
        with pytest.raises(RequestError, match=str(path)):
            ResultFile(path, IDS)


def test_a_write_that_stops_halfway_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    results = ResultFile(path, IDS)
    results.write(row("a"))
    real_write = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, bytes(data)[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left") as error:
            results.write(row("b"))
    assert error.value.filename == str(path)
    assert results.done == {"a"}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row("a")]
    results.write(row("b"))  # space was made
    results.close()
    assert path.read_bytes() == fill(tmp_path / "other", "a", "b")
