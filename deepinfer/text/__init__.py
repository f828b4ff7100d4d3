"""Text in and text out: tokenizer, chat format, images, detokenizer, batch files.

Belongs here: everything between what a user writes and token ids or pixel patches, and back again.
Does not belong here: the model, the engine, sampling. Nothing here imports torch at module level.
"""

from deepinfer.text.detokenizer import Detokenizer, StopChecker
from deepinfer.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopChecker", "Tokenizer"]
