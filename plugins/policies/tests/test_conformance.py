"""Both clients pass the kit that every third party's client is measured with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rlcore.testing.policy import PolicyClientConformance
from rlcore_policies.chat import OpenAIClient
from rlcore_policies.native import SGLangClient


class TestOpenAI(PolicyClientConformance):
    client = OpenAIClient

    def options_for(self, url: str) -> Mapping[str, Any]:
        return {"base_url": f"{url}/v1", "model": "m"}

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}]}


class TestSGLang(PolicyClientConformance):
    client = SGLangClient
    folder: Path

    @pytest.fixture(autouse=True)
    def tokenizer(self, toy_folder: Path) -> None:
        type(self).folder = toy_folder

    def options_for(self, url: str) -> Mapping[str, Any]:
        return {"base_urls": [url], "tokenizer": str(self.folder)}

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        entries = [[-0.5, 7, None], [-0.25, 8, None]]
        return {
            "output_ids": [7, 8],
            "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries, "weight_version": "1"},
        }
