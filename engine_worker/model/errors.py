"""What can go wrong between a model and this worker. Each message says what happened and how to mend it."""

from __future__ import annotations


class ModelError(Exception):
    """The model can't be loaded or served here. The message says why and what to do instead."""


class GrammarFailed(Exception):
    """A request's grammar can't go on; the request fails alone. The message is a sentence for the client."""
