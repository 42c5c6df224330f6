"""A language model: an LSTM that predicts the next byte of a text.

The text is any file; without one, the manual that ships with CPython (pydoc_data.topics), which differs a little
from version to version. It is cut into windows of equal length; nine in ten are trained on, the last tenth is held
out. Each window starts from a state of zeros, so a job needs no more than its place in the order of the windows to
go on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hpctk.errors import HpctkError
from hpctk.tasks.core.settings import LanguageModelSettings
from hpctk.tasks.core.task import ShuffledTask

BYTES = 256
#: One window in so many is held out: those at the end of the text.
TEST_SHARE = 10
#: Windows that are looked at together, and at most, when a model is evaluated.
AT_ONCE, AT_MOST = 64, 1024


class Reader(torch.nn.Module):
    """Embedding, LSTM, and a score for each next byte."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(BYTES, 64)
        self.lstm = torch.nn.LSTM(64, hidden, batch_first=True)
        self.scores = torch.nn.Linear(hidden, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of the byte after each."""
        states, _ = self.lstm(self.embedding(text))
        scores: torch.Tensor = self.scores(states)
        return scores


class LanguageModel(ShuffledTask[LanguageModelSettings]):
    """Predict the next byte."""

    settings_class = LanguageModelSettings
    # Clipped at the norms that the gradient of an LSTM has here.
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {"celgc": {"clip": 0.5, "period": 8}}

    def load(self) -> None:
        """Read the text and cut it."""
        text = manual() if self.settings.data is None else Path(self.settings.data).read_bytes()
        # A window needs the byte after its end, which is the first of the next one.
        n = (len(text) - 1) // self.settings.window
        if n < TEST_SHARE:
            raise HpctkError(
                f"{self.settings.data}: {len(text)} bytes, need at least {TEST_SHARE * self.settings.window + 1} for "
                f"windows of {self.settings.window}"
            )
        self.text = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        self.samples = n - n // TEST_SHARE
        self.windows = n

    def make_model(self) -> torch.nn.Module:
        """Return the network."""
        return Reader(self.settings.hidden)

    def pick(self, indices: torch.Tensor) -> torch.Tensor:
        """Return windows, each with the byte after its end."""
        window = self.settings.window
        return self.text[(indices * window).unsqueeze(1) + torch.arange(window + 1)]

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the cross entropy of each next byte, in nats."""
        return torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return bits per byte, and the perplexity of a byte, on the held-out text."""
        places = torch.arange(self.samples, min(self.windows, self.samples + AT_MOST))
        total = 0.0
        with torch.no_grad():
            for part in places.split(AT_ONCE):
                total += float(self.loss(model, self.pick(part))) * len(part)
        nats = total / len(places)
        return {"bits per byte": nats / math.log(2), "perplexity": math.exp(min(nats, 700.0))}


def manual() -> bytes:
    """Return the text that ships with CPython."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise HpctkError("this Python has no pydoc_data: give a text file by --data FILE") from None
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
