"""The text encoder: words of the scenes' vocabulary to the context that the UNet attends to.

Prompts are cut into chunks of 75 words; every chunk is `<start> words <end> <end> ...`, 77 tokens, encoded
alone, and the chunks are concatenated along the tokens, as ComfyUI and the WebUIs do with CLIP. The empty
prompt is the unconditional one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .scenes import WORDS

CHUNK = 77  # tokens, as CLIP's
START, END = 0, 1
_FIRST_WORD = 2
_IDS = {word: index + _FIRST_WORD for index, word in enumerate(WORDS)}
_LIST = ", ".join(WORDS)
VOCABULARY_SIZE = len(WORDS) + _FIRST_WORD


class UnknownWord(ValueError):
    """A prompt holds a word that the model was never taught."""

    def __init__(self, word: str) -> None:
        near = difflib.get_close_matches(word, WORDS, n=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"The demo model does not know the word {word!r}.{hint} It knows: {_LIST}.")


def tokenize(prompt: str, ignore_unknown: bool = False) -> Tensor:
    """Token ids [chunks, 77] int64 of one prompt; case, digits and punctuation are ignored.

    Raises:
        UnknownWord: On a word outside `WORDS`, unless `ignore_unknown`, which leaves it out.
    """
    ids = []
    for word in re.findall(r"[^\W\d_]+", prompt.lower()):
        if word in _IDS:
            ids.append(_IDS[word])
        elif not ignore_unknown:
            raise UnknownWord(word)
    room = CHUNK - 2
    chunks = [ids[start : start + room] for start in range(0, max(len(ids), 1), room)]
    return torch.tensor([[START, *chunk, *[END] * (CHUNK - 1 - len(chunk))] for chunk in chunks])


class TextEncoder(nn.Module):
    """Word and position embeddings, then a few transformer layers.

    Words attend to words and to the first end mark, never to the filling after it, so that what a word means
    does not depend on how much of the chunk is empty.
    """

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Parameter(torch.randn(CHUNK, width) * 0.02)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, 77] to context [B, 77, width]."""
        filling = (ids == END) & (ids.roll(1, 1) == END)
        x = self.words(ids.long()) + self.positions
        for layer in self.layers:
            x = layer(x, ~filling[:, None, None, :])
        normed: Tensor = self.norm(x)
        return normed

    @torch.no_grad()
    def encode(self, prompts: str | Sequence[str], ignore_unknown: bool = False) -> Tensor:
        """Context [B, 77 * k, width] of prompts; shorter ones are filled up with empty chunks."""
        batch = [tokenize(p, ignore_unknown) for p in ([prompts] if isinstance(prompts, str) else prompts)]
        chunks = max(len(ids) for ids in batch)
        empty = tokenize("")
        ids = torch.stack([torch.cat([ids, empty.repeat(chunks - len(ids), 1)]) for ids in batch])
        context: Tensor = self(ids.flatten(0, 1).to(self.positions.device))
        joined: Tensor = context.unflatten(0, (len(batch), chunks)).flatten(1, 2)
        return joined


class _Layer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result
