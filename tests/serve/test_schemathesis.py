"""Requests invented from the server's own schema: nothing breaks it, and it answers as it says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # now: Python 3.11 may fail to parse it beside a server's threads
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serve_fakes import WordEmbedder
from server import TARGET, FakeSupervisor, Served, served
from waiting import wait_for

from moedraft.learning_state import waiting
from moedraft.serve.supervisor.supervisor import TrainerState

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moedraft.system.build.Embedder", lambda source, **_: WordEmbedder())
        options = {
            "supervisor": FakeSupervisor(TrainerState(waiting(""))),
            "max_output_tokens": 32,
            "max_n": 4,
        }
        with served(tmp_path_factory.mktemp("tiny"), **options) as found:
            yield found


@pytest.fixture(scope="module")
def api(tiny: Served) -> Any:
    return schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")


BOUNDED = settings(
    max_examples=int(os.environ.get("SCHEMA_EXAMPLES", "12")),  # of each route and kind
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_breaks_the_server(api: Any, tiny: Served, mode: GenerationMode) -> None:
    """Whatever fits the schema, and whatever does not. pytest's own loop over operations is left out:
    it reaches into pytest's inside, which has changed."""
    called: dict[str, int] = {}
    for operation in [result.ok() for result in api.get_all_operations()]:

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=mode))
        def no_case_does(case: Case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = TARGET  # else nothing would ever come as far as the engine
            case.call_and_validate(checks=CHECKS, timeout=20)
            called[case.operation.label] = called.get(case.operation.label, 0) + 1

        with contextlib.suppress(Unsatisfiable):  # nothing to do wrong, where nothing is taken
            no_case_does()
        assert tiny.worker.snapshot().failed is None
    assert mode != GenerationMode.POSITIVE or tiny.worker.snapshot().tokens_total > 0
    assert called["POST /v1/completions"] > 5
    assert called["POST /admin/domains"] > 5


def test_the_server_lives_after_all_that(tiny: Served) -> None:
    wait_for(tiny.idle)
    with tiny.client() as client:
        assert client.get("/ready").json() == {"status": "ready"}
        row = {"model": TARGET, "prompt": "1 2", "max_tokens": 3}
        assert client.post("/v1/completions", json=row).status_code == 200


def test_the_schema_names_every_route(api: Any) -> None:
    paths = set(api.raw_schema["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/admin/domains", "/metrics"} <= paths
    assert "/login" not in paths
    completions = api.raw_schema["paths"]["/v1/completions"]["post"]["responses"]
    assert set(completions) == {"200", "default"}
    assert set(completions["200"]["content"]) == {"application/json", "text/event-stream"}
