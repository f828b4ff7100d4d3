"""Outputs: the JSON form survives a round trip, whatever the numbers are."""

from __future__ import annotations

import json
import math

from deepinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_json_form_is_complete_and_has_no_nan():
    at = {5: Logprob(-0.5, 1, "a"), 7: Logprob(-math.inf, 9)}
    completion = CompletionOutput(0, "a", [5, 7], -math.inf, [at, at], "stop", 7)
    output = RequestOutput(
        "r1", None, [1, 2], [None, at], [completion], True, RequestMetrics(1.0, 2.0, 3.5, 5.0), 1, None
    )
    loaded = json.loads(json.dumps(output.to_dict(), allow_nan=False))
    assert loaded["request_id"] == "r1" and loaded["prompt"] is None and loaded["prompt_token_ids"] == [1, 2]
    assert loaded["prompt_logprobs"][0] is None
    assert loaded["prompt_logprobs"][1]["5"] == {"logprob": -0.5, "rank": 1, "decoded_token": "a"}
    assert loaded["outputs"][0]["logprobs"][0]["7"]["logprob"] == -9999.0
    assert loaded["outputs"][0]["cumulative_logprob"] == -9999.0
    assert loaded["outputs"][0]["finish_reason"] == "stop" and loaded["outputs"][0]["stop_reason"] == 7
    assert loaded["metrics"]["first_token_s"] == 3.5
    assert set(loaded) == {f for f in RequestOutput.__slots__}


def test_metrics_derive_spans_once_both_ends_are_known():
    metrics = RequestMetrics(arrival_s=10.0)
    assert metrics.queue_s is metrics.ttft_s is metrics.tpot_s is metrics.e2e_s is None
    metrics = RequestMetrics(10.0, 10.5, 11.0, 13.0, num_output_tokens=5)
    assert (metrics.queue_s, metrics.ttft_s, metrics.tpot_s, metrics.e2e_s) == (0.5, 1.0, 0.5, 3.0)
    assert RequestMetrics(10.0, 10.5, 11.0, 11.0, num_output_tokens=1).tpot_s is None  # nothing came after the first


def test_an_unfinished_request_has_no_reason():
    output = RequestOutput("r", "text", [1])
    assert output.outputs == [] and not output.finished and output.error is None
    assert not CompletionOutput(0, "", []).finished
    assert CompletionOutput(0, "", [], finish_reason="length").finished
