"""From a request to block keys: render, tokenize piece by piece, hash. See service.PrefixService."""

from gateway.prefix.service import PrefixService, PrefixStats, Space
from gateway.prefix.source import PromptSource

__all__ = ["PrefixService", "PrefixStats", "PromptSource", "Space"]
