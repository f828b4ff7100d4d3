"""OpenAI batch files: request lines in, result lines out, a result file that survives being killed.

Belongs here: the two line formats and the file on disk. Does not belong here: running requests
(cli/batch.py), rendering chats (chat.py). No torch, no tokenizer: a whole file is checked before a model is
loaded. Format: spec/engine.md 7.4. Each request line has `custom_id`, `method` POST, `url`, `body`; each
result line has `id`, `custom_id`, `response` {status_code, request_id, body} or null, `error` {code,
message} or null.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from deepinfer.errors import DeepInferError, RequestError, list_problems
from deepinfer.outputs import IMPOSSIBLE_LOGPROB, CompletionOutput, Logprob, RequestOutput
from deepinfer.params import SamplingParams

Kind = Literal["chat", "completion"]
URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

_MEANS_SOMETHING_ELSE = {"logprobs", "detokenize"}
_PARAMS = {f.name for f in fields(SamplingParams)} - _MEANS_SOMETHING_ELSE
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_OFF = {"stream", "stream_options", "echo", "suffix"}  # accepted when they ask for nothing
_OF_CHAT = {"messages", "tools", "tool_choice", "parallel_tool_calls", "thinking", "reasoning_effort"}
_OF_KIND: dict[Kind, set[str]] = {
    "chat": _OF_CHAT | {"max_completion_tokens", "logprobs", "top_logprobs", "response_format"},
    "completion": {"prompt", "logprobs", "best_of"},
}


@dataclass(frozen=True)
class BatchRequest:
    """One line of a batch file. `prompts` is set for completions, `messages` and `chat_options` for chats."""

    line: int
    custom_id: str
    kind: Kind
    model: str
    params: SamplingParams
    prompts: tuple[str | list[int], ...] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)
    chat_options: dict[str, Any] = field(default_factory=dict)


def read_batch(path: str | Path, defaults: SamplingParams) -> list[BatchRequest]:
    """Read and check every line. Fields that a body leaves out come from `defaults`.

    Without max_tokens a chat may fill the context, as the API says. RequestError lists every bad line.
    """
    requests: list[BatchRequest] = []
    problems: list[str] = []
    seen: dict[str, int] = {}
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise RequestError(f"cannot read the batch file {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if b"\\u" in line:  # the escape of half a character passes JSON, but no result file can hold it
                json.dumps(value, ensure_ascii=False).encode()
            request = _request(number, value, defaults)
            if request.custom_id in seen:
                raise RequestError(f"custom_id {request.custom_id!r} is that of line {seen[request.custom_id]} already")
            seen[request.custom_id] = number
            requests.append(request)
        except DeepInferError as error:
            problems.append(f"line {number}: {error}")
        except (ValueError, RecursionError) as error:  # not JSON, not Unicode, or nested beyond sense
            problems.append(f"line {number}: not a JSON object: {error}")
    if not requests and not problems:
        problems.append("no requests in it")
    if problems:
        raise RequestError(list_problems(f"batch file {path}", problems))
    return requests


def _request(line: int, value: Any, defaults: SamplingParams) -> BatchRequest:
    if not isinstance(value, dict):
        raise RequestError(f"expected an object with custom_id, method, url and body, got {type(value).__name__}")
    problems = []
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        problems.append(f"custom_id is {custom_id!r}; it must be a non-empty string")
    if value.get("method", "POST") != "POST":
        problems.append(f"method is {value['method']!r}; it must be POST")
    if not isinstance(url, str) or url not in URLS:
        problems.append(f"url is {url!r}; it must be one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        problems.append(f"body is {type(body).__name__}; it must be an object")
    if unknown := sorted(set(value) - {"custom_id", "method", "url", "body"}):
        problems.append(f"unknown keys {', '.join(unknown)}")
    if problems:
        raise RequestError("; ".join(problems))
    assert isinstance(custom_id, str) and isinstance(url, str) and isinstance(body, dict)
    kind = URLS[url]
    body = {key: item for key, item in body.items() if item is not None}
    problems += _body_problems(kind, body)
    if problems:
        raise RequestError("; ".join(problems))
    params = defaults.replace(**_sampling(kind, body))
    model = str(body.get("model", ""))
    if kind == "chat":
        options = {key: body[key] for key in ("tools", "thinking", "reasoning_effort") if key in body}
        if isinstance(switch := options.get("thinking"), dict):
            options["thinking"] = switch["type"] == "enabled"
        if body.get("tool_choice") == "none":
            options.pop("tools", None)
        from deepinfer.text import chat  # here, so that --help need not load what it imports

        chat.check(body["messages"], **options)
        return BatchRequest(line, custom_id, kind, model, params, messages=body["messages"], chat_options=options)
    return BatchRequest(line, custom_id, kind, model, params, prompts=_prompts(body["prompt"]))


def _body_problems(kind: Kind, body: Mapping[str, Any]) -> list[str]:
    problems = []
    if unknown := sorted(set(body) - _PARAMS - _IGNORED - _OFF - _OF_KIND[kind]):
        problems.append(f"body has fields that a {kind} does not take here: {', '.join(unknown)}")
    problems += [f"{name} is {body[name]!r}, which a batch does not do" for name in sorted(_OFF) if body.get(name)]
    if kind == "chat":
        messages = body.get("messages")
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and "role" in m for m in messages)
        ):
            problems.append("messages must be a non-empty list of objects with a role")
        if body.get("tool_choice", "auto") not in ("auto", "none"):
            problems.append(f"tool_choice is {body['tool_choice']!r}; auto and none are served")
        if body.get("thinking", True) not in (True, False, {"type": "enabled"}, {"type": "disabled"}):
            problems.append(f'thinking is {body["thinking"]!r}; it must be a boolean or {{"type": "enabled"}}')
        if not isinstance(body.get("tools", []), list):
            problems.append("tools must be a list")
        if not isinstance(body.get("logprobs", False), bool):
            problems.append(f"logprobs is {body['logprobs']!r}; in a chat it is a boolean, top_logprobs is the number")
        elif "top_logprobs" in body and not body.get("logprobs"):
            problems.append("top_logprobs needs logprobs: true")
    else:
        if not _prompts(body.get("prompt")):
            problems.append("prompt must be a non-empty text, a list of token ids, or a non-empty list of these")
        if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
            problems.append(f"best_of is {body['best_of']!r}; it must equal n")
    return problems


def _prompts(value: Any) -> tuple[str | list[int], ...]:
    """The prompts of a completion body; () when `value` is none of the four forms."""
    if not value or not isinstance(value, (str, list)):
        return ()
    if isinstance(value, str):
        return (value,)
    if all(type(item) is int for item in value):
        return (value,)
    if all(isinstance(item, str) and item for item in value):
        return tuple(value)
    nested = all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in value)
    return tuple(value) if nested else ()


def _sampling(kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that a body sets."""
    values = {name: body[name] for name in _PARAMS if name in body}
    if isinstance(bias := values.get("logit_bias"), dict):  # JSON keys are strings
        values["logit_bias"] = {int(key) if str(key).isdecimal() else key: item for key, item in bias.items()}
    if kind == "completion":
        return values | ({"logprobs": body["logprobs"]} if "logprobs" in body else {})
    values["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens"))
    if body.get("logprobs"):
        values["logprobs"] = body.get("top_logprobs", 0)
    constraint = body.get("response_format", {})
    match constraint.get("type", "text") if isinstance(constraint, dict) else constraint:
        case "text":
            pass
        case "json_object":
            values["so_args"] = {"json_object": True}
        case "json_schema":
            schema = constraint.get("json_schema")
            values["so_args"] = {"json_schema": schema.get("schema") if isinstance(schema, dict) else schema}
        case other:
            raise RequestError(f"response_format is {other!r}; it must be text, json_object or json_schema")
    return values


