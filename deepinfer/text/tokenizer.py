"""Text to token ids and back, from the checkpoint's own tokenizer.json, and the token map that Engram hashes.

Belongs here: encoding, the bytes of every token, ids of the control tokens, `engram_token_map`.
Does not belong here: chat format (chat.py), incremental decoding (detokenizer.py), Engram's hash (ops/).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, decoders, normalizers
from tokenizers import Tokenizer as Backend

from deepinfer.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"


def _byte_alphabet() -> dict[int, int]:
    """Translation of byte-level BPE pieces: character -> byte; others become what Latin-1 cannot encode.

    The alphabet shows printable Latin-1 bytes as themselves and the other 68, in order, from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {0x100 + i: byte for i, byte in enumerate(hidden)} | dict.fromkeys(hidden, 0x10FFFF)


_TO_BYTE = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """The bytes that a vocabulary string stands for; an added token outside the alphabet is its own UTF-8."""
    try:
        return piece.translate(_TO_BYTE).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


class Tokenizer:
    """The tokenizer of a checkpoint folder (spec section 13). Thread-safe after construction.

    path: the folder, or its tokenizer.json. Raises CheckpointError for a missing, damaged or not byte-level
    file. `vocab_size` counts ids including added tokens; `special_ids` are the ids that `skip_special_tokens`
    drops (the file decides: `<think>` is not one of them in the V4 vocabulary); `bos_token_id` and
    `eos_token_id` are None where the vocabulary lacks the string. The image token is known by the config's
    id, never by spelling.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"no tokenizer at {file}: copy tokenizer.json into the checkpoint folder")
        try:
            self._backend = Backend.from_str(file.read_text(encoding="utf-8"))
        except Exception as exc:  # the bindings raise plain Exception for a bad file
            raise CheckpointError(f"{file} is no readable tokenizer.json ({exc}): fetch it again") from exc
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            found = type(self._backend.decoder).__name__
            raise CheckpointError(f"{file} has decoder {found}; DeepSeek-V4.1 tokenizers are ByteLevel")
        # The same merges without the added tokens: what a user wrote can never turn into a control token.
        self._plain = Backend(self._backend.model)
        self._plain.pre_tokenizer = self._backend.pre_tokenizer
        if self._backend.normalizer is not None:
            self._plain.normalizer = self._backend.normalizer

        added = self._backend.get_added_tokens_decoder()
        self.path = file
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self.token_to_id(BOS)
        self.eos_token_id = self.token_to_id(EOS)
        self.add_bos = _add_bos(file.with_name("tokenizer_config.json"))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Ids of a plain prompt, in which control tokens may be spelled out.

        add_bos: put BOS in front unless the text starts with it already; None = what tokenizer_config.json
        says (`add_bos_token`, True where absent). Raises RequestError for what is not text.
        """
        ids = self._encode(self._backend, text)
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token, whatever it spells. Never adds BOS."""
        return self._encode(self._plain, text)

    @staticmethod
    def _encode(backend: Backend, text: str) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a text prompt must be a str, not {type(text).__name__}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise RequestError(
                    f"prompt has a lone surrogate {text[exc.start]!r} at character {exc.start}, which is not "
                    "Unicode text: decode the source as UTF-8"
                ) from None
        return list(backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 show as U+FFFD; ids without a token are skipped."""
        skip: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text: maybe part of a character; b"" for an id without a token."""
        table = self._bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    @cached_property
    def _bytes(self) -> list[bytes]:
        table = [b""] * self.vocab_size
        for piece, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            table[token_id] = _piece_bytes(piece)
        return table

    def token_to_id(self, token: str) -> int | None:
        """Id of a vocabulary string such as `<｜User｜>`, None where the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Vocabulary string of an id (byte-level alphabet), None for an id without a token."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None


def _add_bos(config_file: Path) -> bool:
    if not config_file.is_file():
        return True
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        return bool(config.get("add_bos_token", True))
    except (ValueError, AttributeError) as exc:
        raise CheckpointError(f"{config_file} is not a JSON object ({exc}): fetch the file again") from exc


_LONE_SPACE = "\ue000"  # private use: keeps a text of only blanks alive through the strip
# The bindings' normalisers, not unicodedata: the map must not depend on the Unicode version of this Python.
_FOLD = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def engram_token_map(tokenizer: Tokenizer, vocab_size: int, *, num_classes: int | None = None) -> NDArray[np.int32]:
    """Token id -> compressed id, int32 [vocab_size]: tokens that differ in case, accents or blanks share one.

    Spec section 8. Ids without a token count as empty text. num_classes: the config's
    `engram_compressed_vocab_size`; raises CheckpointError when the tokenizer gives another number.
    0.5 s for 129,280 ids at load, so nothing is cached on disk.
    """
    import numpy as np

    classes: dict[str, int] = {}
    token_map = np.empty(vocab_size, dtype=np.int32)
    for token_id in range(vocab_size):
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        key = tokenizer.id_to_token(token_id) or "" if "\ufffd" in text else _FOLD.normalize_str(text) or text
        token_map[token_id] = classes.setdefault(key, len(classes))
    if num_classes is not None and len(classes) != num_classes:
        raise CheckpointError(
            f"{tokenizer.path} folds {vocab_size} ids into {len(classes)} classes, but config.json says "
            f"engram_compressed_vocab_size = {num_classes}: config and tokenizer are of different models"
        )
    return token_map
