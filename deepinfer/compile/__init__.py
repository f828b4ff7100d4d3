"""Capture of the model: torch.compile with passes of our own, CUDA graphs by row bucket, and what counts them.

Belongs here: turning a function of the model into something faster with the same numbers. Does not belong here: the
model's maths, what runs when (engine).
"""
