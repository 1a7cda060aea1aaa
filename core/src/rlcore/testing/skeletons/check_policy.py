"""The client keeps its contract."""

from collections.abc import Mapping
from typing import Any

from rlcore.testing.policy import PolicyClientConformance
from rlcore.testing.skeletons.policy import Skeleton


class TestSkeleton(PolicyClientConformance):
    """Against a server that answers, fails, hangs and talks nonsense."""

    client = Skeleton

    def options_for(self, url: str) -> Mapping[str, Any]:
        """Where the server is."""
        return {"base_url": url}

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the server says to a good request."""
        assert body["messages"] == [{"role": "user", "content": "hello"}]
        return {"text": "hello", "finish_reason": "stop"}