# ------------------------------------------------------------------------------------ result lines


def result_line(
    request: BatchRequest,
    outputs: Sequence[RequestOutput],
    parse: Callable[[str], Mapping[str, Any]],
    token_bytes: Callable[[int], bytes],
) -> dict[str, Any]:
    """The result of one request: `outputs` has one entry per prompt.

    `parse` splits the text of a chat reply into fields of its message; `token_bytes` gives a token's bytes.
    An output with an error makes the whole line one.
    """
    for output in outputs:
        if output.error is not None:
            return error_line(request, output.error)
    completions = [completion for output in outputs for completion in output.outputs]
    is_chat, num_top = request.kind == "chat", request.params.logprobs or 0
    choices = []
    for i, completion in enumerate(completions):
        content = _chat_choice(completion, parse) if is_chat else {"text": completion.text}
        logprobs = (_chat_logprobs if is_chat else _completion_logprobs)(completion, num_top, token_bytes)
        reasons = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        choices.append({"index": i, "logprobs": logprobs, **reasons, **content})
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion = sum(len(completion.token_ids) for completion in completions)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }
    response = {"status_code": 200, "request_id": outputs[0].request_id, "body": body}
    return {
        "id": f"batch_req_{request.line}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }


def error_line(request: BatchRequest, message: str) -> dict[str, Any]:
    """The result of a request that could not be run."""
    error = {"code": "invalid_request", "message": message}
    return {
        "id": f"batch_req_{request.line}",
        "custom_id": request.custom_id,
        "response": None,
        "error": error,
    }


def _chat_choice(output: CompletionOutput, parse: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    message = {"role": "assistant", "content": output.text, **parse(output.text)}
    calls_tools = bool(message.get("tool_calls")) and output.finish_reason == "stop"
    return {"message": message} | ({"finish_reason": "tool_calls"} if calls_tools else {})


def _chat_logprobs(
    output: CompletionOutput, num_top: int, token_bytes: Callable[[int], bytes]
) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None

    def entry(token_id: int, lp: Logprob) -> dict[str, Any]:
        return {"token": lp.decoded_token, "logprob": _finite(lp), "bytes": list(token_bytes(token_id))}

    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return {
        "content": [
            entry(token, at[token]) | {"top_logprobs": [entry(*item) for item in _top(at, num_top)]}
            for token, at in pairs
        ]
    }


def _completion_logprobs(
    output: CompletionOutput, num_top: int, token_bytes: Callable[[int], bytes]
) -> dict[str, Any] | None:
    if output.logprobs is None:
        return None
    sampled = [at[token] for token, at in zip(output.token_ids, output.logprobs, strict=True)]
    offsets, length = [], 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
    for token in output.token_ids:
        offsets.append(length)
        length += len(decoder.decode(token_bytes(token)))
    return {
        "tokens": [lp.decoded_token for lp in sampled],
        "token_logprobs": [_finite(lp) for lp in sampled],
        "top_logprobs": [{lp.decoded_token: _finite(lp) for _, lp in _top(at, num_top)} for at in output.logprobs],
        "text_offset": offsets,
    }


def _top(at: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    return sorted(at.items(), key=lambda item: item[1].rank)[:count]


def _finite(lp: Logprob) -> float:
    return max(lp.logprob, IMPOSSIBLE_LOGPROB)


# --------------------------------------------------------------------------------- the result file


class ResultFile:
    """Result lines in request order, appended one by one and on disk in whole lines only.

    Opening an existing file resumes it: a torn last line is cut off, `done` holds the custom_ids that have a
    result. One process at a time (file lock). A failed write leaves whole lines behind.
    """

    def __init__(self, path: str | Path, known_ids: set[str]) -> None:
        self.path = str(path)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise RequestError(f"cannot write the result file {path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise RequestError(f"{path} is not a regular file, and only such a file can be resumed")
            self._lock()
            self.done = self._resume(known_ids)
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another run is writing {self.path}; wait for it, or choose another file") from None

    def _resume(self, known_ids: set[str]) -> set[str]:
        done: set[str] = set()
        end = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, start=1):
                try:
                    custom_id = json.loads(line)["custom_id"]
                except (ValueError, TypeError, KeyError):
                    custom_id = None
                torn = custom_id is None or not line.endswith(b"\n")
                if torn and not file.peek(1):
                    break  # the last line, cut short by a kill or a full disk
                if torn or custom_id not in known_ids:
                    what = (
                        f"custom_id {custom_id!r}, which the batch file does not have"
                        if custom_id
                        else "no result of a batch"
                    )
                    raise RequestError(f"{self.path} line {number} holds {what}; choose another result file")
                done.add(custom_id)
                end += len(line)
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        self._end = end
        return done

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one result line."""
        data = memoryview(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        size = len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BaseException as error:
            os.ftruncate(self._fd, self._end)
            os.lseek(self._fd, self._end, os.SEEK_SET)
            if isinstance(error, OSError):
                error.filename = self.path
            raise
        self._end += size
        self.done.add(str(line["custom_id"]))

    def close(self) -> None:
        """Flush to the disk and let go of the lock."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
