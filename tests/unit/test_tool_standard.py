"""LangChain's standard tests of a tool, on `ReadLongDocument`."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import ToolsIntegrationTests
from langchain_tests.unit_tests import ToolsUnitTests
from support.scripts import make_document

from langchain_memagent.read_long_document import ReadLongDocument

QUESTIONS = ["What is the key of harbor?", "What is the key of castle?"]


class ToolSettings:
    """The settings of the tool for both suites."""

    @pytest.fixture(autouse=True)
    def _reader(self, make_reader) -> None:
        self.reader = make_reader()

    @property
    def tool_constructor(self) -> type[ReadLongDocument]:
        return ReadLongDocument

    @property
    def tool_constructor_params(self) -> dict[str, Any]:
        return {"agent": self.reader, "roots": ["."], "max_questions": 3}

    @property
    def tool_invoke_params_example(self) -> dict[str, Any]:
        return {"questions": QUESTIONS, "text": make_document({0.5: "The key of harbor is 4711."}, words=600)}


class ToolWithPolicyAttributes(ReadLongDocument):
    """Has an attribute for the suite, which compares only attributes of the tool itself."""

    @property
    def server_and_model(self) -> tuple[str, str]:
        policy: Any = self.agent.policy
        return policy.base_url, policy.name


class TestReadLongDocumentUnit(ToolSettings, ToolsUnitTests):
    @property
    def tool_constructor(self) -> type[ReadLongDocument]:
        return ToolWithPolicyAttributes

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        environment = {
            "OPENAI_BASE_URL": "http://localhost:8123/v1",
            "OPENAI_API_KEY": "a-key",
            "MEMAGENT_MODEL": "a-model",
            "MEMAGENT_TOKENIZER": "embedded",
        }
        return environment, {}, {"server_and_model": ("http://localhost:8123/v1", "a-model"), "max_questions": 8}


class TestReadLongDocumentIntegration(ToolSettings, ToolsIntegrationTests):
    pass
