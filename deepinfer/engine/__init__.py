"""The engine: from validated prompts to sampled tokens, many requests at a time.

requests.py what a request is and when it ends; scheduler.py which rows run next (pure policy); runner.py the
only place that makes tensors; sampler.py logits to tokens; core.py the loop; metrics.py what it counts.
Does not belong here: prompt formats and files (llm.py, cli/), the model's maths (model/).
"""
