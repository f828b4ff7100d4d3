"""DeepEP (MIT): exchange of tokens between experts on several GPUs.

Belongs here: what it could serve. Does not belong here: exchange itself (deepinfer/parallel), which no op of ours asks
for yet.
"""

from __future__ import annotations

from deepinfer.ops.providers import Binding

BINDINGS = (
    Binding("experts", "deep_ep", always="exchanges tokens between ranks, computes no experts; no op of ours asks yet"),
)
